"""The steps that a commit applies, and why a store may refuse one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from perdure._core import sticky
from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure._core.states import CallState, SessionState
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
from perdure.store.records import (
    MAX_MAIL,
    AskRecord,
    CallRecord,
    Event,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
    ToolStepRecord,
)


class Step:
    """What a commit applies; each kind of step is a class below."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """How many records of the new one's kind may be open at once, the new one among them (14, 22)."""

    total: int | None
    """Of all callers. `None`, as for durable calls: any number. To count them exactly, every call would wait for all
    others."""
    caller: int
    """Of one owner; where there is none, of one address. Callers with neither share the limit for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutSession(Step):
    """Put a new session; nothing if it exists. Refused beyond its limits (`TooManySessions`), the caller's own first
    (14)."""

    record: SessionRecord
    limits: SessionLimits | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeSession(Step):
    """Change only the given fields, so that two processes do not undo each other's changes; nothing if the session does
    not exist or has ended. `active` only rises."""

    session: SessionId
    active: float | None = None
    state: SessionState | None = None
    version: str | None = None
    result: bytes | None = None
    initialized: bool | None = None
    is_task: bool | None = None
    upstream: bytes | None = None
    stick: bytes | None = None
    """A sticky request that succeeded: `_core.sticky.after` decides what is repeated from now on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndSession(Step):
    """Delete a session's streams, events, calls, asks and readers; its record stays, ENDED, until it is swept. The
    first reason stays. The record loses `result`, `sticky` and `upstream`, and `client_params` unless
    `_core.retention.keeps_params`; beyond a number of ended records the oldest are deleted (14). A record that is no
    session's is deleted whole."""

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
    """Other writers may make the same stream id, for example of a key. Refused (`StaleFence`) if the stream exists and
    is another writer's, or is sealed (12)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallEnd:
    incarnation: int
    request_id: int | str
    state: CallState
    stepped: bool = False
    """Its tool has done steps, whose values are emptied in the same commit (23)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Append(Step):
    """Add events to a stream; with the last answer also the ends of its calls and the seal, in the same step. Events
    whose numbers the store has are not added again (5). May be refused as `StaleFence` or as `Behind` (2)."""

    stream: StreamId
    fence: Fence
    events: tuple[Event, ...]
    ends: tuple[CallEnd, ...] = ()
    seal: bool = False
    taken: int = 0
    """The forwarded messages up to and including this key are among the events, and wait no longer (16)."""
    answered: int = 0
    """The number of the early answer among the events: a response to a call that continues. The first one counts."""
    lost: bool = False
    """The writer's answer to `Behind`: the store has lost the events before these, and accepts the hole. Refused as any
    other append if the stream does not exist or is not this writer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward(Step):
    """Forward messages to a stream from a node that does not write it, in their order (16). Messages whose numbers the
    store has are not added again (5). Refused if the stream is gone (`SessionEnded`), if no node that has joined writes
    it (`NodeGone`: the sender may claim it), if the message before these does not exist (`Behind`: it was refused, or
    the store has lost it), or if too many messages wait (`MailFull`)."""

    stream: StreamId
    node: NodeId
    """The sender's node. It has one sender for each stream; the numbers of a previous one are forgotten."""
    sender: str
    first: int
    """The number of the first message; a sender begins with 1."""
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PutCall(Step):
    """Change the row of a call that has not ended: its writer runs it again, has it wait, or has learnt how to continue
    it."""

    stream: StreamId
    fence: Fence
    incarnation: int
    request_id: int | str
    state: CallState
    attempt: int
    progress: float | None
    upstream: bytes | None = None
    """`None`: as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PutToolStep(Step):
    """Put a step of a call's tool, or its end; nothing if the step or the call has ended (23). Refused as a `PutCall`
    is, and as `Behind` where the store has lost the step that the writer has put last."""

    fence: Fence
    record: ToolStepRecord
    after: int = 0
    """The number of the call's step that the store must have; 0: of none."""
    after_ended: bool = False
    """It must have the end of that step as well."""

    @property
    def stream(self) -> StreamId:
        return self.record.stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Step):
    """The writer of a stream releases it: from now on no node writes it, until one claims it."""

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
    """A reader is on a stream, and has got this far. Nothing if the stream does not exist."""

    record: ReaderRecord
    attaches: bool = True
    """It takes the place of the previous reader. Otherwise it has got further; nothing if another reader has taken its
    place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveReader(Step):
    """A reader left; nothing happens if another one has taken its place."""

    stream: StreamId
    reader: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached(Step):
    """Readers of a stream have got this far, in this generation (19). Nothing if the stream does not exist."""

    stream: StreamId
    generation: int
    through: int
    unread: bool = False
    """From now on it counts as a call's stream whose reader was lost before the end, or not any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendMail(Step):
    """Send a message to a node, with a hint. Refused if the node does not exist (`NodeGone`), or too many messages wait
    for it (`MailFull`)."""

    node: NodeId
    message: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MailReceived(Step):
    """A node has dealt with its mail up to and including a key (10)."""

    node: NodeId
    through: int


