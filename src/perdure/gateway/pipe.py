"""A lane to a session-era server over the pipes of a child process.

A pipe names no request but in answers and in progress, so every other message of the server belongs to none here; the
lane's user knows better (`key` is `None`). Results and errors stay the server's own text. All other messages are
decoded once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from perdure._core import splice
from perdure._core.codes import LIMIT_REACHED
from perdure._core.envelope import LISTEN, SUBSCRIPTION
from perdure._core.handshakes import OTHER_ERA
from perdure._core.jsonrpc import JsonObject, RequestId
from perdure._core.lines import EDGE_BYTES, MAX_LINE_BYTES, Line, TooLong
from perdure._core.revisions import REVISIONS
from perdure._core.text import format_size
from perdure.gateway.child import Child, ChildProgram
from perdure.gateway.children import MAX_QUOTED, Children
from perdure.gateway.lane import AskKey, Lost, Opened, Reason, Receiver, RequestKey, UpstreamUnavailable, swap_token
from perdure.runtime.base import Flow

#: Asks that wait at once. A session has fewer; this is against a server that asks in a loop.
MAX_ASKS = 1000

#: Seconds for running requests when the code has changed: most calls are shorter, and a developer waits.
RETIRE_SECONDS = 2.0

INITIALIZE = "initialize"
_PROGRESS, _CANCELLED = "notifications/progress", "notifications/cancelled"

#: Digits of an id of ours, and more than that.
_MOST_DIGITS = 19

# The two forms of nearly all answers: of the Python SDK, and of the TypeScript SDK.
_ID_FIRST = re.compile(rb'\{"jsonrpc": ?"2\.0", ?"id": ?([0-9]{1,18}), ?"(result|error)": ?')
_OUTCOME_FIRST = re.compile(rb'\{"(result|error)": ?')
_ID_LAST = re.compile(rb', ?"jsonrpc": ?"2\.0", ?"id": ?([0-9]{1,18})\}$')
_ID_LAST_BYTES = 64

_BOM = b"\xef\xbb\xbf"


class _PipeRequest(NamedTuple):
    """A request that has no answer yet."""

    key: RequestKey
    token: object
    """The progress token of its sender; `None` without one."""
    end: int
    """Bytes of the input up to its end."""
    method: str


class _ChildEnded(Exception):
    """The child ended before it answered a request of the lane's own."""


class _NoMessage(Exception):
    """A line is JSON, and no message of JSON-RPC."""


