"""Chooses the slot of a new bridge among its host's slots in one folder (T9), and removes those of dead hosts.

A slot is a token, a label, the bridge's notes, and a lock that its holder keeps for as long as it lives. A slot is
*known* if it has a token: a session waits behind it. Nothing that a host gives its bridges tells those of one target
apart. Their order does not: hosts stop and start them in any order. So a bridge follows another one only where there is
no choice, and begins a fresh session otherwise (T7):

| free and known | held | the new bridge |
|---|---|---|
| one | any | goes on with that session: its bridge has ended |
| several | any | begins a fresh one. The tokens go, or no bridge of this target could be resumed any more |
| none | one | waits for that one to end, because hosts start the new bridge before the old one has ended |
| none | several | waits whether one of them ends, or several, to the end of its time |
| none | none | begins a fresh one |

Credentials tell bridges apart where they differ: only slots of the same credential are looked at. If there is none, the
only slot of another credential is tried, because credentials are renewed. Its label changes when the server has
accepted the token; until then it is the other credential's, and stays so if the server says no.
"""

from __future__ import annotations

import enum
import logging
import os
from dataclasses import dataclass, replace

from perdure._files.private import Folder
from perdure.stdio.host.processes import Processes
from perdure.stdio.slots.files import Label, SlotName, last_use, read_label, slot_names
from perdure.telemetry.events import log_event

MAX_SLOTS = 64
"""Slots of one host: more servers than a host has in its configuration. Beyond, the one unused for longest goes."""

FORGOTTEN = 30 * 24 * 3600
"""Seconds after which the files of a host that cannot be seen from here (another container, another machine with the
same home) are removed. No session is kept for so long after its last use, unless an operator says so."""


class Use(enum.Enum):
    """What a slot is to a bridge that looks for one."""

    OURS = "ours"  #: of this host and this target
    BLANK = "blank"  #: of no host, or of one that lived before the machine was started
    OTHER = "other"  #: of another target of this host
    FOREIGN = "foreign"  #: of another machine or container, where pids mean other processes; never touched


def use_of(label: Label | None, mine: Label) -> Use:
    if label is None:
        return Use.BLANK
    if label.is_same_place(mine):
        return Use.OURS if label.target == mine.target else Use.OTHER
    return Use.BLANK if label.is_earlier_start(mine) else Use.FOREIGN


@dataclass(frozen=True, kw_only=True)
class TakenSlot:
    """A slot with its lock."""

    name: SlotName
    lock: int
    is_labelled: bool
    is_borrowed: bool
    """It is of another credential, and stays so unless the server accepts its token."""


class SlotChooser:
    """Takes a slot for one bridge. Raises `OSError` where the folder cannot be used."""

    def __init__(self, folder: Folder, first: SlotName, mine: Label) -> None:
        self._folder = folder
        self._first = first
        self._mine = mine
        self._held: int | None = None
        """Slots that this bridge may follow and that were in use at its first look, if none was free."""

    def take(self, *, is_late: bool) -> TakenSlot | None:
        """The slot of this bridge; None to look again, which `is_late` excludes, or if all are in use.

        One bridge looks at a time: two that lock a slot each would both believe that there is no other.
        """
        ours = [
            name
            for name in slot_names(self._folder)
            if replace(name, number=1) == self._first and self._use(name) is Use.OURS
        ]
        alike = [name for name in ours if self._is_alike(name)]
        looked_at = alike or ours
        free = [taken for name in looked_at if (taken := self._take(name, {Use.OURS})) is not None]
        known = [taken for taken in free if self._has_token(taken.name)]
        if self._held is None:
            self._held = 0 if known else len(looked_at) - len(free)
        if len(known) > 1:
            return self._start_fresh(free, known, are_ours=bool(alike))
        may_wait = self._held > 1 if known else self._held > 0 and not free
        if may_wait and not is_late:
            return self._keep_only(None, free)
        return self._keep_only(next(iter(known or free), None), free) or self.take_new()

    def _start_fresh(self, free: list[TakenSlot], known: list[TakenSlot], *, are_ours: bool) -> TakenSlot | None:
        log_event(
            logging.WARNING,
            "token.alike",
            "Several sessions of this host wait and cannot be told apart, starting fresh session",
            sessions=len(known),
        )
        if not are_ours:  # nor to be removed: their credentials may come back
            return self._keep_only(None, free) or self.take_new()
        for taken in known:
            self._folder.remove(taken.name.token)
            self._folder.remove(taken.name.notes)
        return self._keep_only(known[0], free)

    def _keep_only(self, chosen: TakenSlot | None, free: list[TakenSlot]) -> TakenSlot | None:
        """Free the locks of the others."""
        for taken in free:
            if taken is not chosen:
                os.close(taken.lock)
        return chosen

    def take_new(self) -> TakenSlot | None:
        """The first slot of no bridge, else the one of another target that was not used for longest."""
        numbers = [replace(self._first, number=number) for number in range(1, MAX_SLOTS + 1)]
        others = [name for name in numbers if self._use(name) is Use.OTHER]
        others.sort(key=lambda name: last_use(self._folder, name))
        for name in numbers:
            if self._use(name) is Use.BLANK and (taken := self._take(name, {Use.BLANK})) is not None:
                return taken
        for name in others:
            if (taken := self._take(name, {Use.OTHER, Use.BLANK})) is not None:
                return taken
        return None

    def _take(self, name: SlotName, wanted: set[Use]) -> TakenSlot | None:
        """Lock it, and look again: another bridge may have taken it in between."""
        if (lock := self._folder.lock(name.lock)) is None:
            return None
        use = self._use(name)
        if use not in wanted:
            os.close(lock)
            return None
        if use is not Use.OURS:
            for file in name.contents:
                self._folder.remove(file)
        is_alike = use is Use.OURS and self._is_alike(name)
        is_borrowed = use is Use.OURS and not is_alike and self._has_token(name)
        return TakenSlot(name=name, lock=lock, is_labelled=is_alike, is_borrowed=is_borrowed)

    def _use(self, name: SlotName) -> Use:
        return use_of(read_label(self._folder, name), self._mine)

    def _is_alike(self, name: SlotName) -> bool:
        label = read_label(self._folder, name)
        return label is not None and label.hint == self._mine.hint

    def _has_token(self, name: SlotName) -> bool:
        return self._folder.changed(name.token) > 0


def remove_leftovers(folder: Folder, mine: Label, processes: Processes, *, keep: SlotName, now: float) -> None:
    """Remove the files of dead hosts. A slot that a bridge holds stays, and so does every file that is not ours."""
    for name in sorted(slot_names(folder), key=str):
        if (name.pid, name.start) == (keep.pid, keep.start) or not _is_left(folder, name, mine, processes, now):
            continue
        try:
            lock = folder.lock(name.lock)
        except OSError:
            continue
        if lock is None:
            continue
        for file in [*name.contents, name.lock]:
            if folder.is_plain(file):
                folder.remove(file)
        os.close(lock)
        log_event(
            logging.DEBUG, "token.removed", f"Removed the files of host {name.pid}, which is gone", slot=str(name)
        )


def _is_left(folder: Folder, name: SlotName, mine: Label, processes: Processes, now: float) -> bool:
    label = read_label(folder, name)
    if label is not None and label.is_same_place(mine):
        return processes.is_gone(name.pid, name.start)
    if label is not None and label.is_earlier_start(mine):
        return True
    return last_use(folder, name) < (now - FORGOTTEN) * 1e9