StepRejected = (
    StaleFence | StaleRecord | Behind | IdTaken | NodeGone | MailFull | SessionEnded | TooManySessions | TooManyCalls
)
Refusals = Sequence[StepRejected | None]
"""For each step of a commit: `None`, or why it was refused."""


def changed(record: SessionRecord, step: ChangeSession) -> SessionRecord:
    """Return a record as a step changes it."""
    names = ("state", "version", "result", "initialized", "is_task", "upstream")
    fields = {name: getattr(step, name) for name in names}
    fields["sticky"] = None if step.stick is None else sticky.after(record.sticky, step.stick)
    given = {name: value for name, value in fields.items() if value not in (None, getattr(record, name))}
    active = max(record.active, step.active or 0.0)
    return replace(record, active=active, revision=record.revision + bool(given), **given)


def weigh(steps: Sequence[Step]) -> tuple[int, int, bool]:
    """Return how many rows and bytes the steps write, nearly; and whether they forget anything."""
    count = size = 0
    forget = False
    for step in steps:
        count += 1
        match step:
            case Append():
                count += len(step.events)
                size += sum([len(event.payload) for event in step.events])
                forget = forget or any(end.stepped for end in step.ends)
            case OpenStream():
                count += len(step.calls)
                size += sum([len(call.request) for call in step.calls])
            case Forward():
                count += len(step.payloads)
                size += sum(map(len, step.payloads))
            case PutSession():
                size += len(step.record.client_params) + len(step.record.result)
            case ChangeSession():
                size += len(step.result or b"") + len(step.stick or b"") + len(step.upstream or b"")
            case PutCall():
                size += len(step.upstream or b"")
            case PutToolStep():
                size += len(step.record.value)
            case OpenAsk():
                size += len(step.record.request)
            case SendMail():
                size += len(step.message)
            case Trim() | DropStream() | EndSession():
                forget = True
    return count, size, forget


class Why(StrEnum):
    """Why a store refuses a step. The functions of a database return these values."""

    GONE = "gone"
    """The stream does not exist."""
    FENCED = "fenced"
    """Another writer has claimed the stream, under the fence that is given."""
    SEALED = "sealed"
    RELEASED = "released"
    """The stream has no writer any more."""
    BEHIND = "behind"
    """The stream, or what a sender forwards to it, ends at the given number, before the events of the step."""
    ENDED = "ended"
    CHANGED = "changed"
    """The session's record has the revision that is given."""
    TAKEN = "taken"
    """The request id that is given runs already."""
    CALLS = "calls"
    """So many calls of the session run."""
    CALLER = "caller"
    """So many sessions of the caller are open."""
    ALL = "all"
    """So many sessions are open."""
    NO_NODE = "no_node"
    """The node does not exist, or no node writes the stream."""
    FULL = "full"
    """Too many messages wait for the node; or so many, for the stream."""


_STALE = {
    Why.GONE: "does not exist",
    Why.FENCED: "is written under fence {}",
    Why.SEALED: "is sealed",
    Why.RELEASED: "was released",
}


def refusal(step: Any, why: Why, what: object = "") -> StepRejected:
    """Return the named refusal of a step. `what` is what the store has in place of what the step supposes."""
    match why, step:
        case Why.ENDED, OpenStream():
            return SessionEnded(f"session {step.record.session[:8]} has ended")
        case Why.CHANGED, OpenStream():
            return StaleRecord(f"session {step.record.session[:8]} has revision {what}, not {step.seen}")
        case Why.TAKEN, OpenStream():
            return IdTaken(f"request {what} of session {step.record.session[:8]} runs already")
        case Why.CALLS, OpenStream():
            return TooManyCalls(f"session {step.record.session[:8]} has {what} calls running")
        case Why.FENCED | Why.SEALED, OpenStream():
            return StaleFence(f"stream {step.record.id} exists already: it {_STALE[why].format(what)}")
        case Why.CALLER, PutSession():
            return TooManySessions(f"the caller has {what} sessions", of_caller=True)
        case Why.ALL, PutSession():
            return TooManySessions(f"there are {what} sessions", of_caller=False)
        case Why.GONE, Append():
            return Behind(f"stream {step.stream} does not exist", last=0)
        case Why.BEHIND, Append():
            return Behind(f"stream {step.stream} ends at {what}, before {step.events[-1].seq}", last=int(str(what)))
        case Why.BEHIND, Forward():
            return Behind(f"message {step.first - 1} for stream {step.stream} does not exist", last=int(str(what)))
        case Why.BEHIND, PutToolStep():
            return Behind(f"stream {step.stream} has lost step {step.after} of a tool", last=0)
        case Why.GONE, Forward():
            return SessionEnded(f"stream {step.stream} does not exist")
        case Why.NO_NODE, Forward():
            return NodeGone(f"no node writes stream {step.stream}")
        case Why.FULL, Forward():
            return MailFull(f"{what} messages wait for stream {step.stream}")
        case Why.NO_NODE, SendMail():
            return NodeGone(f"there is no node {step.node}")
        case Why.FULL, SendMail():
            return MailFull(f"{MAX_MAIL} messages wait for node {step.node}")
    return StaleFence(f"fence {step.fence} may not write stream {step.stream}: it {_STALE[why].format(what)}")
