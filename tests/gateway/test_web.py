"""The HTTP lane against a server that does what it is told: every row of what can happen to a call."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from perdure._core.jsonrpc import JsonObject
from perdure._core.reconnect import Patience
from perdure.gateway import web
from perdure.gateway.lane import Lost, Opened, Reason, UpstreamUnavailable
from perdure.remote import link, stream
from tests.gateway.web_lanes import CLIENT, Lane, lane_to, upstream_at
from tests.support.servers.in_process import until
from tests.support.servers.scripted_http import ScriptedHttp, scripted_http

pytestmark = pytest.mark.anyio

KINDS: dict[str, dict[str, Any]] = {
    "sessions and ids": {},
    "sessions without ids": {"event_ids": False},
    "sessions and JSON": {"json": True},
    "primed": {"primes": True},
    "stateless": {"sessions": False, "standalone": False},
    "stateless and JSON": {"sessions": False, "standalone": False, "json": True},
    "2025-03-26": {"versions": ["2025-03-26"]},
}


# Opening


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_through_a_lane(kind: str) -> None:
    async with scripted_http(**KINDS[kind]) as server, lane_to(server.url, listens=True) as lane:
        assert await lane.text(1) == "done"
        assert (await lane.heard.end(1)) == {"failed": False, "content": [{"type": "text", "text": "done"}]}
        lane.call(2, ["fail", -5, "no"])
        assert await lane.heard.end(2) == {"failed": True, "code": -5, "message": "no"}
        assert server.runs == {"plain": 2}
        assert server.methods[:2] == ["initialize", "notifications/initialized"]
        assert server.methods.count("GET") == 1


async def test_the_handshake_has_the_clients_params_and_returns_the_upstreams_result() -> None:
    async with scripted_http(versions=["2025-06-18"]) as server, upstream_at(server.url) as upstream:
        lane = Lane(upstream)
        opened = await lane.open(CLIENT)
        assert (opened.version, opened.result["serverInfo"]["name"]) == ("2025-06-18", "scripted")
        assert server.methods == ["initialize"]
        await lane.aclose(ended=True)
        assert server.methods == ["initialize", "DELETE"]


REFUSALS: dict[str, tuple[dict[str, Any], Reason]] = {
    "400": ({"status": 400}, Reason.VERSION),
    "400 with an error": ({"status": 400, "error": [-32600, "no"]}, Reason.VERSION),
    "-32022": ({"status": 200, "error": [-32022, "no"]}, Reason.VERSION),
    "-32601": ({"status": 200, "error": [-32601, "no"]}, Reason.VERSION),
    "-32602": ({"status": 200, "error": [-32602, "no"]}, Reason.VERSION),
    "another error": ({"status": 200, "error": [-32000, "full"]}, Reason.NO_HANDSHAKE),
    "401": ({"status": 401}, Reason.UNAUTHORIZED),
    "403": ({"status": 403, "error": [-32600, "no"]}, Reason.FORBIDDEN),
    "404": ({"status": 404}, Reason.NOT_FOUND),
    "elsewhere": ({"status": 307, "headers": {"Location": "http://elsewhere.invalid/"}}, Reason.NOT_FOUND),
    "a page": ({"status": 200, "body": "<html>"}, Reason.NOT_MCP),
    "500": ({"status": 500}, Reason.SERVER_ERROR),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_a_handshake_that_is_refused_says_why(case: str) -> None:
    how, reason = REFUSALS[case]
    async with scripted_http() as server, upstream_at(server.url) as upstream:
        lane = Lane(upstream)
        server.refuse("initialize", **how, times=10)
        with pytest.raises(UpstreamUnavailable) as raised:
            await lane.open(CLIENT)
        await lane.aclose(ended=True)
        assert raised.value.reason is reason
        assert server.methods.count("initialize") <= 2  # one more where the library looks at a redirect


async def test_an_unknown_revision_is_refused_and_its_session_ended() -> None:
    async with scripted_http(versions=["2026-07-28"]) as server, upstream_at(server.url) as upstream:
        lane = Lane(upstream)
        with pytest.raises(UpstreamUnavailable, match="2026-07-28") as raised:
            await lane.open(CLIENT)
        assert raised.value.reason is Reason.VERSION
        assert server.methods == ["initialize", "DELETE"]
        await lane.aclose(ended=True)


async def test_an_upstream_that_is_away_is_tried_again_within_patience() -> None:
    async with scripted_http() as server:
        server.refuse("initialize", 0)
        server.refuse("initialize", 429, headers={"Retry-After": "0"})
        server.refuse("initialize", 503, headers={"Retry-After": "0"})
        server.refuse("initialize", 502)
        async with lane_to(server.url) as lane:
            assert await lane.text(1) == "done"
        port = int(server.url.split(":")[2].split("/")[0])
    async with upstream_at(server.url, patience=0.3) as upstream:
        lane = Lane(upstream)
        with pytest.raises(UpstreamUnavailable) as raised:
            await lane.open(CLIENT)
        await lane.aclose(ended=True)
        assert (raised.value.reason, raised.value.retry_after) == (Reason.UNREACHABLE, web.MAX_DELAY)
    async with upstream_at(server.url) as upstream:
        lane = Lane(upstream)
        opening = asyncio.create_task(lane.open(CLIENT))
        await asyncio.sleep(0.05)  # connections are refused meanwhile
        async with scripted_http(port=port):
            await opening
            assert await lane.text(1) == "done"
            await lane.aclose(ended=True)


async def test_a_lane_that_is_closed_while_it_opens() -> None:
    async with upstream_at("http://127.0.0.1:1/mcp") as upstream:
        lane = Lane(upstream)
        opening = asyncio.create_task(lane.open(CLIENT))
        await anyio.wait_all_tasks_blocked()
        await lane.aclose(ended=True)
        with pytest.raises(UpstreamUnavailable, match="closed"):
            await opening


# Messages of a call


async def test_what_comes_on_the_stream_of_a_call_is_the_calls() -> None:
    async with scripted_http() as server, lane_to(server.url, listens=True) as lane:
        lane.call("a", ["progress", 1], ["log", "hello"], ["progress", 0.5], token="mine")
        assert await lane.heard.text("a") == "done"
        assert lane.heard.told == [
            ("notifications/progress", {"progressToken": "mine", "progress": 1, "total": 100}, "a"),
            ("notifications/message", {"level": "info", "data": "hello"}, "a"),
            ("notifications/progress", {"progressToken": "mine", "progress": 0.5, "total": 100}, "a"),
        ]
        server.notify("notifications/tools/list_changed")
        await until(lambda: lane.heard.told[-1] == ("notifications/tools/list_changed", None, None))


async def test_a_request_without_a_token_has_none_on_the_wire_and_ids_are_the_lanes() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(7, ["progress", 1], ["log", "x"])
        assert await lane.heard.text(7) == "done"
        assert [method for method, _, _ in lane.heard.told] == ["notifications/message"]
        wire = {state["id"] for state in lane.heard.positions[7]}
        assert len(wire) == 1
        assert 7 not in wire


async def test_progress_on_the_standalone_stream_belongs_to_its_request() -> None:
    """Servers that answer with JSON have no other place for it."""
    async with scripted_http(json=True) as server, lane_to(server.url, listens=True) as lane:
        lane.call(1, ["progress", 3], ["wait", "g"], token=5)
        await until(lambda: lane.heard.told)
        assert lane.heard.told == [("notifications/progress", {"progressToken": 5, "progress": 3, "total": 100}, 1)]
        server.open("g")
        assert await lane.heard.text(1) == "done"


async def test_a_result_is_the_upstreams_own_text_and_answers_to_others_are_dropped() -> None:
    result = '{"n":1e400,"n":12345678901234567890.10,"s":"\\ud800 é"}'
    usual, odd = f'{{"jsonrpc":"2.0","id":$ID,"result":{result}}}', f'{{"x":1, "result": {result}, "id" : $ID}}'
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, ["answer_of", "foreign"], ["answer", usual])
        lane.call(2, ["answer", odd])
        await until(lambda: len(lane.heard.texts) == 2)
        assert set(lane.heard.texts.values()) == {result.encode()}


async def test_half_an_emoji_in_a_notification_becomes_a_character_that_can_be_stored() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        assert await lane.text(1, ["log", "a\ud83d"]) == "done"
        assert [params["data"] for _, params, _ in lane.heard.told] == ["a?"]


async def test_an_array_of_messages_is_taken_apart() -> None:
    batch = '[{"jsonrpc":"2.0","method":"notifications/x"},{"jsonrpc":"2.0","method":"notifications/y"},7]'
    good = batch.replace(",7", "")
    async with scripted_http() as server, lane_to(server.url) as lane:
        assert await lane.text(1, ["event", good], ["event", batch], ["event", "no JSON"]) == "done"
        assert lane.heard.told == [("notifications/x", None, 1), ("notifications/y", None, 1)]


class Slow:
    """A store that has no room."""

    def __init__(self) -> None:
        self.has_room = asyncio.Event()

    async def wait_for_room(self) -> None:
        await self.has_room.wait()


async def test_a_stream_is_not_read_on_while_the_store_has_no_room() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        slow = lane.heard.flow = Slow()
        lane.call(1, ["log", "a"], ["log", "b"])
        await until(lambda: lane.heard.told)
        await anyio.wait_all_tasks_blocked()
        assert (len(lane.heard.told), lane.heard.ended) == (1, set())
        slow.has_room.set()
        assert await lane.heard.text(1) == "done"
        assert await lane.text(2) == "done"


# Asks


async def test_an_ask_is_answered_in_its_session() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call("c", ["ask", "elicitation/create", {"message": "sure?"}])
        await until(lambda: lane.heard.asks)
        ((ask, asked),) = lane.heard.asks.items()
        assert asked == ("elicitation/create", {"message": "sure?"}, "c")
        lane.reply("unknown", {"result": {}})
        lane.reply(ask, {"result": {"action": "accept"}, "id": 99})
        found = await lane.heard.end("c")
        assert isinstance(found, dict)
        assert found["structuredContent"] == {"replies": [{"id": 1, "result": {"action": "accept"}}]}
        lane.reply(ask, {"result": {}})
        assert len(server.replies) == 1


async def test_an_ask_on_the_standalone_stream_and_its_withdrawal() -> None:
    async with scripted_http() as server, lane_to(server.url, listens=True) as lane:
        await until(lambda: "GET" in server.methods)
        server.ask("q", "roots/list", {})
        server.ask("q", "roots/list", {})  # replayed
        await until(lambda: lane.heard.asks)
        ((ask, asked),) = lane.heard.asks.items()
        assert asked == ("roots/list", {}, None)
        server.notify("notifications/cancelled", {"requestId": "q", "reason": "too late"})
        await until(lambda: lane.heard.withdrawn)
        assert lane.heard.withdrawn == {ask: "too late"}
        lane.reply(ask, {"result": {}})
        assert await lane.text(1) == "done"
        assert server.replies == []


async def test_a_ping_of_the_upstream_is_answered_here() -> None:
    async with scripted_http() as server, lane_to(server.url, listens=True) as lane:
        assert await lane.text(1, ["ask", "ping", {}]) == "done"
        assert lane.heard.asks == {}
        assert server.replies == [{"jsonrpc": "2.0", "id": 1, "result": {}}]


async def test_asks_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_ASKS", 2)
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, *(["ask_id", name, "roots/list", {}] for name in "abc"), ["wait", "g"])
        await until(lambda: server.replies)
        assert (server.replies[0]["id"], server.replies[0]["error"]["code"], len(lane.heard.asks)) == ("c", -31004, 2)
        server.open("g")
        assert await lane.heard.text(1) == "done"
        assert set(lane.heard.withdrawn.values()) == {"its call has its answer"}


# Positions, and following


async def test_positions_are_reported_at_once_and_then_a_few_times_a_second() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, ["log", "first"], *(["log", str(n)] for n in range(50)), ["wait", "g"], token="t")
        await until(lambda: len(lane.heard.told) == 51)
        first = lane.heard.positions[1]
        assert [state["position"] for state in first] == ["call1-1"]
        assert first[0].keys() == {"session", "position", "id"}
        assert first[0]["session"] == server.heard[1][0]
        await until(lambda: len(lane.heard.positions[1]) == 2)
        assert lane.heard.positions[1][1]["position"] == "call1-51"
        server.open("g")
        assert await lane.heard.text(1) == "done"
        assert len(lane.heard.positions[1]) == 2


async def test_a_position_never_passes_an_open_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "POSITION_PAUSE", 0.01)
    steps = (["log", "a"], ["ask", "roots/list", {}], ["log", "b"], ["wait", "g"])
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, *steps[:1], ["ask_id", "x", "roots/list", {}], *steps[1:])
        await until(lambda: len(lane.heard.asks) == 2)
        await asyncio.sleep(0.05)
        assert lane.heard.positions[1][-1]["position"] == "call1-1"
        first, second = lane.heard.asks
        lane.reply(second, {"result": {}})
        await until(lambda: lane.heard.told[-1][1] == {"level": "info", "data": "b"})
        await asyncio.sleep(0.05)
        assert lane.heard.positions[1][-1]["position"] == "call1-1"
        lane.reply(first, {"result": {}})
        await until(lambda: lane.heard.positions[1][-1]["position"] == "call1-4")
        server.open("g")
        assert await lane.heard.text(1) == "done"


async def test_a_lost_connection_with_a_position_is_followed_without_a_second_run() -> None:
    steps = (["progress", 1], ["cut"], ["progress", 2], ["wait", "g"], ["progress", 3])
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, *steps, token=1)
        await until(lambda: "GET call1-1" in server.methods)
        server.open("g")
        assert await lane.heard.text(1) == "done"
        assert lane.heard.progress(1) == [1, 2, 3]
        assert server.runs == {"plain": 1}


async def test_a_call_whose_upstream_closes_early_is_polled() -> None:
    """SEP-1699: the server closes, and its client comes back for the rest."""
    async with scripted_http(primes=True) as server, lane_to(server.url) as lane:
        assert await lane.text(1, ["close"], ["log", "x"], ["close"]) == "done"
        assert server.runs == {"plain": 1}


@pytest.mark.parametrize("comments", [0.0, 0.02])
async def test_a_resume_that_falls_silent_is_asked_again(monkeypatch: pytest.MonkeyPatch, comments: float) -> None:
    monkeypatch.setattr(stream, "FIRST_SILENCE", 0.05)
    async with scripted_http(falls_silent=True, comments=comments) as server, lane_to(server.url) as lane:
        lane.call(1, ["progress", 1], ["cut"], ["wait", "g"], ["progress", 2], token=1)
        await until(lambda: server.methods.count("GET call1-1") == 3)
        server.open("g")
        assert await lane.heard.text(1) == "done"
        assert (lane.heard.progress(1), server.runs) == ([1, 2], {"plain": 1})


async def test_an_ask_that_is_replayed_is_not_repeated() -> None:
    ask = '{"jsonrpc":"2.0","id":5,"method":"roots/list","params":{}}'
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, ["log", "a"], ["event", ask], ["cut"], ["event", ask], ["wait", "g"])
        await until(lambda: "GET call1-1" in server.methods)
        server.open("g")
        assert await lane.heard.text(1) == "done"
        assert len(lane.heard.asks) == 1


@pytest.mark.parametrize("is_new_session", [False, True])
async def test_a_later_process_follows_a_call(is_new_session: bool) -> None:
    """Also where the front's session goes on in another session of the upstream by now."""
    async with scripted_http() as server, upstream_at(server.url) as upstream, asyncio.timeout(30):
        before, after = Lane(upstream), Lane(upstream)
        await before.open(CLIENT)
        before.notify("notifications/initialized", None)
        steps = (["progress", 1], ["ask", "roots/list", {}], ["wait", "g"], ["progress", 2])
        before.call(1, *steps, token="t")
        await until(lambda: before.heard.asks)
        state, session = before.heard.positions[1][-1], before.state
        await before.aclose(ended=False)
        assert "DELETE" not in server.methods
        if is_new_session:
            await after.open(CLIENT)
        else:
            assert (await after.open(CLIENT, session)).version == "2025-11-25"
            assert server.handshakes == 1
        after.follow("again", "tools/call", {"name": "plain", "_meta": {"progressToken": "u"}}, state)
        await until(lambda: after.heard.asks)  # the upstream repeats it
        ((ask, asked),) = after.heard.asks.items()
        assert asked == ("roots/list", {}, "again")
        after.reply(ask, {"result": {"roots": []}})
        server.open("g")
        assert await after.heard.text("again") == "done"
        assert after.heard.told == [
            ("notifications/progress", {"progressToken": "u", "progress": 2, "total": 100}, "again")
        ]
        assert server.runs == {"plain": 1}
        await after.aclose(ended=True)


