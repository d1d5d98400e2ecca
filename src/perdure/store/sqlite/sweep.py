"""Forgets what has expired, a little at a time, so that commits get in between."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial

from perdure._core.ids import SessionId
from perdure._core.retention import Cutoffs
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.read_pool import ReaderPool
from perdure.store.sqlite.steps import StepWriter
from perdure.store.sqlite.writer import Writer

_SQL = _sql.queries()

CHUNK = 1_000
"""Rows forgotten in one transaction: a few milliseconds' worth."""

PAGE = 200
"""Streams or sessions looked up at a time."""

_WRITES = 256 << 10
"""About what one chunk adds to the log, in bytes."""


async def sweep(writer: Writer, readers: ReaderPool, cutoffs: Cutoffs) -> int:
    return await _sweep_streams(writer, readers, cutoffs) + await _sweep_sessions(writer, readers, cutoffs)


async def _sweep_streams(writer: Writer, readers: ReaderPool, cutoffs: Cutoffs) -> int:
    rows, after = 0, 0
    while keys := await readers.run(partial(_stale_streams, after=after, cutoffs=cutoffs)):
        rows += await _sweep_page(writer, keys, cutoffs)
        after = keys[-1]
    return rows


async def _sweep_page(writer: Writer, keys: Sequence[int], cutoffs: Cutoffs) -> int:
    """Events of several streams go in one transaction, as many as fit; a stream that needs more gets more."""
    rows, rest = 0, list(keys)
    while rest:
        done, gone = await writer.run(partial(_expire, keys=rest, cutoffs=cutoffs), size=_WRITES)
        rows += gone
        del rest[:done]
    return rows


def _stale_streams(connection: sqlite3.Connection, *, after: int, cutoffs: Cutoffs) -> list[int]:
    values = {"after": after, "events": cutoffs.events, "answers": cutoffs.answers, "limit": PAGE}
    return [key for (key,) in connection.execute(_SQL["stale_streams"], values)]


def _expire(
    steps: StepWriter, connection: sqlite3.Connection, keys: Sequence[int], cutoffs: Cutoffs
) -> tuple[int, int]:
    """Give how many of the streams were finished, and how many rows went."""
    room = CHUNK
    for place, key in enumerate(keys):
        values = {"stream": key, "events": cutoffs.events, "answers": cutoffs.answers, "limit": room}
        room -= connection.execute(_SQL["expire_events"], values).rowcount
        if room <= 0:
            return place, CHUNK
        if connection.execute(_SQL["expire_stream"], {"stream": key, "answers": cutoffs.answers}).rowcount:
            steps.streams.forget()
            room -= 1
    return len(keys), CHUNK - room


async def _sweep_sessions(writer: Writer, readers: ReaderPool, cutoffs: Cutoffs) -> int:
    rows = 0
    while sessions := await readers.run(partial(_stale_sessions, cutoffs=cutoffs)):
        for session in sessions:
            gone = await _sweep_session(writer, session, cutoffs)
            rows += gone
    return rows


def _stale_sessions(connection: sqlite3.Connection, cutoffs: Cutoffs) -> list[SessionId]:
    return [session for (session,) in connection.execute(_SQL["stale_sessions"], (cutoffs.answers, PAGE))]


async def _sweep_session(writer: Writer, session: SessionId, cutoffs: Cutoffs) -> int:
    """Forget the events first, then the rest with the record: a client that comes back in between finds the session."""
    rows = 0
    values = {"session": session, "answers": cutoffs.answers, "limit": CHUNK}
    while True:
        gone, over = await writer.run(partial(_forget, values=values), size=_WRITES)
        rows += gone
        if over:
            return rows


def _forget(steps: StepWriter, connection: sqlite3.Connection, values: dict[str, object]) -> tuple[int, bool]:
    """How many rows went, and whether the session is done with."""
    gone = connection.execute(_SQL["empty_session"], values).rowcount
    if gone == values["limit"]:
        return gone, False
    if connection.execute(_SQL["expire_session"], (values["session"], values["answers"])).rowcount:
        steps.streams.forget()
        connection.execute(_SQL["drop_streams"], (values["session"],))
        gone += 1
    return gone, True
