"""Decides whether the server that opens a store is the one that the store belongs to.

A store holds the sessions and calls of one server: another one would settle those calls, and answer in those sessions.
The first of these rules that applies decides:

1. The same file on the same machine is the same server, also under another name.
2. Another file in the same folder is another server, as long as the first file is there.
3. Otherwise servers with the same name are the same: a file may be moved, and each machine has its own.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A server, as a store knows it."""

    name: str
    """Its own name, or that of its file if it has none; empty if that is not known either."""
    machine: str = ""
    file: str = ""
    """Its absolute path; empty for a server that another program made."""
    folder: str = ""
    """Where the file is."""
    part: str = ""
    """Which object of the file it is, where the target says so."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self | None:
        """`None`: the store belongs to no server."""
        found = json.loads(raw)
        return found and cls(**{field.name: str(found.get(field.name, "")) for field in fields(cls)})

    def __str__(self) -> str:
        return f"{self.name!r} ({self.file})" if self.file else repr(self.name)

    def is_same(self, other: "Owner", *, exists: Callable[[str], bool]) -> bool:
        """Whether `other`, the server that starts, is this one. `exists` tells whether a file is there."""
        if self.file and other.file and self.machine == other.machine:
            if (self.file, self.part) == (other.file, other.part):
                return True
            if self.folder == other.folder and self.file != other.file and exists(self.file):
                return False
        return self.name == other.name
