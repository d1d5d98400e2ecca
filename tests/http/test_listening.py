"""`subscriptions/listen` at one process and at two: what a listener is told, what is refused, and what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastmcp import Context as FastContext
from fastmcp import FastMCP
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

from perdure._core import listening as rules
from perdure._core.codes import STORE_UNAVAILABLE
from perdure._core.ids import RecordKind, SessionId
from perdure._core.limits import Caller
from perdure.sessions import call_quota
from perdure.sessions import listening as rules_of_listening
from perdure.sessions.listening import Listening
from perdure.store import MemoryStore
from perdure.store.steps import ChangeSession
from tests.support.clients.listeners import SUBSCRIPTION, Listener, listening, publish, wanted
from tests.support.clients.modern_peer import CallPeer, result_of
from tests.support.clients.modern_requests import modern
from tests.support.clients.raw_http import Answer, Peer
from tests.support.servers.changing_server import new_server
from tests.support.servers.in_process import Site, serve, until
from tests.support.stores.dead_node import life_of
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

LISTS = ("tools", "prompts", "resources")


@pytest.fixture
async def changing() -> AsyncIterator[Site]:
    async with serve(new_server()) as site:
        yield site


def listening_of(site: Site) -> Listening:
    listening = life_of(site).listening
    assert listening is not None
    return listening


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


async def test_the_acknowledgement_comes_first_with_what_is_honoured_and_a_cue_for_each_item_follows(
    changing: Site,
) -> None:
    """The listener may have been cut off before: it reads everything that it named again. What it brings of an earlier
    connection means nothing."""
    listener = Listener("tools", "note://a")
    assert await listener.listen(changing.port) == {
        "jsonrpc": "2.0",
        "method": "notifications/subscriptions/acknowledged",
        "params": {"notifications": wanted("tools", "note://a"), "_meta": {SUBSCRIPTION: "mine"}},
    }
    await listener.until_told("tools", "note://a")
    assert listener.told == ["tools", "note://a"]
    await listener.cut()
    params = {"notifications": wanted("tools"), "_meta": {"dev.perdure/position": {"time": "noon"}}}
    body, headers = modern("subscriptions/listen", params, id="mine")
    async with await Peer(port=changing.port).begin("POST", body, headers=headers) as exchange:
        assert await exchange.head() == 200


async def test_a_silent_listener_gets_keep_alives() -> None:
    async with serve(new_server(), keepalive_interval=0.1) as site, listening(site.port, "tools") as listener:
        assert listener.exchange is not None
        while b": keep-alive\n\n" not in listener.exchange._body:
            assert await listener.read()


async def test_a_client_that_does_not_read_costs_no_more_than_its_filter() -> None:
    """Its cues wait as one for each item; when it reads again it gets them, and nothing else waits for it."""
    uris = [f"note://{n}/{'x' * 1500}" for n in range(20)]
    async with (
        serve(new_server(), small_buffers=True) as site,
        listening(site.port, "tools", *uris) as listener,
        listening(site.port, *uris) as other,
    ):
        assert listener.exchange is not None
        listener.exchange.stop_reading()
        for _ in range(60):
            for uri in uris:
                listening_of(site).heard(rules.UPDATED, {"uri": uri})
            await other.until_told(*uris)
            other.forget()
        listening_of(site).heard("notifications/tools/list_changed", None)
        await listener.until_told("tools", *uris)
        assert listener.told.count(uris[0]) < 30


async def test_a_client_that_takes_nothing_is_let_go_of() -> None:
    uris = [f"note://{n}/{'x' * 1900}" for n in range(200)]
    async with (
        serve(new_server(), small_buffers=True, stream_timeout=0.2) as site,
        listening(site.port, *uris) as listener,
    ):
        assert listener.exchange is not None
        listener.exchange.stop_reading()

        def is_gone() -> bool:
            for uri in uris:
                listening_of(site).heard(rules.UPDATED, {"uri": uri})
            return len(listening_of(site)) == 0

        await until(is_gone)


async def test_the_resource_below_one_that_was_named_is_told(changing: Site) -> None:
    async with listening(changing.port, "note://a") as listener:
        changes = listening_of(changing)
        changes.heard("notifications/resources/updated", {"uri": "note://a/part"})
        changes.heard("notifications/resources/updated", {"uri": "note://b"})
        changes.heard("notifications/message", {"level": "info"})
        changes.heard("notifications/tools/list_changed", None)
        changes.heard("notifications/resources/updated", {"uri": "note://a"})
        await listener.until_told("note://a")
        assert listener.told == ["note://a/part", "note://a"]


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

    async with serve(server) as site, listening(site.port, "tools", "prompts", "note://a") as listener:
        peer = await site.join()
        assert await peer.result("change") == "done"
        await listener.until_told("tools")
        for uri in ("note://b", "note://a"):  # and in a call without a session
            called = await site.modern("tools/call", {"name": "update", "arguments": {"uri": uri}})
            assert called.status_code == 200
        await listener.until_told("note://a")
        assert listener.told == ["tools", "note://a"]


# --- What is refused


async def test_more_resources_than_a_listener_may_name_are_refused(changing: Site) -> None:
    most = [f"note://{n}" for n in range(rules.MAX_URIS)]
    async with listening(changing.port, *most):
        answer = await ask(changing, {"resourceSubscriptions": [*most, "note://more"]})
    assert (answer.status, answer.error["code"]) == (400, -32602)
    assert answer.error["message"].startswith("The filter cannot be served: resourceSubscriptions names 1001 resources")


async def test_listeners_name_no_more_resources_than_all_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whatever node; what was named already costs nothing."""
    monkeypatch.setattr(rules_of_listening, "MAX_UNION", 3)
    async with (
        two(tmp_path, max_share=100) as (a, b),
        listening(a.port, "note://a", "note://b"),
        listening(b.port, "note://b", "note://c"),
    ):
        answer = await ask(b, wanted("note://d"))
        assert (answer.status, answer.error["code"], answer.json["id"]) == (503, -31004, "mine")
        assert "name 3 resources, its limit" in answer.error["message"]
        async with listening(b.port, "note://a"), listening(a.port, "note://c"):
            pass


