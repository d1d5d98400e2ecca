"""The interface of a store: a few small protocols, and the promises behind them.

Everything that must not be lost goes in as *steps*: frozen values, committed in groups. A step says what is so, not
how to get there, so a step that arrives twice (the first answer was lost, or came too late) changes nothing. That
makes it safe to hold steps while the store fails and to write them afterwards, in order.

The promises; the contract suite in `perdure.testing` carries the same numbers.

1. **Atomic.** `commit` applies all its steps or none. What one `Append` carries (events, ends of calls, the seal) is
   seen together or not at all.
2. **Fenced.** An `Append`, a `PutCall` and a `Release` show a fence. Such a step is refused (`StaleFence` at its place
   in the result), and the others are not touched, if another writer has claimed the stream since, or if it is sealed or
   let go of: then this writer may write nothing more. An `Append` is refused as `Behind` if the stream is still this
   writer's and its events would leave a hole, or if there is no such stream: then the store has lost what it had
   (below).
3. **Durable.** What `commit` returned without error survives the death of this process; the backend's own page says
   what else it survives.
4. **Ordered.** `read` gives each retained event after a sequence number once, in order. Numbers of one stream rise by
   one. What is missing between two of them was trimmed or lost: the reader sees the gap in the numbers. No number ever
   names another event than before.
5. **Repeatable.** Committing again what was committed last, in the same order, changes nothing: events are known by
   their numbers, an ended call keeps its first end. (A revision may rise by it.)
6. **Generations.** `claim` durably raises a stream's generation before its new writer appends, and records where the
   previous generation ended, so that an old position never names a new event. Of several claims at once, one succeeds.
   A generation that the claimer knows of does not come again, although the store may have lost it.
   No fence is given twice, by `join` or by `claim`, not even by a store that has lost what it gave out last (a replica
   that lagged): a counter does not do, 40 random bits do (`_core.ids.new_fence`). Fences are compared for equality and
   fit 63 bits; nothing orders them, because the generation tells which claim is later.
7. **Answers last.** `Trim` never removes a final answer; only `DropStream`, `EndSession` and `sweep` do.
8. **Only a hint.** A wake-up may be lost, late or needless; `read` tells the truth.
9. **Failure is named.** A backend's own exceptions leave as `StoreError`, with their cause kept.
10. **Once each.** Mail stays until a `MailReceived` step takes it away, in one commit with what came of it; mail of a
    dead node goes to the node that buries it. So whatever a message causes in the store happens once. A node's messages
    become visible in the order of their keys, however many nodes post to it at once: behind a message that was read no
    other one appears in front of it, which `MailReceived` would take away unread. No key comes again, not even after
    the store has lost some: it is at least the time in microseconds (`next_key`).
11. **Dead is dead.** `Liveness.dead` names only nodes that write nothing more under any claim that they held, or whose
    claims the fences take away before another node acts on them. A node that has beaten since it was found dead is not
    buried. A node whose claim ran out goes on with its next beat, unless it is buried; if it is, it knows by then.
12. **One of each.** No two calls of a session's incarnation run under one id: the second `OpenStream` is refused
    (`IdTaken`), in whatever process it is made. A stream of a session that has ended, or is not there, is not opened
    (`SessionEnded`). Of several writers that open a `unique` stream of one id, one succeeds; none, once it is sealed.
13. **One chain.** A session has one chain of resume tokens at most, and none once it has ended. Of several changes to a
    chain that begin from the same state, one succeeds, in whatever process; what it wrote is durable (3).
14. **Exact limits.** A `PutSession` or `OpenStream` that carries a limit is refused (`TooManySessions`, `TooManyCalls`)
    where it would go beyond, however many processes commit at once. Of sessions that have ended the store keeps a
    bounded number of small records: `_core.retention` has the numbers, and the oldest go first.
15. **Holders are known.** A living node that has said that it holds steps is named by every other node's
    `Liveness.holders`, from the moment that `hold` returns until it says that it holds nothing more. That needs no
    write: what it says is that writing fails. A dead node is named until it is buried, at the longest.
16. **Forwarded in order.** Messages that a node forwards to a stream belong to the stream, whichever node writes it.
    They wait in the order of their commits; those of one sender are numbered, each number is taken once, and none
    before the one in front of it. An `Append` takes them away in one step with their events, so each is appended once.
17. **In use, it stays.** No time that has passed ends a session that a node which is not buried uses: as its home, as
    the writer of a call that has not ended, or as the node of a reader. `sweep`, `longest_dormant` and an `EndSession`
    with `unused_since` leave it alone.
18. **One clock.** `clock` tells all nodes that live at the same time the same time, nearly, and does not jump, whatever
    their wall clocks do. A node that finds no other one has nothing but its wall clock to begin with.
19. **Read this far.** How far a stream's readers have got only moves forward, and never beyond what was appended in the
    generation in which they read it: an event that took the number of a lost one counts as unread.
20. **Within its time.** A call answers, or raises `StoreUnavailable`, before the store has been stuck in it for
    `store_timeout`. Time in which the store works on other calls, or in which this process is late, does not count.
21. **As it was seen.** An `OpenStream` that carries a revision is refused (`StaleRecord`) if the session's record has
    another one. Whatever changes a record raises its revision; a change of `active` alone does not. A store whose stamp
    never says that nothing was written refuses it also while messages wait for the session's standalone stream and the
    opener is that stream's writer: it appends them first.
22. **A call is not a session.** Records have a kind. Those of one kind are counted, limited and given up apart from
    those of the others, and a record that is no session's leaves nothing when it ends. The limit of a caller's single
    calls is kept nearly: those that are committed at the same moment may not count each other.
23. **One secret for all.** Of several values that are offered for the same name at once, in whatever process, one is
    kept, and all that ask get it.

**A store that has lost its tail.** A server that crashed without waiting for its disk, a replica that lagged when it
was promoted, or a file that was put back from a copy comes back with an earlier state of everything, whatever promise 3
says. What was written last is gone, and no call may wait for it: the writer of a stream learns from `Behind` how far
the store is, and repeats the append with `lost`. The store then takes it with the hole, so that numbers go on and
readers are told of the gap. Where the whole stream is gone its writer opens it again first, with its calls. So a store
need not know of its loss. It only must not give out again what it gave out in the part that it has lost: fences (6),
and the keys of mail and of forwarded messages (10). Generations are known to the processes that live. Where none does,
a backup is marked, or the operator says that the store was put back (`store.upkeep`), and some generations are skipped.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from perdure._core.chains import Chain
from perdure._core.histograms import Histogram
from perdure._core.ids import Fence, Kind, NodeId, RecordKind, SessionId, StreamId
from perdure._core.ids import Generation as Generation
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, ClaimState, SessionState
from perdure.errors import (
    Behind,
    IdTaken,
    MailFull,
    NodeGone,
    SessionEnded,
    StaleFence,
    StaleRecord,
    TooManyCalls,
    TooManySessions,
)

T = TypeVar("T", bound=tuple[Any, ...])

RECORD_VERSION = 3
"""The highest version of a record that this release knows; it refuses a higher one by name."""

PLAIN_VERSION = 2
"""Written into every record that the release before reads rightly: both may share a store while one replaces the
other."""


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
    """The principal that opened it; empty where clients do not authenticate."""
    state: SessionState
    version: str
    """The negotiated protocol version; empty while OPENING."""
    client_params: bytes
    """The client's `initialize` params, as JSON."""
    result: bytes
    """The server's `initialize` result, as JSON; empty while OPENING. In a record of kind KEY, what stands for the
    request (`CallRecord.digest`)."""
    initialized: bool
    sticky: tuple[bytes, ...]
    """Requests to repeat when the session is loaded: `logging/setLevel`, `resources/subscribe`."""
    incarnation: int
    standalone: StreamId
    created: float
    active: float
    """Last activity, by the store's clock. Times serve retention only, and end nothing that is in use (17)."""
    ended: str = ""
    """Why, once it has: the value of a `SessionStep`."""
    address: str = ""
    """The address it was opened from, if it has no owner: this tells callers without a name apart."""
    revision: int = field(default=0, compare=False)
    """Rises with each change but that of `active` (21)."""
    kind: RecordKind = RecordKind.SESSION


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
    """The reader of this call's stream was lost before the end, and no reader has come to the end since."""


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
    """The tool or prompt that it asks for, also when the call has ended: for people. Earlier releases kept none."""


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
    """The reader of a stream: there is one at most, the newest."""

    stream: StreamId
    reader: str
    node: NodeId
    seq: int
    """As far as it had got when this was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRecord:
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
    record: int
    """The `RECORD_VERSION` that it writes."""
    beat: int
    """Rises with each `Liveness.beat`."""
    facts: bytes
    """What it told of itself with its last beat, as JSON; for operators, no decision depends on it."""


class Outline(NamedTuple):
    """A record in a list: without what its client and its server have said. (A tuple, because a list may have a hundred
    thousand.)"""

    id: SessionId
    owner: str
    state: SessionState
    version: str
    initialized: bool
    created: float
    active: float
    kind: RecordKind
    call: CallState | None
    """The state of a single call's row; `None` for a session, and if no row is left."""


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
    """How much a store holds, as far as that can be told by a short look."""

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


