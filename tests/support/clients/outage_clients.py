"""Clients that hold calls, events and asks while a database server fails, and one judge of what they got.

A client keeps its session's id and its positions, and nothing else. Whenever a connection ends, it comes back with the
position of that stream, at one node or the other, until it has an answer, or learns that there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from perdure._core.ids import Position, parse_position
from tests.support.clients.wire_client import Ended, Message, Peer, Web, Wire, gaps_of, notices_of, progress_of, text_of
from tests.support.servers.in_process import until
from tests.support.stores.postgres import connection

BUSY = (503,)
"""A node that says: not now."""

PAUSE = 0.02
"""Seconds before a client tries again."""


@dataclass(kw_only=True, eq=False)
class Told:
    """One stream, as its client saw it over all connections."""

    name: str
    request: int | None = None
    """The id of the call's request; `None`: this is the standalone stream."""
    events: list[tuple[Position, Message]] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    faults: list[tuple[str, object]] = field(default_factory=list)
    """What no promise allows."""
    _at: int = 0
    told_gone: set[int] = field(default_factory=set)
    """Numbers of events that a gap has reported as gone."""
    position: str = ""
    refused: Message | None = None
    """The refusal of the position, and its status."""

    @property
    def messages(self) -> list[Message]:
        return [message for _, message in self.events]

    @property
    def answers(self) -> list[Message]:
        return [message for message in self.messages if "method" not in message]

    @property
    def progress(self) -> list[int]:
        return progress_of(self.messages)

    @property
    def notices(self) -> list[int]:
        return notices_of(self.messages)

    @property
    def asks(self) -> list[Message]:
        return [message for message in self.messages if message.get("method") == "elicitation/create"]

    @property
    def is_over(self) -> bool:
        return self.refused is not None or bool(self.answers)

    @property
    def text(self) -> str:
        [answer] = self.answers
        return text_of(answer)

    @property
    def code(self) -> int:
        """The code of the error that answers the call."""
        [answer] = self.answers
        return int(answer["error"]["code"])

    def take(self, event_id: str, message: Message) -> None:
        """Note what came, and whether it may come now. Behind a gap that was told, the stream goes on in front of it:
        whatever has its numbers there counts as new, because the client was told that it does not know them."""
        position = parse_position(event_id)
        assert position is not None, (self.name, event_id)
        for first, last in (gaps := gaps_of([message])):
            self.told_gone.update(range(first, last + 1))
            self._at = min(self._at, first - 1)
        if gaps:
            self.gaps += gaps
            self._at = position.seq if position.seq == self._at + 1 else self._at  # it has a number itself
            return
        if position.seq <= self._at:
            self.faults.append(("twice, or out of order", position))
        if missing := {*range(self._at + 1, position.seq)} - self.told_gone:
            self.faults.append(("lost in silence", missing))
        earlier = [place.seq for place, known in self.events if known == message and place.seq != position.seq]
        if ("method" not in message and earlier) or not {*earlier} <= self.told_gone:
            self.faults.append(("twice", message))
        self._at = position.seq
        self.events.append((position, message))

    def judge(self) -> None:
        """Nothing twice, nothing out of order, nothing lost in silence, one answer, and nothing after it."""
        assert self.faults == [], (self.name, self.events, self.gaps)
        if self.request is not None:
            assert self.progress == sorted({*self.progress}), (self.name, self.progress)
            count = 0 if self.refused is not None else 1
            assert len(self.answers) == count, (self.name, self.messages, self.refused)
            assert self.answers == self.messages[len(self.messages) - count :], (self.name, "behind the answer")
            assert [answer["id"] for answer in self.answers] == [self.request] * count


