"""The calls of a node that died get their final answer, from one that lives (promise 3)."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY

import perdure
from perdure._core import mail
from perdure._core.ids import (
    Kind,
    NodeId,
    RecordKind,
    SessionId,
    StreamId,
    new_session_id,
    new_stream_id,
    parse_position,
)
from perdure._core.states import CallState
from perdure.errors import StoreError, StoreUnavailable
from perdure.serve.token_file import FileTokens
from perdure.sessions.early_answers import OWN_CALL
from perdure.store.interface import stream_by_id, streams_by_id
from perdure.store.records import AskRecord, CallRecord, Event, StreamRecord
from perdure.store.steps import Append, Forward, OpenAsk, OpenStream, PutCall, PutSession, Refusals, SendMail, Step
from perdure.testing._values import dead_nodes
from tests.cluster.held_reads import HeldReads
from tests.support.clients.wire_client import LATEST, Message, Peer, answer_of, progress_of, text_of
from tests.support.servers.gate_file_tools import IDEMPOTENT
from tests.support.servers.in_process import Site, serve, until
from tests.support.stores.dead_node import DeadNode, Left, Library, life_of, logged_by_call, progress_of_call
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

UNKNOWN = -31001
CANCELLED = -32800
TOKENS = {"ann": "ann-0123456789abcdef", "bob": "bob-0123456789abcdef"}


@dataclass(kw_only=True)
class House:
    """A living node on a file, and nodes beside it that die."""

    path: Path
    stack: AsyncExitStack

    async def node(self, *, store: Any = None, **options: Any) -> tuple[Site, Library]:
        shop = Library()
        store = store or SharedStore(self.path)
        return await self.stack.enter_async_context(serve(shop.server, store=store, **options)), shop

    async def dead_node(self) -> DeadNode:
        return await DeadNode.on(self.path)

    async def scene(
        self, *, version: str = LATEST, token: str | None = None, **options: Any
    ) -> tuple[Site, Library, Peer, DeadNode]:
        """A node, a client of it, and another node that is about to die."""
        site, shop = await self.node(**options)
        return site, shop, await site.join(version, token=token), await self.dead_node()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        yield House(path=tmp_path / "log.db", stack=stack)


@pytest.fixture
def tokens(tmp_path: Path) -> FileTokens:
    path = tmp_path / "tokens"
    path.write_text("".join(f"{who}:{token}\n" for who, token in TOKENS.items()))
    path.chmod(0o600)
    return FileTokens(path)


async def settle(dead_node: DeadNode, site: Site) -> None:
    await dead_node.die()
    await until(lambda: site.app.counters.nodes_settled)


async def read(peer: Peer, left: Left, seq: int | None = None) -> list[Message]:
    return await (await peer.get(left.position(seq))).rest()


async def finals(site: Site, left: Left) -> list[Message]:
    """The final answers that the log has."""
    events = await site.store.read(left.stream, after=0, limit=1_000)
    return [json.loads(event.payload) for event in events if event.final]


def assert_unknown(answer: Message, *, method: str = "tools/call", name: str | None = None) -> None:
    error = answer["error"]
    assert (error["code"], error["data"]["outcome"], error["data"]["method"]) == (UNKNOWN, "unknown", method)
    assert "died" in error["data"]["reason"]
    assert error["data"].get("name") == name


async def test_a_tool_that_says_nothing_of_itself_is_answered_with_an_unknown_outcome(house: House) -> None:
    site, shop, peer, dead_node = await house.scene()
    left = await dead_node.take(peer.session, peer.tool("wait", gate="g"))
    reader = await peer.get(left.position())
    await dead_node.die()
    assert_unknown((await reader.rest())[-1], name="wait")
    assert shop.seen == []
    assert len(await finals(site, left)) == 1


async def test_what_the_specification_makes_a_read_runs_again(house: House) -> None:
    """Also sticky requests: whatever the server says to them is the answer."""
    site, _, peer, dead_node = await house.scene()
    reads: dict[str, Message | None] = {"ping": None, "tools/list": {}, "resources/list": {}, "prompts/list": {}}
    reads["logging/setLevel"] = {"level": "info"}
    requests = [peer.request(method, params, id=number) for number, (method, params) in enumerate(reads.items())]
    lefts = [await dead_node.take(peer.session, request) for request in requests]
    await settle(dead_node, site)
    assert site.app.counters.calls_rerun == len(reads)
    for number, left in enumerate(lefts):
        (answer,) = await read(peer, left)
        assert answer["id"] == number
        assert answer.get("error", {}).get("code") != UNKNOWN


async def test_a_second_run_says_no_log_message_twice(house: House) -> None:
    """What the first run said and the second says again is dropped, each message once: the second tick is new."""
    _, _, peer, dead_node = await house.scene()
    said = [logged_by_call("begin"), logged_by_call("tick")]
    left = await dead_node.take(peer.session, peer.tool("recite", lines=["begin", "tick", "tick", "end"]), said=said)
    reader = await peer.get(left.position(0))
    await dead_node.die()
    *messages, answer = await reader.rest()
    assert text_of(answer) == "recited"
    assert [message["params"]["data"] for message in messages] == ["begin", "tick", "tick", "end"]


async def test_log_messages_of_several_calls_on_one_stream_are_all_said_again(house: House) -> None:
    """It is not known which of the calls has said them: twice is better than not at all."""
    _, _, peer, dead_node = await house.scene(version="2025-03-26")
    calls = [peer.tool("recite", id=number, lines=[f"line {number}"]) for number in (1, 2)]
    left = await dead_node.take(peer.session, *calls, said=[logged_by_call("line 1")])
    reader = await peer.get(left.position(0))
    await dead_node.die()
    messages = [message for message in await reader.rest() if "method" in message]
    assert sorted(message["params"]["data"] for message in messages) == ["line 1", "line 1", "line 2"]


async def test_a_read_only_tool_runs_again_into_the_same_stream(house: House) -> None:
    """A33: progress that was sent is not sent again; the generation is raised (Generations)."""
    site, shop, peer, dead_node = await house.scene()
    said = [progress_of_call("t", number) for number in (1, 2, 3)]
    left = await dead_node.take(peer.session, peer.tool("look_up", n=5, token="t"), said=said)
    reader = await peer.get(left.position(1))
    await dead_node.die()
    messages = await reader.rest()
    assert progress_of(messages) == [2, 3, 4, 5]
    assert text_of(messages[-1]) == "looked up 5"
    assert shop.seen == ["looking up"]
    positions = [position for event in reader.seen if event.data and (position := parse_position(event.id))]
    assert [position.seq for position in positions] == [2, 3, 4, 5, 6]
    assert [position.generation for position in positions][-3:] == [2, 2, 2]
    [row] = await site.store.calls(SessionId(peer.session), stream=left.stream)
    assert (row.attempt, row.state) == (2, CallState.ANSWERED)


async def test_an_idempotent_tool_runs_again(house: House) -> None:
    site, shop, peer, dead_node = await house.scene()
    left = await dead_node.take(peer.session, peer.tool("put", key="k"))
    await settle(dead_node, site)
    assert text_of((await read(peer, left))[-1]) == "put k"
    assert shop.seen == ["put k"]


async def test_what_died_twice_does_not_run_a_third_time(house: House) -> None:
    site, shop, peer, dead_node = await house.scene()
    left = await dead_node.take(peer.session, peer.tool("put", key="k"), attempt=2)
    await settle(dead_node, site)
    assert_unknown((await read(peer, left))[-1], name="put")
    assert shop.seen == []


async def test_what_only_waits_for_another_call_goes_on_however_often_its_process_died(house: House) -> None:
    """And where it died before the call was marked as Perdure's own. A tool of the server's keeps its own word."""
    site, shop, peer, dead_node = await house.scene(answer_within=("*=5s",), tasks=("wait=optional",))
    begun = peer.tool("wait", gate="g")
    begun["params"]["task"] = {}
    task = answer_of(await peer.send(begun))["result"]["task"]["taskId"]
    wait = partial(peer.tool, "perdure_wait_for_result", call=task)
    lefts = [
        await dead_node.take(peer.session, wait()),
        await dead_node.take(peer.session, wait(), attempt=2, upstream=OWN_CALL),
        await dead_node.take(peer.session, peer.request("tasks/result", {"taskId": task}), attempt=2),
    ]
    other = await dead_node.take(peer.session, peer.tool("perdure_wait", call=task))
    await settle(dead_node, site)
    assert_unknown((await read(peer, other))[-1], name="perdure_wait")
    shop.open("g")
    assert [text_of((await read(peer, left))[-1]) for left in lefts] == ["went through g"] * 3
    assert shop.seen == ["waiting at g"]


async def test_each_call_of_a_session_waits_for_its_principal_as_long_as_it_may(
    house: House, tokens: FileTokens
) -> None:
    """One that only has to go on waits for `task_ttl`, and one beside it that begins again for `session_grace`."""
    server = MCPServer("waiting", version="1", log_level="CRITICAL")
    server.tool(name="go_on", meta=perdure.RESUMABLE)(lambda: "done")
    server.tool(name="begin_again", annotations=IDEMPOTENT)(lambda: "done")
    options: dict[str, Any] = {"auth": tokens, "session_grace": 0.3}
    site = await house.stack.enter_async_context(serve(server, store=SharedStore(house.path), **options))
    peer, dead_node = await site.join(token=TOKENS["ann"]), await house.dead_node()
    for number, tool in enumerate(("go_on", "begin_again"), 1):
        await dead_node.take(peer.session, peer.tool(tool, id=number))
    await settle(dead_node, site)

    async def state(number: int) -> CallState:
        calls = await site.store.calls(SessionId(peer.session))
        return next(call.state for call in calls if call.request_id == number)

    async def has_ended() -> bool:
        return await state(2) is CallState.SETTLED

    await until(has_ended)
    assert await state(1) is CallState.WAITING


async def test_a_batch_is_settled_call_by_call_and_sealed_once(house: House) -> None:
    site, shop, peer, dead_node = await house.scene(version="2025-03-26")
    batch = [peer.tool("wait", id=1, gate="g"), peer.tool("put", id=2, key="k"), peer.request("ping", id=3)]
    left = await dead_node.take(peer.session, *batch, said=[progress_of_call(1, 1)])
    await settle(dead_node, site)
    answers = {answer["id"]: answer for answer in await read(peer, left)}
    assert_unknown(answers[1], name="wait")
    assert text_of(answers[2]) == "put k"
    assert answers[3]["result"] == {}
    assert sorted(answer["id"] for answer in await finals(site, left)) == [1, 2, 3]
    record = await stream_by_id(site.store, left.stream)
    assert record is not None
    assert record.sealed
    assert shop.seen == ["put k"]


async def test_an_ask_is_withdrawn_before_its_call_is_settled(house: House) -> None:
    """Asks: nobody waits for that answer any more. The client hears so first."""
    site, _, peer, dead_node = await house.scene()
    asks = [f"ask-{dead_node.node}-{number}" for number in (1, 2)]
    again = await dead_node.take(peer.session, peer.tool("put", key="k"), asked=asks[:1])
    never = await dead_node.take(peer.session, peer.tool("wait", gate="g"), asked=asks[1:])
    await settle(dead_node, site)
    for left, ask in zip((again, never), asks, strict=True):
        messages = await read(peer, left)
        assert [m.get("method", "answer") for m in messages] == ["notifications/cancelled", "answer"]
        assert messages[0]["params"]["requestId"] == ask
    assert await site.store.asks(SessionId(peer.session)) == []


async def test_what_living_nodes_ask_is_not_withdrawn_when_another_dies(house: House) -> None:
    """On the standalone stream of the same session: this node asks, and a third one does."""
    site, _ = await house.node()
    peer, living, dead_node = await site.join(), await house.dead_node(), await house.dead_node()
    await until(lambda: sorted(site.app.other_nodes()) == sorted((living.node, dead_node.node)))
    standalone = await peer.get()
    asking = asyncio.create_task(peer.result("ask", question="?", alone=True))
    asked = await standalone.message()
    session = await site.store.session(SessionId(peer.session))
    assert session is not None
    theirs = AskRecord(
        session=session.id, id=f"ask-{living.node}-1", stream=session.standalone, request=b"{}", node=living.node
    )
    await living.store.commit([OpenAsk(record=theirs)])
    left = await dead_node.take(peer.session, peer.tool("wait", gate="g"), asked=[f"ask-{dead_node.node}-1"])
    await settle(dead_node, site)
    assert len(await read(peer, left)) == 2
    assert {ask.id for ask in await site.store.asks(session.id)} == {asked["id"], theirs.id}
    await peer.answer(asked, {"action": "accept", "content": {"answer": "yes"}})
    assert await asking == "yes"
    await living.die()


async def test_a_call_that_is_not_kept_does_not_run_again(house: House) -> None:
    """A call of 2026-07-28 with neither handle nor key: its connection broke with its process, so nobody could ever
    read its answer. Its tool may run again, and must not."""
    site, shop, peer, dead_node = await house.scene()
    session = await site.store.session(SessionId(peer.session))
    assert session is not None
    ids = [new_session_id(secrets.token_bytes) for _ in range(2)]
    for id_, kept in zip(ids, (False, True), strict=True):
        owner = replace(session, id=id_, standalone=StreamId(""), kind=RecordKind.CALL, is_task=kept)
        await dead_node.store.commit([PutSession(record=replace(owner, version="2026-07-28", result=b""))])
        request = peer.tool("put", key="kept" if kept else "not kept")
        request["params"]["_meta"] = {PROTOCOL_VERSION_META_KEY: "2026-07-28", CLIENT_CAPABILITIES_META_KEY: {}}
        await dead_node.take(id_, request)
    await settle(dead_node, site)
    await until(lambda: shop.seen)
    assert shop.seen == ["put kept"]
    assert (site.app.counters.settles_cancelled, site.app.counters.calls_rerun) == (1, 1)
    await until(lambda: gone(site, ids[0]))
    assert await site.store.session(ids[1]) is not None


async def gone(site: Site, session: SessionId) -> bool:
    return await site.store.session(session) is None and not await site.store.streams(session)


async def test_a_cancellation_that_the_dead_node_had_not_heard_counts(house: House) -> None:
    """A cancelled call is not run again."""
    site, shop, peer, dead_node = await house.scene()
    left = await dead_node.take(peer.session, peer.tool("put", id=9, key="k"))
    await until(lambda: site.app.other_nodes() == [dead_node.node])
    assert (await peer.cancel(9)).status_code == 202
    await settle(dead_node, site)
    assert [answer["error"]["code"] for answer in await read(peer, left)] == [CANCELLED]
    assert shop.seen == []


async def test_the_next_node_to_start_settles_what_was_left_where_none_lives(house: House) -> None:
    async with serve(Library().server, store=SharedStore(house.path)) as first:
        peer = await first.join()
        dead_node = await house.dead_node()
        left = await dead_node.take(peer.session, peer.tool("put", key="k"))
    await dead_node.die()
    site, shop = await house.node()
    await until(lambda: site.app.counters.nodes_settled)
    assert text_of((await read(peer.through(site), left))[-1]) == "put k"
    assert shop.seen == ["put k"]


async def test_two_settlers_at_once_settle_each_call_once(house: House) -> None:
    """Promise 3: of several who claim, one succeeds; the log has one answer for each call."""
    (one, shop), (other, other_shop) = await house.node(), await house.node()
    peer, dead_node = await one.join(), await house.dead_node()
    lefts = [await dead_node.take(peer.session, peer.tool("put", key=str(number))) for number in range(30)]
    lefts += [await dead_node.take(peer.session, peer.tool("wait", gate="g")) for _ in range(30)]
    await dead_node.die()
    # Both settle, whoever has the lock of the dead one: that is the case where only leases tell.
    beats = {record.id: record.beat for record in await one.store.nodes()}
    settlers = [life_of(site).settler for site in (one, other)]
    await asyncio.gather(
        *(settler.settle_node(dead_node.node, beats[dead_node.node], has_left=False) for settler in settlers)
    )

    async def all_sealed() -> bool:
        found = await streams_by_id(one.store, [left.stream for left in lefts])
        return all(record.sealed for record in found.values())

    await until(all_sealed)
    for left in lefts:
        assert len(await finals(one, left)) == 1
    assert sorted(shop.seen + other_shop.seen) == sorted(f"put {number}" for number in range(30))


async def test_other_nodes_get_one_message_for_each_session_whose_calls_lost_their_readers(house: House) -> None:
    """Promise 6: a node with many calls may die, and the mailboxes of the others have a limit."""
    site, _ = await house.node()
    peers, doomed, living = [await site.join(), await site.join()], await house.dead_node(), await house.dead_node()
    lefts = [await doomed.take(peer.session, peer.tool("wait", gate="g")) for _ in range(3) for peer in peers]
    await until(lambda: living.node in site.app.other_nodes())
    await doomed.die()
    for left in lefts:
        await until(lambda left=left: finals(site, left))  # type: ignore[misc]
    await until(lambda: site.app.counters.nodes_settled)
    messages = [mail.decode(raw) for _, raw in await site.store.mail(living.node)]
    lost = [message.session for message in messages if isinstance(message, mail.Lost)]
    assert sorted(lost) == sorted(peer.session for peer in peers)
    await living.die()


# With authentication


async def test_a_call_waits_for_its_principal_and_runs_with_its_credentials(house: House, tokens: FileTokens) -> None:
    """On whichever node the principal reaches; what may not run again is answered at once."""
    (one, shop), (other, other_shop) = await house.node(auth=tokens), await house.node(auth=tokens)
    peer, dead_node = await one.join(token=TOKENS["ann"]), await house.dead_node()
    waits = await dead_node.take(peer.session, peer.tool("who"))
    never = await dead_node.take(peer.session, peer.tool("wait", gate="g"))
    await dead_node.die()

    async def is_waiting() -> bool:
        [row] = await one.store.calls(SessionId(peer.session), stream=waits.stream)
        return row.state is CallState.WAITING

    async def is_answered() -> object:
        return await finals(one, never)

    await until(is_waiting)
    await until(is_answered)
    assert shop.seen + other_shop.seen == []
    messages = await read(peer.through(other), waits)
    assert text_of(messages[-1]) == f"Bearer {TOKENS['ann']}"
    assert other_shop.seen == ["who"]
    assert shop.seen == []


@pytest.mark.parametrize("method", ["a wait", "tasks/result", "tasks/get"])
async def test_a_request_for_the_result_brings_the_credentials_from_another_session(
    house: House, tokens: FileTokens, method: str
) -> None:
    """As a host that was restarted does, and whether the request or the death of the node comes first."""
    rules: Any = {"answer_within": ("*=1h",), "tasks": ("who=optional",)}
    site, shop, peer, dead_node = await house.scene(token=TOKENS["ann"], auth=tokens, **rules)
    again = await site.join(token=TOKENS["ann"])
    begun = peer.tool("who")
    begun["params"]["task"] = {}
    created = {"jsonrpc": "2.0", "id": begun["id"], "result": {}}
    left = await dead_node.take(peer.session, begun, said=[created], answered=True)
    wait, asked = again.tool("perdure_wait_for_result", call=left.stream), {"taskId": left.stream}
    if method != "tasks/get":
        waiting = await again.post(wait if method == "a wait" else again.request(method, asked))
        await waiting.event()
    await dead_node.die()
    if method == "tasks/get":
        status = ""
        while status != "completed":
            status = answer_of(await again.send(again.request(method, asked)))["result"]["status"]
        waiting = await again.post(again.request("tasks/result", asked))
    assert text_of((await waiting.rest())[-1]) == f"Bearer {TOKENS['ann']}"
    assert shop.seen == ["who"]


async def test_a_call_that_another_node_has_begun_to_run_is_not_taken_from_it(house: House, tokens: FileTokens) -> None:
    """Both nodes get the principal's requests. The second has seen the call wait, and looks again before it claims."""
    slow = HeldReads(house.path, "calls")
    one, shop = await house.node(auth=tokens)
    other, other_shop = await house.node(store=slow, auth=tokens, store_timeout=60.0)
    peer, dead_node = await one.join(token=TOKENS["ann"]), await house.dead_node()
    at_other = peer.through(other)
    assert (await at_other.send(peer.request("ping"))).status_code == 200  # both hold the session
    left = await dead_node.take(peer.session, peer.tool("look_up", n=2, gate="g"))
    await dead_node.die()
    for site in (one, other):
        held = life_of(site).sessions.held(SessionId(peer.session))
        assert held is not None
        await until(partial(getattr, held, "waits"))
    slow.hold = True
    asked = asyncio.create_task(at_other.send(peer.request("ping")))
    await slow.reached.wait()
    resumed = await peer.get(left.position())
    await until(lambda: shop.seen == ["looking up", "waiting at g"])
    slow.go.set()
    assert (await asked).status_code == 200
    shop.open("g")
    assert text_of((await resumed.rest())[-1]) == "looked up 2"
    assert other_shop.seen == []


