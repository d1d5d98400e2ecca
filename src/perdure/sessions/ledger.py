"""Keeps the requests of one session that this process has accepted: each ends in exactly one answer (promise 3).

A call is known by two names: the client's request id, which may repeat as soon as the call has ended and in each
incarnation, and a number of the session, under which the runtime knows it. The number stays in the table until the
runtime is through with the call, also when it was answered long before (a cancelled tool that does not stop): what it
still sends is dropped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from perdure._core.codes import OUTCOME_UNKNOWN
from perdure._core.ids import Kind, new_stream_id
from perdure._core.jsonrpc import Request, coerce_id, error_payload
from perdure._core.limits import Work
from perdure._core.states import CALL, CallState, CallStep, SessionState, advance
from perdure.errors import IdTaken, SessionEnded
from perdure.log.stream import Stream
from perdure.sessions.messages import encode
from perdure.store.base import CallEnd, CallRecord, DropStream, OpenStream, Step, StreamRecord

if TYPE_CHECKING:
    from perdure.sessions.session import Session

LOG_MESSAGE = "notifications/message"

Key = tuple[int, int | str]
"""An incarnation, and a request id in the form in which ids are compared."""


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """One accepted request."""

    number: int
    request: Request
    token: int | str | None
    """The progress token that the client gave."""
    incarnation: int
    stream: Stream
    size: int = 0
    """Bytes of memory that it takes while the runtime has it, estimated."""
    state: CallState = CallState.RUNNING
    attempt: int = 1
    progress: float | None = None
    """Of a call that runs again: what was sent before. Only what is greater is sent."""
    logged: Counter[bytes] | None = None
    """Of a call that runs again: the log messages that were sent before (`log_key`). Each is dropped once."""
    told_at: int = 0
    """When its client was told that it is an orphan, as an arrival number of the hub."""

    @property
    def key(self) -> Key:
        return self.incarnation, coerce_id(self.request.id)

    def run_again(self, *, attempt: int, progress: float | None, logged: Counter[bytes]) -> None:
        """It is a later attempt of a call: what the earlier ones have sent is not sent again."""
        self.attempt, self.progress, self.logged = attempt, progress, logged

    def is_repeated(self, method: str, params: dict[str, Any]) -> bool:
        """Whether the client saw this notification already, before the call ran again. (Counts log messages down.)"""
        if method == "notifications/progress":
            progress = params.get("progress")
            return self.progress is not None and isinstance(progress, int | float) and progress <= self.progress
        if not self.logged or method != LOG_MESSAGE or not self.logged[key := log_key(params)]:
            return False
        self.logged[key] -= 1
        return True

    def end(self, step: CallStep, payload: bytes, also: Step | None = None) -> None:
        """Answer it: the response, the seal and the row's end in one step."""
        self.state = advance(CALL, self.state, step)
        end = CallEnd(incarnation=self.incarnation, request_id=self.request.id, state=self.state)
        self.stream.append(payload, end=end, also=also)


class Duplicate(IdTaken):
    """A request came under the id of another that has not ended, in this process."""

    def __init__(self, request_id: int | str) -> None:
        super().__init__(f"request {request_id!r} of this session runs already")
        self.request_id = request_id


