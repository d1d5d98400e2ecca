"""`subscriptions/listen` at one process and at two: what a listener is told, what is refused, and what is kept."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastmcp import Context as FastContext
from fastmcp import FastMCP
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated, ToolsListChanged
from mcp.shared.exceptions import MCPError
from mcp_types import (
    ResourceUpdatedNotification,
    ResourceUpdatedNotificationParams,
    SubscriptionsListenRequestParams,
    SubscriptionsListenResult,
    ToolListChangedNotification,
)

from perdure._core import changes as rules
from perdure._core.codes import STORE_UNAVAILABLE
from perdure._core.ids import RecordKind
from perdure._core.limits import Caller
from perdure._core.states import LogState
from perdure.sessions import call_quota, hearing
from perdure.sessions import changes as all_changes
from perdure.sessions.changes import SECRET, Changes
from perdure.store import MemoryStore
from perdure.store.records import SessionRecord
from perdure.store.steps import Release
from tests.support.clients.listeners import GAP, POSITION, SUBSCRIPTION, Listener, listening, publish, wanted
from tests.support.clients.modern_peer import CallPeer, result_of
from tests.support.clients.modern_requests import modern
from tests.support.clients.raw_http import Answer, Peer
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.notice_board import new_server
from tests.support.stores.dead_node import life_of
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.shared import SharedStore

pytestmark = pytest.mark.anyio

LISTS = ("tools", "prompts", "resources")


@pytest.fixture
async def board() -> AsyncIterator[Site]:
    async with serve(new_server()) as site:
        yield site


def changes_of(site: Site) -> Changes:
    changes = life_of(site).changes
    assert changes is not None
    return changes


async def record_of_changes(site: Site) -> SessionRecord:
    """The record to which all changes streams belong."""
    [record] = [one for one in await site.store.sessions(after=None, limit=9) if await site.store.streams(one.id)]
    return record


@asynccontextmanager
async def two(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Site, Site]]:
    """Two nodes on one store, each with a server of its own."""
    path = tmp_path / "log.db"
    async with (
        serve(new_server(), store=SharedStore(path), **settings) as a,
        serve(new_server(), store=SharedStore(path), **settings) as b,
    ):
        yield a, b


async def ask(site: Site, notifications: Any, meta: Mapping[str, Any] | None = None, **headers: str) -> Answer:
    """A request to listen that is not served as one."""
    params = {"notifications": notifications} | ({} if meta is None else {"_meta": meta})
    body, own = modern("subscriptions/listen", params, id="mine")
    async with asyncio.timeout(10):
        return await Peer(port=site.port).ask("POST", body, headers=own | headers)


# --- What a listener is told


async def test_the_acknowledgement_comes_first_with_what_is_honoured_and_a_position(board: Site) -> None:
    ear = Listener("tools", "board://a")
    told = await ear.listen(board.port)
    meta = told["params"].pop("_meta")
    assert told == {
        "jsonrpc": "2.0",
        "method": "notifications/subscriptions/acknowledged",
        "params": {"notifications": wanted("tools", "board://a")},
    }
    assert meta.keys() == {SUBSCRIPTION, POSITION}
    assert meta[SUBSCRIPTION] == "mine"
    assert len(meta[POSITION]["nodes"]) == 1
    await ear.cut()


async def test_a_silent_listener_gets_keep_alives() -> None:
    async with serve(new_server(), keepalive_interval=0.1) as site, listening(site.port, "tools") as ear:
        assert ear.exchange is not None
        while b": keep-alive\n\n" not in ear.exchange._body:
            assert await ear.read()


async def test_a_client_that_does_not_read_costs_no_more_than_its_filter() -> None:
    """Its cues wait as one for each item; when it reads again it gets them, and nothing else waits for it."""
    uris = [f"board://{n}/{'x' * 1500}" for n in range(20)]
    async with (
        serve(new_server(), small_buffers=True) as site,
        listening(site.port, "tools", *uris) as ear,
        listening(site.port, *uris) as other,
    ):
        assert ear.exchange is not None
        ear.exchange.stop_reading()
        for _ in range(60):
            for uri in uris:
                changes_of(site).heard(rules.UPDATED, {"uri": uri})
            await other.until_told(*uris)
            other.forget()
        changes_of(site).heard("notifications/tools/list_changed", None)
        await ear.until_told("tools", *uris)
        assert ear.told.count(uris[0]) < 30


async def test_a_client_that_takes_nothing_is_let_go_of() -> None:
    uris = [f"board://{n}/{'x' * 1900}" for n in range(200)]
    async with serve(new_server(), small_buffers=True, stream_timeout=0.2) as site, listening(site.port, *uris) as ear:
        assert ear.exchange is not None
        ear.exchange.stop_reading()

        def is_gone() -> bool:
            for uri in uris:
                changes_of(site).heard(rules.UPDATED, {"uri": uri})
            return len(changes_of(site)) == 0

        await until(is_gone)


async def test_the_resource_below_one_that_was_named_is_told(board: Site) -> None:
    async with listening(board.port, "board://a") as ear:
        changes = changes_of(board)
        changes.heard("notifications/resources/updated", {"uri": "board://a/part"})
        changes.heard("notifications/resources/updated", {"uri": "board://b"})
        changes.heard("notifications/message", {"level": "info"})
        changes.heard("notifications/tools/list_changed", None)
        changes.heard("notifications/resources/updated", {"uri": "board://a"})
        await ear.until_told("board://a")
        assert ear.told == ["board://a/part", "board://a"]


async def test_what_a_tool_says_reaches_the_listeners_of_a_server_without_subscriptions() -> None:
    """FastMCP serves no `subscriptions/listen`; its tools send notifications to their callers."""
    server: FastMCP[None] = FastMCP("fast")

    @server.tool
    async def change(ctx: FastContext) -> str:
        await ctx.send_notification(ToolListChangedNotification())
        return "done"

    @server.tool
    async def update(uri: str, ctx: FastContext) -> str:
        params = ResourceUpdatedNotificationParams(uri=uri)
        await ctx.send_notification(ResourceUpdatedNotification(params=params))
        return "a word on notifications/prompts/list_changed"

    async with serve(server) as site, listening(site.port, "tools", "prompts", "board://a") as ear:
        peer = await site.join()
        assert await peer.result("change") == "done"
        await ear.until_told("tools")
        for uri in ("board://b", "board://a"):  # and in a call without a session
            called = await site.modern("tools/call", {"name": "update", "arguments": {"uri": uri}})
            assert called.status_code == 200
        await ear.until_told("board://a")
        assert ear.told == ["tools", "board://a"]


# --- What is refused


@pytest.mark.parametrize("position", ["12", {"time": "noon", "nodes": {}}, {"time": 1.0, "nodes": {"a": 1}}, None])
async def test_a_malformed_position_is_refused_by_name(board: Site, position: Any) -> None:
    answer = await ask(board, wanted("tools"), {POSITION: position})
    assert (answer.status, answer.json["id"], answer.error["code"]) == (400, "mine", -32602)
    assert answer.error["message"].startswith(f"{POSITION} is not a position: ")


async def test_more_resources_than_a_listener_may_name_are_refused(board: Site) -> None:
    most = [f"board://{n}" for n in range(rules.MAX_URIS)]
    async with listening(board.port, *most):
        answer = await ask(board, {"resourceSubscriptions": [*most, "board://more"]})
    assert (answer.status, answer.error["code"]) == (400, -32602)
    assert answer.error["message"].startswith("The filter cannot be served: resourceSubscriptions names 1001 resources")


async def test_listeners_name_no_more_resources_than_all_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever node; what was named already costs nothing."""
    monkeypatch.setattr("perdure.sessions.wanted.MAX_UNION", 3)
    async with (
        two(tmp_path, max_share=100) as (a, b),
        listening(a.port, "board://a", "board://b"),
        listening(b.port, "board://b", "board://c"),
    ):
        answer = await ask(b, wanted("board://d"))
        assert (answer.status, answer.error["code"], answer.json["id"]) == (503, -31004, "mine")
        assert "may name 3 resources in all" in answer.error["message"]
        async with listening(b.port, "board://a"), listening(a.port, "board://c"):
            pass


