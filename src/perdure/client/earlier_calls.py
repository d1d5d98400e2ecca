"""Goes on with what an earlier process has left: calls that run, and questions that it had not answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from mcp_types import JSONRPCNotification, jsonrpc_message_adapter
from pydantic import ValidationError

from perdure.client.incoming import Incoming, parse
from perdure.client.memory import Memory
from perdure.client.pending import PendingCall
from perdure.remote.call import Call
from perdure.remote.link import Link
from perdure.remote.message import Message
from perdure.remote.state import Handshake, Running


class EarlierCalls:
    """The calls of earlier processes whose results were not taken yet. `tell` sends a notification."""

    def __init__(
        self, link: Link, memory: Memory, incoming: Incoming, tell: Callable[[dict[str, Any]], Awaitable[object]]
    ) -> None:
        self._link = link
        self._memory = memory
        self._incoming = incoming
        self._tell = tell
        self._calls: dict[str, PendingCall] = {}

    @property
    def calls(self) -> list[PendingCall]:
        return list(self._calls.values())

    def recall(self, handshake: Handshake) -> None:
        """List them, before the client can look."""
        for running in self._memory.state.calls.values():
            self._calls[running.id] = PendingCall(
                running,
                version=handshake.version,
                handed_out=partial(self._handed_out, running.id),
                cancel=partial(self._cancel, running.id),
            )

    async def revive(self) -> None:
        """Go on with the calls, then ask the open questions again."""
        state = self._memory.state
        for pending in self.calls:
            self._link.start(self._go_on, state.calls[pending.id], pending)
        for key, ask in list(state.asks.items()):
            try:
                message = jsonrpc_message_adapter.validate_python(ask.message, by_name=False)
            except ValidationError:  # it was too large to be remembered, or the state was changed by hand
                del state.asks[key]
                continue
            await self._incoming.deliver(message)

    def lose(self, reason: str) -> None:
        """Their session is not the one that goes on."""
        for pending in self.calls:
            pending.end(self._call(self._memory.state.calls[pending.id], pending).unknown(reason))

    def close(self) -> None:
        for pending in self._calls.values():
            pending.close()

    def _call(self, running: Running, pending: PendingCall) -> Call:
        async def take(message: Message) -> None:
            try:
                parsed = parse(message)
            except ValidationError:
                parsed = None
            if isinstance(parsed, JSONRPCNotification):
                await pending.put(parsed)
            await self._incoming.take(message, running.id, running.tool or None)

        def mark(position: str | None, retry: int | None) -> None:
            running.moved(position, retry)
            self._memory.moved()

        return Call(
            self._link,
            None,
            request_id=running.id,
            method="tools/call",
            name=running.tool,
            take=take,
            move=partial(pending.put_off, mark),
            position=running.position,
            retry=running.retry,
        )

    async def _go_on(self, running: Running, pending: PendingCall) -> None:
        call = self._call(running, pending)
        if running.position is None:
            pending.end(call.unknown("the client's process ended before the server had answered"))
        else:
            pending.end(await call.answer())

    async def _cancel(self, key: str) -> None:
        if key in self._memory.state.calls:
            params = {"requestId": key, "reason": "caller cancelled"}
            await self._tell({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})

    def _handed_out(self, key: str) -> None:
        """Only now may the call be forgotten: until its result is taken, another process could ask for it."""
        self._calls.pop(key, None)
        self._memory.end(key)
