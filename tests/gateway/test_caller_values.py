"""A server that gets something of its caller's request: each caller has a process of its own, with its own value."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure._core.limits import Caller
from perdure.gateway.host import host_upstream, lanes_of
from perdure.gateway.lane import UpstreamUnavailable
from perdure.gateway.upstream import HttpUpstream, Program, Text, Upstream
from perdure.settings import Settings
from perdure.store.interface import Store
from tests.support.clients.wire_client import Peer, answer_of
from tests.support.servers import scripted_stdio
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.scripted_http import scripted_http
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

TOKEN = Text((("header", "X-GitHub-Token"),))


@asynccontextmanager
async def served(tmp_path: Path, store: Store | None = None, **more: Text) -> AsyncIterator[Site]:
    """`more`: settings of the server."""
    argv = (sys.executable, scripted_stdio.__file__)
    env = {"GITHUB_TOKEN": TOKEN, **{f"SCRIPTED_{name.upper()}": text for name, text in more.items()}}
    upstream = Upstream(name="github", era="session", program=Program(argv=argv, cwd=tmp_path, env=env))
    async with serve(host_upstream(upstream, Settings()), store=store) as site:
        yield site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with served(tmp_path) as site:
        yield site


class TokenPeer(Peer):
    """A client that sends a token of its own with each request."""

    secret = ""

    def headers(self, *arguments: str, **more: str) -> list[tuple[str, str]]:
        own = [("x-github-token", self.secret)] if self.secret else []
        return super().headers(*arguments, **more) + own


async def seen(peer: Peer) -> str:
    environment = json.loads(await peer.result("plain", do=[{"environment": True}]))
    return str(environment["GITHUB_TOKEN"])


async def test_a_header_becomes_a_variable_of_the_callers_own_process(site: Site) -> None:
    """G46."""
    ann, bob = TokenPeer(site), TokenPeer(site)
    ann.secret, bob.secret = "of ann", "of bob"
    await ann.initialize()
    await bob.initialize()
    assert [await seen(ann), await seen(bob)] == ["of ann", "of bob"]


async def test_a_principal_that_no_variable_can_hold_is_refused(tmp_path: Path) -> None:
    argv, env = (sys.executable, scripted_stdio.__file__), {"WHO": Text((("principal", ""),))}
    upstream = Upstream(name="github", era="session", program=Program(argv=argv, cwd=tmp_path, env=env))
    async with lanes_of(upstream) as lanes:
        with pytest.raises(UpstreamUnavailable, match="variable WHO for the server github cannot have a NUL character"):
            lanes.place(Caller("a\0b", ""), None)


async def test_a_caller_without_it_learns_what_to_send(site: Site) -> None:
    peer = TokenPeer(site)
    headers = [(name, value) for name, value in peer.headers() if name != "mcp-protocol-version"]
    error = answer_of(await site.request("POST", headers=headers, body=peer.handshake()))["error"]
    assert error["code"] == -31010
    assert error["data"] == {"upstream": "github", "reason": "unauthorized", "ran": False}
    assert error["message"] == (
        "The server github needs the header X-GitHub-Token of its caller, and the request has no header X-GitHub-Token."
        " Sending the request again does not help until the configuration of its MCP client is corrected."
    )


async def test_a_child_after_a_restart_has_the_value_of_the_next_request(tmp_path: Path) -> None:
    """The value is never stored, so the next process of the gateway has it from a request alone. G46."""
    async with served(tmp_path, SharedStore(tmp_path / "log.db")) as first:
        ann = TokenPeer(first)
        ann.secret = "of ann"
        await ann.initialize()
        assert await seen(ann) == "of ann"
    async with served(tmp_path, SharedStore(tmp_path / "log.db")) as second:
        ann.site, ann.secret = second, "of ann, renewed"
        assert await seen(ann) == "of ann, renewed"


SECRET = "ghp_of-ann"


def telling(words: str) -> Text:
    """A text with the caller's secret in it."""
    return Text((("text", words), *TOKEN.parts))


def actions(caplog: pytest.LogCaptureFixture) -> set[str]:
    """What was logged. The secret is not in any of it."""
    found = [vars(record) for record in caplog.records]
    assert SECRET not in str(found)
    return {record["action"] for record in found if "action" in record}


async def test_a_callers_secret_is_masked_in_all_that_its_program_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On stdout, on stderr, in a refusal of the gateway's own request, and when the process ends."""
    caplog.set_level(logging.DEBUG, "perdure")
    said = telling("I have ")
    async with served(tmp_path, banner=said, stderr=said, because=said, deny=Text.plain("tools/list")) as site:
        ann = TokenPeer(site)
        ann.secret = SECRET
        await ann.initialize()
        assert await seen(ann) == SECRET
        await ann.call("plain", do=[{"print": f"half {SECRET} of a line"}, {"exit": 1}])
        wanted = {"upstream.noise", "upstream.stderr", "upstream.refused", "upstream.died", "upstream.lost"}
        await until(lambda: wanted <= actions(caplog))


async def test_a_callers_secret_is_masked_when_its_program_refuses_the_handshake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "perdure")
    async with served(tmp_path, refuse=Text.plain("-32000"), because=telling("I know ")) as site:
        ann = TokenPeer(site)
        ann.secret = SECRET
        refused = await site.request("POST", headers=ann.headers(), body=ann.handshake())
        assert "refused initialize: I know ***" in answer_of(refused)["error"]["message"]
        assert "upstream.unavailable" in actions(caplog)
        assert SECRET not in repr(site.app.upstream)


async def test_a_callers_secret_is_masked_in_what_a_server_at_an_address_says(caplog: pytest.LogCaptureFixture) -> None:
    """As an error of the gateway's own request, as no message, and as a refused handshake."""
    caplog.set_level(logging.DEBUG, "perdure")
    async with scripted_http() as server:
        address = HttpUpstream(url=server.url, headers={"X-Key": TOKEN})
        upstream = Upstream(name="github", era="session", patience=0.3, address=address)
        async with serve(host_upstream(upstream, Settings())) as site:
            ann = TokenPeer(site)
            ann.secret = SECRET
            server.refuse("tools/list", 200, error=[-32000, f"I know {SECRET}"])
            await ann.initialize()
            await ann.result("plain", steps=[["event", f"no JSON but {SECRET}"]])
            await until(lambda: {"upstream.refused", "gateway.misheard"} <= actions(caplog))
            server.refuse("initialize", 200, error=[-32000, f"I know {SECRET}"])
            ann.session = ""
            refused = await site.request("POST", headers=ann.headers(), body=ann.handshake())
            assert "refuses the handshake: I know ***" in answer_of(refused)["error"]["message"]
            assert "upstream.unavailable" in actions(caplog)
            assert SECRET not in repr(site.app.upstream)