class Survivor:
    """A client with one session, which any of these nodes may answer."""

    def __init__(self, peer: Peer, nodes: Sequence[Web]) -> None:
        self.peers = [peer.through(node) for node in nodes]
        self.session = peer.session
        self.streams: list[Told] = []
        self.answers: dict[str, str] = {}
        """What the client answers to a question; others it leaves open."""
        self._reading: list[asyncio.Task[None]] = []
        self._answered: set[str] = set()
        self._turn = 0

    # Holding

    async def call(self, tool: str, *, id: int, at: int = 0, **arguments: Any) -> Told:  # noqa: A002
        """Begin a call at a node; returns the call once it runs there."""
        told = Told(name=f"{tool} {id}", request=id)
        wire = await self.peers[at].call(tool, id=id, token=id, **arguments)
        await self._read_one(told, wire)
        self._hold(told, wire)
        return told

    async def listen(self, *, at: int = 0) -> Told:
        """Read the standalone stream."""
        told = Told(name="standalone")
        wire = await self.peers[at].get()
        await self._read_one(told, wire)
        self._hold(told, wire)
        return told

    def _hold(self, told: Told, wire: Wire) -> None:
        self.streams.append(told)
        self._reading.append(asyncio.create_task(self._follow(told, wire)))

    def come_back(self) -> None:
        """Read on wherever something is missing, after the client was away."""
        for told in self.streams:
            if not told.is_over:
                self._reading.append(asyncio.create_task(self._follow(told, None)))

    async def _follow(self, told: Told, wire: Wire | None) -> None:
        wire = wire or await self._come_back(told)
        while wire is not None:
            with contextlib.suppress(Ended, httpx2.TransportError):
                while True:
                    await self._read_one(told, wire)
            wire = None if told.is_over else await self._come_back(told)

    async def _read_one(self, told: Told, wire: Wire) -> None:
        event = await wire.event()
        told.position = event.id or told.position
        if event.data:
            message: Message = json.loads(event.data)
            told.take(event.id, message)
            if message.get("method") == "elicitation/create":
                await self._answer(message)

    async def _answer(self, ask: Message) -> None:
        """Answer it, unless it was read and answered before."""
        text = self.answers.get(ask["params"]["message"])
        if text is not None and ask["id"] not in self._answered:
            self._answered.add(ask["id"])
            response = await self.insist({"jsonrpc": "2.0", "id": ask["id"], "result": accepting(text)})
            assert response.status_code in (202, 404), response.text

    async def answer_all(self, **texts: str) -> None:
        """Answer these questions from now on, also where they were asked already."""
        self.answers |= texts
        for told in self.streams:
            for ask in told.asks:
                await self._answer(ask)

    async def _come_back(self, told: Told) -> Wire | None:
        while True:
            self._turn += 1
            peer = self.peers[self._turn % len(self.peers)]
            with contextlib.suppress(httpx2.TransportError):
                response = await peer.begin_get(told.position)
                if response.status_code == 200:
                    return Wire(response)
                await response.aread()
                if response.status_code not in BUSY:
                    told.refused = {"status": response.status_code, **json.loads(response.content)}
                    return None
                await response.aclose()
            await asyncio.sleep(PAUSE)

    async def insist(self, body: Message, *, at: int = 0) -> httpx2.Response:
        """POST until a node answers."""
        turn = at
        while True:
            with contextlib.suppress(httpx2.TransportError):
                response = await self.peers[turn % len(self.peers)].send(body)
                if response.status_code not in BUSY:
                    return response
            turn += 1
            await asyncio.sleep(PAUSE)

    async def result(self, tool: str, *, at: int = 0, **arguments: Any) -> str:
        """Call a tool that may be called twice, until it has answered."""
        while True:
            response = await self.insist(self.peers[0].tool(tool, **arguments), at=at)
            assert response.status_code == 200, (response.status_code, response.text)
            messages = [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data: {")]
            if messages and "result" in messages[-1]:
                return text_of(messages[-1])

    # Judging

    async def ended(self) -> None:
        """Wait until each call has its answer, or its client knows that there is none."""
        await until(lambda: all(told.is_over for told in self.streams if told.request is not None))

    async def aclose(self) -> None:
        for task in self._reading:
            task.cancel()
        done = await asyncio.gather(*self._reading, return_exceptions=True)
        self._reading.clear()
        for failure in done:
            if isinstance(failure, Exception):
                raise failure

    def judge(self) -> None:
        for told in self.streams:
            told.judge()


def accepting(text: str) -> Message:
    return {"action": "accept", "content": {"answer": text}}


class Ledger:
    """Reads what a PostgreSQL store holds, over a connection of its own."""

    def __init__(self, url: str, schema: str = "s") -> None:
        self._url = url
        self._schema = schema

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with connection(self._url) as run:
            return [tuple(row) for row in run(query.replace("perdure.", f"{self._schema}."), *values)]

    def has(self, told: Told) -> int:
        """How far the server is with a stream."""
        position = parse_position(told.position)
        assert position is not None
        found = self.rows("SELECT last FROM perdure.stream WHERE id = $1", position.stream)
        return int(found[0][0]) if found else 0

    def open_calls(self) -> int:
        return int(self.rows("SELECT count(*) FROM perdure.call WHERE state IN ('running', 'waiting')")[0][0])

    def judge(self, *survivors: Survivor, whole: bool) -> None:
        """Every call has ended with one answer, and each event is the one that was shown under its position. `whole`:
        every event that was shown is there."""
        calls = self.rows(
            "SELECT s.id, s.sealed, count(*), (SELECT count(*) FROM perdure.answer AS a WHERE a.stream = s.key)"
            " FROM perdure.call AS c JOIN perdure.stream AS s ON s.key = c.stream GROUP BY s.key"
        )
        assert [row for row in calls if row[1:] != (True, row[2], row[2])] == []
        assert self.open_calls() == 0
        for told in (told for survivor in survivors for told in survivor.streams):
            for position, message in told.events:
                if position.seq in told.told_gone and not whole:
                    continue  # a gap has reported this number
                self._judge_event(told, position, message, whole=whole)

    def _judge_event(self, told: Told, position: Position, message: Message, *, whole: bool) -> None:
        found = self.rows(
            "WITH e AS (SELECT stream, seq, payload FROM perdure.event"
            " UNION ALL SELECT stream, seq, payload FROM perdure.answer)"
            " SELECT e.payload, s.generation, (SELECT min(g.generation) FROM perdure.generation AS g"
            ' WHERE g.stream = s.key AND g."end" >= e.seq) FROM perdure.stream AS s JOIN e ON e.stream = s.key'
            " WHERE s.id = $1 AND e.seq = $2",
            position.stream,
            position.seq,
        )
        assert found or not whole, (told.name, position, "was shown and is not in the log")
        for payload, newest, ended in found:
            if (ended or newest) == position.generation:
                assert json.loads(payload) == message, (told.name, position, "names another event")
