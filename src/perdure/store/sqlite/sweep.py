"""Deletes what has expired, a little at a time, so that commits get in between."""

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Any

from perdure._core.ids import SessionId
from perdure._core.retention import Cutoffs
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.reads import ReaderPool
from perdure.store.sqlite.steps import StepWriter
from perdure.store.sqlite.writer import Writer

_SQL = _sql.queries()

CHUNK = 1_000
"""Rows deleted in one transaction: a few milliseconds' worth."""

PAGE = 200
"""Streams or sessions read at a time."""

LOOK = 10_000
"""Streams that one query reads, expired or not: 0.1 s at most. A million at once would take longer than a query may,
and keep the log from being written back meanwhile."""

_WRITES = 256 << 10
"""About what one chunk adds to the log, in bytes."""


async def sweep(writer: Writer, readers: ReaderPool, cutoffs: Cutoffs) -> int:
    """Delete streams, then sessions; returns the number of rows. One transaction deletes the events of as many streams
    as fit; a stream that needs more gets more."""
    rows, after = 0, 0
    expired = {"events": cutoffs.events, "answers": cutoffs.answers, "limit": PAGE}
    while True:
        [through] = await readers.run(partial(_column, _SQL["last_of_streams"], {"after": after, "look": LOOK}))
        if through is None:  # after the last stream
            break
        while keys := await readers.run(
            partial(_column, _SQL["stale_streams"], expired | {"after": after, "through": through})
        ):
            after = keys[-1]
            while keys:
                done, gone = await writer.run(partial(_expire, keys=keys, cutoffs=cutoffs), size=_WRITES)
                rows += gone
                del keys[:done]
        after = through
    over = {"calls": cutoffs.calls, "answers": cutoffs.answers, "limit": PAGE}
    while sessions := await readers.run(partial(_column, _SQL["stale_sessions"], over)):
        for session in sessions:
            done = False
            while not done:
                gone, done = await writer.run(partial(_forget, session=session, cutoffs=cutoffs), size=_WRITES)
                rows += gone
    return rows


def _column(query: str, values: Any, connection: sqlite3.Connection) -> list[Any]:
    return [value for (value,) in connection.execute(query, values)]


def _expire(
    steps: StepWriter, connection: sqlite3.Connection, *, keys: Sequence[int], cutoffs: Cutoffs
) -> tuple[int, int]:
    """Return how many of the streams are done, and how many rows were deleted."""
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


def _forget(
    steps: StepWriter, connection: sqlite3.Connection, *, session: SessionId, cutoffs: Cutoffs
) -> tuple[int, bool]:
    """Return how many rows were deleted, and whether the session is done. Events are deleted before the record: a
    client that comes back in between finds the session."""
    values = {"session": session, "calls": cutoffs.calls, "answers": cutoffs.answers}
    gone = connection.execute(_SQL["empty_session"], values | {"limit": CHUNK}).rowcount
    if gone == CHUNK:
        return gone, False
    if connection.execute(_SQL["expire_session"], values).rowcount:
        steps.streams.forget()
        connection.execute(_SQL["drop_streams"], (session,)).fetchall()
        gone += 1
    return gone, True
