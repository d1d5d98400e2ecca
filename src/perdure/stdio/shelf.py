"""The slots of one host in one folder: which one a new bridge takes (T9).

A slot is a token, a label, the bridge's notes, and a lock that its holder keeps for as long as it lives. Slots of the
same target are all alike to us: a host that starts four bridges for one target and starts them again gets the four
sessions back, in any order, since nothing tells the bridges apart. Where their credentials differ, those do.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, replace

from perdure.stdio.labels import MAX_LABEL, Label, SlotName, read_label, read_name
from perdure.stdio.private_files import Folder, Untrusted

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
    labelled: bool


class Shelf:
    """Takes a slot for one bridge. Raises `OSError` where the folder cannot be used."""

    def __init__(self, folder: Folder, first: SlotName, mine: Label) -> None:
        self._folder = folder
        self._first = first
        self._mine = mine

    def take_ours(self) -> Taken | None:
        """A free slot of this target: one with a token before one without, then the one that was used last.

        That is the one whose bridge was killed just now, rather than one that its host ended long ago. One of another
        credential is taken only if there is none of this one: then the credential was renewed.
        """
        ours = self._ours()
        alike = [name for name in ours if self._is_alike(name)] or ours
        for name in sorted(alike, key=lambda name: (self._has_token(name), self._used(name)), reverse=True):
            if (taken := self._take(name, {Use.OURS})) is not None:
                return taken
        return None

    def has_ours(self) -> bool:
        """Whether there are slots of this target at all."""
        return bool(self._ours())

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
        return Taken(name=name, lock=lock, labelled=use is Use.OURS and self._is_alike(name))

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