class KeptCall(NamedTuple):
    """A single call, as of one moment where the store reads it in one go."""

    record: SessionRecord
    call: CallRecord | None
    """`None`: the record is that of a session, or it ends in this moment."""
    recent: Sequence[Event] = ()
    """The newest of the retained events of its stream, the oldest of them first."""
    asks: Sequence[AskRecord] = ()


class Followed(NamedTuple):
    """A stream and what has come behind a number, all as of one moment."""

    record: StreamRecord
    events: Sequence[Event] | None = None
    """As `read` gives them; `None`: they were not read."""
    revision: int | None = None
    """Of the record of the stream's session (21); `None`: it was not read, or the session is not there."""

    def behind(self, earlier: "Followed | None") -> "Followed":
        """The same with the events of an earlier one in front, if they are the ones directly before, written under the
        same claim: what was written under an earlier one may have been lost, and its numbers used again."""
        if earlier is None or not earlier.events or not self.events or earlier.record.fence != self.record.fence:
            return self
        if earlier.events[-1].seq + 1 != self.events[0].seq:
            return self
        return self._replace(events=(*earlier.events, *self.events))


class Overview(NamedTuple):
    """The nodes on the store, and whether anything waits for one of them."""

    nodes: Sequence[NodeRecord]
    dead: Mapping[NodeId, int]
    """The nodes that are dead and not buried yet (11), each with its beat from when it was found dead, or from
    before."""
    has_mail: bool = True
    """Mail may wait for this node, behind the key that it has named. `False`: there was none."""
    has_forwarded: bool = True
    """Forwarded messages may wait for streams that this node writes, or that no node writes. `False`: there were
    none."""


