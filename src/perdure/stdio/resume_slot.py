"""Keeps the resume token of a bridge in its slot, and chooses that slot among its host's slots in one folder (T9).

A slot is a token, the bridge's positions, and a lock that its bridge holds for as long as it lives. A session *waits*
in a slot that has a token and whose lock is free. The bridges of one host and target get nothing from the host by which
they differ, and hosts stop and start them in any order. So a bridge follows another one only where there is no choice,
and begins a fresh session otherwise (T7):

| sessions that wait | slots in use | the new bridge |
|---|---|---|
| one | any | goes on with that session: its bridge has ended |
| several | any | begins a fresh session, and deletes their tokens: otherwise no bridge could be resumed any more |
| none | one | waits for its bridge to end, because hosts start the new bridge before the old one has ended |
| none | several | waits to the end of its time whether one of the bridges ends, or several |
| none | none | begins a fresh session |

Each target has a folder of its own, because a token is offered to the same target only (T9). A slot's files carry the
host's pid and start in their names (T1). On Linux both may be the same after the machine was started again, and in
another container. So the folder's name begins with the place in which they were counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perdure._files.locks import let_go_in_child, release
from perdure._files.private import Folder, Untrusted
from perdure.stdio.identity import Identity, Processes, here
from perdure.telemetry.log_records import log_event

#: Bridges of one host and target at the same time: more than a host has windows.
MAX_SLOTS = 64
#: Seconds after which the files of a host that cannot be seen from here (another container, an earlier start of the
#: machine, another machine with the same home) are removed. No session is kept for so long after its last use, unless
#: an operator says so.
FORGOTTEN = 30 * 24 * 3600
#: Seconds for which a bridge waits for a slot of its target: hosts start the new one before the old one has ended.
PATIENCE = 1.0
#: Seconds between two attempts at locked slots.
POLL = 0.02
_TOKEN = re.compile(r"[A-Za-z0-9_-]{64}")
_FOLDER = re.compile(r"(?P<place>[0-9a-f]{16})-[0-9a-f]{32}")
_NAME = re.compile(
    r"(?:token|positions|lock)-(?P<pid>[1-9]\d{0,9})-(?P<start>\d{1,19})(?:\.(?P<number>[1-9]\d{0,5}))?(?:\.new)?"
)


def _digest(*parts: object) -> str:
    # JSON keeps the parts apart, whatever stands in them; it also holds bytes that are not text.
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server of a bridge and how the bridge was called, as spelled: another spelling may mean another server."""

    url: str
    arguments: Sequence[str] = ()
    directory: str | os.PathLike[str] = ""
    secret: str = ""
    """The credential itself, where it is the same for as long as the bridge lives: two users of one server are two
    targets. The digest holds too little of it to find it by."""

    @property
    def digest(self) -> str:
        secret = _digest(self.secret)[:8] if self.secret else ""
        return _digest(self.url, list(self.arguments), os.fspath(self.directory), secret)


def folder_name(identity: Identity, target: Target) -> str:
    return f"{_digest(identity.boot, identity.space)[:16]}-{target.digest[:32]}"


@dataclass(frozen=True, kw_only=True)
class SlotName:
    """The slot that a file belongs to."""

    pid: int
    start: int
    number: int = 1

    def __str__(self) -> str:
        """The first slot has exactly the name of T1."""
        return f"{self.pid}-{self.start}" + (f".{self.number}" if self.number > 1 else "")

    def file(self, kind: str) -> str:
        return f"{kind}-{self}"


def slot_names(folder: Folder) -> list[SlotName]:
    """Return the slots that have files in a folder. Files of other names are not ours."""
    names = {name for file in folder.names() if (name := parse_name(file)) is not None}
    return sorted(names, key=lambda name: (name.pid, name.start, name.number))


def parse_name(file: str) -> SlotName | None:
    """Return None for the name of a file that is not ours."""
    if (match := _NAME.fullmatch(file)) is None or match["number"] == "1":
        return None
    return SlotName(pid=int(match["pid"]), start=int(match["start"]), number=int(match["number"] or 1))


@dataclass(frozen=True, kw_only=True)
class SlotState:
    """A slot, as it is seen from outside."""

    name: SlotName
    has_token: bool
    is_held: bool


@dataclass(frozen=True, kw_only=True)
class LockedSlot:
    """A slot whose lock this process holds."""

    folder: Folder
    name: SlotName
    lock: int

    @property
    def has_token(self) -> bool:
        return self.folder.changed(self.name.file("token")) > 0

    def forget(self) -> None:
        self.folder.remove(self.name.file("token"), self.name.file("positions"))


