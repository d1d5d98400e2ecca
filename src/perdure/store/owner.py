"""Keeps in a store which server it belongs to, and refuses the others.

A store holds the sessions and calls of one server: another one would settle those calls, and answer in those sessions.
The first of these rules that applies decides whether a server that opens a store is its owner:

1. The same file on the same machine is the same server, also under another name.
2. Another file in the same folder is another server, as long as the first file is there.
3. Otherwise servers with the same name are the same: a file may be moved, and each machine has its own.

The owners are notes with numbers in their names, of which the last one counts: of several servers that start at once
on a new store, one becomes its owner (promise 13).
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Self

from perdure._core.text import see
from perdure.errors import Misuse
from perdure.store.interface import Store
from perdure.store.notes import keep

_PREFIX = "server-"
_NOBODY = b"null"


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
        """Whether `other`, the server that starts, is this one. `exists`: whether a file exists."""
        if self.file and other.file and self.machine == other.machine:
            if (self.file, self.part) == (other.file, other.part):
                return True
            if self.folder == other.folder and self.file != other.file and exists(self.file):
                return False
        return self.name == other.name


async def claim_for(owner: Owner, store: Store, *, address: str) -> None:
    """Make a server the owner of a store that has none. Raises `Misuse` if it has another one."""
    if not owner.name:
        return
    number, raw = await _newest(store)
    kept = Owner.decode(raw)
    # The same server may have another name or file on its machine by now. Machines come and go: they all share what the
    # first one wrote.
    while kept is None or (
        kept != owner
        and kept.is_same(owner, exists=os.path.exists)
        and (kept.machine == owner.machine and kept.file and owner.file)
    ):
        number += 1
        kept = Owner.decode(await keep(store, f"{_PREFIX}{number}", owner.encode()))
    if not kept.is_same(owner, exists=os.path.exists):
        file = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in owner.name)
        raise Misuse(
            f"the store {address} belongs to the server {kept}, and this is {owner}; give this one a store of its own"
            f" (--store sqlite:{file}.db); or, if it takes the other's place, run"
            f" `perdure store disown {address}`; {see('operating', 'a-store-belongs-to-one-server')}"
        )


async def disown(store: Store) -> Owner | None:
    """Let the next server that starts have the store; returns its owner until now."""
    number, raw = await _newest(store)
    if raw != _NOBODY:
        await keep(store, f"{_PREFIX}{number + 1}", _NOBODY)
    return Owner.decode(raw)


async def _newest(store: Store) -> tuple[int, bytes]:
    found = {int(name.removeprefix(_PREFIX)): value for name, value in (await store.notes(_PREFIX)).items()}
    number = max(found, default=0)
    return number, found.get(number, _NOBODY)
