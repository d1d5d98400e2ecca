"""One stream, one object: opening, claiming and resuming a stream give the object that is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.states import CallState, ContentState, WritingState
from perdure.log.journal import Journal
from perdure.log.stream import Stream, StreamOwner, Streams
from perdure.settings import Settings
from perdure.store import MemoryStore
from perdure.store.records import Event, StreamRecord
from perdure.store.steps import CallEnd, OpenStream, PutSession, Step
from perdure.telemetry.counters import Counters
from perdure.testing._values import a_session
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

HERE, THERE, SESSION = NodeId("here"), NodeId("there"), SessionId("s")
END = CallEnd(incarnation=1, request_id=1, state=CallState.ANSWERED)


class Owner(StreamOwner):
    """Lets go of what is settled, and remembers what it was told."""

    def __init__(self) -> None:
        self.streams: Streams
        self.settled: list[tuple[Stream, bool]] = []
        self.lost: list[list[bytes]] = []
        self.written: list[Step] = []

    def on_settled(self, stream: Stream) -> None:
        if self.streams.release(stream):
            self.settled.append((stream, stream.writer is not None))

    def on_grown(self, stream: Stream) -> None:
        raise AssertionError("no reader is elsewhere")

    def on_lost(self, stream: Stream, unwritten: Sequence[Event], shown: int) -> None:
        self.lost.append([event.payload for event in unwritten])

    def on_step_written(self, stream: Stream, step: Step) -> None:
        self.written.append(step)


class Shelf:
    """A table of streams on a store in memory, which two nodes have joined."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.owner = Owner()
        self.journal = Journal(store, Settings(), Counters())
        self.streams = self.owner.streams = Streams(self.journal, self.owner, limit=100)

    async def opened(self, node: NodeId = HERE) -> StreamRecord:
        fence = await self.store.join(node)
        record = StreamRecord(id=StreamId("call"), session=SESSION, kind=Kind.CALL, node=node, fence=fence, opened=1.0)
        await self.store.commit([PutSession(record=a_session("s")), OpenStream(record=record)])
        return record

    async def stored(self) -> StreamRecord:
        [record] = await self.store.streams(SESSION)
        return record

    async def claimed(self, node: NodeId) -> StreamRecord:
        if node != HERE:
            await self.store.join(node)
        record = await self.store.claim(StreamId("call"), node=node, held=(await self.stored()).fence)
        assert record is not None
        return record

    @property
    def held(self) -> list[Stream]:
        return list(self.streams.of(SESSION).values())


@pytest.fixture
async def shelf() -> AsyncIterator[Shelf]:
    async with MemoryStore() as store:
        shelf = Shelf(store)
        yield shelf
        await shelf.journal.aclose()


async def test_a_reader_that_resumes_a_running_call_gets_the_object_that_writes_it(shelf: Shelf) -> None:
    record = await shelf.opened()
    stream = shelf.streams.write(record, owed=1)
    assert shelf.streams.follow(record) is stream
    assert stream.writing is WritingState.WRITING
    assert list(shelf.streams) == shelf.held == [stream]


async def test_a_call_that_is_claimed_is_written_through_the_object_that_is_read(shelf: Shelf) -> None:
    record = await shelf.opened(THERE)
    stream = shelf.streams.follow(record)
    with stream.pinned():  # a reader is about to come
        await shelf.store.join(HERE)
        assert shelf.streams.write(await shelf.claimed(HERE), owed=1) is stream
        assert (state_of(stream), stream.node) == (WritingState.WRITING, HERE)
        stream.append(b"answer", end=END)
        await until(lambda: stream.content is ContentState.SEALED)
        assert shelf.held == [stream]
    assert shelf.held == []
    assert shelf.owner.settled == [(stream, True)]


async def test_what_another_node_writes_goes_when_no_reader_comes(shelf: Shelf) -> None:
    stream = shelf.streams.follow(await shelf.opened(THERE))
    with stream.pinned():
        assert shelf.held == [stream]
    assert shelf.held == []
    assert shelf.owner.settled == [(stream, False)]


async def test_a_call_that_another_node_has_claimed_is_followed_by_the_same_object(shelf: Shelf) -> None:
    stream = shelf.streams.write(await shelf.opened(), owed=1)
    stream.append(b"one")
    await until(lambda: stream.tail.durable == 1)
    taken = await shelf.claimed(THERE)
    with stream.pinned():
        assert shelf.streams.follow(taken) is stream
        assert (state_of(stream), stream.node, stream.writer) == (WritingState.FOLLOWING, THERE, None)
        assert not stream.is_over
        assert [event.payload for event in await stream.read(after=0, limit=10)] == [b"one"]
    assert shelf.owner.lost == [[]]