async def test_a_client_that_was_back_first_is_asked_to_come_again(house: House, tokens: FileTokens) -> None:
    """It resumed before its call was settled: nothing waits for ever (promise 3)."""
    (one, _), (other, _) = await house.node(auth=tokens), await house.node(auth=tokens)
    peer, dead_node = await one.join(token=TOKENS["ann"]), await house.dead_node()
    lefts = [await dead_node.take(peer.session, peer.tool("who")) for _ in range(2)]
    readers = [await peer.get(lefts[0].position()), await peer.through(other).get(lefts[1].position())]
    await dead_node.die()
    for reader in readers:
        assert await reader.rest() == []  # ended, with a hint when to come back
        assert b"retry:" in reader.raw
    for left in lefts:
        assert text_of((await read(peer, left))[-1]) == f"Bearer {TOKENS['ann']}"


async def test_a_call_that_waits_may_be_cancelled(house: House, tokens: FileTokens) -> None:
    site, shop, peer, dead_node = await house.scene(token=TOKENS["ann"], auth=tokens)
    left = await dead_node.take(peer.session, peer.tool("who", id=3))
    await settle(dead_node, site)
    assert (await peer.cancel(3)).status_code == 202
    assert [answer["error"]["code"] for answer in await read(peer, left)] == [CANCELLED]
    assert shop.seen == []


