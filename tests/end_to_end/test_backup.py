"""A store is backed up in the middle of traffic and put back later: clients are told what is gone, and never shown
other events (promises 2 to 4). Real servers, real commands, each in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cli.test_sessions import lines
from tests.support.serving import TOOLBOX, Served, serving
from tests.support.wire import Web, gaps_of, notices_of, progress_of, text_of

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def site(store: str) -> AsyncIterator[tuple[Served, Web]]:
    async with serving(TOOLBOX, "--store", store) as served:
        web = Web(served.url)
        try:
            yield served, web
        finally:
            await web.aclose()


def put_in_place(backup: Path, path: Path) -> None:
    """As an operator does it: what was there goes aside, with its log."""
    for beside in ("", "-wal", "-shm"):
        if (left := Path(f"{path}{beside}")).exists():
            left.rename(f"{left}.aside")
    shutil.copy(backup, path)


async def is_sound(folder: Path, store: str) -> bool:
    return (await lines(folder, "check", "--store", store))[-1] == "sound     yes"


async def test_clients_that_come_back_to_a_restored_store_are_told_what_is_gone(tmp_path: Path) -> None:
    """The store went on after the backup, with another writer: what clients have seen of that is not taken for what the
    restored store writes, although it has the same numbers."""
    path, backup = tmp_path / "perdure.db", tmp_path / "backup.db"
    store = f"sqlite:{path}"
    async with site(store) as (served, web):
        peer = await web.join()
        standalone = await peer.get()
        call = await peer.call("count", n=6, gate="g", pauses=[2], token=1)
        assert await peer.result("announce", n=2) == "announced 2"
        assert notices_of(await standalone.messages(2)) == [1, 2]
        assert progress_of(await call.messages(2)) == [1, 2]
        assert (await lines(tmp_path, "backup", str(backup), "--store", store))[0].startswith(f"{store} is copied to ")
        assert await is_sound(tmp_path, store)
        assert await peer.result("open_gate", name="g/2") == "opened g/2"
        assert text_of((await call.rest())[-1]) == "counted to 6"
        await standalone.drop()
        await served.kill()
    async with site(store) as (served, web):
        there = peer.through(web)
        resumed = await there.get(standalone.last_id)
        assert await there.result("announce", n=4, start=3) == "announced 4"
        assert notices_of(await resumed.messages(4)) == [3, 4, 5, 6]
        await resumed.drop()
        await served.stop()
    put_in_place(backup, path)
    async with site(store) as (served, web):
        back = peer.through(web)
        assert await back.result("announce", n=3, start=101) == "announced 3"
        again = await back.get(resumed.last_id)
        told = await again.messages(4)
        assert (gaps_of(told), notices_of(told)) == ([(3, 6)], [101, 102, 103])
        assert await back.result("open_gate", name="g/2") == "opened g/2"
        seen = await (await back.get(call.last_id)).rest()
        assert (len(gaps_of(seen)), text_of(seen[-1])) == (1, "counted to 6")
        assert await is_sound(tmp_path, store)
        await served.stop()
    assert await is_sound(tmp_path, store)
    assert await is_sound(tmp_path, f"sqlite:{backup}")
