"""Every payload passes through the store's codec: none is in the file in the clear, and all of them come back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from perdure._core.ids import Fence, NodeId, StreamId
from perdure._core.states import SessionStep
from perdure.store.codec import PLAIN, Codec
from perdure.store.interface import Store, open_call
from perdure.store.memory import MemoryStore
from perdure.store.records import Event
from perdure.store.sqlite import SqliteStore
from perdure.store.steps import (
    Append,
    ChangeSession,
    EndSession,
    Forward,
    OpenAsk,
    OpenStream,
    PutSession,
    SendMail,
    Step,
)
from perdure.testing import check_store
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    STREAM,
    a_call,
    a_session,
    a_sticky,
    a_stream,
    an_ask,
    messages,
    picture,
    put,
)
from tests.store.test_contract import locked

pytestmark = pytest.mark.anyio


class Flipping:
    """Turns each bit over, behind a number that never comes again, as a cipher would: no payload is stored twice in the
    same form."""

    overhead = 8

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._table = bytes(255 - byte for byte in range(256))

    def encode(self, payload: bytes) -> bytes:
        assert payload, "an empty payload stays empty"
        return next(self._numbers).to_bytes(self.overhead) + payload.translate(self._table)

    def decode(self, stored: bytes) -> bytes:
        return stored[self.overhead :].translate(self._table)


async def test_the_store_in_memory_keeps_the_promises_with_a_codec() -> None:
    await check_store(lambda name: MemoryStore(codec=Flipping()), durable=False)


@pytest.mark.long
async def test_the_sqlite_store_keeps_the_promises_with_a_codec(tmp_path: Path) -> None:
    """Limits count the sizes of the payloads themselves (14, 16), and pages do (4)."""

    def make(name: str) -> Store:
        return SqliteStore(str(tmp_path / name), codec=Flipping())

    await check_store(make, hang=lambda name: locked(tmp_path / name))


MARKED = (
    "event",
    "answer",
    "request",
    "params",
    "result",
    "changed-result",
    "sticky",
    "sticky-later",
    "ask",
    "forwarded",
    "mail",
    "inherited",
)
"""The payloads that the steps below carry, each with a mark of its own."""


def mark(name: str) -> bytes:
    return b"mark<%b>" % name.encode()


async def write_all(store: Store) -> None:
    """Commit every step that carries a payload; a dead node's mail goes to its heir."""
    fence = await store.join(NODE)
    await store.join(OTHER)
    session = replace(
        a_session(),
        client_params=mark("params"),
        result=mark("result"),
        sticky=(a_sticky("resources/subscribe", uri="mark<sticky>"),),
    )
    events = (Event(1, 1.0, mark("event")), Event(2, 1.0, b""), Event(3, 1.0, mark("answer"), True))
    steps: list[Step] = [
        PutSession(record=session),
        PutSession(record=replace(session, id=a_session("ended").id)),
        EndSession(session=a_session("ended").id, time=2.0, reason=SessionStep.WINDOW_PASSED.value),
        PutSession(record=replace(session, id=a_session("changed").id)),
        ChangeSession(session=a_session("changed").id, result=mark("changed-result")),
        ChangeSession(session=SESSION, stick=a_sticky("resources/subscribe", uri="mark<sticky-later>")),
        OpenStream(record=a_stream(fence), calls=(replace(a_call(), request=mark("request")),)),
        Append(stream=STREAM, fence=fence, events=events),
        OpenAsk(record=replace(an_ask(), request=mark("ask"))),
        Forward(stream=STREAM, node=OTHER, sender="s", first=1, payloads=(mark("forwarded"),)),
        SendMail(node=NODE, message=mark("mail")),
        SendMail(node=OTHER, message=mark("inherited")),
    ]
    for step in steps:
        assert list(await put(store, step)) == [None]
    await store.bury(OTHER, heir=NODE)
    assert await store.reattach(a_session("changed").id) is not None


async def seen(store: Store) -> dict[str, object]:
    """All that was written, as the store shows it; fences are each store's own."""
    shown = await picture(store, sessions=(SESSION, "ended", "changed"))
    for name in [name for name in shown if name.endswith((": streams", ": unread"))]:
        shown[name] = [replace(stream, fence=Fence(0)) for stream in shown[name]]
    shown["forwarded"] = [message.payload for message in await store.forwarded(StreamId(STREAM))]
    shown["mail"] = await messages(store, NodeId(NODE))
    shown["open call"] = await open_call(store, SESSION, incarnation=1, request_id=1)
    return shown


def found_in(folder: Path) -> set[str]:
    """The marks that stand in the clear in the file, or in the log beside it."""
    raw = b"".join(file.read_bytes() for file in folder.iterdir() if file.is_file())
    return {name for name in MARKED if mark(name) in raw}


@pytest.mark.parametrize(("codec", "in_the_clear"), [(PLAIN, set(MARKED)), (Flipping(), set())])
async def test_no_payload_is_in_the_file_in_the_clear(tmp_path: Path, codec: Codec, in_the_clear: set[str]) -> None:
    """Without a codec each of them is: so the marks would be found."""
    model = MemoryStore()
    await write_all(model)
    async with SqliteStore(str(tmp_path / "log.db"), codec=codec) as store:
        await write_all(store)
        assert found_in(tmp_path) == in_the_clear, "in the log"
        assert await seen(store) == await seen(model)
    assert found_in(tmp_path) == in_the_clear, "in the file, once the log was moved into it"
    async with SqliteStore(str(tmp_path / "log.db"), codec=codec) as store:
        assert await seen(store) == await seen(model)


async def test_a_store_without_a_codec_hands_payloads_through_as_they_are() -> None:
    """The hot path: nothing is copied."""
    store, payload = MemoryStore(), b"a payload that is longer than what the interpreter shares"
    fence = await store.join(NODE)
    append = Append(stream=STREAM, fence=fence, events=(Event(1, 0.0, payload),))
    await put(store, PutSession(record=a_session()), OpenStream(record=a_stream(fence)), append)
    (event,) = await store.read(STREAM, after=0, limit=1)
    assert event is append.events[0]
