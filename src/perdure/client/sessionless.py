"""The transport without sessions (2026-07-28) connects the SDK's client with exchanges: each request is its own.

**What is sent again.** Reads, and the requests of tasks, always. A tool's call with a key, where the server says in
`server/discover` that it knows keys (`dev.perdure/calls`): the server runs it once, however often it comes. A call
without a key, where its tool says that it may run twice. Any other call whose connection is lost has an unknown
outcome.

**A slow beginning.** The SDK's client waits ten seconds for `server/discover` and then tries `initialize`, but a person
may have to log in first. So `initialize` is answered when `server/discover` is: that the server speaks 2026-07-28. The
SDK's client then asks for `server/discover` once more, and has the answer at once.

**Rounds.** A server may answer a call with questions (`input_required`), and the SDK's client sends it again with the
answers. All rounds of one call have its key, and the call stays on disk between them.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import anyio
import anyio.abc
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    PROTOCOL_VERSION_META_KEY,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)

from perdure._core.codes import UNREACHABLE, UNSUPPORTED_VERSION
from perdure._core.delivery import DISCOVER, LISTEN
from perdure._core.extension import CALLS, KEY
from perdure.client.handover import Handover, Handovers
from perdure.client.incoming import CallbackLimit, Incoming, OnGap, answer_of, encoded
from perdure.client.listening import Listening
from perdure.client.memory import Memory, SingleCall
from perdure.client.pending import PendingCall
from perdure.client.requests import Requests
from perdure.client.single_calls import DurableCalls, is_round, new_key
from perdure.client.task import Asked
from perdure.remote.endpoint import Endpoint
from perdure.remote.message import Message, encode, messages_in
from perdure.remote.stream import Limits

#: Seconds for leaving: a server that does not answer does not keep the program from ending.
LEAVING_SECONDS = 5.0

Inbound = MemoryObjectReceiveStream[SessionMessage | Exception]
Outbound = MemoryObjectSendStream[SessionMessage]


class SessionlessTransport:
    """One client's requests to one server. `asked` and `reruns` are those of its `DurableCalls`."""

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        memory: Memory,
        *,
        callback_limit: CallbackLimit,
        on_gap: OnGap | None,
        asked: Asked,
        reruns: bool,
    ) -> None:
        self._memory = memory
        self.handovers = Handovers(memory)
        self._incoming = Incoming(memory, callback_limit, on_gap, lambda reply: None)
        self._requests = Requests(endpoint, limits, memory.state.start, self._incoming.tokens, self._incoming.deliver)
        self._calls = DurableCalls(memory, self._requests, asked, reruns=reruns)
        self._group: anyio.abc.TaskGroup | None = None
        self._underway: dict[RequestId, tuple[anyio.CancelScope, SingleCall | None]] = {}
        """The requests of the SDK's client, by the ids that it knows."""
        self._between_rounds: set[str] = set()
        """Calls whose last answer was a question. They are over when their caller gives up (`rounds`)."""
        self._farewells: set[anyio.Event] = set()
        """Cancellations that are on their way."""
        self._has_discovered = anyio.Event()
        self._refusal: JSONRPCError | None = None
        """Why `server/discover` failed."""
        self._unheard: dict[str, Any] | None = None
        """The result of `server/discover`, if it came too late for the SDK's client."""
        self._earlier: list[PendingCall] = []

    session_id: str | None = None
    """There are no sessions."""

    @property
    def pending(self) -> list[PendingCall]:
        return [call for call in self._earlier if not call.is_taken]

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Inbound, Outbound]]:
        """What the SDK's client reads and writes (its `Transport`)."""
        outbound, outbox = anyio.create_memory_object_stream[SessionMessage](0)
        inbox, inbound = self._incoming.inbox, self._incoming.inbound
        async with inbox, inbound, outbound, outbox, anyio.create_task_group() as self._group:
            self._start(self._run, outbox)
            try:
                yield inbound, outbound
            finally:
                with anyio.move_on_after(LEAVING_SECONDS, shield=True):
                    while self._farewells:
                        await next(iter(self._farewells)).wait()
                self._group.cancel_scope.cancel()
                for call in self.pending:
                    call.close()

    def begin(self) -> None:
        """The client is ready: calls of earlier processes go on."""
        for call in self._memory.state.single_calls.values():
            pending = PendingCall(
                call,
                str(call.params.get("_meta", {}).get(PROTOCOL_VERSION_META_KEY, "")),
                forget=partial(self._memory.soon, partial(self._memory.end_single, call)),
                cancel=partial(self._calls.cancel, call),
                pass_on=self._take,
            )
            self._earlier.append(pending)
            self._start(self._go_on, pending, call)

    async def _go_on(self, pending: PendingCall, call: SingleCall) -> None:
        pending.end(await self._calls.answer_earlier(call, pending.take))

    @contextmanager
    def rounds(self, meta: types.RequestParamsMeta | None) -> Iterator[types.RequestParamsMeta | None]:
        """The `meta` of all rounds of a call, with one key, if the server knows keys.

        A caller that gives up while it is asked, between two rounds, sends no message that says so: it is noticed here.
        """
        if not self._calls.has_keys:
            yield meta
            return
        keyed: dict[str, Any] = {KEY: new_key(), **(meta or {})}
        try:
            yield cast("types.RequestParamsMeta", keyed)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                self._abandon(keyed[KEY])
            raise
        except BaseException:
            self._abandon(keyed[KEY])
            raise

    def _abandon(self, key: str) -> None:
        call = self._memory.state.single_calls.get(key)
        if call is not None and key in self._between_rounds:
            self._part_with(call)

    # From the SDK's client to the server

    async def _run(self, outbox: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async for item in outbox:
            message = item.message
            headers = item.metadata.headers if isinstance(item.metadata, ClientMessageMetadata) else None
            match message:
                case JSONRPCRequest(method="initialize"):
                    self._start(self._refuse_handshake, message.id)
                case JSONRPCRequest():
                    self._request(message, headers or {})
                case JSONRPCNotification(method="notifications/cancelled"):
                    self._cancel(cancelled_request_id_from_params(message.params))
                case _:
                    pass  # the revision has nothing else that a client sends

    async def _refuse_handshake(self, request_id: RequestId) -> None:
        """Answer the SDK's client where it would begin a session."""
        with anyio.move_on_after(self._requests.limits.handshake_seconds):
            await self._has_discovered.wait()
        found = types.ErrorData(code=UNSUPPORTED_VERSION, message="The server does not speak 2026-07-28")
        if self._refusal is not None:
            found = self._refusal.error
        elif self._has_discovered.is_set() and self._memory.state.discovered is not None:
            self._unheard = self._memory.state.discovered
            found.data = {"supported": self._unheard.get("supportedVersions"), "requested": "2025-11-25"}
        await self._incoming.deliver(JSONRPCError(jsonrpc="2.0", id=request_id, error=found))

    def _request(self, message: JSONRPCRequest, headers: Mapping[str, str]) -> None:
        message, handover = self.handovers.of(message)
        scope, call = anyio.CancelScope(), None
        run: Callable[[], Awaitable[Message]] = partial(self._read, message, headers)
        if message.method == "tools/call":
            call, is_chosen = self._calls.remember(message, headers)
            self._between_rounds.discard(call.id)
            run = partial(self._call, message.id, call, is_chosen)
        elif message.method == LISTEN:
            run = Listening(message, headers, self._requests, self._take).end
        self._underway[message.id] = (scope, call)
        self._start(self._follow, message, scope, run, handover)

    async def _follow(
        self,
        message: JSONRPCRequest,
        scope: anyio.CancelScope,
        run: Callable[[], Awaitable[Message]],
        handover: Handover | None,
    ) -> None:
        with scope:
            found = answer_of(await run(), message.id)
            if message.method == DISCOVER:
                found = self._discovered(found)
            # Delivered, then forgotten: what the SDK's client was not there to take is for the next process.
            if await self._incoming.deliver(found if handover is None else handover.masked(found)):
                _, call = self._underway.pop(message.id, (scope, None))
                if call is not None and call.id not in self._between_rounds:
                    self.handovers.delivered(handover, partial(self._memory.end_single, call))

    async def _read(self, message: JSONRPCRequest, headers: Mapping[str, str]) -> Message:
        has_patience = self._requests.limits.handshake.max_time > 0
        is_first = message.method == DISCOVER and not self._has_discovered.is_set() and not has_patience
        whole = encoded(message)
        if message.method == DISCOVER and self._unheard is not None:
            found, self._unheard = self._unheard, None
            return messages_in(encode({"jsonrpc": "2.0", "id": message.id, "result": found}))[0]
        return await self._requests.send(whole, self._take, local_id=message.id, headers=headers, is_first=is_first)

    async def _call(self, local_id: RequestId, call: SingleCall, is_chosen: bool) -> Message:
        found = await self._calls.answer(call, self._take, local_id=local_id)
        if is_chosen and is_round(found):
            self._between_rounds.add(call.id)
        return found

    def _discovered(self, answer: JSONRPCResponse | JSONRPCError) -> JSONRPCResponse | JSONRPCError:
        state = self._memory.state
        self._has_discovered.set()
        if isinstance(answer, JSONRPCError):
            if answer.error.code != UNREACHABLE or state.discovered is None:
                self._refusal = answer
                return answer
            # The server was there, and requests wait for it, as they do in a session that goes on.
            answer = JSONRPCResponse(jsonrpc="2.0", id=answer.id or 0, result=state.discovered)
        found = answer.result.get("capabilities")
        extensions = found.get("extensions") if isinstance(found, Mapping) else None
        known = extensions.get(CALLS) if isinstance(extensions, Mapping) else None
        self._calls.extension = known if isinstance(known, Mapping) else None
        if answer.result != state.discovered:
            state.discovered = dict(answer.result)
            self._memory.changed()
        return answer

    def _cancel(self, local_id: RequestId | None) -> None:
        """The answer is no longer wanted."""
        if local_id is None or local_id not in self._underway:
            return
        scope, call = self._underway.pop(local_id)
        scope.cancel()
        if call is not None:
            self._part_with(call)

    def _part_with(self, call: SingleCall) -> None:
        """Forget a call, and tell the server in the background."""
        self._between_rounds.discard(call.id)
        self._memory.end_single(call)
        self._farewells.add(over := anyio.Event())
        self._start(self._say_goodbye, call, over)

    async def _say_goodbye(self, call: SingleCall, over: anyio.Event) -> None:
        try:
            await self._calls.cancel(call)
        finally:
            self._farewells.discard(over)
            over.set()

    async def _take(self, message: Message) -> None:
        """A notification on the response to a request. Servers send no requests in this revision."""
        if not message.is_request:
            await self._incoming.take(message)

    def _start(self, task: Callable[..., Coroutine[Any, Any, object]], *args: object) -> None:
        assert self._group is not None
        self._group.start_soon(task, *args)
