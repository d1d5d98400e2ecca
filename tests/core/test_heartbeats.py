"""The values of beats: they rise with the age of a call, and stay near what its tool said."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core.heartbeats import (
    SHARE,
    Hearing,
    beat,
    beat_value,
    encode_progress,
    last_progress,
    progress_params,
    raised,
    rising,
)

AGES = st.floats(0, 10 * 86_400)
SAID = st.floats(-1e12, 1e12)


def params_of(payload: bytes | None) -> Any:
    assert payload is not None
    return json.loads(payload)["params"]


@given(SAID, AGES)
def test_beats_rise_with_the_age_and_stay_within_a_millionth(said: float, age: float) -> None:
    first, second = beat_value(said, age), beat_value(said, age + 15)
    assert said <= first < second < said + SHARE * max(1.0, abs(said)) * 1.001


@given(SAID, st.floats(-1e12, 1e12), AGES)
def test_what_a_tool_says_behind_beats_is_above_them(said: float, reported: float, age: float) -> None:
    shown = beat_value(said, age)
    payload = raised({"progressToken": 1, "progress": reported}, said, age + 15)
    value = reported if payload is None else params_of(payload)["progress"]
    assert value > shown


GAPS = st.lists(st.tuples(st.floats(0, 40), st.one_of(st.none(), st.floats(-100, 100))), max_size=20)


@given(GAPS)
def test_whatever_a_tool_says_nothing_falls_below_a_beat_before_it(gaps: list[tuple[float, float | None]]) -> None:
    """`None`: another message, such as a log message. After 15 s without an event there is a beat. What the tool takes
    back itself goes out as it is."""
    hearing, now, highest_beat = Hearing(opened=0, silence=15, time=0), 0.0, -math.inf
    since = -math.inf
    for gap, value in gaps:
        if gap >= 16:
            value_of_beat = params_of(beat(1, hearing.said, now + 15))["progress"]
            assert value_of_beat > highest_beat
            highest_beat, since = value_of_beat, -math.inf
        now += gap
        payload = b"{}" if value is None else encode_progress({"progressToken": 1, "progress": value})
        if shown := progress_params(hearing.hear([(now, payload)])):
            assert shown["progress"] > highest_beat or shown["progress"] <= since
            since = max(since, shown["progress"])


def test_a_tool_that_falls_back_has_the_highest_value_and_its_last_words() -> None:
    last = {"progress": 5, "total": 40, "message": "reading again"}
    assert rising({"progress": 10, "message": "reading"}, last) == {**last, "progress": 10}
    assert rising(last, None) is last
    assert rising(None, last) is last


def test_a_beat_says_what_the_tool_said_last() -> None:
    said = {"progressToken": 7, "progress": 12, "total": 40, "message": "reading"}
    assert params_of(beat("t", said, 3_600)) == {
        "progressToken": "t",
        "progress": 12 + 6e-6,
        "total": 40,
        "message": "reading",
    }


def test_a_beat_of_a_tool_that_has_said_nothing_says_for_how_long() -> None:
    assert params_of(beat(1, None, 30.2)) == {
        "progressToken": 1,
        "progress": pytest.approx(8.32e-9, rel=0.01),
        "message": "Still running (30 s)",
    }


def test_a_total_is_never_below_the_value() -> None:
    params = params_of(beat(1, {"progress": 5, "total": 5}, 60))
    assert params["total"] == params["progress"] > 5


@pytest.mark.parametrize("said", [1e308 * 10, 1.7976931348623157e308, "many", None, True])
def test_there_is_no_beat_above_what_no_float_can_exceed(said: object) -> None:
    assert beat(1, {"progress": said}, 60) is None


@pytest.mark.parametrize(
    "payload",
    [
        b'{"method":"notifications/message","params":{"data":"notifications/progress"}}',
        b'{"method":"notifications/progress"}',
        b'{"method":"notifications/progress","params":{"progress":null}}',
        b'{"method":"notifications/progress","params":{"progress":' + b"9" * 5_000 + b"}}",
    ],
)
def test_what_cannot_be_compared_is_no_progress(payload: bytes) -> None:
    assert progress_params(payload) is None
    assert last_progress([payload]) is None
    assert last_progress([encode_progress({"progress": 1}), encode_progress({"progress": 2}), payload]) == {
        "progress": 2
    }
