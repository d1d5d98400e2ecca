"""A process that stands still is not dead; and one that lost a call meanwhile has no say in it any more."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from perdure._core.ids import parse_position
from perdure._core.states import CallState
from perdure.store.interface import stream_by_id
from perdure.store.records import Event
from perdure.store.steps import Append, CallEnd
from tests.support.clients.wire_client import Peer, Web, progress_of, text_of
from tests.support.processes.serving import BASIC_TOOLS, Served, serving
from tests.support.stores.dead_node import DeadNode
from tests.support.stores.shared_store import ON_POSTGRES, shared_address

pytestmark = pytest.mark.anyio


def store(path: Path) -> tuple[str, str]:
    return ("--store", shared_address(path))


async def open_gate(peer: Peer, name: str) -> None:
    assert await peer.result("open_gate", name=name) == f"opened {name}"


async def has_met(web: Web, rounds: int = 3) -> None:
    """The other process has looked who lives, so many times."""
    peer = await web.join()
    for _ in range(rounds * 10):
        await peer.result("open_gate", name="none")


def pause(served: Served) -> None:
    os.kill(served.pid, signal.SIGSTOP)


def go_on(served: Served) -> None:
    os.kill(served.pid, signal.SIGCONT)


async def test_a_paused_process_keeps_its_call_and_goes_on_with_it(tmp_path: Path) -> None:
    """The lock of a process that stands still is held, however short the lease: there is none on one machine. On a
    store that machines share it stands still for less than its lease."""
    path = tmp_path / "log.db"
    options = (*store(path), "--lease", "60s" if ON_POSTGRES else "1s")
    async with serving(BASIC_TOOLS, *options) as paused, serving(BASIC_TOOLS, *options) as other:
        web, second = Web(paused.url), Web(other.url)
        peer = await web.join()
        wire = await peer.call("count", n=4, gate="g", pauses=[2], token=1)
        messages = await wire.messages(2)
        pause(paused)
        try:
            reader = await peer.through(second).get(wire.last_id)
            await has_met(second)
        finally:
            go_on(paused)
        await open_gate(peer, "g/2")
        messages += await reader.rest()
        assert progress_of(messages) == [1, 2, 3, 4]
        assert text_of(messages[-1]) == "counted to 4"
        assert not any("died" in line for line in other.output)
        assert not any("lapsed" in line or "buried" in line for line in paused.output)
        await web.aclose()
        await second.aclose()


async def test_a_call_that_was_claimed_meanwhile_is_the_claimers(tmp_path: Path) -> None:
    """The fence: after the pause nothing more is written, the tool is stopped, the reader is ended and resumes to the
    other's answer."""
    path = tmp_path / "log.db"
    async with serving(BASIC_TOOLS, *store(path)) as paused:
        web = Web(paused.url)
        peer = await web.join()
        wire = await peer.call("count", n=4, id=7, gate="g", pauses=[2], token=1)
        await wire.messages(2)
        position = parse_position(wire.last_id)
        assert position is not None
        dead_node = await DeadNode.on(path)
        pause(paused)
        try:
            await _answer(dead_node, position.stream)
        finally:
            go_on(paused)
        assert await wire.rest() == []
        [answer] = await (await peer.get(wire.last_id)).rest()
        assert answer == {"jsonrpc": "2.0", "id": 7, "result": {"by": "another"}}
        await open_gate(peer, "g/2")  # the tool was cancelled: nobody goes through
        events = await dead_node.store.read(position.stream, after=0, limit=100)
        assert [event.seq for event in events] == [1, 2, 3]
        assert [event.final for event in events] == [False, False, True]
        await dead_node.die()
        await web.aclose()


async def _answer(dead_node: DeadNode, stream: object) -> None:
    """Claim a stream, and give its one call an answer."""
    record = await stream_by_id(dead_node.store, stream)  # type: ignore[arg-type]
    assert record is not None
    claimed = await dead_node.store.claim(record.id, node=dead_node.node, held=record.fence)
    assert claimed is not None
    assert claimed.generation == 2
    [row] = await dead_node.store.calls(record.session, stream=record.id)
    payload = json.dumps({"jsonrpc": "2.0", "id": 7, "result": {"by": "another"}}).encode()
    end = CallEnd(incarnation=row.incarnation, request_id=row.request_id, state=CallState.ANSWERED)
    events = (Event(claimed.last + 1, claimed.opened, payload, True),)
    step = Append(stream=record.id, fence=claimed.fence, events=events, ends=(end,), seal=True)
    assert not any(await dead_node.store.commit([step]))