MAX_COUNTED = 100_000
"""Events that `extent` counts one by one: about 0.05 s of reading."""

OLDEST_STREAMS = 1_000
"""Streams whose oldest event `extent` looks at: the oldest event is in one of the oldest streams, or not much older."""

READ_BYTES = 256 << 10
"""Bytes of events that are read in one go, and the rest of the last event: enough for one write to a reader, and little
to carry for each of many."""

MAIL_AT_ONCE = 256
"""Messages that are read in one go."""

MAX_MAIL = 10_000
"""Messages that wait for one node, those aside that it has inherited. One that does not deal with its mail for long (it
was stopped, or it hangs) must not fill the store; what its neighbours have for it is refused."""

KEPT_GENERATIONS = 1_000
"""Ends of generations that are kept of one stream; a position of an older one is answered as lost."""


MAX_FORWARDED = 1_000
MAX_FORWARDED_BYTES = 16 << 20
"""Messages, and their bytes, that wait for one stream. A writer that lives takes them within milliseconds; one that
does not (it was stopped, or it hangs) must not fill the store, so the senders wait. Where nothing waits, what one
sender forwards at once is taken whatever its size: otherwise a large message would wait for ever."""

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
    """The key of a message behind another one, at a time in seconds since 1970.

    It rises whatever the clock does. The clock is there for a store that has lost the last keys: what it counts again
    lies behind them, because time has passed.
    """
    return max(last + 1, int(now * 1_000_000))


def record_version(record: object) -> int:
    """The version that a record is written with."""
    match record:
        case SessionRecord(kind=RecordKind.CALL | RecordKind.KEY | RecordKind.MARK):
            return RECORD_VERSION
        case CallRecord(digest=digest) if digest:
            return RECORD_VERSION
    return PLAIN_VERSION


