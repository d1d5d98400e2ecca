"""Carries requests of 2026-07-28 to an upstream: over HTTP each as a POST of its own, or as lines over a pipe."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import anyio

from perdure._core.codes import HEADER_MISMATCH, INTERNAL_ERROR, METHOD_NOT_FOUND, UNSUPPORTED_VERSION
from perdure._core.delivery import Attempt, Meaning, Purpose
from perdure._core.envelope import DISCOVER, SUBSCRIPTION, envelope_in, headers_of, param_headers
from perdure._core.jsonrpc import JsonObject
from perdure._core.reconnect import Patience
from perdure._core.revisions import FIRST_SESSIONLESS
from perdure.gateway.child import ChildProgram
from perdure.gateway.children import Children
from perdure.gateway.lane import REFUSED_SECONDS, AskKey, Lost, Reason, Receiver, RequestKey, UpstreamUnavailable
from perdure.gateway.pipe import PipeLane
from perdure.gateway.web import lost_by, outcome_of
from perdure.remote.call import Call, Ended, OutgoingRequest, params_body
from perdure.remote.durable_calls import find_tool
from perdure.remote.endpoint import Refused
from perdure.remote.link import CHECK_PAUSE, CHECK_SECONDS
from perdure.remote.message import Message, encode, messages_in
from perdure.remote.route import Route
from perdure.remote.stream import Stream
from perdure.runtime.base import Flow

Take = Callable[[str, JsonObject | None], Flow | None]
"""Takes the method and the params of a notification; returns where to wait before the next one."""


def drop(method: str, params: JsonObject | None) -> None:
    """For requests whose notifications have no reader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WireRequest:
    """A request whose params have the envelope."""

    method: str
    params: JsonObject
    take: Take = drop
    """Takes the notifications that belong to it."""
    patience: Patience | None = None
    is_keyed: bool = False
    """The upstream runs it once, however often it comes."""
    may_have_arrived: bool = False
    """An earlier process has sent it."""


class Wire(Protocol):
    """The way to one upstream of 2026-07-28.

    1. `open` comes first.
    2. `send` returns the answer, or how the request ended without one; `take` gets what belongs to it before.
    3. A task that is cancelled while it waits in `send` cancels the request at the upstream.
    4. Progress tokens are the wire's own: a request has one if its `_meta` has one.
    """

    async def open(self, params: JsonObject, on_notification: Take, on_closed: Callable[[str], None]) -> JsonObject:
        """Return the result of `server/discover`. `on_notification` takes what names no request, and `on_closed` the
        end of the wire, after the ends of its requests. Raises `UpstreamUnavailable`."""

    async def send(self, request: WireRequest) -> Message | Ended: ...

    async def notify(self, method: str, params: JsonObject | None) -> None:
        """Send a notification, once."""

    async def aclose(self) -> None:
        """End without a report."""


