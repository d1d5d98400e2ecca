"""Early answers over the deaths of processes: an id that was given out resolves, in both eras, and no tool runs twice
that may not."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.http.test_early_answers import CANCEL, WAIT
from tests.support.clients.modern_peer import CallPeer, message_of
from tests.support.clients.recording_client import assert_answered_once, assert_sound, settled
from tests.support.clients.wire_client import Ended, Message, Peer, Web, text_of
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.crash_points import POSTGRES_WRITER, STEPS, at
from tests.support.processes.serving import Served, serving
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import ON_POSTGRES, shared_address

pytestmark = pytest.mark.anyio

STEP_TOOLS = "tests.support.servers.step_tools:server"
RULE = ("--answer-within", "1s", "--retry", "100ms")
LOST = (httpx2.TransportError, ConnectionError, Ended, IndexError, KeyError, ValueError)
"""The process died before it answered, or while it did."""


class InSession:
    """A client of a session."""

    def __init__(self, web: Web, peer: Peer, position: str = "") -> None:
        self._web = web
        self._peer = peer
        self._position = position

    @classmethod
    async def at(cls, server: Served) -> InSession:
        return cls(web := Web(server.url), await web.join())

    def through(self, server: Served) -> InSession:
        return InSession(web := Web(server.url), self._peer.through(web), self._position)

    async def call(self, tool: str, /, **arguments: Any) -> Message:
        wire = await self._peer.call(tool, **arguments)
        self._position = (await wire.event()).id or ""
        return (await wire.rest())[-1]

    async def resume(self) -> Message | None:
        """The response to the last request, which may have been lost on its way."""
        return (await (await self._peer.get(self._position)).rest())[-1] if self._position else None

    async def aclose(self) -> None:
        await self._web.aclose()


class Modern:
    """A client of 2026-07-28, which is answered or not."""

    def __init__(self, peer: CallPeer) -> None:
        self._peer = peer

    @classmethod
    async def at(cls, server: Served) -> Modern:
        return cls(CallPeer(port=server.port))

    def through(self, server: Served) -> Modern:
        return Modern(self._peer.through(server.port))

    async def call(self, tool: str, /, **arguments: Any) -> Message:
        return message_of(await self._peer.call(tool, arguments))

    async def resume(self) -> Message | None:
        return None

    async def aclose(self) -> None:
        pass


ERAS: dict[str, type[InSession | Modern]] = {"session": InSession, "2026-07-28": Modern}


def id_in(answer: Message) -> str | None:
    found: Message = answer["result"].get("_meta", {}).get("dev.perdure/call", {})
    return found.get("id")


async def fetched(client: InSession | Modern, call: str) -> str:
    while id_in(answer := await client.call(WAIT, call=call)) is not None:
        pass
    return text_of(answer)


EARLY, BY_ID, EDGE = "perdure.sessions.early_answers", "perdure.sessions.calls_by_id", "perdure.http.event_stream"

POINTS = {
    ("session", "when the row is written and the early answer is not"): at(EARLY, "EarlyAnswers._answer", "enter"),
    ("session", "when the early answer is on its way"): at("perdure.log.reader", "Reader._send", "enter", 2),
    ("session", "when the final answer is written and the wait is not answered"): at(
        BY_ID, "CallsById.outcome", "enter"
    ),
    ("2026-07-28", "when the row is written and the early answer is not"): at(
        "perdure.sessions.session", "Session.show_to_client", "enter"
    ),
    ("2026-07-28", "when the early answer is written and not sent"): at(EDGE, "EventStream.result", "enter"),
    ("2026-07-28", "when the final answer is written and the wait is not answered"): at(
        BY_ID, "CallsById.outcome", "enter"
    ),
}
COMMIT = at(POSTGRES_WRITER, "_refusals", "enter", 2) if ON_POSTGRES else at(STEPS, "StreamSteps.append", "leave")
POINTS |= {("session", "in the commit of the early answer"): COMMIT}
LONG = {
    ("session", "when the early answer is on its way"),
    ("2026-07-28", "when the row is written and the early answer is not"),
    ("2026-07-28", "when the final answer is written and the wait is not answered"),
}


@pytest.mark.parametrize(
    ("era", "name"), [pytest.param(*one, marks=[pytest.mark.long] * (one in LONG)) for one in POINTS]
)
async def test_a_process_that_dies_on_the_way_of_an_early_answer(tmp_path: Path, era: str, name: str) -> None:
    """Promises 3 and 4. A client that resumes gets what it is owed; an id that was given out leads to the one end."""
    await die_on_the_way(shared_address(tmp_path / "log.db"), tmp_path, era, name)


@pytest.mark.skipif(ON_POSTGRES, reason="all points are met on PostgreSQL anyway")
@pytest.mark.parametrize("era", [pytest.param("session", marks=pytest.mark.long), "2026-07-28"])
async def test_a_process_that_dies_on_the_way_of_an_early_answer_on_postgres(tmp_path: Path, era: str) -> None:
    await die_on_the_way(store_url(), tmp_path, era, "when the final answer is written and the wait is not answered")


async def die_on_the_way(address: str, tmp_path: Path, era: str, name: str) -> None:
    log, gate = tmp_path / "diary", tmp_path / "gate"
    options, given = ("--store", address, *RULE), list[str]()
    async with serving(GATE_FILE_TOOLS, *options, point=POINTS[era, name]) as doomed:
        client = await ERAS[era].at(doomed)
        await client.call("pay", n=0)  # the tool list is read before the point counts
        await doomed.arm()
        try:
            first = await client.call("pay", n=0, gate=str(gate), pauses=[0], log=str(log), key="pay")
            given += filter(None, [id_in(first)])
            open_gate(f"{gate}.0")
            await fetched(client, given[0])
        except LOST:
            pass
        assert await doomed.has_died(), "the point was not reached"
        await client.aclose()
    open_gate(f"{gate}.0")
    async with serving(GATE_FILE_TOOLS, *options) as server:
        later = client.through(server)
        owed = await later.resume()
        if owed is not None and not given:
            given += filter(None, [id_in(owed)] if "result" in owed else [])
            assert given or owed["error"]["code"] == -31001 or text_of(owed) == "counted to 0"
        for call in given:
            end = await fetched(later, call)
            assert end == "counted to 0" or end.startswith("Interrupted, outcome unknown")
            assert await fetched(later, call) == end
        await settled(address)
        await later.aclose()
    assert len(diary(log)) <= 1
    assert_answered_once(address)
    assert_sound(address)


@pytest.mark.parametrize(
    ("kind", "era"),
    [
        ("sqlite", "2026-07-28"),
        ("postgres", "session"),
        pytest.param("sqlite", "session", marks=pytest.mark.long),
        pytest.param("postgres", "2026-07-28", marks=pytest.mark.long),
    ],
)
async def test_a_call_whose_process_is_killed_twice_ends_as_its_tool_allows(
    tmp_path: Path, kind: str, era: str
) -> None:
    """Promise 3: a marked tool runs again, once; the wait gets the end from the store, at the next process."""
    address = store_url() if kind == "postgres" else shared_address(tmp_path / "log.db")
    options, log, gate = ("--store", address, *RULE), tmp_path / "diary", tmp_path / "gate"
    async with serving(GATE_FILE_TOOLS, *options) as server:
        client = await ERAS[era].at(server)
        arguments = {"n": 1, "pauses": [1], "log": str(log)}
        calls = {
            key: await client.call(tool, key=key, gate=f"{gate}-{key}", **arguments)
            for key, tool in (("put", "put"), ("twice", "put"), ("pay", "pay"))
        }
        ids = {key: id_in(answer) or "" for key, answer in calls.items()}
        await server.kill()
        await client.aclose()
    async with serving(GATE_FILE_TOOLS, *options) as server:
        client = client.through(server)
        assert (await fetched(client, ids["pay"])).startswith("Interrupted, outcome unknown")
        await until(lambda: len(diary(log)) == 5)
        open_gate(f"{gate}-put.1")
        assert await fetched(client, ids["put"]) == "counted to 1"
        await server.kill()
        await client.aclose()
    async with serving(GATE_FILE_TOOLS, *options) as server:
        client = client.through(server)
        assert (await fetched(client, ids["twice"])).startswith("Interrupted, outcome unknown")
        assert await fetched(client, ids["put"]) == "counted to 1"
        assert sorted(key for key, _ in diary(log)) == ["pay", "put", "put", "twice", "twice"]
        await client.aclose()


@pytest.mark.parametrize("era", ["session", pytest.param("2026-07-28", marks=pytest.mark.long)])
async def test_a_cancellation_that_its_node_has_not_read_is_done_by_the_next(tmp_path: Path, era: str) -> None:
    options = ("--store", shared_address(tmp_path / "log.db"), *RULE)
    log = tmp_path / "diary"
    async with serving(GATE_FILE_TOOLS, *options) as doomed, serving(GATE_FILE_TOOLS, *options) as other:
        client = await ERAS[era].at(doomed)
        first = await client.call("put", n=1, gate=str(tmp_path / "gate"), pauses=[1], log=str(log), key="put")
        call = id_in(first) or ""
        there = client.through(other)
        assert id_in(await there.call(WAIT, call=call)) == call
        doomed.send(signal.SIGSTOP)
        assert text_of(await there.call(CANCEL, call=call)).startswith('"put" is being cancelled')
        await doomed.kill()
        assert await fetched(there, call) == '"put" was cancelled; it may have done a part of its work.'
        assert len(diary(log)) == 1
        await client.aclose()
        await there.aclose()


async def test_a_plain_call_whose_process_was_killed_is_in_its_callers_list(tmp_path: Path) -> None:
    """At 2026-07-28 it is cancelled with its connection, and its client has no id to ask with."""
    tokens, log = tmp_path / "tokens", tmp_path / "diary"
    tokens.write_text("ann:ann-0123456789abcdef\n")
    tokens.chmod(0o600)
    options = ("--store", shared_address(tmp_path / "log.db"), "--tokens", str(tokens), "--answer-within", "1h")
    headers = {"authorization": "Bearer ann-0123456789abcdef"}
    async with serving(GATE_FILE_TOOLS, *options) as doomed:
        peer = CallPeer(port=doomed.port, headers=headers)
        arguments = {"n": 1, "gate": str(tmp_path / "gate"), "pauses": [1], "log": str(log)}
        cut = await peer.begin_call("pay", arguments)
        await until(lambda: len(diary(log)) == 1)
        await doomed.kill()
        await cut.aclose()
    async with serving(GATE_FILE_TOOLS, *options) as server:
        later, told = Modern(peer.through(server.port)), ""
        while not told.startswith('"pay"'):
            told = text_of(await later.call(WAIT))
        assert ", may have done a part of its work: " in told
        end = text_of(await later.call(WAIT, call=told.rpartition(" ")[2]))
        assert end == '"pay" was cancelled; it may have done a part of its work.'
        assert len(diary(log)) == 1


async def test_an_answer_that_was_accepted_behind_the_early_answer_is_not_asked_for_again(tmp_path: Path) -> None:
    """The process dies when the store has it and the tool has not gone on."""
    options = ("--store", shared_address(tmp_path / "log.db"), *RULE)
    point = at("perdure.sessions.runtime_link", "Asks._hand_over", "enter")
    (tmp_path / "begin").touch()
    async with serving(STEP_TOOLS, *options, point=point) as doomed:
        peer = await (web := Web(doomed.url)).join()
        wire = await peer.call("play", folder=str(tmp_path), script=[{"ask": "Why?"}], die=[])
        asked, first = await wire.message(), (await wire.rest())[-1]
        await doomed.arm()
        with contextlib.suppress(*LOST):
            await peer.answer(asked, {"action": "accept", "content": {"answer": "because"}})
        assert await doomed.has_died(), "the point was not reached"
        await web.aclose()
    async with serving(STEP_TOOLS, *options) as server:
        later = InSession(web := Web(server.url), peer.through(web))
        assert await fetched(later, id_in(first) or "") == "because"
        await later.aclose()