# --- Steps ----------------------------------------------------------------------------------------------------------


class Step:
    """What a commit applies; each kind of step is a class below."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """How many records of the new one's kind may be open at once, the new one among them (14, 22)."""

    total: int | None
    """Of all callers. `None`, as for single calls: any number. To count them exactly, every call would wait for all
    others."""
    caller: int
    """Of one owner; where there is none, of one address. Callers with neither share the limit for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutSession(Step):
    """A new session; nothing if it is there already.

    Refused beyond its limits (`TooManySessions`): the caller's own is looked at first (14).
    """

    record: SessionRecord
    limits: SessionLimits | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeSession(Step):
    """Change what is given and nothing else, so that two processes do not undo each other's changes.

    Nothing, if the session is not there or has ended. `active` only moves forward.
    """

    session: SessionId
    active: float | None = None
    state: SessionState | None = None
    version: str | None = None
    result: bytes | None = None
    initialized: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stick(Step):
    """A sticky request succeeded: `_core.sticky.after` tells what is to be repeated from now on."""

    session: SessionId
    request: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EndSession(Step):
    """Forget a session's streams, events, calls, asks and readers; its record stays, ENDED, until it is swept.

    The first reason stays. The record loses what the server answered and what it repeats, and `client_params` too
    unless `_core.retention.keeps_params`; beyond a number of ended records the oldest go (14). Of a record that is no
    session's nothing stays.
    """

    session: SessionId
    time: float
    reason: str
    unused_since: float | None = None
    """Given: only if its last activity is not later, and no node uses it (17); otherwise nothing happens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStream(Step):
    """Open a stream, together with the ledger rows of the requests that it answers."""

    record: StreamRecord
    calls: tuple[CallRecord, ...] = ()
    most_calls: int | None = None
    """How many calls of the session may be open at once, these among them; refused beyond (14)."""
    seen: int | None = None
    """The revision of the session's record that the caller knows; refused if it has another one by now (21)."""
    unique: bool = False
    """The stream's id is made of something that another writer may know as well, such as a key. Refused (`StaleFence`)
    if the stream is there already and is another writer's, or is sealed (12)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallEnd:
    incarnation: int
    request_id: int | str
    state: CallState


@dataclass(frozen=True, kw_only=True, slots=True)
class Append(Step):
    """Add events to a stream; with the last answer also the ends of its calls and the seal, in the same step.

    Of events that are known by their number already only the rest is added (5). It may be refused as `StaleFence` or as
    `Behind` (2).
    """

    stream: StreamId
    fence: Fence
    events: tuple[Event, ...]
    ends: tuple[CallEnd, ...] = ()
    seal: bool = False
    taken: int = 0
    """The forwarded messages up to and including this key are among the events, and wait no longer (16)."""
    lost: bool = False
    """The store has lost what came before, and takes the events with the hole in front of them. It is what the writer
    answers to `Behind`, and refused as any other append if the stream is not there or not this writer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward(Step):
    """Messages for a stream from a node that does not write it, in their order (16).

    Of messages that are known by their number already only the rest is added (5). Refused if the stream is gone
    (`SessionEnded`), if no node that has joined writes it (`NodeGone`: the sender may claim it), if the message in
    front of these is not there (`Behind`: it was refused, or the store has lost it), or if too much waits for it
    (`MailFull`).
    """

    stream: StreamId
    node: NodeId
    """The sender's node. It has one sender for each stream; the numbers of a previous one are forgotten."""
    sender: str
    first: int
    """The number of the first message; a sender begins with 1."""
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PutCall(Step):
    """Change the row of a call that has not ended: its writer runs it again, or has it wait."""

    stream: StreamId
    fence: Fence
    incarnation: int
    request_id: int | str
    state: CallState
    attempt: int
    progress: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Step):
    """The writer of a stream lets go of it: from now on no node writes it, until one claims it."""

    stream: StreamId
    fence: Fence


