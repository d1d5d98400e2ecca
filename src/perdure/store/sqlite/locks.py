"""Decides which nodes are alive by locks, which the operating system frees.

Each node has a file in a folder beside the store, and keeps it locked (`flock`) for its life. The file is made before
the node's row is committed, so a row without a locked file is that of a dead node. The process that finds a dead node
locks the file until the node is buried: one process settles what the node left, and if that one dies, the next. Only
the process that holds a file's lock may remove it, and a lock counts only if the file is still the one of that name.

A second file of each node shows whether the node holds steps that the store does not have. The node keeps that file
locked while it holds nothing, and unlocks it before it shows the first event that is not stored: unlocking cannot fail,
waits for no other process and needs no write. Locking it again may have to be repeated, if another process reads it at
that moment; until then the node counts as a holder.
"""

import contextlib
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterable
from urllib.parse import quote, unquote

from perdure._core.ids import NodeId
from perdure._core.leases import Claim
from perdure._files.locks import HAS_FLOCK, NO_FLOCK, SoleHolder, flock, let_go_in_child, lock_file, open_file, unlock
from perdure._files.private import check_folder
from perdure.errors import StoreError, StoreUnavailable

PATIENCE = 1.0
"""Seconds for which a node that joins waits for a process that takes its new file for that of a dead node."""

_LOCK = ".lock"
_WELL = ".well"
_SOCKET = ".sock"
_TRIES = 100


class Locks:
    """The locks of one process: of its own nodes, and of the dead ones that it settles. May be used in any thread."""

    def __init__(self, path: str) -> None:
        # As SQLite names the log: whichever link the file was opened by, it is one folder.
        self.folder = os.path.realpath(path) + "-nodes"
        self._own: dict[NodeId, int] = {}
        self._claims: dict[NodeId, Claim] = {}
        """Of this process's own nodes: each holds as long as the lock."""
        self._settling: dict[NodeId, int] = {}
        self._well: dict[NodeId, int] = {}
        """The second files of this process's own nodes."""
        self._holding: set[NodeId] = set()
        """Own nodes that hold something."""
        self._turn = threading.RLock()
        let_go_in_child(self)

    def let_go(self) -> None:
        """Close the files without freeing the locks, which another process has as well."""
        self._bury_claims()
        for held in (self._own, self._settling, self._well):
            while held:
                os.close(held.popitem()[1])

    def holds(self, node: NodeId) -> bool:
        return node in self._own

    def claim(self, node: NodeId) -> Claim:
        """The claim of an own node; buried for any other."""
        if (claim := self._claims.get(node)) is None:
            claim = Claim()
            claim.bury()
        return claim

    def _bury_claims(self) -> None:
        while self._claims:
            self._claims.popitem()[1].bury()

    def socket_path(self, node: NodeId) -> str:
        return self._path(node, _SOCKET)

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
            try:
                self._well[node] = self._open(self._path(node, _WELL))
            except OSError as error:
                self._remove(node, held)
                raise self._unusable(error) from error
            self._own[node] = held
            self._claims[node] = Claim()
            self.hold(node, False)

    def leave(self, node: NodeId) -> None:
        with self._turn:
            if (held := self._own.pop(node, None)) is not None:
                self._claims.pop(node).bury()
                self._remove(node, held)

    def hold(self, node: NodeId, holding: bool) -> None:
        with self._turn:
            if holding and node in self._well:
                self._holding.add(node)
                unlock(self._well[node])
            else:
                self._holding.discard(node)
                self.lock_again()

    def lock_again(self) -> None:
        """Lock the second files of own nodes that hold nothing, where another process read one when it was tried."""
        with self._turn:
            for node in self._well.keys() - self._holding:
                flock(self._well[node])

    def holders(self) -> list[NodeId]:
        """Return the living nodes that hold something, this process's own included."""
        with self._turn:
            others = [node for node in self.names() if node not in self._settling]
            # One without the second file is of a release that has none, or is about to join or to leave.
            wells = [node for node in others if self._is_free(node, _WELL) is True]
            return [*self._holding, *(node for node in wells if self._is_free(node, _LOCK) is False)]

    def _is_free(self, node: NodeId, suffix: str) -> bool | None:
        """Whether no process has a file locked; `None` without such a file. Several processes may read it at once."""
        try:
            file = os.open(self._path(node, suffix), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                return flock(file, shared=True)
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error) from error

    def is_held(self, node: NodeId) -> bool:
        """Whether a process holds the node's lock. Changes nothing."""
        return node in self._own or self._is_free(node, _LOCK) is False

    def lives(self, node: NodeId) -> bool:
        """Whether a process holds the node's lock. Removes the file of a dead node."""
        with self._turn:
            if node in self._own or node in self._settling:
                return node in self._own
            if (held := self._lock(node)) is None:
                return True
            self._remove(node, held)  # a missing file means the same as one that is not locked
            return False

    def take(self, nodes: Iterable[NodeId]) -> tuple[list[NodeId], list[NodeId]]:
        """Return those of the nodes that are dead, and those that live."""
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
        """Remove the file of a node whose row was deleted."""
        with self._turn:
            if self._take(node):
                self._remove(node, self._settling.pop(node))

    def names(self) -> list[NodeId]:
        """Return the nodes that have files, without this process's own."""
        try:
            entries = os.listdir(self.folder)
        except OSError:
            return []
        nodes = (NodeId(unquote(entry.removesuffix(_LOCK))) for entry in entries if entry.endswith(_LOCK))
        return [node for node in nodes if node not in self._own]

    def close(self) -> None:
        with self._turn:
            self._bury_claims()
            for held in (self._own, self._settling):
                while held:
                    self._remove(*held.popitem())
            self._holding.clear()
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)

    def _lock(self, node: NodeId) -> int | None:
        """Return the node's file, locked, and made if necessary; `None` if another process has it."""
        path = self._path(node, _LOCK)
        try:
            return lock_file(path, file=self._open(path))
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"the locks in {self.folder} cannot be used: {error.strerror}")

    def _open(self, path: str) -> int:
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.folder, 0o700)
            # The last process to close removes the folder, perhaps in this moment.
            with contextlib.suppress(FileNotFoundError):
                # A user who may write into the folder decides which nodes are alive.
                check_folder(os.lstat(self.folder), self.folder)
                return open_file(path)
        raise FileNotFoundError(errno.ENOENT, "the folder comes and goes")

    def _remove(self, node: NodeId, held: int) -> None:
        """The lock's file is deleted last: without it no process reads the others."""
        for suffix in (_SOCKET, _WELL, _LOCK):
            with contextlib.suppress(OSError):
                os.unlink(self._path(node, suffix))
        os.close(held)
        self._holding.discard(node)
        if (well := self._well.pop(node, None)) is not None:
            os.close(well)

    def _path(self, node: NodeId, suffix: str) -> str:
        return os.path.join(self.folder, quote(node, safe="") + suffix)


