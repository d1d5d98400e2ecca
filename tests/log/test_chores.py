"""Chores go on whatever fails in them: one bad item costs itself, and is told once."""

from __future__ import annotations

import asyncio
import logging

import pytest

from perdure._core.limits import Caller
from perdure.errors import StoreUnavailable
from perdure.log import chores
from perdure.log.chores import MOST_TOLD, Chores, keep_going
from perdure.log.reader import Reader
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.dead_node import life_of

pytestmark = pytest.mark.anyio


def _levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if vars(record).get("action") == "chore.failed"]


async def test_what_fails_in_each_round_is_told_once_and_again_after_it_worked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="perdure")
    kept = Chores()
    for works in (False, False, True, False):
        with kept.surviving("a row could not be read", "row"):
            assert works
    assert _levels(caplog) == ["ERROR", "DEBUG", "ERROR"]


async def test_a_failing_store_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Chores().surviving("a row could not be read"):
        raise StoreUnavailable
    assert _levels(caplog) == ["WARNING"]


@pytest.mark.parametrize(("before", "level"), [(MOST_TOLD - 1, "ERROR"), (MOST_TOLD, "DEBUG")])
async def test_no_more_failing_items_are_remembered_than_the_limit(
    caplog: pytest.LogCaptureFixture, before: int, level: str
) -> None:
    caplog.set_level(logging.DEBUG, logger="perdure")
    kept = Chores()
    for item in range(before + 1):
        with kept.surviving("a row could not be read", item):
            raise ValueError
    assert _levels(caplog)[-1] == level


async def test_cancelling_a_chore_ends_it() -> None:
    async def chore() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(keep_going(chore))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_chore_that_breaks_down_says_so_and_begins_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chores, "AGAIN", 0.0)
    runs: list[int] = []

    async def chore() -> None:
        runs.append(len(runs))
        if len(runs) < 3:
            raise ZeroDivisionError

    await keep_going(chore)
    assert runs == [0, 1, 2]
    assert _levels(caplog) == ["ERROR"]


async def test_a_session_that_cannot_be_looked_after_does_not_keep_others_from_rest() -> None:
    """One session's parts are broken; the one behind it in the round is put to rest all the same."""
    async with serve(ToolServer().server, session_grace=1.0, complaint="could not be looked after") as site:
        broken, _ = await site.join(), await site.join()
        [session] = [session for session in life_of(site).sessions if session.id == broken.session]
        whole = session.retained
        session.retained = None  # type: ignore[assignment]
        await until(lambda: site.app.session_ids() == [broken.session])
        session.retained = whole
        await until(lambda: site.app.session_ids() == [])


class _Broken(Reader):
    """A reader that cannot be looked at."""

    def end_if_stuck(self, before: float) -> None:
        raise ZeroDivisionError


async def test_a_reader_that_cannot_be_looked_after_does_not_keep_others_from_their_comments() -> None:
    async with serve(ToolServer().server, keepalive_interval=0.1, complaint="a reader could not") as site:
        peer, life = await site.join(), life_of(site)
        [session] = life.sessions
        hub = life.context.hub
        broken = _Broken(hub, session.standalone, session, cursor=0, arrival=hub.arrive(), caller=Caller("ann"))
        life.context.hub.readers.add(broken)
        wire = await peer.get()
        await wire.comment("keep-alive")
        await wire.comment("keep-alive")
        life.context.hub.readers.discard(broken)