@pytest.mark.parametrize("again", [HERE, THERE])
async def test_an_early_answer_that_was_not_written_goes_with_the_claim(shelf: Shelf, again: NodeId) -> None:
    """Readers go on behind it, also where this node claims the call once more."""
    stream = shelf.streams.write(await shelf.opened(), owed=1)
    stream.append(b"one")
    await until(lambda: stream.tail.durable == 1)
    with stream.pinned():
        await shelf.claimed(THERE)
        stream.append(b"early", early=True)
        if again == THERE:
            await until(lambda: stream.writer is None)
        else:
            shelf.streams.write(await shelf.claimed(HERE), owed=1)
        assert stream.answered == 0


@pytest.mark.parametrize("writer", [HERE, THERE])
async def test_a_claim_with_a_lower_end_says_that_the_store_has_lost_what_came_behind_it(
    shelf: Shelf, writer: NodeId
) -> None:
    """A reader that waited behind the old end would pass over what the new writer says (promise 2)."""
    record = await shelf.opened(writer)
    stream = shelf.streams.write(record, owed=1) if writer == HERE else shelf.streams.follow(record)
    with stream.pinned():
        if writer == HERE:
            for number in range(4):
                stream.append(b"%d" % number)
            await until(lambda: stream.tail.durable == 4)
        else:
            stream.follow(replace(record, last=4))
        taken = replace(record, generation=3, fence=Fence(record.fence + 1), node=NodeId("third"), last=2)
        stream.follow(taken)
        assert (stream.tail.durable, stream.tail.last, stream.generation) == (2, 2, 3)
        stream.follow(replace(taken, last=1))
        assert stream.tail.durable == 2, "read before the other: it says nothing"


async def test_what_was_appended_under_a_lost_claim_goes_back_and_later_words_are_dropped(shelf: Shelf) -> None:
    stream = shelf.streams.write(await shelf.opened(), owed=1)
    await shelf.claimed(THERE)
    stream.append(b"too late")
    await until(lambda: shelf.owner.lost)
    assert shelf.owner.lost == [[b"too late"]]
    assert (state_of(stream), stream.tail.last) == (WritingState.LOST, 0)
    stream.append(b"later still")
    assert (stream.tail.last, shelf.held) == (0, [])


async def test_a_caller_that_waits_for_the_end_of_a_lost_call_goes_on_when_a_reader_follows(shelf: Shelf) -> None:
    stream = shelf.streams.write(await shelf.opened(), owed=1)
    with stream.pinned():
        waiting = asyncio.create_task(stream.wait_over())
        await until(lambda: stream.readers.waiting)
        assert shelf.streams.follow(await shelf.claimed(THERE)) is stream
        assert not stream.is_over
        await waiting


async def test_a_session_that_ended_elsewhere_has_its_answer_shown_from_memory(shelf: Shelf) -> None:
    stream = shelf.streams.write(await shelf.opened(), owed=1)
    with stream.pinned():
        stream.append(b"pending")
        stream.unlog()
        stream.append(b"answer", end=END)
        assert (state_of(stream), stream.content) == (WritingState.UNLOGGED, ContentState.SEALED)
        assert [event.payload for event in await stream.read(after=0, limit=10)] == [b"pending", b"answer"]
    assert shelf.held == []
    assert (await shelf.stored()).last == 0


async def test_calls_that_wait_are_let_go_of_unless_their_session_needs_them(shelf: Shelf) -> None:
    stream = shelf.streams.write(await shelf.opened(), owed=1)
    shelf.streams.release_parked(lambda _: True)
    assert shelf.held == [stream]
    stream.append(b"on its way")
    shelf.streams.release_parked(lambda _: False)
    assert shelf.held == [stream]
    await until(lambda: stream.tail.durable == 1)
    shelf.streams.release_parked(lambda _: False)
    assert shelf.held == []


async def test_a_claim_that_is_repeated_goes_on_where_the_store_is(shelf: Shelf) -> None:
    stream = shelf.streams.write(await shelf.opened(), owed=2)
    stream.append(b"first", end=END)
    await until(lambda: stream.tail.durable == 1)
    again = replace(await shelf.claimed(HERE))
    assert shelf.streams.write(again, owed=1) is stream
    stream.append(b"second", end=replace(END, request_id=2))
    await until(lambda: stream.content is ContentState.SEALED)
    assert shelf.owner.settled == [(stream, True)]
    usage = stream.usage(idle=True)
    assert (usage.answers, usage.answer_bytes) == (2, 11)


def state_of(stream: Stream) -> WritingState:
    return stream.writing
