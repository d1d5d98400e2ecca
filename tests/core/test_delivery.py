"""The table of responses and failures, by vectors that the browser's client is tested with as well (H8, promise 3)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure._core.delivery import (
    EVENTS,
    FAILED,
    REPEATABLE,
    RESPONDED,
    SESSIONLESS,
    Attempt,
    Body,
    Failure,
    Meaning,
    Purpose,
    ResponseKind,
    body_of,
    column_of,
    doubts_session,
    is_answer,
    of_failure,
    of_response,
    seen,
)
from perdure._core.settling import READS

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "delivery.json").read_text())
METHODS = json.loads((Path(__file__).parents[1] / "vectors" / "methods.json").read_text())

STATUSES = (200, 202, 301, 400, 401, 403, 404, 405, 410, 429, 500, 502, 503, 504, 599)
MEDIA = ["", EVENTS, "application/json", "text/html"]
#: What ends an attempt: its sender has an answer, or is told why there is none.
ENDINGS = {Meaning.ANSWER, Meaning.UNKNOWN, Meaning.UNREACHABLE, Meaning.REFUSED}


def attempt_of(vector: dict[str, Any]) -> Attempt:
    flags = {
        name: vector.get(name, False) for name in ("is_repeatable", "has_position", "may_renew", "may_have_arrived")
    }
    return Attempt(purpose=Purpose(vector["purpose"]), **flags)


def response_of(vector: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": vector["status"],
        "media": vector.get("media", ""),
        "body": Body(vector.get("body", "none")),
        "says_when": vector.get("says_when", False),
    }


def told() -> Iterator[tuple[Attempt, dict[str, Any]]]:
    """The attempts and responses of the vectors."""
    return ((attempt_of(vector), response_of(vector)) for vector in VECTORS["responses"])


def attempts() -> Iterator[Attempt]:
    """Every attempt that there is."""
    for purpose in Purpose:
        for repeatable, position, renew in itertools.product([False, True], repeat=3):
            yield Attempt(purpose=purpose, is_repeatable=repeatable, has_position=position, may_renew=renew)
    yield Attempt(purpose=Purpose.KEYED, may_have_arrived=True)


RESPONSES: list[dict[str, Any]] = [
    {"status": status, "media": media, "body": body, "says_when": says_when}
    for status, media, body, says_when in itertools.product(STATUSES, MEDIA, Body, [False, True])
]
EVERYTHING = list(itertools.product(attempts(), RESPONSES))


@pytest.mark.parametrize("vector", VECTORS["responses"], ids=lambda vector: vector["name"])
def test_response(vector: dict[str, Any]) -> None:
    assert of_response(attempt_of(vector), **response_of(vector)).name.lower() == vector["meaning"]


@pytest.mark.parametrize("vector", VECTORS["failures"], ids=lambda vector: vector["name"])
def test_failure(vector: dict[str, Any]) -> None:
    assert of_failure(attempt_of(vector), Failure[vector["failure"].upper()]).name.lower() == vector["meaning"]


@pytest.mark.parametrize("vector", VECTORS["bodies"], ids=lambda vector: f"{vector['message']} for {vector['id']!r}")
def test_body(vector: dict[str, Any]) -> None:
    assert body_of(vector["message"], vector["id"]).value == vector["body"]


def test_the_vectors_have_every_cell_of_the_table() -> None:
    """So that a cell that is changed in one language alone is noticed."""
    cells = {(row, column) for row in RESPONDED for column in RESPONDED[row]}
    assert cells == {(seen(attempt, **response), column_of(attempt)) for attempt, response in told()}
    assert {(failure, column) for failure in FAILED for column in FAILED[failure]} == {
        (Failure[vector["failure"].upper()], column_of(attempt_of(vector))) for vector in VECTORS["failures"]
    }
    assert RESPONDED.keys() == set(ResponseKind)
    assert FAILED.keys() == set(Failure)


def test_what_may_be_repeated_without_a_session_is_what_the_revision_has_of_reads_and_the_requests_of_tasks() -> None:
    assert sorted(SESSIONLESS - READS) == [
        *("dev.perdure/cancel", "server/discover", "subscriptions/listen"),
        *("tasks/cancel", "tasks/get", "tasks/update"),
    ]


def test_methods_that_may_be_repeated_are_those_of_the_shared_list() -> None:
    assert sorted(REPEATABLE) == METHODS["repeatable"]
    assert not REPEATABLE & set(METHODS["once"])


def test_every_status_has_a_meaning_for_everything_that_is_sent() -> None:
    for attempt, response in EVERYTHING:
        assert isinstance(of_response(attempt, **response), Meaning)
    for attempt, failure in itertools.product(attempts(), Failure):
        if failure is not Failure.SESSION_REPLACED or attempt.purpose is not Purpose.KEYED:
            assert isinstance(of_failure(attempt, failure), Meaning)


def test_a_call_that_may_have_run_is_never_sent_again() -> None:
    """H8: only the server's own word that it has not taken it, or that it does not know the session, allows that."""
    for attempt, response in EVERYTHING:
        if attempt.purpose is Purpose.CALL and not attempt.is_repeatable and not attempt.has_position:
            meaning, status = of_response(attempt, **response), response["status"]
            was_not_taken = status == 429 or (status == 503 and response["says_when"])
            assert (meaning is Meaning.AGAIN) == was_not_taken
            assert meaning is not Meaning.RESTART
            assert meaning is not Meaning.RENEW or status == 404


