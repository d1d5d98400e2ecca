"""One client's story that has everything in it, and the judgement on what came of it (promises 1 to 5).

The tool `survey` reports progress, sends a notice to the standalone stream, asks, and reports progress again. Its
client opens a session and calls at one node, loses its connection, and continues through another one: it resumes and
answers there. At the end it reads everything once more. It keeps positions and nothing else, and comes back wherever it
is refused for the moment.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.tools import Tool
from pydantic import BaseModel

from perdure._core.ids import SessionId, StreamId, parse_position
from perdure.store.interface import Store
from perdure.store.records import Event
from tests.support.clients.raw_http import Answer, Peer, SessionPeer, message
from tests.support.clients.recording_client import ENDED, Told
from tests.support.clients.soak_call import BUSY
from tests.support.servers.gate_file_tools import diary, note, pass_gate
from tests.support.servers.in_process import until

PAUSE = 0.01
"""Seconds before another attempt."""

PATIENCE = 60
"""Seconds in which a story comes to its end, on a busy machine and with a long outage in it."""

OUTCOME_UNKNOWN = -31001

HALF = 3
"""Reports of progress before the question, and as many after it."""


class Reply(BaseModel):
    answer: str


async def survey(key: str, ctx: Context, log: str = "", gate: str = "") -> str:
    """Report, notify, wait at the gate, ask, report. `log` is a diary, `gate` a file, as in `gate_file_tools`."""
    note(log, key)
    for number in range(1, HALF + 1):
        await ctx.report_progress(number, 2 * HALF)
    await ctx.session.send_resource_updated("notice://1")
    await pass_gate(gate)
    result = await ctx.elicit(key, Reply)
    for number in range(HALF + 1, 2 * HALF + 1):
        await ctx.report_progress(number, 2 * HALF)
    return result.data.answer if result.action == "accept" else result.action


def new_server() -> MCPServer:
    return MCPServer("survey", version="1", log_level="WARNING", tools=[Tool.from_function(survey)])


server = new_server()
"""For a process of its own: `perdure serve tests.support.clients.survey_client:server`."""


@dataclass(kw_only=True, eq=False)
class Client:
    """A client with one session. `near` and `far` are the ports of the nodes that it uses, `folder` has the diary of
    all surveys and the gate of this one."""

    near: int
    far: int
    key: str
    folder: Path
    session: SessionPeer = field(init=False)
    call: Told = field(init=False)
    standalone: Told = field(init=False)
    #: The tool is to wait at the gate.
    has_gate: bool = False
    #: How often it was turned away for the moment.
    refused: int = 0

    def __post_init__(self) -> None:
        self.call, self.standalone = Told(name=self.key), Told(name=f"standalone of {self.key}")

    @property
    def gate(self) -> Path:
        return self.folder / f"{self.key}.gate"

    async def tell(self) -> None:
        """The whole story."""
        async with asyncio.timeout(PATIENCE):
            await self.open()
            async with self.listening():
                await self.ask_for_survey()
                await self.go_on()
            await self.read_again()

    async def go_on(self) -> None:
        """Come to the answer through the far node."""
        await self.read(self.far, self.call, lambda: bool(self.asked or self.call.answers))
        if not self.call.answers:
            await self.reply(self.far)
            await self.read(self.far, self.call, lambda: bool(self.call.answers))
        await self.hear_rest()

    # The parts of the story

    async def open(self) -> None:
        """Open the session at the near node."""
        params = {"protocolVersion": "2025-11-25", "capabilities": {"elicitation": {}}, "clientInfo": _NAME}
        opened = await self._insist(Peer(port=self.near), message("initialize", params, id=0))
        assert opened.status == 200, opened
        known = opened.header("mcp-session-id")
        assert known is not None
        headers = {"mcp-session-id": known, "mcp-protocol-version": "2025-11-25"}
        self.session = SessionPeer(port=self.near, headers=headers, id=known)
        done = await self._insist(self.session, message("notifications/initialized"))
        assert done.status == 202, done

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Read the standalone stream through the far node meanwhile."""
        listening = asyncio.create_task(self.read(self.far, self.standalone, lambda: False))
        try:
            # A reader that comes later would be sent what belongs to calls without a reader.
            await until(lambda: self.standalone.position)
            yield
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def ask_for_survey(self) -> None:
        """Make the call at the near node, read some of it, and lose the connection."""
        log, gate = str(self.folder / "diary"), str(self.gate) if self.has_gate else ""
        body = self.session.call_body("survey", id=1, key=self.key, log=log, gate=gate)
        while True:
            async with await self.session.begin("POST", body) as exchange:
                more = True
                while more and len(self.call.events) < HALF:
                    more = await self.call.read(exchange)
                exchange.cut()
                if exchange.parser.status == 200:
                    return
            assert exchange.parser.status in BUSY, exchange.parser.status
            await self._pause()

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [m for m in self.call.messages if m.get("method") == "elicitation/create"]

    async def reply(self, port: int) -> None:
        result = {"action": "accept", "content": {"answer": f"reply to {self.key}"}}
        answer = {"jsonrpc": "2.0", "id": self.asked[-1]["id"], "result": result}
        sent = await self._insist(self.at(port), json.dumps(answer).encode())
        assert sent.status == 202, sent

    async def hear_rest(self) -> None:
        """Wait for what comes on the standalone stream: the notice, and what the call said without a reader."""
        told = self.standalone
        expected = 2 * HALF if "result" in self.call.answers[-1] else 0
        await until(lambda: told.notices and len(self.call.progress) + len(told.progress) >= expected)

    async def read_again(self) -> None:
        """Read the call from its first event, through both nodes: it is what it was, but for the question, which has
        been answered."""
        seen = [event for event in self.call.events[1:] if "elicitation/create" not in event.data]
        for port in (self.near, self.far):
            again = Told(name=f"{self.key} again", position=self.call.events[0].id)
            await self.read(port, again, lambda told=again: bool(told.answers))  # type: ignore[misc]
            assert [event.data for event in again.events] == [event.data for event in seen]
            assert again.positions == [parse_position(event.id) for event in seen]

    # Means

    def at(self, port: int) -> SessionPeer:
        return SessionPeer(port=port, headers=self.session.headers, id=self.session.id)

    async def read(self, port: int, told: Told, is_enough: Callable[[], bool]) -> None:
        """Resume again and again until enough has come."""
        while not is_enough():
            async with await self.at(port).resume(told.position) as exchange:
                more = True
                while more and not is_enough():
                    more = await told.read(exchange)
                status = exchange.parser.status
                exchange.cut()
            assert status in (200, *BUSY), (told.name, told.position, status)
            if not is_enough():
                await self._pause()

    async def _insist(self, peer: Peer, body: bytes) -> Answer:
        """Send it until it is not refused for the moment."""
        while (answer := await peer.ask("POST", body)).status in BUSY:
            await self._pause()
        return answer

    async def _pause(self) -> None:
        self.refused += 1
        await asyncio.sleep(PAUSE)


