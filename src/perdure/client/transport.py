"""The transport runs the messages of the SDK's client in one era: in a session, or without one (2026-07-28).

Each message is sent by a task of its own, so that none waits for another. The era turns values of the SDK into texts on
the wire, and back.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import JSONRPCNotification, JSONRPCRequest, RequestId

from perdure.client.handover import Exchange, Handover, Handovers
from perdure.client.memory import Memory
from perdure.client.modern_era import ModernEra
from perdure.client.pending import PendingCall
from perdure.client.session_era import SessionEra

#: Seconds for leaving: a server that does not answer does not keep the program from ending.
LEAVING_SECONDS = 5.0

Inbound = MemoryObjectReceiveStream[SessionMessage | Exception]
Outbound = MemoryObjectSendStream[SessionMessage]


class Transport:
    """Connects the SDK's client with an era, for as long as the client lives."""

    def __init__(self, era: SessionEra | ModernEra, memory: Memory) -> None:
        self.era = era
        self.handovers = Handovers(memory)
        self._underway: dict[RequestId, Exchange] = {}
        """The requests of the SDK's client, by the ids that it knows."""

    @property
    def pending(self) -> list[PendingCall]:
        return [call for call in self.era.earlier if not call.is_taken]

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
                    message, handover = self.handovers.of(item.message)
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
            if await self.era.incoming.deliver(answer if handover is None else handover.masked(answer)):
                self._underway.pop(local_id, None)
                self.handovers.delivered(handover, exchange.forget)