async def test_a_principal_that_does_not_come_back_is_waited_for_in_vain(house: House, tokens: FileTokens) -> None:
    site, shop, peer, dead_node = await house.scene(token=TOKENS["ann"], auth=tokens, session_grace=0.5)
    left = await dead_node.take(peer.session, peer.tool("who"))
    await dead_node.die()

    async def is_answered() -> object:
        return await finals(site, left)

    await until(is_answered)
    assert_unknown((await finals(site, left))[0], name="who")
    assert shop.seen == []


async def test_a_call_waits_on_where_the_node_that_had_it_wait_dies(house: House, tokens: FileTokens) -> None:
    site, shop, peer, dead_node = await house.scene(token=TOKENS["ann"], auth=tokens)
    left = await dead_node.take(peer.session, peer.tool("who"), state=CallState.WAITING)
    await settle(dead_node, site)
    assert await finals(site, left) == []
    assert text_of((await read(peer, left))[-1]) == f"Bearer {TOKENS['ann']}"
    assert shop.seen == ["who"]


async def test_a_call_that_waits_at_a_node_that_holds_is_not_taken_from_it(house: House, tokens: FileTokens) -> None:
    """Promise 3: that node may have answered it, and hold the answer."""
    (one, _), (other, shop) = await house.node(auth=tokens), await house.node(auth=tokens)
    peer, dead_node = await one.join(token=TOKENS["ann"]), await house.dead_node()
    left = await dead_node.take(peer.session, peer.tool("who"), state=CallState.WAITING)
    alive = dead_node.store.liveness(dead_node.node, lease=15.0, monotonic=time.monotonic)
    alive.hold(True)
    twin = peer.through(other)
    refused = await twin.try_get(left.position())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["message"].startswith("Another process of this server holds")
    record = await stream_by_id(other.store, left.stream)
    assert record is not None
    assert (record.node, record.generation) == (dead_node.node, 1)
    alive.hold(False)

    async def is_served() -> bool:
        await dead_nodes(alive)  # a round, as each node makes them
        return (await twin.try_get(left.position())).status_code == 200

    await until(is_served)
    assert shop.seen == ["who"]
    await dead_node.die()


