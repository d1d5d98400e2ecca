"""The SDK's server, driven through its public parts.

`JSONRPCDispatcher` runs the handlers, `Connection` holds what is known of the client, `ServerRunner` joins them.
The two streams between them and us are ours: what goes in carries the context of the HTTP request it came with, and
what comes out is appended to the log in the handler's own task, so order and back-pressure come by themselves, call by
call.

The runtime knows requests under numbers of ours, never under the client's ids: those repeat after each reload, and the
SDK takes "8" for 8.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Mapping
from typing import Any, Protocol, Self

import anyio
from mcp.server.connection import Connection
from mcp.server.lowlevel.server import Server
from mcp.server.runner import ServerRunner, aclose_shielded
from mcp.shared.dispatcher import CallOptions, DispatchContext, OnNotify
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    InitializeRequestParams,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
)

from perdure._core.ids import NodeId
from perdure._core.memory_budget import Work
from perdure.runtime.base import Flow
from perdure.store.base import SessionRecord

_CLOSE_SECONDS = 1.0
"""How long handlers may take to stop. One that does not stop (a blocked thread, a shield) is left to itself: neither
its session's end nor anybody else's may wait for it."""

_ending: set[asyncio.Task[None]] = set()
"""Keeps what is left to itself from being collected while it runs."""


class Outlet(Protocol):
    """Where a runtime's messages go: the session."""

    def emit(self, message: JSONRPCMessage, related: int | str | None) -> Flow | None:
        """Append a message to the log; gives where to wait before more is said.

        `related` is the number of the message's call.
        """
        ...

    def interrupted(self, number: object) -> None:
        """The call of that number was cut short from within, and has no answer."""
        ...


_NOTHING = Exception("nothing to do")
"""A read stream may carry exceptions; the dispatcher only mentions them in its debug log."""