async def test_a_process_serves_no_more_listeners_than_it_may() -> None:
    async with (
        serve(new_server(), max_listeners=2, max_sessionless=1) as site,
        listening(site.port, "tools"),
        listening(site.port, "tools"),
    ):
        answer = await ask(site, wanted("tools"))
        assert (answer.status, answer.json["id"]) == (503, "mine")
        assert answer.error["message"].endswith("serves 2 subscriptions, as many as it may (max_listeners)")
        assert await publish(site.port, "tools")  # calls are not counted with them


async def test_a_caller_holds_no_more_listeners_than_it_may() -> None:
    async with serve(new_server(), max_principal_listeners=1) as site, listening(site.port, "tools"):
        answer = await ask(site, wanted("tools"))
        assert (answer.status, answer.error["code"]) == (429, -31004)
        assert answer.error["message"].endswith("as many as you may (max_principal_listeners)")
        async with listening(site.port, "tools", address="127.0.0.2") as ear:
            await ear.cut()
            await until(lambda: len(changes_of(site)) == 1)
            async with listening(site.port, "tools", address="127.0.0.2"):
                pass


async def test_of_a_request_to_listen_only_its_id_and_its_filter_are_kept(board: Site) -> None:
    """Promise 6: a listener may stay for days, and its request may have 4 MiB."""

    def padding() -> int:
        return sum(type(one) is dict and "of no use" in one for one in gc.get_objects())

    params = {"notifications": wanted("tools"), "_meta": {"padding": [{"of no use": []} for _ in range(10_000)]}}
    body, headers = modern("subscriptions/listen", params, id="mine")
    del params
    async with await Peer(port=board.port).begin("POST", body, headers=headers) as exchange:
        assert await exchange.until_messages(1)
        gc.collect()
        assert padding() < 100
        assert life_of(board).context.work.held < 1_000


