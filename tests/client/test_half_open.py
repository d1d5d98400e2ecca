"""The other end has vanished in silence: a server that kept its connections alive, and stops, is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from starlette.responses import Response

import perdure
from perdure.remote import endpoint
from perdure.remote.endpoint import Heartbeat
from tests.client.conftest import Inbox, Progress, numbers, text
from tests.client.odd_server import Odd, event, flow, good, odd_client
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats of a twentieth of a second count, so that a test need not take minutes."""
    monkeypatch.setattr(endpoint, "LEAST_BEAT", 0.05)


def test_three_beats_may_be_missed_and_padding_is_no_beat() -> None:
    heard = Heartbeat()
    assert heard.limit is None
    heard.heard(0.01)
    assert heard.limit is None
    for beat in (20.0, 30.0, 29.0):
        heard.heard(beat)
    assert heard.limit == 90.0
    heard.missed()
    assert heard.limit is None


async def test_calls_and_the_standalone_stream_are_resumed_from_where_they_were(quick: None) -> None:
    """The proxy stops forwarding and closes nothing; new connections get through once it forwards again."""
    shop, progress, inbox = ToolServer(), Progress(), Inbox()
    async with (
        serve(shop.server, retry=0.02, keepalive_interval=0.2) as site,
        cutting_proxy(site.port) as proxy,
        perdure.connect(proxy.url, message_handler=inbox) as client,
        asyncio.TaskGroup() as group,
    ):
        call = group.create_task(client.call_tool("count", {"n": 6, "gate": "g", "pauses": [3]}, None, progress))
        await until(partial(progress.has, 3))
        await proxy.passing(b"\n:", times=3).passed()
        accepted = proxy.accepted
        proxy.hold()
        shop.open("g/3")
        await until(lambda: proxy.accepted >= accepted + 2)
        proxy.release()
        assert text(await call) == "counted to 6"
        await client.call_tool("announce", {"n": 1})
        await until(lambda: inbox.notices == ["notice://1"])
    assert progress.seen == numbers(6)


@pytest.mark.parametrize(
    ("position", "comments", "pause"),
    [
        pytest.param(b"id: a\ndata:\n\n", 0, 0, id="a server that keeps nothing alive"),
        pytest.param(b"id: a\ndata:\n\n", 3, 0.01, id="a server that sends padding"),
        pytest.param(b"", 4, 0.1, id="a call without a position: its outcome would be unknown"),
    ],
)
async def test_what_has_no_beat_or_cannot_be_resumed_is_left_alone(
    quick: None, position: bytes, comments: int, pause: float
) -> None:
    """A call may be silent for as long as it likes."""

    def slow(key: object) -> Response:
        async def frames() -> AsyncIterator[bytes]:
            yield position
            for _ in range(comments):
                yield b": comment\n\n"
                await asyncio.sleep(pause)
            await asyncio.sleep(0.6)
            yield event(good(key))

        return flow(frames())

    odd = Odd(slow=slow)
    async with odd_client(odd) as client:
        assert text(await client.call_tool("slow")) == "fine"
    assert not [what for what in odd.heard if what[1] == "GET"][1:]  # but for the one that is refused
