"""Keys of calls: what they look like, whose they are, and what stands behind them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import pytest
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.mcpserver import MCPServer
from pydantic import Field

from perdure._core.envelope import KEY
from tests.http.test_bounds import LIMIT, Names
from tests.support.clients.modern_peer import ALL_ASKS, TAKES_TASKS, CallPeer, accept, result_of, said
from tests.support.clients.modern_requests import modern
from tests.support.clients.raw_http import Answer, bearer, message
from tests.support.servers.asking_tools import server as asking
from tests.support.servers.gate_file_tools import diary, open_gate, server
from tests.support.servers.gated_server import live
from tests.support.servers.in_process import until
from tests.support.stores.outages import Locked

pytestmark = pytest.mark.anyio


async def test_a_malformed_key_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = {"n": 1, "log": str(log)}
    async with live(server=server) as served:
        peer = CallPeer(port=served.port)
        for key in ("", "k" * 256, 7, None, True, ["k"], {"k": 1}, "a\x00b", "a\nb", "\x7f"):
            answer = await peer.call("pay", arguments, params={"_meta": {KEY: key}})
            refused(answer, "must be a string of 1 to 255 characters, none of them a control character")
        for key in ("k" * 256,):
            answer = await peer.call("pay", arguments, headers={"idempotency-key": key})
            refused(answer, "Idempotency-Key must be a string of 1 to 255 characters")
        assert not diary(log)
        for key in ("k" * 255, " ", "\u043a\u043b\u044e\u0447", '"quoted"', "\U0001f511"):
            assert said(result_of(await peer.call("pay", arguments, key=key))) == "counted to 1"
        assert len(diary(log)) == 5


def refused(answer: Answer, words: str) -> None:
    assert (answer.status, answer.error["code"]) == (400, -32602), answer
    assert words in answer.error["message"], answer


def padded(body: bytes, argument: str) -> bytes:
    """A request with another argument, as JSON."""
    return body.replace(b'"n": 1', b'"n": 1, "key": %b' % argument.encode())


async def test_a_body_that_only_our_parser_refuses_does_not_run_without_its_key(tmp_path: Path) -> None:
    """The SDK's parser takes these, and would run the call again with each repeat."""
    log = tmp_path / "log"
    params = {"name": "pay", "arguments": {"n": 1, "log": str(log)}, "_meta": {KEY: "order-7"}}
    body, headers = modern("tools/call", params)
    long, _ = modern("tools/call", params, id="i" * 300)
    bodies = {
        "lone surrogate": (padded(body, '"half an emoji: \\ud83d"'), -32700),
        "deeper than 64": (padded(body, "[" * 70 + "]" * 70), -32700),
        "NaN": (padded(body, "NaN"), -32700),
        "byte order mark": (b"\xef\xbb\xbf" + body, -32700),
        "UTF-8": (body.decode().encode("utf-16"), -32700),
        "256 characters": (long, -32600),
    }
    async with live(server=server) as served:
        for words, (sent, code) in bodies.items():
            answer = await CallPeer(port=served.port).ask("POST", sent, headers=headers)
            assert (answer.status, answer.error["code"]) == (400, code), (words, answer)
            assert words in answer.error["message"], answer
        keyless = body.replace(KEY.encode(), b"no key")
        for sent in (padded(keyless, '"\\ud83d"'), padded(keyless, "NaN")):
            assert (await CallPeer(port=served.port).ask("POST", sent, headers=headers)).error["code"] == -32700
        assert not diary(log)


async def test_an_update_of_a_task_with_half_an_emoji_does_not_say_that_the_task_is_gone() -> None:
    async with live(server=asking) as served:
        peer = CallPeer(port=served.port, capabilities={**ALL_ASKS, **TAKES_TASKS})
        task = result_of(await peer.call("ask", {"question": "Well?"}))["taskId"]
        [name] = await peer.until_asked(task)
        answer = await peer.rpc("tasks/update", {"taskId": task, "inputResponses": {name: accept(answer="\ud83d")}})
        assert (answer.status, answer.error["code"]) == (400, -32700), answer
        await peer.update(task, {name: accept(answer="whole")})
        assert said((await peer.until_over(task))["result"]) == "whole"


