"""The era without sessions (2026-07-28) connects the SDK's client with `remote`: each request stands alone.

**A slow beginning.** The SDK's client waits ten seconds for `server/discover` and then tries `initialize`, but a person
may have to log in first. So `initialize` is answered when `server/discover` is: that the server speaks 2026-07-28. The
SDK's client then asks for `server/discover` once more, and has the answer at once.

**Rounds.** A server may answer a call with questions (`input_required`), and the SDK's client sends it again with the
answers. All rounds of one call have its key, and the call stays on disk between them.

**A call that is given up** stays on disk until a server has taken its cancel: this process may end before.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import anyio
import anyio.abc
import mcp_types as types
from mcp.client.session import ClientRequestContext, ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    PROTOCOL_VERSION_META_KEY,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)
from pydantic import TypeAdapter, ValidationError

from perdure._core.codes import INTERNAL_ERROR, UNREACHABLE, UNSUPPORTED_VERSION
from perdure._core.envelope import DISCOVER, KEY, LISTEN
from perdure.client.incoming import Incoming, answer_of, encoded
from perdure.client.pending import PendingCall
from perdure.client.transport import Answer, Exchange
from perdure.remote.call import Call, OutgoingRequest, params_body
from perdure.remote.durable_calls import (
    PROGRESS,
    CallHandlers,
    DurableCall,
    DurableCalls,
    is_round,
    new_key,
    offers_in,
)
from perdure.remote.message import Message, encode, message_of
from perdure.remote.route import Route
from perdure.remote.stream import Take
from perdure.remote.task_follower import QuestionRefused

_QUESTION: TypeAdapter[types.InputRequest] = TypeAdapter(types.InputRequest)


class ModernEra:
    """One client's requests to one server. `session` returns the SDK's; `reruns` is that of `DurableCalls`."""

    def __init__(
        self,
        incoming: Incoming,
        route: Route,
        *,
        session: Callable[[], ClientSession],
        reruns: bool,
    ) -> None:
        self.earlier: list[PendingCall] = []
        self.incoming = incoming
        self._memory = incoming.memory
        self._session = session
        self._calls = DurableCalls(route, self.start, reruns=reruns)
        self.flush = self._calls.flush
        self._group: anyio.abc.TaskGroup
        self._between_rounds: set[str] = set()
        """Calls whose last answer was a question. They end if their caller gives up (`rounds`)."""
        self._has_discovered = anyio.Event()
        self._refusal: JSONRPCError | None = None
        """Why `server/discover` failed."""
        self._unheard: dict[str, Any] | None = None
        """The result of `server/discover`, if it came too late for the SDK's client."""

    session_id: str | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[anyio.CancelScope]:
        async with anyio.create_task_group() as self._group:
            yield self._group.cancel_scope

    def start(self, task: Callable[..., Coroutine[Any, Any, object]], *arguments: object) -> None:
        self._group.start_soon(task, *arguments)

    async def leave(self) -> None:
        return None

    def tell(self, message: JSONRPCNotification | Answer) -> None:
        """Do nothing: the revision has no such message."""

    def begin(self) -> None:
        """Continue the calls of earlier processes, and cancel those that were given up. The client is ready."""
        for call in self._memory.state.durable_calls.values():
            if call.is_given_up:
                self._calls.send_cancel(call, partial(self._memory.end_durable, call))
                continue
            pending = PendingCall(
                call,
                str(call.params.get("_meta", {}).get(PROTOCOL_VERSION_META_KEY, "")),
                forget=partial(self._memory.soon, partial(self._memory.end_durable, call)),
                cancel=partial(self._calls.cancel, call),
                pass_on=self._take,
            )
            self.earlier.append(pending)
            # No request of this process has the call's id as its token.
            caller = self._caller(call.id, pending.take)
            self.start(pending.follow, partial(self._calls.answer_earlier, call, caller))

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
        except BaseException as error:
            call = self._memory.state.durable_calls.get(keyed[KEY])
            has_left = isinstance(error, MCPError) and error.code == CONNECTION_CLOSED
            if call is not None and call.id in self._between_rounds and not has_left:
                self._give_up(call)
            raise

    # Requests

    def exchange(self, message: JSONRPCRequest, headers: Mapping[str, str]) -> Exchange:
        async def answer(found: Awaitable[Message]) -> Answer:
            return answer_of(await found, message.id)

        match message.method:
            case "initialize":
                return Exchange(run=partial(self._refuse_handshake, message.id))
            case "tools/call":
                return self._call(message, headers)
            case method if method == LISTEN:
                sent = self._as_sent(message, headers)
                return Exchange(run=lambda: answer(self._calls.listen(sent, encode(message.id), self._take)))
            case method if method == DISCOVER:
                return Exchange(run=partial(self._discover, message, headers))
        return Exchange(run=lambda: answer(self._read(message, headers)))

    async def _refuse_handshake(self, request_id: RequestId) -> JSONRPCError:
        """Answer the SDK's client where it would begin a session."""
        with anyio.move_on_after(self._calls.route.limits.handshake_seconds):
            await self._has_discovered.wait()
        found = types.ErrorData(code=UNSUPPORTED_VERSION, message="The server does not speak 2026-07-28")
        if self._refusal is not None:
            found = self._refusal.error
        elif self._has_discovered.is_set() and self._memory.state.discovered is not None:
            self._unheard = self._memory.state.discovered
            found.data = {"supported": self._unheard.get("supportedVersions"), "requested": "2025-11-25"}
        return JSONRPCError(jsonrpc="2.0", id=request_id, error=found)

    @staticmethod
    def _as_sent(message: JSONRPCRequest, headers: Mapping[str, str], *, is_first: bool = False) -> OutgoingRequest:
        params = encoded(message).get("params") or {}
        body = params_body(message.method, {"_meta": {}, **params})
        return OutgoingRequest(method=message.method, body=body, headers=headers, is_first=is_first)

    async def _read(self, message: JSONRPCRequest, headers: Mapping[str, str], *, is_first: bool = False) -> Message:
        request = self._as_sent(message, headers, is_first=is_first)
        return await Call(self._calls.route, request, take=partial(self._take, token=message.id)).answer()

    async def _discover(self, message: JSONRPCRequest, headers: Mapping[str, str]) -> Answer:
        state = self._memory.state
        if self._unheard is not None:
            answer: Answer = JSONRPCResponse(jsonrpc="2.0", id=message.id, result=self._unheard)
            self._unheard = None
        else:
            has_patience = self._calls.route.limits.handshake.max_time > 0
            is_first = not self._has_discovered.is_set() and not has_patience
            answer = answer_of(await self._read(message, headers, is_first=is_first), message.id)
        self._has_discovered.set()
        if isinstance(answer, JSONRPCError):
            if answer.error.code != UNREACHABLE or state.discovered is None:
                self._refusal = answer
                return answer
            # The server answered before, and requests wait for it, as they do in a recorded session.
            answer = JSONRPCResponse(jsonrpc="2.0", id=message.id, result=state.discovered)
        self._calls.offers = offers_in(answer.result)
        if answer.result != state.discovered:
            state.discovered = dict(answer.result)
            self._memory.changed()
        return answer

    def _call(self, message: JSONRPCRequest, headers: Mapping[str, str]) -> Exchange:
        """The call of a tool. It is on disk before it is sent."""
        params = encoded(message).get("params") or {}
        meta = dict(params.get("_meta") or {})
        is_given = isinstance(meta.get(KEY), str)
        if self._calls.has_keys and not is_given and "requestState" not in params:
            meta[KEY] = new_key()  # of a program that uses `client.session`
        key = meta.get(KEY) if self._calls.has_keys and isinstance(meta.get(KEY), str) else None
        call = DurableCall(
            id=key or self._calls.route.new_id(),
            params={**params, "_meta": meta},
            headers=dict(headers),
            key=key,
            began=time.time(),
        )
        self._between_rounds.discard(call.id)
        self._memory.state.durable_calls[call.id] = call
        self._memory.changed()

        async def run() -> Answer:
            found = await self._calls.answer(call, self._caller(message.id, partial(self._take, token=message.id)))
            # Rounds of `call_tool` have one key (`rounds`); the others are calls of their own.
            if key is not None and is_given and is_round(found):
                self._between_rounds.add(call.id)
            return answer_of(found, message.id)

        def forget() -> None:
            if call.id not in self._between_rounds:
                self._memory.end_durable(call)

        return Exchange(run=run, forget=forget, cancel=lambda _: self._give_up(call))

    def _caller(self, token: RequestId, take: Take) -> CallHandlers:
        """`token` is the progress token by which the SDK's client knows the call."""

        async def on_progress(params: dict[str, Any]) -> None:
            await take(message_of(method=PROGRESS, params={"progressToken": token, **params}))

        return CallHandlers(
            take=take, on_progress=on_progress, on_changed=self._memory.changed, put_question=self._put_to_user
        )

    async def _put_to_user(self, key: str, question: object) -> dict[str, Any]:
        """The user's answer to a question as it came, as it is sent. Raises `QuestionRefused`."""
        try:
            asked = _QUESTION.validate_python(question, by_name=False)
            meta = asked.params.meta if asked.params else None
            context = ClientRequestContext(session=self._session(), request_id=key, meta=meta)
            found = await self._session().dispatch_input_request(context, asked)
        except ValidationError as invalid:
            sentence = f"The question cannot be read: {invalid.error_count()} errors"
            found = types.ErrorData(code=INTERNAL_ERROR, message=sentence)
        except Exception as failure:  # of the user's callback: it costs this call alone
            found = types.ErrorData(code=INTERNAL_ERROR, message=f"{type(failure).__name__}: {failure}")
        encoded_answer = found.model_dump(by_alias=True, mode="json", exclude_none=True)
        if isinstance(found, types.ErrorData):
            raise QuestionRefused(encoded_answer)
        return encoded_answer

    def _give_up(self, call: DurableCall) -> None:
        """Cancel a call in the background, and forget it once a server knows."""
        self._between_rounds.discard(call.id)
        call.is_given_up = True
        self._memory.changed()
        self._calls.send_cancel(call, partial(self._memory.end_durable, call))

    async def _take(self, message: Message, token: RequestId | None = None) -> None:
        """A notification on the response to a request. Servers send no requests in this revision."""
        if token is not None and message.method == PROGRESS:
            message = message.with_token(encode(token))
        if not message.is_request:
            await self.incoming.take(message)
