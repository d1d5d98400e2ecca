"""Whose a slot is: a small file beside the token.

The names of the files carry the host's pid and start (T1). On Linux both may be the same after the machine was started
anew, and in another container. So the label says which start of the machine and which set of pids they were counted
in, and which machine, since a home may be shared. It also says the target.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_LABEL = 1_024
"""Bytes of a label: five short fields."""

_NAME = re.compile(
    r"(?:token|target|notes|lock)-(?P<pid>[1-9]\d{0,9})-(?P<start>\d{1,19})(?:\.(?P<number>[1-9]\d{0,5}))?(?:\.new)?"
)


@dataclass(frozen=True, kw_only=True)
class Label:
    """What makes a slot's pid and start unique, and the target that its token is for."""

    machine: str
    boot: str
    space: str
    target: str
    hint: str = ""
    """Of the credential (`Target.hint`): which of several slots of one target is meant. Nothing depends on it."""

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def same_place(self, other: Label) -> bool:
        """Whether pids and starts mean the same here and there."""
        return (self.boot, self.space) == (other.boot, other.space)


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


def read_label(data: bytes | None) -> Label | None:
    """None for what is no label."""
    try:
        fields = json.loads(data or b"")
        label = Label(**fields)
    except (ValueError, TypeError, RecursionError):
        return None
    return label if all(isinstance(value, str) for value in asdict(label).values()) else None


def read_name(file: str) -> SlotName | None:
    """None for the name of a file that is not ours."""
    if (match := _NAME.fullmatch(file)) is None or match["number"] == "1":
        return None
    return SlotName(pid=int(match["pid"]), start=int(match["start"]), number=int(match["number"] or 1))


def this_machine(path: Path = Path("/etc/machine-id")) -> str:
    """The same as long as it is the same machine. It decides which old files are removed, never what is resumed."""
    try:
        own = path.read_text().strip()
    except (OSError, ValueError):
        own = ""
    return hashlib.sha256((own or socket.gethostname()).encode()).hexdigest()[:32]
