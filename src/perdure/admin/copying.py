"""Copies everything that lasts from one store to another while no server uses either, and proves that it arrived.

A store is read as a sequence of parts, in an order that is the same in every store: sessions by their ids, the streams
of each, what is in each stream. Copying writes these parts to the other store; a digest of them, taken of both stores
afterwards, tells whether they hold the same.

Fences are not copied, because no writer is left that holds one. Nodes, their mail and their readers are copied only of
nodes that died and were not buried, so that the first server on the copy settles their calls as it would have done
before.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby

from perdure._core.chains import Chain
from perdure._core.ids import NO_FENCE, NodeId, SessionId
from perdure._core.states import SessionState
from perdure.errors import StoreError
from perdure.store import base
from perdure.store.base import Store
from perdure.store.upkeep import CopyTarget, Restored, Upkeep

SESSIONS = 100
"""Sessions in a part: a record may carry a quarter of a mebibyte of sticky requests."""

STREAMS = 32
"""Streams in a part, with their calls; and pages of events that are read, or written, at once: a server that is far
away is asked once for all of them. They take a few mebibytes."""

EVENTS = 500
"""Events in a part, and `READ_BYTES` at most."""

MAIL = 100
"""Messages for a dead node that are sent in one commit."""

REMOVE = "delete the SQLite file, or drop the schema, and try again"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamContent:
    """A stream with its calls and the ends of its generations."""

    record: base.StreamRecord
    calls: tuple[base.CallRecord, ...]
    generations: tuple[base.Generation, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Secret:
    name: str
    value: bytes


Part = tuple[base.SessionRecord, ...] | tuple[StreamContent, ...] | Restored | base.AskRecord | Chain | Secret


async def parts(store: Store) -> AsyncIterator[Part]:
    """Everything that lasts, in its order."""
    for name, value in sorted((await store.secrets()).items()):
        yield Secret(name=name, value=value)
    after: SessionId | None = None
    while page := await store.sessions(after=after, limit=SESSIONS):
        yield tuple(replace(record, revision=0) for record in page)  # each store counts its own changes
        after = page[-1].id
        for record in page:
            if record.state is not SessionState.ENDED:  # of one that has ended nothing but the record is left
                async for part in _parts_of(store, record.id):
                    yield part


async def _parts_of(store: Store, session: SessionId) -> AsyncIterator[Part]:
    ledger, streams, asks, chain = await asyncio.gather(
        store.calls(session), store.streams(session), store.asks(session), store.chain_of(session)
    )
    calls = {stream: tuple(rows) for stream, rows in groupby(ledger, lambda row: row.stream)}
    for start in range(0, len(streams), STREAMS):
        some = streams[start : start + STREAMS]
        ends = await asyncio.gather(*(_generations(store, record) for record in some))
        yield tuple(
            StreamContent(
                record=replace(record, fence=NO_FENCE), calls=calls.get(record.id, ()), generations=generations
            )
            for record, generations in zip(some, ends, strict=True)
        )
        first = await asyncio.gather(*(_events(store, record, after=0) for record in some))
        for record, events in zip(some, first, strict=True):
            while events:
                yield Restored(stream=record.id, events=events)
                events = await _events(store, record, after=events[-1].seq)
            key = 0
            while not record.sealed and (waiting := await store.forwarded(record.id, after=key)):
                yield Restored(stream=record.id, forwarded=[message.payload for message in waiting])
                key = waiting[-1].key
    for ask in asks:
        yield ask
    if chain is not None:
        yield chain


async def _generations(store: Store, record: base.StreamRecord) -> tuple[base.Generation, ...]:
    return tuple(await store.generations(record.id)) if record.generation > 1 else ()


async def _events(store: Store, record: base.StreamRecord, *, after: int) -> Sequence[base.Event]:
    return await store.read(record.id, after=after, limit=EVENTS) if after < record.last else ()


@dataclass(kw_only=True)
class Tally:
    """How much a store holds, and the digest of it."""

    sessions: int = 0
    streams: int = 0
    calls: int = 0
    events: int = 0
    answers: int = 0
    waiting: int = 0
    asks: int = 0
    tokens: int = 0
    secrets: int = 0
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256, repr=False, compare=False)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def counts(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}

    def add(self, part: Part) -> None:
        # Record by record and event by event: stores give events in pages of different sizes.
        for thing in _things(part):
            self._hash.update(repr(thing).encode("utf-8", "surrogatepass"))
            match thing:
                case base.SessionRecord():
                    self.sessions += 1
                case StreamContent():
                    self.streams += 1
                    self.calls += len(thing.calls)
                case (_, base.Event(final=final)):
                    self.answers += final
                    self.events += not final
                case base.AskRecord():
                    self.asks += 1
                case Chain():
                    self.tokens += 1
                case Secret():
                    self.secrets += 1
                case _:
                    self.waiting += 1


def _things(part: Part) -> Iterator[object]:
    match part:
        case tuple():
            yield from part
        case Restored():
            yield from ((part.stream, thing) for thing in (*part.events, *part.forwarded))
        case _:
            yield part


async def measure(store: Store) -> Tally:
    """Count what a store holds, and take the digest of it."""
    tally = Tally()
    async for part in parts(store):
        tally.add(part)
    return tally


async def refuse_living(upkeep: Upkeep, *, but: Sequence[NodeId] = ()) -> None:
    """Raise if servers use a store."""
    if living := [node[:8] for node in await upkeep.living() if node not in but]:
        raise StoreError(f"{upkeep.shown} is in use by node {', '.join(living)}; stop its servers first")


async def refuse_full(store: Store, upkeep: Upkeep) -> None:
    """Raise if anything is in a store."""
    if await store.sessions(after=None, limit=1) or await store.nodes() or await store.secrets():
        raise StoreError(
            f"{upkeep.shown} is not empty; give an empty store. If it holds a part of a copy that was killed, {REMOVE}"
        )


async def copy(source: Store, target: CopyTarget, *, of: Upkeep, to: Upkeep) -> Tally:
    """Fill an empty store with what another one holds. No node lives in either; `of` and `to` tell whether that stays
    so.

    Raises `StoreError` if what arrived is not what was there. After a failure the target is empty again, or the error
    says that it is not.
    """
    dead: list[NodeId] = []
    try:
        for node in await source.nodes():
            await target.join(node.id)
            dead.append(node.id)
        contents: list[Restored] = []
        async for part in parts(source):
            if isinstance(part, Restored):
                contents.append(part)
            else:
                await _write(target, part)
                await _copy_readers(source, target, part, dead)
            if len(contents) == STREAMS:
                await target.restore(contents)
                contents = []
        await target.restore(contents)
        for node_id in dead:
            await _leave_behind(source, target, node_id)
        found, copied = await measure(source), await measure(target)
        for upkeep in (of, to):
            await refuse_living(upkeep, but=dead)  # without flock this process's own lock looks like theirs
        if found != copied or found.digest != copied.digest:
            raise StoreError(f"the copy is not what was copied: {_difference(found, copied)}")
    except BaseException as failure:
        try:
            await refuse_living(to, but=dead)  # else what a server has written there would go
            await target.clear()
        except StoreError as trouble:
            why = str(failure) or type(failure).__name__
            raise StoreError(f"{why}; a part of the copy is left in {to.shown} ({trouble}): {REMOVE}") from failure
        raise
    return copied


async def _copy_readers(source: Store, target: CopyTarget, part: Part, dead: Sequence[NodeId]) -> None:
    """A dead node's readers go with it: when it is buried, the calls that lost them are told."""
    for thing in part if dead and isinstance(part, tuple) else ():
        if isinstance(thing, StreamContent):
            reader = await source.reader(thing.record.id)
            if reader is not None and reader.node in dead:
                await _commit(target, [base.PutReader(record=reader)])


