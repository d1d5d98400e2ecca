"""The records that a store keeps, and the limits of waiting messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perdure._core.histograms import Histogram
from perdure._core.ids import Fence, Kind, NodeId, RecordKind, SessionId, StreamId
from perdure._core.limits import Caller
from perdure._core.states import CallState, SessionState, ToolStepState
from perdure._core.tool_steps import ToolStepKind


class Event(NamedTuple):
    """One message of a stream. (A tuple, because there are tens of thousands a second.)"""

    seq: int
    time: float
    payload: bytes
    final: bool = False
    """A response: the last thing to be forgotten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """Everything that a node needs to continue a session."""

    id: SessionId
    owner: str
    """The principal that opened it; empty where clients do not authenticate."""
    state: SessionState
    version: str = ""
    """The negotiated protocol version; empty while OPENING."""
    client_params: bytes = b""
    """The client's `initialize` params, as JSON."""
    result: bytes = b""
    """The server's `initialize` result, as JSON; empty while OPENING."""
    initialized: bool = False
    """The client has sent `notifications/initialized`; never so of a durable call."""
    sticky: tuple[bytes, ...] = ()
    """Requests to repeat when the session is loaded: `logging/setLevel`, `resources/subscribe`."""
    incarnation: int = 1
    standalone: StreamId
    created: float
    active: float
    """Last activity, by the store's clock. Times serve retention only, and end nothing that is in use (17)."""
    ended: str = ""
    """Why, once it has: the value of a `SessionStep`."""
    address: str = ""
    """The address it was opened from, if it has no owner: callers without a name differ by it."""
    revision: int = field(default=0, compare=False)
    """Rises with each change but that of `active` (21)."""
    kind: RecordKind = RecordKind.SESSION
    is_task: bool = False
    """Of a durable call: its client can ask for it again, because it has the call's handle or gave it a key."""
    digest: bytes = b""
    """Of a key: the digest of the request whose answer was given up (`CallRecord.digest`)."""
    upstream: bytes = b""
    """What the runtime needs to continue elsewhere, as JSON; empty where it needs nothing."""

    def is_own(self, owner: str, kind: RecordKind) -> bool:
        """Whether it is the record of something of this kind that belongs to an owner, and has not ended."""
        return self.owner == owner and self.kind is kind and self.state is not SessionState.ENDED


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRecord:
    id: StreamId
    session: SessionId
    kind: Kind
    node: NodeId
    """The node that writes it; empty if none does. The writer of the standalone stream is the session's home."""
    fence: Fence
    opened: float
    generation: int = 1
    last: int = 0
    """The highest sequence number ever appended, whether retained or not."""
    sealed: bool = False
    delivered: int = 0
    """How far its readers have got, as far as it was written (19)."""
    unread: bool = False
    """The reader of this call's stream was lost before the end, and no reader has reached the end since."""
    answered: int = 0
    """The number of the early answer: readers of this call's stream end with it, while the call continues. 0: none."""


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
    attempt: int = 1
    progress: float | None = None
    """The highest progress sent."""
    state: CallState = CallState.RUNNING
    digest: bytes = b""
    """Stands for what was asked for, also when the call has ended: of a call whose client may ask for it twice."""
    name: str = ""
    """The tool or prompt that it asks for, also when the call has ended: for people."""
    upstream: bytes = b""
    """Whether its tool may run again, and how the runtime can continue it, as JSON (`_core.settling.UpstreamCall`);
    empty where that is not known, and once the call has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolStepRecord:
    """A step of a tool's call. (A `Step` of the store is another thing.)"""

    stream: StreamId
    incarnation: int
    request_id: int | str
    number: int
    """Rises in the order in which the call's steps began, over all its runs."""
    kind: ToolStepKind
    name: str
    """As the tool names it; of a question, a digest. Several steps of a call may have one name."""
    state: ToolStepState
    again: bool
    """It may be run again if it was interrupted."""
    own: bool
    """Done in the tool's own task, where the order of steps is the same in each run."""
    attempt: int
    """The run of the call in which it ended, or began."""
    began: float
    ended: float | None = None
    """When it ended; of a sleep, when it ends."""
    value: bytes = b""
    """Its result or its error, as JSON; empty while it is open, and once the call has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskRecord:
    """A server→client request that waits for the client's answer."""

    session: SessionId
    id: str
    stream: StreamId
    """On which the client is asked."""
    request: bytes
    node: NodeId
    call: StreamId = field(default=StreamId(""))
    """The stream of the call whose tool asks; empty if no call does."""
    incarnation: int = 0
    request_id: int | str | None = None
    """Of that call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderRecord:
    """The reader of a stream: there is one at most, the newest."""

    stream: StreamId
    reader: str
    node: NodeId
    seq: int
    """As far as it had got when this was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageRecord:
    """What is retained of a stream that is over, in numbers."""

    stream: StreamId
    opened: float
    events: int
    """Retained, answers aside."""
    answers: int
    event_bytes: int = 0
    answer_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A node that has joined and is not buried."""

    id: NodeId
    beat: int
    """Rises with each `Liveness.beat`."""
    facts: bytes
    """The facts of its last beat, as JSON; for operators, no decision depends on them."""


class Outline(NamedTuple):
    """A record in a list: without the messages of its client and its server."""

    id: SessionId
    owner: str
    state: SessionState
    is_task: bool
    active: float
    kind: RecordKind
    call: CallState | None
    """The state of a durable call's row; `None` for a session, and if no row is left."""


