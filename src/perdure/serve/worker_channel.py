"""The channel between a worker and the parent that started it: a pair of sockets, beside the listening socket.

The worker says on it that it is ready, or why it does not start, so that the parent shows one reason once. The parent
says on it how the worker is to end. When the channel closes, the worker knows that the parent is gone, however that
happened: nothing has to run in the parent for it.

The parent uses words and not signals because a terminal or systemd often sends a signal to all processes: a worker
would learn of one stop twice, and the second time means *at once*.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

VARIABLE = "PERDURE_WORKER_FDS"
"""The environment variable that makes a process a worker: the numbers of the two sockets that it inherits."""

READY = b"ready\n"
FAILED = b"failed "
WAITS = b"waits_ "
"""The store fails; another start may go well. As long as `FAILED`."""

# What the parent says; each word is one byte, so that words cannot run together.
DRAIN = b"d"
"""The server stops: drain, and go on listening to answer clients."""
LEAVE = b"l"
"""Other workers go on: let them have the port, and end once no client uses a connection any more."""
AT_ONCE = b"n"
GONE = b"g"
"""Never sent: the channel is closed, because there is no parent any more."""

MAX_REASON = 4096
"""Bytes of a reason: the target's message may be of any length."""


class WorkerChannel:
    """The worker's end of the channel."""

    def __init__(self, listener: socket.socket, parent: socket.socket) -> None:
        self.listener = listener
        self._parent = parent

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> WorkerChannel | None:
        """The channel of this process, if it is a worker. Programs that it starts are not workers."""
        numbers = environment.pop(VARIABLE, None)
        if numbers is None:
            return None
        listener, parent = (int(number) for number in numbers.split(","))
        for number in (listener, parent):
            os.set_inheritable(number, False)
        channel = cls(socket.socket(fileno=listener), socket.socket(fileno=parent))
        channel._parent.setblocking(False)
        return channel

    def fileno(self) -> int:
        return self._parent.fileno()

    def send_ready(self) -> None:
        self._send(READY)

    def send_failed(self, reason: str, *, is_transient: bool = False) -> None:
        """The worker does not start. `is_transient`: another start may go well, because the store fails."""
        line = " ".join(reason.split()).encode(errors="replace")
        self._send((WAITS if is_transient else FAILED) + line[:MAX_REASON] + b"\n")

    def _send(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # `receive` notices that the parent is gone
            self._parent.sendall(word)

    def receive(self) -> bytes:
        """The words that the parent has sent since."""
        try:
            return self._parent.recv(64) or GONE
        except BlockingIOError:
            return b""
        except OSError:
            return GONE
