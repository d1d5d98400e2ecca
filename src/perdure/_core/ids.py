"""Ids and positions: how they are made, written and read.

A position is the value of the `id:` field of an event: kind, stream, generation and sequence number at fixed places.
It is cut at those places and never split at a character, so nothing that may stand in an id can mislead it (R6).
Within a stream positions rise, also as plain strings (S1).

    c K3vJx0o8Qm2uYb7dT5aLwA . 000001 . 0000000042 + 7.5 ~ 9fQx
    │ └ stream, 22 characters  └ generation └ sequence   │     └ optional: makes a priming id unique, means nothing
    └ c: call, s: standalone                             └ optional: the progress that was shown from memory
"""

import base64
import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NewType

SessionId = NewType("SessionId", str)
StreamId = NewType("StreamId", str)
NodeId = NewType("NodeId", str)
Fence = NewType("Fence", int)
NO_FENCE = Fence(0)
"""Below all issued ones."""

RandomBytes = Callable[[int], bytes]
"""A source of unguessable bytes, such as `secrets.token_bytes` (S11)."""

SESSION_BYTES = 32
"""256 bits: a session id is a bearer secret wherever no other authentication is used."""

STREAM_BYTES = 16
"""128 bits: unguessable, and short enough to stand in every event."""

FENCE_BYTES = 5
"""40 random bits: a store that lost its latest claims makes them again under other fences. Above them stands the
generation, which has six digits in a position: a fence takes 60 bits, and is a positive 64-bit integer everywhere."""

SKIPPED = range(100, 600)
"""Generations that are skipped when a store was put back from a copy, at random: more than a stream has new writers
between a copy and its return, and other ones if the same copy is put back twice. It is far less than the number of ends
that are kept of one stream (`store.records.KEPT_GENERATIONS`), so positions from before the copy stay known."""

_PRIMING_BYTES = 6

_POSITION = re.compile(
    r"([cs])([A-Za-z0-9_-]{22})\.([0-9]{6})\.([0-9]{10})(?:\+([0-9.e+-]{1,24}))?(?:~[A-Za-z0-9_-]{1,32})?"
)
_SESSION = re.compile(r"[A-Za-z0-9_-]{43}")
_STREAM = re.compile(r"[A-Za-z0-9_-]{22}")
_LISTED = "~"
_READER = re.compile(rf"{_LISTED}?[A-Za-z0-9_-]+\.[0-9]+\.([0-9]{{1,12}}\.[0-9]{{3}})")


class Kind(enum.Enum):
    """The purpose of a stream."""

    CALL = "c"
    """Opened by a POST with at least one request; sealed by the last response it owes."""

    STANDALONE = "s"
    """One for each session, read by GET; lives as long as the session."""


class RecordKind(enum.Enum):
    """The thing that a session's record stands for."""

    SESSION = "session"
    """A session that a client has opened with its handshake."""

    CALL = "call"
    """A durable call: a request of 2026-07-28, kept as a session of one call. It has no standalone stream."""

    KEY = "key"
    """The rest of a durable call whose answer was given up for newer ones: its id, and the digest of its request. So
    its key is not free, and a request that shows it again does not run."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Position:
    """A place in a stream: just after the event with this sequence number (0: before the first)."""

    stream: StreamId
    generation: int
    seq: int
    kind: Kind
    progress: float | None = field(default=None, compare=False)
    """What the client was shown of a call's progress while its node held that in memory. Should the call run again at
    another node, which cannot know it, its progress is shown when it is higher."""

    def __str__(self) -> str:
        progress = "" if self.progress is None else f"+{self.progress!r}"
        return f"{position_prefix(self.kind, self.stream, self.generation)}{self.seq:010d}{progress}"

    def priming(self, random: RandomBytes) -> str:
        """The same place under a fresh name, for an event that carries nothing but its id."""
        return f"{self}~{id_text(random(_PRIMING_BYTES))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The end of one writer of a stream: positions of this generation beyond `end` name lost events."""

    generation: int
    end: int


def place(position: Position, *, generation: int, last: int, ended: Sequence[Generation]) -> int:
    """The sequence number after which a reader continues: that of the position, or less where its tail was lost.

    All events of an unrecorded generation count as lost: it began after the end of the last recorded one, or it is
    older than all known ones. A generation of the future belongs to a store that lost it.
    """
    if position.generation == generation:
        return min(position.seq, last)
    known = {before.generation: before.end for before in ended if before.generation <= position.generation}
    return min(position.seq, known[max(known)]) if known and position.generation < generation else 0


def position_prefix(kind: Kind, stream: StreamId, generation: int) -> str:
    """All of a position but its sequence number, which follows as ten digits."""
    return f"{kind.value}{stream}.{generation:06d}."


def parse_position(text: str) -> Position | None:
    """Read a position from the wire; `None` if it is not a position of Perdure."""
    match = _POSITION.fullmatch(text)
    if match is None:
        return None
    kind, stream, generation, seq, shown = match.groups()
    try:
        progress = None if shown is None else float(shown)
    except ValueError:
        return None
    stream_id = StreamId(stream)
    return Position(kind=Kind(kind), stream=stream_id, generation=int(generation), seq=int(seq), progress=progress)


def new_session_id(random: RandomBytes) -> SessionId:
    return SessionId(id_text(random(SESSION_BYTES)))


def new_stream_id(random: RandomBytes) -> StreamId:
    return StreamId(id_text(random(STREAM_BYTES)))


def new_node_id(random: RandomBytes) -> NodeId:
    return NodeId(id_text(random(STREAM_BYTES)))


def reader_name(node: NodeId, arrival: int, since: float, *, only_listed: bool = False) -> str:
    """The name of a reader: no other one has it. It shows an operator since when the reader exists, and nodes whether
    it is at its writer's own node and only listed: then no node acts on it."""
    return f"{_LISTED if only_listed else ''}{node}.{arrival}.{since:.3f}"


def is_only_listed(name: str) -> bool:
    return name.startswith(_LISTED)


def reader_since(name: str) -> float | None:
    """When a reader came, by the store's clock; `None` if its name does not say it."""
    found = _READER.fullmatch(name)
    return None if found is None else float(found[1])


def new_fence(generation: int, random: RandomBytes) -> Fence:
    """A fence for the writer of a generation, or for a node that opens streams in their first one.

    No counter is kept: after a loss of the store it would return the same fence twice. Fences are compared for
    equality alone, and the generation says which claim is later.
    """
    return Fence(generation << FENCE_BYTES * 8 | int.from_bytes(random(FENCE_BYTES), "big"))


def generations_skipped(random_below: Callable[[int], int]) -> int:
    """The number of generations that a store skips after it was put back from a copy."""
    return SKIPPED[random_below(len(SKIPPED))]


def parse_session_id(text: object) -> SessionId | None:
    """Read a session id from the wire; `None` if it cannot be an id that Perdure made."""
    return SessionId(text) if isinstance(text, str) and _SESSION.fullmatch(text) else None


def parse_stream_id(text: object) -> StreamId | None:
    """Read a stream's id from the wire; `None` if it cannot be an id that Perdure made."""
    return StreamId(text) if isinstance(text, str) and _STREAM.fullmatch(text) else None


def id_text(raw: bytes) -> str:
    """Write bytes as an id: letters and digits that need no quoting anywhere."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")
