"""The bridge is killed at named points, and the next instance finds the session, and the truth about what ran (T10)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stdio.served_hosts import FIRST, RESUMED, ServedHost, sentences, serving_host
from tests.stdio.stdio_bridges import HostedBridge, Message

pytestmark = pytest.mark.anyio


def at(module: str, qualname: str, edge: str, nth: int = 1) -> Message:
    return {"module": f"perdure.{module}", "qualname": qualname, "edge": edge, "nth": nth}


#: Met by an instance that resumes.
WHILE_RESUMING = {
    "before the token is offered": at("stdio.resume_slot", "Slot.token", "leave"),
    "after the broker rotated, before the token is written": at("stdio.resume_slot", "Slot.keep", "enter"),
    "between writing and confirming": at("stdio.resume_slot", "Slot.keep", "leave"),
    "after confirming, before the reattach": at("remote.link", "Link.begin", "enter"),
    "after the reattach, before the host knows": at("stdio.state_files", "PositionsFile.recall", "leave"),
    "before the answer to initialize is written": at("stdio.pipes", "Output._write", "enter"),
    "when the answer to initialize is written": at("stdio.pipes", "Output._write", "leave"),
}

#: Met by the first instance of all. Until its token is on disk, no process finds the session again.
WHILE_BEGINNING = {
    "before the first token is written": (at("stdio.resume_slot", "Slot.keep", "enter"), False),
    "between writing the first token and confirming it": (at("stdio.resume_slot", "Slot.keep", "leave"), True),
}

#: Met while a request of the host is on its way, with what the next instance reports of it.
IN_FLIGHT = {
    "before it is sent": (at("remote.call", "Call.answer", "enter"), "unknown"),
    "when its stream has begun": (at("stdio.state_files", "PositionsFile.move_call", "leave"), "counted to 1"),
    "when it is answered, before the host has the answer": (
        at("remote.message", "Message.answering", "enter", 2),
        "counted to 1",
    ),
}


@pytest.mark.parametrize("name", WHILE_RESUMING)
async def test_killed_while_it_resumes(folder: Path, name: str) -> None:
    async with serving_host(folder) as hosted:
        await (await hosted.host.session()).kill()
        await _dies(hosted, WHILE_RESUMING[name])
        await _goes_on(hosted)
        assert len(hosted.sessions) == 1


@pytest.mark.parametrize("name", WHILE_BEGINNING)
async def test_killed_while_it_begins(folder: Path, name: str) -> None:
    point, is_kept = WHILE_BEGINNING[name]
    async with serving_host(folder) as hosted:
        await _dies(hosted, point)
        after = await hosted.host.session()
        assert await sentences(after) == [RESUMED if is_kept else FIRST]
        assert await after.call("count", n=1) == "counted to 1"
        assert len(hosted.sessions) == (1 if is_kept else 2)


@pytest.mark.parametrize("name", IN_FLIGHT)
async def test_killed_while_a_request_is_in_flight(folder: Path, name: str) -> None:
    point, outcome = IN_FLIGHT[name]
    async with serving_host(folder) as hosted:
        first = await hosted.host.start(point=point)
        await first.handshake()
        first.begin_call("count", n=1)
        assert await first.wait() == -9
        after = await _goes_on(hosted)
        await after.until(lambda: len(after.reports()) == 1, "a report")
        [report] = after.reports()
        found = report["error"]["data"]["outcome"] if "error" in report else report["result"]["content"][0]["text"]
        assert (report["tool"], found) == ("count", outcome)
        assert len(hosted.sessions) == 1


async def _dies(hosted: ServedHost, point: Message) -> None:
    bridge = await hosted.host.start(point=point)
    bridge.begin(
        "initialize",
        {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "host", "version": "1"}},
    )
    assert await bridge.wait() == -9


async def _goes_on(hosted: ServedHost) -> HostedBridge:
    after = await hosted.host.session()
    assert (await sentences(after))[0] == RESUMED
    assert await after.call("count", n=2) == "counted to 2"
    return after
