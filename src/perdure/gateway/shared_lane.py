"""Lets several sessions share one lane, and with it one process of an upstream (`process`).

Each session has a `SharedLane`, which to its runtime is a lane like any other. Behind it is one lane of the upstream
with a handshake of the gateway's own, for a client that cannot be asked anything, because a pipe does not say whose
call an ask belongs to. What a pipe brings without a name goes to the sessions that it may concern:

| message | sessions |
|---|---|
| a list has changed | all |
| a resource was updated | its subscribers |
| a log message | those with running requests or, if there are none, all; each by its own log level |
| any other | the same, without a level |
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

from perdure._core.eras import LEVELS, handshake_params
from perdure._core.handshakes import LISTS
from perdure._core.jsonrpc import JsonObject
from perdure.gateway.lane import LOG_MESSAGE, AskKey, Lane, Lost, Opened, Receiver, RequestKey, SessionReceiver, no_asks
from perdure.gateway.pool import OWN
from perdure.runtime.base import Flow

DEFAULT_LEVEL = "info"
"""What a session that has set no log level gets once another session has set one: many servers begin with it."""

_UPDATED = "notifications/resources/updated"
_OF_HANDSHAKE = frozenset({"notifications/initialized", "notifications/roots/list_changed"})
"""Notifications of clients that concern a handshake: that of a shared lane is the gateway's."""

SharedPlace = tuple[str, Hashable]
"""The principal whose sessions share a lane, empty for those of all callers, and what the upstream gets of a caller."""


