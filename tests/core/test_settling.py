"""What becomes of a call whose node died, as a table (promise 3)."""

from __future__ import annotations

from typing import Any

import pytest

from perdure._core.settling import MOST_ATTEMPTS, READS, Verdict, may_run_again, verdict
from perdure._core.sticky import METHODS as STICKY


@pytest.mark.parametrize("method", sorted(READS | STICKY))
def test_a_read_and_a_sticky_request_run_again_once(method: str) -> None:
    assert [verdict(method, attempt=attempt) for attempt in (1, 2, 3)] == [
        Verdict.RERUN,
        Verdict.UNKNOWN,
        Verdict.UNKNOWN,
    ]


def test_a_tool_is_for_the_server_to_judge_and_not_a_second_time() -> None:
    assert verdict("tools/call", attempt=1) is Verdict.ASK
    assert verdict("tools/call", attempt=MOST_ATTEMPTS) is Verdict.UNKNOWN


@pytest.mark.parametrize("method", ["initialize", "tasks/cancel", "x/y", "", "TOOLS/LIST", "resources/delete"])
def test_whatever_nobody_calls_a_read_is_not_run_again(method: str) -> None:
    assert verdict(method, attempt=1) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("tool", "may"),
    [
        ({}, False),
        ({"annotations": None}, False),
        ({"annotations": []}, False),
        ({"annotations": {}}, False),
        ({"annotations": {"readOnlyHint": True}}, True),
        ({"annotations": {"idempotentHint": True}}, True),
        ({"annotations": {"readOnlyHint": False, "idempotentHint": True}}, True),
        ({"annotations": {"readOnlyHint": "yes"}}, False),
        ({"annotations": {"readOnlyHint": 1}}, False),
        ({"annotations": {"destructiveHint": False}}, False),
    ],
)
def test_only_a_plain_true_lets_a_tool_run_again(tool: dict[str, Any], may: bool) -> None:
    assert may_run_again(tool) is may