async def test_a_call_that_cannot_be_followed_is_lost_and_may_have_run() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, ["log", "x"])
        assert await lane.heard.text(1) == "done"
        good = lane.heard.positions[1][-1]
        lane.follow("no session", "tools/call", None, {**good, "session": "gone"})
        lane.follow(
            "no position", "tools/call", None, {name: value for name, value in good.items() if name != "position"}
        )
        lane.follow("bad position", "tools/call", None, {**good, "position": "a\nb"})
        server.set(refuses_positions=True)
        lane.follow("refused", "tools/call", None, good)
        for key in ("no session", "no position", "bad position", "refused"):
            assert (await lane.heard.loss(key)).ran
        assert "HTTP 404" in lane.heard.lost["no session"].why
        assert "HTTP 400" in lane.heard.lost["refused"].why
        assert server.handshakes == 1
        server.set(refuses_positions=False)
        server.lose_sessions()
        lane.follow("in a session that is lost", "tools/call", None, good)
        assert (await lane.heard.loss("in a session that is lost")).why == "its session is gone"
        assert server.handshakes == 2


# Requests without an answer


LOSSES: dict[str, tuple[dict[str, Any], Lost | Reason, Lost | Reason]] = {
    "a cut": ({"status": 0}, Lost(ran=True, why=""), Lost(ran=True, why="")),
    "502": ({"status": 502}, Lost(ran=True, why=""), Lost(ran=True, why="")),
    "503": ({"status": 503}, Lost(ran=True, why=""), Lost(ran=True, why="")),
    "504": ({"status": 504}, Lost(ran=True, why=""), Lost(ran=True, why="")),
    "500": ({"status": 500}, Lost(ran=True, why=""), Reason.SERVER_ERROR),
    "202": ({"status": 202}, Lost(ran=True, why=""), Reason.NOT_MCP),
    "401": ({"status": 401}, Reason.UNAUTHORIZED, Reason.UNAUTHORIZED),
    "401 with words": ({"status": 401, "error": [-1, "who?"]}, Reason.UNAUTHORIZED, Reason.UNAUTHORIZED),
    "403": ({"status": 403}, Reason.FORBIDDEN, Reason.FORBIDDEN),
    "405": ({"status": 405}, Reason.NOT_FOUND, Reason.NOT_FOUND),
    "413": ({"status": 413}, Reason.NOT_MCP, Reason.NOT_MCP),
}