async def test_the_header_and_the_member_name_the_same_key(tmp_path: Path) -> None:
    arguments = {"n": 1, "log": str(tmp_path / "log")}
    by_header = {"idempotency-key": "order-7"}
    async with live(server=server) as served:
        peer = CallPeer(port=served.port)
        answers = [
            await peer.call("pay", arguments, headers=by_header),
            await peer.call("pay", arguments, key="order-7"),
            await peer.call("pay", arguments, key="order-7", headers=by_header),
        ]
        assert {said(result_of(answer)) for answer in answers} == {"counted to 1"}
        refused(await peer.call("pay", arguments, key="order-8", headers=by_header), "name different keys")
    assert len(diary(tmp_path / "log")) == 1


async def test_two_headers_with_a_key_are_refused() -> None:
    """Whichever of them counted, another process or a gateway might take the other one."""
    async with live(server=server) as served:
        twice = {"idempotency-key": "order-7", "Idempotency-Key": "order-7"}
        answer = await CallPeer(port=served.port).call("pay", {"n": 1}, headers=twice)
        assert (answer.status, answer.error["code"]) == (400, -32600), answer
        assert answer.error["message"] == "This request has 2 Idempotency-Key headers; it may have one"


async def test_arguments_that_are_written_otherwise_are_the_same(tmp_path: Path) -> None:
    """The order of their names says nothing; what they are does."""
    log = str(tmp_path / "log")
    async with live(server=server) as served:
        peer = CallPeer(port=served.port)
        for arguments in ({"n": 1, "key": "br\u00f6d", "log": log}, {"log": log, "key": "br\u00f6d", "n": 1}):
            assert said(result_of(await peer.call("pay", arguments, key="order-7"))) == "counted to 1"
        other = await peer.call("pay", {"n": 1, "key": "brod", "log": log}, key="order-7")
        assert (other.status, other.error["code"]) == (400, -31009)
    assert len(diary(tmp_path / "log")) == 1


async def test_two_principals_with_one_key_are_two_calls(tmp_path: Path) -> None:
    arguments = {"n": 1, "log": str(tmp_path / "log")}
    async with live(server=server, auth=Names()) as served:
        for name in ("alice", "bob", "alice", "bob"):
            peer = CallPeer(port=served.port, headers=bearer(name))
            assert said(result_of(await peer.call("pay", arguments, key="order-7"))) == "counted to 1"
    assert len(diary(tmp_path / "log")) == 2


async def test_a_request_that_is_refused_leaves_its_key_free(tmp_path: Path) -> None:
    """Also for those that came at the same moment: they are told the same, and not that the log fails."""
    log, gate = tmp_path / "log", tmp_path / "gate"
    async with live(server=server, store=f"sqlite:{tmp_path / 'log.db'}", max_principal_tasks=1) as served:
        peer = CallPeer(port=served.port)
        running = {"n": 2, "gate": str(gate), "pauses": [1], "log": str(log)}
        async with await peer.begin_call("pay", running, key="order-7") as first:
            await until(lambda: diary(log))
            async with Locked(tmp_path / "log.db").begins():
                late = [await peer.begin_call("pay", {"n": 1}, key="order-8") for _ in range(9)]
                await asyncio.sleep(0.1)  # so that they meet; whether they do decides nothing
            for exchange in late:
                answer = await exchange.answer()
                await exchange.aclose()
                assert (answer.status, answer.error["code"]) == (429, LIMIT), answer
            open_gate(f"{gate}.1")
            assert said(result_of(await first.answer())) == "counted to 2"
        assert said(result_of(await peer.call("pay", {"n": 1}, key="order-8"))) == "counted to 1"


