"""The slots of one host in one folder: which one a new bridge takes (T9).

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

from perdure._files.private import Folder, Untrusted
from perdure.stdio.labels import MAX_LABEL, Label, SlotName, read_label, read_name
from perdure.telemetry.events import log_event

MAX_SLOTS = 64
"""Slots of one host: more servers than a host has in its configuration. Beyond, the one unused for longest goes."""


class Use(enum.Enum):
    """What a slot is to a bridge that looks for one."""

    OURS = "ours"  #: of this host and this target
    BLANK = "blank"  #: nobody's, or of a host of before the machine was started
    OTHER = "other"  #: of another target of this host
    FOREIGN = "foreign"  #: of another machine or container, where pids mean other processes; never touched


def use_of(label: Label | None, mine: Label) -> Use:
    if label is None:
        return Use.BLANK
    if label.same_place(mine):
        return Use.OURS if label.target == mine.target else Use.OTHER
    return Use.BLANK if label.machine == mine.machine and label.boot != mine.boot else Use.FOREIGN


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A slot with its lock."""

    name: SlotName
    lock: int
    is_labelled: bool
    is_borrowed: bool
    """It is of another credential, and stays so unless the server accepts its token."""


class Shelf:
    """Takes a slot for one bridge. Raises `OSError` where the folder cannot be used."""

    def __init__(self, folder: Folder, first: SlotName, mine: Label) -> None:
        self._folder = folder
        self._first = first
        self._mine = mine
        self._held: int | None = None
        """Slots that this bridge may follow and that were in use at its first look, if none was free."""

    def take(self, *, is_late: bool) -> Taken | None:
        """The slot of this bridge; None to look again, which `is_late` excludes, or if all are in use.

        One bridge looks at a time: two that lock a slot each would both believe that there is no other.
        """
        ours = self._ours()
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
            self._leave(free)
            return None
        return self._only(known or free[:1], free) or self.take_new()

    def _start_fresh(self, free: list[Taken], known: list[Taken], *, are_ours: bool) -> Taken | None:
        log_event(
            logging.WARNING,
            "token.alike",
            "Several sessions of this host wait and cannot be told apart, starting fresh session",
            sessions=len(known),
        )
        if not are_ours:  # nor to be removed: their credentials may come back
            self._leave(free)
            return self.take_new()
        for taken in known:
            self._folder.remove(taken.name.token)
            self._folder.remove(taken.name.notes)
        return self._only(known[:1], free)

    def _only(self, chosen: list[Taken], free: list[Taken]) -> Taken | None:
        self._leave([taken for taken in free if taken not in chosen])
        return chosen[0] if chosen else None

    def _leave(self, free: list[Taken]) -> None:
        for taken in free:
            os.close(taken.lock)

    def take_new(self) -> Taken | None:
        """The first slot that is nobody's, else the one of another target that was not used for longest."""
        numbers = [replace(self._first, number=number) for number in range(1, MAX_SLOTS + 1)]
        others = sorted((name for name in numbers if self._use(name) is Use.OTHER), key=self._used)
        for name in numbers:
            if self._use(name) is Use.BLANK and (taken := self._take(name, {Use.BLANK})) is not None:
                return taken
        for name in others:
            if (taken := self._take(name, {Use.OTHER, Use.BLANK})) is not None:
                return taken
        return None

    def _take(self, name: SlotName, wanted: set[Use]) -> Taken | None:
        """Lock it, and look again: it may have become somebody's in between."""
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
        return Taken(name=name, lock=lock, is_labelled=is_alike, is_borrowed=is_borrowed)

    def _ours(self) -> list[SlotName]:
        names = {name for file in self._folder.names() if (name := read_name(file)) is not None}
        same = [name for name in names if replace(name, number=1) == self._first]
        return [name for name in same if self._use(name) is Use.OURS]

    def _use(self, name: SlotName) -> Use:
        return use_of(label_of(self._folder, name), self._mine)

    def _is_alike(self, name: SlotName) -> bool:
        label = label_of(self._folder, name)
        return label is not None and label.hint == self._mine.hint

    def _has_token(self, name: SlotName) -> bool:
        return self._folder.changed(name.token) > 0

    def _used(self, name: SlotName) -> int:
        return used(self._folder, name)


def label_of(folder: Folder, name: SlotName) -> Label | None:
    """None if there is none that can be trusted."""
    try:
        return read_label(folder.read(name.target, limit=MAX_LABEL))
    except Untrusted:
        return None


def used(folder: Folder, name: SlotName) -> int:
    """When a slot was last used, in nanoseconds: a bridge writes the token when it starts, notes while it runs, and
    touches the lock when it ends in peace."""
    return max(folder.changed(file) for file in (name.token, name.notes, name.lock, name.target))