_NAME = {"name": "client", "version": "1"}


# --- The judgement --------------------------------------------------------------------------------------------------


async def assert_sound(store: Store, client: Client, *, is_known: bool = True) -> None:
    """Nothing was lost in silence, nothing came twice or out of order, and each accepted call has one answer.

    `is_known`: the answer must be the tool's own. Without it the call may have been settled as of unknown outcome.
    """
    session = SessionId(client.session.id)
    ledger = await store.calls(session)
    assert [call.request_id for call in ledger] == [0, 1], ledger  # the handshake is one as well
    assert {call.state.value for call in ledger} <= set(ENDED), ledger
    assert [key for key, _ in diary(client.folder / "diary")].count(client.key) == 1, "its side effect happened once"
    logs = {record.id: await _log(store, record.id) for record in await store.streams(session)}
    for record in await store.streams(session):
        calls = await store.calls(record.session, stream=record.id)
        events = logs[record.id]
        assert [event.seq for event in events] == list(range(1, record.last + 1)), record
        assert [event.final for event in events if event.final] == [True] * len(calls), record
        assert record.sealed is bool(calls), record
        assert not calls or events[-1].final, record
    for told in (client.call, client.standalone):
        told.assert_whole()
        assert [place.seq for place in told.positions] == list(range(1, len(told.events) + 1)), told.name
        for event, place in zip(told.events, told.positions, strict=True):
            assert logs[place.stream][place.seq - 1].payload.decode() == event.data, (told.name, event)
    assert client.standalone.notices == [1]
    [answer] = client.call.answers
    if is_known or "result" in answer:
        assert answer["result"]["content"][0]["text"] == f"reply to {client.key}"
        # What a call sends while it has no reader is for the reader of the standalone stream (R5).
        parts = client.call.progress, client.standalone.progress
        assert sorted(itertools.chain(*parts)) == list(range(1, 2 * HALF + 1)), parts
        assert [sorted(part) for part in parts] == list(parts), parts
    else:
        assert answer["error"]["code"] == OUTCOME_UNKNOWN


async def _log(store: Store, stream: StreamId) -> list[Event]:
    """All events of a stream."""
    events: list[Event] = []
    while page := await store.read(stream, after=events[-1].seq if events else 0, limit=500):
        events += page
    return events
