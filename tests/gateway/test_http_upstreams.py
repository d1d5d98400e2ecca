"""Sessions in front of HTTP upstreams: what becomes of calls when the gateway, the upstream or both die."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import HttpUpstream, Text, Upstream
from perdure.settings import Settings
from perdure.store.interface import Store
from tests.clients.node_clients import HERE as CLIENTS
from tests.gateway.test_web_sdk import KINDS, SESSIONS, served
from tests.support.clients.listeners import listening
from tests.support.clients.modern_peer import CallPeer, message_of, result_of, said
from tests.support.clients.recording_client import looking
from tests.support.clients.wire_client import Ended, Message, Peer, Web, Wire, answer_of, progress_of, text_of
from tests.support.processes.cluster import Cluster, cluster
from tests.support.processes.node_programs import node_modules, program
from tests.support.servers.gate_file_tools import diary, open_gate
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.scripted_http import ScriptedHttp, scripted_http
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio


@dataclass
class Story:
    """Gateway processes in front of a scripted upstream, and a client of theirs."""

    upstream: ScriptedHttp
    gateways: Cluster
    peer: Peer

    async def call(self, *steps: list[Any], tool: str = "plain", token: object = "t") -> Wire:
        return await self.peer.call(tool, token=token, steps=list(steps))

    async def again(self, wire: Wire) -> list[Message]:
        """All that a client sees of a call after it has lost its connection."""
        await wire.drop()
        return await (await self.peer.get(wire.last_id)).rest()


@asynccontextmanager
async def story(folder: Path, *options: str, **config: Any) -> AsyncIterator[Story]:
    async with (
        scripted_http(**config) as upstream,
        cluster(folder / "log.db", *options, target=upstream.url) as gateways,
        joined(gateways.proxy.url) as peer,
    ):
        yield Story(upstream, gateways, peer)


@asynccontextmanager
async def joined(url: str) -> AsyncIterator[Peer]:
    web = Web(url)
    try:
        yield await web.join()
    finally:
        await web.aclose()


@asynccontextmanager
async def gateway(
    url: str,
    *,
    patience: float = 20.0,
    headers: dict[str, str] | None = None,
    token_file: Path | None = None,
    store: Store | None = None,
    serving: Mapping[str, Any] | None = None,
    complaint: str | None = None,
    **limits: Any,
) -> AsyncIterator[Site]:
    """A gateway in this process."""
    own = {name: Text.plain(value) for name, value in (headers or {}).items()}
    address = HttpUpstream(url=url, headers=own, token_file=token_file)
    upstream = Upstream(name="scripted", address=address, patience=patience, **limits)
    how = dict(serving or {})
    async with serve(host_upstream(upstream, Settings(**how)), store=store, complaint=complaint, **how) as site:
        yield site


def progress(first: int, last: int) -> list[list[Any]]:
    return [["progress", number] for number in range(first, last + 1)]


async def test_gateway_killed_in_a_followable_call(tmp_path: Path) -> None:
    """G7."""
    async with story(tmp_path) as it:
        wire = await it.call(*progress(1, 10), ["wait", "gate"], *progress(11, 30))
        seen = await wire.messages(10)
        await it.gateways.crash()
        it.upstream.open("gate")
        seen += await it.again(wire)
        assert progress_of(seen) == list(range(1, 31))
        assert text_of(seen[-1]) == "done"
        assert it.upstream.runs == {"plain": 1}
        assert it.upstream.handshakes == 1
        assert it.upstream.cancelled == []
        assert await it.peer.result("plain") == "done"


async def test_a_call_of_a_principal_that_stays_away_is_followed(tmp_path: Path) -> None:
    """The gateway has credentials of its own for the upstream. G7."""
    token = "of-ada-" + "x" * 30
    (tmp_path / "tokens").write_text(f"ada: {token}\n")
    (tmp_path / "tokens").chmod(0o600)
    options = ("--tokens", str(tmp_path / "tokens"))
    async with (
        scripted_http() as upstream,
        cluster(tmp_path / "log.db", *options, target=upstream.url) as gateways,
    ):
        web = Web(gateways.proxy.url)
        peer = await Peer(web, token=token).initialize()
        wire = await peer.call("plain", token="t", steps=[*progress(1, 1), ["wait", "gate"], *progress(2, 2)])
        await wire.messages(1)
        await wire.drop()
        await gateways.crash()
        await until(lambda: [method for method in upstream.methods if method.startswith("GET call")])
        upstream.open("gate")
        seen = await (await peer.get(wire.last_id)).rest()
        assert (progress_of(seen), text_of(seen[-1]), upstream.runs) == ([2], "done", {"plain": 1})
        await web.aclose()


async def test_a_followed_call_has_its_limit(tmp_path: Path) -> None:
    """G7."""
    limits = {"era": "session", "call_timeout": "1s"}
    async with (
        scripted_http() as upstream,
        cluster(tmp_path / "log.db", target=pinned(tmp_path, upstream.url, **limits)) as gateways,
        joined(gateways.proxy.url) as peer,
    ):
        wire = await peer.call("plain", token="t", steps=[["progress", 1], ["never"]])
        await wire.messages(1)
        await gateways.crash()
        await wire.drop()
        answer = (await (await peer.get(wire.last_id)).rest())[-1]
        assert answer["error"]["code"] == -31001
        assert "did not answer within 1 s" in answer["error"]["data"]["reason"]
        assert upstream.runs == {"plain": 1}


@pytest.mark.parametrize(("tool", "code", "runs"), [("plain", -31001, 1), ("idempotent", None, 2)])
async def test_gateway_killed_before_the_first_position(tmp_path: Path, tool: str, code: int | None, runs: int) -> None:
    """G9."""
    async with story(tmp_path) as it:
        wire = await it.call(["wait", "gate"], *progress(1, 3), tool=tool)
        await wire.event()  # the gateway's own priming event
        await until(lambda: it.upstream.runs[tool])
        await it.gateways.crash()
        it.upstream.open("gate")
        seen = await it.again(wire)
        if code is not None:
            assert [message.get("error", {}).get("code") for message in seen] == [code]
        else:
            assert progress_of(seen) == [1, 2, 3]
            assert text_of(seen[-1]) == "done"
        assert it.upstream.runs == {tool: runs}
        assert await it.peer.result("plain") == "done"


async def test_a_deploy_leaves_followable_calls(tmp_path: Path) -> None:
    """G10."""
    async with story(tmp_path, "--drain-timeout", "0") as it:
        wire = await it.call(*progress(1, 3), ["wait", "gate"], *progress(4, 6))
        seen = await wire.messages(3)
        before = it.gateways.server
        it.gateways.proxy.hold()
        assert await before.stop() == 0
        await it.gateways.restart()
        it.upstream.open("gate")
        seen += await it.again(wire)
        assert progress_of(seen) == [1, 2, 3, 4, 5, 6]
        assert text_of(seen[-1]) == "done"
        assert it.upstream.runs == {"plain": 1}
        assert it.upstream.cancelled == []
        assert "DELETE" not in it.upstream.methods


async def test_both_die_together(tmp_path: Path) -> None:
    """The upstream does not know the call's stream any more, so each tool's own word decides. G16."""
    async with story(tmp_path) as it:
        wires = {tool: await it.call(["progress", 1], ["wait", "gate"], tool=tool) for tool in ("plain", "idempotent")}
        seen = {tool: await wire.messages(1) for tool, wire in wires.items()}
        await it.gateways.kill()
        it.upstream.lose_sessions()
        it.upstream.open("gate")
        await it.gateways.restart()
        for tool, wire in wires.items():
            seen[tool] += await it.again(wire)
            assert progress_of(seen[tool]) == [1]
        assert seen["plain"][-1]["error"]["code"] == -31001
        assert text_of(seen["idempotent"][-1]) == "done"
        assert it.upstream.runs == {"plain": 1, "idempotent": 2}
        assert it.upstream.handshakes == 2
        assert await it.peer.result("plain") == "done"


async def test_an_ask_after_the_gateway_was_killed(tmp_path: Path) -> None:
    """G18."""
    async with story(tmp_path) as it:
        wire = await it.call(["progress", 1], ["ask", "roots/list", {}], ["progress", 2])
        _, first = await wire.messages(2)
        assert first["method"] == "roots/list"
        await it.gateways.crash()
        await wire.drop()
        again = await it.peer.get(wire.last_id)
        withdrawn, second = await again.messages(2)
        assert (withdrawn["method"], withdrawn["params"]["requestId"]) == ("notifications/cancelled", first["id"])
        assert second["method"] == "roots/list"
        assert second["id"] != first["id"]
        await it.peer.answer(second, {"roots": [{"uri": "file:///work"}]})
        *reported, answer = await again.rest()
        assert progress_of(reported) == [2]
        assert answer["result"]["structuredContent"]["replies"][0]["result"] == {"roots": [{"uri": "file:///work"}]}
        assert it.upstream.runs == {"plain": 1}
        assert len(it.upstream.replies) == 1


async def go_away(upstream: ScriptedHttp) -> None:
    """End an upstream, as a process that stops does: connections are refused."""
    assert upstream.listening is not None
    upstream.listening.close()
    upstream.lose_sessions()
    upstream.cut()


def port_of(upstream: ScriptedHttp) -> int:
    return urlsplit(upstream.url).port or 0


async def test_upstream_restarts_between_calls() -> None:
    """It ends, and another process answers at its address, of which eight callers notice at once. G11."""
    async with scripted_http() as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        session = peer.session
        assert await peer.result("plain") == "done"
        await go_away(upstream)
        async with scripted_http(port=port_of(upstream)) as restarted:
            answers = await asyncio.gather(*(peer.result("plain") for _ in range(8)))
            assert answers == ["done"] * 8
            assert (restarted.handshakes, restarted.runs) == (1, {"plain": 8})
            assert (upstream.handshakes, upstream.runs) == (1, {"plain": 1})
        assert peer.session == session


async def lists_again(site: Site, upstream: ScriptedHttp, peer: CallPeer) -> None:
    """A client lists the tools, page or whole: what it sees, the gateway sees."""
    await peer.rpc("tools/list", {})


async def lists_in_a_session(site: Site, upstream: ScriptedHttp, peer: CallPeer) -> None:
    session = await site.join()
    await session.send(session.request("tools/list"))


async def begins_again(site: Site, upstream: ScriptedHttp, peer: CallPeer) -> None:
    """The upstream has lost the session, and another one is begun."""
    upstream.lose_sessions()


@pytest.mark.parametrize("learns", [lists_again, lists_in_a_session, begins_again])
async def test_a_hint_that_an_upstream_has_dropped(
    learns: Callable[[Site, ScriptedHttp, CallPeer], Awaitable[None]],
) -> None:
    """Its tool ran twice, and runs once from the next list on that anyone has read. G3."""
    async with scripted_http(event_ids=False) as upstream, gateway(upstream.url, serving={"eras": "both"}) as site:
        peer, cut = CallPeer(port=site.port), {"steps": [["begin"], ["cut"]]}
        assert message_of(await peer.call("idempotent", cut))["error"]["code"] == -31001
        assert upstream.runs == {"idempotent": 2}
        upstream.set(hints={})
        await learns(site, upstream, peer)
        assert message_of(await peer.call("idempotent", cut))["error"]["code"] == -31001
        assert upstream.runs == {"idempotent": 3}


async def test_the_hint_counts_that_was_listed_when_the_call_began() -> None:
    """And not what another client's list shows while it runs. G3."""
    async with scripted_http(event_ids=False) as upstream, gateway(upstream.url, serving={"eras": "both"}) as site:
        peer = CallPeer(port=site.port)
        call = await peer.begin_call("plain", {"steps": [["begin"], ["wait", "gate"], ["cut"]]})
        await until(lambda: upstream.runs)
        upstream.set(hints={"plain": {"idempotentHint": True}})
        await peer.rpc("tools/list", {})
        upstream.open("gate")
        async with call:
            assert message_of(await call.answer())["error"]["code"] == -31001
        assert upstream.runs == {"plain": 1}


