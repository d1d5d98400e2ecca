"""What hints bring along between processes: the events that the other node would read, if they are small."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from perdure._core.ids import Fence, StreamId
from perdure.store.base import Event, Followed
from perdure.store.codec import PLAIN, Codec, Payloads
from perdure.store.postgres import enclosures
from perdure.store.postgres.store import PostgresStore
from perdure.testing._values import NODE, OTHER, a_stream
from tests.support.postgres import store_url

pytestmark = pytest.mark.anyio

FENCE = Fence(2**62 + 1)

Told = asyncio.Queue[tuple[Sequence[StreamId], Sequence[Followed]]]


class Backwards:
    """A codec that every reader of a notification can see to be at work."""

    overhead = 1

    def encode(self, payload: bytes) -> bytes:
        return b"<" + payload[::-1]

    def decode(self, stored: bytes) -> bytes:
        return stored[:0:-1]


def grown(first: int, *payloads: bytes, stream: str = "s", final: bool = False) -> Followed:
    """A stream with these as its newest events."""
    events = [Event(number, 1.5, payload, final) for number, payload in enumerate(payloads, first)]
    return Followed(replace(a_stream(FENCE, stream), last=events[-1].seq, sealed=final), events)


@asynccontextmanager
async def hearing(codec: Codec = PLAIN) -> AsyncIterator[tuple[PostgresStore, Told]]:
    """A process that hints, and what another one hears."""
    url = store_url()
    async with PostgresStore(url, codec=codec) as here, PostgresStore(url, codec=codec) as there:
        await here.join(NODE)
        await there.join(OTHER)
        told: Told = asyncio.Queue()
        there.subscribe(OTHER, lambda streams, enclosed: told.put_nowait((streams, enclosed)))
        yield here, told


@pytest.mark.parametrize("codec", [PLAIN, Backwards()])
async def test_a_hint_brings_along_what_is_new(codec: Codec) -> None:
    news = grown(4, b'{"jsonrpc":"2.0"}', b"\xff\x00", final=True)
    async with hearing(codec) as (here, told):
        here.hint(OTHER, [StreamId("s")], [news])
        streams, [found] = await told.get()
        assert streams == ("s",)
        assert found.record == news.record
        assert found.events == news.events


async def test_hints_that_are_sent_together_bring_all_of_it_along() -> None:
    async with hearing() as (here, told):
        here.hint(OTHER, [StreamId("s"), StreamId("t")], [grown(1, b"a"), grown(1, b"x", stream="t")])
        here.hint(OTHER, [StreamId("s")], [grown(2, b"b")])
        streams, enclosed = await told.get()
        assert set(streams) == {"s", "t"}
        by_stream = {found.record.id: found for found in enclosed}
        assert [event.payload for event in by_stream[StreamId("s")].events or ()] == [b"a", b"b"]
        assert by_stream[StreamId("s")].record.last == 2
        assert [event.payload for event in by_stream[StreamId("t")].events or ()] == [b"x"]


async def test_what_is_too_large_is_left_to_be_read_and_so_is_what_came_before_it() -> None:
    """A hint says that the stream has grown, and its node must not take the small beginning for all of it."""
    large = bytes(enclosures.MAX_PAYLOAD + 1)
    async with hearing() as (here, told):
        here.hint(OTHER, [StreamId("s")], [grown(1, b"small")])
        here.hint(OTHER, [StreamId("s")], [grown(2, large)])
        assert await told.get() == (("s",), ())
        here.hint(OTHER, [StreamId("s")], [grown(3, large[1:])])
        _, [found] = await told.get()
        assert [event.seq for event in found.events or ()] == [3]


async def test_a_hint_at_the_same_stream_without_its_news_takes_them_back() -> None:
    async with hearing() as (here, told):
        here.hint(OTHER, [StreamId("s")], [grown(1, b"a")])
        here.hint(OTHER, [StreamId("s")])
        assert await told.get() == (("s",), ())


def test_events_of_two_claims_are_not_put_together() -> None:
    """The earlier ones may have been lost with their claim."""
    before, after = grown(1, b"a"), grown(2, b"b")
    assert [event.seq for event in after.behind(before).events or ()] == [1, 2]
    other = before._replace(record=replace(before.record, fence=Fence(FENCE - 1)))
    assert after.behind(other) == after


def test_of_many_streams_no_more_is_encoded_than_fits() -> None:
    payloads = Payloads(Backwards())
    many = [grown(1, bytes(1_000), stream=str(number)) for number in range(100)]
    seen: list[Followed] = []

    def each() -> Iterator[Followed]:
        for one in many:
            seen.append(one)
            yield one

    assert enclosures.write(each(), payloads) == ""
    assert len(seen) < 10
    assert enclosures.read(enclosures.write(many[:3], payloads), payloads) == many[:3]


def test_as_many_events_as_are_allowed_fit_into_a_notification_and_no_more_are_tried() -> None:
    most = grown(1, *[bytes(enclosures.MAX_PAYLOAD // enclosures.MAX_EVENTS)] * enclosures.MAX_EVENTS)
    assert enclosures.is_small(most)
    assert enclosures.read(enclosures.write([most], Payloads(PLAIN)), Payloads(PLAIN)) == [most]
    assert not enclosures.is_small(grown(1, *[b""] * (enclosures.MAX_EVENTS + 1)))
    assert not enclosures.is_small(Followed(most.record, []))
    assert not enclosures.is_small(Followed(most.record))


def test_streams_that_do_not_fit_together_are_left_to_be_read() -> None:
    each = bytes(enclosures.MAX_PAYLOAD)
    assert enclosures.write([grown(1, each)], Payloads(PLAIN))
    assert enclosures.write([grown(1, each), grown(1, each, stream="t")], Payloads(PLAIN)) == ""


@pytest.mark.parametrize("text", ["e1", "e1 {", "e1 [1]", "e1 [[[1],[]]]", 'e1 [[[99,"s"],[]]]', "e1 null"])
def test_what_this_release_cannot_read_is_left_to_be_read_from_the_store(text: str) -> None:
    assert enclosures.read(text, Payloads(PLAIN)) == []
