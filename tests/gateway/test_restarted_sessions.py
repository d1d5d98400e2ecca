"""A session goes on with the next process of its server: what is repeated, what its client learns, and when it ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure._core.handshakes import front_result, front_version, lost_capabilities
from perdure.gateway.session_runtime import RESTARTED
from perdure.store import MemoryStore
from tests.gateway.gateways import (
    OUTCOME_UNKNOWN,
    Gateway,
    begin,
    error_of,
    gateway,
    has_process,
    heard,
    methods_of,
    refused_handshake,
    text_of_call,
    until_method,
)
from tests.support.clients.wire_client import Message, Peer, Wire, progress_of, text_of
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

TOOLS = "notifications/tools/list_changed"
PROMPTS = "notifications/prompts/list_changed"
RESOURCES = "notifications/resources/list_changed"
UPDATED = "notifications/resources/updated"
MESSAGE = "notifications/message"


async def ask(peer: Peer, method: str, params: Message | None = None) -> Message:
    """Send a request; its result."""
    result: Message = (await (await peer.post(peer.request(method, params))).rest())[-1]["result"]
    return result


async def until_listed(served: Gateway, peer: Peer) -> None:
    """Wait until the gateway has read the tools of the session's child: it has a digest of them."""

    async def has_digest() -> bool:
        return b"tools" in (await served.record_of(peer)).upstream

    await until(has_digest)


async def restart(served: Gateway, peer: Peer) -> None:
    """Kill the session's child, and have the next one started."""
    await until_listed(served, peer)
    before = len(served.pids)
    await served.kill()
    assert await text_of_call(peer, {"say": "back"}, tool="read_only") == "back"
    assert len(served.pids) == before + 1


async def seen_until(wire: Wire, method: str) -> list[Message]:
    """All messages up to one of that method."""
    seen = [await wire.message()]
    while seen[-1].get("method") != method:
        seen.append(await wire.message())
    return seen


async def test_subscriptions_survive_a_restart(tmp_path: Path) -> None:
    """Each has one cue at the restart, without any request; later updates arrive once. G21."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await peer.get()
        for name in "ab":
            await ask(peer, "resources/subscribe", {"uri": f"note://{name}"})
        await served.kill()
        await until(lambda: len(served.pids) == 2)
        cues = [(await until_method(wire, UPDATED))["params"]["uri"] for _ in range(2)]
        assert cues == ["note://a", "note://b"]
        subscribed = [message for message in await heard(peer) if message.get("method") == "resources/subscribe"]
        assert [message["params"]["uri"] for message in subscribed] == cues
        assert await text_of_call(peer, {"update": "note://b"}, {"update": "note://c"}, {"say": "sent"}) == "sent"
        await text_of_call(peer, {"notify": PROMPTS})
        later = await seen_until(wire, PROMPTS)
        assert [m["params"]["uri"] for m in later if m["method"] == UPDATED] == ["note://b"]


async def test_subscriptions_wait_for_a_server_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than requests do: their client sends nothing meanwhile."""
    monkeypatch.setattr("perdure.gateway.session_runtime.RETRY_SECONDS", 0.1)
    async with gateway(tmp_path, patience=0.1) as served:
        peer = await served.join()
        wire = await peer.get()
        await ask(peer, "resources/subscribe", {"uri": "note://a"})
        (tmp_path / "more").write_text("exit=1")
        await served.kill()
        await until(lambda: len(served.pids) >= 3)
        (tmp_path / "more").unlink()
        assert (await until_method(wire, UPDATED))["params"] == {"uri": "note://a"}


