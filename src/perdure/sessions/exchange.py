"""Passes messages between a session and its runtime, both ways: the boundary at which ids change.

Inwards, the client's request ids and progress tokens become numbers of the session; outwards they are put back, and
every message is appended to the stream where it belongs.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from perdure._core.codes import REQUEST_CANCELLED
from perdure._core.jsonrpc import Notification, Request, error_payload
from perdure._core.states import CallState, CallStep, SessionState
from perdure.log.stream import Stream
from perdure.runtime.base import CallEnded, Flow
from perdure.sessions.asks import Asks
from perdure.sessions.ledger import Call, Calls, unknown_outcome
from perdure.sessions.messages import encode_answer, encode_notification
from perdure.sessions.runtime_slot import RuntimeSlot
from perdure.store.base import Step
from perdure.telemetry import tracing as spans
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.sessions.session import Session


class Exchange:
    """One session's way to its runtime and back: the runtime's `Outlet`."""

    __slots__ = ("asks", "calls", "runtime", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.calls = Calls(session.context.work)
        self.asks = Asks(self)
        self.runtime = RuntimeSlot(self)

    @property
    def work(self) -> int:
        """Bytes of memory that messages take which are being handled, estimated."""
        return self.calls.size + self.runtime.notification_bytes

    # Inwards

    def start(self, call: Call, origin: object) -> None:
        """Hand a call to the runtime, in the context of the HTTP request that brought it (or of the principal's next
        one, or of none, where it runs again)."""
        if self.calls.is_cancelled(call):
            self.calls.runtime_done(call.number)
            self._answer_cancelled(call)
            return
        params = call.request.params
        if call.token is not None and params is not None:
            params = {**params, "_meta": {**params["_meta"], "progressToken": call.number}}
        request = Request(id=call.number, method=call.request.method, params=params, raw={})
        self.runtime.send(request, origin=origin)

    def start_again(
        self,
        request: Request,
        origin: object,
        *,
        incarnation: int,
        stream: Stream,
        attempt: int,
        progress: float | None,
        logged: Counter[bytes],
    ) -> None:
        """Hand a call of a dead node to the runtime; `progress` and `logged` say what its client has seen of it."""
        [call] = self.calls.open([request], incarnation=incarnation, stream=stream)
        call.attempt, call.progress, call.logged = attempt, progress, logged
        try:
            self.start(call, origin)
        except BaseException:
            self.calls.release((request,), incarnation=incarnation)
            self.calls.runtime_done(call.number)
            raise

    def pass_on(self, notification: Notification, origin: object, *, size: int = 0) -> None:
        """Pass on a notification of the client, which takes so many bytes of memory."""
        if notification.method == "notifications/initialized":
            if self.session.record.initialized:
                return  # of a reattach: the server has seen it
            self.session.keeper.update(initialized=True)
        self.runtime.send(notification, origin=origin, size=size)

    def cancel(self, request_id: int | str, *, incarnation: int, params: dict[str, Any]) -> bool:
        """Answer the call that is cancelled, and let the runtime know. Tells whether it runs on this node."""
        call = self.calls.running(request_id, incarnation=incarnation)
        if call is None:
            return self.calls.cancel_early(request_id, incarnation=incarnation)
        if call.request.method != "initialize":
            self._answer_cancelled(call)
            self._stop(call, params)
        return True

    def stop_calls(self, stream: Stream) -> None:
        """Another node has taken these calls over: the runtime shall stop them."""
        for call in self.calls.forget(stream):
            self._stop(call, {"reason": "taken over by another node"})

    def _stop(self, call: Call, params: dict[str, Any]) -> None:
        if self.runtime.is_loaded:
            stop = {**params, "requestId": call.number}
            self.runtime.send(Notification(method="notifications/cancelled", params=stop, raw={}), origin=None)

    def _answer_cancelled(self, call: Call) -> None:
        answer = error_payload(call.request.id, REQUEST_CANCELLED, "Request cancelled")
        if self.calls.answer(call, CallStep.CANCEL, answer):
            self.session.context.counters.calls_cancelled += 1

    # Outwards: the runtime's outlet

    @property
    def closes_early(self) -> bool:
        session = self.session
        return (
            bool(session.record.version)
            and session.keeper.revision.closes_early
            and not session.context.settings.json_response
        )

    def notify(self, method: str, params: dict[str, Any] | None, *, call: int | None) -> Flow | None:
        record = self.session.keeper.record
        if record.state is SessionState.ENDED:
            return None
        found = None if call is None else self.calls.numbered(call)
        if params is not None:
            if method == "notifications/progress" and isinstance(token := params.get("progressToken"), int):
                # A number of the session, which means nothing outside: drop it if its call has ended, or has no token.
                call, found = token, self.calls.numbered(token)
                if found is None or found.token is None or found.is_repeated(method, params):
                    return None
                # The client's token means something within one incarnation only.
                own = found.incarnation == record.incarnation
                params["progressToken"] = found.token if own else f"{found.incarnation}:{found.token}"
            elif method == "notifications/cancelled":
                params = self.asks.withdraw(params)
            elif found is not None and found.is_repeated(method, params):
                return None
        if found is None and call is not None:
            return None  # of a call that has ended, or of a repeated sticky request
        return self.append(found, encode_notification(method, params))

    def append(self, call: Call | None, payload: bytes, also: Step | None = None) -> Flow | None:
        """Append a message to the stream where it belongs, which is given back if it is written here.

        What belongs to a call goes to the call's stream, unless that has no reader and its client has come back without
        asking for it (R5); and a JSON body has room for the answer only.
        """
        if call is not None and call.state is not CallState.RUNNING:
            return None
        if call is None or self.goes_standalone(call):
            return self.session.home.send(payload, also)
        call.stream.append(payload, also=also)
        return call.stream

    def goes_standalone(self, call: Call) -> bool:
        """Whether what belongs to this call would find no reader on the call's own stream."""
        stream = call.stream
        return self.session.context.settings.json_response or (
            stream.reader is None and self.session.orphans.is_orphan(stream)
        )

    def new_ask_id(self) -> str:
        return self.asks.new_id()

    def ask(self, ask_id: str, method: str, params: dict[str, Any] | None, *, call: int | None) -> Flow | None:
        if self.session.state is SessionState.ENDED:
            return None
        found = None if call is None else self.calls.numbered(call)
        if call is not None and (found is None or found.state is not CallState.RUNNING):
            raise CallEnded  # a cancelled call that does not stop must not wait for an answer for ever
        return self.asks.ask(ask_id, method, params, found)

    def answer(self, call: int, body: bytes, *, failed: bool) -> Flow | None:
        found = self.calls.numbered(call)
        if found is None:
            self.runtime.answer_own(call, None if failed else body)
            return None
        self.calls.runtime_done(call)
        if found.state is not CallState.RUNNING:
            return None
        also = None if failed else self.session.record_change(found, body)
        self.calls.answer(found, CallStep.ANSWER, encode_answer(found.request.id, body, failed=failed), also)
        self.session.context.counters.calls_answered += 1
        return found.stream

    def interrupted(self, call: int) -> None:
        if (found := self.calls.numbered(call)) is None:
            self.runtime.answer_own(call, None)
            return
        self.calls.runtime_done(call)
        if found.state is CallState.RUNNING:  # otherwise it was cancelled, and has its answer
            self.answer_unknown(found, "its runtime failed")

    def handled(self, size: int) -> None:
        self.runtime.handled(size)

    def close_reader(self, call: int | None) -> None:
        found = None if call is None else self.calls.numbered(call)
        stream = self.session.standalone if call is None else None if found is None else found.stream
        if stream is not None and stream.reader is not None:
            stream.reader.stop_here()

    def failed(self, failure: BaseException | None) -> None:
        self.runtime.forget()
        name = self.session.name
        log_event(logging.ERROR, "runtime.failed", f"a session's runtime ended: {failure!r}", session=name)
        for call in self.calls.all_running():
            self.answer_unknown(call, "its runtime failed")
        self.calls.runtime_gone()

    # Answers that the runtime does not give

    def answer_recorded(self, call: Call) -> None:
        """Answer an `initialize` on a session that has had its handshake."""
        self.calls.runtime_done(call.number)
        self.calls.answer(call, CallStep.ANSWER, encode_answer(call.request.id, self.session.record.result))
        self.session.context.counters.calls_answered += 1

    def answer_unknown(self, call: Call, reason: str) -> None:
        """Say that a call was interrupted (promise 3)."""
        request = call.request
        payload = unknown_outcome(request.id, method=request.method, reason=reason, params=request.params)
        with spans.settle(self.session.name, call.stream.id, outcome="unknown"):
            if self.calls.answer(call, CallStep.SETTLE, payload):
                self.session.context.counters.calls_settled += 1

    def runtime_may_go(self, idle: float) -> bool:
        """Whether the runtime was not used for so long, and nothing would be lost with it."""
        return not self.asks.open and self.runtime.is_idle(idle)

    async def aclose(self, reason: str) -> None:
        """The session has ended: answer its running calls, and let the runtime go."""
        for call in self.calls.all_running():
            self.calls.answer(call, CallStep.CANCEL, error_payload(call.request.id, REQUEST_CANCELLED, reason))
        await self.runtime.drop()
