"""A server that stops answers each request of 2026-07-28 once, whatever the request is and however far its response
has come."""

from __future__ import annotations

import json

import pytest

import perdure
from perdure import Settings
from perdure._core.unknown_outcome import unknown_error
from perdure.http.sdk_passthrough import last_word
from perdure.store import MemoryStore
from tests.http.test_races import Asgi
from tests.support.clients.modern_requests import modern
from tests.support.clients.wire_client import Peer
from tests.support.servers.in_process import until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


def call(app: perdure.App, tool: str, **arguments: object) -> Asgi:
    body, headers = modern("tools/call", {"name": tool, "arguments": arguments}, id=tool)
    return Asgi(app, "POST", Peer(None), headers, body)  # type: ignore[arg-type]


async def test_an_answer_whose_head_is_on_its_way_when_the_server_stops_is_the_only_one(shop: ToolServer) -> None:
    """Its body follows. A second answer would be bytes that no client understands."""
    app = perdure.asgi(shop.server, store=MemoryStore(), settings=Settings())
    async with app.lifespan():
        answered, running = call(app, "remember"), call(app, "wait", gate="never")
        await answered.offers.wait()
        running.takes.set()
        await until(lambda: "waiting at never" in shop.seen)
        app.begin_stop()
        await running.task
        assert json.loads(running.body)["error"]["code"] == -31001
        answered.takes.set()
        await answered.task
        assert [message["type"] for message in answered.sent] == ["http.response.start", "http.response.body"]
        assert json.loads(answered.body)["id"] == "remember"
        assert "result" in json.loads(answered.body)


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("body", [b"", b"[]", b'"text"', b"null", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_answered_too(body: bytes, listens: bool) -> None:
    answer = json.loads(last_word(body, listens=listens))
    if listens:
        assert (answer["id"], answer["result"]["resultType"]) == (None, "complete")
    else:
        assert (answer["id"], answer["error"]["code"]) == ("", -31001)
        assert answer["error"]["data"] == unknown_error("None", None, "the server is stopping")[1]