@pytest.mark.parametrize("case", LOSSES)
async def test_a_request_without_an_answer_has_one_loss(case: str) -> None:
    how, of_call, of_read = LOSSES[case]
    async with scripted_http() as server, lane_to(server.url) as lane:
        server.refuse("tools/call", **how)
        server.refuse("resources/read", **how)
        lane.call("call")
        lane.request("read", "resources/read", {"uri": "x:y"})
        for key, expected in (("call", of_call), ("read", of_read)):
            lost = await lane.heard.loss(key)
            assert lost.ran == isinstance(expected, Lost)
            assert lost.why
            if isinstance(expected, Reason):
                assert lost.unavailable is not None
                assert lost.unavailable.reason is expected
        assert await lane.text("next") == "done"
        assert server.runs == {"plain": 1}


async def test_a_stream_that_ends_without_a_position_and_one_that_breaks() -> None:
    async with scripted_http(event_ids=False) as server, lane_to(server.url) as lane:
        for key, steps in enumerate(([["cut"]], [["begin"], ["cut"]], [["log", "x"], ["cut"]], [["close"]])):
            lane.call(key, *steps)
            assert (await lane.heard.loss(key)).ran
        assert server.runs == {"plain": 4}
        assert server.methods.count("GET") == 0


async def test_an_ask_of_a_lost_call_is_withdrawn() -> None:
    async with scripted_http(event_ids=False) as server, lane_to(server.url) as lane:
        lane.call(1, ["ask_id", 1, "roots/list", {}], ["wait", "g"], ["cut"])
        await until(lambda: lane.heard.asks)
        server.open("g")
        assert (await lane.heard.loss(1)).ran
        assert list(lane.heard.withdrawn) == list(lane.heard.asks)