@dataclass(frozen=True)
class SharedLanes:
    """The lanes of an upstream that sessions share, by their places."""

    _by_place: dict[SharedPlace, _Shared] = field(default_factory=dict)
    _admitted: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def admitting(self, owner: str, reserving: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
        """Keep room for a session during a block: where no process is shared yet, that of one more process."""
        if owner in self._admitted or any(place[0] == owner for place in self._by_place):
            yield
            return
        self._admitted.add(owner)
        try:
            async with reserving:
                yield
        finally:
            self._admitted.remove(owner)

    def join(self, place: SharedPlace, make: Callable[[SessionReceiver], Lane], session: SharedLane) -> _Shared:
        """The lane of a place, new if there is none, with one more session."""
        if (shared := self._by_place.get(place)) is None:
            shared = self._by_place[place] = _Shared(make, lambda: self._by_place.pop(place))
        shared.sessions.append(session)
        return shared


class SharedLane:
    """The part that one session has in a shared lane."""

    def __init__(
        self, lanes: SharedLanes, place: SharedPlace, make: Callable[[SessionReceiver], Lane], receiver: Receiver
    ) -> None:
        self.receiver = receiver
        self.running: set[RequestKey] = set()
        self.level: str | None = None
        """The log level that the session has set."""
        self._shared: _Shared | None = None
        self._join: Callable[[], _Shared] = lambda: lanes.join(place, make, self)

    @property
    def state(self) -> JsonObject:
        return {}  # a program's sessions end with it

    def listen(self, wanted: bool) -> None:
        """The lane is always read."""

    async def open(self, client_params: JsonObject, state: JsonObject | None = None) -> Opened:
        self._shared = shared = self._join()
        opened = await asyncio.shield(shared.opening)
        shared.tell_level()
        return opened

    def request(self, key: RequestKey, method: str, params: JsonObject | None) -> None:
        if self._shared is not None:
            self.running.add(key)
            self._shared.request(self, key, method, params)

    def follow(self, key: RequestKey, method: str, params: JsonObject | None, state: JsonObject) -> None:
        if self._shared is not None:
            self.running.add(key)
            self._shared.lane.follow((self, key), method, params, state)

    def cancel(self, key: RequestKey, params: JsonObject | None) -> None:
        if self._shared is not None and key in self.running:
            self.running.remove(key)
            self._shared.cancel(self, key, params)

    def notify(self, method: str, params: JsonObject | None) -> None:
        if self._shared is not None and method not in _OF_HANDSHAKE:
            self._shared.lane.notify(method, params)

    def reply(self, ask: AskKey, response: JsonObject) -> None:
        """No session is asked anything."""

    async def aclose(self, *, ended: bool) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            for key in self.running:
                shared.cancel(self, key, {"reason": "its session has ended"})
            self.running.clear()
            await shared.leave(self)

    # What the lane brings for this session

    def answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        if key in self.running:
            self.running.remove(key)
            self.receiver.on_answer(key, body, failed=failed)

    def lose(self, key: RequestKey, lost: Lost) -> None:
        if key in self.running:
            self.running.remove(key)
            self.receiver.on_lost(key, lost)

    def close(self, why: str) -> None:
        self._shared = None
        self.receiver.on_closed(why)

    def wants(self, params: JsonObject | None, told: str | None) -> bool:
        """Whether the session gets a log message of a server that was set to the level `told`."""
        level = (params or {}).get("level")
        if told is None or level not in LEVELS:
            return True
        return LEVELS.index(level) >= LEVELS.index(self.level or DEFAULT_LEVEL)


class _Shared(SessionReceiver):
    """A lane with its sessions. It is over when the last of them has left."""

    def __init__(self, make: Callable[[SessionReceiver], Lane], on_over: Callable[[], object]) -> None:
        self.lane = make(self)
        self.sessions: list[SharedLane] = []
        self.opening = asyncio.create_task(self._open(), name="perdure-shared-lane")
        # All sessions that waited for it may have left; asyncio would complain.
        self.opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._on_over = on_over
        self._is_over = False
        self._subscribed: dict[str, set[SharedLane]] = {}
        """The sessions that are, or want to be, subscribed to each resource."""
        self._subscribing: dict[RequestKey, str] = {}
        """The resources of requests to subscribe that were sent."""
        self._confirmed: set[str] = set()
        """The resources to which the upstream has confirmed a subscription."""
        self._level: str | None = None
        """The log level that the upstream was set to."""

    async def _open(self) -> Opened:
        try:
            opened = await self.lane.open(handshake_params(OWN))
        except BaseException:
            self._end()
            await self.lane.aclose(ended=True)
            raise
        self.lane.notify("notifications/initialized", None)
        return replace(opened, process=secrets.token_hex(8))

    async def leave(self, session: SharedLane) -> None:
        self.sessions.remove(session)
        if self._is_over:
            return
        if not self.sessions:
            self._end()  # at once, or another session might join it meanwhile
            if self.opening.cancel():
                await asyncio.wait({self.opening})
            else:
                await self.lane.aclose(ended=True)
            return
        for uri in [uri for uri, subscribed in self._subscribed.items() if session in subscribed]:
            if self._unsubscribe(session, uri):
                self._request_own("resources/unsubscribe", {"uri": uri})
        self.tell_level()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_over()

    # Requests

    def request(self, session: SharedLane, key: RequestKey, method: str, params: JsonObject | None) -> None:
        uri, level = (params or {}).get("uri"), (params or {}).get("level")
        if method == "resources/subscribe" and isinstance(uri, str):
            self._subscribed.setdefault(uri, set()).add(session)
            if uri in self._confirmed:
                self._answer_here(session, key)
                return
            self._subscribing[session, key] = uri
        elif method == "resources/unsubscribe" and isinstance(uri, str) and not self._unsubscribe(session, uri):
            self._answer_here(session, key)
            return
        elif method == "logging/setLevel" and level in LEVELS:
            session.level = level
            if self._lowest == self._level:
                self._answer_here(session, key)
                return
            self._level = self._lowest
            params = {**(params or {}), "level": self._level}
        self.lane.request((session, key), method, params)

    def cancel(self, session: SharedLane, key: RequestKey, params: JsonObject | None) -> None:
        self._subscribing.pop((session, key), None)
        self.lane.cancel((session, key), params)

    @staticmethod
    def _answer_here(session: SharedLane, key: RequestKey) -> None:
        asyncio.get_running_loop().call_soon(lambda: session.answer(key, b"{}", failed=False))

    def _request_own(self, method: str, params: JsonObject) -> None:
        """Send a request whose answer concerns no session."""
        self.lane.request((None, object()), method, params)

    def _unsubscribe(self, session: SharedLane, uri: str) -> bool:
        """Take a session from the subscribers of a resource. Returns whether it was the last of them."""
        others = self._subscribed.get(uri, set())
        others.discard(session)
        if not others:
            self._subscribed.pop(uri, None)
            self._confirmed.discard(uri)
        return not others

    @property
    def _lowest(self) -> str:
        return min((session.level or DEFAULT_LEVEL for session in self.sessions), key=LEVELS.index)

    def tell_level(self) -> None:
        """Have the upstream send what the sessions of now want, once one of them has set a level."""
        if self._level is not None and self._lowest != self._level:
            self._level = self._lowest
            self._request_own("logging/setLevel", {"level": self._level})

    # What the lane reports

    def on_notification(self, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        if key is not None:
            session, own = _parts(key)
            if session is None or own not in session.running:
                return None
            return session.receiver.on_notification(method, params, key=own)
        flow = None
        for session in list(self._concerned(method, params)):
            given = None if params is None else dict(params)  # its receiver keeps it
            flow = session.receiver.on_notification(method, given, key=None) or flow
        return flow

    def _concerned(self, method: str, params: JsonObject | None) -> Iterator[SharedLane]:
        if method in LISTS.values():
            yield from self.sessions
        elif method == _UPDATED:
            changed = str((params or {}).get("uri"))
            # A server may name a part of what is subscribed.
            found = [sessions for uri, sessions in self._subscribed.items() if changed.startswith(uri)]
            yield from set[SharedLane]().union(*found)
        else:
            busy = [session for session in self.sessions if session.running]
            for session in busy or self.sessions:
                if method != LOG_MESSAGE or session.wants(params, self._level):
                    yield session

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        self.lane.reply(ask, no_asks(method))
        return None

    def on_answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        session, own = _parts(key)
        uri = self._subscribing.pop(key, None)
        if uri is not None and failed and session is not None:
            self._unsubscribe(session, uri)
        elif uri in self._subscribed:
            self._confirmed.add(uri)
        if session is not None:
            session.answer(own, body, failed=failed)

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        session, own = _parts(key)
        self._subscribing.pop(key, None)
        if session is not None:
            session.lose(own, lost)

    def on_closed(self, why: str) -> None:
        self._end()
        sessions, self.sessions = self.sessions, []
        for session in sessions:
            session.close(why)


def _parts(key: RequestKey) -> tuple[SharedLane | None, RequestKey]:
    """The session of a request, `None` for one of the shared lane's own, and the session's key of it."""
    assert isinstance(key, tuple)
    session, own = key
    return session, own