async def test_what_requests_to_listen_take_while_they_are_read_is_bounded(board: Site) -> None:
    work = life_of(board).context.work
    work.take(other := Caller("another"), size := 512 << 20)
    answer = await ask(board, wanted("tools"))
    assert (answer.status, answer.error["code"]) == (503, -31004), answer
    assert "(max_work)" in answer.error["message"]
    work.take(other, -size)
    async with listening(board.port, "tools"):
        pass


async def test_the_id_of_a_listener_has_the_length_of_any_other(board: Site) -> None:
    for length, status in ((256, 200), (300, 400)):
        body, headers = modern("subscriptions/listen", {"notifications": wanted("tools")}, id="i" * length)
        async with await Peer(port=board.port).begin("POST", body, headers=headers) as exchange:
            assert await exchange.head() == status


async def test_what_is_no_plain_request_to_listen_is_refused_as_the_sdk_does(board: Site) -> None:
    """Its bodies and headers are checked by the SDK's own functions; what they do not pass gets the SDK's answer."""
    assert (await ask(board, wanted("tools"), accept="application/json")).status == 406
    wrong = await ask(board, {"resourceSubscriptions": "board://a"})
    assert (wrong.status, wrong.error["code"], wrong.json["id"]) == (400, -32602, "mine")
    body, headers = modern("tools/list", {})
    mixed = await Peer(port=board.port).ask("POST", body, headers=headers | {"mcp-method": "subscriptions/listen"})
    assert (mixed.status, mixed.error["code"]) == (400, -32020)
    broken = await Peer(port=board.port).ask("POST", b"{", headers=headers | {"mcp-method": "subscriptions/listen"})
    assert (broken.status, broken.error["code"]) == (400, -32700)