async def test_what_was_not_taken_is_sent_again_within_patience_then_lost() -> None:
    async with scripted_http() as server, lane_to(server.url, patience=0.3) as lane:
        server.refuse("tools/call", 429)
        server.refuse("tools/call", 503, headers={"Retry-After": "0"})
        assert await lane.text(1) == "done"
        server.refuse("tools/call", 429, times=1_000)
        lane.call(2)
        lost = await lane.heard.loss(2)
        assert (lost.ran, lost.unavailable and lost.unavailable.reason) == (False, Reason.UNREACHABLE)
        assert server.runs == {"plain": 1}


async def test_an_upstream_that_is_away_for_a_while() -> None:
    async with scripted_http(sessions=False) as server, lane_to(server.url) as lane:
        assert await lane.text(1) == "done"
        port = int(server.url.split(":")[2].split("/")[0])
        async with upstream_at(server.url, patience=0.3) as brief:
            impatient = Lane(brief)
            await impatient.open(CLIENT)
            await _stop(server)
            impatient.call("brief")
            lost = await impatient.heard.loss("brief")
            assert (lost.ran, lost.unavailable and lost.unavailable.reason) == (False, Reason.UNREACHABLE)
            await impatient.aclose(ended=False)
        lane.call(2)
        await anyio.wait_all_tasks_blocked()
        async with scripted_http(sessions=False, port=port) as again:
            assert await lane.heard.text(2) == "done"
            assert again.runs == {"plain": 1}


