"""What a session over its limits forgets: idle streams before busy ones, events before answers, the oldest first."""

from hypothesis import given
from hypothesis import strategies as st

from perdure._core.ids import StreamId
from perdure._core.retention import Cutoffs, Forget, Kept, Limits, cutoffs, over_limits

LIMITS = Limits(streams=3, session_events=10, answers=4)


def kept(name: str, *, events: int = 0, answers: int = 1, idle: bool = True) -> Kept:
    return Kept(stream=StreamId(name), events=events, answers=answers, idle=idle)


def test_within_its_limits_a_session_forgets_nothing() -> None:
    """R7"""
    streams = [kept("a", events=5), kept("b", events=5), kept("c"), kept("d")]
    assert over_limits(streams, LIMITS) == Forget(events_of=(), streams=())


def test_over_its_events_it_forgets_those_of_the_oldest_stream() -> None:
    streams = [kept("a", events=5), kept("b", events=6)]
    assert over_limits(streams, LIMITS) == Forget(events_of=(StreamId("a"),), streams=())


def test_over_its_streams_it_forgets_the_events_of_the_oldest_that_has_any() -> None:
    """P9"""
    streams = [kept("a"), *(kept(name, events=1) for name in "bcd"), kept("e", events=1, answers=0, idle=False)]
    assert over_limits(streams, LIMITS) == Forget(events_of=(StreamId("b"),), streams=())


def test_over_its_answers_it_forgets_the_oldest_stream_altogether() -> None:
    streams = [kept(name) for name in "abcdef"]
    assert over_limits(streams, LIMITS) == Forget(events_of=(), streams=(StreamId("a"), StreamId("b")))


def test_a_stream_in_use_gives_its_events_last_and_never_goes() -> None:
    streams = [kept("running", events=8, answers=0, idle=False), kept("old", events=4)]
    assert over_limits(streams, LIMITS) == Forget(events_of=(StreamId("old"),), streams=())
    alone = [kept("running", events=11, answers=5, idle=False)]
    assert over_limits(alone, LIMITS) == Forget(events_of=(StreamId("running"),), streams=())


def test_times_before_which_things_have_expired() -> None:
    assert cutoffs(now=1_000.0, event_ttl=60.0, replay_window=900.0) == Cutoffs(events=940.0, answers=100.0)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3), st.booleans()), max_size=12),
    st.builds(Limits, streams=st.integers(1, 6), session_events=st.integers(1, 20), answers=st.integers(1, 8)),
)
def test_afterwards_it_is_within_its_limits_or_only_busy_streams_are_left(
    drawn: list[tuple[int, int, bool]], limits: Limits
) -> None:
    streams = [kept(str(place), events=e, answers=a, idle=i) for place, (e, a, i) in enumerate(drawn)]
    forget = over_limits(streams, limits)
    left = [stream for stream in streams if stream.stream not in forget.streams]
    with_events = [stream for stream in left if stream.events and stream.stream not in forget.events_of]
    assert sum(stream.events for stream in with_events) <= limits.session_events
    assert len(with_events) <= limits.streams
    idle_left = [stream for stream in left if stream.idle and stream.answers]
    assert sum(stream.answers for stream in left) <= limits.answers or not idle_left