async def test_resources_that_no_listener_wants_any_more() -> None:
    """The upstream has the subscriptions of the listeners of now and of those before, however many come and go."""
    async with scripted_http() as upstream, gateway(upstream.url, serving={"eras": "both"}) as site:
        for number in range(30):
            async with listening(site.port, f"note://{number}"):
                pass
        async with listening(site.port, "note://last") as listener:
            upstream.notify("notifications/resources/updated", {"uri": "note://last"})
            await listener.until_told("note://last")
        assert "note://last" in upstream.subscribed
        assert upstream.most_subscribed <= 3


@pytest.mark.parametrize("by", [400, 200, 503])
async def test_a_lost_session_that_is_not_told_by_404(by: int) -> None:
    async with scripted_http() as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        assert await peer.result("plain") == "done"
        upstream.lose_sessions(by=by)
        assert await peer.result("plain") == "done"
        assert upstream.handshakes == 2


async def test_upstream_is_away_for_a_while() -> None:
    """G12."""
    async with scripted_http() as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        await go_away(upstream)
        wires = [await peer.call("plain") for _ in range(3)]
        waiting = [asyncio.create_task(wire.rest()) for wire in wires]
        ended, _ = await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        assert not ended
        async with scripted_http(port=port_of(upstream)) as back:
            assert [text_of((await rest)[-1]) for rest in waiting] == ["done"] * 3
            assert (back.handshakes, back.runs) == (1, {"plain": 3})


