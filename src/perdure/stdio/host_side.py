"""Handles the host's lines: each is a request, a notification or an answer for the server, or is refused.

Hosts count their requests from 0 or 1 each time they start their server. On the wire a request has an id that is never
used again, and its progress token is that id. The host gets both back as it gave them. So nothing of an earlier process
can be taken for something of this one.

**Calls of an earlier process.** The host forgot these calls when it ended that process, and its ids begin from 0 again,
so their results answer no request of the host. How they ended is reported in a log message (`notifications/message`,
level info). A host that has asked for less does not get it; the bridge's own log has a line about it in any case. Only
a server that has declared `logging` may send log messages, and most do not. For these the bridge declares it to the
host, and keeps the level that the host sets.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import anyio
import anyio.lowlevel

from perdure._core import splice
from perdure._core.codes import INVALID_PARAMS, INVALID_REQUEST, PARSE_ERROR, TOO_MANY_AT_ONCE
from perdure._core.envelope import DISCOVER, envelope_in
from perdure._core.eras import LEVELS
from perdure._core.jsonrpc import Batch, InvalidMessage, Notification, Request, Response, parse_body
from perdure._core.lines import MAX_LINE_BYTES, Line, TooLong
from perdure._core.sticky import METHODS as STICKY
from perdure._core.sticky import encode as encode_sticky
from perdure.remote.call import Call, OutgoingRequest, Sender
from perdure.remote.endpoint import Handshake
from perdure.remote.link import Link
from perdure.remote.message import Message, encode, error
from perdure.stdio.modern_host import ModernHost, unsupported
from perdure.stdio.pipes import Output
from perdure.stdio.state_files import PositionsFile, RunningCall
from perdure.telemetry.log_records import log_event

#: Requests of the host that run at once. Each holds a connection, and servers take 100 (`max_calls`) or so.
MAX_RUNNING = 256
#: Characters of a tool's name that are kept and reported. Names have 128 at most (2025-11-25).
MAX_NAME = 200
#: Asks of the server that the host has not answered. The answer to one that was forgotten is not sent.
MAX_ASKS = 1_000
#: In front of the progress token of an earlier incarnation's call. Our own tokens have no colon.
_OF_EARLIER = re.compile(r"^\d+:")
#: Messages that wait to leave. Beyond that the host's pipe is not read, and the host has to wait.
MAX_WAITING = 100
#: Characters beyond which a message is waited for before the next one is read: so at most one large one waits.
LARGE = 1 << 20

SET_LEVEL = "logging/setLevel"

Job = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


class SendQueue:
    """Runs jobs one after the other. Each sets its event when the next may begin, at its end at the latest."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._urgent: set[asyncio.Event] = set()
        self._put, self._waiting = anyio.create_memory_object_stream[tuple[asyncio.Event, Job]](MAX_WAITING)

    async def run(self) -> None:
        with self._put, self._waiting:
            async for departed, job in self._waiting:
                if not departed.is_set():
                    self._link.start(self._do, job, departed)
                    await departed.wait()

    async def _do(self, job: Job, departed: asyncio.Event) -> None:
        try:
            await job(departed)
        finally:
            departed.set()

    async def add(self, job: Job, departed: asyncio.Event | None = None, *, weight: int = 0) -> None:
        """Add a job, after a place in the queue is free."""
        departed = departed or asyncio.Event()
        await self._put.send((departed, job))
        if weight > LARGE:
            await departed.wait()

    def start_now(self, job: Job) -> None:
        """Start a job that does not wait for those in front of it: they may be waiting for it."""
        departed = asyncio.Event()
        self._urgent = {earlier for earlier in self._urgent if not earlier.is_set()} | {departed}
        self._link.start(self._do, job, departed)

    async def flush(self) -> None:
        """Wait until everything has departed."""
        last = asyncio.Event()
        await self.add(lambda _: anyio.lowlevel.checkpoint(), last)
        for departed in (last, *self._urgent):
            await departed.wait()


@dataclass(frozen=True, kw_only=True)
class _SessionRequest:
    """A request of the host that runs."""

    call: Call
    running: RunningCall
    sticky: str  #: the request as it is repeated in a new session; "" where its method is not sticky
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


