"""Coming back to a stream: the delays (B7, H8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core.reconnect import Course, Patience, delay

PATIENCE = Patience(max_time=60, max_tries=10, first_delay=1, max_delay=8)


def failing(times: int, *, retry: float | None = None, since: float = 0.0) -> Course:
    """Attempts in a row that brought nothing, the first of them at `since`."""
    course = Course(retry=retry)
    for number in range(times):
        course = course.failed(since + number)
    return course


@pytest.mark.parametrize(
    ("course", "chance", "seconds"),
    [
        (Course().opened().heard(), 0.0, 0.5),
        (Course().opened().heard(), 1.0, 1.0),
        (Course().told(3).opened().heard(), 0.0, 3.0),
        (Course().told(3).opened().heard(), 1.0, 3.3),
        (Course().told(0).opened(), 1.0, 0.0),
        (failing(1), 1.0, 1.0),
        (failing(3), 1.0, 4.0),
        (failing(9), 1.0, 8.0),
        (failing(9), 0.0, 4.0),
        (failing(2, retry=5), 0.0, 5.0),
        (failing(4, retry=1), 1.0, 8.0),
        (Course().failed(0, at_least=20), 0.0, 20.0),
    ],
)
def test_delays(course: Course, chance: float, seconds: float) -> None:
    assert delay(course, PATIENCE, now=course.since or 0.0, chance=chance) == pytest.approx(seconds)


def test_tries_are_counted_in_a_row() -> None:
    assert delay(failing(10), PATIENCE, now=9, chance=0) is None
    assert delay(failing(9), PATIENCE, now=9, chance=0) is not None
    back = failing(9).opened()
    assert (back.failures, back.since) == (0, None)


def test_time_is_counted_from_the_first_failure_and_the_last_attempt_is_made_when_it_is_up() -> None:
    course = failing(5, since=100)
    assert delay(course, PATIENCE, now=159, chance=1) == pytest.approx(1)
    assert delay(course, PATIENCE, now=160, chance=1) is None


def test_a_server_that_is_polled_is_never_given_up() -> None:
    """SEP-1699: it opens, says nothing and closes, as often as it likes."""
    course = Course().told(0.5)
    for _ in range(1_000):
        course = course.opened()
        assert delay(course, PATIENCE, now=1e9, chance=0) == 0.5


def test_a_server_that_closes_at_once_and_asks_for_nothing_is_asked_less_and_less() -> None:
    course, delays = Course(), []
    for _ in range(6):
        course = course.opened()
        delays.append(delay(course, PATIENCE, now=0, chance=1))
    assert delays == [1, 2, 4, 8, 8, 8]
    assert delay(course.opened().heard(), PATIENCE, now=0, chance=1) == 1


@pytest.mark.parametrize("wrong", [{"max_time": -1}, {"max_tries": -1}, {"first_delay": -1}, {"first_delay": 99}])
def test_limits_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="limits must not be negative"):
        replace(PATIENCE, **wrong)  # type: ignore[arg-type]


@given(
    failures=st.integers(0, 50),
    barren=st.integers(0, 1_000_000),
    retry=st.none() | st.floats(0, 1e6),
    chance=st.floats(0, 1, exclude_max=True),
    now=st.floats(0, 1e6),
)
def test_a_delay_never_undercuts_what_the_server_asked_for_and_attempts_end(
    failures: int, barren: int, retry: float | None, chance: float, now: float
) -> None:
    since = 0.0 if failures else None
    course = Course(failures=failures, barren=barren, since=since, retry=retry)
    seconds = delay(course, PATIENCE, now=now, chance=chance)
    if failures >= PATIENCE.max_tries or (failures and now >= PATIENCE.max_time):
        assert seconds is None
    else:
        assert seconds is not None
        assert (retry or 0.0) <= seconds <= max(PATIENCE.max_delay, (retry or 0.0) * 1.1)
