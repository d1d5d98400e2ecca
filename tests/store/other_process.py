"""Another process on the same SQLite file, which follows orders.

Run with the path of the file and the name of its node. Takes lines `[verb, arguments...]` as JSON on its standard
input, and answers each with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from perdure._core.ids import Fence, NodeId, StreamId
from perdure.store.sqlite import SqliteStore
from perdure.store.steps import DropStream, OpenStream, PutReader, Refusals, SendMail
from perdure.testing._values import a_call, a_reader, a_stream, an_append, dead_nodes, put, some_events


class Other:
    def __init__(self, store: SqliteStore, node: NodeId) -> None:
        self._store = store
        self._node = node
        self._fence = Fence(0)

    async def join(self) -> int:
        self._fence = await self._store.join(self._node)
        return self._fence

    async def open(self, stream: str, *ids: int | str) -> str | None:
        calls = tuple(a_call(id_, stream=stream) for id_ in ids)
        record = a_stream(self._fence, stream, node=self._node)
        return _told(await put(self._store, OpenStream(record=record, calls=calls)))

    async def open_all(self, ids: list[int | str]) -> list[str | None]:
        """A stream for each id."""
        return [await self.open(f"{self._node}-{id_}", id_) for id_ in ids]

    async def claim_all(self, streams: list[str], held: int) -> list[int | None]:
        found = [await self._store.claim(StreamId(s), node=self._node, held=Fence(held)) for s in streams]
        return [None if record is None else record.fence for record in found]

    async def pour(self, stream: str, count: int) -> float:
        """Append one by one; returns the longest time of an append."""
        slowest = 0.0
        for seq in range(1, count + 1):
            started = time.monotonic()
            refusals = await put(self._store, an_append(self._fence, some_events(seq, seq), stream=stream))
            assert list(refusals) == [None]
            slowest = max(slowest, time.monotonic() - started)
            await asyncio.sleep(0)
        return slowest

    async def append(self, stream: str, first: int, last: int) -> str | None:
        return _told(await put(self._store, an_append(self._fence, some_events(first, last), stream=stream)))

    async def hint(self, node: str, *streams: str) -> None:
        self._store.hint(NodeId(node), [StreamId(stream) for stream in streams])

    async def post(self, node: str, *messages: str) -> str | None:
        return _told(await put(self._store, *(SendMail(node=NodeId(node), message=m.encode()) for m in messages)))

    async def drop(self, stream: str) -> None:
        await put(self._store, DropStream(stream=StreamId(stream)))

    async def read_as(self, reader: str, stream: str) -> None:
        await put(self._store, PutReader(record=a_reader(reader, stream=stream, node=self._node)))

    async def leave(self) -> None:
        await self._store.leave(self._node)

    async def bury(self, node: str) -> None:
        await self._store.bury(NodeId(node), heir=self._node)

    async def hold(self, holding: bool) -> None:
        self._store.liveness(self._node, lease=1.0, monotonic=time.monotonic).hold(holding)

    async def holders(self) -> list[NodeId]:
        return list(await self._store.liveness(self._node, lease=1.0, monotonic=time.monotonic).holders())

    async def dead(self) -> list[NodeId]:
        liveness = self._store.liveness(self._node, lease=1.0, monotonic=time.monotonic)
        return await dead_nodes(liveness)


def _told(refusals: Refusals) -> str | None:
    return next((type(refusal).__name__ for refusal in refusals if refusal is not None), None)


async def main(path: str, node: str) -> None:
    async with SqliteStore(path, busy_timeout=30.0) as store:
        other = Other(store, NodeId(node))
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            verb, *arguments = json.loads(line)
            work: Callable[..., Awaitable[Any]] = getattr(other, verb)
            print(json.dumps(await work(*arguments)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