class Inbox:
    """The dispatcher's read stream. `last_context` is how the SDK learns in which context to run a handler."""

    __slots__ = ("_blank", "_closed", "_items", "_waiter", "last_context")

    def __init__(self) -> None:
        self.last_context: contextvars.Context | None = None
        self._items: list[tuple[contextvars.Context, SessionMessage]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._blank = True

    def feed(self, context: contextvars.Context, message: SessionMessage) -> None:
        self._items.append((context, message))
        self._wake()

    async def receive(self) -> SessionMessage | Exception:
        while not self._items:
            if self._closed:
                raise anyio.EndOfStream
            if not self._blank:
                # The dispatcher's loop holds on to the last thing it got, with the whole HTTP request, until the next.
                self._blank, self.last_context = True, None
                return _NOTHING
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.last_context, message = self._items.pop(0)
        self._blank = False
        return message

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def aclose(self) -> None:
        self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


_size: contextvars.ContextVar[int] = contextvars.ContextVar("perdure_notification_size", default=0)
"""In the context in which a notification is handled: what it was counted as."""


class Heard:
    """Counts the notifications that wait for their handler or are being handled: the SDK runs them all at once."""

    __slots__ = ("_work", "count", "size")

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self.count = 0
        self.size = 0

    def add(self, size: int, context: contextvars.Context) -> None:
        """One that takes so many bytes of memory will be handled in that context."""
        context.run(_size.set, size)
        self._change(1, size)

    def counted(self, on_notify: OnNotify) -> OnNotify:
        """The handler of notifications, which tells when it is through with one."""

        async def handle(dctx: DispatchContext[Any], method: str, params: Mapping[str, Any] | None) -> None:
            size = _size.get()
            try:
                await on_notify(dctx, method, params)
            finally:
                if size:
                    self._change(-1, -size)

        return handle

    def close(self) -> None:
        """The runtime goes: whatever still runs is cancelled, and counts no longer."""
        self._change(-self.count, -self.size)
        self._work = None

    def _change(self, count: int, size: int) -> None:
        if self._work is not None:
            self.count += count
            self.size += size
            self._work.take(size)


class Outbox:
    """The dispatcher's write stream: the way to the log. Once closed it takes nothing more."""

    __slots__ = ("_answers", "_closed")

    def __init__(self, answers: Outlet) -> None:
        self._answers = answers
        self._closed = False

    async def send(self, item: SessionMessage, /) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if isinstance(item.message, JSONRPCError) and _is_farewell(item.message):
            self._answers.interrupted(item.message.id)
            return
        stream = self._answers.emit(item.message, getattr(item.metadata, "related_request_id", None))
        if stream is not None and stream.is_full:
            await stream.wait_for_room()

    def close(self) -> None:
        self._closed = True

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Dispatcher(JSONRPCDispatcher):
    """Gives asks ids that never repeat within a session, on any node, and that name the node that waits."""

    def __init__(self, inbox: Inbox, outbox: Outbox, ask_ids: itertools.count[int], node: NodeId) -> None:
        super().__init__(inbox, outbox, inline_methods=frozenset({"initialize"}))
        self._ask_ids = ask_ids
        self._node = node

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        # The letters in front keep the SDK from taking the id for an integer.
        ask = f"ask-{self._node}-{next(self._ask_ids)}"
        return await super().send_raw_request(method, params, {**(opts or {}), "request_id": ask}, **kwargs)


class Outbound:
    """The connection's own channel. Notifications reach the log also after the runtime was dropped (a tool may have
    kept its session object); requests need a runtime that waits for the answer."""

    __slots__ = ("_answers", "dispatcher")

    def __init__(self, answers: Outlet) -> None:
        self.dispatcher: Dispatcher | None = None
        self._answers = answers

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        if params is None:
            message = JSONRPCNotification(jsonrpc="2.0", method=method)
        else:
            message = JSONRPCNotification(jsonrpc="2.0", method=method, params=dict(params))
        stream = self._answers.emit(message, None)
        if stream is not None and stream.is_full:
            await stream.wait_for_room()

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        if self.dispatcher is None:
            raise MCPError(code=CONNECTION_CLOSED, message="Connection closed")
        return await self.dispatcher.send_raw_request(method, params, opts)


class Runtime:
    """One session's server, running."""

    __slots__ = ("_connection", "_outbound", "_outbox", "heard", "inbox", "task")

    def __init__(
        self,
        server: Server[Any],
        lifespan_state: object,
        answers: Outlet,
        record: SessionRecord,
        *,
        ask_ids: itertools.count[int],
        node: NodeId,
        context: contextvars.Context,
        heard: Heard,
    ) -> None:
        self.inbox = Inbox()
        self.heard = heard
        self._outbox = Outbox(answers)
        self._outbound = Outbound(answers)
        dispatcher = Dispatcher(self.inbox, self._outbox, ask_ids, node)
        self._outbound.dispatcher = dispatcher
        self._connection = _connection(self._outbound, record)
        self.task = asyncio.create_task(
            _serve(ServerRunner(server, self._connection, lifespan_state), dispatcher, heard),
            name="perdure-runtime",
            context=context,
        )

    @property
    def keeps_state(self) -> bool:
        """Somebody's code keeps things in this connection that dropping it would lose."""
        return bool(self._connection.state)

    def mark_initialized(self) -> None:
        self._connection.initialized.set()

    async def aclose(self) -> None:
        """End it without a word: first the way to the log, then the handlers, so that no answer of the SDK's about a
        closed connection gets into the log."""
        self._outbox.close()
        self._outbound.dispatcher = None
        self.inbox.close()
        _ending.add(self.task)
        self.task.add_done_callback(_ended)
        await asyncio.wait({self.task}, timeout=_CLOSE_SECONDS)


def _is_farewell(message: JSONRPCError) -> bool:
    """What the SDK writes in a handler that it cancels because the runtime ends: "connection closed" is no answer."""
    task = asyncio.current_task()
    return message.error.code == CONNECTION_CLOSED and task is not None and task.cancelling() > 0


async def _serve(runner: ServerRunner[Any], dispatcher: Dispatcher, heard: Heard) -> None:
    """What the SDK's `serve_connection` does, with an end that leaves nothing for the garbage collector: the runner
    caches methods of its own on itself, and would keep the connection until a full collection."""
    try:
        await dispatcher.run(runner.on_request, heard.counted(runner.on_notify))
    finally:
        await aclose_shielded(runner.connection)
        del runner.on_request, runner.on_notify


def _ended(task: asyncio.Task[None]) -> None:
    _ending.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that nobody complains: how a closed runtime ends is of no interest


def _connection(outbound: Outbound, record: SessionRecord) -> Connection:
    """The connection as the record tells it; a session that is still opening has no client params yet."""
    if not record.version:
        return Connection.for_loop(outbound, session_id=record.id)
    params = InitializeRequestParams.model_validate_json(record.client_params, by_name=False)
    connection = Connection(outbound, protocol_version=record.version, session_id=record.id, client_params=params)
    if record.initialized:
        connection.initialized.set()
    return connection
