"""What a client does with a task that it has seen, and when it asks again."""

from __future__ import annotations

import pytest

from perdure._core.polling import LEAST_POLL, NEXT, USUAL_POLL, Next, Status, next_of, pause, progress_in
from perdure._core.reconnect import MOST_ASKED


def test_every_status_has_a_next_step_and_another_word_has_none() -> None:
    assert NEXT.keys() == set(Status)
    assert next_of("input_required") is Next.ANSWER
    assert [next_of(word) for word in ("done", None, 7)] == [None] * 3


@pytest.mark.parametrize(
    ("interval", "took", "seconds"),
    [
        (500, 0.0, 0.5),
        (500, 0.2, 0.3),
        (500, 2.0, 0.0),
        (None, 0.0, USUAL_POLL),
        ("500", 0.0, USUAL_POLL),
        (True, 0.0, USUAL_POLL),
        (0, 0.0, LEAST_POLL),
        (-1, 0.0, LEAST_POLL),
        (LEAST_POLL * 1000, 0.0, LEAST_POLL),
        (MOST_ASKED * 1000, 0.0, MOST_ASKED),
        (10**12, 0.0, MOST_ASKED),
        (float("nan"), 0.0, USUAL_POLL),
    ],
)
def test_the_pause_is_the_servers_within_limits_and_counts_from_the_last_request(
    interval: object, took: float, seconds: float
) -> None:
    """A server that held the last request is asked again at once."""
    assert pause(interval, took=took) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("said", "progress"),
    [
        ("3", {"progress": 3.0}),
        ("12345678 of 50000000", {"progress": 12345678.0, "total": 50000000.0}),
        ("0.5 of 1: rising: fast\n3 of 4", {"progress": 0.5, "total": 1.0, "message": "rising: fast\n3 of 4"}),
        ("1e+20", {"progress": 1e20}),
        *((said, None) for said in ("rising", "", "nan", "inf of 3", "1e999", "3 of", "1" * 400, None, 3)),
    ],
)
def test_progress_is_read_back_from_the_words_of_a_server(said: object, progress: object) -> None:
    assert progress_in(said) == progress