@dataclass(eq=False)
class HostSide:
    """Follows the host's calls, and translates ids and progress tokens between the host and the wire."""

    _link: Link
    _positions: PositionsFile
    _: KW_ONLY
    initialize: Callable[[str, str, dict[str, Any]], Awaitable[str]]
    """Returns the answer to the host's `initialize`."""
    finish: Callable[[str], Coroutine[Any, Any, None]]
    """Takes its `initialized`."""
    output: Output
    modern: ModernHost
    """Takes requests of the revision without sessions."""
    _requests: dict[str, _SessionRequest] = field(default_factory=dict)  #: running calls, by the host's id as JSON
    _earlier: set[anyio.CancelScope] = field(default_factory=set)  #: of calls of an earlier process that run
    _tokens: dict[str, str] = field(default_factory=dict)  #: the tokens of the host, as JSON, by those on the wire
    _asks: dict[str, None] = field(default_factory=dict)  #: the ids of asks that wait for the host, as JSON
    _has_begun: bool = False  #: the host has sent `initialize`, and it has not failed

    def __post_init__(self) -> None:
        self.sender, self.queue = Sender(self._link), SendQueue(self._link)

    async def take(self, line: Line) -> None:
        if isinstance(line, TooLong):
            await self._refuse("null", PARSE_ERROR, f"The line is longer than {MAX_LINE_BYTES} bytes, and was not read")
            return
        try:
            message = parse_body(line)
        except InvalidMessage as invalid:
            await self._refuse_line(line, invalid)
            return
        text = splice.one_line(line.decode())
        match message:
            case Batch():
                # Every request in it is answered, because none of them is sent.
                ids = [encode(one.id) for one in message.messages if isinstance(one, Request)] or ["null"]
                for host_id in ids:
                    sentence = "Batches are not bridged: send each message on a line of its own"
                    await self._refuse(host_id, INVALID_REQUEST, sentence)
            case Request():
                await self._request(message, text)
            case Notification(method="notifications/cancelled"):
                self._cancel(text)
            case Notification(method="notifications/initialized"):
                await self.queue.add(lambda _: self.finish(text))
            case Notification() if self._has_begun and envelope_in(message.params) is None:
                await self.queue.add(self._sending(text), weight=len(text))
            case Response():
                if self._close_ask(splice.cut(text, "id") or "null"):
                    # It does not wait: the request in front of it may be waiting for the very call that asked.
                    self.queue.start_now(self._sending(text, is_reply=True))
                else:
                    log_event(logging.DEBUG, "stdio.answer_unasked", "the host answers a question that is not open")

    def stop(self) -> None:
        """Stop to follow calls that were sent: the host does not read any more."""
        self.modern.stop()
        own = [request.scope for request in self._requests.values() if request.call.departed.is_set()]
        for scope in (*own, *self._earlier):
            scope.cancel()

    # What the server says

    def to_host(self, message: Message) -> str | None:
        """Return the server's message as the host gets it; None if it is not for this host."""
        if message.is_request:
            self._asks[_same_id(splice.cut(message.text, "id") or "null")] = None
            if len(self._asks) > MAX_ASKS:
                del self._asks[next(iter(self._asks))]
        elif message.method == "notifications/progress":
            # A host that sends `initialize` twice begins another incarnation. What its earlier calls say from then on
            # carries the number of theirs in front of the token.
            found = message.params.get("progressToken")
            own = self._tokens.get(_OF_EARLIER.sub("", found)) if isinstance(found, str) else None
            if own is None:
                log_event(logging.DEBUG, "stdio.progress_dropped", "progress of a call that this process has not made")
                return None
            return splice.replaced(message.text, own, "params", "progressToken")
        elif message.method == "notifications/cancelled":
            # Only if this host was asked: it has never seen the asks of an earlier process.
            ask = splice.cut(message.text, "params", "requestId") or "null"
            return message.text if self._close_ask(ask) else None
        return None if message.method is None else message.text

    def _close_ask(self, ask: str) -> bool:
        """Close an ask that is answered or withdrawn. Returns whether it was open."""
        return self._asks.pop(_same_id(ask), False) is None

    def close_asks(self) -> list[str]:
        """Close all asks, and return their ids: no tool of the new session waits for the answers."""
        asks, self._asks = list(self._asks), {}
        return asks

    # Requests

    async def _request(self, message: Request, text: str) -> None:
        host_id = splice.cut(text, "id") or "null"
        is_modern = envelope_in(message.params) is not None
        if message.method == "initialize" and not is_modern:
            self._has_begun = True

            async def initialize(_: asyncio.Event) -> None:
                """Nothing else leaves before the handshake is answered: there is no session to send it in."""
                answer = await self.initialize(host_id, text, message.params or {})
                self._has_begun = self._link.handshake is not None
                await self.output.write(answer)

            await self.queue.add(initialize)
        elif not self._has_begun and not is_modern:
            if message.method == "ping":
                answer = f'{{"jsonrpc":"2.0","id":{host_id},"result":{{}}}}'
            elif message.method == DISCOVER:  # a host of 2026-07-28 that says too little: it falls back
                sentence = "The bridge speaks the revisions that have sessions"
                answer = unsupported(host_id, message.params or {}, sentence).text
            else:
                answer = error(host_id, INVALID_REQUEST, "Begin with an initialize request").text
            await self.output.write(answer)
        elif host_id in self._requests or host_id in self.modern.running:
            sentence = f"Request id {host_id} is still in use by a running request"
            await self._refuse(host_id, INVALID_REQUEST, sentence)
        elif len(self._requests) + len(self.modern.running) >= MAX_RUNNING:
            await self._refuse(host_id, TOO_MANY_AT_ONCE, f"{MAX_RUNNING} requests run already, as many as may")
        elif is_modern:
            self.modern.begin(message, host_id, text)
        else:
            request = self._started(message, host_id, text)
            await self.queue.add(lambda _: self._follow(request), request.call.departed, weight=len(text))

    def _started(self, message: Request, host_id: str, text: str) -> _SessionRequest:
        wire_id = self._link.route.new_id()
        params = message.params or {}
        token = splice.cut(text, "params", "_meta", "progressToken")
        # What is not a token stays as it is, for the server to refuse.
        if token is not None and type(params["_meta"]["progressToken"]) in (int, str):
            text = splice.replaced(text, encode(wire_id), "params", "_meta", "progressToken")
            self._tokens[wire_id] = token
        running = RunningCall(id=host_id, method=message.method, name=str(params.get("name", ""))[:MAX_NAME])
        call = self._call(wire_id, running, lambda request_id: splice.replaced(text, encode(request_id), "id").encode())
        # The message itself is not kept: it may be large, and the call may take long.
        sticky = encode_sticky(message.method, message.params).decode() if message.method in STICKY else ""
        request = self._requests[host_id] = _SessionRequest(call=call, running=running, sticky=sticky)
        return request

    def _call(self, wire_id: str, running: RunningCall, body: Callable[[str], bytes] | None) -> Call:
        return Call(
            self._link.route,
            OutgoingRequest(method=running.method, name=running.name, body=body),
            link=self._link,
            request_id=wire_id,
            take=self._link.program.take,
            move=lambda position, _: self._positions.move_call(wire_id, position),
            position=running.position,
        )

    async def _follow(self, request: _SessionRequest) -> None:
        call = request.call
        if not call.is_repeatable:
            self._positions.add_call(call.first_id, request.running)
        with request.scope:
            if request.running.method == SET_LEVEL and bridge_logs(self._link.handshake):
                answer = answer_set_level(request.running.id, request.sticky)
            else:
                answer = (await call.answer()).answering(request.running.id)
            if request.sticky and splice.find(answer, "result") is not None:
                self._positions.stick(request.sticky.encode())
            self._free(request)  # a host may use an id again as soon as it has the answer
            await self.output.deliver(answer)
        self._positions.end_call(call.first_id)

    def _free(self, request: _SessionRequest) -> None:
        self._tokens.pop(request.call.first_id, None)
        if self._requests.get(request.running.id) is request:
            del self._requests[request.running.id]

    async def read_to_end(self, wire_id: str, running: RunningCall) -> None:
        """Go on with a call of an earlier process, and report its end to the host."""
        call = self._call(wire_id, running, None)
        self._earlier.add(scope := anyio.CancelScope())
        try:
            with scope:
                if running.position is None:
                    answer = call.unknown("the bridge ended before the server had answered")
                else:
                    answer = await call.answer()
                sentence = f"the call of {running.name or running.method} that an earlier process made has ended"
                log_event(logging.INFO, "stdio.ended_before", sentence, tool=running.name)
                if wants_info(self._positions.positions.sticky):
                    await self.output.deliver(report_of(running, answer))
                self._positions.end_call(wire_id)
        finally:
            self._earlier.discard(scope)

    # Notifications and replies

    def _cancel(self, text: str) -> None:
        """Cancel a request, under the id that the server knows, if it was sent."""
        host_id = splice.cut(text, "params", "requestId") or ""
        request = self._requests.get(host_id)
        if request is None:
            self.modern.cancel(host_id)
            return
        request.scope.cancel()
        self._free(request)
        self._positions.end_call(request.call.first_id)
        if request.call.is_begun:
            named = splice.replaced(text, encode(request.call.id), "params", "requestId")
            self.queue.start_now(self._sending(named))
        else:
            request.call.departed.set()

    def _sending(self, text: str, *, is_reply: bool = False) -> Job:
        """Return the job that sends a message. Its patience begins now, however long it waits in the queue."""
        attempts = self.sender.attempts()

        async def send(departed: asyncio.Event) -> None:
            await self.sender.send(text.encode(), is_reply=is_reply, departed=departed, attempts=attempts)

        return send

    # Refusals

    async def _refuse(self, host_id: str, code: int, sentence: str) -> None:
        await self.output.write(error(host_id, code, sentence).text)

    async def _refuse_line(self, line: bytes, invalid: InvalidMessage) -> None:
        """Answer whichever side waits for it: the host for a request, the server for an answer."""
        try:
            found = splice.decode(line.decode())
        except ValueError:
            found = None
        found = found if isinstance(found, dict) else {}
        if "method" not in found and ("result" in found or "error" in found):
            ask = splice.cut(line.decode(), "id") or "null"
            if self._close_ask(ask):
                sentence = f"The host's answer cannot be sent on: {invalid.reason.replace('the body', 'it')}"
                self.queue.start_now(self._sending(error(ask, invalid.code, sentence).text, is_reply=True))
        host_id = encode(invalid.id)
        if invalid.id is None and "method" in found and type(found.get("id")) in (int, str):
            host_id = splice.cut(line.decode(), "id") or "null"  # the host may be waiting for it
        await self._refuse(host_id, invalid.code, invalid.reason.replace("the body", "the line"))


