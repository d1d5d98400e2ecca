"""Shares lanes between requests that have no session: calls of 2026-07-28, and requests of the gateway's own.

A lane of the pool is for one caller with certain capabilities. Any number of requests share a lane whose client cannot
be asked anything. One whose client can be asked carries one call at a time where the lane is a pipe, because a pipe
does not say which call an ask belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from perdure._core import splice
from perdure._core.durable_calls import CallClient
from perdure._core.eras import handshake_params
from perdure._core.handshakes import LISTS, capabilities_in
from perdure._core.jsonrpc import JsonObject
from perdure._core.limits import Caller
from perdure._core.listening import METHODS
from perdure.gateway.lane import (
    REQUEST_ENDED,
    AskKey,
    Lane,
    Lost,
    Opened,
    Reason,
    RequestKey,
    Rising,
    SessionReceiver,
    UpstreamUnavailable,
    no_asks,
    open_lane,
)
from perdure.gateway.tool_list import RELIST_SECONDS, ToolList, ToolPages
from perdure.gateway.upstream import Upstream
from perdure.runtime.base import Flow

UNUSED_SECONDS = 60.0
"""How long a lane without requests lives: a caller that polls or goes on talking finds it, and a child takes memory."""

LIST_SECONDS = 5.0
"""How long the first request of an upstream waits for its list of tools: whether a tool may run again should be known
before it runs, and a server that does not answer the list may answer the request."""

OWN = CallClient(version="", info={"name": "perdure", "version": "1"}, capabilities={})
"""The gateway as a client of an upstream."""

_ENDED = UpstreamUnavailable(Reason.DIED, "it ended before the request was sent")
_NO_LANE = Lost(ran=False, why=str(_ENDED), unavailable=_ENDED)

Hear = Callable[[str | None, JsonObject | None], None]
"""Takes a change that the upstream reports: its method and params; `None` when the lane ends."""

OnNotification = Callable[[str, JsonObject | None], Flow | None]


class LaneUser(Protocol):
    """One request on a lane of the pool."""

    @property
    def passes_round(self) -> bool:
        """Whether a result that requires input is its answer; otherwise it is asked (`on_ask`)."""

    def on_notification(self, method: str, params: JsonObject | None) -> Flow | None: ...

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None) -> Flow | None: ...

    def on_ask_withdrawn(self, ask: AskKey, reason: str) -> None: ...

    def on_answer(self, body: bytes, *, failed: bool) -> None: ...

    def on_lost(self, lost: Lost) -> None: ...

    def on_position(self, state: JsonObject) -> None: ...


class RequestRefused(Exception):
    """The upstream answered a request with an error."""

    def __init__(self, error: JsonObject) -> None:
        super().__init__(str(error.get("message")))
        self.error = error


class Gone(Exception):
    """The upstream does not answer a request any more."""

    def __init__(self, lost: Lost) -> None:
        super().__init__(lost.why)
        self.lost = lost


@dataclass(slots=True, eq=False, kw_only=True)
class LaneRequests(SessionReceiver):
    """Requests on one lane, each with its user."""

    lane: Lane | None = None
    _users: dict[RequestKey, tuple[LaneUser, Rising]] = field(default_factory=dict)
    _count: int = 0

    def request(self, user: LaneUser, method: str, params: JsonObject | None) -> RequestKey:
        self._count += 1
        if self.lane is None:
            user.on_lost(_NO_LANE)
        else:
            self._users[self._count] = user, Rising()
            self.lane.request(self._count, method, params)
        return self._count

    def forget(self, key: RequestKey) -> bool:
        """Report nothing more of a request; the upstream may go on with it. Returns whether it was still running."""
        return self._users.pop(key, None) is not None

    def cancel(self, key: RequestKey, params: JsonObject | None) -> bool:
        """Cancel a request. Returns whether it was still running."""
        if not self.forget(key):
            return False
        if self.lane is not None:
            self.lane.cancel(key, params)
        return True

    async def call(
        self, method: str, params: JsonObject | None, on_notification: OnNotification | None = None
    ) -> bytes:
        """Send a request and wait for its result. Raises `RequestRefused` or `Gone`."""
        user = _Waiter(asyncio.get_running_loop().create_future(), on_notification)
        key = self.request(user, method, params)
        try:
            return await user.result
        finally:
            self.cancel(key, None)

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        return None  # the handshake declares a client that takes no asks

    def on_answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        user, _ = self._users.pop(key, (None, None))
        if user is not None:
            user.on_answer(body, failed=failed)

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        user, _ = self._users.pop(key, (None, None))
        if user is not None:
            user.on_lost(lost)


@dataclass(slots=True, eq=False)
class PooledLane(LaneRequests):
    _pool: LanePool
    caller: Caller
    asks_unnamed: bool = False
    """Its client can be asked, and a pipe does not say for which call."""
    opened: Opened | None = None
    opening: asyncio.Task[None] | None = None
    is_over: bool = False
    holders: int = 0
    """Requests that have taken the lane."""
    timer: asyncio.TimerHandle | None = None
    has_left: bool = False
    """A request that the upstream still runs was left to a later process."""
    subscribed: set[str] = field(default_factory=set)
    """Resources to which the lane is subscribed."""
    _asked: dict[AskKey, LaneUser] = field(default_factory=dict)
    _hears: dict[Hear, frozenset[str]] = field(default_factory=dict)
    """With the resources that each wants to hear of."""

    @property
    def passes(self) -> bool:
        return self.opened is not None and self.opened.passes

    @property
    def asks(self) -> bool:
        return self.asks_unnamed and not self.passes

    @property
    def result(self) -> JsonObject:
        """The upstream's `initialize` result."""
        assert self.opened is not None
        return self.opened.result

    def follow(self, user: LaneUser, method: str, params: JsonObject | None, state: JsonObject) -> RequestKey:
        self._count += 1
        if self.lane is None:
            user.on_lost(Lost(ran=True, why="it ended before the request could be followed"))
        else:
            self._users[self._count] = user, Rising()
            self.lane.follow(self._count, method, params, state)
        return self._count

    def reply(self, ask: AskKey, response: JsonObject) -> None:
        self._asked.pop(ask, None)
        if self.lane is not None:
            self.lane.reply(ask, response)

    def refuse(self, ask: AskKey) -> None:
        """Answer an ask of a request that is over."""
        self.reply(ask, REQUEST_ENDED)

    @contextlib.contextmanager
    def hearing(self, hear: Hear, uris: Collection[str]) -> Iterator[None]:
        """Take all changes that the upstream reports, during a block. `uris`: the resources that are wanted."""
        self._hears[hear] = frozenset(uris)
        if self.lane is not None:
            self.lane.listen(True)
        try:
            yield
        finally:
            del self._hears[hear]
            if self.lane is not None:
                self.lane.listen(bool(self._hears))

    async def subscribe(self) -> None:
        """Subscribe to the resources that are wanted now, and to no others: those of listeners that come and go would
        grow for ever, here and in the upstream. Raises `Gone`."""
        wanted = frozenset[str]().union(*self._hears.values())
        for uri in wanted - self.subscribed:
            with contextlib.suppress(RequestRefused):  # a resource that does not exist
                await self.call("resources/subscribe", {"uri": uri})
                self.subscribed.add(uri)
        for uri in self.subscribed - wanted:
            self.subscribed.remove(uri)
            with contextlib.suppress(RequestRefused):
                await self.call("resources/unsubscribe", {"uri": uri})

    # What the lane reports

    def _user(self, key: RequestKey | None) -> LaneUser | None:
        """The request that a message belongs to: a pipe does not say, and there may be one alone."""
        if key is None:
            found = [user for user, _ in self._users.values() if not (isinstance(user, _Waiter) and user.is_own)]
            return found[0] if len(found) == 1 else None
        user, _ = self._users.get(key, (None, None))
        return user

    def on_notification(self, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        if method in METHODS:
            if method == LISTS["tools"]:
                self._pool.on_tools_changed(self)
            for hear in list(self._hears):
                hear(method, params)
            return None
        if method == "notifications/progress":
            user, progress = self._users.get(key, (None, None))
            if params is None or progress is None or not progress.takes(params.get("progress")):
                return None
        else:
            user = self._user(key)
        return None if user is None else user.on_notification(method, params)

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        user = self._user(key)
        if user is not None and not isinstance(user, _Waiter):  # else the request of a client that cannot be asked
            self._asked[ask] = user
            return user.on_ask(ask, method, params)
        if self.asks:
            self.refuse(ask)
        else:
            self.reply(ask, no_asks(method))
        return None

    def on_ask_withdrawn(self, ask: AskKey, reason: str) -> None:
        if (user := self._asked.pop(ask, None)) is not None:
            user.on_ask_withdrawn(ask, reason)

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        if lost.may_be_sent_again:
            self._pool.forget(self)  # its user comes again at once
        LaneRequests.on_lost(self, key, lost)

    def passes_round(self, key: RequestKey) -> bool:
        """Whether a result that requires input is the answer to a request; otherwise its client is asked."""
        user, _ = self._users.get(key, (None, None))
        return user is None or user.passes_round

    def on_position(self, key: RequestKey, state: JsonObject) -> None:
        if (user := self._user(key)) is not None:
            user.on_position(state)

    async def on_renewed(self, opened: Opened) -> None:
        self.opened = opened
        if self.lane is not None:
            self.lane.notify("notifications/initialized", None)
        self._end_hearing()  # what was subscribed is gone with the session
        await self._pool.list_tools(self)

    def on_closed(self, why: str) -> None:
        self.lane = None
        self._pool.forget(self)
        self._end_hearing()

    def _end_hearing(self) -> None:
        self.subscribed.clear()
        for hear in list(self._hears):
            hear(None, None)


@dataclass(slots=True, eq=False)
class _Waiter:
    result: asyncio.Future[bytes]
    _on_notification: OnNotification | None
    passes_round = True

    @property
    def is_own(self) -> bool:
        """Whether it is a request of the gateway's own, of which no client hears."""
        return self._on_notification is None

    def on_notification(self, method: str, params: JsonObject | None) -> Flow | None:
        return None if self._on_notification is None else self._on_notification(method, params)

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None) -> Flow | None:
        raise AssertionError("a client without capabilities is not asked")

    def on_ask_withdrawn(self, ask: AskKey, reason: str) -> None: ...

    def on_answer(self, body: bytes, *, failed: bool) -> None:
        if not self.result.done():
            self.result.set_exception(
                RequestRefused(splice.decode(body.decode()))
            ) if failed else self.result.set_result(body)

    def on_lost(self, lost: Lost) -> None:
        if not self.result.done():
            self.result.set_exception(Gone(lost))

    def on_position(self, state: JsonObject) -> None: ...


