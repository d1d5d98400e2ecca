"""The state tables: complete, closed, and honest about what cannot happen."""

import enum
from collections.abc import Mapping
from typing import Any

import pytest

from perdure._core.states import (
    CALL,
    CLAIM,
    CONTENT,
    EXCHANGE,
    LOG,
    READER,
    SESSION,
    WRITING,
    CallState,
    CallStep,
    ClaimState,
    ClaimStep,
    ContentState,
    ContentStep,
    ExchangeState,
    ExchangeStep,
    IllegalStep,
    LogState,
    LogStep,
    ReaderState,
    ReaderStep,
    SessionState,
    SessionStep,
    WritingState,
    WritingStep,
    advance,
)

TABLES: list[tuple[Mapping[Any, Mapping[Any, Any]], type[enum.Enum], type[enum.Enum], enum.Enum]] = [
    (CONTENT, ContentState, ContentStep, ContentState.OPEN),
    (WRITING, WritingState, WritingStep, WritingState.FOLLOWING),
    (READER, ReaderState, ReaderStep, ReaderState.STARTING),
    (SESSION, SessionState, SessionStep, SessionState.OPENING),
    (CALL, CallState, CallStep, CallState.RUNNING),
    (LOG, LogState, LogStep, LogState.HEALTHY),
    (CLAIM, ClaimState, ClaimStep, ClaimState.HOLDING),
    (EXCHANGE, ExchangeState, ExchangeStep, ExchangeState.RUNNING),
]


@pytest.mark.parametrize(("table", "states", "steps", "first"), TABLES)
def test_every_state_is_in_its_table_and_can_be_reached(
    table: Mapping[Any, Mapping[Any, Any]], states: type[enum.Enum], steps: type[enum.Enum], first: enum.Enum
) -> None:
    reached, waiting = {first}, [first]
    while waiting:
        for state in table[waiting.pop()].values():
            if state not in reached:
                reached.add(state)
                waiting.append(state)
    assert reached == set(table) == set(states)
    assert {step for row in table.values() for step in row} == set(steps)


@pytest.mark.parametrize(("table", "states", "steps", "first"), TABLES)
def test_a_step_that_is_not_in_the_table_cannot_be_made(
    table: Mapping[Any, Mapping[Any, Any]], states: type[enum.Enum], steps: type[enum.Enum], first: enum.Enum
) -> None:
    for state in states:
        for step in steps:
            if step in table[state]:
                assert advance(table, state, step) is table[state][step]
            else:
                with pytest.raises(IllegalStep, match=step.value):
                    advance(table, state, step)


def test_a_call_has_one_end() -> None:
    """Promise 3: no end leads anywhere."""
    assert [state for state in CallState if CALL[state]] == [CallState.RUNNING, CallState.WAITING]


def test_no_reader_and_no_writer_ends_a_stream() -> None:
    """R3: only its last response does, or the end of its session."""
    assert {step for row in CONTENT.values() for step in row} == {ContentStep.LAST_RESPONSE, ContentStep.SESSION_ENDED}


def test_a_call_that_another_node_claims_is_lost_and_a_home_that_moves_is_followed() -> None:
    assert advance(WRITING, WritingState.WRITING, WritingStep.LOSE_CALL) is WritingState.LOST
    assert advance(WRITING, WritingState.WRITING, WritingStep.LOSE_HOME) is WritingState.FOLLOWING
    assert advance(WRITING, WritingState.LOST, WritingStep.FOLLOW) is WritingState.FOLLOWING


def test_a_reader_that_has_finished_never_writes_again() -> None:
    assert READER[ReaderState.FINISHED] == {}
    assert READER[ReaderState.CLOSING] == {ReaderStep.FINISH: ReaderState.FINISHED}


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
