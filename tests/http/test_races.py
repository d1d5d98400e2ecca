"""Things that happen between two steps of a request: ends, take-overs and slow servers in the wrong moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from starlette.types import Message, Scope

import perdure
from perdure import Settings
from perdure._core.ids import SessionId, StreamId
from perdure.store import MemoryStore
from perdure.store.records import Event, Followed, Loaded
from perdure.store.steps import Refusals, Step
from tests.support.clients.wire_client import Peer, Wire, notices_of, progress_of, text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


class Hesitant(MemoryStore):
    """A store that writes, and finds streams, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.finds = asyncio.Event(), asyncio.Event()
        self.writes.set()
        self.finds.set()
        self.asked = 0
        self.next_load: asyncio.Event | None = None
        """The next session is loaded when this is set; those behind it are not held up."""

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:  # type: ignore[override]
        return super().commit_now(steps) if self.writes.is_set() else None

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        self.asked += 1
        await self.writes.wait()
        return super().commit_now(steps)

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        self.asked += 1
        await self.finds.wait()
        return await super().follow(after, limit=limit)

    async def load(self, session: SessionId) -> Loaded | None:
        waits, self.next_load = self.next_load, None
        if waits is not None:
            await waits.wait()
        return await super().load(session)


async def test_a_session_deleted_while_a_request_is_being_accepted(shop: ToolServer) -> None:
    """Promise 3: the request is answered 404, nothing runs, nothing hangs."""
    store = Hesitant()
    async with serve(shop.server, store=store, store_timeout=30.0) as site:
        peer = await site.join()
        store.writes.clear()
        accepting = asyncio.create_task(peer.send(peer.tool("count", n=1)))
        await until(lambda: store.asked)
        deleting = asyncio.create_task(peer.delete())
        await until(lambda: site.app.session_ids() == [])
        store.writes.set()
        assert (await deleting).status_code == 200
        assert (await accepting).status_code == 404
        assert shop.seen == []


async def test_a_session_deleted_while_a_resume_is_being_looked_up(shop: ToolServer) -> None:
    """H2: gone is 404, also for a position that was good when the request came."""
    store = Hesitant()
    async with serve(shop.server, store=store, store_timeout=30.0) as site:
        peer = await site.join()
        wire = await peer.call("count", n=2, token=1)
        await wire.rest()
        store.finds.clear()
        asked = store.asked
        resuming = asyncio.create_task(peer.try_get(wire.seen[1].id))
        await until(lambda: store.asked > asked)
        await peer.delete()
        store.finds.set()
        assert (await resuming).status_code == 404


async def test_ids_are_kept_from_the_moment_a_request_arrives(shop: ToolServer) -> None:
    """The second request with the same id comes while the first one is still being written down."""
    store = Hesitant()
    async with serve(shop.server, store=store, store_timeout=30.0) as site:
        peer = await site.join()
        store.writes.clear()
        asked = store.asked
        first = asyncio.create_task(peer.send(peer.request("ping", id=1)))
        await until(lambda: store.asked > asked)
        second = await peer.send(peer.request("ping", id=1))
        assert second.status_code == 400
        store.writes.set()
        assert (await first).status_code == 200


async def test_two_resumes_wait_for_the_store_and_the_later_one_wins(shop: ToolServer) -> None:
    """A17: in the order in which they came, not in the order in which the store answered."""
    store = Hesitant()
    async with serve(shop.server, store=store, store_timeout=30.0) as site:
        peer = await site.join()
        wire = await peer.call("count", n=3, token=1)
        await wire.rest()
        store.finds.clear()
        asked = store.asked
        early = asyncio.create_task(peer.get(wire.seen[0].id))
        await until(lambda: store.asked > asked)
        resumes = site.app.counters.resumes
        late = asyncio.create_task(peer.get(wire.seen[1].id))
        await until(lambda: site.app.counters.resumes > resumes)
        store.finds.set()
        assert progress_of(await (await late).rest()) == [2, 3]
        assert progress_of(await (await early).rest()) in ([], [1, 2, 3])


async def test_two_resumes_load_their_session_and_the_later_one_wins(shop: ToolServer) -> None:
    """A17: also where the store gives the session to the later one first."""
    store = Hesitant()
    async with serve(shop.server, store=store) as site:
        peer = await site.join()
        wire = await peer.get()
        await peer.result("announce", n=1)
        await wire.messages(1)
    async with serve(shop.server, store=store, store_timeout=30.0) as site:
        peer = peer.through(site)
        loads = store.next_load = asyncio.Event()
        early = asyncio.create_task(peer.get(wire.last_id))
        await until(lambda: store.next_load is None)
        late = await peer.get(wire.last_id)
        loads.set()
        overtaken = await early
        await peer.result("announce", n=1, start=2)
        assert notices_of(await late.messages(1)) == [2]
        assert await overtaken.rest() == []


