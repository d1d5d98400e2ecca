"""Two releases at once on one PostgreSQL schema, as in a rolling deployment: real processes of both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import pytest

from perdure.store.postgres.layout import VERSION
from tests.cli.test_sessions import ended
from tests.support.clients.wire_client import Web, progress_of, text_of
from tests.support.processes.serving import BASIC_TOOLS, serving
from tests.support.processes.starting import ROOT, start_other
from tests.support.servers.in_process import until
from tests.support.stores.next_release import NEXT, build
from tests.support.stores.postgres import new_schema, server_url, store_url

pytestmark = [pytest.mark.anyio, pytest.mark.long]


async def look(statement: str) -> list[tuple[object, ...]]:
    operator = await asyncpg.connect(server_url().partition("?")[0])
    try:
        return [tuple(row) for row in await operator.fetch(statement)]
    finally:
        await operator.close()


async def test_calls_move_between_two_releases_while_one_replaces_the_other(tmp_path: Path) -> None:
    """Promises 1, 2 and 3: the schema is migrated under the old process, which goes on with its own functions."""
    schema = new_schema()
    options = ("--store", store_url(schema), "--store-timeout", "20s")
    release = (*build(tmp_path), "serve")
    async with serving(BASIC_TOOLS, *options) as old:
        first = Web(old.url)
        peer = await first.join()
        wire = await peer.call("count", n=4, gate="g", pauses=[2], token=1)
        seen = await wire.messages(2)
        assert await look(f"SELECT version, oldest FROM {schema}.version") == [(VERSION, VERSION)]
        async with serving(BASIC_TOOLS, *options, argv=release) as new:
            assert await look(f"SELECT version, oldest FROM {schema}.version") == [(NEXT, VERSION)]
            second = Web(new.url)
            there = peer.through(second)
            # A call of the old process, read at the new one.
            reader = await there.get(wire.last_id)
            await peer.result("open_gate", name="g/2")
            seen += await reader.rest()
            assert progress_of(seen[:-1]) == [1, 2, 3, 4]
            assert text_of(seen[-1]) == "counted to 4"
            # A call of the new process, read at the old one; then the new one is killed, and the old one settles it.
            wire = await there.call("count", n=4, gate="h", pauses=[2], token=2)
            seen = await wire.messages(2)
            reader = await peer.get(wire.last_id)
            await peer.result("open_gate", name="h/2")
            await new.kill()
            seen += await reader.rest()
            assert progress_of(seen[:-1]) == [1, 2, 3, 4]
            assert text_of(seen[-1]) == "counted to 4"
            assert await look(f"SELECT count(*) > 0 FROM {schema}.made") == [(True,)]
            await second.aclose()
        async with serving(BASIC_TOOLS, *options) as again:  # back to the old release
            third = Web(again.url)
            assert await peer.through(third).result("open_gate", name="none") == "opened none"
            await third.aclose()
        await first.aclose()


async def test_a_migration_that_has_to_wait_keeps_no_call_waiting(tmp_path: Path) -> None:
    """A backup reads a table that the migration changes. The old process answers until it is over, and afterwards."""
    schema = new_schema()
    options = ("--store", store_url(schema), "--store-timeout", "20s")
    release = (*build(tmp_path), "serve")
    backup = await asyncpg.connect(server_url().partition("?")[0])
    waits = f"SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%ALTER TABLE {schema}.%'"
    async with serving(BASIC_TOOLS, *options) as old:
        web = Web(old.url)
        peer = await web.join()
        reading = backup.transaction()
        await reading.start()
        await backup.fetch(f"SELECT 1 FROM {schema}.stream")

        async def start_new() -> None:
            async with serving(BASIC_TOOLS, *options, argv=release):
                pass

        starting = asyncio.create_task(start_new())
        for _ in range(2):  # it has given up once, and tries again
            await until(lambda: look(waits))
            assert await peer.result("open_gate", name="none") == "opened none"
            await until(lambda: is_empty(waits))
        assert not starting.done()
        assert await look(f"SELECT version FROM {schema}.version") == [(VERSION,)]
        await reading.commit()
        await starting
        assert await look(f"SELECT version FROM {schema}.version") == [(NEXT,)]
        assert await peer.result("open_gate", name="none") == "opened none"
        await web.aclose()
    await backup.close()


async def is_empty(statement: str) -> bool:
    return not await look(statement)


async def test_a_release_refuses_by_name_what_a_later_one_has_made_without_it(tmp_path: Path) -> None:
    schema = new_schema()
    url = store_url(schema)
    release = build(tmp_path, oldest=NEXT)
    status, said, _ = await ended(await start_other(*release, "store", "init", url, cwd=ROOT))
    assert (status, said) == (0, f"{url} is made, in version {NEXT}\n")
    made = await look(f"SELECT version, oldest FROM {schema}.version")
    assert made == [(NEXT, NEXT)]
    for command in (["serve", BASIC_TOOLS, "--port", "0", "--store", url], ["store", "migrate", url]):
        status, said, errors = await ended(await start_other(*release[2:], *command, cwd=ROOT))
        assert (status, said) == (2, "")
        assert errors.count("\n") == 1
        assert f"schema {schema} of {url} has version {NEXT}, written by a newer release" in errors
        assert f"this one knows versions up to {VERSION}" in errors
    assert await look(f"SELECT version, oldest FROM {schema}.version") == made
