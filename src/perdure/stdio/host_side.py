"""Handles the host's lines: each is a request, a notification or an answer for the server, or is refused."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio

from perdure._core import splice
from perdure._core.codes import INVALID_REQUEST, PARSE_ERROR, TOO_MANY_AT_ONCE, UNSUPPORTED_VERSION
from perdure._core.delivery import Purpose
from perdure._core.jsonrpc import Batch, InvalidMessage, Notification, Request, Response, parse_body
from perdure._core.revisions import REVISIONS
from perdure._core.sticky import METHODS as STICKY
from perdure._core.sticky import encode as encode_sticky
from perdure.remote.call import Call, Sender
from perdure.remote.link import Link
from perdure.remote.message import Message, encode, error
from perdure.stdio import log_capability
from perdure.stdio.dialogue import Dialogue
from perdure.stdio.handshake import HostHandshake
from perdure.stdio.notes import NotedCall, Notes
from perdure.stdio.pipes import MAX_LINE_BYTES, Line, TooLong
from perdure.stdio.send_queue import Job, SendQueue
from perdure.telemetry.events import log_event

#: Requests of the host that run at once. Each holds a connection, and servers take 100 (`max_calls`) or so.
MAX_RUNNING = 256
#: Characters of a tool's name that are noted and reported. Names have 128 at most (2025-11-25).
MAX_NAME = 200


@dataclass(frozen=True, kw_only=True)
class _HostRequest:
    """A request of the host that runs."""

    id: str
    """As the host wrote it, as JSON."""
    call: Call
    noted: NotedCall
    sticky: str
    """The request as it is repeated in a new session; "" where its method is not sticky."""


class HostSide:
    """`take` is given what the streams of calls bring, `write` what the host gets."""

    def __init__(
        self,
        link: Link,
        sender: Sender,
        queue: SendQueue,
        handshake: HostHandshake,
        dialogue: Dialogue,
        notes: Notes,
        *,
        take: Callable[[Message], Awaitable[None]],
        write: Callable[[str], Awaitable[None]],
    ) -> None:
        self._link = link
        self._sender = sender
        self._queue = queue
        self._handshake = handshake
        self._dialogue = dialogue
        self._notes = notes
        self._take = take
        self._write = write
        self._requests: dict[str, _HostRequest] = {}
        """Those that run, by the id that the host gave, as JSON."""
        self._has_begun = False
        """The host has sent `initialize`, and it has not failed."""

    async def take(self, line: Line) -> None:
        """One line."""
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
            case Notification():
                await self._notification(message, text)
            case Response():
                if self._dialogue.close_ask(splice.cut(text, "id") or "null"):
                    # It does not wait: the request in front of it may be waiting for the very call that asked.
                    self._send_now(text, Purpose.REPLY)
                else:
                    log_event(logging.DEBUG, "stdio.answer_unasked", "the host answers what is not asked, or no longer")

    def stop(self) -> None:
        """The host does not listen any more: follow nothing that has left."""
        for request in list(self._requests.values()):
            if request.call.departed.is_set():
                request.call.scope.cancel()

    # Requests

    async def _request(self, message: Request, text: str) -> None:
        host_id = splice.cut(text, "id") or "null"
        if message.method == "initialize":
            self._has_begun = True
            params = message.params or {}
            await self._queue.add(anyio.Event(), lambda departed: self._initialize(host_id, text, params, departed))
        elif not self._has_begun:
            await self._write(_before_the_handshake(message, host_id))
        elif host_id in self._requests:
            sentence = f"Request id {host_id} is still in use by a running request"
            await self._refuse(host_id, INVALID_REQUEST, sentence)
        elif len(self._requests) >= MAX_RUNNING:
            await self._refuse(host_id, TOO_MANY_AT_ONCE, f"{MAX_RUNNING} requests run already, as many as may")
        else:
            request = self._started(message, host_id, text)
            await self._queue.add(request.call.departed, lambda _: self._follow(request), weight=len(text))

    async def _initialize(self, host_id: str, text: str, params: dict[str, Any], departed: anyio.Event) -> None:
        """Nothing else leaves before the handshake is answered: there is no session to send it in."""
        try:
            answer = await self._handshake.initialize(host_id, text, params)
            self._has_begun = self._link.handshake is not None
            await self._write(answer)
        finally:
            departed.set()

    def _started(self, message: Request, host_id: str, text: str) -> _HostRequest:
        wire_id = self._link.new_id()
        params = message.params or {}
        token = splice.cut(text, "params", "_meta", "progressToken")
        # What is not a token stays as it is, for the server to refuse.
        if token is not None and type(params["_meta"]["progressToken"]) in (int, str):
            text = splice.replaced(text, encode(wire_id), "params", "_meta", "progressToken")
            self._dialogue.add_token(wire_id, token)
        noted = NotedCall(id=host_id, method=message.method, name=str(params.get("name", ""))[:MAX_NAME])

        def move(position: str | None, retry: int | None) -> None:
            if not call.is_repeatable:
                self._notes.move_call(noted, position)

        call = Call(
            self._link,
            lambda request_id: splice.replaced(text, encode(request_id), "id").encode(),
            request_id=wire_id,
            method=noted.method,
            name=noted.name,
            take=self._take,
            move=move,
        )
        # The message itself is not kept: it may be large, and the call may take long.
        sticky = encode_sticky(message).decode() if message.method in STICKY else ""
        request = self._requests[host_id] = _HostRequest(id=host_id, call=call, noted=noted, sticky=sticky)
        return request

    async def _follow(self, request: _HostRequest) -> None:
        call = request.call
        if not call.is_repeatable:
            self._notes.add_call(call.first_id, request.noted)
        with call.scope:
            if request.noted.method == log_capability.SET_LEVEL and log_capability.is_own(self._link.handshake):
                answer = log_capability.answer_set_level(request.id, request.sticky)
            else:
                answer = (await call.answer()).answering(request.id)
            if request.sticky and splice.find(answer, "result") is not None:
                self._notes.stick(request.sticky.encode())
            self._free(request)  # a host may use an id again as soon as it has the answer
            await self._write(answer)
        call.departed.set()
        self._end(request)

    def _free(self, request: _HostRequest) -> None:
        self._dialogue.remove_token(request.call.first_id)
        if self._requests.get(request.id) is request:
            del self._requests[request.id]

    def _end(self, request: _HostRequest) -> None:
        self._free(request)
        self._notes.end_call(request.call.first_id)

    # Notifications and replies

    async def _notification(self, message: Notification, text: str) -> None:
        if message.method == "notifications/cancelled":
            self._cancel(text)
        elif message.method == "notifications/initialized":
            await self._queue.add(anyio.Event(), lambda departed: self._handshake.finish(text, departed))
        elif self._has_begun:
            await self._queue.add(anyio.Event(), self._sending(text, Purpose.NOTIFICATION), weight=len(text))

    def _cancel(self, text: str) -> None:
        """The answer is no longer wanted: say so under the id that the server knows, if it knows the request."""
        request = self._requests.get(splice.cut(text, "params", "requestId") or "")
        if request is None:
            return
        request.call.scope.cancel()
        self._end(request)
        if request.call.is_begun:
            named = splice.replaced(text, encode(request.call.id), "params", "requestId")
            self._send_now(named, Purpose.NOTIFICATION)
        else:
            request.call.departed.set()

    def _send_now(self, text: str, purpose: Purpose) -> None:
        self._queue.start_now(anyio.Event(), self._sending(text, purpose))

    def _sending(self, text: str, purpose: Purpose) -> Job:
        """The job that sends a message. Its patience runs from now, however long it waits in the queue."""
        attempts = self._sender.attempts()

        async def send(departed: anyio.Event) -> None:
            await self._sender.send(text.encode(), purpose, departed=departed, attempts=attempts)

        return send

    # Refusals

    async def _refuse(self, host_id: str, code: int, sentence: str) -> None:
        await self._write(error(host_id, code, sentence).text)

    async def _refuse_line(self, line: bytes, invalid: InvalidMessage) -> None:
        """Answer whichever side waits for it: the host for a request, the server for an answer."""
        try:
            found = splice.decode(line.decode())
        except ValueError:
            found = None
        found = found if isinstance(found, dict) else {}
        if "method" not in found and ("result" in found or "error" in found):
            ask = splice.cut(line.decode(), "id") or "null"
            if self._dialogue.close_ask(ask):
                sentence = f"The host's answer cannot be sent on: {invalid.reason.replace('the body', 'it')}"
                self._send_now(error(ask, invalid.code, sentence).text, Purpose.REPLY)
        host_id = encode(invalid.id)
        if invalid.id is None and "method" in found and type(found.get("id")) in (int, str):
            host_id = splice.cut(line.decode(), "id") or "null"  # the host may be waiting for it
        await self._refuse(host_id, invalid.code, invalid.reason.replace("the body", "the line"))


def _before_the_handshake(message: Request, host_id: str) -> str:
    """The answer to a request before `initialize`. Hosts of 2026-07-28 begin without one: they are given the revisions
    that have sessions, and fall back."""
    if message.method == "ping":
        return f'{{"jsonrpc":"2.0","id":{host_id},"result":{{}}}}'
    meta = (message.params or {}).get("_meta")
    asked = meta.get("io.modelcontextprotocol/protocolVersion") if isinstance(meta, dict) else None
    if message.method == "server/discover" or asked is not None:
        data = {"supported": sorted(REVISIONS, reverse=True), "requested": asked}
        sentence = "The bridge speaks the revisions that have sessions"
        return error(host_id, UNSUPPORTED_VERSION, sentence, data).text
    return error(host_id, INVALID_REQUEST, "Begin with an initialize request").text
