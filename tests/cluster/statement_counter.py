"""Counts the statements that a process sends to a PostgreSQL server: a way to the server that reads along."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from perdure.store.postgres import layout
from perdure.store.postgres.address import parse_address

_FIRST_WORDS = 60
"""Characters by which a statement is known that is none of the store's queries."""


class Statements:
    """The statements that were executed, by the names of `queries.sql`; any other by its first words."""

    def __init__(self, queries: Mapping[str, str]) -> None:
        self.seen: Counter[str] = Counter()
        self._names = {" ".join(text.split()): name for name, text in queries.items()}

    def count(self, statement: str) -> None:
        words = " ".join(statement.split())
        self.seen[self._names.get(words, words[:_FIRST_WORDS])] += 1

    def take(self) -> Counter[str]:
        """Give what was seen since the last time."""
        taken, self.seen = self.seen, Counter()
        return taken


class _Talk:
    """What one connection says to the server, message by message."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self._prepared: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}
        self._rest = b""
        self._has_begun = False

    def feed(self, data: bytes) -> None:
        self._rest += data
        while True:
            head = 1 if self._has_begun else 0  # the first message has no letter
            if len(self._rest) < head + 4:
                return
            end = head + int.from_bytes(self._rest[head : head + 4], "big")
            if len(self._rest) < end:
                return
            message, self._rest = self._rest[:end], self._rest[end:]
            if self._has_begun:
                self._take(message[:1], message[5:])
            self._has_begun = True

    def _take(self, letter: bytes, body: bytes) -> None:
        first, _, rest = body.partition(b"\0")
        match letter:
            case b"P":
                self._prepared[first] = rest.partition(b"\0")[0].decode()
            case b"B":
                self._portals[first] = self._prepared[rest.partition(b"\0")[0]]
            case b"E":
                self._statements.count(self._portals[first])
            case b"Q":
                self._statements.count(first.decode())


@asynccontextmanager
async def counting(url: str) -> AsyncIterator[tuple[str, Statements]]:
    """Another address of the same store, and what is asked there."""
    address = parse_address(url)
    host, _, port = address.dsn.partition("@")[2].partition("/")[0].partition(":")
    statements = Statements(layout.queries(address.schema))

    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def forth(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        answering = asyncio.create_task(back(server_reader, writer))
        talk = _Talk(statements)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                talk.feed(data)
                server_writer.write(data)
        server_writer.close()
        await answering

    async with await asyncio.start_server(forth, "127.0.0.1", 0) as proxy:
        way = proxy.sockets[0].getsockname()[1]
        user = address.dsn.partition("://")[2].partition("@")[0]
        yield f"postgresql://{user}@127.0.0.1:{way}/postgres?sslmode=disable&schema={address.schema}", statements
