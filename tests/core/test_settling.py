"""The table that decides what becomes of a call whose node died (promise 3)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from perdure._core.settling import (
    MOST_ATTEMPTS,
    MOST_RUNS,
    MOST_STEPPED_RUNS,
    NOTHING_KEPT,
    READS,
    VERDICTS,
    Occasion,
    Rerun,
    UpstreamCall,
    Verdict,
    as_progress,
    decode_kept,
    may_run_again,
    progress_in,
    rerun,
)
from perdure._core.sticky import METHODS as STICKY


@pytest.mark.parametrize("method", sorted(READS | STICKY))
def test_a_read_and_a_sticky_request_run_again_once_after_a_death(method: str) -> None:
    judged = [rerun(method, attempt=attempt, occasion=Occasion.NODE_DIED) for attempt in (1, 2, 3)]
    assert judged == [Rerun.YES, Rerun.NO, Rerun.NO]


def test_a_tool_is_for_the_server_to_judge_and_not_a_second_time() -> None:
    assert rerun("tools/call", attempt=1, occasion=Occasion.NODE_DIED) is Rerun.ASK
    assert rerun("tools/call", attempt=MOST_ATTEMPTS, occasion=Occasion.NODE_DIED) is Rerun.NO


OWN = UpstreamCall(may_run_again=True, own=True)


@pytest.mark.parametrize(("method", "kept"), [("tasks/result", NOTHING_KEPT), ("tools/call", OWN)])
def test_what_only_waits_for_another_call_is_not_why_its_processes_died(method: str, kept: UpstreamCall) -> None:
    """Within the limit of all calls. A server that dies of it, outside the process, is not started for it for ever."""
    judged = [
        rerun(method, attempt=attempt, occasion=occasion, kept=decode_kept(kept.encode()))
        for occasion, attempt in (
            (Occasion.NODE_DIED, MOST_ATTEMPTS),
            (Occasion.NODE_DIED, MOST_STEPPED_RUNS - 1),
            (Occasion.NODE_DIED, MOST_STEPPED_RUNS),
            (Occasion.UPSTREAM_DIED, MOST_ATTEMPTS),
        )
    ]
    assert judged == [Rerun.YES, Rerun.YES, Rerun.NO, Rerun.NO]


def test_what_an_earlier_release_kept_of_a_call_is_read() -> None:
    assert decode_kept(b'{"rerun":true,"follow":null}') == UpstreamCall(may_run_again=True)


@pytest.mark.parametrize("occasion", [Occasion.NODE_LEFT, Occasion.PRINCIPAL_BACK])
def test_a_process_that_was_stopped_counts_against_no_request_within_a_limit(occasion: Occasion) -> None:
    assert rerun("ping", attempt=MOST_RUNS - 1, occasion=occasion) is Rerun.YES
    assert rerun("ping", attempt=MOST_RUNS, occasion=occasion) is Rerun.NO


@pytest.mark.parametrize("method", ["initialize", "tasks/cancel", "x/y", "", "TOOLS/LIST", "resources/delete"])
def test_whatever_nobody_calls_a_read_is_not_run_again(method: str) -> None:
    assert rerun(method, attempt=1, occasion=Occasion.NODE_DIED) is Rerun.NO


def test_every_occasion_has_a_verdict_for_every_call() -> None:
    assert VERDICTS.keys() == set(Occasion)
    assert all(row.keys() == set(Rerun) for row in VERDICTS.values())


@pytest.mark.parametrize("occasion", Occasion)
def test_the_server_is_asked_at_most_once(occasion: Occasion) -> None:
    answers = {VERDICTS[occasion][answer] for answer in Rerun if answer is not Rerun.ASK}
    assert Verdict.ASK not in answers


def test_a_call_waits_for_its_principal_only_while_that_may_help() -> None:
    """It needs the credentials to run again, or to see its tool; a call that may not run again is answered at once."""
    waits = {(occasion, may) for occasion in Occasion for may in Rerun if VERDICTS[occasion][may] is Verdict.WAIT}
    assert waits == {(Occasion.PRINCIPAL_AWAY, may) for may in (Rerun.YES, Rerun.STEPS, Rerun.HIDDEN, Rerun.FOLLOW)}


def test_a_call_runs_again_only_with_its_credentials_and_if_it_may() -> None:
    runs = {(occasion, may) for occasion in Occasion for may in Rerun if VERDICTS[occasion][may] is Verdict.RERUN}
    occasions = (Occasion.NODE_DIED, Occasion.NODE_LEFT, Occasion.PRINCIPAL_BACK, Occasion.UPSTREAM_DIED)
    assert runs == {(occasion, may) for occasion in occasions for may in (Rerun.YES, Rerun.STEPS)}


def test_a_principal_that_stays_away_ends_the_wait_and_a_cancelled_call_leaves_those_beside_it_alone() -> None:
    assert set(VERDICTS[Occasion.GRACE_PASSED].values()) == {Verdict.UNKNOWN}
    assert set(VERDICTS[Occasion.CALL_CANCELLED].values()) == {Verdict.KEEP}


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
