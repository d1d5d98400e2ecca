"""Between a host that speaks MCP over a pipe and a session on a server: every message, both ways, in order.

**Ids.** Hosts count their requests from 0 or 1 each time they start their server. On the wire a request has a name that
is never used again, made of this instance's random part and a number, and the host gets its answer under the id that it
gave. Progress tokens are treated alike. So nothing of an earlier instance can be taken for something of this one.

**Order.** A pipe keeps the order of messages, and HTTP requests do not. So each message leaves when the server has
taken the one before it (`departed`). While the server is away all of them wait, each no longer than `patience` from the
moment it was read.

**What the host gets** is written by one writer, and whoever has something for the host waits until it is written: only
then the position of its stream moves on, so that the next instance repeats nothing that was written and leaves out
nothing that was not.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import anyio.abc

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
from perdure._core.reconnect import Patience
from perdure._core.revisions import REVISIONS
from perdure._core.sticky import METHODS as STICKY
from perdure._core.sticky import after as sticky_after
from perdure._core.sticky import encode as encode_sticky
from perdure.client.state import Handshake
from perdure.client.wire import Wire
from perdure.observe import note
from perdure.stdio import troubles
from perdure.stdio.before import Before
from perdure.stdio.call import Asked, Call
from perdure.stdio.handshaking import Handshaking
from perdure.stdio.messages import FromServer, encode, error
from perdure.stdio.notes import Notes
from perdure.stdio.pipes import MAX_LINE_BYTES, HostGone, Line, Output, TooLong
from perdure.stdio.resuming import Resuming
from perdure.stdio.standalone import Standalone
from perdure.stdio.telling import Telling

#: Requests of the host's that run at once. Each holds a connection, and servers take 100 (`max_calls`) or so.
MAX_RUNNING = 1_000
#: Questions of the server's that the host has not answered. The answer to one that was forgotten is not handed on.
MAX_ASKS = 1_000
#: Messages that wait to leave. Beyond that the host's pipe is not read, and the host has to wait.
MAX_WAITING = 100
#: Seconds for what the host said last before it closed the pipe.
FAREWELL = 0.5

UNSUPPORTED_VERSION = -32022

REVOKED = "notifications/perdure/resume_revoked"

Job = Callable[[], Coroutine[Any, Any, None]]


class Bridge:
    """One host's connection to one session, for as long as the host keeps the pipe open."""

    def __init__(
        self, wire: Wire, output: Output, resuming: Resuming, notes: Notes, *, patience: Patience, credentials: bool
    ) -> None:
        self.wire = wire
        self.resuming = resuming
        self.notes = notes
        self.patience = patience
        self.credentials = credentials
        self.teller = troubles.Teller()
        self._output = output
        self._handshaking = Handshaking(self)
        self.before = Before(self)
        self._instance = secrets.token_urlsafe(9)
        self._numbers = itertools.count(1)
        self._calls: dict[str, Call] = {}
        """By the id that the host gave, as JSON."""
        self._tokens: dict[str, str] = {}
        """Progress tokens on the wire, and those of the host's behind them, as JSON."""
        self._asks: dict[str, None] = {}
        """The ids of what the server has asked and the host has not answered, as JSON."""
        self._departures, self._waiting = anyio.create_memory_object_stream[tuple[anyio.Event, Job]](MAX_WAITING)
        self._reading = anyio.CancelScope()
        self._hearing: set[anyio.CancelScope] = set()
        self._tasks: anyio.abc.TaskGroup

    @property
    def handshake(self) -> Handshake | None:
        return self._handshaking.handshake

    async def run(self, lines: AsyncIterator[Line], leaving: Callable[[], None]) -> None:
        """Until the host closes the pipe. `leaving` is called before the last messages are waited for."""
        with self._departures, self._waiting:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._depart)
                self.start(self.resuming.start)
                with self._reading:
                    await self._read(lines)
                self._hear_no_more()
                leaving()
                await self._last_words()
                self._tasks.cancel_scope.cancel()

    def stop(self) -> None:
        """End as if the host had closed the pipe."""
        self._reading.cancel()

    async def _read(self, lines: AsyncIterator[Line]) -> None:
        try:
            async for line in lines:
                await self._from_host(line)
        except HostGone:
            return

    def _hear_no_more(self) -> None:
        """What comes from now on is for the next instance, which must not find its streams taken from it."""
        for scope in list(self._hearing):
            scope.cancel()
        for call in list(self._calls.values()):
            if call.departed.is_set():
                call.scope.cancel()

    def start(self, task: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Run something for as long as the bridge lives. Whatever it raises costs that alone."""

        async def run() -> None:
            try:
                await task(*arguments)
            except HostGone:
                self.stop()
            except Exception as failure:
                note(logging.ERROR, "stdio.failed", f"something unforeseen: {type(failure).__name__}: {failure}")

        self._tasks.start_soon(run)

    def new_id(self) -> str:
        # Not a number, also not as a string: the SDK takes "7" for 7.
        return f"{self._instance}.{next(self._numbers)}"

    async def renew(self, gone: Handshake | None) -> bool:
        return await self._handshaking.renew(gone)

    def listen(self) -> None:
        """Read the standalone stream from now on."""
        if self.handshake is not None and self.handshake.session:
            self.hear(Standalone(self, self.handshake).run)

    def hear(self, task: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Run something for as long as the host listens."""

        async def run() -> None:
            with anyio.CancelScope() as scope:
                self._hearing.add(scope)
                try:
                    await task(*arguments)
                finally:
                    self._hearing.discard(scope)

        self.start(run)

    def changed(self) -> None:
        self.notes.changed()

    def moved(self) -> None:
        self.notes.moved()

    # From the host

    async def _from_host(self, line: Line) -> None:
        if isinstance(line, TooLong):
            sentence = f"The line is longer than {MAX_LINE_BYTES} bytes, and was not read"
            await self.give(error("null", PARSE_ERROR, sentence))
            return
        try:
            message = parse_body(line)
        except InvalidMessage as invalid:
            await self.give(_refused(line, invalid))
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
                await self._reply(message, text)

    async def _refuse_batch(self, batch: Batch) -> None:
        """Every request in it is answered: nobody waits for what was not sent."""
        ids = [encode(one.id) for one in batch.messages if isinstance(one, Request)] or ["null"]
        for request_id in ids:
            sentence = "Batches are not bridged: send each message on a line of its own"
            await self.give(error(request_id, INVALID_REQUEST, sentence))

    async def _request(self, message: Request, text: str) -> None:
        host_id = splice.cut(text, "id") or "null"
        if message.method == "initialize":
            self._handshaking.is_begun = True
            await self._leave(anyio.Event(), lambda left: self._initialize(host_id, text, message.params or {}, left))
        elif self.handshake is None and not self._handshaking.is_begun:
            await self.give(_before_the_handshake(message, host_id))
        elif host_id in self._calls:
            await self.give(
                error(host_id, INVALID_REQUEST, f"Request id {host_id} is still in use by a running request")
            )
        elif len(self._calls) >= MAX_RUNNING:
            await self.give(error(host_id, TOO_MANY_AT_ONCE, f"{MAX_RUNNING} requests run already, as many as may"))
        else:
            await self._call(message, host_id, text)

    async def _call(self, message: Request, host_id: str, text: str) -> None:
        wire_id = self.new_id()
        params = message.params or {}
        token = splice.cut(text, "params", "_meta", "progressToken")
        if token is not None and _is_token(params):
            text = splice.replaced(text, encode(wire_id), "params", "_meta", "progressToken")
            self._tokens[wire_id] = token
        asked = Asked(id=host_id, method=message.method, name=str(params.get("name", "")))
        call = Call(self, asked, text, wire_id=wire_id, since=time.monotonic())
        self._calls[host_id] = call
        await self._leave(call.departed, lambda _: self._follow(call, message))

    async def _follow(self, call: Call, message: Request) -> None:
        if not call.asked.may_be_repeated:
            self.notes.noted.calls[call.wire_id] = call.asked
            self.changed()
        with call.scope:
            answer = await call.answer()
            if message.method in STICKY and splice.find(answer, "result") is not None:
                self._stick(message)
            self._free(call)  # a host may use an id again as soon as it has the answer
            await self.give(answer)
        call.departed.set()
        self._forget(call)

    def _free(self, call: Call) -> None:
        self._tokens.pop(call.token, None)
        if self._calls.get(call.asked.id) is call:
            del self._calls[call.asked.id]

    def _forget(self, call: Call) -> None:
        self._free(call)
        if self.notes.noted.calls.pop(call.wire_id, None) is not None:
            self.changed()

    def _stick(self, message: Request) -> None:
        kept = tuple(request.encode() for request in self.notes.noted.sticky)
        self.notes.noted.sticky = [request.decode() for request in sticky_after(kept, encode_sticky(message))]
        self.changed()

    async def _initialize(self, host_id: str, text: str, params: dict[str, Any], left: anyio.Event) -> None:
        """Nothing else leaves before the handshake is answered: there is no session to send it in."""
        try:
            answer = await self._handshaking.initialize(host_id, text, params)
            self._handshaking.is_begun = self.handshake is not None
            await self.give(answer)
        finally:
            left.set()

    async def _notification(self, message: Notification, text: str) -> None:
        if message.method == "notifications/cancelled":
            found = self._cancelled(text)
            if found is None:
                return
            text = found
        telling = Telling(self, text)
        if message.method == "notifications/initialized":
            await self._leave(telling.departed, lambda _: self._initialized(telling))
        elif self.handshake is not None or self._handshaking.is_begun:
            await self._leave(telling.departed, lambda _: telling.run())

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

    async def _initialized(self, telling: Telling) -> None:
        """The second half of the handshake. In a resumed session the server swallows it."""
        await telling.run()
        handshake = self.handshake
        if handshake is None or handshake.initialized:
            return
        handshake.initialized = True
        self.listen()
        if self._handshaking.is_resumed:
            self.before.revive()

    async def _reply(self, message: Response, text: str) -> None:
        key = splice.cut(text, "id")
        if key not in self._asks:
            note(logging.DEBUG, "stdio.answer_unasked", "an answer of the host's is to nothing that was asked")
            return
        del self._asks[key]
        telling = Telling(self, text)
        await self._leave(telling.departed, lambda _: telling.run())

    async def _leave(self, left: anyio.Event, job: Callable[[anyio.Event], Coroutine[Any, Any, None]]) -> None:
        await self._departures.send((left, lambda: job(left)))

    async def _depart(self) -> None:
        async for left, job in self._waiting:
            if not left.is_set():
                self.start(job)
                await left.wait()

    async def _last_words(self) -> None:
        """What the host said before it closed the pipe still leaves; answers are not waited for."""
        left = anyio.Event()

        async def mark(_: anyio.Event) -> None:
            left.set()

        with anyio.move_on_after(FAREWELL):
            await self._leave(left, mark)
            await left.wait()

    async def tell(self, text: str) -> None:
        """Send what has no answer, and wait until it was taken."""
        await Telling(self, text).run()

    # From the server

    async def take(self, message: FromServer, call: Call | None) -> None:
        """What a stream brought, before its position moves on."""
        text: str | None = message.text
        if message.is_request:
            self._asks[splice.cut(message.text, "id") or "null"] = None
            if len(self._asks) > MAX_ASKS:
                del self._asks[next(iter(self._asks))]
        elif message.method == "notifications/progress":
            text = self._with_own_token(message)
        elif message.method == "notifications/cancelled":
            text = self._ask_cancelled(message)
        elif message.method == REVOKED:
            self.start(self._open_again)
            text = None
        elif message.method is None:
            text = None  # an answer that nobody waits for on this stream
        if text is not None:
            await self.give(text)

    def _with_own_token(self, message: FromServer) -> str | None:
        token = message.params.get("progressToken")
        own = self._tokens.get(token) if isinstance(token, str) else None
        if own is None:
            note(logging.DEBUG, "stdio.progress_dropped", "progress of a call that this instance has not made")
            return None
        return splice.replaced(message.text, own, "params", "progressToken")

    def _ask_cancelled(self, message: FromServer) -> str | None:
        key = splice.cut(message.text, "params", "requestId") or "null"
        if key not in self._asks:
            return None  # it was asked of an earlier instance, and this host has never seen it
        del self._asks[key]
        return message.text

    async def forget_asks(self) -> None:
        """The session is another one: nobody waits for these answers any more."""
        asks, self._asks = self._asks, {}
        for key in asks:
            params = f'{{"requestId":{key},"reason":"the session is gone"}}'
            await self.give(f'{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}')

    async def _open_again(self) -> None:
        note(
            logging.WARNING,
            "stdio.revoked",
            "somebody else used a resume token of this session; a new one is asked for",
        )
        if self.handshake is not None:
            await self.resuming.opened(self.handshake.session)

    async def give(self, text: str) -> None:
        """Hand a message to the host."""
        await self._output.write(text)

    def misheard(self, reason: str) -> None:
        note(logging.WARNING, "stdio.misheard", f"the server sent what is no message: {reason}")


def _refused(line: bytes, invalid: InvalidMessage) -> str:
    """The answer to what is no message, under its id if that can be read at all: the host may be waiting for it."""
    request_id = encode(invalid.id)
    if invalid.id is None:
        try:
            found = splice.decode(text := line.decode())
        except ValueError:
            found = None
        if isinstance(found, dict) and "method" in found and type(found.get("id")) in (int, str):
            request_id = splice.cut(text, "id") or "null"
    return error(request_id, invalid.code, invalid.reason.replace("the body", "the line"))


def _is_token(params: dict[str, Any]) -> bool:
    """What is no token stays as it is, for the server to refuse."""
    return type(params["_meta"]["progressToken"]) in (int, str)


def _before_the_handshake(message: Request, host_id: str) -> str:
    """Hosts of 2026-07-28 begin without a handshake. They are told which revisions have sessions, and fall back."""
    if message.method == "ping":
        return f'{{"jsonrpc":"2.0","id":{host_id},"result":{{}}}}'
    meta = (message.params or {}).get("_meta")
    asked = meta.get("io.modelcontextprotocol/protocolVersion") if isinstance(meta, dict) else None
    if message.method == "server/discover" or asked is not None:
        data = {"supported": sorted(REVISIONS, reverse=True), "requested": asked}
        return error(host_id, UNSUPPORTED_VERSION, "The bridge speaks the revisions that have sessions", data)
    return error(host_id, INVALID_REQUEST, "Begin with an initialize request")