def remove_leftovers(top: Folder, identity: Identity, processes: Processes, *, now: float) -> None:
    """Remove the files of dead hosts. A slot that a bridge holds stays, and so does every file that is not ours."""
    for entry in top.names():
        if (match := _FOLDER.fullmatch(entry)) is None:
            continue
        is_here = match["place"] == _digest(identity.boot, identity.space)[:16]
        with contextlib.suppress(OSError), contextlib.closing(Folder(top.path / entry)) as folder:
            is_old = top.changed(entry) < (now - FORGOTTEN) * 1e9
            for name in slot_names(folder):
                is_own = is_here and (name.pid, name.start) == (identity.pid, identity.start)
                if is_own or not (processes.is_gone(name.pid, name.start) if is_here else is_old):
                    continue
                if (lock := folder.lock(name.file("lock"))) is not None:
                    files = [name.file(kind) for kind in ("token", "positions", "lock")]
                    folder.remove(*(file for one in files for file in (f"{one}.new", one) if folder.is_plain(file)))
                    os.close(lock)
                    sentence = f"Removed the files of host {name.pid}, which is gone"
                    log_event(logging.DEBUG, "token.removed", sentence, slot=str(name))
            if is_old and not is_here:
                folder.remove("lock")
                os.rmdir(folder.path)


class SlotChooser:
    """Chooses and locks a slot for one bridge in the folder of its target. Raises `OSError` where the folder cannot be
    used."""

    def __init__(self, folder: Folder, identity: Identity) -> None:
        self._folder = folder
        self._first = SlotName(pid=identity.pid, start=identity.start)
        self._held: int | None = None
        """Slots that were in use when they were first read, if no session waited."""

    def take(self, *, is_late: bool) -> LockedSlot | None:
        """Return the slot of this bridge; None to look again, which `is_late` excludes, or if all are in use.

        One bridge reads the slots at a time: two that lock a slot each would both find no other one.
        """
        names = self._names()
        free = [slot for name in names if (slot := self._lock(name)) is not None]
        waiting = [slot for slot in free if slot.has_token]
        if self._held is None:
            self._held = 0 if waiting else len(names) - len(free)
        must_wait = not is_late and (self._held > 1 if waiting else self._held > 0 and not free)
        chosen = next(iter(waiting or free), None)
        if len(waiting) > 1:
            sentence = "Several sessions of this host wait and cannot be told apart, starting fresh session"
            log_event(logging.WARNING, "token.alike", sentence, sessions=len(waiting))
            for slot in waiting:
                slot.forget()
        elif must_wait:
            chosen = None
        for slot in free:
            if slot is not chosen:
                os.close(slot.lock)
        return chosen if chosen or must_wait else self.take_new()

    def take_new(self) -> LockedSlot | None:
        """Return the first slot in which no session waits."""
        for number in range(1, MAX_SLOTS + 1):
            if (slot := self._lock(replace(self._first, number=number))) is not None:
                if not slot.has_token:
                    return slot
                os.close(slot.lock)
        return None

    def survey(self) -> list[SlotState]:
        """Return the slots of this host, as a bridge that starts now would find them. Nothing is taken."""
        found = []
        for name in self._names():
            if (slot := self._lock(name)) is not None:
                os.close(slot.lock)
            has_token = self._folder.changed(name.file("token")) > 0
            found.append(SlotState(name=name, has_token=has_token, is_held=slot is None))
        return found

    def _names(self) -> list[SlotName]:
        return [name for name in slot_names(self._folder) if replace(name, number=1) == self._first]

    def _lock(self, name: SlotName) -> LockedSlot | None:
        lock = self._folder.lock(name.file("lock"))
        return None if lock is None else LockedSlot(folder=self._folder, name=name, lock=lock)