class Calls:
    """A session's calls in this process."""

    __slots__ = ("_by_id", "_by_number", "_cancelled", "_numbers", "_work", "size")

    def __init__(self, work: Work) -> None:
        self.size = 0
        """Bytes of memory that they take while the runtime has them, and those that are being written."""
        self._work = work
        self._by_number: dict[int, Call] = {}
        self._by_id: dict[Key, Call | int] = {}
        """Of one that is being written only its size is known."""
        self._numbers = itertools.count(1)
        self._cancelled: frozenset[Key] = frozenset()

    def __len__(self) -> int:
        """How many are not answered yet."""
        return len(self._by_id)

    @property
    def load(self) -> int:
        """How many keep the runtime busy, or will: also those that were cancelled and do not stop."""
        return len(self._by_number) + sum(isinstance(call, int) for call in self._by_id.values())

    @property
    def runtime_is_idle(self) -> bool:
        """The runtime is through with everything it was given."""
        return not self._by_number

    def reserve(self, requests: Sequence[Request], *, incarnation: int, size: int) -> None:
        """Keep the ids of new requests (`Intake` does). Raises `Duplicate` for the first that is taken already.

        `size`: the bytes of memory that they take together.
        """
        for place, request in enumerate(requests):
            key = (incarnation, coerce_id(request.id))
            if key in self._by_id:
                self.release(requests[:place], incarnation=incarnation)
                raise Duplicate(request.id)
            self._by_id[key] = 0
        self._by_id[incarnation, coerce_id(requests[0].id)] = size
        self._take(size)

    def release(self, requests: Iterable[Request], *, incarnation: int) -> None:
        """Free the ids of requests that have ended, or that do not begin."""
        for request in requests:
            key = (incarnation, coerce_id(request.id))
            if isinstance(size := self._by_id.pop(key, None), int):
                self._take(-size)  # it does not come to the runtime
            if self._cancelled:
                self._cancelled -= {key}
        self._by_id = self._by_id or {}  # a dictionary does not shrink, and thousands of sessions are at rest

    def cancel_early(self, request_id: int | str, *, incarnation: int) -> bool:
        """Remember that the client cancels a request whose row is still being written. Tells whether it is one."""
        key = (incarnation, coerce_id(request_id))
        if key not in self._by_id:
            return False
        self._cancelled |= {key}
        return True

    def is_cancelled(self, call: Call) -> bool:
        """Whether it was cancelled before it could begin."""
        return call.key in self._cancelled

    def open(self, requests: Iterable[Request], *, incarnation: int, stream: Stream) -> list[Call]:
        """Enter reserved requests, or those of a node that died."""
        calls: list[Call] = []
        for request in requests:
            call = Call(
                number=self.new_number(),
                request=request,
                token=progress_token(request),
                incarnation=incarnation,
                stream=stream,
            )
            if isinstance(size := self._by_id.get(call.key), int):
                call.size = size  # as reserved
            self._by_number[call.number] = call
            self._by_id[call.key] = call
            calls.append(call)
        return calls

    def _take(self, size: int) -> None:
        self.size += size
        self._work.take(size)

    def new_number(self) -> int:
        """A number under which the runtime knows a request: no other request of this session has it, or had it."""
        return next(self._numbers)

    def numbered(self, number: int) -> Call | None:
        """The call that the runtime knows under this number."""
        return self._by_number.get(number)

    def running(self, request_id: int | str, *, incarnation: int) -> Call | None:
        """The running call that the client knows under this id."""
        call = self._by_id.get((incarnation, coerce_id(request_id)))
        return call if isinstance(call, Call) else None

    def all_running(self) -> list[Call]:
        return [call for call in self._by_id.values() if isinstance(call, Call)]

    def answer(self, call: Call, step: CallStep, payload: bytes, also: Step | None = None) -> bool:
        """Give a call its final answer, unless it has one. Tells whether this was it."""
        if call.state is not CallState.RUNNING:
            return False
        call.end(step, payload, also)
        self.release((call.request,), incarnation=call.incarnation)
        return True

    def forget(self, stream: Stream) -> list[Call]:
        """Another node writes this stream now: its calls are no longer this node's."""
        lost = [call for call in self.all_running() if call.stream is stream]
        for call in lost:
            call.state = advance(CALL, call.state, CallStep.LOSE_NODE)  # whatever the runtime still says is dropped
            self.release((call.request,), incarnation=call.incarnation)
        return lost

    def runtime_done(self, number: int) -> None:
        """The runtime is through with a call."""
        if (call := self._by_number.pop(number, None)) is not None:
            self._take(-call.size)
        self._by_number = self._by_number or {}

    def runtime_gone(self) -> None:
        """The runtime was dropped, or has failed."""
        for number in list(self._by_number):
            self.runtime_done(number)


