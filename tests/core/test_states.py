"""The state tables: complete, closed, and honest about what cannot happen."""

from collections.abc import Mapping
from typing import Any

import pytest

from perdure._core import states
from perdure._core.states import (
    CALL,
    CLAIM,
    CONTENT,
    EXCHANGE,
    CallState,
    ClaimState,
    ClaimStep,
    ContentStep,
    ExchangeState,
    ExchangeStep,
    IllegalStep,
    advance,
)

NAMES = ("Content", "Writing", "Reader", "Session", "Call", "Claim", "Exchange")
"""The first state of each is the one in which its life begins."""


@pytest.mark.parametrize("name", NAMES)
def test_every_state_is_in_its_table_and_can_be_reached(name: str) -> None:
    table: Mapping[Any, Mapping[Any, Any]] = getattr(states, name.upper())
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


def test_a_server_that_stops_answers_every_exchange_once() -> None:
    """What is answered stays so; what is not is owed, and the SDK's late answer changes nothing."""
    stopped = {state: advance(EXCHANGE, state, ExchangeStep.STOP) for state in ExchangeState}
    assert stopped == {
        ExchangeState.RUNNING: ExchangeState.OWED,
        ExchangeState.STREAMING: ExchangeState.LAST,
    } | {state: state for state in (ExchangeState.ANSWERED, ExchangeState.OWED, ExchangeState.LAST)}
    for state in (ExchangeState.OWED, ExchangeState.LAST):
        assert set(EXCHANGE[state].values()) == {state}
