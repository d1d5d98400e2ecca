"""A session in front of the official TypeScript server without its session era (`legacy: 'reject'`)."""

from __future__ import annotations

import pytest

from tests.gateway.modern_lanes import Front, children_of, http_lane, pipe_lane, text
from tests.gateway.typescript_upstreams import typescript_program, typescript_server
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio


async def tells_a_session_all(front: Front) -> None:
    """The story of each transport."""
    heard = front.heard
    assert front.opened.result["serverInfo"] == {"name": "bakery", "version": "2"}
    tools = await front.ask("tools/list")
    assert tools.keys() == {"tools"}
    assert {tool["name"] for tool in tools["tools"]} == {"bake", "order", "restock", "wait", "look"}
    key = front.call("bake", "tok", loaves=2)
    assert await heard.answer(key) == {"content": [{"type": "text", "text": "2 loaves"}]}
    assert [params for method, params, of in heard.notifications if of == key] == [
        {"progressToken": "tok", "progress": progress, "total": 2} for progress in (1, 2)
    ]
    key = front.call("order")
    await until(lambda: heard.asks)
    [(ask, (method, params, of))] = heard.asks.items()
    assert (method, (params or {})["message"], of) == ("elicitation/create", "Which loaf?", key)
    front.lane.reply(ask, {"result": {"action": "accept", "content": {"loaf": "rye"}}})
    assert text(await heard.answer(key)) == "a rye loaf"
    assert (await front.ask("resources/read", uri="stock://flour")).keys() == {"contents"}
    assert await front.ask("resources/subscribe", uri="stock://flour") == {}
    await heard.answer(front.call("restock", uri="stock://flour"))
    await heard.answer(front.call("restock", uri="stock://salt"))
    await until(lambda: len(heard.of("notifications/tools/list_changed")) == 2)
    assert heard.of("notifications/resources/updated") == [{"uri": "stock://flour"}]
    assert (await front.ask("shop/open"))["code"] == -32601
    key = front.call("wait")

    async def has(events: str) -> bool:
        return text(await heard.answer(front.call("look"))) == events

    await until(lambda: has("waiting"))
    front.lane.cancel(key, None)
    await until(lambda: has("waiting,cancelled"))
    assert key not in heard.answers


async def test_over_http() -> None:
    """G40."""
    async with typescript_server() as url, http_lane(url) as front:
        await tells_a_session_all(front)


async def test_over_a_pipe() -> None:
    """G40."""
    async with children_of(typescript_program()) as children, pipe_lane(children) as front:
        await tells_a_session_all(front)
