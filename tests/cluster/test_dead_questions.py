"""Questions of tools whose node has died: on whichever stream they were asked, an answer that was accepted counts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.server.mcpserver import Context, MCPServer

from perdure._core.ids import SessionId
from perdure.store.records import AskRecord
from perdure.store.steps import OpenAsk
from tests.cluster.held_reads import HeldReads
from tests.support.clients.wire_client import Message, Peer, text_of
from tests.support.servers.gate_file_tools import IDEMPOTENT
from tests.support.servers.in_process import Site, serve, until
from tests.support.stores.dead_node import DeadNode, Left
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

server = MCPServer("roots", version="1", log_level="CRITICAL")


@server.tool(annotations=IDEMPOTENT)
async def roots(ctx: Context) -> str:
    found = await ctx.session.send_request(types.ListRootsRequest(), types.ListRootsResult)
    return str(found.roots[0].uri)


@dataclass(kw_only=True)
class Scene:
    site: Site
    peer: Peer
    dead: DeadNode
    left: Left
    asks: list[AskRecord]

    async def answer(self) -> None:
        """Answer all questions at the living node, each with another root."""
        for ask in self.asks:
            result = {"roots": [{"uri": f"file:///{ask.request_id}"}]}
            assert (await self.peer.send({"jsonrpc": "2.0", "id": ask.id, "result": result})).status_code == 202

    async def settle(self) -> None:
        await self.dead.die()
        await until(lambda: self.site.app.counters.nodes_settled)

    async def messages(self) -> list[Message]:
        return await (await self.peer.get(self.left.position())).rest()


@asynccontextmanager
async def scene(path: Path, where: str, *, store: Any = None) -> AsyncIterator[Scene]:
    """A node that is about to die runs a call, or a batch of two. Their tools have asked their client, on the stream of
    the call or on the standalone one."""
    async with serve(server, store=store or SharedStore(path)) as site:
        peer = Peer(site, version="2025-03-26", capabilities={"roots": {}})
        await peer.initialize()
        dead = await DeadNode.on(path)
        requests = [peer.tool("roots", id=id_) for id_ in ((1, 2) if where == "batch" else (1,))]
        left = await dead.take(peer.session, *requests)
        owner = await site.store.session(SessionId(peer.session))
        assert owner is not None
        one = AskRecord(
            session=owner.id,
            id="",
            stream=owner.standalone if where == "standalone" else left.stream,
            request=b'{"method":"roots/list"}',
            node=dead.node,
            call=left.stream,
            incarnation=owner.incarnation,
        )
        asks = [replace(one, id=f"ask-{dead.node}-{request['id']}", request_id=request["id"]) for request in requests]
        assert not any(await dead.store.commit([OpenAsk(record=ask) for ask in asks]))
        yield Scene(site=site, peer=peer, dead=dead, left=left, asks=asks)


@pytest.mark.parametrize("where", ["own", "standalone", "batch"])
async def test_an_answer_for_a_dead_node_counts_wherever_it_was_asked(where: str, tmp_path: Path) -> None:
    """Each tool of a batch gets its own."""
    async with scene(tmp_path / "log.db", where) as told:
        await told.answer()
        await told.settle()
        messages = await told.messages()
    answers = {message["id"]: text_of(message) for message in messages if "result" in message}
    assert answers == {ask.request_id: f"file:///{ask.request_id}" for ask in told.asks}
    assert [message for message in messages if message.get("method") == "roots/list"] == []


@pytest.mark.parametrize("where", ["own", "standalone", "batch"])
async def test_a_death_while_a_question_is_open_does_not_count(where: str, tmp_path: Path) -> None:
    """The question is withdrawn, and asked again under a new name."""
    async with scene(tmp_path / "log.db", where) as told:
        await told.settle()
        store, session = told.site.store, SessionId(told.peer.session)
        while len(asks := await store.asks(session)) < len(told.asks) or any(ask in told.asks for ask in asks):
            pass
        assert {call.attempt for call in await store.calls(session, stream=told.left.stream)} == {1}
        told.asks[:] = asks
        await told.answer()
        answers = [message for message in await told.messages() if "result" in message]
        assert len(answers) == len(told.asks)


async def test_an_answer_that_is_accepted_while_its_call_is_settled_counts(tmp_path: Path) -> None:
    """The dead node's mail was read before it came, and the question is withdrawn after it was accepted."""
    reads = itertools.count(1)
    store = HeldReads(tmp_path / "log.db", "asks", lambda _: next(reads) == 2)  # to record answers, and to withdraw
    async with scene(tmp_path / "log.db", "own", store=store) as told:
        store.hold = True
        await told.dead.die()
        await store.reached.wait()
        await told.answer()
        store.go.set()
        messages = await told.messages()
    assert [text_of(message) for message in messages if "result" in message] == ["file:///1"]
    assert [message for message in messages if message.get("method") == "roots/list"] == []
