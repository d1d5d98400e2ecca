"""What joins a worker to the parent that started it: the listening socket, and a socket of their own.

The worker says on it that it is ready, or why it does not start, so that one reason is told once and not by every
worker. The parent says on it what the worker is to do about the end. Its own end tells the worker that the parent is
gone, however that happened: nothing has to run in the parent for it.

The end is told by words and not by signals because whoever manages processes (a terminal, systemd) often sends a signal
to all of them: a worker would hear of one stop twice, and the second time means *at once*.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

VARIABLE = "PERDURE_WORKER_FDS"
"""Makes a process a worker: the numbers of the two sockets that it inherits."""

READY = b"ready\n"
FAILED = b"failed "
WAITS = b"waits_ "
"""The store fails; another start may go well. As long as `FAILED`."""

# What the parent says; each word is one byte, so that words cannot run together.
DRAIN = b"d"
"""The server stops: drain, and go on listening to tell clients so."""
LEAVE = b"l"
"""Siblings go on: let them have the port, and end once no client uses a connection any more."""
AT_ONCE = b"n"
GONE = b"g"
"""Nobody says this: there is no parent any more."""

MAX_REASON = 4096
"""Bytes of a reason; a message of somebody else's may be of any length."""


class WorkerChannel:
    """The worker's end."""

    def __init__(self, listener: socket.socket, parent: socket.socket) -> None:
        self.listener = listener
        self._parent = parent

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> WorkerChannel | None:
        """The leash of this process, if it is a worker. Programs that it starts are none."""
        numbers = environment.pop(VARIABLE, None)
        if numbers is None:
            return None
        listener, parent = (int(number) for number in numbers.split(","))
        for number in (listener, parent):
            os.set_inheritable(number, False)
        leash = cls(socket.socket(fileno=listener), socket.socket(fileno=parent))
        leash._parent.setblocking(False)
        return leash

    def fileno(self) -> int:
        return self._parent.fileno()

    def ready(self) -> None:
        self._say(READY)

    def failed(self, reason: str, *, passes: bool = False) -> None:
        """It does not start. `passes`: because of something that may pass by itself."""
        said = " ".join(reason.split()).encode(errors="replace")
        self._say((WAITS if passes else FAILED) + said[:MAX_REASON] + b"\n")

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # a parent that is gone is noticed by `hear`
            self._parent.sendall(word)

    def hear(self) -> bytes:
        """What the parent has said since."""
        try:
            return self._parent.recv(64) or GONE
        except BlockingIOError:
            return b""
        except OSError:
            return GONE
