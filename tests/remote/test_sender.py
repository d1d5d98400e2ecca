"""What has no answer waits no longer than its patience, counted from the moment it was handed over."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from starlette.requests import Request
from starlette.responses import Response

from perdure._core.reconnect import Patience
from perdure.remote.call import Sender
from perdure.remote.route import Notice
from tests.client.odd_server import Odd
from tests.remote.conftest import LIMITS, linked
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

NOTE = b'{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}'


class Failing(Odd):
    """Answers every notification with 500."""

    sent = 0

    async def answer(self, request: Request) -> Response:
        if request.method == "POST" and await request.body() == NOTE:
            self.sent += 1
            return Response(status_code=500)
        return await super().answer(request)


async def test_a_message_that_waited_in_a_queue_until_its_patience_ended_is_tried_once() -> None:
    """Otherwise each of many messages in a queue would wait for a whole patience, one after the other."""
    odd = Failing()
    patience = Patience(max_time=0.2, max_tries=1_000, first_delay=0.01, max_delay=0.01)
    limits = replace(LIMITS, patience=patience, counts_from_request=True)
    async with linked(odd, limits=limits) as client:
        sender, handed_over = Sender(client.link), time.monotonic()
        attempts = sender.attempts()
        await until(lambda: time.monotonic() > handed_over + patience.max_time)
        assert not await sender.send(NOTE, attempts=attempts)
        assert odd.sent == 1
        assert not await sender.send(NOTE)
        assert odd.sent > 2  # handed over in this moment, it has its patience
        assert client.program.heard(Notice.NOT_SENT) == ["HTTP 500", "HTTP 500"]
