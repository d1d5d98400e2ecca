"""Whatever arrives at the endpoint, the invariant holds.

- It is answered, in time, and never with a server error; what is no HTTP at all gets a 400 or a closed connection.
- The next valid request works, on that session and on another.
- The package logs no error, and no task dies unheard.

The examples are the same in every run; `PERDURE_TEST_FUZZ=10` tries ten times as many, and others each time.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure._core.sse import Decoder
from tests.http.fuzz_target import HANG, Target, receive, running
from tests.http.fuzzer import answers_to_asks, bodies, broken_bodies, http_requests, mangled_bytes, mostly
from tests.support.clients.raw_http import VERSION, Parser, message

TIMES = float(os.environ.get("PERDURE_TEST_FUZZ", "1"))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with running() as found:
        yield found


def examples(count: int) -> settings:
    return settings(max_examples=int(count * TIMES), derandomize=TIMES == 1, database=None, deadline=None)


@examples(60)
@given(data=st.data())
def test_any_request_is_answered(target: Target, data: st.DataObject) -> None:
    method, request = data.draw(http_requests(target))
    answers = target.exchange(request, method=method)
    assert len(answers) == 1
    target.check(answers)


@examples(60)
@given(body=mostly(bodies, broken_bodies()), era=st.sampled_from(["session", "session", "old", "none", "sessionless"]))
def test_any_body_is_answered(target: Target, body: bytes, era: str) -> None:
    headers = {
        "session": {"mcp-session-id": target.session_id, "mcp-protocol-version": VERSION},
        "old": {"mcp-session-id": target.old_id},
        "none": {},
        "sessionless": {"mcp-protocol-version": "2026-07-28"},
    }[era]
    answers = target.exchange(target.request("POST", body, headers=headers))
    assert len(answers) == 1
    target.check(answers)


@examples(40)
@given(data=mangled_bytes())
def test_garbage_is_refused_or_closed(target: Target, data: bytes) -> None:
    target.check(target.garbage(data))


@examples(60)
@given(data=st.data())
def test_requests_in_a_row_are_answered_in_a_row(target: Target, data: st.DataObject) -> None:
    """Pipelining: all are sent before the first answer is read."""
    count = data.draw(st.integers(2, 6))
    row = [data.draw(mostly(bodies, broken_bodies())) for _ in range(count)]
    headers = {"mcp-session-id": target.session_id}
    answers = target.exchange(b"".join(target.request("POST", body, headers=headers) for body in row), answers=count)
    assert len(answers) == count
    target.check(answers)


@examples(30)
@given(answer=answers_to_asks, names_it=mostly(st.just(True), st.just(False)))
def test_any_answer_to_an_ask_lets_the_call_end(target: Target, answer: dict[str, object], names_it: bool) -> None:
    """What the client answers is the client's; the call that waits for it ends, and once."""
    body = message("tools/call", {"name": "ask", "arguments": {}}, id="asking")
    headers = {"mcp-session-id": target.session_id}
    with socket.create_connection(("127.0.0.1", target.port), timeout=HANG) as connection:
        connection.sendall(target.request("POST", body, headers=headers))
        parser, decoder = Parser(), Decoder()
        heard: list[dict[str, Any]] = []

        def listen(wanted: int) -> None:
            while len(heard) < wanted:
                received = receive(connection)
                assert received
                heard.extend(json.loads(event.data) for event in decoder.feed(parser.feed(received)) if event.data)

        listen(1)
        reply = {"jsonrpc": "2.0", "id": heard[0]["id"], **answer}
        if names_it:
            reply["id"] = heard[0]["id"]
        replies = [reply, {"jsonrpc": "2.0", "id": heard[0]["id"], "error": {"code": -1, "message": "no"}}]
        answers = [target.exchange(target.request("POST", json.dumps(r).encode(), headers=headers))[0] for r in replies]
        listen(2)
        assert heard[1]["id"] == "asking"
    assert answers[1].status == 202
    target.check(answers)
