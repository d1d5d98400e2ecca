"""Tables hold the lives of streams, readers, sessions, calls, tool steps, claims, and requests that are passed on.

Each table maps a state and a step to the state that follows. A step that is not in the table cannot happen: `advance`
raises `IllegalStep`. The diagrams in the documentation are drawn from these tables.

**Content.** A stream accepts events while it is OPEN, with or without a reader (R3). The last owed response seals it; a
sealed stream can be read until retention removes it. The standalone stream owes no response, so it is never sealed; a
stream that is OPEN when its session ends has EXPIRED.

**Writing.** Says who writes a stream, as one node sees it. A node is FOLLOWING what another node writes, or is WRITING
after a claim. A call that another node claims is LOST here; its reader is ended, and the next one follows. The home of
a session may move, so a standalone stream is followed at once. When the store has forgotten a session that ended
elsewhere, what its calls still send goes UNLOGGED to the attached reader.

**Reader.** One response on a stream. It is STARTING until its response has begun, PUMPING while it writes, and RESTING
when there is nothing to write: then it costs no task. A reader that is ended while others still read is CLOSING until
its connection is closed. A FINISHED reader writes nothing more, and its response may return.

**Session.** OPENING lasts while `initialize` runs. An unused session turns DORMANT (its runtime is dropped, its record
and answers stay) and is ACTIVE again with its client's next message.

**Call.** One row of the ledger. A call reaches exactly one of the three ends, once (promise 3): the table has no step
for a late answer to a cancelled call, so it is dropped. A call whose node died is WAITING until another node runs it
again or settles it.

**Tool step.** One step of a tool, in the store before the tool sees its value. It is OPEN from the commit that begins
it, if it has one, to the commit of its end; an end is never replaced.

**Claim.** What a node may do with the streams that it writes, as it knows by itself. While it is HOLDING its claim it
writes and shows them. A node that could not show for too long that it lives is FROZEN: another node may act in its
place, so it shows and accepts nothing, and keeps what it has. Once the store answers that it still knows the node, the
claim is renewed and the node goes on: fences show what was taken from it meanwhile. A node that the store does not
know any more is BURIED, because another one has settled what it left, or it has left by itself. It ends; an answer to
an earlier beat that is late changes nothing.

**Passed on.** One request of 2026-07-28, which the SDK handles, and its response. It is RUNNING until the response
begins: an event stream (STREAMING until the last event), or one body, which follows its head at once and counts as
ANSWERED with it. If the server stops before that, the response is OWED: a whole one, or the LAST event of its stream.
The server writes it, and drops what the SDK still sends.
"""

import enum
from collections.abc import Mapping
from typing import TypeVar


class _Name(enum.Enum):
    """A member is one object, so it is hashed as one: hashing its name takes ten times as long, and tables are
    read for each event."""

    __hash__ = object.__hash__


class ContentState(_Name):
    OPEN = "open"
    SEALED = "sealed"
    EXPIRED = "expired"


class ContentStep(_Name):
    LAST_RESPONSE = "last response"
    SESSION_ENDED = "session ended"


class WritingState(_Name):
    FOLLOWING = "following"
    WRITING = "writing"
    LOST = "lost"
    UNLOGGED = "unlogged"


class WritingStep(_Name):
    CLAIM = "claim"
    LOSE_CALL = "lose call"
    LOSE_HOME = "lose home"
    FOLLOW = "follow"
    FORGET = "forget"


class ReaderState(_Name):
    STARTING = "starting"
    RESTING = "resting"
    PUMPING = "pumping"
    CLOSING = "closing"
    FINISHED = "finished"


class ReaderStep(_Name):
    BEGIN = "begin"
    WAKE = "wake"
    CATCH_UP = "catch up"
    END = "end"
    FINISH = "finish"


class SessionState(_Name):
    OPENING = "opening"
    ACTIVE = "active"
    DORMANT = "dormant"
    ENDED = "ended"


class SessionStep(_Name):
    HANDSHAKE_DONE = "handshake done"
    HANDSHAKE_FAILED = "handshake failed"
    GRACE_PASSED = "grace passed"
    CLIENT_CAME_BACK = "client came back"
    WINDOW_PASSED = "replay window passed"
    CLIENT_DELETED = "client deleted"
    OPERATOR_ENDED = "operator ended"
    SERVER_ENDED = "server ended"


class CallState(_Name):
    RUNNING = "running"
    WAITING = "waiting"
    ANSWERED = "answered"
    CANCELLED = "cancelled"
    SETTLED = "settled"


class CallStep(_Name):
    LOSE_NODE = "lose node"
    RUN_AGAIN = "run again"
    ANSWER = "answer"
    CANCEL = "cancel"
    SETTLE = "settle"


class ToolStepState(_Name):
    OPEN = "open"
    ENDED = "ended"
    FAILED = "failed"


class ToolStepStep(_Name):
    END = "end"
    FAIL = "fail"


class ClaimState(_Name):
    HOLDING = "holding"
    FROZEN = "frozen"
    BURIED = "buried"


class ClaimStep(_Name):
    RENEW = "renew"
    LAPSE = "lapse"
    BURY = "bury"


class PassedOnState(_Name):
    RUNNING = "running"
    STREAMING = "streaming"
    ANSWERED = "answered"
    OWED = "owed"
    LAST = "last"


class PassedOnStep(_Name):
    BEGIN_STREAM = "begin stream"
    BEGIN_BODY = "begin body"
    COMPLETE = "complete"
    STOP = "stop"


CONTENT: Mapping[ContentState, Mapping[ContentStep, ContentState]] = {
    ContentState.OPEN: {
        ContentStep.LAST_RESPONSE: ContentState.SEALED,
        ContentStep.SESSION_ENDED: ContentState.EXPIRED,
    },
    ContentState.SEALED: {},
    ContentState.EXPIRED: {},
}

