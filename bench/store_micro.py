"""What a store costs by itself: microseconds for a commit, an event in a batch, a call, a read of 100.

    python bench/store_micro.py [--sync full] [--folder DIR] [--store postgresql://…]

Each figure is the best of several rounds, because a shared machine only ever adds time.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.states import CallState, SessionState
from perdure.store import open_store
from perdure.store.interface import Store
from perdure.store.records import CallRecord, Event, SessionRecord, StreamRecord
from perdure.store.steps import Append, CallEnd, OpenStream, PutSession, Step

ROUNDS = 9
STREAMS = 50
SESSION = SessionId("m" * 43)
NODE = NodeId("n" * 22)
PROGRESS = (
    b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":7,"progress":1234,"total":9999}}'
)


class Log:
    """A store with some streams, and the numbers that come next in them."""

    def __init__(self, store: Store, fence: Fence) -> None:
        self.store = store
        self.fence = fence
        self.ids = [StreamId(f"{number:022d}") for number in range(STREAMS)]
        self.next = dict.fromkeys(self.ids, 1)
        self.turn = 0
        self.calls = 0

    async def open(self) -> None:
        await self.store.commit([PutSession(record=_session())])
        await self.store.commit([OpenStream(record=self._record(stream)) for stream in self.ids])

    def append(self, count: int) -> Append:
        stream = self.ids[self.turn % STREAMS]
        self.turn += 1
        first = self.next[stream]
        self.next[stream] = first + count
        events = tuple(Event(seq, 1.7e9, PROGRESS) for seq in range(first, first + count))
        return Append(stream=stream, fence=self.fence, events=events)

    def call(self) -> tuple[Step, Step]:
        """What one call writes: its stream and its ledger row; then its answer, its end and the seal."""
        self.calls += 1
        stream = StreamId(f"call{self.calls:018d}")
        row = CallRecord(
            session=SESSION,
            incarnation=1,
            request_id=self.calls,
            stream=stream,
            method="tools/call",
            request=PROGRESS,
            principal="",
        )
        end = CallEnd(incarnation=1, request_id=self.calls, state=CallState.ANSWERED)
        answer = Append(
            stream=stream, fence=self.fence, events=(Event(1, 1.7e9, PROGRESS, True),), ends=(end,), seal=True
        )
        return OpenStream(record=self._record(stream), calls=(row,)), answer

    def _record(self, stream: StreamId) -> StreamRecord:
        return StreamRecord(id=stream, session=SESSION, kind=Kind.CALL, node=NODE, fence=self.fence, opened=1.7e9)


def _session() -> SessionRecord:
    return SessionRecord(
        id=SESSION,
        owner="",
        state=SessionState.ACTIVE,
        version="2025-11-25",
        client_params=b"{}",
        result=b"{}",
        initialized=True,
        sticky=(),
        incarnation=1,
        standalone=StreamId("s" * 22),
        created=1.7e9,
        active=1.7e9,
    )


async def best(repeat: int, work: Callable[[], Awaitable[object]]) -> float:
    """Microseconds for one, in the best round."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeat):
            await work()
        times.append(time.perf_counter() - start)
    return min(times) / repeat * 1e6


async def now(log: Log, *steps: Step) -> None:
    """As a server does it: inline, and by the thread when that is not possible at this moment."""
    if log.store.commit_now(steps) is None:
        await log.store.commit(steps)


async def call_now(log: Log) -> None:
    opened, answered = log.call()
    await now(log, opened)
    await now(log, answered)


def show(what: str, microseconds: float) -> None:
    print(f"{what:<36}{microseconds:9.2f} µs")


async def measure(url: str, *, inline: bool) -> None:
    async with open_store(url) as store:
        log = Log(store, await store.join(NODE))
        await log.open()
        if inline:
            show("inline commit of 1 event", await best(1000, lambda: now(log, log.append(1))))
            show("inline, an event in batches of 64", await best(50, lambda: now(log, log.append(64))) / 64)
            show("inline, a call (2 commits)", await best(500, lambda: call_now(log)))
        else:
            show("a call (2 commits)", await best(200, lambda: call_now(log)))
        show("by thread, commit of 1 event", await best(200, lambda: store.commit([log.append(1)])))
        at_once = await best(10, lambda: asyncio.gather(*(store.commit([log.append(1)]) for _ in range(64))))
        show("by thread, each of 64 at once", at_once / 64)
        show("by thread, an event of 512", await best(5, lambda: store.commit([log.append(512)])) / 512)
        for count in (1, 100, 1000):
            show(f"read of {count}", await best(50, partial(store.read, log.ids[0], after=3, limit=count)))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sync", choices=("normal", "full"), default="normal")
    arguments.add_argument("--folder", help="where the file is made; a temporary folder if not given")
    arguments.add_argument("--store", help="another store than a SQLite file; its schema should be a fresh one")
    given = arguments.parse_args()
    if given.store:
        asyncio.run(measure(given.store, inline=False))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        url = f"sqlite:{Path(folder) / 'micro.db'}?sync={given.sync}"
        asyncio.run(measure(url, inline=given.sync == "normal"))


if __name__ == "__main__":
    main()
