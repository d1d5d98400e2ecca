"""Appends in a tight loop and reports each commit that returned, until it is killed.

Started once, it takes lines `MODE PATH` on its standard input and does each in a forked child, because starting Python
and importing everything takes far longer than what is to be tested. It writes, a line each: `pid N`; `ack STREAM LAST
SEALED` for each commit; `gone` when the child is dead.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterator, Sequence

from perdure._core.ids import Fence
from perdure._core.states import CallState
from perdure.store.records import Event
from perdure.store.sqlite import SqliteStore
from perdure.store.sqlite import writer as _sqlite_checkpoints
from perdure.store.steps import Append, CallEnd, OpenStream, PutSession, Step
from perdure.testing._values import NODE, a_call, a_session, a_stream, an_append, put

WRITERS = 8


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def life_of_a_stream(name: str, fence: Fence) -> Iterator[tuple[Sequence[Step], int, bool]]:
    """Steps with the end they lead to: the stream is opened, grows, and is sealed together with its call's end."""
    yield (
        [PutSession(record=a_session()), OpenStream(record=a_stream(fence, name), calls=(a_call(stream=name),))],
        0,
        False,
    )
    last = 0
    commits = random.randint(1, 5)
    for commit in range(1, commits + 1):
        first, last = last + 1, last + random.randint(1, 6)
        yield [growth(name, fence, first, last, over=commit == commits)], last, commit == commits


def growth(name: str, fence: Fence, first: int, last: int, *, over: bool) -> Append:
    events = [
        Event(seq, 1.0, b"%d " % seq * random.randint(1, 200), over and seq == last) for seq in range(first, last + 1)
    ]
    end = CallEnd(incarnation=1, request_id=1, state=CallState.ANSWERED)
    return an_append(fence, events, stream=name, ends=(end,) if over else (), seal=over)


async def write(store: SqliteStore, fence: Fence, writer: int, *, inline: bool) -> None:
    for number in range(1_000_000):
        name = f"{os.getpid()}-{writer}-{number}"
        for steps, last, sealed in life_of_a_stream(name, fence):
            refusals = await (put(store, *steps) if inline else store.commit(steps))
            assert not any(refusals), refusals
            tell(f"ack {name} {last} {int(sealed)}")


async def append_for_ever(mode: str, path: str) -> None:
    # Checkpoints all the time: a kill shall meet those, too.
    _sqlite_checkpoints.STEP, _sqlite_checkpoints.MAX_LOG = 64 << 10, 256 << 10
    store = SqliteStore(path)
    await store.open()
    fence = await store.join(NODE)
    writers = 1 if mode == "inline" else WRITERS
    await asyncio.gather(*(write(store, fence, writer, inline=mode == "inline") for writer in range(writers)))


def main() -> None:
    for line in sys.stdin:
        mode, path = line.split()
        pid = os.fork()
        if pid == 0:
            random.seed(os.getpid())
            asyncio.run(append_for_ever(mode, path))
        tell(f"pid {pid}")
        os.waitpid(pid, 0)
        tell("gone")


if __name__ == "__main__":
    main()