async def test_a_process_serves_no_more_listeners_than_it_may() -> None:
    async with (
        serve(new_server(), max_listeners=2, max_sessionless=1, max_share=100) as site,
        listening(site.port, "tools"),
        listening(site.port, "tools"),
    ):
        answer = await ask(site, wanted("tools"))
        assert (answer.status, answer.json["id"]) == (503, "mine")
        assert answer.error["message"].endswith("has 2 subscriptions, its limit (max_listeners)")
        assert await publish(site.port, "tools")  # calls are not counted with them


async def test_a_caller_holds_no_more_listeners_than_it_may() -> None:
    async with serve(new_server(), max_listeners=4) as site, listening(site.port, "tools"):
        answer = await ask(site, wanted("tools"))
        assert (answer.status, answer.error["code"]) == (429, -31004)
        assert answer.error["message"] == "You take 1 of max_listeners here, the limit for one caller (max_share)"
        async with listening(site.port, "tools", address="127.0.0.2") as listener:
            await listener.cut()
            await until(lambda: len(listening_of(site)) == 1)
            async with listening(site.port, "tools", address="127.0.0.2"):
                pass


async def test_of_a_request_to_listen_only_its_id_and_its_filter_are_kept(changing: Site) -> None:
    """Promise 6: a listener may stay for days, and its request may have 4 MiB."""

    def padding() -> int:
        return sum(type(one) is dict and "of no use" in one for one in gc.get_objects())

    params = {"notifications": wanted("tools"), "_meta": {"padding": [{"of no use": []} for _ in range(10_000)]}}
    body, headers = modern("subscriptions/listen", params, id="mine")
    del params
    async with await Peer(port=changing.port).begin("POST", body, headers=headers) as exchange:
        assert await exchange.until_messages(1)
        gc.collect()
        assert padding() < 100
        assert life_of(changing).context.work.held < 1_000


async def test_what_requests_to_listen_take_while_they_are_read_is_bounded(changing: Site) -> None:
    work = life_of(changing).context.work
    work.take(other := Caller("another"), size := 512 << 20)
    answer = await ask(changing, wanted("tools"))
    assert (answer.status, answer.error["code"]) == (503, -31004), answer
    assert "(max_work)" in answer.error["message"]
    work.take(other, -size)
    async with listening(changing.port, "tools"):
        pass


