"""What a store is: a few small interfaces and the promises behind them.

Everything that must not be lost goes in as *steps*: frozen values, committed in groups. A step says what is so, not
how to get there, so a step that arrives twice (the first answer was lost, or came too late) changes nothing. That
makes it safe to hold steps while the store fails and to write them afterwards, in order.

The promises; the contract suite in `perdure.testing` carries the same numbers.

1. **Atomic.** `commit` applies all its steps or none. What one `Append` carries (events, ends of calls, the seal) is
   seen together or not at all.
2. **Fenced.** An `Append` shows a fence. It is refused (`StaleFence` at its place in the result), and the others are
   not touched, if another writer has claimed the stream since, if the stream is gone or sealed, or if its events do not
   follow the last one there: in each case this writer's picture of the stream is not the store's.
3. **Durable.** What `commit` returned without error survives the death of this process; the backend's own page says
   what else it survives.
4. **Ordered.** `read` gives each retained event after a sequence number once, in order. Numbers of one stream rise by
   one. What is missing between two of them was trimmed: the reader sees the gap in the numbers.
5. **Repeatable.** Committing again what was committed last, in the same order, changes nothing: events are known by
   their numbers, an ended call keeps its first end.
6. **Generations.** `claim` durably raises a stream's generation before its new writer appends, and records where the
   one before ended, so that an old position never names a new event.
7. **Answers last.** `Trim` never removes a final answer; only `DropStream`, `EndSession` and `sweep` do.
8. **Only a hint.** A wake-up may be lost, late or needless; `read` tells the truth.
9. **Failure is named.** A backend's own exceptions leave as `StoreError`, with their cause kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.ids import Generation as Generation
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.errors import StaleFence

RECORD_VERSION = 1
"""Written into every record; a release that meets a higher one refuses it by name."""


# --- Values ---------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """One message of a stream. (A tuple, because there are tens of thousands a second.)"""

    seq: int
    time: float
    payload: bytes
    final: bool = False
    """A response: the last thing to be forgotten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """All that is needed to go on with a session."""

    id: SessionId
    owner: str
    """The principal that opened it; empty where nobody authenticates."""
    node: NodeId
    """The node that holds it."""
    state: SessionState
    version: str
    """The negotiated protocol version; empty while OPENING."""
    client_params: bytes
    """The client's `initialize` params, as JSON."""
    result: bytes
    """The server's `initialize` result, as JSON; empty while OPENING."""
    initialized: bool
    sticky: tuple[bytes, ...]
    """Requests to repeat when the session is loaded: `logging/setLevel`, `resources/subscribe`."""
    incarnation: int
    standalone: StreamId
    created: float
    active: float
    """Last activity. Times serve retention only; no decision between processes depends on them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRecord:
    id: StreamId
    session: SessionId
    kind: Kind
    fence: Fence
    opened: float
    generation: int = 1
    last: int = 0
    """The highest sequence number ever appended, whether retained or not."""
    sealed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRecord:
    """One row of the ledger: an accepted request and what became of it."""

    session: SessionId
    incarnation: int
    request_id: int | str
    stream: StreamId
    method: str
    request: bytes
    """The request as it came, as JSON, for running it again; empty once the call has ended."""
    principal: str
    node: NodeId
    attempt: int = 1
    progress: float | None = None
    """The highest progress sent."""
    state: CallState = CallState.RUNNING


@dataclass(frozen=True, kw_only=True, slots=True)
class AskRecord:
    """A server→client request that waits for the client's answer."""

    session: SessionId
    id: str
    stream: StreamId
    request: bytes
    node: NodeId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderRecord:
    """Who reads a stream: at most one reader, the newest."""

    stream: StreamId
    reader: str
    node: NodeId
    seq: int
    """As far as it had got when this was written."""


