"""A client that keeps what it was shown, comes back with its positions, and judges what it got (promises 1-4)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from perdure._core.ids import Position, parse_position
from perdure._core.sse import ServerSentEvent
from perdure.store.postgres.address import parse_address
from tests.support.clients.raw_http import Exchange, SessionPeer
from tests.support.servers.in_process import until
from tests.support.stores import postgres

#: The states in which a row of the ledger has its answer.
ENDED = ("answered", "cancelled", "settled")

#: A server that does not die sends the rest at the first attempt.
MOST_RESUMES = 3


@dataclass(kw_only=True, eq=False)
class Told:
    """One stream as its reader saw it, over all connections."""

    name: str
    events: list[ServerSentEvent] = field(default_factory=list)
    #: The last event id that came whole, of priming events as well.
    position: str = ""
    #: Refusals met on the way: status codes.
    refused: list[int] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(event.data) for event in self.events]

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if "method" not in message]

    @property
    def progress(self) -> list[int]:
        told = [m["params"] for m in self.messages if m.get("method") == "notifications/progress"]
        return [int(params["progress"]) for params in told]

    @property
    def notices(self) -> list[int]:
        told = [m["params"] for m in self.messages if m.get("method") == "notifications/resources/updated"]
        return [int(params["uri"].removeprefix("notice://")) for params in told]

    @property
    def gaps(self) -> list[dict[str, Any]]:
        return [m["params"] for m in self.messages if m.get("method") == "notifications/perdure/gap"]

    @property
    def positions(self) -> list[Position]:
        found = [parse_position(event.id) for event in self.events]
        assert None not in found, [event.id for event in self.events]
        return [position for position in found if position is not None]

    async def read(self, exchange: Exchange) -> bool:
        """Read what has come, and wait for more; returns whether there may be more."""
        before = len(exchange.events)
        more = await exchange.read()
        self.events += [event for event in exchange.events[before:] if event.data]
        self.position = exchange.position or self.position
        return more

    async def read_all(self, exchange: Exchange) -> None:
        async with exchange:
            while await self.read(exchange):
                pass
            if exchange.parser.status not in (0, 200):
                self.refused.append(exchange.parser.status)

    async def come_back(self, peer: SessionPeer) -> None:
        """Resume until the stream is over. Each connection of a call ends with its answer, or is lost."""
        for _ in range(MOST_RESUMES):
            if self.answers:
                return
            await self.read_all(await peer.resume(self.position))
        raise AssertionError(f"{self.name} has no answer; refused with {self.refused}")

    def assert_whole(self) -> None:
        """Each event once and in order, none missing in between, nothing after the answer (promises 2 and 3)."""
        places = [(position.stream, position.seq) for position in self.positions]
        first = places[0][1] if places else 1
        assert places == [(places[0][0], first + number) for number in range(len(places))], (self.name, places)
        generations = [position.generation for position in self.positions]
        assert generations == sorted(generations), (self.name, generations)
        assert self.gaps == []
        if self.answers:
            assert self.answers == self.messages[-1:], (self.name, self.messages)


Rows = Callable[..., list[tuple[Any, ...]]]
"""Runs a query on a log, and returns its rows."""

#: All events of a log, under one name: on PostgreSQL final answers have a table of their own.
_ENTRY = {
    "sqlite": "CREATE TEMP VIEW entry AS SELECT stream, seq, payload, final FROM event",
    "postgresql": """
        CREATE TEMP VIEW entry AS
        SELECT stream, seq, payload, 0 AS final FROM event UNION ALL SELECT stream, seq, payload, 1 FROM answer
    """,
}


@contextlib.contextmanager
def looking(address: str) -> Iterator[Rows]:
    """Read the log at an address, as it is committed now."""
    kind, _, place = address.partition(":")
    if kind == "sqlite":
        with contextlib.closing(sqlite3.connect(f"file:{place}?mode=ro", uri=True)) as connection:
            connection.execute(_ENTRY[kind])
            yield lambda query, *values: connection.execute(query, values).fetchall()
        return
    with postgres.connection(address) as run:
        run(f"SET search_path TO {parse_address(address).schema}")
        run(_ENTRY[kind])

        def rows(query: str, *values: object) -> list[tuple[Any, ...]]:
            numbers = itertools.count(1)
            return [tuple(row) for row in run(re.sub(r"\?", lambda _: f"${next(numbers)}", query), *values)]

        yield rows


def assert_sound(address: str) -> None:
    """The log is not damaged, and nothing in it is without its stream."""
    tables = ["generation", "call", "tool_step", "ask", "reader"]
    with looking(address) as rows:
        if address.startswith("sqlite:"):
            assert rows("PRAGMA integrity_check") == [("ok",)]
            tables.append("event")
        else:
            kept = "SELECT count(*) FROM entry WHERE stream = key AND seq > trimmed"
            assert rows(f"SELECT id FROM stream WHERE last - trimmed <> ({kept})") == []
            tables += ["forward", "sender"]  # events and answers are deleted with their slots, later than their stream
        for table in tables:
            orphans = f"SELECT count(*) FROM {table} WHERE stream NOT IN (SELECT key FROM stream)"
            assert rows(orphans) == [(0,)], table


def assert_logged(address: str, told: Told) -> None:
    """Whatever was shown is in the log, byte for byte, where its id says (promise 1)."""
    query = "SELECT payload FROM entry JOIN stream ON stream.key = entry.stream WHERE stream.id = ? AND seq = ?"
    with looking(address) as rows:
        for event, position in zip(told.events, told.positions, strict=True):
            found = rows(query, position.stream, position.seq)
            assert found, (told.name, event.id, "was shown and is not in the log")
            assert bytes(found[0][0]).decode() == event.data


def _running(rows: Rows) -> int:
    """Accepted requests without an answer."""
    marks = ", ".join("?" * len(ENDED))
    [(count,)] = rows(f"SELECT count(*) FROM call WHERE state NOT IN ({marks})", *ENDED)
    return int(count)


def is_accepted(address: str, request_id: int) -> bool:
    """The ledger has a row for it."""
    with looking(address) as rows:
        return rows("SELECT count(*) FROM call WHERE request_id = ?", json.dumps(request_id)) != [(0,)]


def assert_answered_once(address: str) -> None:
    """Every accepted request has one answer beside its early one, and its stream is sealed (promise 3)."""
    query = """
        SELECT stream.id, stream.sealed, count(*),
               (SELECT count(*) FROM entry
                WHERE entry.stream = stream.key AND entry.final = 1 AND entry.seq <> stream.answered)
        FROM call JOIN stream ON stream.key = call.stream GROUP BY stream.key
    """
    with looking(address) as rows:
        for stream, sealed, calls, answers in rows(query):
            assert (sealed, answers) == (1, calls), stream


async def settled(address: str) -> None:
    """Wait until no request waits for its answer."""
    with looking(address) as rows:
        async with asyncio.timeout(60):
            await until(lambda: _running(rows) == 0)