async def test_a_subscription_that_is_refused_now_is_dropped(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        peer = await served.join()
        await ask(peer, "resources/subscribe", {"uri": "note://a"})
        (tmp_path / "more").write_text("deny=resources/subscribe")
        await served.kill()
        await until(lambda: len(served.pids) == 2)

        async def is_dropped() -> bool:
            return not (await served.record_of(peer)).sticky

        await until(is_dropped)
        assert await text_of_call(peer, {"say": "on"}) == "on"


async def test_a_new_process_is_brought_to_where_the_session_is_before_any_request(tmp_path: Path) -> None:
    """The requests that waited follow in their order. G22."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        await ask(peer, "logging/setLevel", {"level": "warning"})
        await ask(peer, "resources/subscribe", {"uri": "note://a"})
        (tmp_path / "more").write_text(f"wait={tmp_path / 'go'}")
        await served.kill()
        await until(lambda: len(served.pids) == 2)
        waiting = [await peer.post(peer.request("scripted/echo", {"n": number})) for number in range(3)]
        (tmp_path / "go").touch()
        for wire in waiting:
            await wire.rest()
        received = [(message["method"], message.get("params", {}).get("n")) for message in (await heard(peer))[:8]]
        assert received == [
            ("initialize", None),
            ("notifications/initialized", None),
            ("logging/setLevel", None),
            ("resources/subscribe", None),
            ("tools/list", None),
            *(("scripted/echo", number) for number in range(3)),
        ]


async def test_log_level_survives_a_restart(tmp_path: Path) -> None:
    """The client that wants less hears less of the restart. G22."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await peer.get()
        await ask(peer, "logging/setLevel", {"level": "warning"})
        await restart(served, peer)
        assert methods_of(await heard(peer)).count("logging/setLevel") == 1
        assert (await until_method(wire, MESSAGE))["params"]["data"] == RESTARTED
        await ask(peer, "logging/setLevel", {"level": "error"})
        await restart(served, peer)
        await text_of_call(peer, {"notify": PROMPTS}, {"notify": UPDATED, "params": {"uri": "end://"}})
        assert MESSAGE not in methods_of(await seen_until(wire, UPDATED))


async def test_lists_that_changed_over_a_restart(tmp_path: Path) -> None:
    """The list of tools is compared; nobody knows whether the others have changed. G23."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        await until_listed(served, peer)
        wire = await peer.get()
        await restart(served, peer)
        await text_of_call(peer, {"notify": UPDATED, "params": {"uri": "end://"}})
        same = methods_of(await seen_until(wire, UPDATED))
        assert TOOLS not in same
        assert {PROMPTS, RESOURCES} <= set(same)
        (tmp_path / "more").write_text("tools=extra")
        await restart(served, peer)
        assert TOOLS in methods_of(await seen_until(wire, TOOLS))
        assert [tool["name"] for tool in (await ask(peer, "tools/list"))["tools"]][3:] == ["extra"]


async def test_tools_that_change_meanwhile_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for changes in a row; what they say of themselves counts from then on."""
    monkeypatch.setattr("perdure.gateway.session_runtime.RELIST_SECONDS", 0.1)
    async with gateway(tmp_path, rerun={"late": True}) as served:
        peer = await served.join()
        changes: list[Message] = [{"tools": ["early"]}] * 5
        await text_of_call(peer, *changes, {"tools": ["late"]})

        async def is_listed_again() -> bool:
            return methods_of(await heard(peer)).count("tools/list") >= 2

        await until(is_listed_again)
        assert methods_of(await heard(peer)).count("tools/list") <= 3
        (tmp_path / "more").write_text("tools=late")  # of the next process
        assert error_of((await (await begin(peer, "late", {"kill": True})).rest())[-1])["code"] == OUTCOME_UNKNOWN
        assert served.runs.count("late") == 2


async def test_roots_asked_before_any_call(tmp_path: Path) -> None:
    """On the standalone stream, and its answer reaches the child. G20."""
    async with gateway(tmp_path, "roots=1") as served:
        peer = await served.join()
        wire = await peer.get()
        asked = await until_method(wire, "roots/list")
        await peer.answer(asked, {"roots": [{"uri": "file:///data"}]})
        await until_heard(peer, {"roots": [{"uri": "file:///data"}]})


async def until_heard(peer: Peer, result: Message) -> None:
    while result not in [message.get("result") for message in await heard(peer)]:
        pass


async def test_asks_of_a_dead_child(tmp_path: Path) -> None:
    """Withdrawn on the stream, and asked again under a new name by the second run. G17."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await begin(peer, "idempotent", {"ask": "elicitation/create", "params": {"message": "name?"}})
        first = await until_method(wire, "elicitation/create")
        await served.kill()
        withdrawn = await until_method(wire, "notifications/cancelled")
        assert withdrawn["params"] == {"requestId": first["id"], "reason": "the server's process ended (SIGKILL)"}
        second = await until_method(wire, "elicitation/create")
        assert second["id"] != first["id"]
        assert second["params"] == first["params"] == {"message": "name?"}
        await peer.answer(first, {"action": "decline"})  # nobody waits for it
        await peer.answer(second, {"action": "accept", "content": {"name": "Ada"}})
        answer = (await wire.rest())[-1]
        assert json.loads(text_of(answer)) == {"action": "accept", "content": {"name": "Ada"}}


async def test_progress_that_does_not_rise_is_dropped(tmp_path: Path) -> None:
    def progress(number: int) -> Message:
        params = f'{{"progressToken": $TOKEN, "progress": {number}}}'
        return {"print": f'{{"jsonrpc": "2.0", "method": "notifications/progress", "params": {params}}}'}

    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await begin(peer, "plain", *map(progress, (1, 3, 3, 2, 4)))
        assert progress_of(await wire.rest()) == [1, 3, 4]


async def test_the_clients_progress_with_an_ask_has_the_servers_token(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        peer = await served.join()
        params = {"message": "name?", "_meta": {"progressToken": "of the server"}}
        wire = await begin(peer, "plain", {"ask": "elicitation/create", "params": params})
        asked = await until_method(wire, "elicitation/create")
        token = asked["params"]["_meta"]["progressToken"]
        assert token not in ("of the server", 1)
        progress = {"progressToken": token, "progress": 1}
        await peer.send({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress})
        await peer.answer(asked, {"action": "decline"})
        await wire.rest()
        [passed] = [message for message in await heard(peer) if message.get("method") == "notifications/progress"]
        assert passed["params"] == {"progressToken": "of the server", "progress": 1}


async def test_an_ask_that_its_child_withdraws(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await begin(peer, "plain", {"begin_ask": "roots/list"}, {"withdraw": True}, {"say": "guessed"})
        asked, withdrawn, answer = await wire.rest()
        assert withdrawn["method"] == "notifications/cancelled"
        assert withdrawn["params"]["requestId"] == asked["id"]
        assert text_of(answer) == "guessed"


async def test_an_ask_is_answered_after_the_call_with_which_it_was_shown(tmp_path: Path) -> None:
    """A server may ask for roots by itself, while a call runs that does not wait for them."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await begin(peer, "plain", {"begin_ask": "roots/list"}, {"say": "done"})
        asked, answer = await wire.rest()
        assert text_of(answer) == "done"
        roots = {"roots": [{"uri": "file:///work"}]}
        await peer.answer(asked, roots)
        assert [message["result"] for message in await heard(peer) if "result" in message] == [roots]


async def test_a_message_that_names_no_call_is_shown_with_one_where_the_standalone_stream_is_not_read(
    tmp_path: Path,
) -> None:
    """A pipe does not say whose it is: of the only call, else of none, else of the oldest one."""

    def log(text: str, **meta: Any) -> Message:
        return {"notify": MESSAGE, "params": {"level": "info", "data": text, **meta}}

    def logged(messages: list[Message]) -> list[str]:
        return [message["params"]["data"] for message in messages if message.get("method") == MESSAGE]

    gate, of_task = tmp_path / "gate", {"_meta": {"io.modelcontextprotocol/related-task": {"taskId": "t"}}}
    async with gateway(tmp_path) as served:
        peer = await served.join()
        oldest = await begin(peer, "plain", log("alone"), {"wait": str(gate)})
        await served.has_run()
        other = await begin(peer, "read_only", log("unread"))
        assert logged(await other.rest()) == []
        assert logged(await seen_until(oldest, MESSAGE) + await seen_until(oldest, MESSAGE)) == ["alone", "unread"]
        standalone = await peer.get()
        other = await begin(peer, "read_only", log("read"))
        assert logged(await other.rest()) == []
        assert (await until_method(standalone, MESSAGE))["params"]["data"] == "read"
        gate.touch()
        assert logged(await oldest.rest()) == []
        only = await begin(peer, "plain", log("of a task", **of_task), log("its own"))
        assert logged(await only.rest()) == ["its own"]
        assert (await until_method(standalone, MESSAGE))["params"]["data"] == "of a task"


async def test_the_upstreams_ping_is_answered_here(tmp_path: Path) -> None:
    """While the client is away; it is not asked. G24."""
    go, pinged = tmp_path / "go", tmp_path / "pinged"
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await begin(peer, "plain", {"progress": 1}, {"wait": str(go)}, {"ask": "ping"}, {"note": str(pinged)})
        await until_method(wire, "notifications/progress")
        await wire.drop()
        go.touch()
        await until(pinged.exists)
        [answer] = await (await peer.get(wire.last_id)).rest()
        assert text_of(answer) == "{}"
        assert await ask(peer, "ping") == {}
        assert "ping" not in methods_of(await heard(peer))


async def test_cursors_pass(tmp_path: Path) -> None:
    """The client's, and those of the gateway's own lists. G35."""
    async with gateway(tmp_path, "pages=1", "tools=fourth") as served:
        peer = await served.join()
        names, cursor = [], None
        while True:
            page = await ask(peer, "tools/list", None if cursor is None else {"cursor": cursor})
            names += [tool["name"] for tool in page["tools"]]
            if (cursor := page.get("nextCursor")) is None:
                break
        assert names == ["plain", "idempotent", "read_only", "fourth"]
        await until_listed(served, peer)
        wire = await begin(peer, "read_only", {"progress": 1}, {"kill": True})  # of the third page
        assert error_of((await wire.rest())[-1])["code"] == OUTCOME_UNKNOWN
        assert served.runs == ["read_only", "read_only"]


async def test_an_odd_list_of_tools_is_read_as_far_as_it_can_be(tmp_path: Path) -> None:
    """Half an emoji is a cursor, and a number has thousands of digits. Its second page is the first one again."""
    tools = f'[1,{{"name":"idempotent","annotations":{{"idempotentHint":true}},"n":{"7" * 5000}}}]'
    async with gateway(tmp_path, f'listed={{"tools":{tools},"nextCursor":"\\ud83d"}}') as served:
        peer = await served.join()
        await until_listed(served, peer)
        wire = await begin(peer, "idempotent", {"progress": 1}, {"kill": True})
        assert error_of((await wire.rest())[-1])["code"] == OUTCOME_UNKNOWN
        assert served.runs == ["idempotent", "idempotent"]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
FLAT = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(max_size=8), LEAVES, max_size=3)
VALUES = FLAT | st.lists(FLAT, max_size=3) | st.dictionaries(st.text(max_size=8), FLAT, max_size=3)
PARAMS = st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda name: name != "_meta"), VALUES, max_size=4)