class _Gate:
    """Lets the reader of the pipe wait until the handshake's caller has its result: a `Flow`."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def wait_for_room(self) -> None:
        await self.opened.wait()


class PipeLane:
    """One child process and its handshake: a `Lane`.

    What the server sends before its answer to `initialize` is reported while `open` waits, all else after `open`.
    """

    def __init__(
        self,
        children: Children,
        receiver: Receiver,
        *,
        greeting: str = INITIALIZE,
        program: ChildProgram | None = None,
        probe_seconds: float | None = None,
    ) -> None:
        """`greeting`: the request of the handshake. The answer to another one is returned as it came. `program`: with
        the variables of one caller. `probe_seconds`: it is not known whether the program takes the greeting; it has so
        long to answer, and its end is not counted as a failed start."""
        self._program = program
        self._mask = (program or children.program).upstream.mask
        self._probe_seconds = probe_seconds
        self._greeting = greeting
        self._children = children
        self._receiver = receiver
        self._ping_seconds = children.program.settings.ping_timeout
        self._name = children.program.name
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None
        self._ids = itertools.count(1)
        self._running: dict[int, _PipeRequest] = {}
        """By the id on the wire."""
        self._ids_by_key: dict[RequestKey, int] = {}
        self._refused: dict[RequestKey, Lost] = {}
        """Requests that were not written, until that is reported."""
        self._own: dict[int, asyncio.Future[tuple[Any, bool]]] = {}
        """Requests of the lane itself: the decoded result, or the error and true."""
        self._ask_numbers = itertools.count(1)
        self._asks: dict[AskKey, RequestId] = {}
        """The server's ids of its asks that have no answer yet."""
        self._gate: _Gate | None = None
        """Set while `open` runs."""
        self._probing: asyncio.Task[None] | None = None
        self._why: str | None = None
        """Why the lane itself has ended the child."""
        self._is_over = False
        self._is_retired = False
        """Requests wait for the next lane."""

    # For its user

    @property
    def state(self) -> JsonObject:
        return {}  # the session ends with the child

    def listen(self, wanted: bool) -> None:
        """A pipe has one reader."""

    async def open(self, client_params: JsonObject, state: JsonObject | None = None) -> Opened:
        self._child = child = self._children.start(self._program, is_probe=self._probe_seconds is not None)
        self._gate = gate = _Gate()
        child.read(self._take, self._on_end)
        try:
            opened = await self._greet(child, client_params)
        except BaseException:
            self._leave(child)
            raise
        self._children.on_greeted(child)
        child.retire = self._retire
        self._gate = None
        self._loop.call_soon(gate.opened.set)  # the caller of `open` goes on first
        return opened

    def request(self, key: RequestKey, method: str, params: JsonObject | None) -> None:
        if self._is_retired:
            self._refuse(key, Reason.DIED, "the server is started again")
            return
        request_id = next(self._ids)
        params, token = swap_token(params, request_id)
        if end := self._write({"id": request_id, "method": method}, params):
            self._running[request_id] = _PipeRequest(key, token, end, method)
            self._ids_by_key[key] = request_id
        elif self._child is not None and self._child.input.is_open:
            self._refuse(key, Reason.LIMIT, "the server does not read its input")
        else:
            self._refuse(key, Reason.DIED, "the server's process has ended")

    def follow(self, key: RequestKey, method: str, params: JsonObject | None, state: JsonObject) -> None:
        """Report the request lost: a pipe ends with its gateway."""
        self._refused[key] = Lost(ran=True, why="the server's process ended with the gateway")
        self._loop.call_soon(self._report_refused)

    def cancel(self, key: RequestKey, params: JsonObject | None) -> None:
        self._refused.pop(key, None)
        if (request_id := self._ids_by_key.pop(key, None)) is None:
            return
        del self._running[request_id]
        self._write({"method": _CANCELLED}, {**(params or {}), "requestId": request_id})
        self._end_if_retired()
        if not self._is_busy and self._probing is None and not self._is_over:
            self._probing = self._loop.create_task(self._end_if_hung())

    def notify(self, method: str, params: JsonObject | None) -> None:
        self._write({"method": method}, params)

    def reply(self, ask: AskKey, response: JsonObject) -> None:
        if (upstream_id := self._asks.pop(ask, None)) is not None:
            outcome = "error" if "error" in response else "result"
            self._write({"id": upstream_id, outcome: response.get(outcome)}, None)

    async def probe(self) -> bool:
        """Whether the child answers a `ping` in time."""
        with contextlib.suppress(TimeoutError, _ChildEnded):
            async with asyncio.timeout(self._ping_seconds):
                await self._ask_child("ping", None)
                return True
        return False

    async def aclose(self, *, ended: bool) -> None:
        """End the child. A session over a pipe cannot be used again in either case."""
        if self._probing is not None:
            self._probing.cancel()
        if self._child is not None:
            ending = self._leave(self._child)
            if self._children.lanes_wait:
                await asyncio.wait([ending], timeout=self._children.longest_end)

    # The child: its handshake, its end

    async def _greet(self, child: Child, client_params: JsonObject) -> Opened:
        server, noise = f"The server {self._name}", self._children.noise
        seconds = self._children.program.settings.start_timeout
        if self._probe_seconds is not None:
            seconds = min(seconds, self._probe_seconds)
        try:
            async with asyncio.timeout(seconds):
                found, failed = await self._ask_child(self._greeting, client_params)
        except TimeoutError:
            sentence = f"{server} did not answer {self._greeting} in {seconds:g} s."
            if self._children.noise > noise:
                sentence += " It writes lines to its output that are no messages of MCP."
            raise UpstreamUnavailable(Reason.NO_HANDSHAKE, sentence) from None
        except _ChildEnded:
            sentence = f"{server} did not make its handshake: {self._children.explain_end(child)}"
            raise UpstreamUnavailable(Reason.DIED, sentence) from None
        if failed:
            is_other_era = found["code"] in OTHER_ERA
            reason = Reason.VERSION if is_other_era else Reason.NO_HANDSHAKE
            sentence = f"{server} refused {self._greeting}: {self._mask(found['message']):.{MAX_QUOTED}}"
            raise UpstreamUnavailable(reason, sentence, code=found["code"] if self._greeting == INITIALIZE else None)
        if self._greeting != INITIALIZE and isinstance(found, dict):
            return Opened(version="", result=found)
        version = found.get("protocolVersion") if isinstance(found, dict) else None
        if not isinstance(version, str):
            sentence = f"{server} does not speak MCP: its answer to initialize has no protocol version."
            raise UpstreamUnavailable(Reason.NOT_MCP, sentence)
        if version not in REVISIONS:
            sentence = f"{server} speaks revision {version:.40}, and the gateway {', '.join(REVISIONS)}."
            raise UpstreamUnavailable(Reason.VERSION, sentence)
        return Opened(version=version, result=found)

    async def _ask_child(self, method: str, params: JsonObject | None) -> tuple[Any, bool]:
        """Send a request of the lane's own. Raises `_ChildEnded`."""
        request_id = next(self._ids)
        answered: asyncio.Future[tuple[Any, bool]] = self._loop.create_future()
        self._own[request_id] = answered
        try:
            if self._is_over:
                raise _ChildEnded
            self._write({"id": request_id, "method": method}, params)  # if it is not taken, the child's end is near
            return await answered
        finally:
            del self._own[request_id]

    @property
    def _is_busy(self) -> bool:
        """Whether a request runs. A subscription has no answer as long as it lasts."""
        return any(running.method != LISTEN for running in self._running.values())

    async def _end_if_hung(self) -> None:
        """End a child whose requests were all cancelled, and that does not answer."""
        is_alive = await self.probe()
        self._probing = None
        if not is_alive and not self._is_busy and not self._is_over and self._child is not None:
            self._child.end(fault=f"it did not answer a ping in {self._ping_seconds:g} s, and was ended")

    def _retire(self) -> None:
        self._is_retired = True
        self._why = "it was ended, because its code has changed"
        if self._child is not None and self._is_busy:
            self._loop.call_later(RETIRE_SECONDS, self._child.end)
        self._end_if_retired()

    def _end_if_retired(self) -> None:
        if self._is_retired and not self._is_busy and self._child is not None:
            self._child.end()

    def _leave(self, child: Child) -> asyncio.Task[None]:
        """End the child without a report."""
        self._is_over = True
        self._end_own()
        self._running.clear()
        self._ids_by_key.clear()
        self._refused.clear()
        child.ignore()
        return child.end()

    def _end_own(self) -> None:
        for answered in self._own.values():
            if not answered.done():
                answered.set_exception(_ChildEnded())

    def _on_end(self) -> None:
        self._is_over = True
        self._end_own()
        if self._gate is not None or self._child is None:
            return  # `open` reports it
        self._child.input.close()
        why, read = self._why or self._child.how, self._child.input.read
        running, self._running = self._running, {}
        self._ids_by_key.clear()
        for request in running.values():
            if request.end <= read:
                self._receiver.on_lost(request.key, Lost(ran=True, why=why))
            else:
                self._receiver.on_lost(request.key, self._not_run(Reason.DIED, why))
        self._receiver.on_closed(why)

    # Messages to the child

    def _write(self, message: JsonObject, params: JsonObject | None) -> int:
        """Send a message. Returns the bytes of the input up to its end, 0 if the child does not take it."""
        if params is not None:
            message["params"] = params
        if self._child is None:
            return 0
        try:
            text = to_json({"jsonrpc": "2.0", **message}, inf_nan_mode="null")
        except ValueError:  # half an emoji, in a cursor of the server's own list
            text = json.dumps({"jsonrpc": "2.0", **message}).encode()
        end = self._child.input.write(text)
        if not end and self._child.input.is_open:
            sentence = f"{self._name} does not read its input; a message to it was dropped"
            self._children.log.log_event(logging.WARNING, "upstream.unread", sentence, upstream=self._name)
        return end

    def _refuse(self, key: RequestKey, reason: Reason, why: str) -> None:
        self._refused[key] = self._not_run(reason, why)
        self._loop.call_soon(self._report_refused)

    def _report_refused(self) -> None:
        while self._refused:
            key = next(iter(self._refused))
            self._receiver.on_lost(key, self._refused.pop(key))

    def _not_run(self, reason: Reason, why: str) -> Lost:
        unavailable = UpstreamUnavailable(reason, f"The request was not sent to the server {self._name}: {why}.")
        return Lost(ran=False, why=why, unavailable=unavailable)

    # Messages of the child

    def _take(self, line: Line) -> Flow | None:
        if isinstance(line, TooLong):
            return self._lose(line.head, line.tail, f"its answer is larger than {format_size(MAX_LINE_BYTES)}")
        answer = message = None
        try:
            if (answer := _split_answer(line)) is None:
                message = from_json(line, allow_inf_nan=False)
        except ValueError:
            line = line.removeprefix(_BOM)
            try:
                message = _decode_odd(line)
            except ValueError:
                return self._lose(line[:EDGE_BYTES], line[-EDGE_BYTES:], "its answer is not JSON")
        if answer is not None:
            return self._on_answer(*answer)
        if isinstance(message, list):
            flows = [self._take(item.encode()) for item in splice.items(line.decode())]
            return next(filter(None, reversed(flows)), None)
        try:
            return self._on_message(message, line)
        except _NoMessage:
            self._children.on_noise(line, self._mask)
            return None

    def _on_message(self, message: object, line: bytes) -> Flow | None:
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            raise _NoMessage
        method, params = message.get("method"), message.get("params")
        if method is None:
            outcome = "result" if message.get("error") is None else "error"
            body = (splice.cut(line.decode(), outcome) or "null").encode()
            return self._on_answer(_number(message.get("id")), message.get(outcome), body, outcome == "error")
        if not isinstance(method, str) or not isinstance(params, dict | None):
            raise _NoMessage
        if "id" in message:
            return self._on_request(message["id"], method, params)
        if params is not None and method == _PROGRESS:
            running = self._running.get(_number(params.get("progressToken")))
            if running is None or running.token is None:
                return None
            params["progressToken"] = running.token
            return self._receiver.on_notification(method, params, key=running.key)
        if params is not None and method == _CANCELLED:
            upstream_id, reason = params.get("requestId"), params.get("reason")
            ask = next((ask for ask, its_id in self._asks.items() if its_id == upstream_id), None)
            if ask is not None:
                del self._asks[ask]
                self._receiver.on_ask_withdrawn(ask, reason if isinstance(reason, str) else "")
            return None
        return self._receiver.on_notification(method, params, key=self._subscriber(params))

    def _subscriber(self, params: JsonObject | None) -> RequestKey | None:
        """The `subscriptions/listen` of 2026-07-28 that a notification names, if any."""
        meta = None if params is None else params.get("_meta")
        found = self._running.get(_number(meta.get(SUBSCRIPTION))) if isinstance(meta, dict) else None
        return None if found is None else found.key

    def _on_answer(self, request_id: int, value: object, body: bytes, failed: bool) -> Flow | None:
        if (answered := self._own.get(request_id)) is not None:
            if not answered.done():
                answered.set_result((value, failed) if _is_outcome(value, failed) else (None, False))
            return self._gate
        if (running := self._running.pop(request_id, None)) is None:
            return None  # of a cancelled request, or of none
        del self._ids_by_key[running.key]
        if _is_outcome(value, failed):
            self._receiver.on_answer(running.key, body, failed=failed)
        else:
            self._receiver.on_lost(running.key, Lost(ran=True, why="its answer has neither a result nor an error"))
        if running.method == "tools/call":
            self._children.on_served()
        self._end_if_retired()
        return None

    def _on_request(self, upstream_id: object, method: str, params: JsonObject | None) -> Flow | None:
        if not isinstance(upstream_id, int | str) or isinstance(upstream_id, bool):
            raise _NoMessage
        if method == self._greeting and self._gate is not None:  # the program prints what it reads
            return self._on_answer(_number(upstream_id), None, b"null", False)
        if method == "ping":
            self._write({"id": upstream_id, "result": {}}, None)
            return None
        if len(self._asks) >= MAX_ASKS:
            error = {"code": LIMIT_REACHED, "message": f"{MAX_ASKS} requests of this server wait for an answer"}
            self._write({"id": upstream_id, "error": error}, None)
            return None
        ask = next(self._ask_numbers)
        self._asks[ask] = upstream_id
        return self._receiver.on_ask(ask, method, params, key=None)

    def _lose(self, head: bytes, tail: bytes, why: str) -> Flow | None:
        """Take a line that cannot be read: noise, or an answer if its id can be told."""
        request_id = splice.id_at_the_edges(head, tail)
        if request_id in self._own:
            return self._on_answer(request_id, None, b"null", False)
        if request_id is None or (running := self._running.pop(request_id, None)) is None:
            self._children.on_noise(head, self._mask)
        else:
            del self._ids_by_key[running.key]
            self._receiver.on_lost(running.key, Lost(ran=True, why=why))
            self._end_if_retired()
        return None