async def _stop(server: ScriptedHttp) -> None:
    assert server.listening is not None
    server.listening.close()
    server.cut()
    await server.listening.wait_closed()


async def test_an_answer_that_is_too_large_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_MESSAGE_BYTES", 2_000)
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, ["log", "x" * 4_000])
        lost = await lane.heard.loss(1)
        assert (lost.ran, lost.why) == (True, "an event exceeds the limit of 2000 bytes")
        assert await lane.text(2) == "done"


# Sessions that are gone


@pytest.mark.parametrize("by", [404, 400, 200, 503])
async def test_a_session_that_is_gone_is_renewed_once_for_all_who_noticed(by: int) -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        assert await lane.text("first") == "done"
        server.lose_sessions(by=by)

        async def bring_up(opened: Opened) -> None:
            assert opened.result["serverInfo"]["name"] == "scripted"
            lane.notify("notifications/initialized", None)
            lane.request("level", "logging/setLevel", {"level": "warning"})
            await lane.heard.end("level")
            lane.request("subscribe", "resources/subscribe", {"uri": "x:y"})
            await lane.heard.end("subscribe")

        lane.heard.bring_up = bring_up
        for key in range(8):
            lane.call(key)
        for key in range(8):
            assert await lane.heard.text(key) == "done"
        assert (server.handshakes, len(lane.heard.renewed), server.runs) == (2, 1, {"plain": 9})
        assert (server.level, server.subscribed) == ("warning", ["x:y"])
        new = lane.state["session"]
        brought = [method for session, method in server.heard if session == new][:4]
        assert brought == ["notifications/initialized", "logging/setLevel", "resources/subscribe", "tools/call"]
        assert server.methods.count("ping") == (0 if by == 404 else 1)