def _same_id(text: str) -> str:
    """Return an id in one spelling: `"\\u00e9"` and `"é"` are the same, and the two sides escape differently."""
    found = splice.decode(text)
    return encode(found) if isinstance(found, str) else text


# The bridge's own logging


def bridge_logs(handshake: Handshake | None) -> bool:
    """Whether the bridge does the logging."""
    if handshake is None:
        return False
    capabilities = handshake.result.get("capabilities")
    return not isinstance(capabilities, dict) or "logging" not in capabilities


def with_logging(answer: str, handshake: Handshake) -> str:
    """Return the server's answer to `initialize` as the host gets it."""
    if not bridge_logs(handshake):
        return answer
    given = splice.cut(answer, "result", "capabilities")
    if given is None or not isinstance(splice.decode(given), dict):
        return answer  # the host judges a server that says so little
    rest = given.strip()[1:].lstrip()
    return splice.replaced(answer, '{"logging":{}' + ("" if rest == "}" else ",") + rest, "result", "capabilities")


def is_set_level(request: str) -> bool:
    return bool(json.loads(request)["method"] == SET_LEVEL)


def wants_info(requests: list[str]) -> bool:
    """Whether the host wants messages of level info, by its sticky requests. It does until it sets another level."""
    levels = [_level(request) for request in requests if is_set_level(request)]
    return not levels or levels[-1] in ("debug", "info")


def answer_set_level(request_id: str, request: str) -> str:
    """Return the answer to a host that sets the level of the bridge's own logging."""
    seen = _level(request)
    if seen in LEVELS:
        return f'{{"jsonrpc":"2.0","id":{request_id},"result":{{}}}}'
    return error(request_id, INVALID_PARAMS, f"The level {encode(seen)} is none of {', '.join(LEVELS)}").text


def _level(request: str) -> object:
    return json.loads(request)["params"].get("level")


def report_of(running: RunningCall, answer: Message) -> str:
    """Return the message that reports the end of a call of an earlier process to the host."""
    what = "error" if answer.is_error else "result"
    data = (
        f'"message":"A call of an earlier process has ended","method":{encode(running.method)},"requestId":{running.id}'
    )
    if running.name:
        data += f',"tool":{encode(running.name)}'
    data += f',"{what}":{splice.cut(answer.text, what)}'
    params = f'{{"level":"info","logger":"perdure","data":{{{data}}}}}'
    return f'{{"jsonrpc":"2.0","method":"notifications/message","params":{params}}}'
