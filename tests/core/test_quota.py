"""What callers share: how much they may hold, in all and each."""

from __future__ import annotations

import pytest

from perdure._core.limits import Caller, Full, Quota, share_of

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