async def test_listeners_are_refused_while_the_store_fails() -> None:
    store = FaultyStore(MemoryStore())
    async with (
        serve(new_server(), store=store, complaint="store fails", store_timeout=0.2) as site,
        listening(site.port, "tools") as ear,
    ):
        store.writes = Fault.RAISES
        await publish(site.port, "tools")
        await ear.until_told("tools")  # what is here goes on from memory
        answer = await ask(site, wanted("tools"))
        assert (answer.status, answer.error["code"]) == (503, STORE_UNAVAILABLE)
        store.works()
        await until(lambda: life_of(site).context.journal.state is LogState.HEALTHY)
        async with listening(site.port, "tools"):
            pass


async def test_a_server_that_refuses_our_own_subscription_serves_its_listeners_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its handler may ask who listens, and no client does."""
    bus = InMemorySubscriptionBus()
    served = ListenHandler(bus)

    async def listen(
        ctx: ServerRequestContext[Any, Any], params: SubscriptionsListenRequestParams
    ) -> SubscriptionsListenResult:
        if ctx.request is None:
            raise MCPError(-32000, "who are you?")
        return await served(ctx, params)

    server: Server[Any] = Server("picky", on_subscriptions_listen=listen)
    async with serve(server) as site, listening(site.port, "tools") as ear:
        await bus.publish(ToolsListChanged())
        await ear.until_told("tools")
    assert any(getattr(record, "action", "") == "changes.refused" for record in caplog.records)


async def test_a_server_whose_author_switched_subscriptions_off_has_none() -> None:
    async with serve(MCPServer("off", subscriptions=False)) as site:
        answer = await ask(site, wanted("tools"))
        assert (answer.status, answer.error["code"]) == (404, -32601)


# --- What is kept


async def test_nothing_is_written_or_heard_before_the_first_listener_comes(tmp_path: Path) -> None:
    async with two(tmp_path) as (a, b):
        await publish(a.port, "tools")
        assert SECRET not in await a.store.secrets()
        assert not await a.store.sessions(after=None, limit=10)
        async with listening(b.port, "tools") as ear:
            await publish(a.port, "tools")
            await ear.until_told("tools")
        record = await record_of_changes(a)
        assert record.kind is RecordKind.MARK
        assert len(await a.store.streams(record.id)) == 2
        assert await a.store.count_states() == {}


async def test_listeners_take_no_room_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while they are open nor afterwards; and they give up nobody's answers."""
    monkeypatch.setattr(call_quota, "FULL_SECONDS", 0.0)
    monkeypatch.setattr(call_quota, "COUNT_SECONDS", 0.0)
    async with serve(new_server(), max_tasks=3) as site:
        peer, arguments = CallPeer(port=site.port), {"what": "prompts"}
        first = await peer.call("change", arguments, key="first")
        for number in range(2, 6):
            async with listening(site.port, "tools", address=f"127.0.0.{number}"):
                pass
        async with listening(site.port, "tools"), listening(site.port, "tools", address="127.0.0.9"):
            for key in ("second", "third"):
                assert (await peer.call("change", arguments, key=key)).status == 200
            again = await peer.call("change", arguments, key="first")
            assert result_of(again) == result_of(first)
        assert site.app.counters.calls_joined == 1


