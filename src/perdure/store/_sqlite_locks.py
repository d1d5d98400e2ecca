"""Who is alive, told by locks that the operating system frees.

Beside the file is a folder, and in it a file for each node, which the node keeps locked (`flock`) for its life. It is
made before the node's row is committed, so a row without a locked file is that of a dead node. Whoever finds one locks
it and keeps it so until the node is buried: one process settles what it left, and if that one dies, the next.

A file may be removed only by who holds its lock, and a lock counts only if the file is still the one of that name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterable
from urllib.parse import quote, unquote

from perdure._core.ids import NodeId
from perdure.errors import StoreError, StoreUnavailable

PATIENCE = 1.0
"""Seconds for which a node that joins waits for somebody who takes its new file for one that was left behind."""

_LOCK = ".lock"
_SOCKET = ".sock"
_TRIES = 100


_all: weakref.WeakSet[Locks] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A child that was forked shares its parent's locks: it must not keep them held when the parent dies."""
    for locks in list(_all):
        locks.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


class Locks:
    """The locks of one process: of its own nodes, and of the dead ones that it settles. May be used in any thread."""

    def __init__(self, path: str) -> None:
        # As SQLite names the log: whichever link the file was opened by, it is one folder.
        self.folder = os.path.realpath(path) + "-nodes"
        self._own: dict[NodeId, int] = {}
        self._settling: dict[NodeId, int] = {}
        self._turn = threading.RLock()
        _all.add(self)

    def let_go(self) -> None:
        """Close the files without freeing the locks, which another process has as well."""
        for held in (self._own, self._settling):
            while held:
                os.close(held.popitem()[1])

    def holds(self, node: NodeId) -> bool:
        return node in self._own

    def socket_name(self, node: NodeId) -> str:
        return _name(node) + _SOCKET

    def join(self, node: NodeId) -> None:
        """Lock the file of a node that is about to join."""
        with self._turn:
            if node in self._own:
                return
            deadline = time.monotonic() + PATIENCE
            while (held := self._lock(node)) is None:
                if time.monotonic() > deadline:
                    raise StoreError(f"node {node} has joined already")
                time.sleep(0.001)
            self._own[node] = held

    def leave(self, node: NodeId) -> None:
        with self._turn:
            if (held := self._own.pop(node, None)) is not None:
                self._remove(node, held)

    def lives(self, node: NodeId) -> bool:
        """Whether a process holds the node's lock; nothing is kept of a dead one's."""
        with self._turn:
            if node in self._own or node in self._settling:
                return node in self._own
            if (held := self._lock(node)) is None:
                return True
            self._remove(node, held)  # a file that is missing says the same as one that is not locked
            return False

    def take(self, nodes: Iterable[NodeId]) -> tuple[list[NodeId], list[NodeId]]:
        """Those of the nodes that are dead, and those that live."""
        dead: list[NodeId] = []
        alive: list[NodeId] = []
        with self._turn:
            for node in nodes:
                (dead if self._take(node) else alive).append(node)
        return dead, alive

    def _take(self, node: NodeId) -> bool:
        if node in self._own:
            return False
        if node not in self._settling and (held := self._lock(node)) is not None:
            self._settling[node] = held
        return node in self._settling

    def bury(self, node: NodeId) -> None:
        """The node's row is gone; its file follows."""
        with self._turn:
            if self._take(node):
                self._remove(node, self._settling.pop(node))

    def names(self) -> list[NodeId]:
        """Whose files are there, this process's own excepted."""
        try:
            entries = os.listdir(self.folder)
        except OSError:
            return []
        nodes = (NodeId(unquote(entry.removesuffix(_LOCK))) for entry in entries if entry.endswith(_LOCK))
        return [node for node in nodes if node not in self._own]

    def close(self) -> None:
        """Free all. A file that is missing says the same as one that is not locked."""
        with self._turn:
            for held in (self._own, self._settling):
                while held:
                    self._remove(*held.popitem())
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)

    def _lock(self, node: NodeId) -> int | None:
        """The node's file, made if need be, locked; `None` if somebody else has it."""
        path = os.path.join(self.folder, _name(node) + _LOCK)
        try:
            file = self._open(path)
            try:
                if _lock_at_once(file) and _is_still(file, path):
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)
        except OSError as error:
            raise StoreUnavailable(f"the locks in {self.folder} cannot be used: {error.strerror}") from error
        return None

    def _open(self, path: str) -> int:
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
            # Whoever closes last removes the folder, perhaps in this moment.
            with contextlib.suppress(FileNotFoundError):
                _refuse_foreign(self.folder)
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        raise FileNotFoundError(errno.ENOENT, "the folder comes and goes")

    def _remove(self, node: NodeId, held: int) -> None:
        """The socket first: where the lock's file is gone nobody looks for a socket."""
        for suffix in (_SOCKET, _LOCK):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.folder, _name(node) + suffix))
        os.close(held)


def _refuse_foreign(folder: str) -> None:
    """Whoever may write into the folder decides who is alive."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "the folder is not this user's alone")


def _lock_at_once(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _name(node: NodeId) -> str:
    return quote(node, safe="")
