"""The transport below the SDK's client: messages in and out, one session, its streams, and what is remembered of it.

**Ids.** The SDK's client counts its requests from 1 in every process. On the wire a request is called
`<start>.<number>`, where `start` counts the processes that used this state and is on disk before the first request
leaves: so ids never repeat within a session. The alternative, a reattach (R10), would let the server tell the two lives
apart; but then calls of before belong to another incarnation: they can no longer be cancelled, their progress comes
under other tokens, and servers other than Perdure know no such thing. Here the session simply goes on, so the recorded
result of `initialize` is given to the SDK's client without asking anybody.

**Questions.** The position moves on when a question of the server's (sampling, elicitation, roots) is handed to the
client's callback. If the process dies before it has answered, nobody would be asked again: so open questions are
remembered, and asked again by the next process.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params, progress_token_from_params
from mcp.shared.message import SessionMessage
from mcp_types import (
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from perdure._core.gap import METHOD as GAP
from perdure._core.gap import Gap, read_gap
from perdure._core.reconnect import Patience
from perdure._core.sticky import METHODS as STICKY
from perdure.client.before import Before
from perdure.client.call import Call
from perdure.client.keeper import Keeper
from perdure.client.session import Handshaking
from perdure.client.standalone import Standalone
from perdure.client.state import Ask, Handshake, Running, State
from perdure.client.wire import Wire
from perdure.errors import EventsLost
from perdure.observe import note

#: Seconds for the farewell: a server that does not answer does not keep the program from ending.
FAREWELL_SECONDS = 5.0

Inbox = MemoryObjectSendStream[SessionMessage | Exception]
Inbound = MemoryObjectReceiveStream[SessionMessage | Exception]
Outbound = MemoryObjectSendStream[SessionMessage]
OnGap = Callable[[Gap], Awaitable[None] | None]


class Link:
    """One client's connection to one server, for as long as the client lives."""

    def __init__(
        self, wire: Wire, keeper: Keeper, *, patience: Patience, on_gap: OnGap | None, ends_session: bool
    ) -> None:
        self.wire = wire
        self.patience = patience
        self.before = Before(self)
        self.on_renewed: Callable[[types.InitializeResult], None] | None = None
        self._keeper = keeper
        self._on_gap = on_gap
        self._ends_session = ends_session
        self._handshaking = Handshaking(self)
        self._numbers = itertools.count(1)
        self._calls: dict[RequestId, Call] = {}
        """By the id that the SDK's client knows."""
        self._tokens: dict[str, RequestId] = {}
        """Progress tokens on the wire, and the ids behind them."""
        self._telling = 0
        self._told = anyio.Event()
        self._inbox: Inbox
        self._tasks: anyio.abc.TaskGroup

    @property
    def state(self) -> State:
        return self._keeper.state

    @property
    def handshake(self) -> Handshake | None:
        return self._keeper.state.handshake

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Inbound, Outbound]]:
        """What the SDK's client reads and writes (its `Transport`)."""
        self._inbox, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outbound, outbox = anyio.create_memory_object_stream[SessionMessage](0)
        async with self._inbox, inbound, outbound, outbox, anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._write, outbox)
            try:
                yield inbound, outbound
            finally:
                with anyio.move_on_after(FAREWELL_SECONDS, shield=True):
                    if self._telling:
                        await self._told.wait()
                    # Whoever still runs would find the session gone, and begin another.
                    self._tasks.cancel_scope.cancel()
                    await self._farewell()
                self._tasks.cancel_scope.cancel()

    def changed(self) -> None:
        self._keeper.changed()

    def moved(self) -> None:
        self._keeper.moved()

    def new_id(self) -> str:
        # Not a number, also not as a string: the SDK takes "7" for 7.
        return f"{self._keeper.state.start}.{next(self._numbers)}"

    def start(self, task: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        """Run something for as long as the link lives."""
        self._tasks.start_soon(task, *arguments)

    async def renew(self, gone: Handshake | None) -> bool:
        return await self._handshaking.renew(gone)

    def listen(self) -> None:
        """Read the standalone stream from now on."""
        if self.handshake is not None and self.handshake.session:
            self._tasks.start_soon(Standalone(self, self.handshake).run)

    # From the SDK's client

    async def _write(self, outbox: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async for item in outbox:
            match item.message:
                case JSONRPCRequest(method="initialize"):
                    self._tasks.start_soon(self._handshaking.initialize, item.message)
                case JSONRPCRequest():
                    self._request(item.message)
                case JSONRPCNotification(method="notifications/initialized"):
                    await self._handshaking.initialized(item.message)
                case JSONRPCNotification(method="notifications/cancelled"):
                    self._cancel(item.message)
                case JSONRPCNotification():
                    self._tasks.start_soon(self.tell, encoded(item.message))
                case JSONRPCResponse() | JSONRPCError():
                    self._tasks.start_soon(self._reply, item.message)

    def _request(self, message: JSONRPCRequest) -> None:
        wire_id = self.new_id()
        request = {**encoded(message), "id": wire_id}
        if progress_token_from_params(message.params) == message.id:
            # The SDK's client takes the id for the token: what it never repeats must not be repeated here.
            params = request["params"]
            request["params"] = {**params, "_meta": {**params["_meta"], "progressToken": wire_id}}
            self._tokens[wire_id] = message.id
        running = Running(id=wire_id, params=request.get("params") or {})
        call = Call(self, request, running)
        self._calls[message.id] = call
        if message.method == "tools/call":
            self._keeper.state.calls[wire_id] = running
            self._keeper.changed()
        self._tasks.start_soon(self._follow, message, call)

    async def _follow(self, message: JSONRPCRequest, call: Call) -> None:
        with call.scope:
            answer = await call.answer()
            if isinstance(answer, JSONRPCResponse):
                self._stick(message)
            self._forget(message.id, call)
            await self.deliver(answer.model_copy(update={"id": message.id}))

    def _stick(self, message: JSONRPCRequest) -> None:
        if message.method in STICKY:
            self._keeper.state.stick(message.method, message.params or {})
            self._keeper.changed()

    def _forget(self, local_id: RequestId, call: Call) -> None:
        self._calls.pop(local_id, None)
        self._tokens.pop(call.running.id, None)
        if call.running.id in self._keeper.state.calls:
            self._keeper.state.end(call.running.id)
            self._keeper.changed()

    def _cancel(self, message: JSONRPCNotification) -> None:
        """The answer is no longer wanted: say so under the name that the server knows."""
        local_id = cancelled_request_id_from_params(message.params)
        call = None if local_id is None else self._calls.get(local_id)
        if local_id is None or call is None:
            return
        call.scope.cancel()
        self._forget(local_id, call)
        body = encoded(message)
        body["params"] = {**body["params"], "requestId": call.request["id"]}
        self._tasks.start_soon(self.tell, body)

    async def _reply(self, message: JSONRPCResponse | JSONRPCError) -> None:
        await self.tell(encoded(message))
        if self._keeper.state.asks.pop(str(message.id), None) is not None:
            self._keeper.changed()

    async def tell(self, body: dict[str, Any]) -> bool:
        """Send what has no answer. It may be sent twice: an answer that nobody waits for is dropped."""
        self._telling += 1
        try:
            return await self._handshaking.tell(body)
        finally:
            self._telling -= 1
            if not self._telling:
                self._told.set()
                self._told = anyio.Event()

    # From the server

    async def take(self, message: JSONRPCMessage, call: str | None, tool: str | None) -> None:
        """What a stream brought, before its position moves on."""
        if isinstance(message, JSONRPCRequest):
            if str(message.id) in self._keeper.state.asks:
                return  # it was remembered, and asked again, before the log brought it again
            self._keeper.state.asks[str(message.id)] = Ask(message=encoded(message), call=call)
            self._keeper.changed()
        elif isinstance(message, JSONRPCNotification):
            if message.method == GAP:
                await self._gap(read_gap(message.params, tool=tool))
                return
            if message.method == "notifications/cancelled":
                self._keeper.state.asks.pop(str(cancelled_request_id_from_params(message.params)), None)
            message = self._with_own_token(message)
            if call is not None:
                await self.before.hear(call, message)
        await self.deliver(message)

    def _with_own_token(self, message: JSONRPCNotification) -> JSONRPCNotification:
        token = (message.params or {}).get("progressToken")
        if message.method != "notifications/progress" or not isinstance(token, str) or token not in self._tokens:
            return message
        return message.model_copy(update={"params": {**(message.params or {}), "progressToken": self._tokens[token]}})

    async def deliver(self, message: JSONRPCMessage) -> None:
        try:
            await self._inbox.send(SessionMessage(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # the SDK's client has left

    async def complain(self, error: Exception) -> None:
        """The SDK's client hands what is no message to its `message_handler`."""
        try:
            await self._inbox.send(error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    async def _gap(self, gap: Gap) -> None:
        note(
            logging.WARNING,
            "client.gap",
            f"the server says that events {gap.first} to {gap.last} are gone: {gap.reason}",
            stream=gap.stream,
            tool=gap.tool,
        )
        if self._on_gap is None:
            await self.complain(EventsLost(gap))
            return
        try:
            waiting = self._on_gap(gap)
            if waiting is not None:
                await waiting
        except Exception as error:
            await self.complain(error)

    async def _farewell(self) -> None:
        handshake = self.handshake
        self.before.close()
        if handshake is None or not self._ends_session:
            return
        try:
            if handshake.session:
                await self.wire.delete(handshake)
        except Exception as error:  # whatever it is, the client leaves
            note(
                logging.INFO, "client.not_deleted", f"the server could not be told that the session has ended: {error}"
            )
        self._keeper.state.forget_session()


def encoded(message: JSONRPCMessage) -> dict[str, Any]:
    return message.model_dump(by_alias=True, mode="json", exclude_unset=True)