class Asgi:
    """One request to an application without a server in between: what it sends is taken when the test says so."""

    def __init__(self, app: perdure.App, method: str, peer: Peer, headers: dict[str, str], body: bytes = b"") -> None:
        names = {**dict(peer.headers()), "host": "localhost", **headers}
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": "/mcp",
            "raw_path": b"/mcp",
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in names.items() if value],
        }
        self.sent: list[Message] = []
        #: It has begun to send something.
        self.offers = asyncio.Event()
        self.takes = asyncio.Event()
        self.left = asyncio.Event()
        self._body = [body]
        self.task = asyncio.create_task(app(self.scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.offers.set()
        await self.takes.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def greeted(app: perdure.App) -> Peer:
    peer = Peer(None)  # type: ignore[arg-type]
    hello = Asgi(app, "POST", peer, {}, _json(peer.handshake()))
    hello.takes.set()
    await asyncio.wait_for(hello.task, 10)
    peer.session = dict(hello.sent[0]["headers"])[b"mcp-session-id"].decode()
    return peer


async def test_a_take_over_before_the_response_has_begun(shop: ToolServer) -> None:
    """A server may take its time with the first bytes. Whoever is taken over by then ends properly, whoever took over
    gets everything, and no body comes before its start."""
    app = perdure.asgi(shop.server, store=MemoryStore(), settings=Settings())
    async with app.lifespan():
        peer = await greeted(app)

        first = Asgi(app, "GET", peer, {"accept": "text/event-stream"})
        await until(lambda: app.counters.standalone_readers == 1)
        second = Asgi(app, "GET", peer, {"accept": "text/event-stream"})
        await until(lambda: app.counters.take_overs == 1)
        first.takes.set()
        await asyncio.wait_for(first.task, 10)
        assert first.sent[0]["type"] == "http.response.start"
        assert not first.sent[-1].get("more_body", False)

        second.takes.set()
        call = Asgi(app, "POST", peer, {}, _json(peer.tool("announce", n=2)))
        call.takes.set()
        await asyncio.wait_for(call.task, 10)
        await until(lambda: b"notice://2" in second.body)
        assert b"notice" not in first.body
        second.left.set()
        await asyncio.wait_for(second.task, 10)


async def test_a_call_that_ends_before_its_response_has_begun(shop: ToolServer) -> None:
    """Also when the tool closes its connection as its first act: start, priming, and then the rest."""
    app = perdure.asgi(shop.server, store=MemoryStore(), settings=Settings())
    async with app.lifespan():
        peer = await greeted(app)
        shop.open("g")
        call = Asgi(app, "POST", peer, {}, _json(peer.tool("close", before=0, after=1, gate="g", token=1)))
        await until(lambda: app.counters.calls_answered == 2)
        call.takes.set()
        await asyncio.wait_for(call.task, 10)
        assert call.sent[0]["type"] == "http.response.start"
        assert call.body.startswith(b"id: ")
        assert not call.sent[-1].get("more_body", False)


def _json(message: Any) -> bytes:
    return json.dumps(message).encode()


async def test_the_server_stops_while_calls_run_and_clients_read(shop: ToolServer) -> None:
    """Promise 3: each call is answered, outcome unknown; the standalone stream ends; new requests get 503."""
    async with serve(shop.server) as site:
        peer = await site.join()
        standalone = await peer.get()
        running = [await peer.call("wait", gate="never", id=number) for number in range(3)]
        await until(lambda: len(shop.seen) == 3)
        site.app.begin_stop()
        for number, wire in enumerate(running):
            [answer] = await wire.rest()
            assert (answer["id"], answer["error"]["code"]) == (number, -31001)
            assert answer["error"]["data"]["outcome"] == "unknown"
        assert await standalone.rest() == []
        response = await peer.send(peer.request("ping"))
        assert response.status_code == 503
        assert response.headers["retry-after"]


async def test_what_a_tool_says_after_the_stop_turns_up_nowhere(shop: ToolServer) -> None:
    """Its call was answered already: no progress under a number of ours, on no stream."""
    store = MemoryStore()
    async with serve(shop.server, store=store) as site:
        peer = await site.join()
        wire = await peer.call("count", n=3, gate="g", pauses=[1], token="t")
        await wire.messages(1)
        site.app.begin_stop()
        await wire.rest()
        shop.open("g/1")
        await until(lambda: "counted 3" in shop.seen)
        streams = await store.streams(peer.session)  # type: ignore[arg-type]
        kept = [event.payload for s in streams for event in await store.read(s.id, after=0, limit=100)]
        assert sum(b"notifications/progress" in payload for payload in kept) == 1


async def test_many_clients_at_once(shop: ToolServer, site: Site) -> None:
    """Promise 2 under a crowd: cut, resumed, all whole."""

    async def one(number: int) -> None:
        peer = await site.join()
        wire: Wire = await peer.call("count", n=30, id=number, token=number)
        seen = await wire.messages(number % 7 + 1)
        await wire.drop()
        resumed = await peer.get(wire.last_id)
        seen += await resumed.rest()
        assert progress_of(seen) == list(range(1, 31))
        assert (seen[-1]["id"], text_of(seen[-1])) == (number, "counted to 30")

    await asyncio.gather(*(one(number) for number in range(20)))


class Held(MemoryStore):
    """Reads wait, one after the other, each for its own gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[asyncio.Event] = []
        self.holding = False

    async def read(self, stream: StreamId, *, after: int, limit: int) -> list[Event]:
        events = await super().read(stream, after=after, limit=limit)
        if self.holding:
            self.gates.append(asyncio.Event())
            await self.gates[-1].wait()
        return list(events)


async def test_two_first_readers_of_the_standalone_stream_share_nothing(shop: ToolServer) -> None:
    """A17: neither names a position; what the first one got by the time the second one attaches is not sent again."""
    store = Held()
    async with serve(shop.server, store=store, store_timeout=30.0) as site:
        peer = await site.join()
        await peer.result("announce", n=3)
        store.holding = True
        first, second = asyncio.create_task(peer.get()), asyncio.create_task(peer.get())
        await until(lambda: len(store.gates) == 2)
        store.holding = False
        store.gates[0].set()
        assert notices_of(await (await first).messages(3)) == [1, 2, 3]
        store.gates[1].set()
        await second
        await peer.result("announce", n=1, start=4)
        assert notices_of([await second.result().message()]) == [4]
