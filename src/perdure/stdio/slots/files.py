"""A slot's files: their names, the label that says whose they are, and the target that their token is for.

The names carry the host's pid and start (T1). On Linux both may be the same after the machine was started again, and in
another container. So the label says which start of the machine and which set of pids they were counted in, and which
machine, since a home may be shared. It also says the target: a token is offered to the same target only (T9).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perdure._files.private import Folder, Untrusted

MAX_LABEL = 1_024
"""Bytes of a label: five short fields."""

_NAME = re.compile(
    r"(?:token|target|notes|lock)-(?P<pid>[1-9]\d{0,9})-(?P<start>\d{1,19})(?:\.(?P<number>[1-9]\d{0,5}))?(?:\.new)?"
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server that a bridge connects to and how the bridge was called, as spelled: another spelling may mean another
    server."""

    url: str
    credential: str = ""
    """The name of the credential (`--token-env`, `--token-file`), never the credential."""
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

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

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

    @property
    def token(self) -> str:
        return f"token-{self}"

    @property
    def target(self) -> str:
        return f"target-{self}"

    @property
    def notes(self) -> str:
        return f"notes-{self}"

    @property
    def lock(self) -> str:
        return f"lock-{self}"

    @property
    def contents(self) -> list[str]:
        """Everything but the lock. The label goes last: it says whose the others are."""
        files = [self.token, self.notes, self.target]
        return [*(f"{file}.new" for file in files), *files]


def decode_label(data: bytes | None) -> Label | None:
    """None for what is not a label."""
    try:
        label = Label(**json.loads(data or b""))
    except (ValueError, TypeError, RecursionError):
        return None
    return label if all(isinstance(value, str) for value in asdict(label).values()) else None


def read_label(folder: Folder, name: SlotName) -> Label | None:
    """None if there is none that can be trusted."""
    try:
        return decode_label(folder.read(name.target, limit=MAX_LABEL))
    except Untrusted:
        return None


def slot_names(folder: Folder) -> set[SlotName]:
    """The slots that have files in a folder. Files of other names are not ours."""
    return {name for file in folder.names() if (name := parse_name(file)) is not None}


def parse_name(file: str) -> SlotName | None:
    """None for the name of a file that is not ours."""
    if (match := _NAME.fullmatch(file)) is None or match["number"] == "1":
        return None
    return SlotName(pid=int(match["pid"]), start=int(match["start"]), number=int(match["number"] or 1))


def last_use(folder: Folder, name: SlotName) -> int:
    """When a slot was last used, in nanoseconds: a bridge writes the token when it starts, notes while it runs, and
    touches the lock when it ends in peace."""
    return max(folder.changed(file) for file in (name.token, name.notes, name.lock, name.target))


def this_machine(path: Path = Path("/etc/machine-id")) -> str:
    """The same as long as it is the same machine. It decides which old files are removed, never what is resumed."""
    try:
        own = path.read_text().strip()
    except (OSError, ValueError):
        own = ""
    return hashlib.sha256((own or socket.gethostname()).encode()).hexdigest()[:32]
