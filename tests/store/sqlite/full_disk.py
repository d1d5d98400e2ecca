"""A store on a disk that fills up. Run with the folder and the way it fills; status 0 if all went as promised.

`limit`: this process may not make files larger than so much (the write fails with EFBIG).
`tmpfs`: a small file system is mounted on the folder first (the write fails with ENOSPC); needs a mount namespace.
"""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from perdure._core.ids import Fence
from perdure.errors import StoreUnavailable
from perdure.store.records import Event
from perdure.store.sqlite import SqliteStore
from perdure.store.steps import OpenStream, PutSession
from perdure.testing._values import NODE, a_session, a_stream, an_append, numbers, put

ROOM = 1 << 20


def fill_by_limit(folder: Path) -> Callable[[], None]:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def fill_by_tmpfs(folder: Path) -> Callable[[], None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={3 * ROOM}", "tmpfs", str(folder)], check=True)
    ballast = folder / "ballast"
    ballast.write_bytes(b"x" * 2 * ROOM)
    return ballast.unlink


async def append_until_full(store: SqliteStore, fence: Fence, *, patient: bool, last: int = 0) -> int:
    """The number of the last event that was accepted; the one after it was refused for lack of room."""
    while True:
        step = an_append(fence, [Event(last + 1, 1.0, b"x" * 10_000)])
        try:
            refusals = await (store.commit([step]) if patient else put(store, step))
        except StoreUnavailable:
            return last
        assert list(refusals) == [None]
        last += 1


async def check(folder: Path, make_room: Callable[[], None]) -> None:
    path = folder / "log.db"
    store = SqliteStore(str(path))
    await store.open()
    fence = await store.join(NODE)
    await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence)))
    last = await append_until_full(store, fence, patient=False)
    assert last > 10
    assert await append_until_full(store, fence, patient=True, last=last) == last, "still full"
    assert await numbers(store) == list(range(1, last + 1)), "reading goes on"
    make_room()
    for seq in range(last, last + 20):
        assert list(await put(store, an_append(fence, [Event(seq, 1.0, b"x" * 10_000)]))) == [None]
    await store.aclose()
    async with SqliteStore(str(path)) as again:
        assert await numbers(again) == list(range(1, last + 20))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


if __name__ == "__main__":
    way = {"limit": fill_by_limit, "tmpfs": fill_by_tmpfs}[sys.argv[2]]
    asyncio.run(check(Path(sys.argv[1]), way(Path(sys.argv[1]))))