async def test_an_error_that_only_speaks_of_a_session_is_passed_on_and_checked_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        for key in range(3):
            lane.call(key, ["fail", -32000, "Your login session has expired"])
            assert await lane.heard.end(key) == {
                "failed": True,
                "code": -32000,
                "message": "Your login session has expired",
            }
        assert (server.methods.count("ping"), server.handshakes) == (1, 1)
        monkeypatch.setattr(link, "CHECK_PAUSE", 0.0)
        server.lose_sessions(by=400)
        assert await lane.text("gone after all") == "done"
        assert (server.methods.count("ping"), server.handshakes) == (2, 2)


@pytest.mark.parametrize("said", [{}, {"error": (-32600, "Session not found")}])
async def test_an_upstream_that_loses_every_session_at_once_is_not_asked_for_ever(said: JsonObject) -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        server.refuse("tools/call", 404, times=2, **said)
        lane.call(1)
        lost = await lane.heard.loss(1)
        assert (lost.ran, lost.unavailable and lost.unavailable.reason) == (False, Reason.SERVER_ERROR)
        assert server.handshakes == 2


async def test_a_running_call_is_lost_with_its_session_and_the_other_is_sent_again() -> None:
    async with scripted_http() as server, lane_to(server.url, listens=True) as lane:
        lane.call("running", ["log", "x"], ["ask", "roots/list", {}])
        await until(lambda: lane.heard.asks)
        server.ask("s", "roots/list", {})
        await until(lambda: len(lane.heard.asks) == 2)
        server.lose_sessions()
        assert await lane.text("other") == "done"
        lost = await lane.heard.loss("running")
        assert (lost.ran, lost.why) == (True, "its session is gone")
        assert lane.heard.withdrawn.keys() == lane.heard.asks.keys()
        assert server.handshakes == 2


async def test_a_call_whose_connection_outlives_its_session_is_read_to_its_end() -> None:
    """Another machine of the upstream may have it, behind a balancer that sends requests anywhere."""
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call("running", ["log", "x"], ["wait", "g"])
        await until(lambda: lane.heard.told)
        server.lose_sessions(cuts=False)
        assert await lane.text("other") == "done"
        server.open("g")
        assert await lane.heard.text("running") == "done"


async def test_requests_that_come_during_a_renewal_wait_until_the_session_is_brought_up() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        assert await lane.text("first") == "done"
        lane.heard.may_renew.clear()

        async def bring_up(opened: Opened) -> None:
            lane.notify("notifications/initialized", None)
            lane.request("list", "tools/list", None)
            await lane.heard.end("list")

        lane.heard.bring_up = bring_up
        server.lose_sessions()
        lane.notify("notifications/roots/list_changed", None)  # it finds the session gone
        await until(lambda: lane.heard.gone)
        lane.call("waits")
        lane.notify("notifications/x", None)
        await anyio.wait_all_tasks_blocked()
        lane.heard.may_renew.set()
        assert await lane.heard.text("waits") == "done"
        await until(lambda: server.methods[-1] == "notifications/x" or server.methods[-2] == "notifications/x")
        new = [method for session, method in server.heard if session == lane.state["session"]]
        assert new[:3] == ["notifications/initialized", "tools/list", "notifications/roots/list_changed"]
        assert sorted(new[3:]) == ["notifications/x", "tools/call"]


async def test_another_node_has_renewed_the_session_already() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane, lane_to(server.url) as other:
        await until(lambda: lane.state["initialized"] and other.state["initialized"])
        server._sessions.pop(lane.state["session"])
        lane.heard.elsewhere = other.state
        assert await lane.text(1) == "done"
        assert (server.handshakes, lane.heard.renewed, lane.state) == (2, [], other.state)


async def test_the_session_that_another_node_has_begun_is_gone_as_well() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane, lane_to(server.url) as other:
        await until(lambda: lane.state["initialized"] and other.state["initialized"])
        lane.heard.elsewhere = other.state
        server.lose_sessions()
        assert await lane.text(1) == "done"
        assert (server.handshakes, len(lane.heard.renewed)) == (3, 1)


async def test_an_upstream_that_is_restarted_again_during_a_renewal() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        port = int(server.url.split(":")[2].split("/")[0])

        async def stop(opened: Opened) -> None:
            lane.heard.bring_up = None
            await _stop(server)

        lane.heard.bring_up = stop
        server.lose_sessions()
        lane.call(1)
        await until(lambda: lane.heard.renewed)
        async with scripted_http(port=port):
            assert await lane.heard.text(1) == "done"
        assert len(lane.heard.renewed) == 2