async def test_the_id_of_a_listener_has_the_length_of_any_other(changing: Site) -> None:
    for length, status in ((256, 200), (300, 400)):
        body, headers = modern("subscriptions/listen", {"notifications": wanted("tools")}, id="i" * length)
        async with await Peer(port=changing.port).begin("POST", body, headers=headers) as exchange:
            assert await exchange.head() == status


async def test_what_is_no_plain_request_to_listen_is_refused_as_the_sdk_does(changing: Site) -> None:
    """Its bodies and headers are checked by the SDK's own functions; what they do not pass gets the SDK's answer."""
    assert (await ask(changing, wanted("tools"), accept="application/json")).status == 406
    wrong = await ask(changing, {"resourceSubscriptions": "note://a"})
    assert (wrong.status, wrong.error["code"], wrong.json["id"]) == (400, -32602, "mine")
    body, headers = modern("tools/list", {})
    mixed = await Peer(port=changing.port).ask("POST", body, headers=headers | {"mcp-method": "subscriptions/listen"})
    assert (mixed.status, mixed.error["code"]) == (400, -32020)
    broken = await Peer(port=changing.port).ask("POST", b"{", headers=headers | {"mcp-method": "subscriptions/listen"})
    assert (broken.status, broken.error["code"]) == (400, -32700)


async def test_listeners_are_refused_while_the_store_fails() -> None:
    store = FaultyStore(MemoryStore())
    async with (
        serve(new_server(), store=store, complaint="store fails", store_timeout=0.2) as site,
        listening(site.port, "tools") as listener,
    ):
        store.writes = Fault.RAISES
        await CallPeer(port=site.port).call("change", {"what": "tools"}, key="mine")
        assert life_of(site).context.journal.is_degraded
        await publish(site.port, "tools")
        await listener.until_told("tools")  # what is here goes on from memory
        answer = await ask(site, wanted("tools"))
        assert (answer.status, answer.error["code"]) == (503, STORE_UNAVAILABLE)
        store.works()
        await until(lambda: not life_of(site).context.journal.is_degraded)
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
    async with serve(server) as site:
        listener = Listener("tools")
        await listener.listen(site.port)
        await bus.publish(ToolsListChanged())
        await listener.until_told("tools")
        await listener.cut()
    assert any(getattr(record, "action", "") == "changes.refused" for record in caplog.records)


async def test_a_server_whose_author_switched_subscriptions_off_has_none() -> None:
    async with serve(MCPServer("off", subscriptions=False)) as site:
        answer = await ask(site, wanted("tools"))
        assert (answer.status, answer.error["code"]) == (404, -32601)


# --- What is kept


async def test_nothing_is_kept_of_listeners_and_nothing_is_read_before_the_first_one_comes(tmp_path: Path) -> None:
    async with two(tmp_path) as (a, b):
        await publish(a.port, "tools")
        assert listening_of(a)._subscription._task is None
        async with listening(b.port, "tools", "note://a") as listener:
            await publish(a.port, "tools")
            await listener.until_told("tools")
        assert not any([await a.store.count_states(kind) for kind in RecordKind])
        await until(lambda: not listening_of(a)._nodes)  # and no node sends b anything any more


async def test_listeners_take_no_room_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while they are open nor afterwards; and they give up nobody's answers."""
    monkeypatch.setattr(call_quota, "FULL_SECONDS", 0.0)
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


