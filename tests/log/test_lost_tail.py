"""A stream whose end the store has lost: what is written again, what leaves a hole, and that nothing comes twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from perdure._core.ids import Kind, NodeId, SessionId, StreamId
from perdure._core.states import CallState, ContentState, WritingState
from perdure.errors import StoreUnavailable
from perdure.log.journal import Journal, Steps
from perdure.log.stream import Stream, StreamOwner, Streams
from perdure.settings import Settings
from perdure.store import MemoryStore
from perdure.store.records import Event, StreamRecord
from perdure.store.steps import Append, CallEnd, Forward, OpenStream, PutSession, Refusals, SendMail, Step
from perdure.telemetry.counters import Counters
from perdure.testing._values import a_call, a_session, messages, numbers
from tests.support.servers.in_process import until
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.lost_tail import Losing

pytestmark = pytest.mark.anyio

NODE, SESSION, CALL = NodeId("node"), SessionId("s"), StreamId("call")


class Repairs(FaultyStore):
    """Commits nothing at once, and may fail in the moment in which something lost is written again."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.fails = 0

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        return None

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        if self.fails and any(isinstance(step, Append) and step.lost for step in steps):
            self.fails -= 1
            raise StoreUnavailable("it is away again")
        return await super().commit(steps)


class Owner(StreamOwner):
    def __init__(self) -> None:
        self.lost = 0

    def on_lost(self, stream: Stream, unwritten: Sequence[Event], shown: int) -> None:
        self.lost += 1


class Desk:
    """One stream with two calls, on a store that can be put back."""

    def __init__(self, tmp_path: Path) -> None:
        self.losing = Losing("memory", tmp_path)
        inner = self.losing.store
        assert isinstance(inner, MemoryStore)
        self.store = Repairs(inner)
        self.journal = Journal(self.store, Settings(), Counters())
        self.owner = Owner()
        self.streams = Streams(self.journal, self.owner, limit=100)

    async def open(self) -> Stream:
        fence = await self.store.join(NODE)
        await self.store.commit([PutSession(record=a_session(SESSION))])
        self.lose_stream = self.losing.remember()
        record = StreamRecord(id=CALL, session=SESSION, kind=Kind.CALL, node=NODE, fence=fence, opened=1.0)
        calls = tuple(a_call(id_, stream=CALL, session=SESSION) for id_ in (1, 2))
        await self.store.commit([OpenStream(record=record, calls=calls)])
        return self.streams.write(record, owed=2, calls=calls)

    async def say(self, stream: Stream, *payloads: bytes) -> None:
        """Append, and wait until it is written."""
        for payload in payloads:
            stream.append(payload)
        await until(lambda: stream.tail.durable == stream.tail.last)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def end(request_id: int) -> CallEnd:
    return CallEnd(incarnation=1, request_id=request_id, state=CallState.ANSWERED)


async def test_what_is_still_in_memory_is_written_again(desk: Desk) -> None:
    """Then nothing is lost at all."""
    stream = await desk.open()
    with stream.pinned():
        await desk.say(stream, b"1", b"2")
        lose = desk.losing.remember()
        await desk.say(stream, b"3", b"4")
        lose()
        await desk.say(stream, b"5")
        events = await desk.store.read(CALL, after=0, limit=9)
        assert [(event.seq, event.payload) for event in events] == [(n, b"%d" % n) for n in range(1, 6)]
    await desk.journal.aclose()


async def test_what_is_not_leaves_a_hole_and_the_stream_goes_on(desk: Desk) -> None:
    stream = await desk.open()
    await desk.say(stream, b"1", b"2")
    lose = desk.losing.remember()
    await desk.say(stream, b"3", b"4")
    lose()
    await desk.say(stream, b"5")
    await desk.say(stream, b"6")
    assert await numbers(desk.store, CALL) == [1, 2, 5, 6]
    assert (stream.writing, desk.owner.lost) == (WritingState.WRITING, 0)
    assert desk.journal.doubts == 1, "the second append follows the first"
    await desk.journal.aclose()


@pytest.mark.parametrize("altogether", [False, True])
async def test_a_call_that_had_ended_has_ended(desk: Desk, altogether: bool) -> None:
    """Also where the whole stream is gone, with the rows of its calls."""
    stream = await desk.open()
    lose = desk.lose_stream if altogether else desk.losing.remember()
    stream.append(b"first answer", end=end(1))
    await until(lambda: stream.tail.durable == stream.tail.last)
    lose()
    stream.append(b"second answer", end=end(2))
    await until(lambda: stream.content is ContentState.SEALED)
    await until(lambda: stream.tail.durable == stream.tail.last)
    states = {call.request_id: call.state for call in await desk.store.calls(SESSION, stream=CALL)}
    assert states == {1: CallState.ANSWERED, 2: CallState.ANSWERED}
    await desk.journal.aclose()


async def test_a_forwarded_message_that_was_taken_is_not_taken_again(desk: Desk) -> None:
    """It waits again in the store, and the next writer would append it once more."""
    stream = await desk.open()
    await desk.store.commit([Forward(stream=CALL, node=NODE, sender="x", first=1, payloads=(b"forwarded",))])
    lose = desk.losing.remember()
    [waiting] = await desk.store.forwarded(CALL)
    stream.append(waiting.payload, taken=waiting.key)
    await until(lambda: stream.tail.durable == 1)
    lose()
    assert list(await desk.store.forwarded(CALL)) == [waiting]
    await desk.say(stream, b"own")
    assert list(await desk.store.forwarded(CALL)) == []
    await desk.journal.aclose()


async def test_a_store_that_fails_while_it_is_repaired_gets_everything_once(desk: Desk) -> None:
    """The steps beside the lost ones were written, and are not written again: mail would come twice."""
    stream = await desk.open()
    await desk.say(stream, b"1")
    lose = desk.losing.remember()
    await desk.say(stream, b"2", b"3")
    lose()
    desk.store.fails = 2
    desk.journal.put(Steps((SendMail(node=NODE, message=b"before"),)))
    stream.append(b"4")
    desk.journal.put(Steps((SendMail(node=NODE, message=b"behind"),)))
    await until(lambda: desk.journal.is_degraded)
    stream.append(b"5")
    await until(lambda: stream.tail.durable == 5)
    assert await numbers(desk.store, CALL) == [1, 4, 5]
    assert await messages(desk.store, NODE) == [b"before", b"behind"]
    await desk.journal.aclose()


async def test_parts_that_were_held_are_written_in_order_behind_the_hole(desk: Desk) -> None:
    stream = await desk.open()
    await desk.say(stream, b"1")
    lose = desk.losing.remember()
    await desk.say(stream, b"2", b"3")
    desk.store.writes, desk.store.fails = Fault.RAISES, 2
    for payload in (b"4", b"5", b"6"):
        stream.append(payload)
        desk.journal.put(Steps((SendMail(node=NODE, message=payload),)))
        await until(lambda: stream.tail.visible == stream.tail.last)
    lose()
    desk.store.works()
    await until(lambda: stream.tail.durable == 6)
    assert await numbers(desk.store, CALL) == [1, 4, 5, 6]
    assert await messages(desk.store, NODE) == [b"4", b"5", b"6"]
    await desk.journal.aclose()
    assert not desk.journal.backlog.parts
