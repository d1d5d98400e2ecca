"""Which keys count when."""

from __future__ import annotations

from perdure.runtime.request_state import LIFE, ring


def test_the_next_key_is_known_for_a_whole_life_before_it_seals() -> None:
    now = 1_000 * LIFE
    assert ring("state", now=now - 1).next == ring("state", now=now).present == ring("state", now=now + LIFE).previous


def test_a_key_seals_from_its_first_moment_to_its_last() -> None:
    assert len({ring("state", now=1_000 * LIFE + second).present for second in (0.0, 1.0, LIFE - 1)}) == 1
    assert ring("state", now=1_001 * LIFE).present != ring("state", now=1_001 * LIFE - 1).present


def test_rings_of_different_names_share_no_key() -> None:
    assert not set(ring("a", now=0.0)) & set(ring("b", now=0.0))
