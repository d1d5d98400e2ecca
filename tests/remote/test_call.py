"""One request, one answer: what each response of a server comes to, for every client (H8, promise 3)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from perdure._core.codes import NO_SERVER, OUTCOME_UNKNOWN, UNREACHABLE
from perdure.remote import call as calls
from perdure.remote.route import Notice
from tests.client.odd_server import Odd, event, events, good, json_of, result
from tests.remote.conftest import BRIEF, LIMITS, linked
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

FINE = {"content": [{"type": "text", "text": "fine"}]}
PRIMED = b"id: a\nretry: 1\ndata:\n\n"


def failed(key: object, message: str = "said") -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": key, "error": {"code": -32050, "message": message}}).encode()


def page(status: int = 200) -> Response:
    return Response("<html>", status_code=status, media_type="text/html")


SAID = ("said", None)

#: What the server answers, and what a tool's call and a read come to: a code, or the answer itself.
RESPONSES: dict[str, tuple[Callable[[object], Response], object, object]] = {
    "403 without a body": (lambda key: Response(status_code=403), (NO_SERVER, "forbidden"), (NO_SERVER, "forbidden")),
    "200 with a page": (lambda key: page(), OUTCOME_UNKNOWN, (NO_SERVER, "not_mcp")),
    "500 with a page": (lambda key: page(500), OUTCOME_UNKNOWN, (NO_SERVER, "server_error")),
    "202": (lambda key: Response(status_code=202), OUTCOME_UNKNOWN, (NO_SERVER, "not_mcp")),
    "401 with an error": (lambda key: json_of(failed("server-error"), status_code=401), -32050, -32050),
    "503 with the request's error": (lambda key: json_of(failed(key), status_code=503), -32050, -32050),
    "503 with an error without an id": (lambda key: json_of(failed(None), status_code=503), OUTCOME_UNKNOWN, FINE),
    "a result without an id": (lambda key: json_of(good(None)), OUTCOME_UNKNOWN, (NO_SERVER, "not_mcp")),
    "an error without an id": (lambda key: json_of(failed(None)), -32050, -32050),
    "404 in every session": (
        lambda key: Response(status_code=404),
        (NO_SERVER, "session_gone"),
        (NO_SERVER, "session_gone"),
    ),
    "429 for ever": (lambda key: Response(status_code=429), UNREACHABLE, UNREACHABLE),
    "a stream that ends": (lambda key: events(), OUTCOME_UNKNOWN, FINE),
    "a position that cannot be sent": (lambda key: events(b"id: \x01\ndata:\n\n"), OUTCOME_UNKNOWN, FINE),
}


def outcome(answer: dict[str, Any]) -> object:
    if answer.get("code") == NO_SERVER:
        return NO_SERVER, answer["data"]["reason"]
    return answer.get("code", answer)


@pytest.mark.parametrize("case", RESPONSES)
async def test_a_response_has_one_outcome_for_a_call_and_one_for_a_read(case: str) -> None:
    respond, of_call, of_read = RESPONSES[case]
    odd = Reading(respond)
    async with linked(odd) as client:
        assert outcome(await client.answer("odd")) == of_call
        assert outcome(await client.answer("odd", method="resources/read")) == of_read
    assert len(odd.asked) == 1 or case in ("429 for ever", "404 in every session")


class Reading(Odd):
    """Answers a tool's call as the test says, and a read too; a read that is sent again under a new id is fine."""

    def __init__(self, respond: Callable[[object], Response]) -> None:
        super().__init__(odd=respond)
        self._respond = respond
        self._read: list[object] = []

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body() or b"{}")
        if body.get("method") != "resources/read":
            return await super().answer(request)
        again = bool(self._read) and body["id"] not in self._read
        is_gone = request.headers.get("mcp-session-id") != f"odd-{self.sessions}"
        self._read.append(body["id"])
        return json_of(good(body["id"])) if again and not is_gone else self._respond(body["id"])


async def test_a_running_call_whose_token_provider_fails_is_tried_again_until_its_outcome_is_unknown() -> None:
    """The call runs, and its answer will be in the log: only patience ends it, never "it cannot work"."""
    asked = 0

    def token() -> str:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise LookupError("the file is being rewritten")
        return "t1"

    odd = Odd(slow=lambda key: events(PRIMED))
    odd.get = lambda request: Response(status_code=401)
    async with linked(odd, token=token) as client:
        answer = await client.answer("slow")
    assert (answer["code"], asked) == (OUTCOME_UNKNOWN, 1 + BRIEF.max_tries)
    assert "the file is being rewritten" in answer["data"]["reason"]
    assert len(odd.asked) == 1


async def test_a_request_that_has_not_left_and_gets_no_token_is_refused_at_once() -> None:
    works, odd = True, Odd(refused=lambda key: Response(status_code=401))

    def token() -> str:
        if not works:
            raise LookupError("no keyring")
        return "t1"

    async with linked(odd, token=token) as client:
        works = False
        answer = await client.answer("refused")
        assert client.program.heard(Notice.REFUSED) == ["LookupError: no keyring"]
    assert (answer["code"], answer["data"]) == (NO_SERVER, {"reason": "no_credentials"})


async def test_a_call_of_an_earlier_process_is_only_read() -> None:
    odd = Odd()
    async with linked(odd) as client:
        call = client.call("slow", position="a")
        odd.resumed = [event(result(call.id, **FINE), at="b")]
        assert json.loads((await call.answer()).text)["result"] == FINE
    assert odd.asked == []


async def test_patience_may_run_from_the_request_and_then_a_server_cannot_ask_for_more() -> None:
    """A host was promised an answer within a time; a server that says "in an hour" does not change that."""
    odd = Odd(busy=lambda key: Response(status_code=503, headers={"retry-after": "3600"}))
    limits = replace(LIMITS, counts_from_request=True, patience=replace(BRIEF, max_time=0.2))
    async with linked(odd, limits=limits) as client, asyncio.timeout(10):
        assert (await client.answer("busy"))["code"] == UNREACHABLE


async def test_the_next_message_may_follow_when_the_server_has_taken_this_one() -> None:
    odd, may_end = Odd(), asyncio.Event()

    def slow(key: object) -> Response:
        odd.resumed = [event(good(key))]
        return events(PRIMED)

    odd.calls = {"slow": slow}
    async with linked(odd) as client, asyncio.TaskGroup() as group:
        call = client.call("slow")
        assert not call.departed.is_set()
        task = group.create_task(call.answer())
        await call.departed.wait()
        await task
        may_end.set()


async def test_a_server_that_gives_no_sign_keeps_the_next_message_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "DEPARTURE", 0.05)
    odd, may_answer = Odd(plain=lambda key: json_of(good(key))), asyncio.Event()

    async def wait(session: str, method: str) -> None:
        if method == "tools/call":
            await may_answer.wait()

    async with linked(odd) as client, asyncio.TaskGroup() as group:
        odd.before = wait
        call = client.call("plain")
        task = group.create_task(call.answer())
        await call.departed.wait()
        assert not task.done()
        may_answer.set()
        assert not (await task).is_error


async def test_a_stray_answer_is_complained_of_and_the_call_goes_on() -> None:
    odd = Odd(crossed=lambda key: events(event(good("another")), event(b"{"), event(good(key))))
    async with linked(odd) as client:
        assert await client.answer("crossed") == FINE
        await until(lambda: len(client.program.complaints) == 2)
        assert client.program.complaints[0] == "an answer that no request here waits for: 'another'"
