"""Serves `subscriptions/listen` of 2026-07-28: an acknowledgement, notifications from one or more sources, and an end.

A request with other contents goes to the SDK's own handler, which refuses it. So does every request if this process
cannot subscribe to its own server. A listener may stay for days, so of its request only the id and the filter are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from mcp_types import SubscriptionsListenRequestParams
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from perdure._core import sse
from perdure._core.envelope import LISTEN, SUBSCRIPTION
from perdure._core.limits import Caller, Full, Quota, weigh
from perdure._core.listening import ACKNOWLEDGED, METHODS, BadFilter, Notification, read_filter
from perdure.errors import StoreError
from perdure.http.access import SessionAccess, refuse_full
from perdure.http.body import Headers, replayed_first
from perdure.http.credentials import EXPIRY, Expiry, caller_of, principal_of
from perdure.http.event_stream import BREAK_OFF, EventStream
from perdure.http.modern_request import read_request
from perdure.http.refusals import Refusal, Refused
from perdure.sessions.listening import Listening, TooManyResources

AT_ONCE = 64
"""Notifications in one write: a client that reads slowly is waited for in between."""

_EVENT = b"event: message\r\ndata: "
_METHODS = tuple(method.encode() for method in sorted(METHODS))

Otherwise = Callable[[Scope, Receive, Send, Headers], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class ListenRequest:
    """What a listener asks for."""

    id: int | str
    filter: Mapping[str, Any]
    """The `notifications` of its params, checked for the types of the fields that the revision has."""
    meta: Mapping[str, Any]
    owner: str
    caller: Caller


class ListenSource(Protocol):
    """Has the notifications of one kind for one listener."""

    @property
    def honoured(self) -> Mapping[str, Any]:
        """Its part of the acknowledged filter."""

    @property
    def is_over(self) -> bool:
        """Nothing more will be due. A listener ends by itself once that is so of all its sources."""

    def watch(self, on_due: Callable[[], None]) -> None:
        """Call `on_due` whenever something is due, or nothing will be any more."""

    def take(self) -> Sequence[Notification]:
        """All that is due at the moment, in its order."""

    def close(self) -> None:
        """The listener is gone."""


class ListenSources(Protocol):
    """Opens a source for a listener."""

    async def open(self, request: ListenRequest) -> ListenSource | None:
        """`None`: only the server itself can serve this request. Raises `Refused`."""


@dataclass(frozen=True, slots=True)
class ChangesSources:
    """Changes of the server's lists and resources, at whatever node."""

    _listening: Listening

    async def open(self, request: ListenRequest) -> ListenSource | None:
        try:
            return await self._listening.join(read_filter(request.filter), caller=request.caller)
        except BadFilter as error:
            raise Refused(Refusal.BAD_FILTER, reason=error) from None
        except TooManyResources as full:
            if full.of_caller:
                raise Refused(Refusal.OWN_SHARE, limit=full.limit, what="the resources that listeners name") from None
            raise Refused(Refusal.TOO_MANY_RESOURCES, limit=full.limit) from None
        except StoreError:
            raise Refused(Refusal.STORE_UNREADABLE) from None


@dataclass(slots=True, eq=False)
class _Listening:
    """One response to a listener. It has a task of its own only while it writes or waits for something to write."""

    id: int | str
    _keepalive: float
    _timeout: float
    sources: list[ListenSource] = field(default_factory=list)
    is_ended: bool = False
    """The server ends it: its client listens elsewhere."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        self.is_ended = True
        self._wake.set()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the server ends it, the token expires, or the client leaves."""
        response = EventStream(receive, send, abort=scope.get(BREAK_OFF), timeout=self._timeout)
        expiry: Expiry | None = scope[EXPIRY]
        watch = None if expiry is None else expiry.watch(self.end)
        try:
            await response.serve(asyncio.create_task(self._write(response), name="perdure-listener"), end=self.end)
        finally:
            if watch is not None:
                watch.cancel()

    async def _write(self, response: EventStream) -> None:
        for source in self.sources:
            source.watch(self._wake.set)
        await response.write(self._acknowledgement())
        while True:
            self._wake.clear()
            if due := [told for source in self.sources for told in source.take()]:
                for start in range(0, len(due), AT_ONCE):
                    await response.write(b"".join(map(self._frame, due[start : start + AT_ONCE])))
            elif self.is_ended or all(source.is_over for source in self.sources):
                return await response.write(self._completion(), last=True)
            else:
                try:
                    async with asyncio.timeout(self._keepalive):
                        await self._wake.wait()
                except TimeoutError:
                    await response.keep_alive()

    @property
    def honoured(self) -> Mapping[str, Any]:
        """What of its filter is served."""
        return {name: value for source in self.sources for name, value in source.honoured.items()}

    def _acknowledgement(self) -> bytes:
        return self._frame(Notification(ACKNOWLEDGED, {"notifications": self.honoured}))

    def _frame(self, told: Notification) -> bytes:
        params = {**told.params, "_meta": {SUBSCRIPTION: self.id}}
        return _framed({"jsonrpc": "2.0", "method": told.method, "params": params})

    def _completion(self) -> bytes:
        result = {"resultType": "complete", "_meta": {SUBSCRIPTION: self.id}}
        return _framed({"jsonrpc": "2.0", "id": self.id, "result": result})


