"""Promise 16: what nodes forward to a stream that another one writes."""

from __future__ import annotations

from perdure._core.ids import NodeId, StreamId
from perdure.errors import MailFull, NodeGone, SessionEnded
from perdure.store.base import (
    FORWARDED_AT_ONCE,
    MAX_FORWARDED,
    MAX_FORWARDED_BYTES,
    DropStream,
    Forward,
    Release,
    Store,
    stream_by_id,
)
from perdure.testing._case import Case, accepted, refused, same
from perdure.testing._values import NODE, OTHER, STREAM, an_append, numbers, put, some_events


def a_forward(
    *payloads: bytes, first: int = 1, stream: str = STREAM, node: NodeId = OTHER, sender: str = "sender"
) -> Forward:
    return Forward(stream=StreamId(stream), node=node, sender=sender, first=first, payloads=payloads)


async def _waiting(store: Store, stream: str = STREAM) -> list[bytes]:
    """What waits for a stream, page by page."""
    found: list[bytes] = []
    after = 0
    while page := await store.forwarded(StreamId(stream), after=after):
        same("messages of a page at most", len(page) <= FORWARDED_AT_ONCE, True)
        found += [message.payload for message in page]
        after = page[-1].key
    return found


async def promise_16_messages_wait_in_the_order_of_their_commits_whoever_writes(case: Case) -> None:
    await case.open_stream()
    await case.open_stream("another")
    accepted(await put(case.store, a_forward(b"1", b"2"), a_forward(b"one", node=NODE, sender="ours")))
    accepted(await put(case.store, a_forward(b"3", first=3), a_forward(b"theirs", stream="another")))
    await case.reopen()
    record = await stream_by_id(case.store, STREAM)
    assert record is not None
    claimed = await case.store.claim(STREAM, node=OTHER, held=record.fence)
    same("what waits", await _waiting(case.store), [b"1", b"2", b"one", b"3"])
    same("what waits for the other stream", await _waiting(case.store, "another"), [b"theirs"])
    same("whether it was claimed", claimed is not None, True)
    same("what waits for no stream", await _waiting(case.store, "none"), [])


async def promise_16_a_message_is_appended_and_taken_away_in_one_step(case: Case) -> None:
    await case.open_stream()
    accepted(await put(case.store, a_forward(b"1", b"2", b"3")))
    keys = [message.key for message in await case.store.forwarded(STREAM)]
    same("keys in order", keys, sorted(set(keys)))
    stale = an_append(type(case.fence)(case.fence + 1_000), some_events(1, 3), taken=keys[2])
    refused(await put(case.store, stale), 0)
    same("what waits after a refusal", await _waiting(case.store), [b"1", b"2", b"3"])
    for _ in range(2):
        accepted(await put(case.store, an_append(case.fence, some_events(1, 2), taken=keys[1])))
        same("what waits", await _waiting(case.store), [b"3"])
        same("events", await numbers(case.store), [1, 2])
    accepted(await put(case.store, an_append(case.fence, some_events(3, 3), taken=keys[2]), a_forward(b"4", first=4)))
    accepted(await put(case.store, an_append(case.fence, some_events(3, 3), taken=keys[2])))
    same("what came after the last that was taken", await _waiting(case.store), [b"4"])


async def promise_16_a_number_is_taken_once_also_when_its_message_is_gone(case: Case) -> None:
    await case.open_stream()
    accepted(await put(case.store, a_forward(b"1", b"2")))
    await case.reopen()
    accepted(await put(case.store, a_forward(b"1", b"2"), a_forward(b"2", b"3", first=2)))
    same("what waits", await _waiting(case.store), [b"1", b"2", b"3"])
    last = (await case.store.forwarded(STREAM))[-1].key
    accepted(await put(case.store, an_append(case.fence, some_events(1, 3), taken=last)))
    accepted(await put(case.store, a_forward(b"1", b"2", b"3")))
    same("what waits once it was appended", await _waiting(case.store), [])
    accepted(await put(case.store, a_forward(b"again", sender="the next one")))
    same("what another sender of the node says", await _waiting(case.store), [b"again"])