async def test_patience_ends() -> None:
    """G12."""
    async with scripted_http() as upstream, gateway(upstream.url, patience=0.3) as site:
        peer = await site.join()
        await go_away(upstream)
        answer = (await (await peer.call("idempotent")).rest())[-1]
        assert answer["error"]["code"] == -31010
        assert answer["error"]["data"]["ran"] is False
        assert answer["error"]["data"]["reason"] == "unreachable"
        assert answer["error"]["data"]["upstream"] == "scripted"
        async with scripted_http(port=port_of(upstream)) as back:
            assert await peer.result("plain") == "done"
            assert back.runs == {"plain": 1}  # the other one is not run later


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_secret_in_an_address_is_masked(is_there: bool, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in the answers of requests that could not be served, and in the upstream's health. What to do next
    stands in the answer."""
    secret = "s3cret-token"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen, and no other process gets its port
        async with scripted_http(token="other") as upstream:
            port = port_of(upstream) if is_there else silent.getsockname()[1]
            url = f"http://127.0.0.1:{port}/{secret}/mcp?key={secret}"
            secrets: dict[str, Any] = {"secrets": frozenset({secret}), "patience": 0.3, "era": "session"}
            async with gateway(url, complaint="wants a token", **secrets) as site:
                peer = Peer(site)
                response = await site.request("POST", headers=peer.headers(), body=peer.handshake())
                error = answer_of(response)["error"]
                health = site.app.upstream
                assert health is not None
                assert error["data"]["reason"] == ("unauthorized" if is_there else "unreachable")
                told = "does not help until the operator" if is_there else "Send the request again later"
                assert error["message"].startswith("The server scripted is not available: ")
                assert told in error["message"]
                assert secret not in f"{error} {health!r}"
    assert "/***/mcp" in caplog.text
    assert secret not in caplog.text


async def test_a_token_that_an_upstream_repeats_is_masked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one before as well, which a late message may have."""
    token = tmp_path / "token"
    token.write_text("s3cret-first")
    token.chmod(0o600)
    caplog.set_level(logging.DEBUG, "perdure")
    async with scripted_http() as upstream, gateway(upstream.url, token_file=token, complaint="refuses") as site:
        upstream.refuse("tools/list", 200, error=[-32000, "I know s3cret-first"])
        peer = await site.join()
        await until(lambda: "refuses tools/list" in caplog.text)
        token.write_text("s3cret-second")
        upstream.refuse("tools/call", 401)
        assert await peer.result("plain") == "done"
        upstream.refuse("initialize", 200, error=[-32000, "I know s3cret-first and s3cret-second"])
        other = Peer(site)
        response = await site.request("POST", headers=other.headers(), body=other.handshake())
        assert "refuses the handshake: I know *** and ***" in answer_of(response)["error"]["message"]
        assert "s3cret" not in f"{caplog.text} {site.app.upstream!r}"


async def test_an_upstream_wants_another_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    async with (
        scripted_http(token="first") as upstream,
        gateway(upstream.url, token_file=token, complaint="does not accept") as site,
    ):
        peer = await site.join()
        assert await peer.result("plain") == "done"
        upstream.set(token="second")
        answer = (await (await peer.call("plain")).rest())[-1]
        assert (answer["error"]["code"], answer["error"]["data"]["reason"]) == (-31010, "unauthorized")
        assert "first" not in str(answer)
        token.write_text("second")
        assert await peer.result("plain") == "done"
        assert upstream.handshakes == 1


@pytest.mark.parametrize("status", [502, 504, 500])
async def test_502_in_front_of_an_upstream(status: int) -> None:
    """A proxy in front of the upstream gives a request up that may have run. G13."""
    async with scripted_http() as upstream, gateway(upstream.url, complaint="fails at the request") as site:
        peer = await site.join()
        upstream.refuse("tools/call", status, runs=True)
        answer = (await (await peer.call("plain")).rest())[-1]
        assert answer["error"]["code"] == -31001
        assert upstream.runs == {"plain": 1}
        upstream.refuse("tools/call", status, runs=True)
        assert await peer.result("idempotent") == "done"
        assert upstream.runs["idempotent"] == 2
        upstream.refuse("resources/read", status, runs=True)
        read = await (await peer.post(peer.request("resources/read", {"uri": "a:b"}))).rest()
        if status == 500:  # the upstream itself failed at a read: once more would fail again
            assert (read[-1]["error"]["code"], read[-1]["error"]["data"]["reason"]) == (-31010, "server_error")
        else:
            assert read[-1]["result"]["contents"][0]["text"] == "read"
        assert upstream.handshakes == 1


async def test_404_while_a_call_runs() -> None:
    """G14."""
    async with scripted_http(event_ids=False) as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        wires = {
            tool: await peer.call(tool, token=tool, steps=[["progress", 1], ["wait", "gate"]])
            for tool in ("plain", "idempotent")
        }
        for wire in wires.values():
            await wire.messages(1)
        upstream.open("gate")
        upstream.lose_sessions()
        assert await peer.result("read_only") == "done"
        assert (await wires["plain"].rest())[-1]["error"]["code"] == -31001
        assert text_of((await wires["idempotent"].rest())[-1]) == "done"
        assert upstream.runs == {"plain": 1, "idempotent": 2, "read_only": 1}
        assert upstream.handshakes == 2


async def test_resume_that_falls_silent() -> None:
    """G15."""
    async with scripted_http(falls_silent=True) as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        wire = await peer.call("plain", token=1, steps=[["progress", 1], ["cut"], ["wait", "gate"], ["progress", 2]])
        await until(lambda: [method for method in upstream.methods if method.startswith("GET call")])
        upstream.open("gate")
        seen = await wire.rest()
        assert progress_of(seen) == [1, 2]
        assert text_of(seen[-1]) == "done"
        assert upstream.runs == {"plain": 1}


@pytest.mark.parametrize("as_json", [True, False])
async def test_stateless_upstream(as_json: bool) -> None:
    """G43."""
    config = {"sessions": False, "standalone": False, "event_ids": False, "json": as_json}
    async with scripted_http(**config) as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        listener = await peer.get()
        for _ in range(3):
            assert await peer.result("plain") == "done"
        wire = await peer.call("plain", token=1, steps=[["progress", 1], ["cut"]])
        assert (await wire.rest())[-1]["error"]["code"] == -31001
        assert await peer.result("plain") == "done"
        assert upstream.methods.count("GET") == 1
        assert upstream.methods.count("DELETE") == 0
        await listener.drop()


async def test_client_headers_stay_here() -> None:
    """G44."""
    own = {"X-Api-Key": "the gateway's"}
    async with scripted_http() as upstream, gateway(upstream.url, headers=own) as site:
        peer = Peer(site, token="the client's")
        await peer.initialize()
        wire = await peer.post(peer.tool("plain"), cookie="a=b", x_api_key="another", x_other="c")
        assert text_of((await wire.rest())[-1]) == "done"
        await (await peer.get()).drop()
        for headers in upstream.headers:
            assert headers["x-api-key"] == "the gateway's"
            assert headers.keys().isdisjoint({"authorization", "cookie", "x-other"})
            assert "the client's" not in str(headers)
            assert headers.get("mcp-session-id") != peer.session


async def test_subscriptions_and_log_level_over_a_renewal() -> None:
    async with scripted_http() as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        listener = await peer.get()
        await peer.send(peer.request("logging/setLevel", {"level": "warning"}))
        for uri in ("a:1", "a:2"):
            await peer.send(peer.request("resources/subscribe", {"uri": uri}))
        assert (upstream.level, upstream.subscribed) == ("warning", ["a:1", "a:2"])
        upstream.set(level="", subscribed=[], heard=[], holds=["resources/subscribe"])
        upstream.lose_sessions()
        wire = await peer.call("plain")
        await until(lambda: upstream.methods.count("resources/subscribe") == 2)
        # The call that noticed waits until the new session is where the old one was.
        [renewed] = upstream._sessions
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await until(lambda: (renewed, "tools/call") in upstream.heard)
        upstream.open("resources/subscribe")
        assert text_of((await wire.rest())[-1]) == "done"
        assert (upstream.level, sorted(upstream.subscribed)) == ("warning", ["a:1", "a:2"])
        assert upstream.methods.count("resources/subscribe") == 2
        seen: list[Message] = []
        while len([one for one in seen if one["method"] == "notifications/resources/updated"]) < 2:
            seen.append(await listener.message())
        assert [one["params"]["uri"] for one in seen if one["method"].endswith("updated")] == ["a:1", "a:2"]
        await until(lambda: all(one.standalone.readers for one in upstream._sessions.values()))
        upstream.notify("notifications/resources/updated", {"uri": "a:2"})
        while (message := await listener.message())["method"] != "notifications/resources/updated":
            pass
        assert message["params"] == {"uri": "a:2"}


async def test_two_nodes_on_one_upstream_session(tmp_path: Path) -> None:
    async with (
        scripted_http() as upstream,
        gateway(upstream.url, store=SharedStore(tmp_path / "log.db")) as here,
        gateway(upstream.url, store=SharedStore(tmp_path / "log.db")) as there,
    ):
        peer = await here.join()
        elsewhere = peer.through(there)
        listener = await peer.get()
        assert await peer.result("plain") == "done"
        assert await elsewhere.result("plain") == "done"
        assert upstream.handshakes == 1
        assert len({session for session, method in upstream.heard if method == "tools/call"}) == 1
        upstream.notify("notifications/x")
        assert (await listener.message())["method"] == "notifications/x"
        upstream.notify("notifications/y")
        assert (await listener.message())["method"] == "notifications/y"  # each once, though two nodes have lanes
        upstream.lose_sessions()
        upstream.set(holds=["initialize"], heard=[])
        wires = [await one.call("plain") for one in (peer, elsewhere) * 4]
        await until(lambda: {"tools/call", "initialize"} <= set(upstream.methods))
        upstream.open("initialize")
        assert [text_of((await wire.rest())[-1]) for wire in wires] == ["done"] * 8
        assert upstream.runs["plain"] == 10
        # Where both have begun a session at once, the one that is not the home has ended its own.
        assert upstream.handshakes - upstream.methods.count("DELETE") == 2
        [session] = upstream._sessions
        upstream.set(heard=[])
        assert [await one.result("plain") for one in (peer, elsewhere)] == ["done"] * 2
        assert {named for named, method in upstream.heard if method == "tools/call"} == {session}
        await until(lambda: len(upstream._sessions[session].standalone.readers) == 1)
        upstream.notify("notifications/z")
        heard: list[Message] = []
        while not heard or heard[-1]["method"] != "notifications/z":
            try:
                heard.append(await listener.message())
            except Ended:  # the session's home has moved
                listener = await peer.get(listener.last_id)
        assert [one["method"] for one in heard].count("notifications/z") == 1
        made = upstream.handshakes
        upstream.lose_sessions()
        assert await elsewhere.result("plain") == "done"
        assert await peer.result("plain") == "done"
        assert upstream.handshakes == made + 1


async def test_an_ended_session_is_ended_upstream() -> None:
    async with scripted_http() as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        assert await peer.result("plain") == "done"
        assert (await peer.delete()).status_code == 200
        await until(lambda: not upstream._sessions)
        assert upstream.methods.count("DELETE") == 1


def pinned(folder: Path, url: str, **limits: Any) -> str:
    """The target of a gateway whose upstream is spoken to at 2026-07-28."""
    servers = {"upstream": {"url": url, "perdure": {"era": "2026-07-28", **limits}}}
    file = folder / "servers.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return f"--servers={file}"


@pytest.mark.parametrize("option", [("--task-after", "0.01"), ("--task-after", "60")], ids=["task", "key"])
async def test_gateway_killed_in_a_task_upstream(tmp_path: Path, option: tuple[str, ...]) -> None:
    """The upstream is Perdure at 2026-07-28, whose calls are found again by their handles, or by their keys. G8."""
    log, gate = tmp_path / "diary", tmp_path / "gate"
    about = {"n": 4, "gate": str(gate), "pauses": [2], "log": str(log)}
    async with (
        cluster(tmp_path / "upstream.db", *option) as upstream,
        cluster(tmp_path / "log.db", target=pinned(tmp_path, upstream.proxy.url)) as gateways,
        joined(gateways.proxy.url) as peer,
    ):
        wire = await peer.call("pay", token=1, **about)
        await wire.event()
        await until(lambda: diary(log))
        with looking(f"sqlite:{tmp_path / 'log.upstream.db'}") as rows:
            wanted = '"task"' if option[1] == "0.01" else '"key"'
            await until(lambda: wanted in str(rows("SELECT upstream FROM call WHERE upstream IS NOT NULL")))
        await gateways.crash()
        open_gate(f"{gate}.2")
        await wire.drop()
        seen = await (await peer.get(wire.last_id)).rest()
        assert text_of(seen[-1]) == "counted to 4"
        reported = progress_of(seen)
        assert reported == sorted(set(reported))
    assert len(diary(log)) == 1


async def test_a_client_that_only_listens_is_heard_again(tmp_path: Path) -> None:
    """After a crash of the gateway the upstream's session is taken up without a request of the client."""
    async with story(tmp_path) as it:
        await it.peer.send(it.peer.request("resources/subscribe", {"uri": "a:1"}))
        listener = await it.peer.get()
        await until(lambda: any(one.standalone.readers for one in it.upstream._sessions.values()))
        it.upstream.notify("notifications/x")
        assert (await listener.message())["method"] == "notifications/x"
        await it.gateways.crash()
        await listener.drop()
        listener = await it.peer.get(listener.last_id)
        await until(lambda: any(one.standalone.readers for one in it.upstream._sessions.values()))
        it.upstream.notify("notifications/y")
        heard = [await listener.message()]
        while heard[-1]["method"] != "notifications/y":
            heard.append(await listener.message())
        # What was said in between may be lost, so the client reads again what it has subscribed to.
        assert {"uri": "a:1"} in [message.get("params") for message in heard]
        assert it.upstream.handshakes == 1


async def test_a_durable_call_of_a_killed_gateway_is_followed(tmp_path: Path) -> None:
    """A client of 2026-07-28 asks for its call again by its key; the upstream has sessions."""
    async with scripted_http() as upstream, cluster(tmp_path / "log.db", target=upstream.url) as gateways:
        client = CallPeer(port=gateways.proxy.port)
        arguments = {"steps": [["log", "x"], ["wait", "gate"]]}
        first = await client.begin_call("plain", arguments, key="k")
        await until(lambda: upstream.runs["plain"])
        await until(lambda: '"position"' in str(gateways.rows("SELECT upstream FROM call")))
        await gateways.crash()
        await first.aclose()
        upstream.open("gate")
        assert said(result_of(await client.call("plain", arguments, key="k"))) == "done"
        assert upstream.runs == {"plain": 1}
        assert upstream.cancelled == []


async def test_a_plain_call_of_2026_07_28_ends_with_its_connection() -> None:
    async with scripted_http() as upstream, gateway(upstream.url) as site:
        client = CallPeer(port=site.port)
        assert said(result_of(await client.call("plain"))) == "done"
        call = await client.begin_call("plain", {"steps": [["log", "x"], ["never"]]})
        await until(lambda: upstream.runs["plain"] == 2)
        await call.aclose()
        await until(lambda: upstream.cancelled)
        upstream.lose_sessions()
        assert said(result_of(await client.call("plain"))) == "done"


@pytest.fixture
async def bakery() -> AsyncIterator[str]:
    """The address of the official TypeScript server without its session era (`legacy: 'reject'`)."""
    node_modules(CLIENTS)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        program("node"), CLIENTS / "ts2_server.mjs", "http", stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield (await process.stdout.readline()).decode().strip()
    process.stdin.close()
    await process.wait()


async def test_session_client_modern_upstream(bakery: str) -> None:
    """G40."""
    async with gateway(bakery) as site:
        peer = await site.join()
        assert peer.welcome["result"]["serverInfo"]["name"] == "bakery"
        listener = await peer.get()
        wire = await peer.call("bake", token="t", loaves=2)
        *reported, answer = await wire.rest()
        assert (progress_of(reported), text_of(answer)) == ([1, 2], "2 loaves")
        wire = await peer.call("order")
        ask = await wire.message()
        assert (ask["method"], ask["params"]["message"]) == ("elicitation/create", "Which loaf?")
        await peer.answer(ask, {"action": "accept", "content": {"loaf": "rye"}})
        assert text_of((await wire.rest())[-1]) == "a rye loaf"
        await peer.send(peer.request("resources/subscribe", {"uri": "stock://flour"}))
        assert await peer.result("restock", uri="stock://flour") == "restocked"
        heard: list[Message] = []
        while {"uri": "stock://flour"} not in [message.get("params") for message in heard]:
            heard.append(await listener.message())
        wire = await peer.call("wait", id="waits")
        await until_said(peer, "look", "waiting")
        await peer.cancel("waits")
        assert (await wire.rest())[-1]["error"]["code"] == -32800
        await until_said(peer, "look", "waiting,cancelled")


async def until_said(peer: Peer, tool: str, text: str) -> None:
    async def is_said() -> bool:
        return await peer.result(tool) == text

    await until(is_said)


@pytest.mark.parametrize("kind", KINDS)
async def test_servers_of_the_sdk(kind: str) -> None:
    shop = ToolServer()
    async with served(kind, shop) as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        *reported, answer = await (await peer.call("count", token="t", n=3)).rest()
        assert text_of(answer) == "counted to 3"
        if "json" not in kind:
            assert progress_of(reported) == [1, 2, 3]
        failed = await (await peer.call("boom", code=-32050)).rest()
        assert failed[-1]["error"]["code"] == -32050
        listed = await (await peer.post(peer.request("tools/list"))).rest()
        assert len(listed[-1]["result"]["tools"]) > 20
        if kind in SESSIONS:
            wire = await peer.call("ask", question="who?")
            ask = await wire.message()
            await peer.answer(ask, {"action": "accept", "content": {"answer": "me"}})
            assert text_of((await wire.rest())[-1]) == "me"


@pytest.mark.parametrize("kind", SESSIONS)
async def test_a_connection_to_a_server_of_the_sdk_is_lost_in_a_call(kind: str) -> None:
    shop = ToolServer()
    async with served(kind, shop) as upstream, gateway(upstream.url) as site:
        peer = await site.join()
        wire = await peer.call("count", token="t", n=4, gate="g", pauses=[2])
        assert progress_of(await wire.messages(2)) == [1, 2]
        upstream.cut(only="POST")
        shop.open("g/2")
        *reported, answer = await wire.rest()
        if kind == "sessions":  # no event ids, so the call is lost
            assert answer["error"]["code"] == -31001
        else:
            assert (progress_of(reported), text_of(answer)) == ([3, 4], "counted to 4")
        assert await peer.result("count", n=1) == "counted to 1"


async def test_a_session_that_is_ended_after_a_crash_is_ended_upstream(tmp_path: Path) -> None:
    async with story(tmp_path) as it:
        assert await it.peer.result("plain") == "done"
        await it.gateways.crash()
        assert (await it.peer.delete()).status_code == 200
        await until(lambda: not it.upstream._sessions)
