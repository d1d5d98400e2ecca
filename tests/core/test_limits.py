"""Limits on what callers hold, and on how often each may ask."""

from __future__ import annotations

import pytest

from perdure._core.limits import MOST_CALLERS, Caller, Full, Quota, RateLimit, share_of

ANN, BOB, THERE = Caller("ann"), Caller("bob"), Caller("", "192.0.2.1")


def test_a_caller_holds_its_own_part_and_all_hold_the_whole() -> None:
    quota = Quota(3, each=2)
    for _ in range(2):
        assert quota.lacks(ANN) is None
        quota.take(ANN)
    assert (quota.lacks(ANN), quota.lacks(BOB)) == (Full.FOR_CALLER, None)
    quota.take(BOB)
    assert quota.lacks(THERE) is Full.FOR_ALL
    quota.take(ANN, -1)
    assert (quota.lacks(ANN), quota.lacks(THERE)) == (None, None)


def test_what_is_given_back_is_forgotten() -> None:
    quota = Quota(3, each=2)
    with quota.holding(ANN), quota.holding(THERE, 2):
        assert (quota.held, quota.held_by(ANN), quota.held_by(THERE)) == (3, 1, 2)
    assert (quota.held, quota._held_by) == (0, {})


def test_the_first_piece_is_given_whatever_its_size() -> None:
    quota = Quota(100, each=50)
    assert quota.lacks(ANN, 1_000) is None
    quota.take(ANN, 40)
    assert (quota.lacks(ANN, 10), quota.lacks(ANN, 11)) == (None, Full.FOR_CALLER)
    assert (quota.lacks(BOB, 60), quota.lacks(BOB, 61)) == (None, Full.FOR_ALL)


@pytest.mark.parametrize(("limit", "percent", "share"), [(1_000, 25, 250), (1, 25, 1), (7, 50, 3), (7, 100, 7)])
def test_a_share_is_a_part_of_the_limit_and_never_nothing(limit: int, percent: int, share: int) -> None:
    assert share_of(limit, percent) == share


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