async def test_other_nodes_forget_resources_that_no_listener_names_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with each listener that leaves: most come back."""
    monkeypatch.setattr(rules_of_listening, "LEFT_OVER", 1)
    async with two(tmp_path) as (a, b), listening(a.port, "note://a") as listener:

        def known() -> set[str]:
            return {uri for node in listening_of(b)._nodes.values() for uri in node.filter.uris}

        async with listening(a.port, "note://b", "note://c"):
            assert known() == {"note://a", "note://b", "note://c"}
        async with listening(a.port, "note://d"):
            assert known() == {"note://a", "note://b", "note://c", "note://d"}
        await until(lambda: known() == {"note://a"})
        await publish(b.port, "note://a")
        await listener.until_told("note://a")


# --- Lists: a cue that is not needed costs some hosts a call


async def test_a_listener_that_comes_back_gets_no_cue_for_a_list_that_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = new_server()
    async with serve(server) as site:
        listener = Listener("tools", "prompts", "note://a")
        await listener.listen(site.port)
        await listener.until_told("tools", "prompts", "note://a")  # nothing was known of the lists
        monkeypatch.setattr(rules_of_listening, "RETURNS_WITHIN", -1.0)  # the first minute is over
        for is_alone in (True, False):
            async with contextlib.AsyncExitStack() as stack:
                if not is_alone:
                    await stack.enter_async_context(listening(site.port, "note://b"))
                listener.forget()
                await listener.listen(site.port)
                await listener.until_told("note://a")
                assert listener.told == ["note://a"]
        await listener.cut()
        await until(lambda: len(listening_of(site)) == 0)
        monkeypatch.undo()
        monkeypatch.setattr(listening_of(site)._lists, "_changed", dict.fromkeys(rules.LISTS.values(), -1e9))
        server.change("prompts")  # which it did not publish
        listener.forget()
        await listener.listen(site.port)
        await listener.until_told("prompts", "note://a")
        assert listener.told == ["prompts", "note://a"]
        await listener.cut()


async def test_where_anything_may_have_changed_lists_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server reports itself is passed on, also where the list is the same: it may differ by caller."""
    server = new_server()
    async with serve(server) as site, listening(site.port, *LISTS, "note://a") as listener:
        for changed in ((), ("tools",), ("prompts", "resources")):
            for what in changed:
                server.change(what)
            listening_of(site).on_death()
            await listener.until_told("note://a", *changed)
            assert sorted(listener.told) == sorted(["note://a", *changed])
            listener.forget()
        listening_of(site).heard("notifications/tools/list_changed", None)
        await listener.until_told("tools")
        listener.forget()
        listening_of(site).on_death()
        await listener.until_told("tools", "note://a")  # not known since: the list may have changed once more
        listener.forget()
        listening_of(site).on_death()
        await listener.until_told("note://a")
        assert listener.told == ["note://a"]


@pytest.mark.parametrize("fails", ["raises", "hangs"])
async def test_a_list_that_cannot_be_read_counts_as_changed(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setattr(rules_of_listening, "DIGEST_SECONDS", 0.05)
    server = new_server()

    async def list_tools() -> Any:
        if fails == "raises":
            raise RuntimeError("no tools today")
        await asyncio.Event().wait()

    monkeypatch.setattr(server, "list_tools", list_tools)
    async with serve(server) as site, listening(site.port, *LISTS) as listener:
        listening_of(site).on_death()
        await listener.until_told("tools")
        assert listener.told == ["tools"]


# --- Where something goes wrong


async def test_a_subscription_that_the_server_ends_is_opened_again_and_everything_may_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules_of_listening, "_PAUSES", (0.0,))
    bus = InMemorySubscriptionBus()
    handler = ListenHandler(bus)
    server: Server[Any] = Server("closing", on_subscriptions_listen=handler)
    async with serve(server) as site, listening(site.port, "tools", "note://a") as listener:
        handler.close()
        await listener.until_told("note://a")
        assert listener.told == ["note://a"]  # the list of tools is the same
        listener.forget()
        await bus.publish(ToolsListChanged())
        await listener.until_told("tools")
        assert listener.told == ["tools"]


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
    async with serve(server) as site, listening(site.port, "tools") as listener:
        more = Listener("note://a")
        listens = asyncio.create_task(more.listen(site.port))
        await until(lambda: begun == [None, ["note://a"]])
        await bus.publish(ToolsListChanged())
        await listener.until_told("tools")
        gate.set()
        await listens
        await bus.publish(ResourceUpdated(uri="note://a"))
        await more.until_told("note://a")
        listener.forget()
        await bus.publish(ToolsListChanged())
        await listener.until_told("tools")
        await more.cut()