@dataclass(frozen=True, kw_only=True, slots=True)
class Trim(Step):
    """Forget a stream's events up to and including a sequence number, final answers excepted."""

    stream: StreamId
    through: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DropStream(Step):
    """Forget a stream with everything in it."""

    stream: StreamId


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAsk(Step):
    record: AskRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseAsk(Step):
    session: SessionId
    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PutReader(Step):
    """A reader attached, in place of the one that was there."""

    record: ReaderRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveReader(Step):
    """A reader has got further; nothing happens if another one has taken its place."""

    stream: StreamId
    reader: str
    seq: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveReader(Step):
    """A reader left; nothing happens if another one has taken its place."""

    stream: StreamId
    reader: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached(Step):
    """Readers of a stream have got this far, in this generation (19). Nothing if the stream is not there."""

    stream: StreamId
    generation: int
    through: int
    unread: bool = False
    """From now on it counts as a call's stream whose reader was lost before the end; or it does not any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendMail(Step):
    """A message for a node. The node gets a hint.

    Refused if there is no such node (`NodeGone`), or too much waits for it (`MailFull`).
    """

    node: NodeId
    message: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MailReceived(Step):
    """A node has dealt with its mail up to and including a key (10)."""

    node: NodeId
    through: int


StepRefusal = (
    StaleFence | StaleRecord | Behind | IdTaken | NodeGone | MailFull | SessionEnded | TooManySessions | TooManyCalls
)
Refusals = Sequence[StepRefusal | None]
"""For each step of a commit: `None`, or why it was refused."""


# --- Interfaces -----------------------------------------------------------------------------------------------------


class EventStore(Protocol):
    """The log: streams and what is in them."""

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        """Apply the steps, all or none (1, 2, 3, 5)."""

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        """The same, if it can be done at once, without waiting; else `None`, and nothing was done."""

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        """The retained events after a sequence number (4), `limit` at the most.

        An answer ends with the event that brings it to `READ_BYTES`. So a short one is not the end of the stream; an
        empty one is."""

    async def streams(self, session: SessionId) -> Sequence[StreamRecord]:
        """A session's streams, the oldest first."""

    async def streams_by_id(self, streams: Sequence[StreamId]) -> Mapping[StreamId, StreamRecord]:
        """Those of the streams that are there, however many are asked for."""

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        """Those of some streams that are there, each with its retained events after a number, `limit` of each at the
        most. A store that answers over a network reads it in one go."""

    async def written_by(self, node: NodeId) -> Sequence[StreamRecord]:
        """The streams that a node writes, sealed ones excepted, the oldest first."""

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[Forwarded]:
        """The messages that wait for a stream, after a key, the oldest first, `FORWARDED_AT_ONCE` at most (16)."""

    async def forwarded_to(self, node: NodeId) -> Sequence[StreamRecord]:
        """The streams for which forwarded messages wait, and which a node writes, or none that has joined."""

    async def unread(self, session: SessionId) -> Sequence[StreamRecord]:
        """A session's streams that count as unread (`Reached`), the oldest first."""

    async def kept(self, session: SessionId) -> Sequence[KeptRecord]:
        """What is retained of a session's sealed streams, the oldest first."""

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        """Become the stream's writer: a new fence and a new generation (6), the next one and above `known`: a node may
        have seen one that the store has lost.

        `None` if there is no such stream, it is sealed, or its fence is no longer the one that the caller has seen.
        """

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        """The ended generations of a stream, the oldest first (6)."""

    async def sweep(self, cutoffs: Cutoffs) -> int:
        """Forget what has expired; gives the number of rows. Never long at a time in the way of `commit`."""

    async def extent(self) -> Extent:
        """How much there is, by a look that takes a fraction of a second however much that is."""