def _split_answer(line: bytes) -> tuple[int, object, bytes, bool] | None:
    """The id, the outcome, its text and whether it is an error, of an answer in one of the two usual forms. Raises
    `ValueError` if the outcome is not JSON."""
    if (found := _ID_FIRST.match(line)) is not None and line.endswith(b"}"):
        request_id, outcome, body = found[1], found[2], line[found.end() : -1]
    elif (begin := _OUTCOME_FIRST.match(line)) and (end := _ID_LAST.search(line, max(len(line) - _ID_LAST_BYTES, 0))):
        request_id, outcome, body = end[1], begin[1], line[begin.end() : end.start()]
    else:
        return None
    # With the body the whole line is JSON: all around it is matched.
    return int(request_id), from_json(body, allow_inf_nan=False), body, outcome == b"error"


def _decode_odd(line: bytes) -> Any:
    """Decode JSON that `from_json` refuses: with half an emoji, or a number of thousands of digits. Half an emoji
    becomes a question mark, because it cannot be stored, except in answers, whose text is passed on."""
    text = line.decode()
    found = splice.decode(text)
    if isinstance(found, dict) and "method" in found:
        return splice.without_halves(found)
    return found


def _is_outcome(value: object, failed: bool) -> bool:
    """Whether clients can read it as a result, or as an error."""
    if not failed:
        return isinstance(value, dict)
    return isinstance(value, dict) and type(value.get("code")) is int and isinstance(value.get("message"), str)


def _number(given: object) -> int:
    """The id or token that a server gave back: some make a string or a double of a number. -1 is none of ours."""
    if type(given) is int:
        return given
    if isinstance(given, float) and given.is_integer():
        return int(given)
    return int(given) if isinstance(given, str) and given.isdecimal() and len(given) < _MOST_DIGITS else -1
