"""Keeps the resume token of a bridge in its slot, and chooses that slot among its host's slots in one folder (T9).

slot = await open_slot(directory, identity, target)
token = slot.token()      # offer it; then slot.on_resumed() or slot.on_rejected()
slot.keep(token)          # each time the broker returns a new one; confirm it if this was True
slot.release()            # at the end: the next bridge may have it

A slot is a token, a label, the bridge's positions, and a lock that its holder keeps for as long as it lives. A slot is
*known* if it has a token: a session waits for it. Nothing that a host gives its bridges tells those of one target
apart. Their order does not: hosts stop and start them in any order. So a bridge follows another one only where there is
no choice, and begins a fresh session otherwise (T7):

| free and known | held | the new bridge |
|---|---|---|
| one | any | goes on with that session: its bridge has ended |
| several | any | begins a fresh one. The tokens go, or no bridge of this target could be resumed any more |
| none | one | waits for that one to end, because hosts start the new bridge before the old one has ended |
| none | several | waits whether one of them ends, or several, to the end of its time |
| none | none | begins a fresh one |

Credentials tell bridges apart where they differ: only slots of the same credential are used. If there is none, the
only slot of another credential is tried, because credentials are renewed. Its label changes when the server has
accepted the token; until then it is the other credential's, and stays so if the server says no.

A slot's files carry the host's pid and start in their names (T1). On Linux both may be the same after the machine was
started again, and in another container. So the label says which start of the machine and which set of pids they were
counted in, and which machine, since a home may be shared. It also says the target: a token is offered to the same
target only (T9).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from perdure._files.locks import let_go_in_child, release
from perdure._files.private import Folder, Untrusted
from perdure.stdio.identity import Identity, Processes, here
from perdure.telemetry.log_records import log_event

#: Slots of one host: more servers than a host has in its configuration. Beyond, the slot unused for longest is deleted.
MAX_SLOTS = 64
#: Seconds after which the files of a host that cannot be seen from here (another container, another machine with the
#: same home) are removed. No session is kept for so long after its last use, unless an operator says so.
FORGOTTEN = 30 * 24 * 3600
#: Bytes of a label: five short fields.
MAX_LABEL = 1_024
#: Seconds for which a bridge waits for a slot of its target: hosts start the new one before the old one has ended.
PATIENCE = 1.0
#: Seconds between two attempts at locked slots.
POLL = 0.02
Kind = Literal["token", "target", "positions", "lock"]
"""What a file of a slot is, which its name begins with."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]{64}")
_NAME = re.compile(
    r"(?:token|target|positions|lock)-(?P<pid>[1-9]\d{0,9})-(?P<start>\d{1,19})(?:\.(?P<number>[1-9]\d{0,5}))?(?:\.new)?"
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server of a bridge and how the bridge was called, as spelled: another spelling may mean another server."""

    url: str
    credential: str = ""  #: the name of the credential (`--token-env`, `--token-file`), never the credential
    arguments: Sequence[str] = ()
    directory: str | os.PathLike[str] = ""
    secret: str = ""
    """The credential itself, where it is the same for as long as the bridge lives. It is not a part of the target, as
    credentials are renewed; it tells bridges apart that differ in nothing else."""

    @property
    def hint(self) -> str:
        """Too short to find the credential by, and long enough to tell two apart."""
        return hashlib.sha256(self.secret.encode()).hexdigest()[:8] if self.secret else ""

    @property
    def digest(self) -> str:
        parts = [self.url, self.credential, list(self.arguments), os.fspath(self.directory)]
        # JSON keeps the parts apart, whatever stands in them; it also holds bytes that are not text.
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Label:
    """Makes a slot's pid and start unique, and names the target that its token is for."""

    machine: str
    boot: str
    space: str
    target: str
    hint: str = ""
    """Of the credential (`Target.hint`): which of several slots of one target is meant. Nothing depends on it."""
    alike: str = ""
    """How many sessions could not be told apart when that of this slot was given up, for the log of its next bridge."""

    def is_same_place(self, other: Label) -> bool:
        """Whether pids and starts mean the same here and there."""
        return (self.boot, self.space) == (other.boot, other.space)

    def is_earlier_start(self, other: Label) -> bool:
        """Whether this was written on the same machine, in another of its starts: none of those processes lives."""
        return self.machine == other.machine and self.boot != other.boot


@dataclass(frozen=True, kw_only=True)
class SlotName:
    """The slot that a file belongs to."""

    pid: int
    start: int
    number: int = 1

    def __str__(self) -> str:
        """The first slot has exactly the name of T1."""
        return f"{self.pid}-{self.start}" + (f".{self.number}" if self.number > 1 else "")

    def file(self, kind: Kind) -> str:
        return f"{kind}-{self}"

    @property
    def contents(self) -> list[str]:
        """All files but the lock. The label is deleted last, because it says whose the others are."""
        files = [self.file("token"), self.file("positions"), self.file("target")]
        return [*(f"{file}.new" for file in files), *files]


def read_label(folder: Folder, name: SlotName) -> Label | None:
    """None if there is none that can be trusted."""
    try:
        label = Label(**json.loads(folder.read(name.file("target"), limit=MAX_LABEL) or b""))
    except (Untrusted, ValueError, TypeError, RecursionError):
        return None
    return label if all(isinstance(value, str) for value in asdict(label).values()) else None


def _report_alike(sessions: int) -> None:
    sentence = "Several sessions of this host wait and cannot be told apart, starting fresh session"
    log_event(logging.WARNING, "token.alike", sentence, sessions=sessions)


def slot_names(folder: Folder) -> set[SlotName]:
    """The slots that have files in a folder. Files of other names are not ours."""
    return {name for file in folder.names() if (name := parse_name(file)) is not None}


def parse_name(file: str) -> SlotName | None:
    """None for the name of a file that is not ours."""
    if (match := _NAME.fullmatch(file)) is None or match["number"] == "1":
        return None
    return SlotName(pid=int(match["pid"]), start=int(match["start"]), number=int(match["number"] or 1))


def last_use(folder: Folder, name: SlotName) -> int:
    """When a slot was last used, in nanoseconds: a bridge writes the token when it starts, positions while it runs, and
    touches the lock when it ends in peace."""
    return max(folder.changed(name.file(kind)) for kind in get_args(Kind))


def this_machine(path: Path = Path("/etc/machine-id")) -> str:
    """The same as long as it is the same machine. It decides which old files are removed, never what is resumed."""
    try:
        own = path.read_text().strip()
    except (OSError, ValueError):
        own = ""
    return hashlib.sha256((own or socket.gethostname()).encode()).hexdigest()[:32]


class Use(enum.Enum):
    """What a slot is to a bridge that looks for one."""

    ALIKE = "alike"  #: of this host, this target and this credential
    OURS = "ours"  #: of this host and this target, of another credential
    BLANK = "blank"  #: of no host, or of one that lived before the machine was started
    OTHER = "other"  #: of another target of this host
    FOREIGN = "foreign"  #: of another machine or container, where pids mean other processes; never touched


@dataclass(frozen=True, kw_only=True)
class SlotState:
    """A slot, as it is seen from outside."""

    name: SlotName
    use: Use
    is_known: bool
    is_held: bool


@dataclass(kw_only=True)
class TakenSlot:
    """A slot with its lock."""

    chooser: SlotChooser
    name: SlotName
    lock: int
    is_borrowed: bool  #: it is of another credential, and stays so unless the server accepts its token

    def write_label(self, *, alike: str = "") -> None:
        folder, label = self.chooser.folder, replace(self.chooser.mine, alike=alike)
        if read_label(folder, self.name) != label:
            folder.write(self.name.file("target"), json.dumps(asdict(label)).encode())

    def give_up(self, alike: int) -> None:
        """Forget a session that could be another bridge's. The next bridge in this slot says why it begins fresh."""
        self.chooser.folder.remove(self.name.file("token"), self.name.file("positions"))
        with contextlib.suppress(OSError):
            self.write_label(alike=str(alike))


class SlotChooser:
    """Takes a slot for one bridge. Raises `OSError` where the folder cannot be used."""

    def __init__(self, folder: Folder, first: SlotName, mine: Label) -> None:
        self.folder = folder
        self.mine = mine
        self._first = first
        self._held: int | None = None
        """Slots that this bridge may follow and that were in use at its first look, if none was free."""

    def remove_leftovers(self, processes: Processes, *, now: float) -> None:
        """Remove the files of dead hosts. A slot that a bridge holds stays, and so does every file that is not ours."""
        for name in sorted(slot_names(self.folder), key=str):
            if (name.pid, name.start) == (self._first.pid, self._first.start):
                continue
            label = read_label(self.folder, name)
            if label is not None and label.is_same_place(self.mine):
                is_left = processes.is_gone(name.pid, name.start)
            elif label is not None and label.is_earlier_start(self.mine):
                is_left = True
            else:
                is_left = last_use(self.folder, name) < (now - FORGOTTEN) * 1e9
            try:
                lock = self.folder.lock(name.file("lock")) if is_left else None
            except OSError:
                continue
            if lock is None:
                continue
            self.folder.remove(*(file for file in [*name.contents, name.file("lock")] if self.folder.is_plain(file)))
            os.close(lock)
            sentence = f"Removed the files of host {name.pid}, which is gone"
            log_event(logging.DEBUG, "token.removed", sentence, slot=str(name))

    def take(self, *, is_late: bool) -> TakenSlot | None:
        """The slot of this bridge; None to look again, which `is_late` excludes, or if all are in use.

        One bridge looks at a time: two that lock a slot each would both believe that there is no other.
        """
        uses = {name: self._use(name) for name in slot_names(self.folder) if replace(name, number=1) == self._first}
        alike = [name for name, use in uses.items() if use is Use.ALIKE]
        looked_at = alike or [name for name, use in uses.items() if use is Use.OURS]
        free = [taken for name in looked_at if (taken := self._take(name, {Use.ALIKE, Use.OURS})) is not None]
        known = [taken for taken in free if self.folder.changed(taken.name.file("token"))]
        if self._held is None:
            self._held = 0 if known else len(looked_at) - len(free)
        may_wait = self._held > 1 if known else self._held > 0 and not free
        chosen: TakenSlot | None = None
        if len(known) > 1:
            may_wait = False
            _report_alike(len(known))
            if alike:  # others are not removed: their credentials may come back
                chosen = known[0]
                for taken in known:
                    taken.give_up(len(known))
        elif is_late or not may_wait:
            chosen = next(iter(known or free), None)
            label = None if known or chosen is None else read_label(self.folder, chosen.name)
            if label is not None and label.alike.isdecimal():
                _report_alike(int(label.alike))
        for taken in free:
            if taken is not chosen:
                os.close(taken.lock)
        return chosen if chosen or (may_wait and not is_late) else self.take_new()

    def survey(self) -> list[SlotState]:
        """The slots of this host, as a bridge that starts now would find them. Nothing is taken."""
        found = []
        for name in sorted(slot_names(self.folder), key=lambda name: name.number):
            if replace(name, number=1) == self._first:
                if (lock := self.folder.lock(name.file("lock"))) is not None:
                    os.close(lock)
                is_known = self.folder.changed(name.file("token")) > 0
                found += [SlotState(name=name, use=self._use(name), is_known=is_known, is_held=lock is None)]
        return found

    def take_new(self) -> TakenSlot | None:
        """The first slot of no bridge, else the one of another target that was not used for longest."""
        numbers = [replace(self._first, number=number) for number in range(1, MAX_SLOTS + 1)]
        uses = {name: self._use(name) for name in numbers}
        others = [name for name in numbers if uses[name] is Use.OTHER]
        others.sort(key=lambda name: last_use(self.folder, name))
        for name in [*(name for name in numbers if uses[name] is Use.BLANK), *others]:
            if (taken := self._take(name, {uses[name], Use.BLANK})) is not None:
                return taken
        return None

    def _take(self, name: SlotName, wanted: set[Use]) -> TakenSlot | None:
        """Lock it, and look again: another bridge may have taken it in between."""
        if (lock := self.folder.lock(name.file("lock"))) is None:
            return None
        use = self._use(name)
        if use not in wanted:
            os.close(lock)
            return None
        if use not in {Use.ALIKE, Use.OURS}:
            self.folder.remove(*name.contents)
        is_borrowed = use is Use.OURS and self.folder.changed(name.file("token")) > 0
        return TakenSlot(chooser=self, name=name, lock=lock, is_borrowed=is_borrowed)

    def _use(self, name: SlotName) -> Use:
        label = read_label(self.folder, name)
        if label is None or label.is_earlier_start(self.mine):
            return Use.BLANK
        if not label.is_same_place(self.mine):
            return Use.FOREIGN
        if label.target != self.mine.target:
            return Use.OTHER
        return Use.ALIKE if label.hint == self.mine.hint else Use.OURS


class Slot:
    """Room for the token of one bridge, and of no other one at the same time.

    1. `token` returns what was kept last in this slot, by a bridge of the same host and target; else None.
    2. `keep` is True only when the token is on the disk; a later reader finds this one or the previous one.
    3. Nothing raises. After `release`, and where resume is off (`Slot()`), nothing is read or written.

    The bridge never asks whether resume is on (T6).
    """

    holder: str
    """Names this host, target and slot to the broker; empty where resume is off."""
    positions: Path | None
    """A file beside the token for the bridge's own positions, removed with it; None where resume is off."""

    def __init__(self, taken: TakenSlot | None = None) -> None:
        self._move_into(taken)
        let_go_in_child(self)

    def _move_into(self, taken: TakenSlot | None) -> None:
        self._taken, self.holder, self.positions = taken, "", None
        if taken is None:
            return
        name, mine = taken.name, taken.chooser.mine
        owner = [mine.boot, mine.space, name.pid, name.start, mine.target, str(name)]
        self.holder = hashlib.sha256(json.dumps(owner).encode()).hexdigest()
        self.positions = taken.chooser.folder.path / name.file("positions")
        # So that other bridges see whose it is; if it fails now, `keep` tries again.
        if not taken.is_borrowed:
            with contextlib.suppress(OSError):
                taken.write_label()

    def token(self) -> str | None:
        if (taken := self._taken) is None:
            return None
        try:
            data = taken.chooser.folder.read(taken.name.file("token"), limit=64)
            if data is None:
                log_event(logging.INFO, "token.not_found", "Token file not found (first run or clean slate)")
                return None
            return _checked(data)
        except Untrusted as reason:
            log_event(logging.WARNING, "token.corrupted", "Token file corrupted, treating as stale", reason=str(reason))
            # A sentence of its own, because programs look for the one above as it stands.
            path = taken.chooser.folder.path / taken.name.file("token")
            log_event(logging.WARNING, "token.unused", f"The token file {path} is not used: {reason}")
            self.forget()
            return None

    def keep(self, token: str, /) -> bool:
        if (taken := self._taken) is None:
            return False
        folder = taken.chooser.folder
        try:
            _checked(token.encode())
            if not folder.is_still(taken.name.file("lock"), taken.lock):
                raise FileNotFoundError(f"lock-{taken.name} was removed, so the slot may be another bridge's")
            taken.write_label()
            taken.is_borrowed = False
            folder.write(taken.name.file("token"), token.encode())
        except (OSError, Untrusted) as error:
            log_event(logging.WARNING, "token.write_failed", f"Failed to write token file: {error}")
            return False
        return True

    def on_resumed(self) -> None:
        """The broker accepted the token, and the host's handshake goes on with its session."""
        if self._taken is not None:
            log_event(logging.INFO, "token.resumed", "Session resumed successfully")

    def on_rejected(self) -> None:
        """The broker rejected the token: it and the positions are deleted."""
        if self._taken is not None:
            log_event(logging.WARNING, "token.rejected", "Broker rejected resume token, starting fresh session")
            self.forget()

    def forget(self) -> None:
        """The token leads to a session that is not the bridge's any more: it and the positions are deleted."""
        if (taken := self._taken) is None:
            return
        chooser = taken.chooser
        if not taken.is_borrowed:
            chooser.folder.remove(taken.name.file("token"), taken.name.file("positions"))
            return
        # Leave a slot of another credential as it was found, and take one of our own; without one, resume is off.
        self._move_into(chooser.take_new())
        release(taken.lock)
        if self._taken is None:
            chooser.folder.close()

    def release(self) -> None:
        """Free the lock; the files stay."""
        if self._taken is not None:
            with contextlib.suppress(OSError):
                os.utime(self._taken.lock)  # where room is needed, the slot unused for longest is deleted
            self.let_go(release)

    def let_go(self, close: Callable[[int], None] = os.close) -> None:
        if self._taken is not None:
            close(self._taken.lock)
            self._taken.chooser.folder.close()
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
        chooser = _chooser(folder, identity, target)
        if (table := processes or here()) is not None:
            chooser.remove_leftovers(table, now=time.time() if now is None else now)
        deadline = time.monotonic() + patience
        while True:
            is_late = time.monotonic() >= deadline
            with folder.alone() as is_alone:
                # Without a look at the others, a session is a fresh one.
                taken = chooser.take(is_late=is_late) if is_alone else chooser.take_new() if is_late else None
            if taken is not None:
                return Slot(taken)
            if is_late:
                raise OSError(f"all {MAX_SLOTS} slots of this host are in use")
            await asyncio.sleep(POLL)
    except BaseException as error:
        folder.close()
        if isinstance(error, OSError):
            return resume_off(str(error))
        raise


def _chooser(folder: Folder, identity: Identity, target: Target) -> SlotChooser:
    digest, hint = target.digest, target.hint
    mine = Label(machine=this_machine(), boot=identity.boot, space=identity.space, target=digest, hint=hint)
    return SlotChooser(folder, SlotName(pid=identity.pid, start=identity.start), mine)


def survey(directory: str | os.PathLike[str], identity: Identity, target: Target) -> list[SlotState]:
    """The slots of a host in a folder, which is not made. Raises `OSError` where it cannot be used."""
    if not os.path.lexists(directory):
        return []
    with contextlib.closing(Folder(directory)) as folder, folder.alone():
        return _chooser(folder, identity, target).survey()


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
