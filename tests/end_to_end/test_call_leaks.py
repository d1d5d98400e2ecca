"""After calls of 2026-07-28 have ended and their time has passed, memory and rows go back.

Many come: with keys and with handles, parked with a question, cut, joined, hammered by pollers, with large results.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from perdure.http.durable_calls import CallReader
from perdure.http.request import ModernRequest
from perdure.log.reader import Reader
from perdure.log.stream import Stream
from perdure.runtime.sdk import CallRuntime
from perdure.sessions.ledger import Call
from perdure.sessions.session import Session
from tests.end_to_end.test_leaks import rows
from tests.support.clients.modern_peer import ALL_ASKS, TAKES_TASKS, CallPeer, accept, result_of, said
from tests.support.servers.asking_tools import server
from tests.support.servers.gated_server import live
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

CALLS = 60
AT_ONCE = 20
LARGE = 200_000

OURS: tuple[type[Any], ...] = (
    Session, Stream, Reader, Call, CallRuntime, CallReader, ModernRequest, HttpRequest,
)  # fmt: skip


def alive() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, OURS))


async def test_calls_that_are_over_leave_nothing_behind(tmp_path: Path) -> None:
    before = alive()
    path = tmp_path / "log.db"
    settings: dict[str, Any] = {"replay_window": 4.0, "cleanup_interval": 0.1, "task_hold": 0.5, "task_after": 0.05}
    async with live(server=server, store=f"sqlite:{path}", **settings) as served:
        peer = CallPeer(port=served.port, capabilities={**ALL_ASKS, **TAKES_TASKS})
        for start in range(0, CALLS, AT_ONCE):
            await asyncio.gather(*(live_and_leave(peer, number) for number in range(start, start + AT_ONCE)))
        await until(lambda: not any(rows(path).values()))
        await until(lambda: not alive() - before)


async def live_and_leave(peer: CallPeer, number: int) -> None:
    """One call's life; how it goes depends on its number."""
    await [_be_large, _park_and_answer, _park_and_cancel, _be_cut, _go_by_rounds][number % 5](peer, f"key-{number}")


async def _be_large(peer: CallPeer, key: str) -> None:
    arguments = {"size": LARGE}
    calls = [peer.call("fill", arguments, key=key, capabilities={}) for _ in range(3)]
    assert {len(said(result_of(answer))) for answer in await asyncio.gather(*calls)} == {LARGE}


async def _park_and_answer(peer: CallPeer, key: str) -> None:
    task = result_of(await peer.call("ask", {"question": "Well?"}, key=key))["taskId"]
    asked = await peer.until_asked(task)
    await asyncio.gather(*(peer.get(task) for _ in range(5)))
    await peer.update(task, {name: accept(answer="yes") for name in asked})
    assert {view["status"] for view in await asyncio.gather(*(peer.until_over(task) for _ in range(5)))} == {
        "completed"
    }


async def _park_and_cancel(peer: CallPeer, key: str) -> None:
    task = result_of(await peer.call("wait", {"gate": "/never"}))["taskId"]
    await peer.cancel(task)
    assert (await peer.until_over(task))["status"] == "cancelled"


async def _be_cut(peer: CallPeer, key: str) -> None:
    """Without a key and a handle: its client has cancelled it by that."""
    async with await peer.begin_call("wait", {"gate": "/never"}, capabilities=ALL_ASKS) as exchange:
        exchange.cut()


async def _go_by_rounds(peer: CallPeer, key: str) -> None:
    plain = CallPeer(port=peer.port, capabilities=ALL_ASKS)
    arguments = {"question": "Well?"}
    asked = result_of(await plain.call("ask", arguments))
    responses = {name: accept(answer="yes") for name in asked["inputRequests"]}
    assert said(result_of(await plain.round("ask", asked, responses, arguments=arguments))) == "yes"
