"""A server that gets something of its caller's request: each caller has a process of its own, with its own value."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure.gateway.host import host_upstream
from perdure.gateway.upstream import Program, Text, Upstream
from perdure.settings import Settings
from perdure.store.interface import Store
from tests.support.clients.wire_client import Peer, answer_of
from tests.support.servers import scripted_stdio
from tests.support.servers.in_process import Site, serve
from tests.support.stores.shared import SharedStore

pytestmark = pytest.mark.anyio

TOKEN = Text((("header", "X-GitHub-Token"),))


@asynccontextmanager
async def served(tmp_path: Path, store: Store | None = None) -> AsyncIterator[Site]:
    argv = (sys.executable, scripted_stdio.__file__)
    upstream = Upstream(name="github", program=Program(argv=argv, cwd=tmp_path, env={"GITHUB_TOKEN": TOKEN}))
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


async def test_a_caller_without_it_learns_what_to_send(site: Site) -> None:
    peer = TokenPeer(site)
    headers = [(name, value) for name, value in peer.headers() if name != "mcp-protocol-version"]
    error = answer_of(await site.request("POST", headers=headers, body=peer.handshake()))["error"]
    assert error["code"] == -31010
    assert error["data"] == {"upstream": "github", "reason": "unauthorized", "ran": False}
    assert "needs the header X-GitHub-Token" in error["message"]


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