async def test_a_listener_does_not_wait_long_for_a_node_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is acknowledged, and told that it may have missed something once the node hears."""
    monkeypatch.setattr(rules_of_listening, "SUBSCRIBED_WITHIN", 0.05)
    async with two(tmp_path) as (a, b):
        other = listening_of(b)
        kept: list[Any] = []
        monkeypatch.setattr(other, "on_mail", kept.append)
        async with listening(a.port, "note://a") as listener:
            assert listener.told == []
            await until(lambda: kept)
            monkeypatch.undo()
            for message in kept:
                other.on_mail(message)
            await listener.until_told("note://a")


async def test_a_node_that_lacks_what_others_announced_asks_for_it(tmp_path: Path) -> None:
    """Its mail was lost, or refused because too much of it waited: the beats say what it lacks. Listeners are told that
    they may have missed something."""
    async with two(tmp_path) as (a, b), listening(a.port, "note://a") as listener:
        # A step that changes nothing is written after the announcement.
        await life_of(a).context.journal.write(ChangeSession(session=SessionId("none"), active=0.0))
        node = life_of(a).context.node
        await until(lambda: node in listening_of(b)._nodes)
        del listening_of(b)._nodes[node]
        await listener.until_told("note://a")
        listener.forget()
        await publish(b.port, "note://a")
        await listener.until_told("note://a")


async def test_a_node_that_joins_learns_what_listeners_want_before_it_serves(tmp_path: Path) -> None:
    """And they read nothing again because of it."""
    path = tmp_path / "log.db"
    async with two(tmp_path) as (a, _), listening(a.port, "tools", "note://a") as listener:
        for item in ("note://a", "tools"):
            async with serve(new_server(), store=SharedStore(path)) as third:
                await publish(third.port, item)
                await listener.until_told(item)
                assert listener.told == [item]
                listener.forget()


async def test_nodes_that_know_what_listeners_want_do_not_ask_again(tmp_path: Path) -> None:
    """One that joins is answered, and what the others know stays the last word for them."""
    async with two(tmp_path) as (a, b), listening(a.port, "note://a") as listener:
        async with serve(new_server(), store=SharedStore(tmp_path / "log.db")) as third:
            own, nodes = life_of(a), [listening_of(b), listening_of(third)]
            await until(lambda: all(own.context.node in node._nodes for node in nodes))
            await own.liveness.beat(json.dumps({"listening": listening_of(a).number}).encode())
            for node, site in zip(nodes, (b, third), strict=True):
                for _ in range(3):
                    node.go_round(await life_of(site).liveness.overview(mail_after=0))
                assert not node._asked
        assert listener.told == []


async def test_more_resources_than_one_message_holds_are_announced_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_of_listening, "MAX_URIS", 2)
    uris = [f"note://{n}" for n in range(5)]
    async with two(tmp_path) as (a, b), listening(a.port, *uris) as listener:
        for uri in uris:
            await publish(b.port, uri)
            await listener.until_told(uri)


async def test_a_node_that_joins_and_is_not_answered_serves_and_reports_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_of_listening, "ANSWERED_WITHIN", 0.01)
    async with two(tmp_path) as (a, _), listening(a.port, "note://a") as listener:
        kept: list[Any] = []
        monkeypatch.setattr(listening_of(a), "on_mail", kept.append)
        async with serve(new_server(), store=SharedStore(tmp_path / "log.db")) as third:
            await until(lambda: kept)
            monkeypatch.undo()
            for message in kept:
                listening_of(a).on_mail(message)
            await listener.until_told("note://a")
            listener.forget()
            await publish(third.port, "note://a")
            await listener.until_told("note://a")


async def test_more_changes_than_wait_for_the_store_are_one_cue_for_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_of_listening, "MAX_UNSENT", 3)
    async with two(tmp_path) as (a, b), listening(a.port, "note://a", "note://b") as listener:
        for n in range(3):
            listening_of(b).heard(rules.UPDATED, {"uri": f"note://a/{n}"})
        await listener.until_told("note://a/0", "note://a/1", "note://a/2")
        listener.forget()
        for n in range(4):
            listening_of(b).heard(rules.UPDATED, {"uri": f"note://a/{n}"})
        await listener.until_told("note://a", "note://b")
        assert listener.told == ["note://a", "note://b"]
