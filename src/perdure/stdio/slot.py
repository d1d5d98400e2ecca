"""Keeps the resume token of a bridge in its slot, from one start of the bridge to the next.

slot = await open_slot(directory, identity, target)
token = slot.token()      # offer it; then slot.on_accepted() or slot.on_rejected()
slot.keep(token)          # each time the broker gives a new one; confirm it if this was True
slot.release()            # at the end: the next bridge may have it
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from perdure._files.locks import let_go_in_child, release
from perdure._files.private import Folder, Untrusted
from perdure.stdio.identity import Identity, Processes, here
from perdure.stdio.slot_choice import MAX_SLOTS, Label, SlotChooser, SlotName, TakenSlot, Target, this_machine
from perdure.telemetry.events import log_event

#: Seconds for which a bridge waits for a slot of its target: hosts start the new one before the old one has ended.
PATIENCE = 1.0
#: Seconds between two looks at locked slots.
POLL = 0.02
_TOKEN = re.compile(r"[A-Za-z0-9_-]{64}")


class Slot:
    """Room for the token of one bridge, and of no other one at the same time.

    1. `token` returns what was kept last in this slot, by a bridge of the same host and target; else None.
    2. `keep` is True only when the token is on the disk; a later reader finds this one or the previous one.
    3. Nothing raises. After `release`, and where resume is off, nothing is read or written.

    This one keeps nothing: resume is off. The bridge never asks whether it is on (T6).
    """

    holder = ""
    """Names this host, target and slot to the broker; empty where resume is off."""
    notes: Path | None = None
    """A file beside the token for the bridge's own positions, removed with it; None where resume is off."""

    def token(self) -> str | None:
        return None

    def keep(self, token: str, /) -> bool:
        return False

    def on_accepted(self) -> None:
        """The broker accepted the token."""

    def on_rejected(self) -> None:
        """The broker rejected the token: it and the notes go."""

    def forget(self) -> None:
        """The token leads to a session that is not the bridge's any more: it and the notes go."""

    def release(self) -> None:
        """Free the lock; the files stay."""


class KeptSlot(Slot):
    """A slot in a folder, locked."""

    def __init__(self, chooser: SlotChooser, taken: TakenSlot, owner: list[object]) -> None:
        self._chooser = chooser
        self._folder = chooser.folder
        self._owner = owner
        self._lock: int | None = None
        self._move_into(taken)
        let_go_in_child(self)

    def _move_into(self, taken: TakenSlot) -> None:
        self._name, self._lock = taken.name, taken.lock
        self._is_labelled, self._is_borrowed = taken.is_labelled, taken.is_borrowed
        self.holder = hashlib.sha256(json.dumps([*self._owner, str(taken.name)]).encode()).hexdigest()
        self.notes = self._folder.path / taken.name.file("notes")
        # So that other bridges see whose it is; if it fails now, `keep` tries again.
        if not self._is_borrowed:
            with contextlib.suppress(OSError):
                self._write_label()

    def token(self) -> str | None:
        if self._lock is None:
            return None
        try:
            data = self._folder.read(self._name.file("token"), limit=64)
            if data is None:
                log_event(logging.INFO, "token.not_found", "Token file not found (first run or clean slate)")
                return None
            return _checked(data)
        except Untrusted as reason:
            log_event(logging.WARNING, "token.corrupted", "Token file corrupted, treating as stale", reason=str(reason))
            self.forget()
            return None

    def keep(self, token: str, /) -> bool:
        if self._lock is None:
            return False
        try:
            _checked(token.encode())
            if not self._folder.is_still(self._name.file("lock"), self._lock):
                raise FileNotFoundError(f"lock-{self._name} was removed, so the slot may be another bridge's")
            self._write_label()
            self._is_borrowed = False
            self._folder.write(self._name.file("token"), token.encode())
        except (OSError, Untrusted) as error:
            log_event(logging.WARNING, "token.write_failed", f"Failed to write token file: {error}")
            return False
        return True

    def on_accepted(self) -> None:
        if self._lock is not None:
            log_event(logging.INFO, "token.resumed", "Session resumed successfully")

    def on_rejected(self) -> None:
        if self._lock is not None:
            log_event(logging.WARNING, "token.rejected", "Broker rejected resume token, starting fresh session")
            self.forget()

    def release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.utime(self._lock)  # where room is needed, the slot that was not used for longest goes
            release(self._lock)
            self._lock = None
            self._folder.close()

    def let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            self._folder.close()

    def forget(self) -> None:
        if self._lock is None:
            return
        if not self._is_borrowed:
            self._folder.remove(self._name.file("token"), self._name.file("notes"))
            return
        # Leave a slot of another credential as it was found, and take one of our own; without one, resume is off.
        taken = self._chooser.take_new()
        release(self._lock)
        self._lock = None
        if taken is None:
            self._folder.close()
            self.holder, self.notes = "", None
        else:
            self._move_into(taken)

    def _write_label(self) -> None:
        if not self._is_labelled:
            self._folder.write(self._name.file("target"), json.dumps(asdict(self._chooser.mine)).encode())
            self._is_labelled = True


async def open_slot(
    directory: str | os.PathLike[str] | None,
    identity: Identity | None,
    target: Target,
    *,
    processes: Processes | None = None,
    patience: float = PATIENCE,
    now: float | None = None,
) -> Slot:
    """The slot of this bridge, locked. Never raises: where there is none, resume is off and the log says why."""
    if identity is None:
        return Slot()  # `identify` has said why
    if directory is None:
        return resume_off("no directory for its tokens is known")
    try:
        folder = Folder(directory)
    except (OSError, RuntimeError, ValueError) as error:
        return resume_off(str(error))
    try:
        first = SlotName(pid=identity.pid, start=identity.start)
        digest, hint = target.digest, target.hint
        mine = Label(machine=this_machine(), boot=identity.boot, space=identity.space, target=digest, hint=hint)
        chooser = SlotChooser(folder, first, mine)
        if (table := processes or here()) is not None:
            chooser.remove_leftovers(table, now=time.time() if now is None else now)
        deadline = time.monotonic() + patience
        while True:
            is_late = time.monotonic() >= deadline
            with folder.alone() as is_alone:
                # Without a look at the others, a session is a fresh one.
                taken = chooser.take(is_late=is_late) if is_alone else chooser.take_new() if is_late else None
            if taken is not None:
                owner = [identity.boot, identity.space, identity.pid, identity.start, digest]
                return KeptSlot(chooser, taken, owner)
            if is_late:
                raise OSError(f"all {MAX_SLOTS} slots of this host are in use")
            await asyncio.sleep(POLL)
    except BaseException as error:
        folder.close()
        if isinstance(error, OSError):
            return resume_off(str(error))
        raise


def _checked(token: bytes) -> str:
    text = token.decode("ascii", errors="replace")
    if not _TOKEN.fullmatch(text):
        raise Untrusted(f"a token has 64 characters of base64url, these are {len(token)} bytes of something else")
    return text


def resume_off(reason: str) -> Slot:
    log_event(logging.WARNING, "token.off", f"Session resume disabled for this instance: {reason}")
    return Slot()


def default_directory(environ: Mapping[str, str], *, platform: str, home: Path | None) -> Path | None:
    """The folder for tokens if the user names none: this user's state that is not worth a backup."""
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if platform == "darwin":
        return home and home / "Library" / "Application Support" / "perdure" / "stdio"
    if state.is_absolute():  # a relative one is to be ignored, says the XDG specification
        return state / "perdure" / "stdio"
    return home and home / ".local" / "state" / "perdure" / "stdio"
