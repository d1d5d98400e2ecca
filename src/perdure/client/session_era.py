"""The era with sessions connects the SDK's client with a link.

**Ids.** The SDK's client counts its requests from 1 in every process. On the wire a request is called
`<start>-<run>.<number>`, where `start` counts the processes that used this state, and `run` is chance: so ids never
repeat within a session, not even where a state was copied or an older one was restored. The alternative, a reattach
(R10), would let the server tell the two lives apart; but then calls of earlier processes belong to another incarnation:
they can no longer be cancelled, their progress comes under other tokens, and servers other than Perdure know no such
thing. Here the session simply goes on, so the recorded result of `initialize` is given to the SDK's client, and the
server is not asked.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import anyio
import mcp_types as types
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import progress_token_from_params
from mcp_types import JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import ValidationError

from perdure._core.early_answers import as_resuming
from perdure._core.envelope import KEY
from perdure._core.losses import Gap
from perdure._core.sticky import METHODS as STICKY
from perdure.client.incoming import Incoming, answer_of, encoded
from perdure.client.memory import Running
from perdure.client.pending import PendingCall
from perdure.client.transport import Answer, Exchange
from perdure.remote.call import Call, OutgoingRequest, Sender, failure_answer, params_body, unknown
from perdure.remote.durable_calls import Offers, may_run_twice, new_key, offers_in
from perdure.remote.endpoint import Handshake, Refused, Unavailable
from perdure.remote.link import Link
from perdure.remote.message import encode
from perdure.remote.route import Route
from perdure.telemetry.log_records import log_event

#: Seconds that a session waits for its standalone stream. Some servers answer a GET only with their first event.
LISTENING_SECONDS = 1.0


class SessionEra:
    """One client's session at one server. It is the link's program.

    `session` returns the SDK's. `reruns`: a call whose outcome is unknown is sent again where its tool says that it may
    run twice.
    """

    def __init__(
        self,
        incoming: Incoming,
        route: Route,
        *,
        session: Callable[[], ClientSession],
        reruns: bool,
        ends_session: bool,
    ) -> None:
        self.earlier: list[PendingCall] = []
        self.incoming = incoming
        self._memory = incoming.memory
        self._session = session
        self._reruns = reruns
        self._ends_session = ends_session
        self._link = Link(route, self, listening_seconds=LISTENING_SECONDS)
        self._sender = Sender(self._link)
        self.take = self.incoming.take
        self.running = self._link.running
        self.start = self._link.start
        incoming.refuse = lambda reply: self.start(self.send, reply)
        self.flush = self._sender.idle
        self._is_ready = anyio.Event()
        """The first handshake is through: nothing else may be sent before."""

    @property
    def handshake(self) -> Handshake | None:
        return self._memory.state.handshake

    @property
    def session_id(self) -> str | None:
        return None if self.handshake is None else self.handshake.session or None

    async def leave(self) -> None:
        if not self._ends_session or self.handshake is None:
            return
        try:
            if self.handshake.session:
                await self._link.route.endpoint.delete(self.handshake)
        except Exception as failure:  # any error: the client leaves
            sentence = f"the server was not notified that the session has ended: {failure}"
            log_event(logging.INFO, "client.not_deleted", sentence)
        self._memory.state.forget_session()

    def tell(self, message: JSONRPCNotification | Answer) -> None:
        if isinstance(message, JSONRPCNotification) and message.method == "notifications/initialized":
            self.start(self._initialized, message)
        else:
            self.start(self.send, encoded(message))

    # Handshakes

    async def _initialize(self, message: JSONRPCRequest) -> Answer:
        """Begin with the recorded session, if it can be used, or with a new one."""
        state, params = self._memory.state, dict(message.params or {})
        if (recorded := state.handshake) is not None:
            # Before the program can ask for them.
            self.earlier = [self._pending_call(running, recorded.version) for running in state.calls.values()]
            if (trouble := _why_not(recorded, params)) is None:
                self._link.handshake = recorded
                return JSONRPCResponse(jsonrpc="2.0", id=message.id, result=recorded.result)
            for call in self.earlier:
                call.end(unknown(call.id, "tools/call", call.tool, f"its session could not be continued: {trouble}"))
        state.forget_session()
        try:
            begun = await self._link.begin(
                json.dumps({**encoded(message), "params": as_resuming(params)}), self._link.route.new_id()
            )
            found, session = begun.answer, begun.session
        except (Unavailable, Refused) as failure:
            found = failure_answer("0", failure)
        answer = answer_of(found, message.id)
        if isinstance(answer, JSONRPCResponse):
            made = Handshake(session=session, request=params, result=dict(answer.result))
            state.handshake = self._link.handshake = made
            self._memory.changed()
        return answer

    async def _initialized(self, message: JSONRPCNotification) -> None:
        """Finish the handshake. In a recorded session, continue its calls and ask its open questions again."""
        state, handshake = self._memory.state, self.handshake
        is_new = handshake is not None and not handshake.initialized
        if handshake is not None and is_new:
            body = encode(encoded(message)).encode()
            handshake.initialized = await self._sender.send(body, may_renew=False)
            self._memory.changed()
        if handshake is not None and handshake.session:
            await self._link.listen(position=state.position, retry=state.retry, is_new=is_new)
        self._is_ready.set()
        if is_new:
            return
        for call in self.earlier:
            self.start(call.follow, self._continued(call, state.calls[call.id]).answer)
        for key, ask in list(state.asks.items()):
            try:
                question = types.jsonrpc_message_adapter.validate_python(ask.message, by_name=False)
            except ValidationError:  # it was too large to be remembered, or the state was changed by hand
                del state.asks[key]
                continue
            await self.incoming.deliver(question)

    def _is_keyed(self, running: Running) -> bool:
        """Whether the server knows a call by its key, if it comes again."""
        key, offers = (running.params.get("_meta") or {}).get(KEY), _offers(self.handshake)
        return isinstance(key, str) and offers.keys and time.time() - running.began < offers.kept_seconds

    def _pending_call(self, running: Running, version: str) -> PendingCall:
        async def cancel() -> None:
            if running.id in self._memory.state.calls:
                params = {"requestId": running.id, "reason": "caller cancelled"}
                await self.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})

        return PendingCall(
            running,
            version,
            forget=lambda: self._memory.soon(partial(self._memory.end, running.id)),
            cancel=cancel,
            pass_on=lambda message: self.incoming.take(message, running.id, running.tool or None),
        )

    def _continued(self, call: PendingCall, running: Running) -> Call:
        """A call of an earlier process, which is read on."""

        def move(position: str | None, retry: int | None) -> None:
            def mark() -> None:
                running.moved(position, retry)
                self._memory.moved()

            call.when_seen(mark)

        is_keyed = self._is_keyed(running)
        body = params_body("tools/call", running.params) if is_keyed else None
        return Call(
            self._link.route,
            OutgoingRequest(method="tools/call", name=call.tool, body=body, is_keyed=is_keyed),
            link=self._link,
            # The server may still have the request under its first id, and ids never repeat within a session.
            request_id=call.id if running.position or not is_keyed else self._link.route.new_id(),
            take=call.take,
            move=move,
            position=running.position,
            retry=running.retry,
            may_have_arrived=running.position is None,
        )

    # Requests

    def exchange(self, message: JSONRPCRequest, headers: Mapping[str, str]) -> Exchange:
        if message.method == "initialize":
            return Exchange(run=partial(self._initialize, message))
        wire_id = self._link.route.new_id()
        request = encoded(message)
        if progress_token_from_params(message.params) == message.id:
            # The SDK's client takes the id for the token: what it never repeats must not be repeated here.
            params = request["params"]
            request["params"] = {**params, "_meta": {**params["_meta"], "progressToken": wire_id}}
            self.incoming.tokens[wire_id] = message.id
        is_tool = message.method == "tools/call"
        if is_tool and _offers(self.handshake).keys:
            params = request.get("params") or {}
            request["params"] = {**params, "_meta": {KEY: new_key(), **(params.get("_meta") or {})}}
        running = Running(id=wire_id, params=request.get("params") or {}, began=time.time())
        is_keyed = is_tool and self._is_keyed(running)

        def move(position: str | None, retry: int | None) -> None:
            # Without a position the next process could not continue the call.
            note = self._memory.changed if running.position is None else self._memory.moved
            running.moved(position, retry)
            if is_tool:
                note()

        may_run_again = partial(may_run_twice, running.tool, self._tool_page) if is_tool and self._reruns else None

        token = wire_id

        def body(request_id: str) -> bytes:
            nonlocal token
            if request_id != token and self.incoming.tokens.pop(token, None) is not None:
                # As at 2026-07-28: what the server reports of an earlier attempt is not shown beside this one.
                request["params"]["_meta"]["progressToken"] = token = request_id
                self.incoming.tokens[token] = message.id
            return encode({**request, "id": request_id}).encode()

        call = Call(
            self._link.route,
            OutgoingRequest(
                method=message.method, name=running.tool, body=body, is_keyed=is_keyed, may_run_again=may_run_again
            ),
            link=self._link,
            request_id=wire_id,
            take=lambda found: self.incoming.take(found, wire_id, running.tool or None),
            move=move,
        )
        if is_tool:
            self._memory.state.calls[wire_id] = running
            self._memory.changed()

        def cancel(notification: JSONRPCNotification) -> None:
            """Cancel the call under the id that the server knows."""
            self.incoming.tokens.pop(token, None)
            self._memory.end(wire_id)
            said = encoded(notification)
            self.start(self.send, {**said, "params": {**said["params"], "requestId": call.id}})

        async def answer() -> Answer:
            try:
                await self._is_ready.wait()
                answer = answer_of(await call.answer(), message.id)
            finally:
                self.incoming.tokens.pop(token, None)
            if isinstance(answer, JSONRPCResponse) and message.method in STICKY:
                self._memory.state.stick(message.method, message.params or {})
                self._memory.changed()
            self.start(self._link.listen_again)
            return answer

        return Exchange(run=answer, forget=partial(self._memory.end, wire_id), cancel=cancel)

    async def _tool_page(self, cursor: str | None) -> Mapping[str, Any]:
        params = types.PaginatedRequestParams(cursor=cursor)
        try:
            return (await self._session().list_tools(params=params)).model_dump(by_alias=True, mode="json")
        except MCPError:
            return {}  # then it cannot be found out

    async def send(self, body: dict[str, Any]) -> None:
        await self._is_ready.wait()
        is_reply = "method" not in body
        await self._sender.send(encode(body).encode(), is_reply=is_reply)
        if is_reply:
            self._memory.answered(body["id"])

    # The program of the link

    def move(self, position: str | None, retry: int | None) -> None:
        self._memory.state.moved(position, retry)
        self._memory.moved()

    async def lose_position(self) -> None:
        """Notify the program that it may have missed events."""
        await self.incoming.gap(Gap(stream="", first=None, last=None, reason="the server refused the position"))

    async def replace(self, gone: Handshake) -> Handshake:
        text = encode({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": as_resuming(gone.request)})
        made = await self._link.begin_again(text, gone)
        if _read(made) is None:
            raise Refused("not_mcp", "the handshake cannot be read, or is of an unknown revision")
        await self._link.bring_up(made, self._memory.state.sticky)
        return made

    async def on_replaced(self, handshake: Handshake) -> None:
        self._memory.state.replace_session(handshake)
        self._memory.changed()
        if (result := _read(handshake)) is not None:
            # Another session may be another server's: what was negotiated is that of the new one.
            self._session().adopt(result)

    def fail(self, error: Exception) -> None:
        raise error


def _why_not(recorded: Handshake, request: dict[str, Any]) -> str | None:
    """Why a recorded session cannot be used; None if it can."""
    if not recorded.session:
        return "the server has no sessions"
    if not recorded.initialized:
        return "its handshake was not finished"
    # The server holds both sides to these two.
    if any(recorded.request.get(key) != request.get(key) for key in ("protocolVersion", "capabilities")):
        return "the client now has other capabilities"
    return None if _read(recorded) is not None else "its handshake cannot be read"


def _offers(handshake: Handshake | None) -> Offers:
    return Offers() if handshake is None else offers_in(handshake.result, "experimental")


def _read(handshake: Handshake) -> types.InitializeResult | None:
    """What the server agreed to, if the SDK's client can take it."""
    try:
        result = types.InitializeResult.model_validate(handshake.result, by_name=False)
    except ValidationError:
        return None
    return result if result.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS else None