@pytest.fixture
def samples() -> list[Message]:
    """Params of any kind: as many as a property test would have, for one server."""
    found: list[Message] = []

    @settings(database=None)
    @given(params=PARAMS, meta=PARAMS)
    def collect(params: Message, meta: Message) -> None:
        found.append({**params, "_meta": meta})

    collect()
    return found


async def test_unknown_methods_and_meta_pass(samples: list[Message], tmp_path: Path) -> None:
    """Whatever is in them, both ways: params, `_meta`, results, and notifications to either side. G36."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await peer.get()
        for sample in samples:
            assert (await ask(peer, "scripted/echo", sample))["params"] == sample
            body = {"jsonrpc": "2.0", "method": "notifications/custom", "params": sample}
            assert (await peer.send(body)).status_code == 202
            await text_of_call(peer, {"notify": UPDATED, "params": sample})
            assert (await until_method(wire, UPDATED))["params"] == sample
        taken = [message["params"] for message in await heard(peer) if message.get("method") == "notifications/custom"]
        assert taken == samples


async def test_a_process_with_nothing_to_do_is_stopped(tmp_path: Path) -> None:
    """Not while it runs, asks, or has subscribers; and the next request finds another one."""
    async with gateway(tmp_path, process_idle=0.3) as served:
        peer = await served.join()
        go = tmp_path / "go"
        wire = await begin(peer, "plain", {"wait": str(go)})
        await asyncio.sleep(0.7)
        assert has_process(served.pids[0])
        go.touch()
        await wire.rest()
        await until(lambda: not has_process(served.pids[0]))
        standalone = await peer.get()
        assert await text_of_call(peer, {"say": "another"}) == "another"
        assert RESOURCES in methods_of(await seen_until(standalone, RESOURCES))
        await ask(peer, "resources/subscribe", {"uri": "note://a"})
        await asyncio.sleep(0.7)
        assert has_process(served.pids[1])
        assert len(served.pids) == 2


async def test_a_session_that_ends_with_its_process(tmp_path: Path) -> None:
    """`on_restart = "end"`: the call is answered, and the session is gone, with the reason."""
    async with gateway(tmp_path, on_restart="end", serving={"recover": "strict"}) as served:
        peer = await served.join()
        wire = await begin(peer, "idempotent", {"progress": 1}, {"hang": True})
        await wire.messages(1)
        await served.kill()
        assert error_of((await wire.rest())[-1])["code"] == OUTCOME_UNKNOWN

        async def is_gone() -> bool:
            return (await peer.send(peer.request("tools/list"))).status_code == 404

        await until(is_gone)
        response = await peer.send(peer.request("tools/list"))
        assert error_of(response.json())["data"]["reason"] == "server ended"
        assert served.runs == ["idempotent"]
        assert await text_of_call(await served.join(), {"say": "new"}) == "new"


async def test_a_server_that_can_less_than_before(tmp_path: Path) -> None:
    """A client that was told of a capability cannot be told that it is gone: its session ends."""
    async with gateway(tmp_path, serving={"recover": "strict"}) as served:
        peer = await served.join()
        (tmp_path / "more").write_text("without=prompts")
        await served.kill()
        wire = await begin(peer, "read_only", {"say": "?"})
        assert "does not declare prompts any more" in error_of((await wire.rest())[-1])["message"]
        await until(lambda: served.site.app.session_info(peer.session) is None)
        assert (await peer.send(peer.request("tools/list"))).status_code == 404


async def test_a_server_that_says_another_name_now(tmp_path: Path) -> None:
    """A client that reattaches gets the new result."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        (tmp_path / "more").write_text("name=renamed")
        await restart(served, peer)
        again = await peer.reattach()
        assert again.session == peer.session
        assert again.welcome["result"]["serverInfo"]["name"] == "renamed"


