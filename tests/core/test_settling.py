"""What becomes of a call whose node died, as a table (promise 3)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from perdure._core.settling import MOST_ATTEMPTS, READS, Verdict, as_progress, may_run_again, progress_in, verdict
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


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (3, 3.0),
        (0.5, 0.5),
        (2**53, 2.0**53),
        (2**53 + 1, 2.0**53 + 2),
        (2**63, 2.0**63),
        (2**63 + 1, math.nextafter(2.0**63, math.inf)),
        (10**400, math.inf),
        (-(10**400), None),
        (math.inf, math.inf),
        (math.nan, None),
        (True, None),
        ("5", None),
        (None, None),
    ],
)
def test_progress_is_kept_as_a_float_that_is_not_below_it(sent: object, kept: float | None) -> None:
    assert as_progress(sent) == kept


@pytest.mark.parametrize(
    ("payload", "progress"),
    [
        (b'{"method":"notifications/progress","params":{"progressToken":"t","progress":2}}', 2.0),
        (b'{"method":"notifications/progress","params":{"progressToken":"u","progress":2}}', None),
        (b'{"method":"notifications/progress","params":{"progressToken":"t","progress":"2"}}', None),
        (b'{"method":"notifications/progress","params":{"progressToken":"t","progress":' + b"9" * 5_000 + b"}}", None),
        (b'{"method":"notifications/progress"}', None),
        (b'{"method":"notifications/message","params":{"progressToken":"t","progress":2}}', None),
    ],
)
def test_progress_is_found_in_the_messages_that_report_it(payload: bytes, progress: float | None) -> None:
    assert progress_in(payload, ("t",)) == progress