# --- Steps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PutSession:
    """Write a session's record, over the one that is there."""

    record: SessionRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class EndSession:
    """Forget a session's streams, events, calls, asks and readers; its record stays, ENDED, until it is swept."""

    session: SessionId
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStream:
    """Open a stream, together with the ledger rows of the requests that it answers."""

    record: StreamRecord
    calls: tuple[CallRecord, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CallEnd:
    incarnation: int
    request_id: int | str
    state: CallState


@dataclass(frozen=True, kw_only=True, slots=True)
class Append:
    """Add events to a stream; with the last answer also the ends of its calls and the seal, in the same step.

    Of events that are known by their number already only the rest is added (5).
    """

    stream: StreamId
    fence: Fence
    events: tuple[Event, ...]
    ends: tuple[CallEnd, ...] = ()
    seal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Trim:
    """Forget a stream's events up to and including a sequence number, final answers excepted."""

    stream: StreamId
    through: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DropStream:
    """Forget a stream with everything in it."""

    stream: StreamId


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAsk:
    record: AskRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseAsk:
    session: SessionId
    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PutReader:
    """A reader attached, or told how far it has got."""

    record: ReaderRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveReader:
    """A reader left; nothing happens if another one has taken its place."""

    stream: StreamId
    reader: str


Step = PutSession | EndSession | OpenStream | Append | Trim | DropStream | OpenAsk | CloseAsk | PutReader | LeaveReader

Refusals = Sequence[StaleFence | None]
"""For each step of a commit: `None`, or why it was refused."""


# --- Interfaces -----------------------------------------------------------------------------------------------------


class Events(Protocol):
    """The log: streams and what is in them."""

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        """Apply the steps, all or none (1, 2, 3, 5)."""
        ...

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        """The same, if it can be done at once without waiting for anybody; else `None`, and nothing was done."""
        ...

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        """The retained events after a sequence number (4). `limit` bounds one answer, not the stream."""
        ...

    async def stream(self, stream: StreamId) -> StreamRecord | None: ...

    async def streams(self, session: SessionId) -> Sequence[StreamRecord]:
        """A session's streams, the oldest first."""
        ...

    async def claim(self, stream: StreamId) -> StreamRecord | None:
        """Become the stream's writer: a new fence and a new generation (6). `None` if there is no such stream."""
        ...

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        """The ended generations of a stream, the oldest first (6)."""
        ...

    async def sweep(self, cutoffs: Cutoffs) -> int:
        """Forget what has expired; gives the number of rows. Never long at a time in the way of `commit`."""
        ...


class Sessions(Protocol):
    async def session(self, session: SessionId) -> SessionRecord | None: ...

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[SessionRecord]:
        """Sessions by id, a page at a time."""
        ...


class Ledger(Protocol):
    async def calls(self, session: SessionId) -> Sequence[CallRecord]:
        """A session's rows that are retained, the oldest first."""
        ...

    async def requests(self, stream: StreamId) -> Sequence[tuple[int | str, str]]:
        """Ids and methods of the requests that a stream answers, in their order."""
        ...


class Asks(Protocol):
    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        """A session's open asks, the oldest first."""
        ...


class Readers(Protocol):
    async def reader(self, stream: StreamId) -> ReaderRecord | None: ...


class Wakeups(Protocol):
    def subscribe(self, listener: Callable[[StreamId], None]) -> Callable[[], None]:
        """Be told, in the event loop, of streams that have grown by somebody else's hand (8). Gives the way to stop."""
        ...


class Mailbox(Protocol):
    """Messages between nodes: each is collected once, in order."""

    async def join(self, node: NodeId) -> Fence:
        """Enter as a node: gives the fence under which it opens streams. No two nodes ever get the same."""
        ...

    async def post(self, node: NodeId, message: bytes) -> None: ...

    async def collect(self, node: NodeId) -> Sequence[bytes]: ...


class Store(Events, Sessions, Ledger, Asks, Readers, Wakeups, Mailbox, Protocol):
    """All of it. Open it with `async with`, or call `open` and `aclose`."""

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