class Slot:
    """Keeps the token of one bridge, and of no other one at the same time.

    1. `token` returns what was kept last in this slot, by a bridge of the same host and target; else None.
    2. `keep` is True only when the token is on the disk; a later reader finds this one or the previous one.
    3. Nothing raises. After `release`, and where resume is off (`Slot()`), nothing is read or written.

    The bridge never asks whether resume is on (T6).
    """

    holder = ""
    """Names this host, target and slot to the broker; empty where resume is off."""
    positions: Path | None = None
    """A file beside the token for the bridge's own positions, removed with it; None where resume is off."""

    def __init__(self, taken: LockedSlot | None = None) -> None:
        self._taken = taken
        if taken is not None:
            self.holder = _digest(taken.folder.path.name, str(taken.name))
            self.positions = taken.folder.path / taken.name.file("positions")
        let_go_in_child(self)

    def token(self) -> str | None:
        if (taken := self._taken) is None:
            return None
        try:
            data = taken.folder.read(taken.name.file("token"), limit=64)
            if data is None:
                log_event(logging.INFO, "token.not_found", "Token file not found (first run or clean slate)")
                return None
            return _checked(data)
        except Untrusted as reason:
            log_event(logging.WARNING, "token.corrupted", "Token file corrupted, treating as stale", reason=str(reason))
            # A sentence of its own, because programs look for the one above as it stands.
            path = taken.folder.path / taken.name.file("token")
            log_event(logging.WARNING, "token.unused", f"The token file {path} is not used: {reason}")
            taken.forget()
            return None

    def keep(self, token: str, /) -> bool:
        if (taken := self._taken) is None:
            return False
        try:
            _checked(token.encode())
            if not taken.folder.is_still(taken.name.file("lock"), taken.lock):
                raise FileNotFoundError(f"lock-{taken.name} was removed, so the slot may be another bridge's")
            taken.folder.write(taken.name.file("token"), token.encode())
        except (OSError, Untrusted) as error:
            log_event(logging.WARNING, "token.write_failed", f"Failed to write token file: {error}")
            return False
        return True

    def forget(self) -> None:
        """Delete the token and the positions: their session is not the bridge's any more."""
        if self._taken is not None:
            self._taken.forget()

    def release(self) -> None:
        """Free the lock; the files stay."""
        if self._taken is not None:
            with contextlib.suppress(OSError):
                os.utime(self._taken.lock)  # where room is needed, the slot unused for longest is deleted
            self.let_go(release)

    def let_go(self, close: Callable[[int], None] = os.close) -> None:
        if self._taken is not None:
            close(self._taken.lock)
            self._taken.folder.close()
            self._taken = None


async def open_slot(
    directory: str | os.PathLike[str] | None,
    identity: Identity | None,
    target: Target,
    *,
    processes: Processes | None = None,
    patience: float = PATIENCE,
    now: float | None = None,
) -> Slot:
    """Return the slot of this bridge, locked. Never raises: where there is none, resume is off and the log says why."""
    if identity is None:
        return Slot()  # `identify` has logged why
    if directory is None:
        return resume_off("no directory for its tokens is known")
    with contextlib.ExitStack() as stack:
        try:
            with contextlib.closing(Folder(directory)) as top:
                if (table := processes or here()) is not None:
                    remove_leftovers(top, identity, table, now=time.time() if now is None else now)
                path = top.path / folder_name(identity, target)
            folder = stack.enter_context(contextlib.closing(Folder(path)))
            chooser = SlotChooser(folder, identity)
            deadline = time.monotonic() + patience
            while True:
                is_late = time.monotonic() >= deadline
                with folder.alone() as is_alone:
                    # The other slots were not read, so the session is a fresh one.
                    taken = chooser.take(is_late=is_late) if is_alone else chooser.take_new() if is_late else None
                if taken is not None:
                    stack.pop_all()
                    return Slot(taken)
                if is_late:
                    raise OSError(f"all {MAX_SLOTS} slots of this host are in use")
                await asyncio.sleep(POLL)
        except (OSError, RuntimeError, ValueError) as error:
            return resume_off(str(error))


def survey(directory: str | os.PathLike[str], identity: Identity, target: Target) -> list[SlotState]:
    """Return the slots of a host and a target; no folder is made. Raises `OSError` where one cannot be used."""
    path = Path(directory, folder_name(identity, target))
    if not os.path.lexists(path):
        return []
    with contextlib.closing(Folder(path)) as folder, folder.alone():
        return SlotChooser(folder, identity).survey()


def _checked(token: bytes) -> str:
    text = token.decode("ascii", errors="replace")
    if not _TOKEN.fullmatch(text):
        raise Untrusted(f"a token has 64 characters of base64url, these are {len(token)} bytes of something else")
    return text


def resume_off(reason: str) -> Slot:
    log_event(logging.WARNING, "token.off", f"Session resume disabled for this instance: {reason}")
    return Slot()


def default_directory(environ: Mapping[str, str], *, platform: str, home: Path | None) -> Path | None:
    """Return the folder for tokens if the user names none: this user's state that is not worth a backup."""
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if platform == "darwin":
        return home and home / "Library" / "Application Support" / "perdure" / "stdio"
    if state.is_absolute():  # a relative one is to be ignored, says the XDG specification
        return state / "perdure" / "stdio"
    return home and home / ".local" / "state" / "perdure" / "stdio"