_PooledPlace = tuple[Caller, str, Hashable]
"""A caller, its capabilities, and what the upstream gets of it."""

MakePooledLane = Callable[[PooledLane, Caller, object], Lane]
"""Makes a lane for a caller. The last argument is the HTTP request that it is made for, or `None`."""


@dataclass(slots=True, eq=False, kw_only=True)
class LanePool:
    upstream: Upstream
    make: MakePooledLane
    place: Callable[[Caller, object], Hashable]
    """What the upstream gets of a caller and its request: requests that differ in it share no lane."""
    tools: ToolList
    server_info: JsonObject = field(default_factory=dict)
    """What the upstream said of itself in its last handshake."""
    _lanes: dict[_PooledPlace, list[PooledLane]] = field(default_factory=dict)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _is_listing: bool = False

    @property
    def names_asks(self) -> bool:
        """Whether a lane says which call an ask belongs to."""
        return not self.upstream.is_program

    @property
    def most_lanes(self) -> int | None:
        """Lanes of one caller at once; calls wait for a free one."""
        return None if self.upstream.program is None else self.upstream.program.lanes

    @property
    def unused(self) -> float:
        """Seconds that a lane without requests lives."""
        idle = None if self.upstream.program is None else self.upstream.program.process_idle
        return UNUSED_SECONDS if idle is None else min(idle, UNUSED_SECONDS)

    @asynccontextmanager
    async def lane(self, caller: Caller, client: CallClient, origin: object = None) -> AsyncIterator[PooledLane]:
        """Take a lane during a block. Raises `UpstreamUnavailable`."""
        lane = await self.take(caller, client, origin)
        try:
            yield lane
        finally:
            self.give_back(lane)

    async def take(self, caller: Caller, client: CallClient, origin: object = None) -> PooledLane:
        """Take a lane, until `give_back`. Raises `UpstreamUnavailable`."""
        params = handshake_params(client)
        one = self.most_lanes == 1
        own = "" if one else json.dumps(params["capabilities"], sort_keys=True)
        place = caller, own, self.place(caller, origin)
        asks = client.takes_asks and not self.names_asks
        while (lane := self._free(place, one=one, asks=asks)) is None:
            self._freed.clear()
            if not await self.end_unused(caller):  # one with other capabilities
                await self._freed.wait()
        lane.asks_unnamed = lane.asks_unnamed or asks
        lane.holders += 1
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        if lane.opening is None:
            lane.opening = asyncio.create_task(self._open(lane, params, origin), name="perdure-pool")
            # All that waited for it may have left; asyncio would complain.
            lane.opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.shield(lane.opening)
        except BaseException:
            self.give_back(lane)
            raise
        return lane

    def _free(self, place: _PooledPlace, *, one: bool, asks: bool) -> PooledLane | None:
        """A lane that one more request may use, new if need be; `None` if the request has to wait. `one`: requests wait
        for each other."""
        lanes = self._lanes.get(place, [])
        for lane in lanes:
            if not lane.holders or not (one or (asks and not lane.passes)):
                return lane
        if self.most_lanes is not None and len(list(self._of(place[0]))) >= self.most_lanes:
            return None
        lane = PooledLane(self, place[0])
        self._lanes[place] = [*lanes, lane]
        return lane

    def _of(self, caller: Caller | None) -> Iterator[PooledLane]:
        """The lanes of a caller, or all."""
        for (whose, *_), lanes in self._lanes.items():
            if caller in (whose, None):
                yield from lanes

    async def _open(self, pooled: PooledLane, params: JsonObject, origin: object) -> None:
        try:
            lane, pooled.opened = await open_lane(
                lambda: self.make(pooled, pooled.caller, origin), params, patience=self.upstream.patience
            )
        except BaseException:
            self.forget(pooled)
            raise
        pooled.lane = lane
        self.server_info = pooled.result.get("serverInfo") or {}
        lane.notify("notifications/initialized", None)
        await self.list_tools(pooled)

    async def list_tools(self, lane: PooledLane) -> None:
        """Learn the tools of the server behind a lane, in `LIST_SECONDS`: it may be of another release than the last
        one, and only its own list says which tools may run again."""
        if "tools" in capabilities_in(lane.result):
            with contextlib.suppress(RequestRefused, Gone, TimeoutError):
                async with asyncio.timeout(LIST_SECONDS):
                    self.tools.learn(await list_tools(lane))

    def give_back(self, lane: PooledLane, *, may_ask: bool = False) -> None:
        """Let go of a lane. `may_ask`: its request was cancelled, and may still ask something. On a lane that does not
        say for which call, the next call would be asked in its place."""
        lane.holders -= 1
        if not lane.holders and not lane.is_over:
            if may_ask and lane.asks and self.most_lanes != 1:
                self._end(lane)
            else:
                lane.timer = asyncio.get_running_loop().call_later(self.unused, self._end, lane)
        self._freed.set()

    async def end_unused(self, caller: Caller | None) -> bool:
        """End the lane that has been without requests for longest, of a caller or any, and wait for its end. Returns
        whether there was one."""
        unused = [lane for lane in self._of(caller) if lane.timer is not None]
        if not unused:
            return False
        await self._close(min(unused, key=lambda lane: 0.0 if lane.timer is None else lane.timer.when()))
        return True

    def on_tools_changed(self, lane: PooledLane) -> None:
        if not self._is_listing:
            self._is_listing = True
            self._begin(self._list_again(lane))

    async def _list_again(self, lane: PooledLane) -> None:
        await asyncio.sleep(RELIST_SECONDS)  # a server may report a change with each list
        self._is_listing = False
        await self.list_tools(lane)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self, lane: PooledLane) -> None:
        self.forget(lane)  # at once, or a request might take it meanwhile
        self._begin(self._close(lane))

    async def _close(self, pooled: PooledLane) -> None:
        self.forget(pooled)
        lane, pooled.lane = pooled.lane, None
        if pooled.opening is not None and not pooled.opening.done():
            pooled.opening.cancel()
            await asyncio.wait({pooled.opening})
        if lane is not None:
            await lane.aclose(ended=not pooled.has_left)  # a later process may follow what runs

    def retire(self) -> None:
        """Use no open lane for another request. The upstream ends each when its requests are answered."""
        for lane in [lane for lanes in self._lanes.values() for lane in lanes]:
            if lane.lane is not None:
                self.forget(lane)

    def forget(self, lane: PooledLane) -> None:
        lane.is_over = True
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None
        for place, lanes in list(self._lanes.items()):
            if lane in lanes:
                self._lanes[place] = [other for other in lanes if other is not lane]
                if not self._lanes[place]:
                    del self._lanes[place]
        self._freed.set()

    async def aclose(self) -> None:
        await asyncio.gather(*(self._close(lane) for lane in list(self._of(None))))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def list_tools(lane: PooledLane) -> list[JsonObject]:
    """Read all tools of an upstream. Raises `RequestRefused` or `Gone`."""
    pages, params = ToolPages(), None
    while True:
        cursor = pages.add(splice.decode((await lane.call("tools/list", params)).decode()))
        if cursor is None:
            return pages.tools
        params = {"cursor": cursor}