async def test_a_position_from_before_what_is_kept_is_told_as_a_gap(
    board: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.sessions.change_log.KEPT_CHANGES", 3)
    async with listening(board.port, "tools", "prompts") as ear:
        await ear.cut()
        for what in ("tools", "resources", "tools"):
            await publish(board.port, what)
        await ear.listen(board.port)
        await ear.until_told("tools")
        assert GAP not in ear.told
        await ear.cut()
        ear.forget()
        for _ in range(4):
            await publish(board.port, "resources")
        await ear.listen(board.port)
        await ear.until_told("tools", "prompts")
        assert ear.told == [GAP, "tools", "prompts"]
        assert ear.exchange is not None
        gap = ear.exchange.messages[1]["params"]
        assert gap["reason"] == "some of the changes since the position are no longer kept"


async def test_streams_of_nodes_that_are_gone_are_dropped_in_their_time(tmp_path: Path) -> None:
    """A position from before then may have missed something, and is told so; a later one has not."""
    async with two(tmp_path, event_ttl=0.2) as (a, _), listening(a.port, "tools") as ear:
        early = ear.position
        path = tmp_path / "log.db"
        async with serve(new_server(), store=SharedStore(path)) as third:
            await publish(third.port, "tools")
            await ear.until_told("tools")
        changes = changes_of(a)
        record = await record_of_changes(a)

        async def is_dropped() -> bool:
            changes.on_hint(())
            return len(await a.store.streams(record.id)) == 2

        await until(is_dropped)
        await publish(a.port, "tools")
        while len(ear.position["nodes"]) == 3:
            assert await ear.read()
        late = ear.position
        ear.position, ear.told = early, []
        await ear.listen(a.port)
        await ear.until_told("tools")
        assert ear.told[0] == GAP
        ear.position = {**late, "time": late["time"] + 5}  # behind the slack between clocks
        ear.forget()
        await ear.listen(a.port)
        await publish(a.port, "tools")
        await ear.until_told("tools")
        assert ear.told == ["tools"]


async def test_a_resource_that_no_node_has_heard_of_counts_as_changed(tmp_path: Path) -> None:
    """No listener wanted it since the position: what it did meanwhile is not known."""
    async with two(tmp_path) as (a, b), listening(a.port, "tools") as ear:
        await ear.cut()
        await publish(b.port, "board://a")
        ear.items = ("tools", "board://a")
        await ear.listen(b.port)
        await ear.until_told("board://a")
        assert ear.told == ["board://a"]


async def test_a_resource_that_no_listener_wants_any_more_is_forgotten_after_a_while(tmp_path: Path) -> None:
    async with two(tmp_path, listen_memory=0.05) as (a, _), listening(a.port, "board://a") as ear:
        record = await record_of_changes(a)
        async with listening(a.port, "board://a", "board://b"):
            assert len(await a.store.asks(record.id)) == 2
        await until(lambda: is_wanted(a, record, 1))
        await ear.cut()
        await until(lambda: is_wanted(a, record, 0))


async def is_wanted(site: Site, record: SessionRecord, batches: int) -> bool:
    return len(await site.store.asks(record.id)) == batches


async def test_a_process_that_is_started_again_and_again_leaves_few_streams_behind(tmp_path: Path) -> None:
    """Although no listener is there any more."""
    path = tmp_path / "log.db"
    async with serve(new_server(), store=SharedStore(path)) as site, listening(site.port, "tools"):
        pass
    for _ in range(rules.KEPT_STREAMS + 3):
        async with serve(new_server(), store=SharedStore(path)) as site:
            record = await record_of_changes(site)
            count = len(await site.store.streams(record.id))
    assert count == rules.KEPT_STREAMS + 1


async def test_a_client_that_is_back_before_its_loss_was_noticed_hears_what_it_missed(tmp_path: Path) -> None:
    """Its old connection still counts as open at the node that served it."""
    async with two(tmp_path) as (a, b), listening(a.port, "tools", "prompts"):
        await publish(a.port, "tools")
        back = Listener("tools", "prompts")
        await back.listen(b.port)
        await back.until_told("tools")
        assert back.told == ["tools"]
        await back.cut()


async def test_a_caller_is_remembered_by_its_principal() -> None:
    async with serve(new_server(), auth=Names()) as site:
        alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
        async with listening(site.port, "tools", "prompts", headers=alice) as ear:
            await ear.cut()
            await until(lambda: len(changes_of(site)) == 0)
            await publish(site.port, "tools", headers=bob)
            async with listening(site.port, "tools", "prompts", headers=bob) as other:
                await publish(site.port, "prompts", headers=bob)
                await other.until_told("prompts")
                assert other.told == ["prompts"]
            ear.position = None
            await ear.listen(site.port)
            await ear.until_told("tools", "prompts")


class Names(TokenVerifier):
    """Takes every token as the name of its client."""

    async def verify_token(self, token: str) -> AccessToken | None:
        return AccessToken(token=token, client_id=token, scopes=[])


async def test_without_memory_a_client_without_a_position_hears_from_now_on(tmp_path: Path) -> None:
    async with two(tmp_path, listen_memory=0) as (a, b):
        ear = Listener(*LISTS, keeps_position=False)
        await ear.listen(a.port)
        await ear.cut()
        await publish(b.port, "tools")
        await ear.listen(b.port)
        await publish(a.port, "prompts")
        await ear.until_told("prompts")
        assert ear.told == ["prompts"]
        await ear.cut()


# --- Where something goes wrong


async def test_a_subscription_that_the_server_ends_is_opened_again_and_everything_may_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hearing, "_PAUSES", (0.0,))
    bus = InMemorySubscriptionBus()
    handler = ListenHandler(bus)
    server: Server[Any] = Server("closing", on_subscriptions_listen=handler)
    async with serve(server) as site, listening(site.port, "tools", "prompts") as ear:
        handler.close()
        await ear.until_told("tools", "prompts")
        ear.forget()
        await bus.publish(ToolsListChanged())
        await ear.until_told("tools")
        assert ear.told == ["tools"]


