"""What a process of before has left: calls that run, and questions that it had not answered."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mcp_types import JSONRPCNotification, jsonrpc_message_adapter
from pydantic import ValidationError

from perdure.client.call import Call
from perdure.client.pending import PendingCall
from perdure.remote.state import Running

if TYPE_CHECKING:
    from perdure.client.link import Link


class Before:
    """The calls of before whose results nobody has taken yet."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._calls: dict[str, PendingCall] = {}

    @property
    def calls(self) -> list[PendingCall]:
        return list(self._calls.values())

    def recall(self) -> None:
        """List them, before the client can look."""
        for running in self._link.state.calls.values():
            self._list(running)

    async def revive(self) -> None:
        """Go on with the calls, then ask the open questions again."""
        state = self._link.state
        for pending in self.calls:
            self._link.start(self._go_on, state.calls[pending.id], pending)
        for key, ask in list(state.asks.items()):
            try:  # what was too large to be remembered, or nobody could have written, is no message
                message = jsonrpc_message_adapter.validate_python(ask.message, by_name=False)
            except ValidationError:
                del state.asks[key]
                continue
            await self._link.deliver(message)

    def lose(self, reason: str) -> None:
        """Their session is not the one that goes on."""
        for running in self._link.state.calls.values():
            self._list(running).end(self._call(running).unknown(reason))

    async def hear(self, call: str, message: JSONRPCNotification) -> None:
        """A notification on a call's stream."""
        if (pending := self._calls.get(call)) is not None:
            await pending.put(message)

    def close(self) -> None:
        for pending in self._calls.values():
            pending.close()

    def _list(self, running: Running) -> PendingCall:
        handshake = self._link.handshake
        self._calls[running.id] = PendingCall(
            running,
            version="" if handshake is None else handshake.version,
            handed_out=partial(self._handed_out, running.id),
            cancel=partial(self._cancel, running.id),
        )
        return self._calls[running.id]

    def _call(self, running: Running) -> Call:
        request = {"jsonrpc": "2.0", "id": running.id, "method": "tools/call", "params": running.params}
        return Call(self._link, request, running)

    async def _go_on(self, running: Running, pending: PendingCall) -> None:
        call = self._call(running)
        if running.position is None:
            pending.end(call.unknown("the client's process ended before the server had answered"))
        else:
            call.mark = partial(pending.put_off, call.mark)
            pending.end(await call.answer())

    async def _cancel(self, key: str) -> None:
        if key in self._link.state.calls:
            params = {"requestId": key, "reason": "caller cancelled"}
            await self._link.tell({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})

    def _handed_out(self, key: str) -> None:
        """Only now may the call be forgotten: until its result is taken, another process could ask for it."""
        self._calls.pop(key, None)
        if key in self._link.state.calls:
            self._link.state.end(key)
            self._link.changed()
