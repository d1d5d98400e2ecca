"""What the host says: each line is a request, a notification or an answer on its way to the server, or is refused."""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING, Any

import anyio

from perdure._core import splice
from perdure._core.codes import TOO_MANY_AT_ONCE
from perdure._core.jsonrpc import (
    INVALID_REQUEST,
    PARSE_ERROR,
    Batch,
    InvalidMessage,
    Notification,
    Request,
    Response,
    parse_body,
)
from perdure._core.sticky import METHODS as STICKY
from perdure._core.sticky import after as sticky_after
from perdure._core.sticky import encode as encode_sticky
from perdure.stdio import log_capability as own_logging
from perdure.stdio.call import Asked, Call
from perdure.stdio.messages import INTERNAL_ERROR, encode, error, same_id
from perdure.stdio.pipes import MAX_LINE_BYTES, HostGone, Line, TooLong
from perdure.stdio.refusals import before_the_handshake, looked_at, refused
from perdure.stdio.send_queue import SendQueue
from perdure.stdio.telling import Telling
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.stdio.bridge import Bridge

#: Requests of the host's that run at once. Each holds a connection, and servers take 100 (`max_calls`) or so.
MAX_RUNNING = 256
#: Questions of the server's that the host has not answered. The answer to one that was forgotten is not handed on.
MAX_ASKS = 1_000
#: Characters of a tool's name that are noted and reported. Names have 128 at most (2025-11-25).
MAX_NAME = 200
#: In front of the progress token of an earlier incarnation's call. Our own tokens have no colon.
_OF_EARLIER = re.compile(r"^\d+:")


