"""The bridge passes every message on, both ways and in order, and answers each request once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from perdure._core.lines import MAX_LINE_BYTES
from perdure.stdio.host_side import MAX_RUNNING
from tests.stdio.served_hosts import question, reply, serving_host
from tests.stdio.stdio_bridges import PROMPTLY, text_of
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio


async def test_what_host_and_server_say_arrives_as_it_was_said(folder: Path) -> None:
    async with serving_host(folder) as hosted:
        bridge = await hosted.host.session(elicitation={})
        # Ids come back as they were given, whatever they are.
        for request_id in (7, "7", "a b", -1, 0, "", 2**53, "é\n"):
            bridge.begin("tools/call", {"name": "announce", "arguments": {"n": 0}}, id=request_id)
            assert text_of(await bridge.answer(request_id)) == "announced 0"
        for _ in range(20):  # also again, as soon as the host has the answer
            bridge.begin("ping", id="again")
            assert (await bridge.answer("again"))["result"] == {}
        # Progress has the host's own token, and the answer comes after it.
        await bridge.answer(bridge.begin_call("count", token=5, n=3))
        assert bridge.progress() == [(5, 1), (5, 2), (5, 3)]
        assert bridge.order[-4:-1] == ["notifications/progress"] * 3
        # The server asks, the host answers.
        call = bridge.begin_call("ask", question="How many?")
        asked = await question(bridge)
        assert asked["params"]["message"] == "How many?"
        reply(bridge, asked, "42")
        assert text_of(await bridge.answer(call)) == "42"
        # Ping, a method that is not known, and a tool that fails.
        assert (await bridge.request("ping"))["result"] == {}
        assert (await bridge.request("no/such"))["error"]["code"] == -32601
        assert (await bridge.answer(bridge.begin_call("boom")))["result"]["isError"] is True
        # A call that is cancelled ends, and has no answer.
        call = bridge.begin_call("wait", gate="never")
        await hosted.saw("waiting at never", bridge)
        bridge.notify("notifications/cancelled", requestId=call)
        await hosted.saw("cancelled at never", bridge)
        await bridge.request("ping")
        assert not bridge.has_answer(call)
        # What belongs to no call.
        await bridge.call("announce", n=3)
        await bridge.until(lambda: bridge.notices() == [1, 2, 3], "three notices")
        assert await bridge.end() == 0
        assert len(hosted.sessions) == 1  # it is not ended: the next instance may resume it


async def test_messages_of_many_megabytes_pass_both_ways_and_one_that_is_too_long_is_refused(folder: Path) -> None:
    async with serving_host(folder, max_body=16 << 20) as hosted:
        bridge = await hosted.host.session("--no-resume")
        word = "é" * 2_000_000
        call = bridge.begin_call("flood", token="t", n=1, size=5_000_000)
        assert text_of(await bridge.answer(call)) == "flooded 1"
        assert len(bridge.heard[-1]["params"]["message"]) == 5_000_000
        assert await bridge.call("log", text=word) == "logged"
        assert bridge.heard[-1]["params"]["data"] == word
        # The server has a limit of its own, and says so.
        too_large = await bridge.answer(bridge.begin_call("log", text="x" * (17 << 20)))
        assert too_large["error"]["code"] == -31004
        # The bridge too.
        bridge.say_bytes(b"x" * (MAX_LINE_BYTES + 1) + b"\n")
        assert (await bridge.answer(None))["error"]["code"] == -32700
        assert not hosted.host.tokens.exists()  # --no-resume keeps nothing


BAD = [
    (b"{", None, -32700),
    (b"\xff", None, -32700),
    (b"7", None, -32600),
    (b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', None, -32600),
    (b'{"jsonrpc":"2.0","id":null,"method":"x"}', None, -32600),
    (b'{"jsonrpc":"1.0","id":4,"method":"x"}', 4, -32600),
    (b'{"jsonrpc":"2.0","id":"n","method":"x","params":{"n":1e999}}', "n", -32700),
    (b'{"jsonrpc":"2.0","id":"s","method":"x","params":{"n":"\\ud800"}}', "s", -32700),
    (b'{"jsonrpc":"2.0","id":"d","method":"x","params":{"n":' + b"[" * 80 + b"]" * 80 + b"}}", "d", -32700),
    (b'[{"jsonrpc":"2.0","id":"b","method":"ping"}]', "b", -32600),
    (b'[{"jsonrpc":"2.0","method":"notifications/x"}]', None, -32600),
]


async def test_what_is_no_message_is_answered_and_the_bridge_goes_on(folder: Path) -> None:
    async with serving_host(folder) as hosted:
        bridge = await hosted.host.session("--no-resume")
        for line, request_id, code in BAD:
            bridge.say_bytes(line + b"\r\n\n")
            answer = await bridge.answer(request_id)
            assert (answer["error"]["code"], answer["id"]) == (code, request_id), line
        assert (await bridge.request("ping"))["result"] == {}
        # An id that is in use.
        call = bridge.begin_call("wait", gate="g")
        bridge.begin("ping", id=call)
        assert "still in use" in (await bridge.answer(call))["error"]["message"]
        hosted.tool_server.open("g")
        assert text_of(await bridge.answer(call)) == "went through g"


async def test_hosts_that_begin_in_another_way_get_the_reason(folder: Path) -> None:
    """A host of 2026-07-28 gets the revisions that the server has; a ping may come before the handshake."""
    async with serving_host(folder, eras="session") as hosted:
        bridge = await hosted.host.start("--no-resume")
        version = {"_meta": {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}}
        for method in ("server/discover", "tools/list"):
            refused = (await bridge.request(method, version))["error"]
            assert (refused["code"], "2025-11-25" in refused["data"]["supported"]) == (-32022, True)
        assert (await bridge.request("tools/list"))["error"]["message"] == "Begin with an initialize request"
        assert (await bridge.request("ping"))["result"] == {}
        # What is sent right after the handshake waits for it.
        bridge.begin(
            "initialize",
            {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "h", "version": "1"}},
            id="i",
        )
        bridge.notify("notifications/initialized")
        assert await bridge.call("count", n=1) == "counted to 1"
        assert (await bridge.answer("i"))["result"]["protocolVersion"] == "2025-06-18"


async def test_messages_reach_the_server_in_the_order_in_which_the_host_wrote_them(folder: Path) -> None:
    async with serving_host(folder) as hosted:
        bridge = await hosted.host.session("--no-resume")
        uris = [f"a://{number}" for number in range(60)]
        for uri in uris:
            bridge.begin("resources/subscribe", {"uri": uri})
        await until(lambda: len(hosted.tool_server.subscribing) == 60)
        assert hosted.tool_server.subscribing == [f"+{uri}" for uri in uris]


async def test_a_request_that_has_to_wait_does_not_stop_those_that_run(folder: Path) -> None:
    """The server takes one call at a time: its question is answered, and a cancellation arrives, past the one that
    waits."""
    async with serving_host(folder, max_calls=1) as hosted:
        bridge = await hosted.host.session("--no-resume", elicitation={})
        asking = bridge.begin_call("ask", question="Who is first?")
        asked = await question(bridge)
        waiting = bridge.begin_call("count", n=1)
        await bridge.logged("HTTP 429")
        reply(bridge, asked, "me")
        assert text_of(await bridge.answer(asking)) == "me"
        assert text_of(await bridge.answer(waiting)) == "counted to 1"
        stuck = bridge.begin_call("wait", gate="never")
        await hosted.saw("waiting at never", bridge)
        behind = bridge.begin_call("count", n=2)
        bridge.notify("notifications/cancelled", requestId=stuck)
        assert text_of(await bridge.answer(behind)) == "counted to 2"


async def test_more_at_once_than_the_bridge_follows_is_refused(folder: Path) -> None:
    async with serving_host(folder, max_calls=1_000) as hosted:
        bridge = await hosted.host.session("--no-resume")
        calls = [bridge.begin_call("wait", gate="w") for _ in range(MAX_RUNNING + 1)]
        assert (await bridge.answer(calls[-1]))["error"]["code"] == -31022
        hosted.tool_server.open("w")
        for call in calls[:-1]:
            assert text_of(await bridge.answer(call)) == "went through w"


async def test_the_last_words_of_a_host_still_arrive(folder: Path) -> None:
    async with serving_host(folder) as hosted:
        bridge = await hosted.host.session("--log-file", str(folder / "own.log"))
        call = bridge.begin_call("wait", gate="w")
        await hosted.saw("waiting at w", bridge)
        bridge.notify("notifications/cancelled", requestId=call)
        bridge.begin("resources/subscribe", {"uri": "last://word"})
        assert await bridge.end() == 0
        await hosted.saw("cancelled at w", bridge)
        assert hosted.tool_server.subscribing == ["+last://word"]
        assert "INFO Token file not found" in (folder / "own.log").read_text()
        refused = await hosted.host.session("--log-file", str(folder))
        await refused.logged("the log file cannot be written")


async def test_a_host_that_does_not_read_is_waited_for_and_nothing_piles_up(folder: Path) -> None:
    """The bridge goes on reading its stdin meanwhile: a cancellation gets through."""
    async with serving_host(folder, max_stream_events=50) as hosted:
        bridge = await hosted.host.session("--no-resume")
        bridge.stop_reading()
        flood = bridge.begin_call("flood", token=1, n=3_000, size=20_000)
        waiting = bridge.begin_call("wait", gate="w")
        await hosted.saw("waiting at w", bridge)
        bridge.notify("notifications/cancelled", requestId=waiting)
        await hosted.saw("cancelled at w", bridge)
        await until(lambda: hosted.tool_server.sent > 50)
        sent = -1
        while sent != hosted.tool_server.sent:  # until the tool stands still
            sent = hosted.tool_server.sent
            await asyncio.sleep(0.3)
        assert sent < 3_000
        assert _resident(bridge.pid) < 150 << 20
        bridge.read_again()
        await bridge.answer(flood)
        assert [number for _, number in bridge.progress()] == list(range(1, 3_001))


async def test_it_ends_promptly_however_it_is_ended(folder: Path) -> None:
    async with serving_host(folder) as hosted:
        for how in (signal.SIGTERM, signal.SIGINT, None):
            bridge = await hosted.host.session()
            bridge.begin_call("wait", gate="w")
            await hosted.saw("waiting at w", bridge)
            async with asyncio.timeout(PROMPTLY):
                status = await (bridge.end() if how is None else bridge.kill(how))
            assert status == (0 if how is None else 128 + how)
            hosted.tool_server.seen.clear()
        assert len(hosted.sessions) == 1


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_running_call_goes_on_when_the_host_shakes_hands_again(folder: Path) -> None:
    """H8: the second handshake is a reattach. What the call says afterwards reaches the host under its own token."""
    async with serving_host(folder) as hosted:
        bridge = await hosted.host.session()
        call = bridge.begin_call("count", token="mine", n=4, gate="g", pauses=[1, 2])
        await bridge.until(lambda: len(bridge.progress()) == 1, "one of four")
        await bridge.handshake()
        await bridge.request("ping")
        hosted.tool_server.open("g/1")
        await bridge.until(lambda: len(bridge.progress()) == 2, "two of four")
        hosted.tool_server.open("g/2")
        assert text_of(await bridge.answer(call)) == "counted to 4"
        # The answer and the progress are on two streams now, and a host gets no progress after the answer.
        told = bridge.progress()
        assert told == [("mine", number) for number in range(1, len(told) + 1)]
        assert len(hosted.sessions) == 1
