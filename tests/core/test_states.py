"""The state tables: complete, closed, and honest about what cannot happen."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from perdure._core import states
from perdure._core.states import (
    CALL,
    CLAIM,
    CONTENT,
    PASSED_ON,
    CallState,
    ClaimState,
    ClaimStep,
    ContentStep,
    IllegalStep,
    PassedOnState,
    PassedOnStep,
    advance,
)

NAMES = ("Content", "Writing", "Reader", "Session", "Call", "ToolStep", "Claim", "PassedOn")
"""The first state of each is the one in which its life begins."""


@pytest.mark.parametrize("name", NAMES)
def test_every_state_is_in_its_table_and_can_be_reached(name: str) -> None:
    table: Mapping[Any, Mapping[Any, Any]] = getattr(states, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper())
    all_states, steps = (list(getattr(states, name + kind)) for kind in ("State", "Step"))
    reached, waiting = {all_states[0]}, all_states[:1]
    while waiting:
        for state in table[waiting.pop()].values():
            if state not in reached:
                reached.add(state)
                waiting.append(state)
    assert reached == set(table) == set(all_states)
    assert {step for row in table.values() for step in row} == set(steps)


def test_a_step_that_is_not_in_the_table_cannot_be_made() -> None:
    with pytest.raises(IllegalStep, match="'answered' has no step 'cancel'"):
        advance(CALL, CallState.ANSWERED, states.CallStep.CANCEL)


def test_a_call_has_one_end() -> None:
    """Promise 3: no end leads anywhere."""
    assert [state for state in CallState if CALL[state]] == [CallState.RUNNING, CallState.WAITING]


def test_no_reader_and_no_writer_ends_a_stream() -> None:
    """R3: only its last response does, or the end of its session."""
    assert {step for row in CONTENT.values() for step in row} == {ContentStep.LAST_RESPONSE, ContentStep.SESSION_ENDED}


def test_a_claim_that_lapsed_may_be_renewed_and_one_that_was_buried_never_is() -> None:
    assert advance(CLAIM, ClaimState.FROZEN, ClaimStep.RENEW) is ClaimState.HOLDING
    assert set(CLAIM[ClaimState.BURIED].values()) == {ClaimState.BURIED}


def test_a_server_that_stops_answers_every_request_once() -> None:
    """What is answered stays so; what is not is owed, and the SDK's late answer changes nothing."""
    stopped = {state: advance(PASSED_ON, state, PassedOnStep.STOP) for state in PassedOnState}
    assert stopped == {
        PassedOnState.RUNNING: PassedOnState.OWED,
        PassedOnState.STREAMING: PassedOnState.LAST,
    } | {state: state for state in (PassedOnState.ANSWERED, PassedOnState.OWED, PassedOnState.LAST)}
    for state in (PassedOnState.OWED, PassedOnState.LAST):
        assert set(PASSED_ON[state].values()) == {state}
