"""The tail of a stream: events in memory, and three marks. Nothing is shown before it may be, nothing is forgotten that
is needed."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.log.stream import TAIL_BYTES, Tail
from perdure.store.records import Event


def append(tail: Tail, payload: bytes, *, final: bool = False) -> Event:
    """As a stream does."""
    tail.last += 1
    tail.events.append(event := Event(tail.last, 1.0, payload, final))
    return event


def filled(*payloads: bytes, last: int = 0) -> Tail:
    tail = Tail(last)
    for payload in payloads:
        append(tail, payload)
    return tail


def shown(tail: Tail, through: int) -> Tail:
    tail.size += sum(len(event.payload) for event in tail.unwritten[: through - tail.visible])
    tail.visible = through
    return tail


def seqs(events: Sequence[Event] | None) -> list[int] | None:
    return None if events is None else [event.seq for event in events]


def test_it_numbers_events_behind_the_last_one() -> None:
    tail = filled(b"a", b"b", last=7)
    assert (tail.last, tail.visible, tail.durable, tail.start) == (9, 7, 7, 7)
    assert tail.unwritten == [Event(8, 1.0, b"a", False), Event(9, 1.0, b"b", False)]


def test_only_what_may_be_shown_is_read() -> None:
    """Promise 1: no byte leaves before the store has accepted it."""
    tail = filled(b"a", b"b", b"c")
    assert seqs(tail.read(0, 10)) == []
    shown(tail, 2)
    assert seqs(tail.read(0, 10)) == [1, 2]
    assert seqs(tail.read(1, 10)) == [2]
    assert seqs(tail.read(0, 1)) == [1]
    assert seqs(tail.read(2, 10)) == []


def test_what_it_no_longer_has_is_the_stores_to_tell() -> None:
    tail = shown(filled(b"a", b"b", b"c"), 3)
    tail.durable = 3
    tail.release(2)
    assert tail.start == 2
    assert tail.read(1, 10) is None
    assert seqs(tail.read(2, 10)) == [3]
    tail.release(3)
    assert tail.read(2, 10) is None
    assert seqs(tail.read(3, 10)) == []


def test_what_is_not_in_the_store_is_never_forgotten() -> None:
    tail = shown(filled(b"a", b"b"), 2)
    tail.durable = 1
    tail.release(2)
    assert seqs(tail.unwritten) == [2]
    assert seqs(tail.read(1, 10)) == [2]


def test_a_reader_that_lags_keeps_so_many_bytes_and_no_more() -> None:
    half = b"x" * (TAIL_BYTES // 2)
    tail = shown(filled(half, half), 2)
    tail.durable = 2
    tail.release(0)
    assert tail.start == 0  # exactly the limit
    append(tail, b"x")
    shown(tail, 3).durable = 3
    tail.release(0)
    assert tail.start == 1  # one byte more


def test_the_newest_are_kept_for_a_reader_that_was_woken_just_now() -> None:
    tail = shown(filled(b"a" * (2 * TAIL_BYTES), b"b"), 2)
    tail.durable = 2
    tail.release(0, 2)
    assert tail.start == 0
    tail.release(0, 1)
    assert tail.start == 1


def test_all_of_it_stays_while_it_is_pinned() -> None:
    tail = shown(filled(b"a"), 1)
    tail.durable = tail.pins = 1
    tail.release(1)
    assert tail.start == 0
    tail.pins = 0
    tail.release(1)
    assert tail.start == 1


def test_final_answers_are_found_in_memory() -> None:
    tail = filled(b"a")
    answer = append(tail, b"answer", final=True)
    assert tail.finals == [answer]


def test_a_reset_begins_at_what_the_store_has() -> None:
    tail = shown(filled(b"a", b"b"), 1)
    tail.reset(5)
    assert (tail.last, tail.visible, tail.durable, tail.unwritten) == (5, 5, 5, [])
