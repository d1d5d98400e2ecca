"""Keeps in a store which server it belongs to, and refuses the others.

The owners are secrets with numbers in their names, of which the last one counts: of several servers that start at once
on a new store, one becomes its owner (promise 23).
"""

import os

from perdure._core.owner import Owner
from perdure._core.site import see
from perdure.errors import Misuse
from perdure.store.interface import Store

_PREFIX = "server-"
_NOBODY = b"null"


async def claim_for(owner: Owner, store: Store, *, address: str) -> None:
    """Make a server the owner of a store that has none. Raises `Misuse` if it has another one."""
    if not owner.name:
        return
    number, raw = await _newest(store)
    kept = Owner.decode(raw)
    while kept is None or (kept != owner and kept.is_same(owner, exists=os.path.exists) and _is_moved(kept, owner)):
        number += 1
        kept = Owner.decode(await store.keep_secret(f"{_PREFIX}{number}", owner.encode()))
    if not kept.is_same(owner, exists=os.path.exists):
        raise Misuse(
            f"the store {address} belongs to the server {kept}, and this is {owner}; give this one a store of its own"
            f" (--store sqlite:{_file_name(owner)}.db); or, if it takes the other's place, run"
            f" `perdure store disown {address}`; {see('operating', 'a-store-belongs-to-one-server')}"
        )


def _is_moved(kept: Owner, owner: Owner) -> bool:
    """Whether the same server has another name or file on its machine by now. Machines come and go: they all share what
    the first one said."""
    return kept.machine == owner.machine and bool(kept.file and owner.file)


def _file_name(owner: Owner) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in owner.name)


async def disown(store: Store) -> Owner | None:
    """Let the next server that starts have the store; gives its owner until now."""
    number, raw = await _newest(store)
    if raw != _NOBODY:
        await store.keep_secret(f"{_PREFIX}{number + 1}", _NOBODY)
    return Owner.decode(raw)


async def _newest(store: Store) -> tuple[int, bytes]:
    found = {
        int(name.removeprefix(_PREFIX)): value
        for name, value in (await store.secrets()).items()
        if name.startswith(_PREFIX)
    }
    number = max(found, default=0)
    return number, found.get(number, _NOBODY)