@pytest.mark.parametrize("case", ["401", "400", "unwanted"])
async def test_a_renewal_that_is_refused_is_no_run_and_the_next_one_may_work(case: str) -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        assert await lane.text("first") == "done"

        async def refuse(opened: Opened) -> None:
            raise UpstreamUnavailable(Reason.DIED, "the session ends with it")

        if case == "unwanted":
            lane.heard.bring_up = refuse
        else:
            server.refuse("initialize", int(case))
        server.lose_sessions()
        lane.call(1)
        lost = await lane.heard.loss(1)
        assert not lost.ran
        assert lost.unavailable is not None
        expected = {"401": Reason.UNAUTHORIZED, "400": Reason.VERSION, "unwanted": Reason.DIED}[case]
        assert lost.unavailable.reason is expected
        lane.heard.bring_up = None
        assert await lane.text(2) == "done"
        assert server.runs == {"plain": 2}


# The standalone stream


async def test_the_standalone_stream_is_read_only_where_it_is_wanted() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        assert await lane.text(1) == "done"
        assert "GET" not in server.methods
        lane.listen(True)
        lane.listen(True)
        await until(lambda: "GET" in server.methods)
        server.notify("notifications/a")
        await until(lambda: lane.heard.told == [("notifications/a", None, None)])
        lane.listen(False)
        await until(lambda: not any(one.standalone.readers for one in server._sessions.values()))
        server.notify("notifications/b")
        lane.listen(True)
        await until(lambda: lane.heard.told[-1] == ("notifications/b", None, None))
        assert server.methods[-1] == "GET all0-1"


async def test_a_session_that_is_gone_is_noticed_by_the_standalone_stream_too() -> None:
    async with scripted_http() as server, lane_to(server.url, listens=True) as lane:
        assert await lane.text(1) == "done"
        server.lose_sessions()
        await until(lambda: lane.heard.renewed and (lane.state["session"], "GET") in server.heard)
        server.notify("notifications/a")
        await until(lambda: lane.heard.told == [("notifications/a", None, None)])


async def test_a_server_that_answers_404_to_every_get_keeps_its_session() -> None:
    async with scripted_http() as server:
        server.refuse("GET", 404, times=100)
        async with lane_to(server.url, listens=True) as lane:
            assert await lane.text(1) == "done"
            assert (server.handshakes, server.methods.count("GET")) == (1, 1)


async def test_an_adopted_session_that_is_gone_is_renewed_by_its_listener() -> None:
    """The gateway and its upstream were restarted together, and the client only listens."""
    async with scripted_http() as server, upstream_at(server.url) as upstream, asyncio.timeout(30):
        before, after = Lane(upstream), Lane(upstream, listens=True)
        await before.open(CLIENT)
        before.notify("notifications/initialized", None)
        assert await before.text(1) == "done"
        await before.aclose(ended=False)
        server.lose_sessions()
        await after.open(CLIENT, before.state)
        await until(lambda: after.heard.renewed)
        await after.aclose(ended=True)


@pytest.mark.parametrize(
    "state",
    [
        {"session": 7, "result": {"protocolVersion": "2025-11-25"}, "initialized": True},
        {"session": "a", "result": {"protocolVersion": "1999-01-01"}, "initialized": True},
    ],
)
async def test_a_state_that_cannot_be_read_is_no_state(state: dict[str, Any]) -> None:
    async with scripted_http() as server, upstream_at(server.url) as upstream:
        lane = Lane(upstream)
        assert (await lane.open(CLIENT, state)).is_new
        assert server.handshakes == 1
        await lane.aclose(ended=True)


# Cancelling, order, closing


async def test_a_cancelled_request_is_cancelled_upstream_and_not_reported() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, ["log", "x"], ["ask", "roots/list", {}])
        await until(lambda: lane.heard.asks)
        wire_id = lane.heard.positions[1][0]["id"]
        lane.cancel(1, {"requestId": "the front's", "reason": "enough"})
        lane.cancel(1, None)
        lane.cancel("unknown", None)
        await until(lambda: server.cancelled)
        assert server.cancelled == [wire_id]
        assert await lane.text(2) == "done"
        assert lane.heard.ended == {2}


async def test_a_request_that_is_cancelled_before_it_left_is_not_sent() -> None:
    async with scripted_http() as server, lane_to(server.url, initialized=False) as lane:
        server.refuse("notifications/initialized", 503, headers={"Retry-After": "1"})
        lane.notify("notifications/initialized", None)
        lane.call(1)
        await until(lambda: "notifications/initialized" in server.methods)
        lane.cancel(1, None)
        assert await lane.text(2) == "done"
        assert (server.runs, server.cancelled) == ({"plain": 1}, [])


async def test_an_ask_of_a_cancelled_call_is_refused_at_once() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        lane.call(1, ["log", "x"], ["wait", "g"])
        await until(lambda: lane.heard.told)
        call = next(iter(server._calls.values()))
        server.refuse("notifications/cancelled", 503, headers={"Retry-After": "1"})
        lane.cancel(1, None)
        server._emit(call.stream, {"id": 77, "method": "roots/list"})
        await until(lambda: server.replies)
        assert server.replies[0]["error"]["code"] == -32800


