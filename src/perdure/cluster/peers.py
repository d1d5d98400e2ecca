"""The other nodes: who they are, what they write that is read here, and what is read there that this one writes.

A stream has one writer. A reader on another node is entered in the store (`PutReader`), and the writer is told by mail:
the row says who reads, wherever that is, so the newest reader wins across processes as it does within one. The writer
then hints whenever the stream has grown, and the reader's node looks. A hint may be lost; now and then the store says
that something was written, and everything is looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from perdure._core import mail
from perdure._core.ids import Kind, NodeId, StreamId
from perdure.cluster.mailbox import Addressee, Mailbox
from perdure.errors import HeldElsewhere, PerdureError, StoreError, StoreLost, StoreUnavailable
from perdure.log.chores import Chores
from perdure.log.hub import Hub
from perdure.log.journal import Journal, Steps
from perdure.log.reader import Reader
from perdure.log.stream import Stream
from perdure.store.base import (
    LeaveReader,
    Liveness,
    MoveReader,
    PutReader,
    ReaderRecord,
    SendMail,
    Step,
    Store,
    StreamRecord,
)
from perdure.telemetry.events import log_event
from perdure.telemetry.prometheus import has_left

_ENDS_AT_ONCE = 500
"""Streams looked at in one query."""

_KNOWN_DEAD = 64
"""Dead nodes that are remembered: their sessions come in herds, soon after the death."""


class Inside(Addressee, Protocol):
    """Who acts on what comes from other nodes."""

    async def cancel_waiting(self, cancelled: mail.Cancelled) -> None:
        """The client cancels a call that waits here to be run again or settled."""
        ...

    async def come_home(self, stream: Stream) -> None:
        """A standalone stream that is read here has no writer any more."""
        ...

    async def forwarded(self, record: StreamRecord) -> None:
        """Messages wait for a stream that this node writes, or no node does."""
        ...


class Neighbours:
    """The other nodes, as this one knows them."""

    def __init__(self, *, node: NodeId, store: Store, journal: Journal, hub: Hub, liveness: Liveness, lag: int) -> None:
        self.others: Sequence[NodeId] = ()
        """Those that live, as far as is known."""
        self.departed: frozenset[NodeId] = frozenset()
        """Those that left in good order, and left something behind."""
        self.alone = False
        """Nobody else is there, not even somebody dead whose calls are to be settled. Not known at first."""
        self._node = node
        self._store = store
        self._journal = journal
        self._hub = hub
        self._liveness = liveness
        self._lag = max(1, lag // 4)
        """Events after which a reader tells its writer how far it has got."""
        self._followed: dict[StreamId, Stream] = {}
        """Written elsewhere, read here."""
        self._rest_beyond: dict[StreamId, Stream] = {}
        """Of those, the ones whose readers were shown by their writer what is not in the store yet."""
        self._lent: dict[StreamId, Stream] = {}
        """Written here, read elsewhere."""
        self._dead: deque[NodeId] = deque(maxlen=_KNOWN_DEAD)
        self._grown: dict[NodeId, set[StreamId]] = {}
        self._named: set[StreamId] = set()
        self._all = False
        self._looked: object = None
        """The store's stamp from before everything was last looked at."""
        self._looking: asyncio.Task[None] | None = None
        self._undrawn = self._is_drawing = False
        self._mailbox = Mailbox(node=node, store=store, journal=journal)
        self._inside: Inside | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._chores = Chores()
        hub.registry = self

    def begin(self, inside: Inside) -> Callable[[], None]:
        """Listen from now on; gives the way to stop."""
        self._inside = self._mailbox.addressee = inside
        return self._store.subscribe(self._node, self._hinted)

    async def is_dead(self, node: NodeId) -> bool:
        """Whether a node certainly writes nothing more. A node that is dead stays dead: it is asked about once, however
        many of its sessions come here."""
        if node == self._node:
            return False
        if node not in self._dead:
            known = {record.id for record in await self._store.nodes()}
            if node in known and node not in await self._liveness.dead():
                return False
            self._dead.append(node)
        return True

    async def holders(self) -> Sequence[NodeId]:
        """The others that live and show what is not in the store."""
        return await self._liveness.holders()

    async def refuse_while_held(self) -> None:
        """Raises `HeldElsewhere` while another node holds anything. After that the store has all that it has shown."""
        if holders := await self.holders():
            raise HeldElsewhere(f"{len(holders)} other nodes hold what is not written yet")

    async def meet(self) -> Sequence[NodeId]:
        """See who is there; gives the dead."""
        dead = await self._liveness.dead()
        nodes = await self._store.nodes()
        known = [record.id for record in nodes if record.id != self._node]
        self.alone = not known
        self.others = tuple(node for node in known if node not in dead)
        self.departed = frozenset(record.id for record in nodes if has_left(record))
        return dead

    async def cancel_waiting(self, cancelled: mail.Cancelled) -> None:
        if self._inside is not None:
            await self._inside.cancel_waiting(cancelled)

    async def aclose(self) -> None:
        self._inside = None
        await self._mailbox.aclose()
        tasks = [*self._tasks, *((self._looking,) if self._looking is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What this node writes and others read

    def grown(self, stream: Stream) -> None:
        """Hint at the end of this turn of the loop: one hint for all that grew in it."""
        assert stream.foreign is not None
        if not self._grown:
            asyncio.get_running_loop().call_soon(self._hint)
        self._grown.setdefault(stream.foreign.node, set()).add(stream.id)

    def _hint(self) -> None:
        grown, self._grown = self._grown, {}
        for node, streams in grown.items():
            self._store.hint(node, list(streams))

    def now_written_here(self, stream: Stream) -> None:
        self._followed.pop(stream.id, None)
        stream.lost_at = stream.lost_at or self._hub.arrive()
        if stream.reader is not None and stream.reader.registered is not None:
            self._put(LeaveReader(stream=stream.id, reader=self._name(stream.reader)))
            stream.reader.registered = None
        else:
            self._spawn(self.look_who_reads(stream))

    async def look_who_reads(self, stream: Stream) -> None:
        """Learn from the store who reads a stream."""
        row = await self._store.reader(stream.id)
        if stream.writes:
            self._look_as_writer(stream, None if row is None or row.node == self._node else row)
            return
        reader = stream.reader
        if reader is None or reader.registered is None or not reader.listed:
            return  # nobody here; or it is about to overtake whoever is in the row
        if row is None or row.reader != self._name(reader):
            reader.registered = None
            self._followed.pop(stream.id, None)
            reader.end()

    def _look_as_writer(self, stream: Stream, row: ReaderRecord | None) -> None:
        before = stream.foreign
        if row is None or stream.over:
            self._lent.pop(stream.id, None)
        else:
            self._lent[stream.id] = stream
        stream.read_elsewhere(row, arrival=self._hub.arrive())
        if row is not None and before is not None and before.node not in (row.node, self._node):
            self._tell(before.node, stream)
        if row is not None and stream.last > row.seq:
            self.grown(stream)

    # What others write and this node reads (the hub's registry)

    def attached(self, reader: Reader) -> None:
        stream = reader.stream
        if stream.writes:
            foreign, stream.foreign = stream.foreign, None
            self._lent.pop(stream.id, None)
            if foreign is not None:
                leave = LeaveReader(stream=stream.id, reader=foreign.reader)
                self._put(leave, self._reading(foreign.node, stream))
            return
        self._followed[stream.id] = stream
        if reader.cursor > stream.durable:
            self._rest_beyond[stream.id] = stream
        reader.registered = reader.cursor
        told = (self._reading(stream.node, stream),) if stream.node else ()
        # Once its row is there, a look: what came before it was hinted to nobody.
        self._journal.put(_Listing(reader, (self._row(reader), *told), lambda: self._hinted((stream.id,))))

    def progressed(self, reader: Reader) -> None:
        if reader.registered is not None and reader.cursor - reader.registered >= self._lag:
            reader.registered = reader.cursor
            stream = reader.stream
            moved = MoveReader(stream=stream.id, reader=self._name(reader), seq=reader.cursor)
            self._put(moved, then=(stream.node, stream.id))

    def left(self, reader: Reader) -> None:
        stream = reader.stream
        self._followed.pop(stream.id, None)
        reader.registered = None
        leave = LeaveReader(stream=stream.id, reader=self._name(reader))
        self._put(leave, *((self._reading(stream.node, stream),) if stream.node else ()))

    def _row(self, reader: Reader) -> PutReader:
        name, stream = self._name(reader), reader.stream.id
        return PutReader(record=ReaderRecord(stream=stream, reader=name, node=self._node, seq=reader.cursor))

    def _name(self, reader: Reader) -> str:
        return f"{self._node}.{reader.arrival}"

    def _reading(self, node: NodeId, stream: Stream) -> SendMail:
        return SendMail(node=node, message=mail.encode(mail.Reading(session=stream.session, stream=stream.id)))

    def _tell(self, node: NodeId, stream: Stream) -> None:
        self._put(self._reading(node, stream))

    # Looking

    def _hinted(self, streams: Sequence[StreamId]) -> None:
        if streams:
            self._named.update(streams)
        else:
            self._all = True
            self._mailbox.look()
        if self._looking is None and self._inside is not None:
            self._looking = asyncio.create_task(self._look(), name="perdure-look")

    @property
    def news(self) -> bool:
        """Others may have written something since everything was last looked at."""
        return self._store.stamp() != self._looked

    def look(self) -> None:
        """Look at everything, if there may be something to see."""
        self._draw()  # also what this node itself has forwarded to one that died
        if self.news or self._rest_beyond:
            self._hinted(())
        else:
            self._mailbox.look_if_owing()

    async def _look(self) -> None:
        try:
            while self._named or self._all:
                await self._look_once()
        except StoreError as failure:
            log_event(logging.DEBUG, "neighbours.look", f"what others wrote could not be read: {failure}")
            self._looked = None  # the next round looks at everything
        except Exception as failure:
            log_event(logging.ERROR, "neighbours.look", f"what others wrote could not be dealt with: {failure!r}")
            self._looked = None
        finally:
            self._looking = None

    async def _look_once(self) -> None:
        everything, self._all = self._all, False
        named, self._named = self._named, set()
        stamp = self._store.stamp()
        holders = await self.holders() if everything and self._rest_beyond else ()
        if named - self._followed.keys() or everything:
            self._draw()
        await self._look_at(self._followed if everything else self._followed.keys() & named)
        if everything:
            self._end_beyond(holders)
        for stream in list(self._lent.values()):
            if stream.over:
                del self._lent[stream.id]  # nothing comes that its reader would have to be told of
            # Who comes and goes is told by mail; only progress is hinted at, and matters once somebody waits for it.
            elif stream.id in named or (everything and stream.is_full):
                with self._chores.surviving("it could not be seen who reads a stream", stream.id):
                    await self.look_who_reads(stream)
        if everything:
            self._looked = stamp

    def _end_beyond(self, holders: Sequence[NodeId]) -> None:
        """A reader rests beyond the end of a stream while its writer holds what follows. Once that is written, it goes
        on; if it is not there then, it never will be: the reader is ended, and its client told when it comes again."""
        for stream in list(self._rest_beyond.values()):
            beyond = stream.reader is not None and not stream.writes and stream.reader.cursor > stream.durable
            if beyond and stream.node in holders:
                continue
            del self._rest_beyond[stream.id]
            if beyond and stream.reader is not None:
                stream.reader.end()

    def _draw(self) -> None:
        """Have what was forwarded to this node's streams appended. On its own: readers must not wait for that."""
        self._undrawn = True
        if not self._is_drawing:
            self._is_drawing = True
            self._spawn(self._draw_all())

    async def _draw_all(self) -> None:
        try:
            while self._undrawn and self._inside is not None:
                self._undrawn = False
                for record in await self._store.forwarded_to(self._node):
                    await self._draw_one(self._inside, record)
        finally:
            self._is_drawing = False

    async def _draw_one(self, inside: Inside, record: StreamRecord) -> None:
        try:
            await inside.forwarded(record)
        except (StoreUnavailable, StoreLost):
            raise
        except Exception as failure:  # it must not stand in the way of other streams
            log_event(logging.ERROR, "forward.failed", f"what was forwarded could not be appended: {failure!r}")

    async def _look_at(self, streams: Iterable[StreamId]) -> None:
        for record in await self.ends(list(streams)):
            if (stream := self._followed.get(record.id)) is not None:
                with self._chores.surviving("a stream could not be followed", stream.id):
                    self._see(stream, record)

    def _see(self, stream: Stream, record: StreamRecord) -> None:
        before = stream.node
        stream.follow(record)
        if not record.node and record.kind is Kind.STANDALONE and self._inside is not None:
            self._spawn(self._inside.come_home(stream))
        elif record.node not in ("", before, self._node) and not stream.over:
            # The new writer may have looked before our row was there, and whoever overtook us told the old one.
            self._tell(record.node, stream)
            self._spawn(self.look_who_reads(stream))

    async def ends(self, streams: Sequence[StreamId]) -> Sequence[StreamRecord]:
        """How far streams have grown. A reader of one that is gone is ended."""
        found: list[StreamRecord] = []
        for start in range(0, len(streams), _ENDS_AT_ONCE):
            found += (await self._store.streams_by_id(streams[start : start + _ENDS_AT_ONCE])).values()
        for stream_id in set(streams) - {record.id for record in found}:
            if (stream := self._followed.pop(stream_id, None)) is not None and stream.reader is not None:
                stream.reader.end()
        return found

    def _put(self, *steps: Step, then: tuple[NodeId, StreamId] | None = None) -> None:
        self._journal.put(Steps(steps) if then is None else _Hinting(self._store, steps, then))

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except StoreError as failure:
                log_event(logging.WARNING, "neighbours.reader", f"it could not be seen who reads a stream: {failure}")
            except Exception as failure:
                log_event(logging.ERROR, "neighbours.reader", f"it could not be seen who reads a stream: {failure!r}")

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Listing(Steps):
    """Steps that enter a reader in the store."""

    __slots__ = ("_look", "_reader")

    def __init__(self, reader: Reader, steps: Sequence[Step], look: Callable[[], None]) -> None:
        super().__init__(steps)
        self._reader = reader
        self._look = look

    def written(self, steps: Sequence[Step]) -> None:
        self._reader.listed = True
        self._look()

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        self.written(steps)  # only the writer could not be told, who is gone


class _Hinting(Steps):
    """Steps after which a node is hinted at a stream."""

    __slots__ = ("_store", "_then")

    def __init__(self, store: Store, steps: Sequence[Step], then: tuple[NodeId, StreamId]) -> None:
        super().__init__(steps)
        self._store = store
        self._then = then

    def written(self, steps: Sequence[Step]) -> None:
        node, stream = self._then
        if node:
            self._store.hint(node, [stream])

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        pass  # the stream is gone, and with it whoever reads it
