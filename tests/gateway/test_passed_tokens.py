"""`auth = "pass"`: the token of each caller goes to the upstream, and what the upstream says of it comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import HttpUpstream, Upstream
from perdure.http.issuer_tokens import IssuerTokens
from perdure.runtime.health import UpstreamState
from perdure.settings import Settings
from tests.support.clients.modern_peer import TAKES_TASKS, CallPeer, result_of
from tests.support.clients.raw_http import bearer
from tests.support.clients.wire_client import Message, Peer, Web, progress_of, text_of
from tests.support.processes.cluster import cluster
from tests.support.servers.authorization_server import AuthorizationServer, authorization_server
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.scripted_http import ScriptedHttp, scripted_http

pytestmark = pytest.mark.anyio

HERE = "https://mcp.example/mcp"
METADATA = "/.well-known/oauth-protected-resource/mcp"
OWN = f'resource_metadata="https://mcp.example{METADATA}"'
THEIRS = 'resource_metadata="http://10.0.0.5/.well-known/oauth-protected-resource"'


@dataclass
class Story:
    issuer: AuthorizationServer
    upstream: ScriptedHttp
    site: Site

    def token(self, subject: str = "ann", **claims: Any) -> str:
        return self.issuer.token(HERE, subject=subject, **claims)

    async def join(self, token: str) -> Peer:
        return await Peer(self.site, token=token).initialize()

    def modern(self, token: str, **options: Any) -> CallPeer:
        return CallPeer(port=self.site.port, headers=bearer(token), **options)

    @property
    def shown(self) -> list[str]:
        """The tokens that the upstream has seen, one after the other, without repeats in a row."""
        seen = [headers.get("authorization", "none").removeprefix("Bearer ") for headers in self.upstream.headers]
        return [token for at, token in enumerate(seen) if at == 0 or seen[at - 1] != token]


@pytest.fixture
async def story(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Story]:
    caplog.set_level(logging.DEBUG, "perdure")
    async with authorization_server() as issuer, scripted_http() as upstream:
        address = HttpUpstream(url=upstream.url, auth="pass", pass_headers=("X-Tenant",))
        hosted = host_upstream(Upstream(name="scripted", address=address, patience=20.0), Settings())
        auth = IssuerTokens(issuer=issuer.issuer, audience=HERE)
        async with serve(hosted, auth=auth) as site:
            yield Story(issuer, upstream, site)
        for headers in upstream.headers:  # what the log says of a token is not the token
            assert headers["authorization"].removeprefix("Bearer ") not in caplog.text


class TenantPeer(Peer):
    """A client with headers of its own, of which one is passed on."""

    def headers(self, *arguments: str, **more: str) -> list[tuple[str, str]]:
        return super().headers(*arguments, **more, x_tenant=f"of {self.token}", x_other="c", cookie="a=b")


async def test_each_caller_reaches_the_upstream_with_its_own_token_and_the_named_header(story: Story) -> None:
    """G45."""
    ann, bob = story.token("ann"), story.token("bob")
    for token in (ann, bob):
        peer = await TenantPeer(story.site, token=token).initialize()
        assert await peer.result("plain") == "done"
    answer = await story.modern(ann).call("plain", headers={"x-tenant": f"of {ann}", "x-other": "c"})
    assert result_of(answer)["content"][0]["text"] == "done"
    assert story.shown == [ann, bob, ann]
    for headers in story.upstream.headers:
        assert headers["authorization"] == headers["x-tenant"].replace("of", "Bearer", 1)
        assert headers.keys().isdisjoint({"x-other", "cookie"})


async def test_a_header_that_cannot_be_passed_on_is_named_and_not_shown(story: Story) -> None:
    answer = await story.modern(story.token()).call("plain", headers={"x-tenant": "b\u00e4cker"})
    assert answer.error["data"]["reason"] == "unauthorized"
    assert "The header X-Tenant for the server scripted can have visible ASCII characters only" in str(answer.error)
    assert "cker" not in str(answer.error)


async def test_a_session_of_another_principal_does_not_exist(story: Story) -> None:
    ann, bob = await story.join(story.token("ann")), await story.join(story.token("bob"))
    bob.session = ann.session
    assert (await bob.send(bob.tool("plain"))).status_code == 404


async def test_a_newer_token_of_the_session_is_used_also_for_a_call_that_runs(story: Story) -> None:
    first, second = story.token(), story.token(exp=int(time.time()) + 7200)
    peer = await story.join(first)
    wire = await peer.call("plain", token=1, steps=[["progress", 1], ["cut"], ["wait", "gate"], ["progress", 2]])
    await until(lambda: [method for method in story.upstream.methods if method.startswith("GET call")])
    peer.token = second
    assert await peer.result("plain") == "done"
    story.upstream.set(token=second)
    story.upstream.open("gate")
    seen = await wire.rest()
    assert (progress_of(seen), text_of(seen[-1])) == ([1, 2], "done")
    assert story.shown == [first, second]


async def test_without_a_token_the_gateway_asks_for_one_and_tells_where_to_get_it(story: Story) -> None:
    """G45."""
    response = await Peer(story.site).send({})
    assert (response.status_code, OWN in response.headers["www-authenticate"]) == (401, True)
    metadata = (await story.site.http.get(story.site.url.removesuffix("/mcp") + METADATA)).json()
    assert (metadata["resource"], metadata["authorization_servers"]) == (HERE, [story.issuer.issuer])
    assert story.upstream.headers == []


async def test_a_handshake_with_a_token_that_the_upstream_refuses_is_refused_alike(story: Story) -> None:
    """G45."""
    story.upstream.refuse(
        "initialize", 401, times=2, headers={"WWW-Authenticate": f'Bearer error="invalid_token", {THEIRS}'}
    )
    peer = Peer(story.site, token=story.token())
    headers = [(name, value) for name, value in peer.headers() if name != "mcp-protocol-version"]
    response = await story.site.request("POST", headers=headers, body=peer.handshake())
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == f'Bearer error="invalid_token", {OWN}'
    assert response.json()["error"] == "invalid_token"
    assert story.site.app.upstream is not None
    assert story.site.app.upstream.state is UpstreamState.UP  # it has refused one caller


async def test_a_token_that_the_upstream_repeats_is_not_logged(story: Story, caplog: pytest.LogCaptureFixture) -> None:
    token = story.token()
    story.upstream.refuse("tools/list", 200, error=[-32000, f"I know {token}"])
    await story.join(token)
    await until(lambda: "refuses tools/list" in caplog.text)
    story.upstream.refuse("initialize", 200, error=[-32000, f"I know {token}"])
    peer = Peer(story.site, token=token)
    await story.site.request("POST", headers=peer.headers(), body=peer.handshake())
    await until(lambda: "refuses the handshake: I know ***" in caplog.text)


async def test_a_call_that_needs_another_scope_is_refused_and_runs_with_it_under_the_same_id(story: Story) -> None:
    narrow, wide = story.token(scope="read"), story.token(scope="read write")
    peer = await story.join(narrow)
    wants = f'Bearer error="insufficient_scope", scope="read write", {THEIRS}'
    story.upstream.refuse("tools/call", 403, headers={"WWW-Authenticate": wants})
    call = peer.tool("plain", id=7)
    response = await peer.send(call)
    assert response.status_code == 403
    assert response.headers["www-authenticate"] == f'Bearer error="insufficient_scope", scope="read write", {OWN}'
    peer.token = wide
    assert text_of((await (await peer.post(call)).rest())[-1]) == "done"
    assert story.shown == [narrow, wide]
    assert story.upstream.runs == {"plain": 1}


async def test_a_long_call_has_its_stream_though_the_upstream_says_nothing(story: Story) -> None:
    peer = await story.join(story.token())
    wire = await peer.call("plain", steps=[["wait", "gate"]])
    story.upstream.open("gate")
    assert text_of((await wire.rest())[-1]) == "done"


async def test_calls_without_a_session_have_their_own_token_and_the_upstreams_refusal(story: Story) -> None:
    narrow, wide = story.token(scope="read"), story.token(scope="read write")
    for token in (wide, narrow, wide):
        assert result_of(await story.modern(token).call("plain"))["content"][0]["text"] == "done"
    assert story.shown[0] == wide
    assert narrow in story.shown
    calls = [headers["authorization"] for headers in story.upstream.headers if headers.get("mcp-session-id")]
    assert calls.count(f"Bearer {narrow}") >= 1
    story.upstream.refuse("tools/call", 403, times=2, headers={"WWW-Authenticate": f'Bearer scope="write", {THEIRS}'})
    for client in (story.modern(narrow), story.modern(narrow, capabilities=TAKES_TASKS)):
        answer = await client.call("plain")
        assert (answer.status, dict(answer.headers)["www-authenticate"]) == (403, f'Bearer scope="write", {OWN}')
    assert story.upstream.runs == {"plain": 3}


async def test_a_call_of_a_killed_gateway_is_followed_with_the_token_of_the_next_request(tmp_path: Path) -> None:
    async with authorization_server() as issuer, scripted_http() as upstream:
        options = ("--issuer", issuer.issuer, "--audience", HERE, "--auth", "pass")
        async with cluster(tmp_path / "log.db", *options, target=upstream.url) as gateways:
            first, second = issuer.token(HERE), issuer.token(HERE, exp=int(time.time()) + 7200)
            web = Web(gateways.proxy.url)
            peer = await Peer(web, token=first).initialize()
            wire = await peer.call("plain", token=1, steps=[["progress", 1], ["wait", "gate"], ["progress", 2]])
            await wire.message()
            await gateways.crash()
            await wire.drop()
            upstream.set(token=second)
            peer.token = second
            upstream.open("gate")
            seen: list[Message] = []
            while not seen or "result" not in seen[-1]:  # it may be sent away once more, to come with its token
                wire = await peer.get(wire.last_id)
                seen += await wire.rest()
            assert (progress_of(seen), text_of(seen[-1]), upstream.runs) == ([2], "done", {"plain": 1})
            assert {headers["authorization"] for headers in upstream.headers} == {f"Bearer {first}", f"Bearer {second}"}
            await web.aclose()


async def test_a_client_may_listen_though_the_gateway_has_no_token_of_its_own(story: Story) -> None:
    peer = story.modern(story.token())
    wanted = {"notifications": {"toolsListChanged": True}}
    async with await peer.send("subscriptions/listen", wanted) as exchange:
        assert (await exchange.until_messages(1))[0]["method"] == "notifications/subscriptions/acknowledged"
