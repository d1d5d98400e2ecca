"""When the reads of a stream are put together: the server sends without a pause, and little at a time."""

from perdure._core.rush import ENOUGH, RUSH, SOON, Rush

AT_ONCE = SOON / 2


def after(rush: Rush, reads: int, *, waited: float = AT_ONCE, events: int = 1) -> bool:
    return [rush.gathers(waited=waited, events=events) for _ in range(reads)][-1]


def test_a_stream_without_a_pause_is_gathered_after_a_few_reads_and_not_before() -> None:
    rush = Rush()
    assert not after(rush, RUSH - 1)
    assert after(rush, 1)


def test_a_stream_that_pauses_after_each_event_is_read_at_once() -> None:
    assert not after(Rush(), 10 * RUSH, waited=SOON)


def test_reads_that_bring_enough_are_not_gathered() -> None:
    assert not after(Rush(), 10 * RUSH, events=ENOUGH)
    assert after(Rush(), RUSH, events=ENOUGH - 1)


def test_a_server_that_was_held_up_once_is_still_in_a_rush_and_one_that_pauses_twice_is_not() -> None:
    rush = Rush()
    after(rush, 10 * RUSH)
    assert after(rush, 1, waited=1.0)
    after(rush, 10 * RUSH)
    assert not after(rush, 2, waited=1.0)
