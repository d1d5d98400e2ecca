"""Encodes and decodes the messages that nodes send each other through the store's mailboxes.

A newer release may run beside this one: a message of a kind that this release does not know is decoded to `None`, and
its reader logs that and continues.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from perdure._core.ids import NodeId, SessionId, StreamId


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mail:
    session: SessionId


@dataclass(frozen=True, kw_only=True, slots=True)
class AskAnswered(_Mail):
    """To the node that waits: the client answered an ask."""

    response: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Notified(_Mail):
    """To the node that it concerns: the client sent a notification."""

    method: str
    params: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled(_Mail):
    """To the node that runs the call: the client cancels it."""

    incarnation: int
    request_id: int | str
    params: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HandedOver(_Mail):
    """To the session's home: another node has accepted the requests of this stream, which run at the home alone."""

    stream: StreamId


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing(_Mail):
    """To all nodes: this node stops, and a call that it runs stands still at the beginning of a step."""

    node: NodeId
    stream: StreamId


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached(_Mail):
    """To all nodes: the client has begun this incarnation here, and holds no position of calls that it lost."""

    incarnation: int
    cursor: int
    """It reads the standalone stream from there on, and has forgotten earlier events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting(_Mail):
    """To all nodes: calls of this session wait for their principal to come back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading(_Mail):
    """To a stream's writer, or to the node of a reader that was overtaken: read which reader is on it."""

    stream: StreamId


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost(_Mail):
    """To all nodes: calls of this session lost their readers."""

    waited: bool
    """So long ago that their client could have resumed them; otherwise just now, together with their node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread(_Mail):
    """To a node that writes calls without a reader: their client, at another node, has had the time to resume them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Displaced(_Mail):
    """To the node that runs a call which is an orphan: a later request has taken its id."""

    incarnation: int
    request_id: int | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Missed(_Mail):
    """To all nodes: an ask waits at this node, whose client has not been seen there for a while."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class Here(_Mail):
    """To a node that misses a client: it is attached to another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(_Mail):
    """To all nodes: the session has ended."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """To all nodes: this node has listeners, who name these resources. Subscribe to them, and say so with the
    number."""

    node: NodeId
    number: int
    uris: Sequence[str]
    adds: bool
    """The resources are added to the announced ones; otherwise they replace them."""
    has_more: bool
    """Further parts follow; the last one is answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subscribed:
    """To the node that asked: this node has subscribed to everything that was announced up to the number."""

    asker: NodeId
    node: NodeId
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """To a node with listeners: announce their filters again, because this node does not know them."""

    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """To nodes with listeners: these items have changed."""

    changes: Sequence[Sequence[str]]
    """The method of each notification, and the URI of a resource or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unheard:
    """To nodes with listeners: changes may have been missed."""


ListeningMail = Announced | Subscribed | Joined | Changed | Unheard
"""Messages about listeners, which concern no session."""

Message = (
    AskAnswered
    | Notified
    | Cancelled
    | HandedOver
    | Standing
    | Attached
    | Waiting
    | Reading
    | Lost
    | Unread
    | Displaced
    | Missed
    | Here
    | Ended
    | ListeningMail
)

_KINDS: dict[str, type[Message]] = {
    re.sub("(?<=[a-z])(?=[A-Z])", "-", kind.__name__).lower(): kind for kind in get_args(Message)
}
"""By their names in the mailboxes, which other releases read: `ask-answered` is `AskAnswered`, and stays so."""

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