class Intake:
    """Takes new requests of a session in: reserves their ids, writes their rows with the stream for the answers, and
    opens the calls. Ids that were reserved and not opened are free again when its block is left.

    Requests belong to the incarnation in which they came; the session may come further meanwhile.
    """

    def __init__(
        self, session: Session, requests: Sequence[Request], *, incarnation: int | None = None, size: int = 0
    ) -> None:
        """`size`: the bytes of memory that the requests take together."""
        self._session = session
        self._requests = requests
        self._incarnation = session.record.incarnation if incarnation is None else incarnation
        self._size = size
        self._is_open = False

    def __enter__(self) -> Self:
        """Reserve the ids. Raises `Duplicate`."""
        self._session.exchange.calls.reserve(self._requests, incarnation=self._incarnation, size=self._size)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_open:
            self._session.exchange.calls.release(self._requests, incarnation=self._incarnation)

    async def accept(self, bodies: Sequence[bytes], *steps: Step, most_calls: int | None = None) -> list[Call]:
        """Write the rows and the stream, behind other steps; only then may the runtime see the requests.

        `most_calls`: as many calls may run in all processes; what runs here was counted by the caller.
        """
        session, context = self._session, self._session.context
        stream = StreamRecord(
            id=new_stream_id(context.random),
            session=session.id,
            kind=Kind.CALL,
            node=context.node,
            fence=context.fence,
            opened=context.clock(),
        )
        rows = tuple(
            CallRecord(
                session=session.id,
                incarnation=self._incarnation,
                request_id=request.id,
                stream=stream.id,
                method=request.method,
                request=body,
                principal=session.record.owner,
            )
            for request, body in zip(self._requests, bodies, strict=True)
        )
        try:
            await context.journal.write(*steps, OpenStream(record=stream, calls=rows, most_calls=most_calls))
            if session.state is SessionState.ENDED:
                raise SessionEnded
        except BaseException:
            session.put(DropStream(stream=stream.id))  # it may have been written all the same
            raise
        entered = session.call_streams.write(stream, owed=len(rows))
        context.counters.call_streams += 1
        context.counters.calls_accepted += len(rows)
        self._is_open = True
        return session.exchange.calls.open(self._requests, incarnation=self._incarnation, stream=entered)


def unknown_outcome(request_id: int | str, *, method: str, reason: str, params: dict[str, Any] | None) -> bytes:
    """The answer to a request that was interrupted and may not run again (promise 3)."""
    data = {"outcome": "unknown", "reason": reason, "method": method}
    if (name := name_of(params)) is not None:
        data["name"] = name
    return error_payload(request_id, OUTCOME_UNKNOWN, "Interrupted, outcome unknown", data)


def name_of(params: dict[str, Any] | None) -> str | None:
    """The tool's or the prompt's name or the resource's URI, where a request has one."""
    name = params.get("name", params.get("uri")) if params else None
    return name if isinstance(name, str) else None


def log_key(params: object) -> bytes:
    """Stands for a log message: equal for equal ones, and short however long they are."""
    return hashlib.blake2b(encode(params), digest_size=16).digest()


def logged_in(payload: bytes) -> bytes | None:
    """What stands for the log message in an event; `None` if it is another message, or has numbers that Python does not
    read."""
    if LOG_MESSAGE.encode() not in payload:
        return None
    try:
        message = json.loads(payload)
    except ValueError:
        return None
    return log_key(message.get("params")) if message.get("method") == LOG_MESSAGE else None


def progress_token(request: Request) -> int | str | None:
    """`params._meta.progressToken`, if it is one: a string or an integer."""
    meta = (request.params or {}).get("_meta")
    token = meta.get("progressToken") if isinstance(meta, dict) else None
    return token if isinstance(token, str | int) and not isinstance(token, bool) else None