async def promise_16_no_message_is_taken_before_the_one_in_front_of_it(case: Case) -> None:
    await case.open_stream()
    accepted(await put(case.store, a_forward(b"1")))
    refused(await put(case.store, a_forward(b"3", first=3)), 0, why=MailFull)
    refused(await put(case.store, a_forward(b"2", first=2, sender="another")), 0, why=MailFull)
    accepted(await put(case.store, a_forward(b"2", b"3", first=2)))
    same("what waits", await _waiting(case.store), [b"1", b"2", b"3"])


async def promise_16_what_waits_for_a_stream_has_a_limit_in_messages(case: Case) -> None:
    await case.open_stream()
    await case.open_stream("another")
    accepted(await put(case.store, a_forward(*[b"x"] * (MAX_FORWARDED - 1))))
    accepted(await put(case.store, a_forward(b"last", node=NODE, sender="ours")))
    refused(await put(case.store, a_forward(b"too much", first=MAX_FORWARDED)), 0, why=MailFull)
    same("messages that wait", len(await _waiting(case.store)), MAX_FORWARDED)
    accepted(await put(case.store, a_forward(b"theirs", stream="another")))
    first = (await case.store.forwarded(STREAM))[0].key
    accepted(await put(case.store, an_append(case.fence, some_events(1, 1), taken=first)))
    accepted(await put(case.store, a_forward(b"room again", first=MAX_FORWARDED)))


async def promise_16_what_waits_for_a_stream_has_a_limit_in_bytes(case: Case) -> None:
    """One sender alone may say more at once: it would wait for ever otherwise."""
    await case.open_stream()
    half = b"x" * (MAX_FORWARDED_BYTES // 2)
    accepted(await put(case.store, a_forward(half), a_forward(half, first=2)))
    refused(await put(case.store, a_forward(b"x", first=3)), 0, why=MailFull)
    await case.open_stream("another")
    accepted(await put(case.store, a_forward(half, half, b"x", stream="another")))
    refused(await put(case.store, a_forward(b"x", first=4, stream="another")), 0, why=MailFull)


async def promise_16_a_message_for_a_stream_that_no_node_writes_is_refused(case: Case) -> None:
    await case.open_stream()
    accepted(await put(case.store, a_forward(b"1")))
    same("streams of the writer", [s.id for s in await case.store.forwarded_to(NODE)], [STREAM])
    same("streams of another node", [s.id for s in await case.store.forwarded_to(OTHER)], [])
    accepted(await put(case.store, Release(stream=STREAM, fence=case.fence)))
    refused(await put(case.store, a_forward(b"2", first=2)), 0, why=NodeGone)
    accepted(await put(case.store, a_forward(b"1")))  # it is there already
    same("streams that no node writes", [s.id for s in await case.store.forwarded_to(OTHER)], [STREAM])
    await put(case.store, DropStream(stream=STREAM))
    refused(await put(case.store, a_forward(b"2", first=2)), 0, why=SessionEnded)
    same("what waits for a stream that is gone", await _waiting(case.store), [])
    same("streams for which messages wait", list(await case.store.forwarded_to(NODE)), [])


async def promise_16_a_writer_that_was_buried_is_no_writer(case: Case) -> None:
    await case.open_stream()
    await case.store.join(OTHER)
    record = await stream_by_id(case.store, STREAM)
    assert record is not None
    await case.store.claim(STREAM, node=OTHER, held=record.fence)
    accepted(await put(case.store, a_forward(b"1", node=NODE)))
    same("streams of the dead", [s.id for s in await case.store.forwarded_to(NODE)], [])
    await case.store.leave(OTHER)
    await case.store.bury(OTHER, heir=NODE)
    refused(await put(case.store, a_forward(b"2", first=2, node=NODE)), 0, why=NodeGone)
    same("streams without a writer", [s.id for s in await case.store.forwarded_to(NODE)], [STREAM])