def test_a_call_that_may_have_run_is_never_sent_again_after_a_failure() -> None:
    """H8: nothing was sent, or the session was gone; after every other failure it is not repeated."""
    call = Attempt(purpose=Purpose.CALL)
    again = {failure for failure in Failure if of_failure(call, failure) in (Meaning.AGAIN, Meaning.RESTART)}
    assert again == {Failure.NOT_SENT, Failure.SESSION_REPLACED}
    resumed = Attempt(purpose=Purpose.CALL, has_position=True)
    assert Meaning.RESTART not in {of_failure(resumed, failure) for failure in Failure}


def test_only_a_call_that_must_not_run_twice_has_an_unknown_outcome() -> None:
    for attempt, response in EVERYTHING:
        if attempt.purpose is not Purpose.CALL or attempt.is_repeatable:
            assert of_response(attempt, **response) is not Meaning.UNKNOWN
    for attempt in attempts():
        if attempt.purpose is not Purpose.KEYED and (attempt.purpose is not Purpose.CALL or attempt.is_repeatable):
            assert all(of_failure(attempt, failure) is not Meaning.UNKNOWN for failure in Failure)


@pytest.mark.parametrize("may_renew", [False, True])
def test_a_running_call_is_never_told_that_it_cannot_work(may_renew: bool) -> None:
    """Promise 3: its answer will be in the log. It is read, tried again, or its outcome is unknown."""
    call = Attempt(purpose=Purpose.CALL, has_position=True, may_renew=may_renew)
    possible = {Meaning.FOLLOW, Meaning.AGAIN, Meaning.RENEW, Meaning.UNKNOWN}
    assert {of_response(call, **response) for response in RESPONSES} <= possible
    assert {of_failure(call, failure) for failure in Failure} <= possible


def test_a_keyed_call_that_may_have_arrived_is_never_told_that_it_cannot_work() -> None:
    """Promise 3: its key finds the answer. It is asked for again, or its outcome is unknown."""
    call = Attempt(purpose=Purpose.KEYED, may_have_arrived=True)
    possible = {Meaning.FOLLOW, Meaning.ANSWER, Meaning.AGAIN, Meaning.RESTART}
    assert {of_response(call, **response) for response in RESPONSES} <= possible
    failures = set(Failure) - {Failure.SESSION_REPLACED}
    assert {of_failure(call, one) for one in failures} == {Meaning.AGAIN, Meaning.RESTART, Meaning.UNKNOWN}


def test_patience_ends_everything() -> None:
    assert {of_failure(attempt, Failure.PATIENCE_ENDED) for attempt in attempts()} <= ENDINGS


def test_a_session_is_renewed_only_where_that_is_allowed() -> None:
    """H6: once for each request, so that a server whose sessions are always gone is not asked for ever."""
    for attempt, response in EVERYTHING:
        if of_response(attempt, **response) is Meaning.RENEW:
            assert (attempt.may_renew, response["status"]) == (True, 404)
            assert of_failure(attempt, Failure.SESSION_REPLACED) is not Meaning.RENEW


def test_what_answers_on_a_stream() -> None:
    assert {body for body in Body if is_answer(body)} == {Body.RESULT, Body.ERROR, Body.ERROR_WITHOUT_ID}


@pytest.mark.parametrize(
    ("status", "code", "sentence", "doubts"),
    [
        (400, -32600, "Bad Request: Session not found", True),
        (400, None, "Invalid session ID", True),
        (400, -32000, "Bad Request: Server not initialized", True),
        (200, -32600, "Not initialised", True),
        (200, -32001, "SESSION EXPIRED", True),
        (200, -32602, "Invalid session", False),  # of a request that the server has looked at
        (200, None, "my session is fine", False),
        (503, None, "no such session", True),
        (500, None, "session store failed", False),
        (401, None, "your session has expired", False),
        (403, -32600, "session of another user", False),
        (400, -32600, "unknown tool", False),
        (400, -32000, "Bad Request: Unsupported protocol version", True),
        (200, -32022, "no", True),
    ],
)
def test_a_refusal_that_reads_as_if_the_session_were_gone(
    status: int, code: int | None, sentence: str, doubts: bool
) -> None:
    assert doubts_session(status=status, code=code, sentence=sentence) == doubts
