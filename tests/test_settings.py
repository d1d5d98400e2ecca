"""Every setting stands on both sides of its bounds (S4, promise 6)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure._core.text import (
    format_duration,
    format_size,
    parse_count,
    parse_duration,
    parse_size,
    spoken_duration,
)
from perdure.errors import BadSetting, Misuse
from perdure.settings import Settings, rule_of

FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
NUMBERS = [name for name, field in FIELDS.items() if rule_of(field).kind in {"duration", "count", "bytes"}]


def test_the_defaults_are_the_promised_ones() -> None:
    settings = Settings()
    promised = {  # S4, P9 and the design's retention
        "event_ttl": 3_600,
        "replay_window": 24 * 3_600,
        "max_stream_events": 500,
        "max_streams": 100,
        "max_session_events": 10_000,
        "max_answers": 10_000,
        "cleanup_interval": 300,
        "session_grace": 1_800,
        "runtime_idle": 300,
        "keepalive_interval": 30,
        "stream_timeout": 300,
        "retry": 5,
        "enable_replay": True,
        "store_timeout": 1,
        "max_body": 4 * 1024 * 1024,
        "max_sessions": 10_000,
    }
    assert {name: getattr(settings, name) for name in promised} == promised


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_accepted_at_its_bounds_and_refused_beyond_them(name: str) -> None:
    rule = rule_of(FIELDS[name])
    number: Any = float if rule.kind == "duration" else int
    step = 0.0001 if rule.kind == "duration" else 1
    for allowed in (rule.low, rule.high):
        assert getattr(Settings(**{name: number(allowed)}), name) == allowed
    for refused in (rule.low - step, rule.high + step, -1):
        with pytest.raises(BadSetting) as told:
            Settings(**{name: number(refused)})
        assert str(told.value) == f"{name} is {number(refused)!r}; allowed: {rule.allowed}"


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "5", None, float("nan"), float("inf"), [5]])
def test_a_number_is_a_number(name: str, value: object) -> None:
    with pytest.raises(BadSetting, match=name):
        Settings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("eras", "session", "stateless"),
        ("request_state", "own", "mine"),
        ("recover", "reissue", "lenient"),
        ("on_store_failure", "refuse", "panic"),
        ("json_response", True, 1),
        ("enable_replay", False, "no"),
        ("allowed_hosts", ("a.example", "b.example:8000"), "a.example"),
        ("allowed_origins", ("https://a.example",), ("",)),
        ("cors_origins", ("*",), (1,)),
        ("tasks", ("bake=required", "*=never"), ("bake=always",)),
        ("broker", False, 0),
        ("metrics", False, 0),
        ("tasks", ("bake=required", "*=never"), ("bake=sometimes",)),
        ("answer_within", ("claude-ai=45s", "*=1h"), ("claude-ai=soon",)),
    ],
)
def test_other_kinds_are_checked_too(name: str, good: Any, bad: Any) -> None:
    assert getattr(Settings(**{name: good}), name) == good
    with pytest.raises(BadSetting, match=name):
        Settings(**{name: bad})


def test_each_setting_has_been_proven_above() -> None:
    others = {name for name in FIELDS if name not in NUMBERS}
    assert others == {
        "eras",
        "request_state",
        "answer_within",
        "on_store_failure",
        "recover",
        "json_response",
        "enable_replay",
        "allowed_hosts",
        "allowed_origins",
        "cors_origins",
        "tasks",
        "broker",
        "metrics",
    }


def test_the_range_is_told_in_both_spellings() -> None:
    assert rule_of(FIELDS["retry"]).allowed == "0.001 to 3,600 seconds (1ms to 1h)"
    assert rule_of(FIELDS["max_body"]).allowed == "1,024 to 1,073,741,824 bytes (1 KiB to 1 GiB)"
    assert rule_of(FIELDS["max_calls"]).allowed == "a whole number from 1 to 10,000,000"


def test_a_bad_setting_is_misuse_and_a_value_error() -> None:
    assert issubclass(BadSetting, Misuse)
    assert issubclass(BadSetting, ValueError)


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().retry = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.25", 0.25),
        ("500ms", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("1h", 3_600),
        ("7d", 604_800),
        ("1.5 h", 5_400),
    ],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1", "1 hour", "1H", "1h30m", "1e3", "nan", "inf", "٣", "1" * 19, "1_000"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration such as"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"), [("65536", 65_536), ("64KiB", 65_536), ("4 MiB", 4_194_304), ("1GiB", 1 << 30)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5MiB", "4MB", "4mib", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "ten", "-1", "1.0", "1" * 5_000])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        parse_count(text)


@given(st.floats(min_value=0.001, max_value=4e7))
def test_a_duration_that_is_said_can_be_read_back(seconds: float) -> None:
    assert parse_duration(format_duration(round(seconds, 6))) == round(seconds, 6)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_size_that_is_said_can_be_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(86_400.0, "1d"), (3_600.0, "1h"), (90.0, "90s"), (0.5, "500ms"), (5, "5s"), (0.0005, "0.0005s")],
)
def test_a_duration_is_said_in_the_largest_unit_that_fits(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1.5, "1.5 s"), (45.0, "45 s"), (90.0, "90 s"), (300.0, "5 min"), (86_400.0, "24 h"), (604_800.0, "7 days")],
)
def test_a_sentence_says_a_duration_as_people_do(seconds: float, said: str) -> None:
    assert spoken_duration(seconds) == said