WRITING: Mapping[WritingState, Mapping[WritingStep, WritingState]] = {
    WritingState.FOLLOWING: {WritingStep.CLAIM: WritingState.WRITING},
    WritingState.WRITING: {
        WritingStep.CLAIM: WritingState.WRITING,
        WritingStep.LOSE_CALL: WritingState.LOST,
        WritingStep.LOSE_HOME: WritingState.FOLLOWING,
        WritingStep.FORGET: WritingState.UNLOGGED,
    },
    WritingState.LOST: {WritingStep.CLAIM: WritingState.WRITING, WritingStep.FOLLOW: WritingState.FOLLOWING},
    WritingState.UNLOGGED: {},
}

_READER_ENDS = {ReaderStep.END: ReaderState.CLOSING, ReaderStep.FINISH: ReaderState.FINISHED}
READER: Mapping[ReaderState, Mapping[ReaderStep, ReaderState]] = {
    ReaderState.STARTING: {ReaderStep.BEGIN: ReaderState.RESTING, **_READER_ENDS},
    ReaderState.RESTING: {ReaderStep.WAKE: ReaderState.PUMPING, **_READER_ENDS},
    ReaderState.PUMPING: {ReaderStep.CATCH_UP: ReaderState.RESTING, **_READER_ENDS},
    ReaderState.CLOSING: {ReaderStep.FINISH: ReaderState.FINISHED},
    ReaderState.FINISHED: {},
}

_OPENED = {
    SessionStep.CLIENT_CAME_BACK: SessionState.ACTIVE,
    SessionStep.CLIENT_DELETED: SessionState.ENDED,
    SessionStep.OPERATOR_ENDED: SessionState.ENDED,
    SessionStep.SERVER_ENDED: SessionState.ENDED,
    SessionStep.WINDOW_PASSED: SessionState.ENDED,
}
SESSION: Mapping[SessionState, Mapping[SessionStep, SessionState]] = {
    SessionState.OPENING: {
        SessionStep.HANDSHAKE_DONE: SessionState.ACTIVE,
        SessionStep.HANDSHAKE_FAILED: SessionState.ENDED,
    },
    SessionState.ACTIVE: {SessionStep.GRACE_PASSED: SessionState.DORMANT, **_OPENED},
    SessionState.DORMANT: _OPENED,
    SessionState.ENDED: {},
}

_ENDS = {
    CallStep.LOSE_NODE: CallState.WAITING,
    CallStep.RUN_AGAIN: CallState.RUNNING,
    CallStep.CANCEL: CallState.CANCELLED,
    CallStep.SETTLE: CallState.SETTLED,
}
CALL: Mapping[CallState, Mapping[CallStep, CallState]] = {
    CallState.RUNNING: {CallStep.ANSWER: CallState.ANSWERED, **_ENDS},
    CallState.WAITING: _ENDS,
    CallState.ANSWERED: {},
    CallState.CANCELLED: {},
    CallState.SETTLED: {},
}
UNENDED = frozenset(state for state in CallState if CALL[state])
"""The states of calls that have not ended."""

TOOL_STEP: Mapping[ToolStepState, Mapping[ToolStepStep, ToolStepState]] = {
    ToolStepState.OPEN: {ToolStepStep.END: ToolStepState.ENDED, ToolStepStep.FAIL: ToolStepState.FAILED},
    ToolStepState.ENDED: {},
    ToolStepState.FAILED: {},
}

_UNBURIED = {
    ClaimStep.RENEW: ClaimState.HOLDING,
    ClaimStep.LAPSE: ClaimState.FROZEN,
    ClaimStep.BURY: ClaimState.BURIED,
}
CLAIM: Mapping[ClaimState, Mapping[ClaimStep, ClaimState]] = {
    ClaimState.HOLDING: _UNBURIED,
    ClaimState.FROZEN: _UNBURIED,
    ClaimState.BURIED: dict.fromkeys(ClaimStep, ClaimState.BURIED),
}

_SAID = (PassedOnStep.BEGIN_STREAM, PassedOnStep.BEGIN_BODY, PassedOnStep.COMPLETE)
PASSED_ON: Mapping[PassedOnState, Mapping[PassedOnStep, PassedOnState]] = {
    PassedOnState.RUNNING: {
        PassedOnStep.BEGIN_STREAM: PassedOnState.STREAMING,
        PassedOnStep.BEGIN_BODY: PassedOnState.ANSWERED,
        PassedOnStep.STOP: PassedOnState.OWED,
    },
    PassedOnState.STREAMING: {
        PassedOnStep.COMPLETE: PassedOnState.ANSWERED,
        PassedOnStep.STOP: PassedOnState.LAST,
    },
    PassedOnState.ANSWERED: dict.fromkeys((PassedOnStep.COMPLETE, PassedOnStep.STOP), PassedOnState.ANSWERED),
    PassedOnState.OWED: dict.fromkeys((*_SAID, PassedOnStep.STOP), PassedOnState.OWED),
    PassedOnState.LAST: dict.fromkeys((PassedOnStep.COMPLETE, PassedOnStep.STOP), PassedOnState.LAST),
}

State = TypeVar("State", bound=enum.Enum)
Step = TypeVar("Step", bound=enum.Enum)


class IllegalStep(RuntimeError):
    """A state machine was asked for a step that its table does not have."""


def advance(table: Mapping[State, Mapping[Step, State]], state: State, step: Step) -> State:
    """The state that follows, or `IllegalStep`."""
    try:
        return table[state][step]
    except KeyError:
        raise IllegalStep(f"{type(state).__name__} {state.value!r} has no step {step.value!r}") from None
