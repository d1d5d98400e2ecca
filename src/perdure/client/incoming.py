"""Turns what the server sends into values of the SDK, and hands it to the SDK's client before positions move.

**Questions.** The position moves when a request of the server (sampling, elicitation, roots) is handed to the client's
callback. If the process dies before it has answered, the server would not ask again: so open questions are remembered,
and asked again by the next process.
"""

import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import anyio
import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse, RequestId
from pydantic import ValidationError

from perdure._core.codes import ANSWER_GIVEN_UP, INTERNAL_ERROR, OUTCOME_UNKNOWN, POSITION_LOST, UNREACHABLE
from perdure._core.losses import GAP, Gap, read_gap
from perdure.client.memory import Ask, Memory
from perdure.errors import EventsLost, OutcomeUnknown, Unreachable
from perdure.remote.endpoint import Endpoint
from perdure.remote.message import Message
from perdure.remote.route import ClientLimits, ConnectionLog, Notice, Route
from perdure.telemetry.log_records import log_event

OnGap = Callable[[Gap], Awaitable[None] | None]

#: Questions that may be open at once; each is a task of the SDK's client, and is kept in the state.
MAX_ASKS = 100
#: Of a question, to be remembered: the state is written as a whole, often. A larger one is asked, and not again.
MAX_ASK_BYTES = 65_536
#: Callbacks that may run at once: far more than a program waits for, and a few megabytes.
MAX_CALLBACKS = 1_000

Callback = TypeVar("Callback", bound=Callable[..., Awaitable[None]])


#: The program gets an error for these, or a gap.
_SKIPPED = {Notice.REFUSED, Notice.NOT_RENEWED, Notice.NOT_REPEATED, Notice.POSITION_LOST}


class CallbackLimit:
    """Limits the callbacks that run at once, so that slow ones slow their server down.

    The SDK's client runs the callbacks for each notification in a task of their own and reads on. Where they are slower
    than the server, the tasks would pile up without end; so no further notification is handed over while
    `MAX_CALLBACKS` of them run. Then the stream is not read, and the server, if it is Perdure, lets the call wait that
    feeds it (promise 6).
    """

    def __init__(self) -> None:
        self._running = 0
        self._ended = anyio.Event()

    async def room(self) -> None:
        """Wait until another callback may run."""
        while self._running >= MAX_CALLBACKS:
            await self._ended.wait()

    def counted(self, callback: Callback) -> Callback:
        """Return the callback, counted while it runs."""

        @wraps(callback)
        async def run(*args: Any, **kwargs: Any) -> None:
            self._running += 1
            try:
                await callback(*args, **kwargs)
            finally:
                self._running -= 1
                self._ended.set()
                self._ended = anyio.Event()

        return cast("Callback", run)