class HttpWire:
    """Requests by POST; the end of a response cancels its request."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._params: JsonObject = {}
        """Of `server/discover`."""
        self._on_closed: Callable[[str], None]
        self._checked: tuple[float, asyncio.Task[UpstreamUnavailable | None]] | None = None
        """When the revision was asked for last, and why it is not spoken any more."""

    async def open(self, params: JsonObject, on_notification: Take, on_closed: Callable[[str], None]) -> JsonObject:
        self._params, self._on_closed = params, on_closed
        return await self._discover(self._route.limits.handshake_seconds)

    async def _discover(self, seconds: float) -> JsonObject:
        found = None
        with anyio.move_on_after(seconds):
            request = WireRequest(method=DISCOVER, params=self._params, patience=self._route.limits.handshake)
            found, _ = await self._post(request)
        if found is None:
            sentence = f"The server did not answer {DISCOVER} within {seconds:g} s"
            raise UpstreamUnavailable(Reason.NO_HANDSHAKE, sentence)
        if isinstance(found, Ended):
            unavailable = lost_by(found).unavailable or UpstreamUnavailable(Reason.NO_HANDSHAKE, found.why)
            # Another 4xx than those with a name: an older server may refuse the headers, or ask for a session.
            raise other_version(None, str(unavailable)) if found.refusal.reason == "refused" else unavailable
        if not found.is_error:
            return found.result
        error = found.body["error"]
        if error.get("code") == INTERNAL_ERROR:
            raise UpstreamUnavailable(Reason.SERVER_ERROR, f"The server fails at {DISCOVER}: {found.why}")
        data = error.get("data") if error.get("code") == UNSUPPORTED_VERSION else None
        raise other_version(data.get("supported") if isinstance(data, Mapping) else None, found.why)

    async def send(self, request: WireRequest) -> Message | Ended:
        found, is_doubtful = await self._post(request)
        if is_doubtful and (refused := await self._refuses_revision()) is not None:
            return Ended(meaning=Meaning.REFUSED, why=str(refused), refusal=Refused(refused.reason.value, str(refused)))
        if isinstance(found, Ended) or not found.is_error or request.method != "tools/call":
            return found
        if found.body["error"].get("code") != HEADER_MISMATCH:
            return found
        # The tool wants arguments in headers, which its schema names. The request did not run.
        schema = (await self._tool(request.params)).get("inputSchema")
        if more := param_headers(schema, request.params.get("arguments")):
            found, _ = await self._post(request, more)
        return found

    async def _post(self, request: WireRequest, more: Mapping[str, str] | None = None) -> tuple[Message | Ended, bool]:
        """Send a request, with more headers. Returns as well whether the upstream may have been replaced by one of the
        other era."""

        async def taken(message: Message) -> None:
            if message.method is None or message.is_request:  # the revision has no requests of servers
                return
            if (flow := request.take(message.method, dict(message.params) or None)) is not None:
                await flow.wait_for_room()

        method, params, name = request.method, request.params, request.params.get("name")
        sent = OutgoingRequest(
            method=method,
            name=name if isinstance(name, str) else "",
            body=params_body(method, params),
            headers={**headers_of(method, params), **(more or {})},
            is_keyed=request.is_keyed,
        )
        call = Call(
            self._route,
            sent,
            take=taken,
            patience=request.patience,
            may_have_arrived=request.may_have_arrived,
        )
        return await outcome_of(call), call.doubts_session

    async def _refuses_revision(self) -> UpstreamUnavailable | None:
        """Why the upstream does not speak this revision any more. At most one request in `CHECK_PAUSE` finds that out
        for all that ask."""
        now = asyncio.get_running_loop().time()
        if self._checked is None or now - self._checked[0] >= CHECK_PAUSE:
            self._checked = now, asyncio.create_task(self._check())
        return await asyncio.shield(self._checked[1])

    async def _check(self) -> UpstreamUnavailable | None:
        try:
            await self._discover(CHECK_SECONDS)
        except UpstreamUnavailable as failure:
            if failure.reason is Reason.VERSION:
                asyncio.get_running_loop().call_later(REFUSED_SECONDS, self._on_closed, str(failure))
                return failure
        return None

    async def _tool(self, params: JsonObject) -> Mapping[str, Any]:
        async def page(cursor: str | None) -> Mapping[str, Any]:
            whole = {**({"cursor": cursor} if cursor else {}), "_meta": envelope_in(params)}
            found = await self.send(WireRequest(method="tools/list", params=whole))
            return {} if isinstance(found, Ended) or found.is_error else found.result

        return await find_tool(str(params.get("name")), page)

    async def notify(self, method: str, params: JsonObject | None) -> None:
        body = encode({"jsonrpc": "2.0", "method": method, **({} if params is None else {"params": params})}).encode()
        headers = {"mcp-protocol-version": FIRST_SESSIONLESS, "mcp-method": method}
        stream = Stream(self._route, patience=self._route.limits.patience)
        opened = self._route.endpoint.post(body, None, headers)
        await stream.attempt(opened, Attempt(purpose=Purpose.NOTIFICATION), None)

    async def aclose(self) -> None:
        """Nothing is open but requests, which their tasks end."""
        if self._checked is not None:
            self._checked[1].cancel()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    answered: asyncio.Future[Message | Ended]
    take: Take


class PipeWire(Receiver):
    """Requests as lines to a child process, on the lane of a pipe, whose receiver this is."""

    def __init__(
        self,
        children: Children,
        program: ChildProgram | None = None,
        probe_seconds: float | None = None,
    ) -> None:
        """The last two are those of `PipeLane`."""
        self._lane = PipeLane(children, self, greeting=DISCOVER, program=program, probe_seconds=probe_seconds)
        self._keys = count(1)
        self._sent: dict[RequestKey, _Sent] = {}
        self._on_other: Take
        self._on_closed: Callable[[str], None]

    async def open(self, params: JsonObject, on_notification: Take, on_closed: Callable[[str], None]) -> JsonObject:
        self._on_other, self._on_closed = on_notification, on_closed
        return (await self._lane.open(params)).result

    async def send(self, request: WireRequest) -> Message | Ended:
        """A child that has ended is not waited for: the next lane has another one."""
        key, answered = next(self._keys), asyncio.get_running_loop().create_future()
        self._sent[key] = _Sent(answered=answered, take=request.take)
        try:
            self._lane.request(key, request.method, request.params)
            found: Message | Ended = await answered
            return found
        except asyncio.CancelledError:
            self._lane.cancel(key, None)
            raise
        finally:
            del self._sent[key]

    async def notify(self, method: str, params: JsonObject | None) -> None:
        self._lane.notify(method, params)

    async def aclose(self) -> None:
        await self._lane.aclose(ended=True)

    # What the pipe brings

    def on_notification(self, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        if (sent := self._sent.get(key)) is not None:
            return sent.take(method, params)
        meta = (params or {}).get("_meta")
        if isinstance(meta, dict) and SUBSCRIPTION in meta:
            return None  # of a subscription that is over
        return self._on_other(method, params)

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None, *, key: RequestKey | None) -> Flow | None:
        """The revision has no requests of servers."""
        self._lane.reply(ask, {"error": {"code": METHOD_NOT_FOUND, "message": f"Method not found: {method}"}})
        return None

    def on_answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        if (sent := self._sent.get(key)) is not None and not sent.answered.done():
            [message] = messages_in(f'{{"{"error" if failed else "result"}":{body.decode()}}}')
            sent.answered.set_result(message)

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        if (sent := self._sent.get(key)) is not None and not sent.answered.done():
            meaning, refusal = Meaning.UNKNOWN, Refused(Reason.DIED.value, lost.why)
            if lost.unavailable is not None:
                meaning, refusal = Meaning.REFUSED, Refused(lost.unavailable.reason.value, str(lost.unavailable))
            sent.answered.set_result(Ended(meaning=meaning, why=lost.why, refusal=refusal))

    def on_closed(self, why: str) -> None:
        # The requests that were lost are reported first, by the tasks that wait for them.
        asyncio.get_running_loop().call_soon(self._on_closed, why)


def other_version(supported: object, why: str = "") -> UpstreamUnavailable:
    """The upstream is not one of this revision: it names others, or does not understand."""
    named = ", ".join(map(str, supported)) if isinstance(supported, list) else ""
    spoken = f"it names {named[:200]}" if named else f"it answers: {why[:200]}" if why else "it names none"
    return UpstreamUnavailable(Reason.VERSION, f"The server does not speak {FIRST_SESSIONLESS}; {spoken}")
