"""A tiny app under `perdure.serve.uvicorn_server.serve`, for tests of starting and stopping."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import cast

from starlette.types import Receive, Scope, Send

from perdure.errors import NodeBuried, PerdureError, StoreLost, StoreTooNew
from perdure.http.app import App
from perdure.serve import uvicorn_server as serving
from perdure.serve.listener import listen
from perdure.serve.worker_pool import LEAVE, WorkerChannel
from perdure.settings import Settings


class SmallApp:
    """Streams until it is told to stop. The mode says what goes wrong."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.draining = asyncio.Event()
        self.stopping = asyncio.Event()
        self.task_over = False

    def end_task(self, *_: object) -> None:
        print("the task is over", flush=True)
        self.task_over = True

    async def drain(self) -> None:
        self.draining.set()
        match self.mode:
            case "drains-for-ever":
                await asyncio.Event().wait()
            case "drain-raises":
                raise ValueError("no plug")

    def when_lost(self, tell: Callable[[StoreLost], None]) -> None:
        self.tell = tell

    def begin_stop(self) -> None:
        self.stopping.set()

    @property
    def is_busy(self) -> bool:
        return self.has_tasks

    @property
    def running(self) -> list[str]:
        return []

    @property
    def has_tasks(self) -> bool:
        """A task runs until SIGUSR2."""
        return self.mode == "worker-with-a-task" and not self.task_over

    def end_idle_readers(self) -> None:
        pass

    async def learn_tools(self) -> None:
        pass

    def leave_at_steps(self) -> None:
        pass

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
        else:
            await self.stream(send)

    async def lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        match self.mode:
            case "start-raises":
                raise KeyError("DATABASE")
            case "start-refuses":
                raise ExceptionGroup("two", [ExceptionGroup("one", [StoreTooNew("log.db is too new")])])
        if self.mode == "stuck-thread":
            threading.Thread(target=time.sleep, args=(3600,)).start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.mode == "stop-raises":
            raise OSError("disk full")
        await send({"type": "lifespan.shutdown.complete"})

    async def stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        if self.mode == "drains-for-ever":
            await self.draining.wait()
            await send({"type": "http.response.body", "body": b"draining", "more_body": True})
        if self.mode == "buried":
            self.tell(NodeBuried())
        await self.stopping.wait()
        if self.mode == "looks-for-itself":
            found = any(thing is self for thing in gc.get_objects())
            await send({"type": "http.response.body", "body": b"found" if found else b"not found", "more_body": True})
        if self.mode == "hangs":
            await send({"type": "http.response.body", "body": b"hanging", "more_body": True})
            await asyncio.Event().wait()
        await send({"type": "http.response.body", "body": b"ended"})


def main() -> int:
    # What never ends is waited for so long; `test_drain` knows the true times.
    serving.STOP_SECONDS = serving.LEAVE_SECONDS = serving.KEEP_ALIVE_SECONDS = 1
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        channel = channel_of_worker(listener) if sys.argv[1].startswith("worker") else None
        app = SmallApp(sys.argv[1])
        signal.signal(signal.SIGUSR2, app.end_task)
        return serving.serve(
            cast(App, app),
            listener=listener,
            settings=Settings(drain_timeout=0, task_drain=3_600),
            on_ready=lambda: print(f"perdure: serving on {url}", flush=True),
            on_failure=print,
            channel=channel,
        )


def channel_of_worker(listener: socket.socket) -> WorkerChannel:
    """The channel of a worker whose parent is this process: it tells the worker to leave at SIGUSR1."""
    ours, theirs = socket.socketpair()
    signal.signal(signal.SIGUSR1, lambda *_: ours.send(LEAVE))
    return WorkerChannel(theirs, listener)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PerdureError as error:
        sys.exit(f"refused: {error}")