async def test_limits_of_processes(tmp_path: Path) -> None:
    """The third session is refused before anything is written; there is room when the first has ended. G32."""
    store = MemoryStore()
    async with gateway(tmp_path, max_processes=2, serving={"store": store}) as served:
        first, second = await served.join(), await served.join()
        status, error = await refused_handshake(served)
        assert (status, error["code"]) == (503, -31004)
        assert error["message"].startswith("The server scripted has 2 processes, its limit (max_processes)")
        assert served.site.app.counters.sessions_opened == 2
        await first.delete()
        await until(lambda: not has_process(served.pids[0]))
        assert await text_of_call(await served.join(), {"say": "room"}) == "room"
        assert await text_of_call(second, {"say": "me too"}) == "me too"


@pytest.mark.parametrize(("limit", "status"), [("max_processes", 503), ("max_caller_processes", 429)])
async def test_a_burst_of_sessions_is_refused_beyond_the_limit(tmp_path: Path, limit: str, status: int) -> None:
    """No session is opened whose process would have no room."""
    limits: dict[str, Any] = {limit: 2}
    async with gateway(tmp_path, **limits) as served:
        peers = [Peer(served.site) for _ in range(10)]
        answers = await asyncio.gather(
            *(served.site.request("POST", headers=peer.headers(), body=peer.handshake()) for peer in peers)
        )
        assert sorted(answer.status_code for answer in answers) == [200, 200, *[status] * 8]
        assert sum("mcp-session-id" in answer.headers for answer in answers) == 2
        assert served.site.app.counters.sessions_opened == 2