class ListeningHandler:
    """Serves listeners, `max_listeners` at once, and `max_principal_listeners` of one caller."""

    def __init__(self, access: SessionAccess, sources: Sequence[ListenSources]) -> None:
        self._access = access
        self._sources = sources
        self._open: set[_Listening] = set()
        self._quota = Quota(access.settings.max_listeners, each=access.settings.max_principal_listeners)

    def __len__(self) -> int:
        return len(self._open)

    def end(self) -> None:
        """End all listeners with a completion result: their clients listen elsewhere."""
        for listening in self._open:
            listening.end()

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, *, otherwise: Otherwise
    ) -> None:
        """Serve a listener; `otherwise` gets what cannot be served here, with its body."""
        body = await self._access.bodies.read(receive, headers)
        async with AsyncExitStack() as stack:
            listening = await self._begin(scope, headers, body, stack)
            if listening is not None:
                del body
                await listening.serve(scope, receive, send)
                return
        await otherwise(scope, replayed_first(body, receive), send, headers)

    async def _begin(self, scope: Scope, headers: Headers, body: bytes, stack: AsyncExitStack) -> _Listening | None:
        """Read a request and open what it wants to hear; `None` if it cannot be served here. What it takes in memory
        counts until then; what is kept of it, as long as it listens."""
        settings, work = self._access.settings, self._access.context.work
        caller = caller_of(principal_of(scope), scope)
        self._access.refuse_work(caller, size := weigh(body))
        work.take(caller, size)
        try:
            request = _read(scope, headers, body)
            if request is None:
                return None
            listening = _Listening(request.id, settings.keepalive_interval, settings.stream_timeout)
            try:
                stack.enter_context(self._counting(listening, request.caller))
                for sources in self._sources:
                    source = await sources.open(request)
                    if source is None:
                        await stack.aclose()
                        return None
                    stack.callback(source.close)
                    listening.sources.append(source)
                if listening.is_ended:
                    raise Refused(Refusal.STOPPING)
            except Refused as refused:
                raise refused.answering(request.id) from None
            kept = 2 * len(json.dumps(listening.honoured))
            work.take(caller, kept)
            stack.callback(work.take, caller, -kept)
            return listening
        finally:
            work.take(caller, -size)

    @contextmanager
    def _counting(self, listening: _Listening, caller: Caller) -> Iterator[None]:
        full = self._quota.lacks(caller)
        if full is Full.FOR_CALLER:
            raise Refused(Refusal.TOO_MANY_OWN_LISTENERS, limit=self._quota.each)
        refuse_full(full, Refusal.TOO_MANY_LISTENERS, self._quota, "max_listeners")
        self._access.refuse_readers(caller)
        self._open.add(listening)
        try:
            with self._quota.holding(caller), self._access.context.hub.open.holding(caller):
                yield
        finally:
            self._open.discard(listening)


def _read(scope: Scope, headers: Headers, body: bytes) -> ListenRequest | None:
    """Read a request to listen; `None` if it is not exactly that: the SDK says what is wrong with it."""
    asked = read_request(scope, headers, body, size=0, json_only=False)
    if asked is None or asked.request.method != LISTEN:
        return None
    try:
        SubscriptionsListenRequestParams.model_validate(asked.params, by_name=False)
    except ValidationError:
        return None
    return ListenRequest(
        id=asked.request.id,
        filter=asked.params["notifications"],
        meta=asked.params["_meta"],
        owner=asked.owner,
        caller=caller_of(asked.owner, scope),
    )


def hearing_changes(send: Send, tell: Callable[[str, Mapping[str, Any] | None], None]) -> Send:
    """Wrap `send` of a response of the SDK so that changes reported in it are passed on: a tool of a server without
    subscriptions says them to its own caller. The SDK sends each event in one piece."""

    async def send_and_tell(message: MutableMapping[str, Any]) -> None:
        body: bytes = message.get("body", b"")
        if body.startswith(_EVENT) and any(method in body for method in _METHODS):
            with contextlib.suppress(ValueError, AttributeError, RecursionError):
                said = json.loads(body.removeprefix(_EVENT))
                if (method := said.get("method")) in METHODS:
                    tell(method, said.get("params"))
        await send(message)

    return send_and_tell


def _framed(message: Mapping[str, Any]) -> bytes:
    return sse.encode_message(json.dumps(message, separators=(",", ":")).encode())