class SessionStore(Protocol):
    async def session(self, session: SessionId) -> SessionRecord | None: ...

    async def load(self, session: SessionId) -> Loaded | None:
        """A session, and what a node needs of its streams to serve it. A store that answers over a network reads it in
        one go."""

    async def single_call(self, session: SessionId, *, recent: int) -> KeptCall | None:
        """A record and its one call, as `CallStore` and `AskStore` give it, with so many of the call's newest events;
        once it has ended, with its answer alone. Events of more than `READ_BYTES` may be left out. Of a session, the
        record alone. A store that answers over a network reads it in one go."""

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[SessionRecord]:
        """Sessions by id, a page at a time."""

    async def outlines(self, *, after: SessionId | None, limit: int) -> Sequence[Outline]:
        """The same records in short, for lists of all of them."""

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        """Begin an incarnation: the record with the next number. `None` if it is not there or has ended."""

    async def count_states(self, kind: RecordKind = RecordKind.SESSION) -> Mapping[SessionState, int]:
        """How many records of a kind are in each state; those without any may be missing."""

    async def longest_dormant(
        self,
        owner: str | None = None,
        address: str = "",
        *,
        kind: RecordKind = RecordKind.SESSION,
        delivered: bool = False,
    ) -> SessionRecord | None:
        """The one without activity for longest, of one caller or of all: of those of a kind that are dormant and in no
        use (17). `delivered`: of one caller's, only those without a stream that counts as unread (`Reached`)."""

    async def count_of(self, owner: str, address: str, *, kind: RecordKind) -> int:
        """How many records of a kind one caller has that have not ended."""

    async def bytes_of(self, owner: str, address: str) -> int:
        """Bytes of what is kept of one caller's single calls that have ended, nearly: answers, and what their clients
        said of themselves."""

    async def keep_secret(self, name: str, made: bytes) -> bytes:
        """Keep a secret, unless there is one of that name; gives the one that is kept (23)."""

    async def secrets(self) -> Mapping[str, bytes]:
        """The secrets by their names."""


class CallStore(Protocol):
    async def calls(self, session: SessionId) -> Sequence[CallRecord]:
        """A session's rows that are retained, the oldest first."""

    async def calls_on(self, stream: StreamId) -> Sequence[CallRecord]:
        """The rows of the requests that a stream answers, in their order."""

    async def open_call(self, session: SessionId, *, incarnation: int, request_id: int | str) -> CallRecord | None:
        """The call that has not ended under that id (as `coerce_id` compares them)."""

    async def open_calls(self, *, limit: int) -> Sequence[OpenCall]:
        """The calls of all sessions that have not ended, by the id of the session, `limit` at the most."""


class ChainStore(Protocol):
    """Chains of resume tokens (13). They hold hashes; no token ever gets here."""

    async def chain(self, name: str) -> Chain | None: ...

    async def chain_of(self, session: SessionId) -> Chain | None: ...

    async def put_chain(self, chain: Chain) -> bool:
        """The session's chain from now on, in place of the one it may have. `False`: the session has ended."""

    async def change_chain(self, seen: Chain, chain: Chain | None) -> bool:
        """Change a chain's secrets, or forget it, if it is still the one that was seen."""


class AskStore(Protocol):
    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        """A session's open asks, the oldest first."""


class ReaderStore(Protocol):
    async def reader(self, stream: StreamId) -> ReaderRecord | None: ...


HintListener = Callable[[Sequence[StreamId], Sequence[Followed]], None]
"""Called in the event loop with the streams to look at again; with none, at all that you follow and at your mail. Then
with what the hint has brought along."""


class Wakeups(Protocol):
    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        """Call `listener` when other nodes hint at something for this one, and now and then when something was written
        (8). Gives the way to stop."""

    def hint(self, node: NodeId, streams: Sequence[StreamId], enclosed: Sequence[Followed] = ()) -> None:
        """Tell a node to look at streams again: they have grown, or another reader is there. Never waits or fails.

        `enclosed`: what the node would read there now. A store for which a read is dear brings it along if it is small.
        """

    def stamp(self) -> object:
        """Equal values mean that no other process has written anything between the two moments.

        So what was read then is still so. A store that cannot tell without waiting gives a new value each time: then
        what only looks at a session reads its record again, and a new call shows the revision that it has seen (21).
        """


