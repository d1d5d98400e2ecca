"""Keeps the requests of one session that this process has accepted: each ends in exactly one answer (promise 3).

A call has two names: the client's request id, which may repeat after the call and in each incarnation, and a number of
the session, by which the runtime knows it. The number stays in the table until the runtime is done with the call, also
when the call was answered long before (a cancelled tool that does not stop): its later messages are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from perdure._core import session_tasks
from perdure._core.codes import OUTCOME_UNKNOWN, REQUEST_CANCELLED
from perdure._core.durable_calls import TaskStatus
from perdure._core.ids import RecordKind
from perdure._core.jsonrpc import InvalidMessage, JsonObject, Request, coerce_id, error_payload, parse_body
from perdure._core.limits import Caller, Quota
from perdure._core.losses import incarnation_of, numbers_of
from perdure._core.settling import NOTHING_KEPT, UpstreamCall
from perdure._core.states import CALL, CallState, CallStep, SessionState, advance
from perdure._core.unknown_outcome import Outline, unknown_error
from perdure.errors import IdTaken
from perdure.log.stream import Stream
from perdure.store.records import CallRecord, SessionRecord
from perdure.store.steps import CallEnd, ChangeSession, EndSession, Step

if TYPE_CHECKING:
    from perdure.sessions.tool_steps import ToolSteps

MAX_NAME = 128
"""Characters of a tool's name that are kept with its call: the protocol allows no more."""

LOG_MESSAGE = "notifications/message"

Key = tuple[int, int | str]
"""An incarnation (`losses.numbers_of`), and a request id in the form in which ids are compared."""


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    number: int
    request: Request
    key: Key
    sent_in: int
    """The incarnation of its client. In a later one its id and its token mean another call."""
    token: int | str | None
    stream: Stream
    size: int = 0
    """Estimated bytes of memory while the runtime has it."""
    state: CallState = CallState.RUNNING
    attempt: int = 1
    repeats: bool = False
    """It runs again, or is followed: it may send what its client has seen."""
    progress: float | None = None
    """Of a call that runs again: the progress that was sent before. Only greater progress is sent."""
    logged: Counter[bytes] | None = None
    """Of a call that runs again: the log messages that were sent before (`log_key`). Each is dropped once."""
    _said: list[tuple[int, JsonObject]] = field(default_factory=list)
    """Its progress by event number: the last that is written, and those after it."""
    told_at: int = 0
    """The arrival number (`Hub.arrive`) at which its client was notified that it is an orphan."""
    begun: float = field(default_factory=time.perf_counter)
    origin: object = None
    """The request that brought it, for a second run with the same credentials."""
    upstream: UpstreamCall = NOTHING_KEPT
    """As in its row."""
    steps: ToolSteps | None = None
    """The steps of its tool, from the first one on."""
    leaves: bool = False
    """This process stops, and leaves it to the next one where it can stand still: at the beginning of a step."""
    timer: asyncio.TimerHandle | None = None
    """Answers its client early."""
    answering: asyncio.Task[None] | None = None
    """Answers it in this process, without the runtime."""
    is_task: bool = False
    """Its client has asked for it as a task of 2025-11-25, and has its `CreateTaskResult`."""
    told_status: TaskStatus = TaskStatus.WORKING
    """The status of the task that its client was last notified of."""
    is_displaced: bool = False
    """It is an orphan, and a later request has its id; perhaps its progress token as well."""

    @property
    def incarnation(self) -> int:
        return self.key[0]

    @property
    def outline(self) -> Outline | None:
        """Its finished and its open steps; `None` if its tool has done none."""
        return self.steps.outline if self.steps is not None and self.steps.has_rows else None

    @property
    def is_standing(self) -> bool:
        """Whether this process may leave it at once: it sleeps, or would begin a step in the next process."""
        return self.leaves and self.steps is not None and self.steps.is_idle

    def say(self, params: JsonObject) -> None:
        """Note the progress that the next event reports."""
        self._said.append((self.stream.tail.last + 1, params))
        self._forget_said()

    @property
    def progress_params(self) -> JsonObject | None:
        """The last progress in the store: another node may have to go on there."""
        self._forget_said()
        return self._said[0][1] if self._said and self._said[0][0] <= self.stream.tail.durable else None

    def _forget_said(self) -> None:
        while len(self._said) > 1 and self._said[1][0] <= self.stream.tail.durable:
            del self._said[0]

    def is_repeated(self, method: str, params: dict[str, Any]) -> bool:
        """Whether the client saw this notification before the call ran again. (Counts log messages down.)"""
        if method == "notifications/progress":
            progress = params.get("progress")
            return self.progress is not None and isinstance(progress, int | float) and progress <= self.progress
        if not self.logged or method != LOG_MESSAGE or not self.logged[key := log_key(params)]:
            return False
        self.logged[key] -= 1
        return True