class OpenCall(NamedTuple):
    """A call that has not ended, without its request."""

    session: SessionId
    stream: StreamId
    method: str
    state: CallState
    attempt: int
    node: NodeId
    """The node that writes its stream; empty if none does."""


class Extent(NamedTuple):
    """How much a store holds, as far as a short read can find out."""

    size: int | None
    """Bytes on disk; `None` for a store that is not on one."""
    events: int
    """Retained events and answers."""
    is_exact: bool
    """`False`: there are more events than were counted, or a server has estimated them."""
    oldest: float | None
    """The time of the oldest event of the oldest streams; `None` if they have none."""


class Loaded(NamedTuple):
    """A session with its standalone stream."""

    record: SessionRecord
    standalone: StreamRecord | None
    """`None`: the session has ended, or ends in this moment."""


class CallSnapshot(NamedTuple):
    """A durable call, as of one moment where the store reads it in one go."""

    record: SessionRecord
    call: CallRecord | None
    """`None`: the record is that of a session, or it ends in this moment."""
    recent: Sequence[Event] = ()
    """The newest of the retained events of its stream, the oldest of them first."""
    asks: Sequence[AskRecord] = ()


class Followed(NamedTuple):
    """A stream, and its events after a number if they were read as of the same moment."""

    record: StreamRecord
    events: Sequence[Event] | None = None
    """As `read` returns them; `None`: they were not read."""
    revision: int | None = None
    """Of the record of the stream's session (21); `None`: it was not read, or the session does not exist."""
    reader: ReaderRecord | None = None


class AnsweredPage(NamedTuple):
    """A page of the calls that were answered before their end (`StreamRecord.answered`), of one caller's sessions that
    have not ended: `limit` at most of those after a time and an id, by `opened` and `id`."""

    caller: Caller
    after: tuple[float, str]
    limit: int


class Overview(NamedTuple):
    """The nodes on the store, and whether anything waits for one of them."""

    nodes: Sequence[NodeRecord]
    dead: Mapping[NodeId, int]
    """The dead nodes that are not buried yet (11), each with its beat when it was found dead, or an earlier one."""
    has_mail: bool = True
    """Mail may wait for this node, after the key that it has named."""
    has_forwarded: bool = True
    """Forwarded messages may wait for streams that this node writes, or that no node writes."""


MAX_COUNTED = 100_000
"""Events that `extent` counts one by one: about 0.05 s of reading."""

OLDEST_STREAMS = 1_000
"""Streams whose oldest event `extent` reads: the oldest event is in one of the oldest streams, or not much older."""

READ_BYTES = 256 << 10
"""Bytes of events that are read in one go, and the rest of the last event: enough for one write to a reader."""

MAIL_AT_ONCE = 256
"""Messages that are read in one go."""

MAX_MAIL = 10_000
"""Messages that wait for one node, without inherited ones. A node that does not read its mail (it was stopped, or it
hangs) must not fill the store: further mail is refused."""

KEPT_GENERATIONS = 1_000
"""Ends of generations that are kept of one stream; a position of an older one is answered as lost."""

MAX_FORWARDED = 1_000
MAX_FORWARDED_BYTES = 16 << 20
"""Messages, and their bytes, that wait for one stream. A living writer takes them within milliseconds; one that was
stopped, or hangs, must not fill the store, so the senders wait. If no message waits, one step is accepted whatever its
size: otherwise a large message would wait for ever."""

FORWARDED_AT_ONCE = 256
"""Forwarded messages that are read in one go."""


class Forwarded(NamedTuple):
    """A message that waits for the writer of its stream."""

    key: int
    """Rises with each message of a stream's, and never comes again (10)."""
    payload: bytes


class Mail(NamedTuple):
    key: int
    """Rises with each message of a node's, and never comes again (10)."""
    message: bytes


def next_key(last: int, *, now: float) -> int:
    """Return the key of a message after another one, at a time in seconds since 1970. It rises whatever the clock does.
    The clock is for a store that has lost the last keys: its next keys are higher, because time has passed."""
    return max(last + 1, int(now * 1_000_000))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """The numbers that one process has counted of its store. Other nodes read them with the process's beats."""

    figures: Mapping[str, float]
    """Counts since the start, and numbers of this moment, by names that `telemetry.prometheus` knows."""
    seconds: Mapping[str, Histogram]
    """How long a `commit` and a `read` took, from asking the server to its answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The numbers of the whole store, whichever process wrote it."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes, by the name of a table."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Nearly, by the name of a table."""
    rotated: Mapping[str, float] = field(default_factory=dict)
    """When each part of the store began to be written to its present place, by the store's clock."""
    lag_bytes: Mapping[str, int] = field(default_factory=dict)
    """The lag of each standby."""
    lag_seconds: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a store that is a file: what is `used` in it, what is `free` in it, and the `log` beside it."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Retained events by kind (`event`, `answer`), as of the last count."""
    kept_bytes: Mapping[str, int] = field(default_factory=dict)


class Usage(NamedTuple):
    """How a session is used, by its streams and their readers."""

    streams: Sequence[StreamRecord] = ()
    """All of them, the oldest first."""
    newest: float = 0.0
    """When its newest stream was opened, or the newest event that is retained was appended."""
    readers: Sequence[ReaderRecord] = ()


NO_USAGE = Usage()
