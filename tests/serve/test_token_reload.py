"""SIGHUP reads the token file again: a token that was removed stops working, and what it opened ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mcp.server.auth.provider import AccessToken

from perdure import App, Settings
from perdure.http.router import Router
from perdure.serve.token_file import FileTokens
from perdure.store import MemoryStore
from tests.end_to_end.test_drain import LEADER
from tests.support.clients.listeners import listening
from tests.support.clients.modern_peer import REPEATS, CallPeer, result_of
from tests.support.clients.raw_http import VERSION, Exchange, Peer, SessionPeer, bearer, message
from tests.support.processes.serving import Line, Served, log_lines, serving
from tests.support.servers.changing_server import new_server
from tests.support.servers.gated_server import live
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import under_uvicorn, until

pytestmark = pytest.mark.anyio

TOOLS = "tests.support.servers.gated_tools:server"
ALICE, BOB, NEW = "alice-token-0123456789", "bob-token-0123456789ab", "bob-token-9876543210ab"
READ = Line("WARNING", "tokens.read", "the tokens were read again; 1 streams and polls of removed ones were ended")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write(tmp_path / "tokens", f"alice:{ALICE}\nbob:{BOB}\n")


def write(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text)
    return path


@asynccontextmanager
async def served_alone(tokens: Path) -> AsyncIterator[tuple[Served, Peer]]:
    """In a process without a terminal, as services have none."""
    argv = (sys.executable, "-c", LEADER, "", sys.executable, "-m", "perdure", "serve")
    async with serving(TOOLS, "--store", "memory:", "--tokens", str(tokens), argv=argv) as served:
        yield served, Peer(port=served.port)


async def reads(peer: SessionPeer) -> Exchange:
    stream = await peer.begin("GET")
    assert await stream.head() == 200
    return stream


async def test_a_removed_token_stops_working_and_its_streams_end(tokens: Path) -> None:
    async with served_alone(tokens) as (served, peer):
        alice, bob = await peer.session(**bearer(ALICE)), await peer.session(**bearer(BOB))
        async with await reads(alice) as hers, await reads(bob) as his:
            write(tokens, f"alice:{ALICE}\nbob:{NEW}\n")
            served.send(signal.SIGHUP)
            await his.answer()
            await alice.call("announce", n=1)
            assert len(await hers.until_messages(1)) == 1
        assert (await bob.ask("POST", message("ping", id=9))).status == 401
        renewed = SessionPeer(port=bob.port, headers={**bob.headers, **bearer(NEW)}, id=bob.id)
        assert (await renewed.call("count", n=1)).status == 200
        assert await served.stop() == 0
    assert log_lines(served.output) == [READ]


async def test_a_bad_file_changes_nothing(tokens: Path) -> None:
    async with served_alone(tokens) as (served, peer):
        bob = await peer.session(**bearer(BOB))
        write(tokens, "no colon here\n")
        served.send(signal.SIGHUP)
        await until(lambda: len(served.output) > 1)
        assert (await bob.call("count", n=1)).status == 200
        assert await served.stop() == 0
    reason = f"the tokens stay as they were: {tokens}:1: no colon; each line is principal:token"
    assert log_lines(served.output) == [Line("ERROR", "tokens.kept", reason)]


async def test_a_worker_that_is_replaced_accepts_no_removed_token_while_it_finishes(
    tokens: Path, tmp_path: Path
) -> None:
    options = ("--store", f"sqlite:{tmp_path / 'log.db'}", "--tokens", str(tokens), "--workers", "2")
    async with serving(TOOLS, *options) as served:
        peer = Peer(port=served.port)
        alice, bob = await peer.session(**bearer(ALICE)), await peer.session(**bearer(BOB))
        async with (
            await alice.begin_call("count", n=2, gate="oven", first=1) as hers,
            await bob.begin_call("count", n=2, gate="oven", first=1) as his,
        ):
            await hers.until_messages(1)
            await his.until_messages(1)
            write(tokens, f"alice:{ALICE}\n")
            served.send(signal.SIGHUP)
            assert len((await his.answer()).messages) == 1
            await his.again(bob.request("POST", message("ping", id=9)))
            assert (await his.answer()).status == 401
            await until(lambda: any("workers were replaced" in line for line in served.output))
            assert not hers.ended


# What ends, in one process


async def test_subscriptions_of_a_removed_token_end(tokens: Path) -> None:
    auth = FileTokens(tokens)
    async with (
        live(server=new_server(), auth=auth) as served,
        listening(served.port, "tools", headers=bearer(BOB)) as his,
        listening(served.port, "tools", headers=bearer(ALICE)) as hers,
    ):
        write(tokens, f"alice:{ALICE}\n")
        auth.read_again()
        assert await served.app.check_tokens() == 1
        while await his.read():
            pass
        assert his.exchange is not None
        assert his.exchange.messages[-1]["result"]["resultType"] == "complete"
        assert hers.exchange is not None
        assert not hers.exchange.parser.complete


async def test_a_held_poll_of_a_removed_token_is_answered(tokens: Path, request: pytest.FixtureRequest) -> None:
    shown: list[str] = []

    class Watched(FileTokens):
        async def verify_token(self, token: str) -> AccessToken | None:
            shown.append(token)
            return await super().verify_token(token)

    auth = Watched(tokens)
    async with live(auth=auth, task_after=0.0, task_hold=60.0) as served:
        bob = CallPeer(port=served.port, headers=bearer(BOB), capabilities=REPEATS)
        task = result_of(await bob.call("wait", {"gate": request.node.name}))["taskId"]
        before = len(shown)
        poll = asyncio.create_task(bob.get(task))
        await until(lambda: len(shown) > before)
        write(tokens, f"alice:{ALICE}\n")
        auth.read_again()
        await until(served.app.check_tokens)
        assert (await poll)["status"] == "working"
        open_gate(request.node.name)


async def test_a_token_that_has_another_principal_now_ends_what_it_opened(tokens: Path) -> None:
    auth = FileTokens(tokens)
    async with live(auth=auth) as served:
        bob = await served.session(**bearer(BOB))
        async with await reads(bob) as his:
            assert await served.app.check_tokens() == 0
            write(tokens, f"alice:{BOB}\n")
            auth.read_again()
            assert await served.app.check_tokens() == 1
            await his.answer()
        assert (await bob.ask("POST", message("ping", id=9))).status == 404


async def test_a_removed_token_ends_what_it_opened_at_every_server_of_a_process(tokens: Path) -> None:
    auth, settings = FileTokens(tokens), Settings()

    def make(path: str) -> App:
        return App(new_server(), store=MemoryStore(), settings=settings, auth=auth, path=path)

    router = Router({"bread": make, "cake": make}, settings=settings, auth=auth, path="/mcp")
    async with under_uvicorn(router) as port:
        ends = []
        for name in ("bread", "cake"):
            bob = Peer(port=port, headers=bearer(BOB))
            client = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "peer", "version": "1"}}
            begun = await bob.ask("POST", message("initialize", client, id=0), path=f"/mcp/{name}")
            bob.headers["mcp-session-id"] = str(begun.header("mcp-session-id"))
            await bob.ask("POST", message("notifications/initialized"), path=f"/mcp/{name}")
            ends.append(await bob.begin("GET", path=f"/mcp/{name}"))
            assert await ends[-1].head() == 200
        write(tokens, f"alice:{ALICE}\n")
        auth.read_again()
        assert await router.check_tokens() == 2
        for stream in ends:
            await stream.answer()
            await stream.aclose()
        router.begin_stop()