class Liveness(Protocol):
    """One node's view of which nodes are alive, itself included.

    `_core.leases` decides what follows from beats and locks; a store has to bring the facts. A store that finds dead
    processes by locks sooner than by their leases commits nothing for a node that it does not know, because the lock of
    a process that lives may be lost: `own_claim` is BURIED then, and the commit raises `StoreUnavailable`.
    """

    @property
    def own_claim(self) -> ClaimState:
        """What this node's own claim is at this moment (`_core.states.CLAIM`), without asking the store. FROZEN: it
        writes and shows nothing. BURIED: it never will again. Asked for with each commit and each event."""

    @property
    def lapses(self) -> bool:
        """Whether the claim of a process that lives may run out, so that other nodes settle its calls."""

    async def beat(self, facts: bytes) -> None:
        """Show that this node is alive, and what it has to tell of itself. Its claim is HOLDING behind that if the
        store knows the node, whatever it was before, and BURIED if it does not (11). A store in which the claim of a
        process that lives never runs out need not write what it was told before."""

    async def dead(self) -> Sequence[NodeId]:
        """Nodes that are dead and not buried yet (11)."""

    async def overview(self, *, mail_after: int) -> Overview:
        """All that a node looks at in each of its rounds. A store that answers over a network reads it in one go."""

    def hold(self, holding: bool) -> None:
        """Say that this node shows what is not in the store, or that all of it is written (15). Never waits or fails.

        A store that machines share says it by its own means, as long as this node's claims hold: a word to its
        neighbours, or a flag in a service beside the log.
        """

    async def holders(self) -> Sequence[NodeId]:
        """The other nodes that have said so and live (15). Asked before something is denied that the store lacks."""

    def ages(self) -> dict[NodeId, float]:
        """Seconds since each node was last known to be alive, as far as this one has seen; itself included."""


class NodeStore(Protocol):
    async def join(self, node: NodeId) -> Fence:
        """Enter as a node: gives the fence under which it opens streams. No two nodes ever get the same."""

    async def leave(self, node: NodeId) -> None:
        """The node stops: dead from now on, to be buried by another (at once, if it left nothing behind)."""

    def clock(self) -> float:
        """The store's time (18), for a node that has joined: seconds since 1970, by the wall clock of the node that
        joined when no other one was there."""

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> Liveness:
        """The view of a node that has joined: by locks for stores of one machine, else by leases."""

    async def nodes(self) -> Sequence[NodeRecord]: ...

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        """Forget a dead node: its mail goes to the heir, its readers go. Gives the streams that they read; none for a
        node that is not there any more.

        Whatever it wrote (`written_by`) has been claimed, or let go of, before. `beat` is the node's, read before it
        was found dead: `None` is given, and nothing was done, if it has another one by now (11).
        """

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[Mail]:
        """A node's messages that it has not dealt with yet, after a key, the oldest first, `MAIL_AT_ONCE` at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """Tells what one process has counted of its store. Other nodes see it with the process's beats."""

    figures: Mapping[str, float]
    """Counts since the start, and numbers of this moment, by names that `telemetry.prometheus` knows."""
    seconds: Mapping[str, Histogram]
    """How long a `commit` and a `read` took, from asking the server to its answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Tells what is known of the whole store, whichever process wrote it."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes, by the name of a table."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Nearly, by the name of a table."""
    rotated: Mapping[str, float] = field(default_factory=dict)
    """When each part of the store began to be written to its present place, by the store's clock."""
    lag_bytes: Mapping[str, int] = field(default_factory=dict)
    """How far each standby is behind."""
    lag_seconds: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a store that is a file: what is `used` in it, what is `free` in it, and the `log` beside it."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Retained events by kind (`event`, `answer`), as of the last count."""
    kept_bytes: Mapping[str, int] = field(default_factory=dict)


class Usage(NamedTuple):
    """What the streams of a session, and their readers, tell of its use."""

    streams: Sequence[StreamRecord] = ()
    """All of them, the oldest first."""
    newest: float = 0.0
    """When its newest stream was opened, or the newest event that is retained was appended."""
    readers: Sequence[ReaderRecord] = ()


NO_USAGE = Usage()


class TellsUsage(Protocol):
    """Is kept by a store that reads how many sessions are used in one go; `usage_of` asks any store."""

    async def usage(self, sessions: Sequence[SessionId]) -> Mapping[SessionId, Usage]:
        """Of sessions that have streams."""


class Measured(Protocol):
    """Is kept by a store that has something to tell for the metrics; `measures_of` and `survey_of` ask any store."""

    def measures(self) -> Measures:
        """Never waits: it goes with each beat."""

    async def survey(self) -> Survey:
        """Asked for with each scrape. What is costly to find out may be some time old."""