async def test_a_message_waits_for_the_notifications_before_it() -> None:
    async with scripted_http() as server, lane_to(server.url, initialized=False, listens=True) as lane:
        server.refuse("notifications/initialized", 503, headers={"Retry-After": "0"})
        lane.notify("notifications/initialized", None)
        for n in range(3):
            lane.notify("notifications/x", {"n": n})
        lane.call(1)
        assert await lane.heard.text(1) == "done"
        first = "notifications/initialized"
        assert server.methods == ["initialize", first, first, "GET", *["notifications/x"] * 3, "tools/call"]


async def test_a_lane_that_rests_keeps_its_session_and_one_that_ends_does_not() -> None:
    async with scripted_http() as server, upstream_at(server.url) as upstream:
        resting, ending = Lane(upstream), Lane(upstream)
        for lane in (resting, ending):
            await lane.open(CLIENT)
            lane.notify("notifications/initialized", None)
            lane.call("runs", ["log", "x"], ["never"])
        await until(lambda: server.runs == {"plain": 2})
        await resting.aclose(ended=False)
        assert "DELETE" not in server.methods
        await ending.aclose(ended=True)
        assert server.heard[-1] == (ending.state["session"], "DELETE")
        assert resting.heard.ended == ending.heard.ended == set()
        assert server.cancelled == []


async def test_connections_are_used_again() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        for key in range(20):
            assert await lane.text(key) == "done"
        assert server.connections == 1


# Credentials and headers


async def test_only_the_configured_headers_go_upstream() -> None:
    headers = {"X-Tenant": "t1", "X-Api-Key": "k"}
    async with (
        scripted_http(token="t") as server,
        lane_to(server.url, headers=headers, token=lambda: "t") as lane,
    ):
        assert await lane.text(1) == "done"
        sent = server.headers[-1]
        assert (sent["x-tenant"], sent["x-api-key"], sent["authorization"]) == ("t1", "k", "Bearer t")
        known = {"host", "user-agent", "accept", "accept-encoding", "connection", "content-type", "content-length"}
        known |= {"mcp-session-id", "mcp-protocol-version", "x-tenant", "x-api-key", "authorization"}
        assert sent.keys() == known


async def test_a_token_that_is_refused_is_read_again_once() -> None:
    tokens = ["t1"]
    async with (
        scripted_http(token="t1") as server,
        lane_to(server.url, token=lambda: tokens[-1]) as lane,
    ):
        assert await lane.text(1) == "done"
        server.set(token="t2")
        tokens.append("t2")
        assert await lane.text(2) == "done"
        server.set(token="t3")
        lane.call(3)
        lost = await lane.heard.loss(3)
        assert (lost.ran, lost.unavailable and lost.unavailable.reason) == (False, Reason.UNAUTHORIZED)
        assert "t2" not in str(lost.unavailable)
        tokens.append("t3")
        assert await lane.text(4) == "done"
        assert server.runs == {"plain": 3}


async def test_a_running_call_is_followed_when_its_token_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "FOLLOWING", Patience(first_delay=0.01, max_delay=0.02))
    tokens = ["t1"]
    async with scripted_http(token="t1") as server, lane_to(server.url, token=lambda: tokens[-1]) as lane:
        lane.call(1, ["log", "x"], ["wait", "g"], ["cut"], ["log", "y"])
        await until(lambda: lane.heard.told)
        server.set(token="t2")
        server.open("g")
        await until(lambda: server.methods.count("GET call1-1") == 3)
        tokens.append("t2")
        assert await lane.heard.text(1) == "done"
        assert server.runs == {"plain": 1}


async def test_a_receiver_that_fails_at_a_message_does_not_make_its_call_one_that_did_not_run() -> None:
    def fail(*_: object, key: object) -> None:
        raise LookupError("unforeseen")

    async with scripted_http(event_ids=False) as server, lane_to(server.url) as lane:
        lane.heard.on_notification = fail  # type: ignore[assignment, method-assign]
        lane.call(1, ["log", "x"])
        lost = await lane.heard.loss(1)
        assert (lost.ran, lost.why, server.runs) == (True, "LookupError: unforeseen", {"plain": 1})


async def test_a_lane_may_be_closed_from_within_its_renewal() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        assert await lane.text(1) == "done"
        closed = asyncio.Event()

        async def close(opened: Opened) -> None:
            await lane.aclose(ended=False)
            closed.set()

        lane.heard.bring_up = close
        server.lose_sessions()
        lane.call(2)
        await closed.wait()
        assert lane.heard.ended == {1}


async def test_a_redirect_within_the_origin_is_followed() -> None:
    async with scripted_http() as server, lane_to(server.url) as lane:
        server.refuse("tools/call", 307, times=2, headers={"Location": "/mcp"})
        assert await lane.text(1) == "done"