async def test_limits_of_one_callers_processes(tmp_path: Path) -> None:
    async with gateway(tmp_path, max_caller_processes=1) as served:
        peer = await served.join()
        status, error = await refused_handshake(served)
        assert (status, error["code"]) == (429, -31004)
        assert "your limit (max_caller_processes)" in error["message"]
        await served.kill()
        assert await text_of_call(peer, {"say": "replaced"}) == "replaced"
        await peer.delete()
        await until(lambda: not has_process(served.pids[-1]))
        assert (await served.join()).session


async def test_a_session_at_rest_has_no_process(tmp_path: Path) -> None:
    """And goes on with another one when its client comes back."""
    async with gateway(tmp_path, serving={"session_grace": 2.0, "cleanup_interval": 0.2}) as served:
        peer = await served.join()
        await until(lambda: not has_process(served.pids[0]))
        assert await text_of_call(peer, {"say": "awake"}) == "awake"


async def test_notifications_wait_for_the_process_within_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as unhandled until they are written."""
    monkeypatch.setattr("perdure.http.endpoint.MAX_NOTIFICATIONS", 5)
    go = tmp_path / "go"
    async with gateway(tmp_path) as served:
        peer = await served.join()
        await text_of_call(peer, {"say": "up"})
        (tmp_path / "more").write_text(f"wait={go}")
        await served.kill()
        waiting = asyncio.create_task(text_of_call(peer, {"say": "late"}))
        await until(lambda: len(served.pids) == 2)
        body = {"jsonrpc": "2.0", "method": "notifications/custom", "params": {}}
        statuses = [(await peer.send(body)).status_code for _ in range(7)]
        assert statuses == [202] * 5 + [429] * 2
        go.touch()
        assert await waiting == "late"
        assert (await peer.send(body)).status_code == 202
        assert methods_of(await heard(peer)).count("notifications/custom") == 6


def test_the_handshake_as_a_client_sees_it() -> None:
    said: dict[str, Any] = {
        "protocolVersion": "2024-11-05",
        "capabilities": {"tools": {}, "prompts": None, "resources": True, "x": 1},
        "serverInfo": {"name": "n", "version": "1"},
        "instructions": "read",
    }
    assert front_result(said, "2025-11-25") == {
        **said,
        "protocolVersion": "2025-11-25",
        "capabilities": {
            "tools": {"listChanged": True},
            "prompts": None,
            "resources": {"listChanged": True},
            "x": 1,
        },
    }
    assert front_result({"capabilities": "none"}, "v") == {"capabilities": {}, "protocolVersion": "v"}
    assert [front_version(asked) for asked in ("2025-03-26", "1999-01-01", None)] == [
        "2025-03-26",
        "2025-11-25",
        "2025-11-25",
    ]
    before = {"tools": {}, "resources": {"subscribe": True}, "logging": {}}
    assert lost_capabilities(before, {"tools": {}, "resources": {}, "prompts": {}}) == [
        "logging",
        "resources.subscribe",
    ]
    assert lost_capabilities(before, before) == []