class Opens:
    """Opens a store for the time of an `async with`."""

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Store(EventStore, SessionStore, ChainStore, CallStore, AskStore, ReaderStore, Wakeups, NodeStore, Protocol):
    """All of it. Open it with `async with`, or call `open` and `aclose`."""

    shared: bool
    """Several processes may open it at once."""
    keeps_time: bool
    """It keeps promise 20 by itself.

    A store that queues, or that shares a file or a server with others, knows best what is stuck and what only waits its
    turn (`store.time_limit`). The calls of any other store are limited by `within_time` there, in their order."""

    async def open(self) -> None: ...

    async def probe(self, size: int) -> None:
        """Write so many bytes and take them away again: whether the store takes writes."""

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


def changed(record: SessionRecord, step: ChangeSession) -> SessionRecord:
    """Give a record as a step changes it."""
    fields = {name: getattr(step, name) for name in ("state", "version", "result", "initialized")}
    given = {name: value for name, value in fields.items() if value not in (None, getattr(record, name))}
    active = max(record.active, step.active or 0.0)
    return replace(record, active=active, revision=record.revision + bool(given), **given)


def with_sticky(record: SessionRecord, requests: tuple[bytes, ...]) -> SessionRecord:
    """Give a record with other sticky requests."""
    return replace(record, sticky=requests, revision=record.revision + (requests != record.sticky))


async def paged(read: Callable[[int], Awaitable[Sequence[T]]]) -> AsyncIterator[T]:
    """Give all that a store gives page by page; `read` gives the page behind a number, which each item has first."""
    after = 0
    while page := await read(after):
        for item in page:
            yield item
        after = page[-1][0]


def measures_of(store: object) -> Measures | None:
    """Give what a store has to tell, or `None` if it has nothing."""
    measures: Callable[[], Measures] | None = getattr(store, "measures", None)
    return None if measures is None else measures()


async def survey_of(store: object) -> Survey | None:
    """Give what a store's server says, or `None` if there is none."""
    survey: Callable[[], Awaitable[Survey]] | None = getattr(store, "survey", None)
    return None if survey is None else await survey()


async def usage_of(store: Store, sessions: Sequence[SessionId]) -> Mapping[SessionId, Usage]:
    """Give how sessions are used, as far as their streams tell; piece by piece from a store that has no better way."""
    usage: Callable[[Sequence[SessionId]], Awaitable[Mapping[SessionId, Usage]]] | None = getattr(store, "usage", None)
    if usage is not None:
        return await usage(sessions)
    return {session: await _usage_apart(store, session) for session in sessions}


async def _usage_apart(store: Store, session: SessionId) -> Usage:
    streams = await store.streams(session)
    last = [event for stream in streams for event in await store.read(stream.id, after=stream.last - 1, limit=1)]
    times = [*(stream.opened for stream in streams), *(event.time for event in last)]
    readers = [await store.reader(stream.id) for stream in streams]
    return Usage(streams, max(times, default=0.0), [reader for reader in readers if reader is not None])


async def load_apart(store: Store, session: SessionId) -> Loaded | None:
    """Load a session in two reads, for a store in which another read costs little."""
    record = await store.session(session)
    return None if record is None else Loaded(record, await stream_by_id(store, record.standalone))


async def single_call_apart(store: Store, session: SessionId, recent: int) -> KeptCall | None:
    """Read a single call piece by piece, for a store in which another read costs little."""
    record = await store.session(session)
    calls = await store.calls(session) if record is not None and record.kind is RecordKind.CALL else []
    if record is None or not calls:
        return None if record is None else KeptCall(record, None)
    call = calls[0]
    stream = await stream_by_id(store, call.stream)
    last = 0 if stream is None else stream.last
    over = call.state not in (CallState.RUNNING, CallState.WAITING)
    newest = await store.read(call.stream, after=max(0, last - (1 if over else recent)), limit=recent)
    if over and not newest and not await store.calls(session):
        return KeptCall(record, None)  # it was given up between two of these reads
    return KeptCall(record, call, newest, () if over else await store.asks(session))


async def stream_by_id(store: EventStore, stream: StreamId) -> StreamRecord | None:
    """Give one stream, or `None` if it is not there."""
    return (await store.streams_by_id((stream,))).get(stream)
