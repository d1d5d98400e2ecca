"""Keeps secrets and chains of resume tokens as notes of a store (promise 13), and writes a note to try a store.

A chain is one note, under the name of its session, so that a session has one at most. A second note leads from the
chain's own name to the session. It is written first and deleted last: a second note that is left over leads to a chain
of another name, which its tokens do not open.
"""

import json
import secrets

from perdure._core.chains import Chain
from perdure._core.ids import SessionId
from perdure.store.interface import Store

_CHAIN, _TOKEN, _PROBE = "chain/", "token/", "probe"


async def note(store: Store, name: str) -> bytes | None:
    return (await store.notes(name)).get(name)


async def keep(store: Store, name: str, made: bytes) -> bytes:
    """Keep a value unless the name has one; returns the kept value, the same in every process."""
    while (kept := await note(store, name)) is None:
        await store.change_note(name, seen=None, value=made)
    return kept


async def probe(store: Store, size: int) -> None:
    """Write so many bytes and delete them, in two commits, because one commit need not write what it deletes. Raises
    `StoreError` if the store takes no writes."""
    made = secrets.token_bytes(size + 8)  # which no database stores in less room
    # Another process may probe at the same time, or have died in the middle.
    while not await store.change_note(_PROBE, seen=await note(store, _PROBE), value=made):
        pass
    await store.change_note(_PROBE, seen=made, value=None)


async def chain_by_name(store: Store, name: str) -> Chain | None:
    """Return the chain whose tokens have that name, as a hash."""
    session = await note(store, _TOKEN + name)
    chain = None if session is None else await chain_of(store, SessionId(session.decode()))
    return chain if chain is not None and chain.name == name else None


async def chain_of(store: Store, session: SessionId) -> Chain | None:
    kept = await note(store, _CHAIN + session)
    return None if kept is None else _decode(session, kept)


async def put_chain(store: Store, chain: Chain) -> bool:
    """Write a session's chain, in place of the one that it may have. Returns `False` if the session has ended."""
    pointer = chain.session.encode()
    if not await store.change_note(_TOKEN + chain.name, seen=None, value=pointer, session=chain.session):
        return False
    while True:
        before = await note(store, _CHAIN + chain.session)
        name = _CHAIN + chain.session
        if await store.change_note(name, seen=before, value=_encode(chain), session=chain.session):
            break
        record = await store.session(chain.session)
        if record is None or record.ended:
            return False
    if before is not None:
        await _drop_pointer(store, _decode(chain.session, before))
    return True


async def change_chain(store: Store, seen: Chain, chain: Chain | None) -> bool:
    """Change a chain's secrets, or delete it, if it is still the one that was seen."""
    value = None if chain is None else _encode(chain)
    changed = await store.change_note(_CHAIN + seen.session, seen=_encode(seen), value=value)
    if changed and chain is None:
        await _drop_pointer(store, seen)
    return changed


async def _drop_pointer(store: Store, chain: Chain) -> None:
    await store.change_note(_TOKEN + chain.name, seen=chain.session.encode(), value=None)


def _encode(chain: Chain) -> bytes:
    return json.dumps([chain.name, chain.holder, chain.current, chain.next]).encode()


def _decode(session: SessionId, kept: bytes) -> Chain:
    name, holder, current, next_ = json.loads(kept)
    return Chain(session=session, name=name, holder=holder, current=current, next=next_)