async def test_nobody_else_wakes_a_call_that_waits(house: House, tokens: FileTokens) -> None:
    """Promise 5: another principal, and nobody, get the answer of a session that does not exist."""
    site, shop, peer, dead_node = await house.scene(token=TOKENS["ann"], auth=tokens)
    left = await dead_node.take(peer.session, peer.tool("who"))
    await settle(dead_node, site)
    thief = peer.through(site)
    thief.token = TOKENS["bob"]
    assert (await thief.try_get(left.position())).status_code == 404
    assert shop.seen == []


# A store in trouble


class Tripping(FaultyStore):
    """Fails once at a chosen call, in the middle of settling."""

    def __init__(self, inner: Any, at: str, fault: Fault) -> None:
        super().__init__(inner)
        self.tripped = False
        self.armed = False
        self._at = at
        self._fault = fault

    async def write(self, method: Callable[..., Any], *arguments: Any, may_be_late: bool, **named: Any) -> Any:
        return await self.look(method, *arguments, **named)

    async def look(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self.armed and not self.tripped and method.__name__ == self._at:
            self.tripped = True
            if self._fault is Fault.LATE:  # done, and nobody is told
                await method(*arguments, **named)
            raise StoreUnavailable("it tripped")
        return await method(*arguments, **named)


@pytest.mark.parametrize(
    ("at", "fault"),
    [
        ("written_by", Fault.RAISES),
        ("session", Fault.RAISES),
        ("claim", Fault.RAISES),
        ("claim", Fault.LATE),
        ("calls", Fault.RAISES),
        ("asks", Fault.RAISES),
        ("bury", Fault.RAISES),
        ("bury", Fault.LATE),
        ("mail", Fault.RAISES),
        ("overview", Fault.RAISES),
    ],
)
async def test_settling_goes_on_where_the_store_failed(house: House, at: str, fault: Fault) -> None:
    """Each call gets its one answer, whichever step of settling failed, also if it was done and nobody was told."""
    store = Tripping(SharedStore(house.path), at, fault)
    site, shop, peer, dead_node = await house.scene(version="2025-03-26", store=store)
    batch = [peer.tool("put", id=1, key="a"), peer.tool("wait", id=2, gate="g"), peer.tool("put", id=3, key="b")]
    lefts = [await dead_node.take(peer.session, *batch), await dead_node.take(peer.session, peer.tool("put", key="c"))]
    store.armed = True
    await dead_node.die()

    async def is_over() -> bool:
        found = await streams_by_id(site.store, [left.stream for left in lefts])
        return all(record.sealed for record in found.values())

    await until(is_over)
    assert store.tripped
    assert [len(await finals(site, left)) for left in lefts] == [3, 1]
    assert sorted(shop.seen) == ["put a", "put b", "put c"]

    async def is_buried() -> bool:
        return len(await site.store.nodes()) == 1

    await until(is_buried)


async def test_mail_that_cannot_be_dealt_with_does_not_stop_following(house: House) -> None:
    """A message that makes its reader fail, a newer release's and one that is no message at all."""
    site, _ = await house.node(complaint="mail could not be handled")
    other, _ = await house.node(complaint="mail could not be handled")
    peer = await site.join()
    await until(lambda: other.app.other_nodes())
    [node] = other.app.other_nodes()
    bad = [b"no json", b'{"kind":"of a newer release"}', b'{"kind":"reading","session":1,"stream":[]}']
    await other.store.commit([SendMail(node=NodeId(node), message=message) for message in bad])
    standalone = await peer.get()
    assert await peer.through(other).result("announce", n=1) == "announced 1"
    assert (await standalone.message())["params"]["uri"] == "notice://1"


async def test_what_was_forwarded_to_a_dead_home_is_appended_once_by_the_next(house: House) -> None:
    """Once each: it waits under the stream, for whichever node is the session's home by then."""
    site, _, peer, dead_node = await house.scene()
    record = await site.store.session(SessionId(peer.session))
    assert record is not None
    standalone = await stream_by_id(site.store, record.standalone)
    assert standalone is not None
    assert await dead_node.store.claim(standalone.id, node=dead_node.node, held=standalone.fence) is not None
    notices = [f"notice://{number}" for number in (1, 2)]
    payloads = tuple(
        json.dumps({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": uri}}).encode()
        for uri in notices
    )
    forward = Forward(stream=standalone.id, node=NodeId("gone"), sender="f", first=1, payloads=payloads)
    assert not any(await dead_node.store.commit([forward] * 2))  # a commit that was repeated
    reader = await peer.get()
    await dead_node.die()
    assert [message["params"]["uri"] for message in await reader.messages(2)] == notices
    await until(lambda: site.app.counters.nodes_settled)
    assert await peer.result("announce", n=1, start=3) == "announced 1"
    assert (await reader.message())["params"]["uri"] == "notice://3"
    record_now = await stream_by_id(site.store, record.standalone)
    assert record_now is not None
    assert record_now.last == 3


async def test_many_sessions_of_a_dead_home_are_let_go_of_without_standing_in_the_way(house: House) -> None:
    """More than one commit's worth; whoever is served meanwhile hardly notices."""
    site, _, peer, dead_node = await house.scene()
    streams = await _homes(dead_node, SessionId(peer.session), 1_200)
    await settle(dead_node, site)
    assert {record.node for record in (await streams_by_id(site.store, streams)).values()} == {""}


async def _homes(dead_node: DeadNode, pattern: SessionId, count: int) -> list[StreamId]:
    """Sessions whose home is the dead_node."""
    record = await dead_node.store.session(pattern)
    assert record is not None
    steps: list[Step] = []
    streams = []
    for _ in range(count):
        session, stream = new_session_id(secrets.token_bytes), new_stream_id(secrets.token_bytes)
        steps.append(PutSession(record=replace(record, id=session, standalone=stream)))
        standalone = StreamRecord(
            id=stream,
            session=session,
            kind=Kind.STANDALONE,
            node=dead_node.node,
            fence=dead_node.fence,
            opened=record.created,
        )
        steps.append(OpenStream(record=standalone))
        streams.append(stream)
    for start in range(0, len(steps), 500):
        assert not any(await dead_node.store.commit(steps[start : start + 500]))
    return streams


# What cannot be dealt with


async def test_no_progress_that_a_tool_reported_keeps_its_call_from_running_again(house: House) -> None:
    """Promise 3, A33: SQLite's integers end at 2**63, and a dead node's tool may have counted further."""
    site, _, peer, dead_node = await house.scene()
    sent = [2**63, 2**64 + 1, 10**400, 1e300, float("inf"), -(10**400), float("nan"), True]
    lefts = [
        await dead_node.take(peer.session, peer.tool("look_up", n=2, token="t"), said=[progress_of_call("t", number)])
        for number in sent
    ]
    await settle(dead_node, site)
    for number, left in zip(sent, lefts, strict=True):
        messages = await read(peer, left)
        assert text_of(messages[-1]) == "looked up 2"
        assert progress_of(messages) == ([] if number > 2 else [1, 2])


async def test_progress_too_long_to_be_read_is_passed_over(house: House) -> None:
    site, _, peer, dead_node = await house.scene()
    left = await dead_node.take(peer.session, peer.tool("look_up", n=1, token="t"), said=[progress_of_call("t", 0)])
    digits = b"9" * 5_000  # more than Python turns into a number
    payload = json.dumps(progress_of_call("t", 0)).encode().replace(b'"progress": 0', b'"progress": ' + digits)
    step = Append(stream=left.stream, fence=dead_node.fence, events=(Event(2, 0.0, payload),))
    assert not any(await dead_node.store.commit([step]))
    await dead_node.die()
    await until(lambda: finals(site, left))
    assert [text_of(answer) for answer in await finals(site, left)] == ["looked up 1"]


class _Poisoned(SharedStore):
    """Refuses for good whatever concerns one stream's calls, or one session's."""

    poison: object = None

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        if any(isinstance(step, PutCall) and step.stream == self.poison for step in steps):
            raise StoreError("this row cannot be written")
        return await super().commit(steps)

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        return None if self.poison is not None else super().commit_now(steps)

    async def calls(
        self, session: SessionId, *, stream: StreamId | None = None, only_open: bool = False
    ) -> Sequence[CallRecord]:
        if session == self.poison:
            raise StoreError("this row cannot be read")
        return await super().calls(session, stream=stream, only_open=only_open)


async def test_a_call_that_cannot_run_again_is_answered_and_costs_only_itself(house: House) -> None:
    """Promise 3: its row fails in each round; the other call runs, the node is buried, and it is told once."""
    store = _Poisoned(str(house.path))
    site, _, peer, dead_node = await house.scene(store=store, complaint="cannot run again")
    bad = await dead_node.take(peer.session, peer.tool("look_up", n=1))
    good = await dead_node.take(peer.session, peer.tool("look_up", n=2))
    store.poison = bad.stream
    await settle(dead_node, site)
    assert_unknown((await read(peer, bad))[-1], name="look_up")
    assert text_of((await read(peer, good))[-1]) == "looked up 2"


async def test_calls_that_cannot_be_given_up_do_not_keep_others_waiting(house: House, tokens: FileTokens) -> None:
    """A33 with owners: both principals do not come back, and one session's rows cannot be read."""
    store = _Poisoned(str(house.path))
    site, _ = await house.node(store=store, auth=tokens, session_grace=0.3)
    dead_node = await house.dead_node()
    peers = [await site.join(token=TOKENS[who]) for who in ("ann", "bob")]
    left = [await dead_node.take(peer.session, peer.tool("look_up", n=1)) for peer in peers]
    store.poison = peers[0].session
    await dead_node.die()
    await until(lambda: finals(site, left[1]))
    [answer] = await finals(site, left[1])
    assert answer["error"]["code"] == UNKNOWN
    assert await finals(site, left[0]) == []
    store.poison = None
    await until(lambda: site.app.counters.calls_settled == 2)