class Incoming:
    """Writes to the stream that the SDK's client reads (`inbound`)."""

    def __init__(self, memory: Memory, callback_limit: CallbackLimit, on_gap: OnGap | None) -> None:
        self.inbox, self.inbound = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        self.tokens: dict[str, RequestId] = {}
        """The ids of requests by their progress tokens on the wire."""
        self.memory = memory
        self.refuse: Callable[[dict[str, Any]], None] = lambda reply: None
        """Sends an error reply to the server."""
        self._callback_limit = callback_limit
        self._on_gap = on_gap

    def route(self, endpoint: Endpoint, limits: ClientLimits) -> Route:
        """The way to the server. Ids begin with the number of the process, and with chance."""
        report = ConnectionLog(endpoint.url, level=logging.INFO, first_wait=limits.handshake.max_time, skips=_SKIPPED)
        prefix = f"{self.memory.state.start}-{secrets.token_hex(4)}"
        return Route(endpoint=endpoint, limits=limits, complain=self.deliver, report=report, prefix=prefix)

    async def take(self, found: Message, call: str | None = None, tool: str | None = None) -> None:
        """Hand on a message of a call's stream, or of the standalone stream."""
        try:
            message = parse(found)
        except ValidationError as error:
            await self.deliver(error)
            return
        if isinstance(message, JSONRPCRequest):
            await self._ask(message, call)
        elif not isinstance(message, JSONRPCNotification):
            return
        elif message.method == GAP:
            await self.gap(read_gap(message.params, tool=tool))
        else:
            params = message.params or {}
            if message.method == "notifications/cancelled":
                self.memory.answered(cancelled_request_id_from_params(params))
            elif message.method == "notifications/progress":
                token = params.get("progressToken")
                if isinstance(token, str) and token in self.tokens:
                    params = {**params, "progressToken": self.tokens[token]}
                    message = message.model_copy(update={"params": params})
            await self._callback_limit.room()
            await self.deliver(message)

    async def deliver(self, item: JSONRPCMessage | Exception) -> bool:
        """Hand an item to the SDK's client; returns whether it took the item. Its `message_handler` gets exceptions."""
        try:
            await self.inbox.send(item if isinstance(item, Exception) else SessionMessage(item))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False  # the SDK's client has left
        return True

    async def gap(self, gap: Gap) -> None:
        log_event(
            logging.WARNING,
            "client.gap",
            f"the server says that events {gap.first} to {gap.last} are gone: {gap.reason}",
            stream=gap.stream,
            tool=gap.tool,
        )
        if self._on_gap is None:
            await self.deliver(EventsLost(gap))
            return
        try:
            waiting = self._on_gap(gap)
            if waiting is not None:
                await waiting
        except Exception as error:
            await self.deliver(error)

    async def _ask(self, message: JSONRPCRequest, call: str | None) -> None:
        asks, key = self.memory.state.asks, str(message.id)
        if key in asks:
            return  # it was remembered, and asked again, before the log brought it again
        if len(asks) >= MAX_ASKS:
            error = {"code": INTERNAL_ERROR, "message": f"This client has {MAX_ASKS} open questions already"}
            self.refuse({"jsonrpc": "2.0", "id": message.id, "error": error})
            return
        body = encoded(message)
        is_small = len(json.dumps(body)) <= MAX_ASK_BYTES
        asks[key] = Ask(message=body if is_small else {}, call=call)
        self.memory.changed()
        await self.deliver(message)


def parse(message: Message) -> JSONRPCMessage:
    """A message as the SDK's value. Raises `ValidationError`."""
    return types.jsonrpc_message_adapter.validate_json(message.text, by_name=False)


def encoded(message: JSONRPCMessage) -> dict[str, Any]:
    return message.model_dump(by_alias=True, mode="json", exclude_unset=True)


def answer_of(message: Message, request_id: RequestId | None = None) -> JSONRPCResponse | JSONRPCError:
    """An answer as the SDK's value, under the id that the SDK's client gave its request."""
    try:
        found = parse(message)
    except ValidationError as error:
        found = None
        why = f"The answer is not a JSON-RPC response: {error.error_count()} errors"
    if not isinstance(found, JSONRPCResponse | JSONRPCError):
        found = JSONRPCError(jsonrpc="2.0", id=request_id, error=types.ErrorData(code=INTERNAL_ERROR, message=why))
    return found if request_id is None else found.model_copy(update={"id": request_id})


def named(error: MCPError, tool: str | None = None, arguments: Mapping[str, Any] | None = None) -> MCPError:
    """`Unreachable`, and for a tool `OutcomeUnknown`, where the code says so; else the error as it is.

    An answer that is no longer retained (-31002) is as unknown as one that was never given.
    """
    if error.code == UNREACHABLE:
        return Unreachable(error.message, error.data)
    if tool is not None and error.code in (OUTCOME_UNKNOWN, POSITION_LOST, ANSWER_GIVEN_UP):
        data = error.data if isinstance(error.data, Mapping) else {}
        message = error.message if error.code == OUTCOME_UNKNOWN else ""
        return OutcomeUnknown(tool, arguments, str(data.get("reason") or error.message), error.data, message)
    return error


@contextmanager
def naming(tool: str | None = None, arguments: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Errors of the SDK's client come out under their names."""
    try:
        yield
    except MCPError as error:
        found = named(error, tool, arguments)
        if found is error:
            raise
        raise found from error