class SoleLocks(Locks):
    """Locks of a system without `flock`: one process has the log for itself, so all other nodes are dead."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._sole = SoleHolder(os.path.realpath(path) + "-process")

    def holds(self, node: NodeId) -> bool:
        return node in self._claims

    def join(self, node: NodeId) -> None:
        with self._turn:
            try:
                taken = self._sole.take(patience=PATIENCE)
            except sqlite3.Error as error:
                raise StoreUnavailable(f"the log cannot be locked: {error}") from error
            if not taken:
                raise StoreUnavailable(f"another process serves this log, and {NO_FLOCK}: one at a time may")
            self._claims.setdefault(node, Claim())

    def leave(self, node: NodeId) -> None:
        if (claim := self._claims.pop(node, None)) is not None:
            claim.bury()

    def is_held(self, node: NodeId) -> bool:
        """Of a process that has not joined: whether another one has the log."""
        if self._claims:
            return node in self._claims
        try:
            is_free = self._sole.take(patience=0)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the log cannot be locked: {error}") from error
        self._sole.release()
        return not is_free

    def lives(self, node: NodeId) -> bool:
        return node in self._claims

    def take(self, nodes: Iterable[NodeId]) -> tuple[list[NodeId], list[NodeId]]:
        """A process that has not joined does not know which nodes live."""
        nodes = list(nodes)
        dead = [node for node in nodes if self._claims and node not in self._claims]
        return dead, [node for node in nodes if node not in dead]

    def bury(self, node: NodeId) -> None:
        pass

    def names(self) -> list[NodeId]:
        return []

    def close(self) -> None:
        self._bury_claims()
        self._sole.release()


def locks_of(path: str) -> Locks:
    return Locks(path) if HAS_FLOCK else SoleLocks(path)