class HostSide:
    """The host's requests that run, and what it was asked."""

    def __init__(self, bridge: Bridge, queue: SendQueue) -> None:
        self._bridge = bridge
        self._queue = queue
        self._calls: dict[str, Call] = {}
        """By the id that the host gave, as JSON."""
        self._tokens: dict[str, str] = {}
        """Progress tokens on the wire, and those of the host's behind them, as JSON."""
        self._asks: dict[str, None] = {}
        """The ids of what the server has asked and the host has not answered, as JSON."""

    # For the other side

    def token(self, found: object) -> str | None:
        """The host's own token, as JSON, for one on the wire.

        A host that shakes hands twice begins another incarnation. What its earlier calls say from then on carries the
        number of theirs in front of the token.
        """
        return self._tokens.get(_OF_EARLIER.sub("", found)) if isinstance(found, str) else None

    def asked(self, ask: str) -> None:
        self._asks[same_id(ask)] = None
        if len(self._asks) > MAX_ASKS:
            del self._asks[next(iter(self._asks))]

    def unasked(self, ask: str) -> bool:
        """A question is withdrawn; whether this host was asked it and has not answered."""
        return self._asks.pop(same_id(ask), False) is None

    def forget_asks(self) -> list[str]:
        asks, self._asks = list(self._asks), {}
        return asks

    def end(self) -> None:
        """The host listens no more: follow nothing that has left."""
        for call in list(self._calls.values()):
            if call.departed.is_set():
                call.scope.cancel()

    async def take(self, line: Line) -> None:
        """One line."""
        if isinstance(line, TooLong):
            sentence = f"The line is longer than {MAX_LINE_BYTES} bytes, and was not read"
            await self._bridge.give(error("null", PARSE_ERROR, sentence))
            return
        try:
            message = parse_body(line)
        except InvalidMessage as invalid:
            await self._refuse(line, invalid)
            return
        text = splice.one_line(line.decode())
        match message:
            case Batch():
                await self._refuse_batch(message)
            case Request():
                await self._request(message, text)
            case Notification():
                await self._notification(message, text)
            case Response():
                await self._reply(text)

    async def _refuse(self, line: bytes, invalid: InvalidMessage) -> None:
        """Whoever waits for it is told: the host for a request, the server for an answer."""
        found = looked_at(line)
        if "method" not in found and ("result" in found or "error" in found):
            ask = splice.cut(line.decode(), "id") or "null"
            if self.unasked(ask):
                sentence = f"The host's answer cannot be handed on: {invalid.reason.replace('the body', 'it')}"
                self._tell_at_once(error(ask, invalid.code, sentence))
        await self._bridge.give(refused(line, invalid))

    async def _refuse_batch(self, batch: Batch) -> None:
        """Every request in it is answered: nobody waits for what was not sent."""
        ids = [encode(one.id) for one in batch.messages if isinstance(one, Request)] or ["null"]
        for request_id in ids:
            sentence = "Batches are not bridged: send each message on a line of its own"
            await self._bridge.give(error(request_id, INVALID_REQUEST, sentence))

    async def _request(self, message: Request, text: str) -> None:
        host_id = splice.cut(text, "id") or "null"
        if message.method == "initialize":
            self._bridge.handshaking.is_begun = True
            await self._queue.add(
                anyio.Event(), lambda left: self._initialize(host_id, text, message.params or {}, left)
            )
        elif self._bridge.handshake is None and not self._bridge.handshaking.is_begun:
            await self._bridge.give(before_the_handshake(message, host_id))
        elif host_id in self._calls:
            await self._bridge.give(
                error(host_id, INVALID_REQUEST, f"Request id {host_id} is still in use by a running request")
            )
        elif len(self._calls) >= MAX_RUNNING:
            await self._bridge.give(
                error(host_id, TOO_MANY_AT_ONCE, f"{MAX_RUNNING} requests run already, as many as may")
            )
        else:
            await self._call(message, host_id, text)

    async def _call(self, message: Request, host_id: str, text: str) -> None:
        wire_id = self._bridge.new_id()
        params = message.params or {}
        token = splice.cut(text, "params", "_meta", "progressToken")
        if token is not None and _is_token(params):
            text = splice.replaced(text, encode(wire_id), "params", "_meta", "progressToken")
            self._tokens[wire_id] = token
        asked = Asked(id=host_id, method=message.method, name=str(params.get("name", ""))[:MAX_NAME])
        call = Call(self._bridge, asked, text, wire_id=wire_id, since=time.monotonic())
        self._calls[host_id] = call
        # The message itself is not kept: it may be large, and the call may take long.
        sticky = encode_sticky(message) if message.method in STICKY else None
        await self._queue.add(call.departed, lambda _: self._follow(call, sticky), weight=len(text))

    async def _follow(self, call: Call, sticky: bytes | None) -> None:
        if not call.asked.may_be_repeated:
            self._bridge.notes.noted.calls[call.wire_id] = call.asked
            self._bridge.changed()
        with call.scope:
            answer = self._own_answer(call, sticky) or await call.answer()
            if sticky is not None and splice.find(answer, "result") is not None:
                self._stick(sticky)
            self._free(call)  # a host may use an id again as soon as it has the answer
            await self._bridge.give(answer)
        call.departed.set()
        self._forget(call)

    def _own_answer(self, call: Call, sticky: bytes | None) -> str | None:
        is_ours = call.asked.method == own_logging.SET_LEVEL and own_logging.is_own(self._bridge.handshake)
        return own_logging.answered(call.asked.id, sticky.decode()) if is_ours and sticky is not None else None

    def _free(self, call: Call) -> None:
        self._tokens.pop(call.token, None)
        if self._calls.get(call.asked.id) is call:
            del self._calls[call.asked.id]

    def _forget(self, call: Call) -> None:
        self._free(call)
        if self._bridge.notes.noted.calls.pop(call.wire_id, None) is not None:
            self._bridge.changed()

    def _stick(self, request: bytes) -> None:
        kept = tuple(earlier.encode() for earlier in self._bridge.notes.noted.sticky)
        self._bridge.notes.noted.sticky = [one.decode() for one in sticky_after(kept, request)]
        self._bridge.changed()

    async def _initialize(self, host_id: str, text: str, params: dict[str, Any], left: anyio.Event) -> None:
        """Nothing else leaves before the handshake is answered: there is no session to send it in."""
        try:
            answer = await self._answer_to_handshake(host_id, text, params)
            self._bridge.handshaking.is_begun = self._bridge.handshake is not None
            await self._bridge.give(answer)
        finally:
            left.set()

    async def _answer_to_handshake(self, host_id: str, text: str, params: dict[str, Any]) -> str:
        try:
            return await self._bridge.handshaking.initialize(host_id, text, params)
        except HostGone:
            raise
        except Exception as failure:  # the host waits, whatever it is
            said = f"{type(failure).__name__}: {failure}"
            log_event(logging.ERROR, "stdio.failed", f"something unforeseen: {said}")
            return error(host_id, INTERNAL_ERROR, said)

    async def _notification(self, message: Notification, text: str) -> None:
        if message.method == "notifications/cancelled":
            found = self._cancelled(text)
            if found is None:
                return
            self._tell_at_once(found)
            return
        telling = Telling(self._bridge, text)
        if message.method == "notifications/initialized":
            await self._queue.add(anyio.Event(), lambda left: self._initialized(telling, left))
        elif self._bridge.handshake is not None or self._bridge.handshaking.is_begun:
            await self._queue.add(telling.departed, lambda _: telling.run(), weight=len(text))

    def _cancelled(self, text: str) -> str | None:
        """The answer is no longer wanted: say so under the name that the server knows, if it knows the request."""
        call = self._calls.get(splice.cut(text, "params", "requestId") or "")
        if call is None:
            return None
        call.scope.cancel()
        self._forget(call)
        if not call.is_begun:
            call.departed.set()
            return None
        return splice.replaced(text, encode(call.wire_id), "params", "requestId")

    async def _initialized(self, telling: Telling, left: anyio.Event) -> None:
        """The second half of the handshake. In a resumed session the server swallows it."""
        bridge = self._bridge
        try:
            await telling.run()
            if bridge.handshake is None or bridge.handshake.initialized:
                return
            bridge.handshake.initialized = True
            is_resumed = bridge.handshaking.is_resumed
            await bridge.listen(is_new=not is_resumed)
        finally:
            left.set()
        if is_resumed:
            bridge.before.revive()

    async def _reply(self, text: str) -> None:
        if not self.unasked(splice.cut(text, "id") or "null"):
            log_event(logging.DEBUG, "stdio.answer_unasked", "an answer of the host's is to nothing that was asked")
            return
        # It waits for nobody: the request in front of it may be waiting for the very call that asked.
        self._tell_at_once(text)

    def _tell_at_once(self, text: str) -> None:
        telling = Telling(self._bridge, text)
        self._queue.start_now(telling.departed, lambda _: telling.run())


def _is_token(params: dict[str, Any]) -> bool:
    """What is no token stays as it is, for the server to refuse."""
    return type(params["_meta"]["progressToken"]) in (int, str)
