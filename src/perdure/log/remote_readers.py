"""Connects the readers of a stream with its writer at another node.

A stream has one writer. A reader at another node is entered in the store (`PutReader`), and the writer gets mail about
it. The row names the one reader of the stream, at whatever node, so the newest reader wins across processes as it does
within one. The writer then hints whenever the stream has grown, and the reader's node reads the store. A hint may be
lost. Each round therefore reads everything if the store's stamp shows that another node has written.

A reader at the writer's own node has a row as well, for operators: no node acts on it. A call's first reader has none,
because it came with the call, and the stream's record says when it was lost (`StreamRecord.unread`).
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from perdure._core import mail
from perdure._core.ids import Kind, NodeId, StreamId, is_only_listed, place, reader_name
from perdure.errors import PerdureError
from perdure.log.chores import Chores, OnDemand
from perdure.log.journal import Journal, Steps
from perdure.log.nodes import OtherNodes, mail_to
from perdure.log.reader import BATCH, Reader
from perdure.log.stream import Stream
from perdure.store.interface import Store, reader_of
from perdure.store.records import ReaderRecord, StreamRecord
from perdure.store.steps import LeaveReader, PutReader, Step

_EVENTS_AT_ONCE = 16
"""Streams whose new events are read with their records. They are held until each is written to its reader, so they must
be few; a hint seldom names more."""


_UNSEEN = "it could not be seen who reads a stream"


class RemoteReaders:
    """Readers here of streams that other nodes write, and readers at other nodes of streams that this node writes."""

    def __init__(
        self, *, node: NodeId, store: Store, journal: Journal, nodes: OtherNodes, arrivals: Iterator[int], lag: int
    ) -> None:
        self._node = node
        self._store = store
        self._journal = journal
        self._nodes = nodes
        self._arrivals = arrivals
        self._lag = max(1, lag // 4)
        """Events after which a reader reports to its writer how far it has got."""
        self._followed: dict[StreamId, _Entry] = {}
        """Written elsewhere, read here."""
        self._listed_here: dict[StreamId, Reader] = {}
        """Written here, read here, and in the store for operators."""
        self._lent: dict[StreamId, Stream] = {}
        """Written here, read elsewhere."""
        self._grown: dict[NodeId, set[StreamId]] = {}
        self._unsure: dict[StreamId, Stream] = {}
        """Streams of which the store has to say who reads them."""
        self._reads = OnDemand(self._read_readers, name="perdure-readers", failure=_UNSEEN)
        self._chores = Chores()

    async def aclose(self) -> None:
        await self._reads.aclose()

    @property
    def has_readers_beyond(self) -> bool:
        """Readers here rest beyond the end of their stream until its writer has written the shown events."""
        return any(entry.rests_beyond for entry in self._followed.values())

    def follows(self, stream: StreamId) -> bool:
        return stream in self._followed

    # Streams that this node writes and others read

    def on_grown(self, stream: Stream) -> None:
        """Hint at the end of this turn of the loop: one hint for all that grew in it."""
        assert stream.readers.remote is not None
        if not self._grown:

            def hint() -> None:
                grown, self._grown = self._grown, {}
                for node, streams in grown.items():
                    self._store.hint(node, list(streams))

            asyncio.get_running_loop().call_soon(hint)
        self._grown.setdefault(stream.readers.remote.node, set()).add(stream.id)

    def on_claimed(self, stream: Stream) -> None:
        entry = self._followed.pop(stream.id, None)
        stream.readers.lost_at = stream.readers.lost_at or next(self._arrivals)  # no reader of it is known
        if entry is not None and entry.reader is stream.readers.reader:
            self._put(LeaveReader(stream=stream.id, reader=self._name(entry.reader)))
            self.list_here(entry.reader)
        else:
            self._want_reader(stream)

    def _want_reader(self, stream: Stream) -> None:
        self._unsure[stream.id] = stream
        self._reads.want()

    async def _read_readers(self) -> None:
        while self._unsure:
            with self._chores.surviving(_UNSEEN):  # a failure does not stop the others
                await self.read_reader(self._unsure.pop(next(iter(self._unsure))))

    async def read_reader(self, stream: Stream) -> None:
        """Read from the store which reader is on a stream."""
        row = await reader_of(self._store, stream.id)
        if stream.writer is None:
            entry = self._followed.get(stream.id)
            if entry is None or entry.reader is not stream.readers.reader or not entry.is_listed:
                return  # no reader is here; or it is about to overtake the one in the row
            if row is None or row.reader != self._name(entry.reader):
                del self._followed[stream.id]
                entry.reader.end()
            return
        if row is not None and is_only_listed(row.reader):
            if row.node == self._node and stream.id not in self._listed_here:
                # Its reader has left. If its row took the place of another node's, no node knows of that reader: it is
                # ended, and its client comes again.
                self._put(LeaveReader(stream=stream.id, reader=row.reader))
                self._put(*mail_to(self._nodes.others, mail.Reading(session=stream.session, stream=stream.id)))
            row = None
        row = None if row is None or row.node == self._node else row
        before = stream.readers.remote
        if row is None or stream.is_over:
            self._lent.pop(stream.id, None)
        else:
            self._lent[stream.id] = stream
        stream.set_remote_reader(row, arrival=next(self._arrivals))
        if row is not None and before is not None and before.node not in (row.node, self._node):
            self._put(*self._reading(before.node, stream))
        if row is not None and stream.tail.last > row.seq:
            self.on_grown(stream)

    # Streams that others write and this node reads

    def on_attached(self, reader: Reader) -> None:
        stream = reader.stream
        if stream.writer is not None:
            remote, stream.readers.remote = stream.readers.remote, None
            self._lent.pop(stream.id, None)
            if remote is not None:
                leave = LeaveReader(stream=stream.id, reader=remote.reader)
                self._put(leave, *self._reading(remote.node, stream))
            return
        self._listed_here.pop(stream.id, None)
        entry = _Entry(reader, reader.cursor, rests_beyond=reader.cursor > stream.tail.durable)
        self._followed[stream.id] = entry
        steps = (self._entering(reader), *self._reading(stream.node, stream))

        def on_listed(_: PerdureError | None) -> None:
            # No node got hints about earlier events, so this one reads now. (Where the steps are refused, only the mail
            # to the writer was, because the writer is dead.)
            entry.is_listed = True
            self._store.hint(self._node, [stream.id])

        self._journal.put(Steps(steps, on_end=on_listed))

    def on_progress(self, reader: Reader) -> None:
        entry = self._followed.get(reader.stream.id)
        if entry is not None and entry.reader is reader and reader.cursor - entry.seq >= self._lag:
            entry.seq = reader.cursor
            moved = replace(self._entering(reader), attaches=False)
            node, stream = reader.stream.node, reader.stream.id

            def on_moved(refused: PerdureError | None) -> None:
                if node and refused is None:  # else the stream does not exist any more
                    self._store.hint(node, [stream])

            self._journal.put(Steps((moved,), on_end=on_moved))

    def list_here(self, reader: Reader) -> None:
        """Enter a reader of a stream that this node writes. While the store fails, that would only add to what is
        held."""
        if self._store.shared and not self._journal.is_degraded:
            self._listed_here[reader.stream.id] = reader
            self._put(self._entering(reader, only_listed=True))

    def on_detached(self, reader: Reader) -> None:
        stream, entry = reader.stream, self._followed.get(reader.stream.id)
        if self._listed_here.get(stream.id) is reader:
            del self._listed_here[stream.id]
            self._put(LeaveReader(stream=stream.id, reader=self._name(reader, only_listed=True)))
        if entry is None or entry.reader is not reader:
            return
        del self._followed[stream.id]
        leave = LeaveReader(stream=stream.id, reader=self._name(reader))
        self._put(leave, *self._reading(stream.node, stream))

    def _name(self, reader: Reader, *, only_listed: bool = False) -> str:
        return reader_name(self._node, reader.arrival, reader.since, only_listed=only_listed)

    def _entering(self, reader: Reader, *, only_listed: bool = False) -> PutReader:
        name, stream = self._name(reader, only_listed=only_listed), reader.stream.id
        return PutReader(record=ReaderRecord(stream=stream, reader=name, node=self._node, seq=reader.cursor))

    def _reading(self, node: NodeId, stream: Stream) -> list[Step]:
        return mail_to([node] if node else (), mail.Reading(session=stream.session, stream=stream.id))

    def _put(self, *steps: Step) -> None:
        self._journal.put(Steps(steps))

    # Reading the store

    async def read_ends(self, named: Collection[StreamId], *, everything: bool) -> Sequence[StreamRecord]:
        """Read the ends of streams that are read here and written elsewhere, or the reverse: the named ones, or all.
        Returns the standalone streams that are read here and have no writer any more."""
        holders = await self._nodes.holders() if everything and self.has_readers_beyond else ()
        names = list(self._followed) if everything else [name for name in named if name in self._followed]
        after = {name: self._followed[name].reader.cursor for name in names}
        is_short = not everything and len(named) <= _EVENTS_AT_ONCE
        found = await self._store.follow(after, limit=BATCH if is_short else 0) if after else {}
        for stream_id in after.keys() - found.keys():
            if (gone := self._followed.pop(stream_id, None)) is not None:
                gone.reader.end()
        homeless = []
        for record, events, *_ in found.values():
            if (entry := self._followed.get(record.id)) is None:
                continue
            with self._chores.surviving("a stream could not be followed", record.id):
                stream = entry.reader.stream
                before = stream.node
                kept = await self._find_loss(stream, record)
                with entry.reader.taking(events or (), after=after[record.id]):
                    stream.follow(record, kept=kept)
                if not record.node and record.kind is Kind.STANDALONE:
                    homeless.append(record)
                elif record.node not in ("", before, self._node) and not stream.is_over:
                    # The new writer may have read before this node's reader row existed, and a reader that overtook
                    # this node's notified the old one.
                    self._put(*self._reading(record.node, stream))
                    self._want_reader(stream)
        for entry in [entry for entry in self._followed.values() if everything and entry.rests_beyond]:
            # A reader rests beyond the end of a stream while its writer holds the events that follow. Once these are
            # written, it continues; events that are missing then are lost: the reader is ended, and its client learns
            # of the gap when it resumes.
            beyond = entry.reader.cursor > entry.reader.stream.tail.durable
            entry.rests_beyond = beyond and entry.reader.stream.node in holders
            if beyond and not entry.rests_beyond:
                entry.reader.end()
        for stream in list(self._lent.values()):
            if stream.is_over:
                del self._lent[stream.id]  # no event follows that its reader needs
            # Mail reports readers that join or leave; hints report progress, which matters once a writer waits for it.
            elif stream.id in named or (everything and stream.readers.waiting):
                with self._chores.surviving(_UNSEEN, stream.id):
                    await self.read_reader(stream)
        return homeless

    async def _find_loss(self, stream: Stream, record: StreamRecord) -> int | None:
        """Return where another writer continued, if it did not continue after all events that were read here: the store
        may have lost the last ones, or the claim under which they were written. (If the record is older than this
        node's knowledge, the reader is ended without need, and its client reconnects.)"""
        if stream.writer is not None or stream.is_over or record.fence == stream.fence:
            return None
        ended, known = await self._store.generations(stream.id), stream.tail.durable
        end = place(stream.position(known), generation=record.generation, last=record.last, ended=ended)
        if record.generation == stream.generation:  # the claim was lost and made again, by another node
            end = min(known, max((generation.end for generation in ended), default=0))
        return end if record.generation < stream.generation or end < known else None


@dataclass(slots=True)
class _Entry:
    """A reader here on a stream that another node writes, as the store knows it."""

    reader: Reader
    seq: int
    """How far the reader had got when that was last written."""
    rests_beyond: bool
    """The writer has shown it events that are not in the store yet."""
    is_listed: bool = False
    """Its row is written, and says which reader is on the stream."""
