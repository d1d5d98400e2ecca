"""Messages of peers are shown as JSON that every browser reads, and without secrets, however they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure.console.http import HIDDEN, MAX_LEVELS, encode_json, without_secrets
from perdure.console.sessions import shown_event


def nested(levels: int, inner: object = 1) -> Any:
    found: Any = inner
    for _ in range(levels):
        found = [found]
    return found


def strict(text: str) -> Any:
    """As a browser reads it."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    text.encode()
    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("odd", ["\ud800", float("nan"), float("inf"), nested(MAX_LEVELS + 1), nested(985)])
def test_what_json_cannot_hold_is_shown_all_the_same(odd: object) -> None:
    event = {"what": "event", "message": {"params": {"odd": odd}, "after": "it"}}
    for value in (event, shown_event(event), shown_event(event, whole=True)):
        assert strict(encode_json(value))["message"]["after"] == "it"


def test_a_message_is_shown_as_deep_as_is_allowed_and_no_deeper() -> None:
    assert without_secrets(nested(MAX_LEVELS)) == nested(MAX_LEVELS)
    assert without_secrets(nested(MAX_LEVELS + 1)) == nested(MAX_LEVELS, HIDDEN)


def test_a_secret_in_a_message_that_cannot_be_read_is_not_shown_either() -> None:
    text = '{"result":{"requestState":"sealed","more":' + "[" * 5_000
    assert shown_event({"what": "event", "message": text})["message"] == HIDDEN
    assert shown_event({"what": "event", "message": "requestState"})["message"] == "requestState"
