"""One worker process, as its parent sees it."""

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

    def __init__(self, reason: str, *, told: bool, passes: bool = False) -> None:
        super().__init__(reason)
        self.told = told
        """The reason is the worker's own, about what it was asked to serve."""
        self.passes = passes
        """The reason may pass by itself: the store fails. Otherwise the program is broken, or is killed."""


class Worker:
    """A process that serves on the shared socket."""

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
        """A fresh interpreter: nothing of the parent's state is in it but the two sockets."""
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
        word = asyncio.create_task(self._word())
        try:
            # Both: a program that the worker started may hold its end of the channel open.
            await asyncio.wait({word, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            said = word.result() if word.done() else b""
        finally:
            word.cancel()
        if said.startswith((FAILED, WAITS)):
            reason = said[len(FAILED) :].decode(errors="replace").strip()
            raise NotReady(reason, told=True, passes=said.startswith(WAITS))
        if said != READY:
            raise NotReady(f"it ended with {say_status(await asyncio.shield(self.ended))}", told=False)
        self.is_ready = True

    async def _word(self) -> bytes:
        said = b""
        with contextlib.suppress(OSError):
            while not said.endswith(b"\n") and (
                data := await asyncio.get_running_loop().sock_recv(self._channel, _WORD)
            ):
                said += data
        return said

    def tell(self, word: bytes) -> None:
        """Tell it how to end. Before it is ready it does not listen, and has nothing to lose."""
        if self.is_ready:
            with contextlib.suppress(OSError):
                self._channel.send(word)
        else:
            self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(sig)


def say_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