# What the SDK's handler does for a call without the log


def weather() -> MCPServer:
    server = MCPServer("weather", version="1", log_level="WARNING")

    @server.tool()
    def forecast(city: Annotated[str, Field(json_schema_extra={"x-mcp-header": "City"})]) -> str:
        return f"rain in {city}"

    return server


@pytest.mark.parametrize(
    ("capabilities", "key"), [({}, "order-7"), (TAKES_TASKS, None), (ALL_ASKS, None), ({}, None)], ids=str
)
async def test_headers_that_contradict_the_arguments_are_refused(capabilities: Any, key: str | None) -> None:
    """A proxy may have chosen the way by them, whether the call runs on the log or not."""
    async with live(server=weather()) as served:
        peer = CallPeer(port=served.port, capabilities=capabilities)
        right = await peer.call("forecast", {"city": "Rome"}, key=key, headers={"mcp-param-city": "Rome"})
        assert said(result_of(right)) == "rain in Rome"
        other = None if key is None else "order-8"
        for headers in ({"mcp-param-city": "Oslo"}, {}):
            answer = await peer.call("forecast", {"city": "Rome"}, key=other, headers=headers)
            assert (answer.status, answer.error["code"]) == (400, -32020), answer
        if key is not None:  # the key of a call that was refused is free
            right = await peer.call("forecast", {"city": "Oslo"}, key=other, headers={"mcp-param-city": "Oslo"})
            assert said(result_of(right)) == "rain in Oslo"


@pytest.mark.parametrize("key", [None, "order-7"])
async def test_a_call_whose_client_left_is_cancelled_unless_it_has_a_key(key: str | None) -> None:
    """The revision says that closing the response cancels a request; a key says that the client comes back."""
    begun, gate, ends = asyncio.Event(), asyncio.Event(), list[str]()
    server = MCPServer("patient", version="1", log_level="WARNING")

    @server.tool()
    async def wait() -> str:
        begun.set()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        ends.append("done")
        return "done"

    async with live(server=server) as served:
        peer = CallPeer(port=served.port, capabilities=ALL_ASKS)
        async with await peer.begin_call("wait", key=key) as exchange:
            await begun.wait()
            exchange.cut()
        if key is None:
            await until(lambda: ends)
            assert served.app.counters.calls_cancelled == 1
        else:
            assert (await peer.rpc("tools/list", {})).status == 200  # the server has seen the end of the connection
            gate.set()
            assert said(result_of(await peer.call("wait", key=key))) == "done"
        assert ends == ["cancelled" if key is None else "done"]


class OneApp(TokenVerifier):
    """Verifies tokens of one OAuth client, and does not say whose they are."""

    async def verify_token(self, token: str) -> AccessToken | None:
        return AccessToken(token=token, client_id="app", subject=None, scopes=[])


async def test_tokens_without_a_subject_are_owners_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 5: users of one OAuth client share neither keys nor sessions. The operator is told once."""
    order = {"n": 1, "log": str(tmp_path / "log")}
    async with live(server=server, auth=OneApp()) as served:
        alice, bob = (CallPeer(port=served.port, headers=bearer(name)) for name in ("alice", "bob"))
        for peer in (alice, bob, alice):
            assert said(result_of(await peer.call("pay", order, key="order-1"))) == "counted to 1"
        assert len(diary(tmp_path / "log")) == 2
        session = await served.session(**bearer("alice"))
        statuses = [
            (
                await served.ask("POST", message("ping", id=7), headers={"mcp-session-id": session.id, **bearer(name)})
            ).status
            for name in ("bob", "alice")
        ]
        assert statuses == [404, 200]
    [told] = [record for record in caplog.records if getattr(record, "action", "") == "auth.no_subject"]
    assert told.getMessage().startswith("tokens of client app have no subject")
