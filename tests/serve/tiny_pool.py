"""A pool of workers that speak on the channel and do nothing else: a start takes a moment, not most of a second.

    python -m tests.serve.tiny_pool FOLDER COUNT

The parent is the real one, with shorter pauses. Files in the folder tell workers what to do: with `waits` they say that
the store fails, with `dies` they are killed as they start, with `hangs` they are never ready and do not end at SIGTERM.
Otherwise they are ready, and end when the parent says so; with `stays`, not when they are replaced. `limit` holds the
seconds that a start may take. With `late` the parent is told to stop while it starts a worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from perdure._core.backoff import Pauses
from perdure.serve import worker_pool
from perdure.serve.worker_pool import LEAVE, TOKENS, Fault, Worker, WorkerChannel, WorkerPool

REASON = "the store fails"


def work(folder: Path, channel: WorkerChannel) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # how a worker is ended that is not known to be ready
    if (folder / "hangs").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / "hanging").write_text(str(os.getpid()))
        while True:
            signal.pause()
    if (folder / "dies").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if (folder / "waits").exists():
        channel.send_failed(REASON, Fault.STORE)
        return 2
    channel.send_ready()
    while not (words := channel.receive().replace(TOKENS, b"")) or (words == LEAVE and (folder / "stays").exists()):
        if words:
            (folder / "told").touch()
        select.select([channel], [], [])
    return 0


class LatePool(WorkerPool):
    """Is told to stop when the process of its first worker has been started, and is not yet known to the pool."""

    def __init__(self, start: Callable[[], Awaitable[Worker]], **options: Any) -> None:
        async def start_late() -> Worker:
            worker = await start()
            os.kill(os.getpid(), signal.SIGTERM)
            await self._ending.wait()
            return worker

        super().__init__(start_late, **options)


def main() -> int:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    if (channel := WorkerChannel.from_environment(os.environ)) is not None:
        return work(folder, channel)
    from perdure.serve.listener import listen

    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
    worker_pool.PAUSES = Pauses(first=0.01, longest=0.1, free=1)
    worker_pool.SLOW_SECONDS = worker_pool.KILL_SECONDS = 0.1
    with contextlib.suppress(FileNotFoundError):
        worker_pool.START_SECONDS = float((folder / "limit").read_text())
    if (folder / "late").exists():
        worker_pool.WorkerPool = LatePool  # type: ignore[misc]
    with listen("127.0.0.1", 0) as listener:
        return worker_pool.run_workers(
            [sys.executable, "-m", "tests.serve.tiny_pool", *sys.argv[1:]],
            environment=os.environ,
            listener=listener,
            count=count,
            longest_drain=0.0,
            on_ready=lambda: print("ready", flush=True),
        )


if __name__ == "__main__":
    sys.exit(main())
