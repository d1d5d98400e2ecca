"""The ledger of one session in this process: accepted requests, each of which ends in exactly one answer (promise 3).

A call is known by two names: the client's request id, which may repeat as soon as the call has ended and in each
incarnation, and a number of ours, under which the runtime knows it. The number stays in the table until the runtime is
through with the call, also when it was answered long before (a cancelled tool that does not stop): what it still sends
is dropped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perdure._core.codes import OUTCOME_UNKNOWN as OUTCOME_UNKNOWN
from perdure._core.codes import POSITION_LOST as POSITION_LOST
from perdure._core.codes import REQUEST_CANCELLED as REQUEST_CANCELLED
from perdure._core.ids import StreamId
from perdure._core.jsonrpc import Request, coerce_id
from perdure._core.jsonrpc import error_payload as error_payload
from perdure._core.memory_budget import Work
from perdure._core.states import CALL, CallState, CallStep, advance
from perdure.log.stream import Stream
from perdure.sessions.messages import encode
from perdure.store.base import CallEnd, CallRecord, SessionRecord, Step

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
    """When its client was told that it is an orphan, as an arrival number of the hub's."""

    @property
    def key(self) -> Key:
        return self.incarnation, coerce_id(self.request.id)

    def is_repeated(self, method: str, params: dict[str, Any]) -> bool:
        """Whether the client has seen this notification before the call ran again. (Counts log messages down.)"""
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

    def reserve(self, requests: Sequence[Request], *, incarnation: int, size: int = 0) -> Request | None:
        """Keep the ids of new requests, before anything else happens. Gives the first one that is taken already.

        `size`: the bytes of memory that they take together.
        """
        for place, request in enumerate(requests):
            key = (incarnation, coerce_id(request.id))
            if key in self._by_id:
                self.release(requests[:place], incarnation=incarnation)
                return request
            self._by_id[key] = 0
        self._by_id[incarnation, coerce_id(requests[0].id)] = size
        self._take(size)
        return None

    def release(self, requests: Iterable[Request], *, incarnation: int) -> None:
        for request in requests:
            key = (incarnation, coerce_id(request.id))
            if isinstance(size := self._by_id.pop(key, None), int):
                self._take(-size)  # it does not come to the runtime
            if self._cancelled:
                self._cancelled -= {key}
        self._by_id = self._by_id or {}  # a dictionary does not shrink, and there are thousands of sessions at rest

    def cancel_early(self, request_id: int | str, *, incarnation: int) -> bool:
        """The client cancels a request whose row is still being written: remember it. Tells whether it is one."""
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
        calls = [
            Call(
                number=self.new_number(),
                request=request,
                token=progress_token(request),
                incarnation=incarnation,
                stream=stream,
                size=self._reserved(request, incarnation),
            )
            for request in requests
        ]
        for call in calls:
            self._by_number[call.number] = call
            self._by_id[call.key] = call
        return calls

    def _reserved(self, request: Request, incarnation: int) -> int:
        size = self._by_id.get((incarnation, coerce_id(request.id)))
        return size if isinstance(size, int) else 0

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
        """Another node writes this stream now: its calls are no longer ours."""
        lost = [call for call in self.all_running() if call.stream is stream]
        for call in lost:
            self.release((call.request,), incarnation=call.incarnation)
        return lost

    def runtime_done(self, number: int) -> None:
        if (call := self._by_number.pop(number, None)) is not None:
            self._take(-call.size)
        self._by_number = self._by_number or {}

    def runtime_gone(self) -> None:
        for number in list(self._by_number):
            self.runtime_done(number)


def rows(
    requests: Sequence[Request], bodies: Sequence[bytes], *, session: SessionRecord, incarnation: int, stream: StreamId
) -> tuple[CallRecord, ...]:
    """The ledger rows of new requests."""
    return tuple(
        CallRecord(
            session=session.id,
            incarnation=incarnation,
            request_id=request.id,
            stream=stream,
            method=request.method,
            request=body,
            principal=session.owner,
        )
        for request, body in zip(requests, bodies, strict=True)
    )


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
    """What stands for the log message that an event is; `None` if it is none, or has numbers that Python does not
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
