"""How often a caller may do something."""

from __future__ import annotations

from perdure._core.limits import MOST_CALLERS, RateLimit


def test_a_full_bucket_is_taken_at_once_and_no_more() -> None:
    limit = RateLimit[str](3, per_second=0.5)
    assert [limit.take("ann", now=10.0) for _ in range(5)] == [True, True, True, False, False]


def test_a_bucket_fills_at_its_pace_and_a_refusal_takes_nothing() -> None:
    limit = RateLimit[str](1, per_second=0.5)
    assert limit.take("ann", now=0.0)
    assert [limit.take("ann", now=now) for now in (1.0, 1.9, 2.0, 3.9, 4.0)] == [False, False, True, False, True]


def test_a_bucket_never_holds_more_than_its_size() -> None:
    limit = RateLimit[str](2, per_second=1.0)
    limit.take("ann", now=0.0)
    assert [limit.take("ann", now=1_000.0) for _ in range(3)] == [True, True, False]


def test_each_caller_has_a_bucket_of_its_own() -> None:
    limit = RateLimit[tuple[str, str]](1, per_second=1.0)
    assert limit.take(("principal", "ann"), now=0.0)
    assert limit.take(("address", "ann"), now=0.0)
    assert not limit.take(("principal", "ann"), now=0.0)


def test_only_the_caller_not_seen_for_longest_is_forgotten() -> None:
    """Both sides of the bound."""
    limit = RateLimit[int](1, per_second=0.0)
    for caller in range(MOST_CALLERS):
        assert limit.take(caller, now=0.0)
    assert not limit.take(0, now=0.0)  # still known, and now the one seen last
    assert limit.take(MOST_CALLERS, now=0.0)
    assert not limit.take(0, now=0.0)
    assert not limit.take(2, now=0.0)
    assert limit.take(1, now=0.0)
