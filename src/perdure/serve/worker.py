"""One worker process: its parent starts it, waits until it serves, and tells it to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from perdure.serve.worker_channel import FAILED, MAX_REASON, READY, VARIABLE, WAITS

_WORD = len(FAILED) + MAX_REASON + 1


class NotReady(Exception):
    """A worker ended, or said why it cannot serve, before it was ready."""

    def __init__(self, reason: str, *, is_explained: bool, is_transient: bool = False) -> None:
        super().__init__(reason)
        self.is_explained = is_explained
        """The worker gave the reason itself, about what it was asked to serve."""
        self.is_transient = is_transient
        """The store fails, so another start may go well. Otherwise the program is broken, or is killed."""


class Worker:
    """A process that serves on the shared socket, as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self.pid = process.pid
        self.is_ready = False
        self.ended = asyncio.create_task(process.wait())
        """Its exit status."""
        self._began = time.monotonic()
        self._process = process
        self._channel = channel
        self.ended.add_done_callback(lambda _: channel.close())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], listener: socket.socket) -> Worker:
        """Start a new interpreter, which has nothing of the parent's state but the two sockets."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            sockets = (listener.fileno(), theirs.fileno())
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    env={**environment, VARIABLE: ",".join(map(str, sockets))},
                    pass_fds=sockets,
                    stdin=asyncio.subprocess.DEVNULL,
                    # Ctrl-C goes to the whole group of a terminal; while a worker starts it would end with a traceback.
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, ours)

    @property
    def age(self) -> float:
        return time.monotonic() - self._began

    async def get_ready(self) -> None:
        """Wait until it serves. Raises `NotReady`."""
        reading = asyncio.create_task(self._read_word())
        try:
            # Both: a program that the worker started may hold its end of the channel open.
            await asyncio.wait({reading, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            word = reading.result() if reading.done() else b""
        finally:
            reading.cancel()
        if word.startswith((FAILED, WAITS)):
            reason = word[len(FAILED) :].decode(errors="replace").strip()
            raise NotReady(reason, is_explained=True, is_transient=word.startswith(WAITS))
        if word != READY:
            raise NotReady(f"it ended with {format_status(await asyncio.shield(self.ended))}", is_explained=False)
        self.is_ready = True

    async def _read_word(self) -> bytes:
        word = b""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while not word.endswith(b"\n") and (data := await loop.sock_recv(self._channel, _WORD)):
                word += data
        return word

    def end(self, word: bytes) -> None:
        """Tell it how to end. Before it is ready it does not listen, and has nothing to lose."""
        if self.is_ready:
            with contextlib.suppress(OSError):
                self._channel.send(word)
        else:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(sig)


def format_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
