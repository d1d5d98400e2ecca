"""Passes every payload through one codec on its way into a store and out of it, and weighs steps by their payloads.

A payload is what a client or a server said: events, requests, `initialize` params and results, sticky requests, asks,
forwarded messages, mail. Ids, names, states and numbers are not, because a store looks things up by them. `_changed`
lists all payloads of steps and records, so a store that uses `Payloads` for both keeps none of them in another form.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from perdure._core import sticky
from perdure.store.records import AskRecord, CallRecord, Event, Forwarded, Mail, SessionRecord
from perdure.store.steps import (
    Append,
    ChangeSession,
    DropStream,
    EndSession,
    Forward,
    OpenAsk,
    OpenStream,
    PutSession,
    SendMail,
    Step,
    Trim,
)

R = TypeVar("R")


class Codec(Protocol):
    """Gives payloads the form in which a store keeps them. May be used in any thread."""

    @property
    def overhead(self) -> int:
        """Bytes that `encode` adds, the same for every payload, so that its size is known without decoding it."""

    def encode(self, payload: bytes) -> bytes: ...

    def decode(self, stored: bytes) -> bytes: ...


class _Plain:
    overhead = 0

    def encode(self, payload: bytes) -> bytes:
        return payload

    def decode(self, stored: bytes) -> bytes:
        return stored


PLAIN: Codec = _Plain()
"""Keeps payloads as they are. `Payloads` does not copy steps and records for it."""


class Payloads:
    """Encodes the payloads of steps and decodes those of records, with one codec.

    An empty payload stays empty: a store empties some by itself, when a call or a session has ended.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.is_plain = codec is PLAIN
        self.overhead = codec.overhead

    def encode_steps(self, steps: Sequence[Step]) -> Sequence[Step]:
        return steps if self.is_plain else [_changed(step, self.encode_one) for step in steps]

    def decode(self, record: R) -> R:
        """Return a record of any kind, or `None`, as it came into the store."""
        return record if self.is_plain else _changed(record, self.decode_one)

    def decode_all(self, records: Sequence[R]) -> Sequence[R]:
        return records if self.is_plain else [_changed(record, self.decode_one) for record in records]

    def encode_one(self, payload: bytes) -> bytes:
        return self._codec.encode(payload) if payload else payload

    def decode_one(self, stored: bytes) -> bytes:
        return self._codec.decode(stored) if stored else stored

    def size(self, stored: bytes) -> int:
        """Return the size of a payload, as limits count it: before it was encoded."""
        return max(0, len(stored) - self.overhead)

    def stick(self, kept: tuple[bytes, ...], request: bytes) -> tuple[bytes, ...]:
        """Return the sticky requests after one more (`_core.sticky`), all of them as they are stored."""
        plain = sticky.after(tuple(map(self.decode_one, kept)), self.decode_one(request))
        return tuple(map(self.encode_one, plain))


def _changed(value: Any, change: Callable[[bytes], bytes]) -> Any:
    """Return a step or a record with each of its payloads changed. What has none is given as it is."""
    match value:
        case Event() | Forwarded():
            return value._replace(payload=change(value.payload))
        case Mail():
            return value._replace(message=change(value.message))
        case SendMail():
            return replace(value, message=change(value.message))
        case CallRecord() | AskRecord():
            return replace(value, request=change(value.request))
        case SessionRecord():
            params, result = change(value.client_params), change(value.result)
            return replace(value, client_params=params, result=result, sticky=tuple(map(change, value.sticky)))
        case ChangeSession():
            said, stick = value.result, value.stick
            said, stick = None if said is None else change(said), None if stick is None else change(stick)
            return replace(value, result=said, stick=stick)
        case Forward():
            return replace(value, payloads=tuple(map(change, value.payloads)))
        case Append():
            return replace(value, events=tuple(_changed(event, change) for event in value.events))
        case OpenStream():
            return replace(value, calls=tuple(_changed(call, change) for call in value.calls))
        case PutSession() | OpenAsk():
            return replace(value, record=_changed(value.record, change))
    return value


def weigh(steps: Sequence[Step]) -> tuple[int, int, bool]:
    """Return how many rows and bytes the steps write, nearly; and whether they forget anything."""
    count = size = 0
    forget = False

    def weighed(payload: bytes) -> bytes:
        nonlocal size
        size += len(payload)
        return payload

    for step in steps:
        count += 1
        # The steps of every call, without copies of them.
        if type(step) is Append:
            count += len(step.events)
            size += sum([len(event.payload) for event in step.events])
        elif type(step) is OpenStream:
            count += len(step.calls)
            size += sum([len(call.request) for call in step.calls])
        elif type(step) is PutSession:
            size += len(step.record.client_params) + len(step.record.result)
        elif isinstance(step, Trim | DropStream | EndSession):
            forget = True
        else:
            count += len(step.payloads) if type(step) is Forward else 0
            _changed(step, weighed)
    return count, size, forget
