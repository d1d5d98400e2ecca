"""A reader's life: it begins, rests, writes what comes, is ended or finishes; and writes nothing after that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from perdure._core.limits import Caller
from perdure._core.states import ReaderState
from perdure.log.reader import Reader
from perdure.log.stream import Stream
from perdure.store import MemoryStore
from perdure.store.records import Event
from perdure.store.steps import Reached, Refusals, Step
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.dead_node import life_of

pytestmark = pytest.mark.anyio


class Wire:
    """A connection that remembers what was written, and may be held up."""

    def __init__(self) -> None:
        self.written = b""
        self.ended = self.finished = self.aborted = False
        self.open = asyncio.Event()
        self.open.set()

    async def write(self, body: bytes, *, last: bool) -> None:
        await self.open.wait()
        assert not self.ended
        self.written += body
        self.ended = last

    def abort(self) -> None:
        self.aborted = True

    def finish(self) -> None:
        self.finished = True


class Remembering(MemoryStore):
    """A store that remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def commit_now(self, steps: Sequence[Step]) -> Refusals:
        self.steps += steps
        return super().commit_now(steps)


class NoHistory:
    tells_by_log = False

    async def lost_answers(self, stream: Stream) -> Sequence[bytes]:
        return ()

    async def progress_token(self, stream: Stream) -> int | str | None:
        return None

    async def closed_asks(self, events: Sequence[Event]) -> set[int]:
        return set()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serve(ToolServer().server) as site:
        await site.join()
        yield site


def standalone(site: Site) -> Stream:
    [session] = life_of(site).sessions
    return session.standalone


def reader_on(site: Site, stream: Stream) -> Reader:
    hub = life_of(site).context.hub
    reader = Reader(
        hub, stream, NoHistory(), cursor=0, arrival=hub.arrive(), caller=Caller("ann"), preamble=b": hello\n\n"
    )
    hub.attach(reader)
    return reader


async def test_a_reader_rests_without_a_task_and_pumps_when_something_comes(site: Site) -> None:
    stream, wire = standalone(site), Wire()
    reader = reader_on(site, stream)
    assert state_of(reader) is ReaderState.STARTING
    await reader.begin(wire)
    assert (reader.state, wire.written) == (ReaderState.RESTING, b": hello\n\n")
    stream.append(b"{}")
    await until(lambda: reader.cursor == 1 and reader.state is ReaderState.RESTING)
    assert name(stream, 1) in wire.written
    reader.leave()
    assert state_of(reader) is ReaderState.FINISHED
    assert stream.readers.reader is None


async def test_what_comes_before_the_response_has_begun_is_written_when_it_begins(site: Site) -> None:
    stream, wire = standalone(site), Wire()
    reader = reader_on(site, stream)
    stream.append(b"{}")
    await until(lambda: stream.tail.visible == 1)
    assert state_of(reader) is ReaderState.STARTING
    await reader.begin(wire)
    await until(lambda: reader.cursor == 1)
    reader.leave()


async def test_a_comment_that_keeps_a_connection_alive_is_not_written_down() -> None:
    """Thousands of clients may only listen: their readers get nowhere, and the store need not hear of it."""
    store = Remembering()
    async with serve(ToolServer().server, store=store) as site:
        await site.join()
        stream, wire = standalone(site), Wire()
        reader = reader_on(site, stream)
        await reader.begin(wire)
        reader.keep_alive()
        await until(lambda: b"keep-alive" in wire.written and reader.state is ReaderState.RESTING)
        reader.leave()
        stream.append(b"{}")
        await until(lambda: stream.tail.durable == 1)
    assert Reached not in {type(step) for step in store.steps}


async def test_one_that_is_ended_before_it_begins_closes_its_connection_and_writes_nothing(site: Site) -> None:
    stream, wire = standalone(site), Wire()
    first = reader_on(site, stream)
    second = reader_on(site, stream)  # the newest wins
    assert (first.state, second.state) == (ReaderState.CLOSING, ReaderState.STARTING)
    await first.begin(wire)
    assert (first.state, wire.written, wire.ended, wire.finished) == (ReaderState.FINISHED, b"", True, True)
    first.leave()
    assert stream.readers.reader is second
    second.leave()


async def test_one_that_is_ended_while_it_writes_writes_nothing_more(site: Site) -> None:
    stream, wire = standalone(site), Wire()
    reader = reader_on(site, stream)
    await reader.begin(wire)
    wire.open.clear()
    stream.append(b"{}")
    await until(lambda: reader.is_writing)
    assert state_of(reader) is ReaderState.PUMPING
    reader.end()
    assert state_of(reader) is ReaderState.CLOSING
    wire.open.set()
    await until(lambda: wire.finished)
    assert (reader.state, wire.written, wire.ended) == (ReaderState.FINISHED, b": hello\n\n", True)
    reader.wake()
    reader.end()
    assert state_of(reader) is ReaderState.FINISHED
    reader.leave()


async def test_one_that_takes_nothing_is_broken_off(site: Site) -> None:
    stream, wire = standalone(site), Wire()
    reader = reader_on(site, stream)
    await reader.begin(wire)
    wire.open.clear()
    stream.append(b"{}")
    await until(lambda: reader.is_writing)
    reader.end_if_stuck(life_of(site).context.hub.monotonic())
    assert (reader.state, wire.aborted, wire.finished) == (ReaderState.FINISHED, True, True)
    reader.leave()


async def test_one_that_stops_here_writes_what_is_there_and_closes(site: Site) -> None:
    """P7"""
    stream, wire = standalone(site), Wire()
    reader = reader_on(site, stream)
    await reader.begin(wire)
    stream.append(b"{}")
    reader.stop_here()
    await until(lambda: wire.finished)
    assert (reader.cursor, reader.state, wire.ended) == (1, ReaderState.FINISHED, True)
    assert name(stream, 1) in wire.written
    reader.leave()


def state_of(reader: Reader) -> ReaderState:
    return reader.state


def name(stream: Stream, seq: int) -> bytes:
    return str(stream.position(seq)).encode()
