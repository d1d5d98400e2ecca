"""From the SDK's client to the server: each message is sent by a task of its own, so that none waits for another.

**Ids.** The SDK's client counts its requests from 1 in every process. On the wire a request is called
`<start>-<run>.<number>`, where `start` counts the processes that used this state, and `run` is chance: so ids never
repeat within a session, not even where a state was copied or an older one was restored. The alternative, a reattach
(R10), would let the server tell the two lives apart; but then calls of before belong to another incarnation: they can
no longer be cancelled, their progress comes under other tokens, and servers other than Perdure know no such thing.
Here the session simply goes on, so the recorded result of `initialize` is given to the SDK's client, and nobody asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params, progress_token_from_params
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse, RequestId

from perdure._core.sticky import METHODS as STICKY
from perdure.client.call import Call
from perdure.client.incoming import encoded
from perdure.client.session import Handshaking
from perdure.remote.state import Running

if TYPE_CHECKING:
    from perdure.client.link import Link


class Outgoing:
    """The calls of this process, by the ids that the SDK's client knows."""

    def __init__(self, link: Link, handshaking: Handshaking) -> None:
        self._link = link
        self._handshaking = handshaking
        self._calls: dict[RequestId, Call] = {}

    async def run(self, outbox: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async for item in outbox:
            match item.message:
                case JSONRPCRequest(method="initialize"):
                    self._link.start(self._handshaking.initialize, item.message)
                case JSONRPCRequest():
                    self._request(item.message)
                case JSONRPCNotification(method="notifications/initialized"):
                    self._link.start(self._handshaking.initialized, item.message)
                case JSONRPCNotification(method="notifications/cancelled"):
                    self._cancel(item.message)
                case JSONRPCNotification():
                    self._link.start(self.tell, encoded(item.message))
                case JSONRPCResponse() | JSONRPCError():
                    self._link.start(self._reply, item.message)

    async def tell(self, body: dict[str, Any]) -> bool:
        await self._handshaking.is_ready.wait()
        return await self._link.teller.tell(body, self._link.handshake)

    def _request(self, message: JSONRPCRequest) -> None:
        wire_id = self._link.new_id()
        request = {**encoded(message), "id": wire_id}
        if progress_token_from_params(message.params) == message.id:
            # The SDK's client takes the id for the token: what it never repeats must not be repeated here.
            params = request["params"]
            request["params"] = {**params, "_meta": {**params["_meta"], "progressToken": wire_id}}
            self._link.incoming.tokens[wire_id] = message.id
        running = Running(id=wire_id, params=request.get("params") or {})
        call = Call(self._link, request, running)
        self._calls[message.id] = call
        if message.method == "tools/call":
            self._link.state.calls[wire_id] = running
            self._link.changed()
        self._link.start(self._follow, message, call)

    async def _follow(self, message: JSONRPCRequest, call: Call) -> None:
        with call.scope:
            await self._handshaking.is_ready.wait()
            answer = await call.answer()
            if isinstance(answer, JSONRPCResponse):
                self._stick(message)
            # Told, then forgotten: what nobody was there to take is for the next process.
            if await self._link.deliver(answer.model_copy(update={"id": message.id})):
                self._forget(message.id, call)
            self._link.listen_again()

    def _stick(self, message: JSONRPCRequest) -> None:
        if message.method in STICKY:
            self._link.state.stick(message.method, message.params or {})
            self._link.changed()

    def _forget(self, local_id: RequestId, call: Call) -> None:
        self._calls.pop(local_id, None)
        self._link.incoming.tokens.pop(call.running.id, None)
        if call.running.id in self._link.state.calls:
            self._link.state.end(call.running.id)
            self._link.changed()

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
        self._link.start(self.tell, body)

    async def _reply(self, message: JSONRPCResponse | JSONRPCError) -> None:
        await self.tell(encoded(message))
        if self._link.state.asks.pop(str(message.id), None) is not None:
            self._link.changed()
