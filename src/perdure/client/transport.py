"""The transport runs the messages of the SDK's client in one era: in a session, or without one (2026-07-28).

Each message is sent by a task of its own, so that none waits for another. The era turns values of the SDK into texts on
the wire, and back. A handover takes the answer of one `call_tool` past the SDK's client to the program.

**Not checked.** The SDK's client checks a result against its tool's output schema. For that it may ask for `tools/list`
after the answer has come: that request can fail, or wait for minutes, and would cost the program an answer that is
there; and a pattern in the schema of a hostile server takes for ever to match. Servers check what they send. So a
result goes through the SDK's client marked as a tool's error, which it does not check, and gets its own mark back here.

**Not forgotten.** A call stays in the state until `call_tool` has returned. The transport finds the handover of a
request by a mark in its `_meta`, which does not leave the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from perdure._core.codes import UNREACHABLE
from perdure.client.pending import PendingCall
from perdure.errors import OutcomeUnknown

if TYPE_CHECKING:
    from perdure.client.modern_era import ModernEra
    from perdure.client.session_era import SessionEra

#: Seconds for leaving: a server that does not answer does not keep the program from ending.
LEAVING_SECONDS = 5.0

Inbound = MemoryObjectReceiveStream[SessionMessage | Exception]
Outbound = MemoryObjectSendStream[SessionMessage]
MARK = "dev.perdure/handover"


Answer = JSONRPCResponse | JSONRPCError


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request of the SDK's client, and its answer."""

    run: Callable[[], Awaitable[Answer]]
    forget: Callable[[], None] = lambda: None
    """Deletes the call from the state; called when the program has the answer."""
    cancel: Callable[[JSONRPCNotification], None] = lambda message: None
    """Cancels the call at the server: its answer is no longer wanted."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


@dataclass(kw_only=True)
class Handover:
    """One `call_tool`, until it has returned."""

    mark: int
    forgets: list[Callable[[], None]] = field(default_factory=list)
    """What removes its requests from the state."""
    is_over: bool = False
    is_answered: bool = False
    """The SDK's client has a result that is no question: the tool ran."""
    is_round: bool = False
    """The last answer was a question, and another request follows."""
    _is_masked: bool = False

    def meta(self, given: Mapping[str, Any] | None) -> types.RequestParamsMeta:
        return cast("types.RequestParamsMeta", {**(given or {}), MARK: self.mark})

    def masked(self, answer: Answer) -> Answer:
        """An answer as the SDK's client gets it."""
        if isinstance(answer, JSONRPCError):
            self.is_round = False
            return answer
        kind, result = answer.result.get("resultType", "complete"), answer.result
        self.is_round = kind == "input_required"
        self.is_answered = not self.is_round
        self._is_masked = kind == "complete" and result.get("isError", False) is False
        if not self._is_masked:
            return answer
        return answer.model_copy(update={"result": {**result, "isError": True}})

    def unmasked(self, result: types.CallToolResult) -> types.CallToolResult:
        return result.model_copy(update={"is_error": False}) if self._is_masked else result


class Transport:
    """Connects the SDK's client with an era, for as long as the client lives."""

    def __init__(self, era: SessionEra | ModernEra) -> None:
        self.era = era
        self._memory = era.incoming.memory
        self._handovers: dict[int, Handover] = {}
        self._marks = count(1)
        self._underway: dict[RequestId, Exchange] = {}
        """The requests of the SDK's client, by the ids that it knows."""

    @property
    def pending(self) -> list[PendingCall]:
        return [call for call in self.era.earlier if not call.is_taken]

    @contextmanager
    def handover(self, tool: str, arguments: Mapping[str, Any] | None) -> Iterator[Handover]:
        """For as long as `call_tool` runs."""
        found = Handover(mark=next(self._marks))
        self._handovers[found.mark] = found
        try:
            yield found
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                found.forgets.clear()  # the SDK's client had it, and the program has not
            if error.code == UNREACHABLE and found.is_answered:
                # Another request could not be sent: that of an extension that waits for the result in its own way.
                raise OutcomeUnknown(tool, arguments, error.message, error.data) from error
            raise
        finally:
            found.is_over = True
            del self._handovers[found.mark]
            for forget in found.forgets:
                self._memory.soon(forget)

    def _unmarked(self, message: JSONRPCRequest) -> tuple[JSONRPCRequest, Handover | None]:
        """A request as it is sent, and the `call_tool` that it belongs to."""
        meta = (message.params or {}).get("_meta") or {}
        if MARK not in meta:
            return message, None
        params = {**(message.params or {}), "_meta": {key: value for key, value in meta.items() if key != MARK}}
        if not params["_meta"]:
            del params["_meta"]
        return message.model_copy(update={"params": params}), self._handovers.get(meta[MARK])

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Inbound, Outbound]]:
        """What the SDK's client reads and writes (its `Transport`)."""
        outbound, outbox = anyio.create_memory_object_stream[SessionMessage](0)
        inbox, inbound = self.era.incoming.inbox, self.era.incoming.inbound
        async with inbox, inbound, outbound, outbox, self.era.running() as scope:
            self.era.start(self._run, outbox)
            try:
                yield inbound, outbound
            finally:
                with anyio.move_on_after(LEAVING_SECONDS, shield=True):
                    await self.era.flush()
                    # A task that still runs would find the session gone, and begin another.
                    scope.cancel()
                    for call in self.pending:
                        call.close()
                    await self.era.leave()
                scope.cancel()

    async def _run(self, outbox: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async for item in outbox:
            match item.message:
                case JSONRPCRequest():
                    message, handover = self._unmarked(item.message)
                    headers = item.metadata.headers if isinstance(item.metadata, ClientMessageMetadata) else None
                    exchange = self._underway[message.id] = self.era.exchange(message, headers or {})
                    self.era.start(self._follow, message.id, exchange, handover)
                case JSONRPCNotification(method="notifications/cancelled"):
                    local_id = cancelled_request_id_from_params(item.message.params)
                    cancelled = None if local_id is None else self._underway.pop(local_id, None)
                    if cancelled is not None:
                        cancelled.scope.cancel()
                        cancelled.cancel(item.message)
                case _:
                    self.era.tell(item.message)

    async def _follow(self, local_id: RequestId, exchange: Exchange, handover: Handover | None) -> None:
        with exchange.scope:
            answer = await exchange.run()
            # Delivered, then forgotten: what the SDK's client was not there to take is for the next process.
            if not await self.era.incoming.deliver(answer if handover is None else handover.masked(answer)):
                return
            self._underway.pop(local_id, None)
            # The request is forgotten when the program has its answer, too.
            if handover is None or handover.is_round:  # none: of a program that uses `client.session`
                exchange.forget()
            elif handover.is_over:
                self._memory.soon(exchange.forget)
            else:
                handover.forgets.append(exchange.forget)