async def test_nothing_falls_between_two_subscriptions_to_the_server_when_more_is_wanted() -> None:
    """The next one is acknowledged before the last one ends."""
    bus, gate = InMemorySubscriptionBus(), asyncio.Event()
    served = ListenHandler(bus)
    begun: list[list[str] | None] = []

    async def listen(
        ctx: ServerRequestContext[Any, Any], params: SubscriptionsListenRequestParams
    ) -> SubscriptionsListenResult:
        begun.append(params.notifications.resource_subscriptions)
        if params.notifications.resource_subscriptions:
            await gate.wait()
        return await served(ctx, params)

    server: Server[Any] = Server("slow", on_subscriptions_listen=listen)
    async with serve(server) as site, listening(site.port, "tools") as ear:
        more = Listener("board://a")
        listens = asyncio.create_task(more.listen(site.port))
        await until(lambda: begun == [None, ["board://a"]])
        await bus.publish(ToolsListChanged())
        await ear.until_told("tools")
        gate.set()
        await listens
        await bus.publish(ResourceUpdated(uri="board://a"))
        await more.until_told("board://a")
        ear.forget()
        await bus.publish(ToolsListChanged())
        await ear.until_told("tools")
        await more.cut()


async def test_a_listener_does_not_wait_long_for_a_node_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is acknowledged, and told that it may have missed something once the node hears."""
    monkeypatch.setattr(all_changes, "HEARD_WITHIN", 0.05)
    async with two(tmp_path) as (a, b):
        changes = changes_of(b)
        kept: list[Any] = []
        monkeypatch.setattr(changes, "on_mail", kept.append)
        async with listening(a.port, "tools", "board://a") as ear:
            assert ear.told == []
            await until(lambda: kept)
            monkeypatch.undo()
            for message in kept:
                changes.on_mail(message)
            await ear.until_told("tools", "board://a")


async def test_a_node_that_others_took_for_dead_goes_on_with_another_stream(tmp_path: Path) -> None:
    """Its stream was let go of; what it hears behind that is not lost."""
    async with two(tmp_path) as (a, b), listening(b.port, "tools", "board://a") as ear:
        changes = changes_of(a)
        own = changes._log.stream
        assert own is not None
        await a.store.commit([Release(stream=own.id, fence=own.fence)])
        await ear.until_told("tools", "board://a")  # it looks like a death
        ear.forget()
        await publish(a.port, "board://a")
        await ear.until_told("board://a")
        await until(lambda: changes._log.stream not in (None, own))
        ear.forget()
        await publish(a.port, "tools")
        await ear.until_told("tools")
        async with listening(a.port, "board://b") as other:  # and it wants what its listeners want
            await publish(b.port, "board://b")
            await other.until_told("board://b")
