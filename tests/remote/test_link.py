"""A session from the outside: renewed once, listened to, and sent notifications (B5, H6, H8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from starlette.requests import Request
from starlette.responses import Response

from perdure.remote.call import Sender
from perdure.remote.endpoint import Refused, Unavailable
from perdure.remote.route import Notice
from tests.client.odd_server import Odd, flow, json_of, result
from tests.remote.conftest import LIMITS, linked

pytestmark = pytest.mark.anyio

NOTE = b'{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}'
REPLY = b'{"jsonrpc":"2.0","id":7,"result":{}}'


async def test_a_notification_is_sent_again_in_a_new_session_and_a_reply_is_not() -> None:
    """The reply was for a tool of the old session."""
    odd = Odd()
    async with linked(odd) as client:
        sender = Sender(client.link)
        odd.ended.add("odd-1")
        assert await sender.send(NOTE)
        odd.ended.add("odd-2")
        assert not await sender.send(REPLY, is_reply=True)
        assert client.program.adopted == ["odd-2", "odd-3"]
        assert len(client.program.heard(Notice.NOT_SENT)) == 1
    assert ("odd-2", "notifications/roots/list_changed") in odd.heard
    assert ("odd-3", "answer") not in odd.heard


async def test_what_has_no_answer_waits_for_a_server_that_fails_and_not_for_one_that_refuses() -> None:
    odd, answers = Odd(), [Response(status_code=500), Response(status_code=503), Response(status_code=202)]

    async def before(session: str, method: str) -> None:
        odd.calls[method] = lambda key: Response()

    class Failing(Odd):
        async def answer(self, request: Request) -> Response:
            if request.method == "POST" and b"list_changed" in await request.body() and answers:
                return answers.pop(0)
            return await super().answer(request)

    failing = Failing()
    async with linked(failing) as client:
        sender = Sender(client.link)
        assert await sender.send(NOTE)
        assert answers == []
        answers.append(Response(status_code=400))
        assert not await sender.send(NOTE)
        await sender.idle()
        assert client.program.heard(Notice.NOT_SENT) == ["HTTP 400"]


async def test_a_session_that_the_program_cannot_use_is_not_used_and_the_next_one_may_be() -> None:
    odd = Odd()
    async with linked(odd) as client:
        first = client.link.handshake
        client.program.refusal = Refused("not_mcp", "of another age")
        assert await client.link.renew(first) is client.program.refusal
        assert client.link.handshake is first
        assert client.program.heard(Notice.NOT_RENEWED) == ["of another age"]
        client.program.refusal = None
        assert await client.link.renew(first) is None
        assert client.program.adopted == ["odd-3"]


async def test_a_server_that_is_busy_at_a_handshake_is_asked_again_within_its_patience() -> None:
    odd = Odd()
    busy = [Response(status_code=503), Response(status_code=429, headers={"retry-after": "0"})]
    async with linked(odd) as client:
        welcome = odd.initialize
        odd.initialize = lambda key: busy.pop() if busy else welcome(key)
        assert await client.link.renew(client.link.handshake) is None
        odd.initialize = lambda key: Response(status_code=503)
        trouble = await client.link.renew(client.link.handshake)
        assert isinstance(trouble, Unavailable)
        assert str(trouble) == "HTTP 503"


async def test_a_handshake_has_its_time_however_lively_the_server_is() -> None:
    odd = Odd()

    def lively(key: object) -> Response:
        async def frames() -> AsyncIterator[bytes]:
            while True:
                yield b": one moment\n\n"
                await asyncio.sleep(0.01)

        return flow(frames())

    async with linked(odd, limits=replace(LIMITS, handshake_seconds=0.5)) as client:
        odd.initialize = lively
        trouble = await client.link.renew(client.link.handshake)
        assert str(trouble) == "no answer within 0 s"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (Response(status_code=401), "unauthorized"),
        (json_of(b'{"jsonrpc":"2.0","id":null,"error":{"code":-1,"message":"who?"}}', status_code=403), "forbidden"),
        (Response("<html>", media_type="text/html"), "not_mcp"),
        (Response(status_code=404), "not_found"),
        (Response(status_code=307, headers={"location": "http://elsewhere.invalid/mcp"}), "moved"),
        (Response(status_code=418), "refused"),
        (Response(status_code=500), "server_error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_handshake_that_is_refused_says_why(response: Response, reason: str) -> None:
    odd = Odd()
    async with linked(odd) as client:
        odd.initialize = lambda key: response
        trouble = await client.link.renew(client.link.handshake)
        assert isinstance(trouble, Refused)
        assert trouble.reason == reason


async def test_a_handshake_keeps_numbers_as_they_are() -> None:
    """What is only looked at has no fractions; what is kept has."""
    odd = Odd()
    async with linked(odd) as client:
        odd.initialize = lambda key: json_of(result(key, protocolVersion="2025-11-25", level=0.5))
        await client.link.renew(client.link.handshake)
        assert client.link.handshake is not None
        assert client.link.handshake.result["level"] == 0.5
