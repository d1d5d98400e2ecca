"""What a session over its limits forgets: idle streams before busy ones, events before answers, the oldest first."""

from hypothesis import given
from hypothesis import strategies as st

from perdure._core.ids import StreamId
from perdure._core.retention import (
    SLACK_SHARE,
    Cutoffs,
    Limits,
    StreamSizes,
    StreamUsage,
    answers_to_drop,
    cutoffs,
    events_to_trim,
)

LIMITS = Limits(streams=3, session_events=10, answers=4, size=1_000)


def kept(
    name: str, *, events: int = 0, answers: int = 1, idle: bool = True, event_bytes: int = 0, answer_bytes: int = 0
) -> StreamUsage:
    return StreamUsage(
        stream=StreamId(name),
        events=events,
        answers=answers,
        idle=idle,
        event_bytes=event_bytes,
        answer_bytes=answer_bytes,
    )


def test_within_its_limits_a_session_forgets_nothing() -> None:
    """R7"""
    streams = [kept("a", events=5), kept("b", events=5), kept("c"), kept("d")]
    assert events_to_trim(streams, LIMITS) == []
    assert answers_to_drop(streams, total=4, size=1_000, limits=LIMITS) == []


def test_over_its_events_it_forgets_those_of_the_oldest_stream() -> None:
    assert events_to_trim([kept("a", events=5), kept("b", events=6)], LIMITS) == ["a"]


def test_over_its_streams_it_forgets_the_events_of_the_oldest_that_has_any() -> None:
    """P9"""
    streams = [kept("a"), *(kept(name, events=1) for name in "bcd"), kept("e", events=1, answers=0, idle=False)]
    assert events_to_trim(streams, LIMITS) == ["b"]


def test_a_stream_in_use_gives_its_events_last() -> None:
    assert events_to_trim([kept("running", events=8, idle=False), kept("old", events=4)], LIMITS) == ["old"]
    assert events_to_trim([kept("running", events=11, idle=False)], LIMITS) == ["running"]


def test_over_its_answers_it_forgets_the_oldest_streams_altogether() -> None:
    assert answers_to_drop([kept(name) for name in "abcdef"], total=6, size=0, limits=LIMITS) == ["a", "b"]


def test_a_twentieth_more_may_collect_before_the_oldest_go_together() -> None:
    limits = Limits(streams=SLACK_SHARE, session_events=1_000, answers=SLACK_SHARE, size=1_000)
    streams = [kept(str(place), events=1) for place in range(SLACK_SHARE + 2)]
    assert events_to_trim(streams[1:], limits) == []
    assert events_to_trim(streams, limits) == ["0", "1"]
    assert answers_to_drop(streams, total=SLACK_SHARE + 1, size=0, limits=limits) == []
    assert answers_to_drop(streams, total=SLACK_SHARE + 2, size=0, limits=limits) == ["0", "1"]


def test_over_its_bytes_it_forgets_events_first_and_the_oldest_answers_last() -> None:
    streams = [kept(name, events=1, event_bytes=200, answer_bytes=300) for name in "abc"]
    assert events_to_trim(streams[:2], LIMITS, answer_bytes=600) == []
    assert events_to_trim(streams[:2], LIMITS, answer_bytes=601) == ["a"]
    assert events_to_trim(streams, LIMITS, answer_bytes=900) == ["a", "b", "c"]
    assert answers_to_drop(streams, total=3, size=1_000, limits=LIMITS) == []
    assert answers_to_drop(streams, total=3, size=1_001, limits=LIMITS) == ["a"]


def test_no_more_streams_are_looked_at_than_have_to_go() -> None:
    """Or each answer of a session that has reached its limit would cost as much as all those before it."""
    looked_at = iter([kept(name) for name in "abcdef"])
    assert answers_to_drop(looked_at, total=5, size=0, limits=LIMITS) == ["a"]
    assert [stream.stream for stream in looked_at] == ["b", "c", "d", "e", "f"]


def test_times_before_which_things_have_expired() -> None:
    before = Cutoffs(events=940.0, answers=100.0, calls=700.0)
    assert cutoffs(now=1_000.0, event_ttl=60.0, replay_window=900.0, task_ttl=300.0) == before


def test_a_task_is_kept_no_longer_than_answers_are() -> None:
    assert cutoffs(now=1_000.0, event_ttl=60.0, replay_window=300.0, task_ttl=900.0).calls == 700.0


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3), st.booleans()), max_size=12),
    st.builds(
        Limits,
        streams=st.integers(1, 6),
        session_events=st.integers(1, 20),
        answers=st.integers(1, 8),
        size=st.integers(1, 100),
    ),
)
def test_afterwards_it_is_within_its_limits(drawn: list[tuple[int, int, bool]], limits: Limits) -> None:
    streams = [
        kept(str(place), events=e, answers=a, idle=i, event_bytes=7 * e, answer_bytes=11 * a)
        for place, (e, a, i) in enumerate(drawn)
    ]
    size = sum(stream.answer_bytes for stream in streams)
    trimmed = events_to_trim(streams, limits, answer_bytes=size)
    with_events = [stream for stream in streams if stream.events and stream.stream not in trimmed]
    assert sum(stream.events for stream in with_events) <= limits.session_events
    assert len(with_events) <= limits.streams
    total = sum(stream.answers for stream in streams)
    dropped = answers_to_drop(streams, total=total, size=size, limits=limits)
    left = [stream for stream in streams if stream.stream not in dropped]
    assert sum(stream.answers for stream in left) <= limits.answers
    assert sum(stream.answer_bytes for stream in left) <= limits.size
    assert not with_events or size + sum(stream.event_bytes for stream in with_events) <= limits.size


def test_a_stream_over_its_limit_loses_its_oldest_events_and_no_answer() -> None:
    sizes = StreamSizes(0)
    sizes.count([10, 0, 10, 10], {2: 50})
    assert sizes.overflow(4, limit=3, read=None) == 0
    assert sizes.overflow(4, limit=2, read=None) == 1
    assert sizes.overflow(4, limit=1, read=None) == 3  # the answer between them stays, and is not counted


def test_a_stream_loses_nothing_that_its_reader_has_not_got() -> None:
    sizes = StreamSizes(0)
    sizes.count([10] * 5)
    assert sizes.overflow(5, limit=1, read=2) == 2
    assert sizes.overflow(5, limit=1, read=0) == 0
    sizes.trim(2)
    assert sizes.overflow(5, limit=1, read=1) == 2  # what is gone does not come back


def test_a_stream_counts_what_may_go_and_what_is_an_answer() -> None:
    sizes = StreamSizes(7)
    sizes.count([10, 20, 0], {10: 99})
    usage = sizes.usage(StreamId("a"), last=10, read=10, idle=True)
    assert usage == kept("a", events=9, answers=1, event_bytes=30, answer_bytes=99)
    assert sizes.usage(StreamId("a"), last=10, read=8, idle=True).event_bytes == 10
    sizes.trim(8)
    assert sizes.usage(StreamId("a"), last=10, read=10, idle=True).event_bytes == 20


def test_a_stream_that_is_claimed_again_keeps_its_answers_and_counts_events_from_there() -> None:
    sizes = StreamSizes(0)
    sizes.count([10, 0, 10, 0], {2: 50, 4: 60})
    again = sizes.restarted(3)
    assert again.usage(StreamId("a"), last=3, read=3, idle=False) == kept(
        "a", events=2, answers=1, idle=False, answer_bytes=50
    )