async def _write(target: CopyTarget, part: Part) -> None:
    """Write all but what streams are restored with."""
    match part:
        case base.AskRecord():
            await _commit(target, [base.OpenAsk(record=part)])
        case Chain():
            if not await target.put_chain(part):
                raise StoreError(f"the resume token of session {part.session[:8]} was refused by the other store")
        case Secret():
            await target.keep_secret(part.name, part.value)
        case tuple():
            await _commit(target, [step for thing in part for step in _steps(thing)])
            streams = [thing for thing in part if isinstance(thing, StreamContent) and thing.generations]
            await target.restore([Restored(stream=s.record.id, generations=s.generations) for s in streams])


def _steps(thing: base.SessionRecord | StreamContent) -> Iterator[base.Step]:
    if isinstance(thing, base.SessionRecord):
        yield base.PutSession(record=thing)
        return
    record = thing.record
    yield base.OpenStream(record=record, calls=thing.calls)
    if record.delivered or record.unread:
        # In its present generation all of it counts as written.
        yield base.Reached(
            stream=record.id, generation=record.generation, through=record.delivered, unread=record.unread
        )


async def _leave_behind(source: Store, target: CopyTarget, node: NodeId) -> None:
    """Have a node that died without a burial be dead in the copy as well, with its mail."""
    after = 0
    while page := await source.mail(node, after=after):
        for start in range(0, len(page), MAIL):
            some = page[start : start + MAIL]
            await _commit(target, [base.SendMail(node=node, message=mail.message) for mail in some])
        after = page[-1].key
    await target.leave(node)


async def _commit(target: CopyTarget, steps: Sequence[base.Step]) -> None:
    for refusal in await target.commit(steps):
        if refusal is not None:
            raise StoreError(f"the other store refused a part of the copy: {refusal}")


def _difference(found: Tally, copied: Tally) -> str:
    there, here = found.counts(), copied.counts()
    unlike = [f"{there[name]} {name} there, {here[name]} here" for name in there if there[name] != here[name]]
    return ", ".join(unlike) or "the same numbers, another digest"
