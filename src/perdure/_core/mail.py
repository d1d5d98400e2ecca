"""Encodes and decodes the messages that nodes send each other through the store's mailboxes.

A newer release may run beside this one: a message of a kind that this release does not know is decoded to `None`, and
its reader logs that and goes on.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from perdure._core.ids import NodeId, SessionId, StreamId


@dataclass(frozen=True, kw_only=True, slots=True)
class AskAnswered:
    """To the node that waits: the client answered an ask."""

    session: SessionId
    response: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Notified:
    """To the node that it concerns: the client sent a notification."""

    session: SessionId
    method: str
    params: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled:
    """To the node that runs the call: the client cancels it."""

    session: SessionId
    incarnation: int
    request_id: int | str
    params: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """To all nodes: the client has begun this incarnation here, and holds no position of calls that it lost."""

    session: SessionId
    incarnation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """To all nodes: calls of this session wait for their principal to come back."""

    session: SessionId


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """To a stream's writer, or to the node of a reader that was overtaken: look which reader is on it."""

    session: SessionId
    stream: StreamId


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """To all nodes: calls of this session lost their readers together with their node."""

    session: SessionId


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """To a node that writes calls without a reader: their client, at another node, has had the time to resume them."""

    session: SessionId


@dataclass(frozen=True, kw_only=True, slots=True)
class Missed:
    """To all nodes: an ask waits at this node, whose client has not been seen there for a while."""

    session: SessionId
    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """To a node that misses a client: it is attached to another one."""

    session: SessionId


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """To all nodes: the session has ended."""

    session: SessionId
    reason: str


Message = AskAnswered | Notified | Cancelled | Attached | Waiting | Reading | Lost | Unread | Missed | Here | Ended

_KINDS: dict[str, type[Message]] = {
    "ask-answered": AskAnswered,
    "notified": Notified,
    "cancelled": Cancelled,
    "attached": Attached,
    "waiting": Waiting,
    "reading": Reading,
    "lost": Lost,
    "unread": Unread,
    "missed": Missed,
    "here": Here,
    "ended": Ended,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return json.dumps({"kind": _NAMES[type(message)], **fields}, separators=(",", ":")).encode()


def decode(raw: bytes) -> Message | None:
    """The message, or `None` if it is of a kind that this release does not know."""
    fields = json.loads(raw)
    kind = _KINDS.get(fields.pop("kind", ""))
    if kind is None or {field.name for field in dataclasses.fields(kind)} != fields.keys():
        return None
    return kind(**fields)