class Duplicate(IdTaken):
    """A request came under the id of another that has not ended, in this process."""

    def __init__(self, request_id: int | str) -> None:
        super().__init__(f"request {request_id!r} of this session runs already")
        self.request_id = request_id


@dataclass(slots=True, eq=False)
class Calls:
    caller: Caller
    _work: Quota
    _running: Quota
    size: int = 0
    """Estimated bytes of memory of the calls that the runtime has, and of those that are being written."""
    by_number: dict[int, Call] = field(default_factory=dict)
    """The calls that the runtime is not done with."""
    _by_id: dict[Key, Call | int] = field(default_factory=dict)
    """A call that is being written is entered with its size."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    cancelled: frozenset[Key] = frozenset()
    """Calls that were cancelled before they could begin."""

    def __len__(self) -> int:
        """How many are not answered yet."""
        return len(self._by_id)

    @property
    def load(self) -> int:
        """How many keep the runtime busy, or will; cancelled calls that do not stop count."""
        return len(self.by_number) + sum(isinstance(call, int) for call in self._by_id.values())

    def reserve(self, keys: Sequence[Key], requests: Sequence[Request], *, size: int) -> None:
        """Reserve the ids of new requests, which take `size` bytes of memory together. Raises `Duplicate`."""
        for place, key in enumerate(keys):
            if key in self._by_id:
                self.release(*keys[:place])
                raise Duplicate(requests[place].id)
            self._by_id[key] = 0
            self._running.take(self.caller)
        self._by_id[keys[0]] = size
        self.size += size
        self._work.take(self.caller, size)

    def release(self, *keys: Key) -> None:
        """Free the ids of requests that have ended, or that do not begin."""
        for key in keys:
            if isinstance(size := self._by_id.pop(key, None), int):
                self.size -= size  # it does not come to the runtime
                self._work.take(self.caller, -size)
                self._running.take(self.caller, -1)
            if self.cancelled:
                self.cancelled -= {key}
        self._by_id = self._by_id or {}  # a dictionary does not shrink, and thousands of sessions are at rest

    def cancel_early(self, key: Key) -> bool:
        """Note that the client cancels a request whose row is still being written. Returns whether it is known."""
        if key not in self._by_id:
            return False
        self.cancelled |= {key}
        return True

    def open(self, keys: Iterable[Key], requests: Iterable[Request], *, stream: Stream) -> list[Call]:
        """Enter reserved requests, or requests of a dead node."""
        calls: list[Call] = []
        for key, request in zip(keys, requests, strict=True):
            number, sent_in = next(self._numbers), incarnation_of(key[0])
            token = progress_token(request)
            call = Call(number=number, request=request, key=key, sent_in=sent_in, token=token, stream=stream)
            if isinstance(size := self._by_id.get(key), int):
                call.size = size  # as reserved
            else:
                self._running.take(self.caller)
            self.by_number[number] = call
            self._by_id[key] = call
            calls.append(call)
        return calls

    def new_number(self) -> int:
        """A number for the runtime that no other request of this session has or had."""
        return next(self._numbers)

    def is_reserved(self, key: Key) -> bool:
        return isinstance(self._by_id.get(key), int)

    def running(self, key: Key) -> Call | None:
        call = self._by_id.get(key)
        return call if isinstance(call, Call) else None

    def numbers(self, incarnation: int, request_id: int | str) -> list[int]:
        """The numbers of the call that the client may mean by this id; of calls here, the newest alone."""
        name = coerce_id(request_id)
        displaced = [call.incarnation for call in self.all_running() if call.is_displaced and call.key[1] == name]
        numbers = [number for number in numbers_of(incarnation) if number not in displaced]
        if early := [number for number in numbers if self.is_reserved((number, name))]:
            return early
        here = [call for number in numbers if (call := self.running((number, name))) is not None]
        return [max(here, key=lambda call: call.number).incarnation] if here else numbers[::-1]

    def all_running(self) -> list[Call]:
        return [call for call in self._by_id.values() if isinstance(call, Call)]

    def answer(self, call: Call, step: CallStep, payload: bytes, also: Step | None = None) -> bool:
        """Give a call its final answer, unless it has one: response, seal and end of the row in one step. Returns
        whether this was the answer."""
        if call.state is not CallState.RUNNING:
            return False
        call.state = advance(CALL, call.state, step)
        if call.timer is not None:
            call.timer.cancel()
        # Also where no step is known to be in the store: the end of one may be on its way.
        stepped = call.steps is not None
        end = CallEnd(incarnation=call.key[0], request_id=call.request.id, state=call.state, stepped=stepped)
        call.stream.append(payload, end=end, also=also)
        self.release(call.key)
        return True

    def forget(self, stream: Stream) -> list[Call]:
        """Remove the calls of a stream that another node writes now, and return them."""
        lost = [call for call in self.all_running() if call.stream is stream]
        for call in lost:
            call.state = advance(CALL, call.state, CallStep.LOSE_NODE)  # whatever the runtime still says is dropped
            self.release(call.key)
        return lost

    def runtime_done(self, number: int) -> None:
        if (call := self.by_number.pop(number, None)) is not None:
            self.size -= call.size
            self._work.take(self.caller, -call.size)
            self._running.take(self.caller, -1)
        self.by_number = self.by_number or {}

    def runtime_gone(self) -> None:
        for number in list(self.by_number):
            self.runtime_done(number)


def unknown_outcome(
    request_id: int | str, *, method: str, reason: str, params: dict[str, Any] | None, steps: Outline | None = None
) -> bytes:
    """The answer to a request that was interrupted and may not run again (promise 3). `steps`: those of its tool."""
    return error_payload(request_id, OUTCOME_UNKNOWN, *unknown_error(method, name_of(params), reason, steps))


def cancelled(request_id: int | str, steps: Outline | None = None, reason: str = "Request cancelled") -> bytes:
    """The answer to a request that its client has cancelled; with the steps that its tool had done."""
    data = None if steps is None else {"steps": steps}
    return error_payload(request_id, REQUEST_CANCELLED, reason, data)


def end_of_call(
    record: SessionRecord, now: float, reason: str, *, keeps: bool = False
) -> ChangeSession | EndSession | None:
    """The change in the record at the end of a durable call: one that its client can ask for, or is to find (`keeps`),
    stays as it ended, any other is deleted. `None` for a session."""
    if record.kind is RecordKind.SESSION:
        return None
    if record.is_task or keeps:
        return ChangeSession(session=record.id, active=now, state=SessionState.DORMANT, is_task=True)
    return EndSession(session=record.id, time=now, reason=reason)


def name_of(params: dict[str, Any] | None) -> str | None:
    """The name of the tool or prompt, or the URI of the resource."""
    name = params.get("name", params.get("uri")) if params else None
    return name if isinstance(name, str) else None


def kept_name(params: dict[str, Any] | None) -> str:
    """The name that is kept longer than the request. A URI is not, because it may reveal as much as arguments."""
    name = params.get("name") if params else None
    return name[:MAX_NAME] if isinstance(name, str) else ""


def log_key(params: object) -> bytes:
    return hashlib.blake2b(encode(params), digest_size=16).digest()


def logged_in(payload: bytes, task: str | None = None) -> bytes | None:
    """The digest of the log message in an event; `None` if it is another message, or is not JSON. `task`: the one that
    it must be of."""
    with contextlib.suppress(ValueError):
        if LOG_MESSAGE.encode() in payload and (message := json.loads(payload)).get("method") == LOG_MESSAGE:
            if task is None:
                return log_key(message.get("params"))
            if session_tasks.is_related(message, task):
                return log_key(session_tasks.without_related(message["params"]))
    return None


def request_of(row: CallRecord) -> Request | None:
    """The request of a row; `None` if the recorded bytes cannot be parsed, as those of a call that has ended."""
    try:
        parsed = parse_body(row.request)
    except InvalidMessage:
        return None
    return parsed if isinstance(parsed, Request) else None


def progress_token(request: Request) -> int | str | None:
    """`params._meta.progressToken`, if it is one: a string or an integer."""
    token = request.meta.get("progressToken")
    return token if isinstance(token, str | int) and not isinstance(token, bool) else None


# Messages for the log. `to_json` takes a quarter of the time of the standard library's encoder, and progress comes by
# the tens of thousands a second. It writes null for NaN, which JSON does not have, as the SDK does.


def encode(value: object) -> bytes:
    return to_json(value, inf_nan_mode="null")


def encode_notification(method: str, params: dict[str, Any] | None) -> bytes:
    if params is None:
        return b'{"jsonrpc":"2.0","method":%b}' % _name(method)
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (_name(method), to_json(params, inf_nan_mode="null"))


def encode_ask(ask_id: str, method: str, params: dict[str, Any] | None) -> bytes:
    given = b"" if params is None else b',"params":' + encode(params)
    return b'{"jsonrpc":"2.0","id":%b,"method":%b%b}' % (encode(ask_id), _name(method), given)


def encode_answer(request_id: int | str, body: bytes, *, failed: bool = False) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"%b":%b}' % (to_json(request_id), b"error" if failed else b"result", body)


@lru_cache(maxsize=64)
def _name(method: str) -> bytes:
    return encode(method)
