"""Tables hold the lives of a stream, a reader, a session, a call and the store.

Each table maps a state and a step to the state that follows. A step that is not in the table cannot happen: `advance`
raises `IllegalStep`. The diagrams in the documentation are drawn from these tables.

**Stream.** A stream accepts events with or without a reader (R3): readers only move it between LIVE and DETACHED. The
last owed response seals it; a sealed stream can be read until retention removes it. The standalone stream owes no
response, so it is never sealed; it ends with its session.

**Reader.** One response on a stream. It is STARTING until its response has begun, PUMPING while it writes, and RESTING
when there is nothing to write: then it costs no task. A reader that is ended while others still read is CLOSING until
its connection is closed. A FINISHED reader writes nothing more, and its response may return.

**Session.** OPENING lasts while `initialize` runs. An unused session turns DORMANT (its runtime is dropped, its record
and answers stay) and is ACTIVE again with its client's next message.

**Call.** One row of the ledger. A call reaches exactly one of the three ends, once (promise 3): the table has no step
for a late answer to a cancelled call, so it is dropped. A call whose node died is WAITING until another node runs it
again or settles it.

**Log.** The store's health, as `/healthz` shows it: HEALTHY, or DEGRADED while the store fails (promise 7).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar


class StreamState(enum.Enum):
    LIVE = "live"
    DETACHED = "detached"
    SEALED = "sealed"
    EXPIRED = "expired"


class StreamStep(enum.Enum):
    READER_ATTACHED = "reader attached"
    READER_REPLACED = "reader replaced"
    READER_LOST = "reader lost"
    LAST_RESPONSE = "last response"
    RETENTION_PASSED = "retention passed"
    SESSION_ENDED = "session ended"


class ReaderState(enum.Enum):
    STARTING = "starting"
    RESTING = "resting"
    PUMPING = "pumping"
    CLOSING = "closing"
    FINISHED = "finished"


class ReaderStep(enum.Enum):
    BEGIN = "begin"
    WAKE = "wake"
    CATCH_UP = "catch up"
    END = "end"
    FINISH = "finish"


class SessionState(enum.Enum):
    OPENING = "opening"
    ACTIVE = "active"
    DORMANT = "dormant"
    ENDED = "ended"


class SessionStep(enum.Enum):
    HANDSHAKE_DONE = "handshake done"
    HANDSHAKE_FAILED = "handshake failed"
    GRACE_PASSED = "grace passed"
    CLIENT_CAME_BACK = "client came back"
    WINDOW_PASSED = "replay window passed"
    CLIENT_DELETED = "client deleted"
    OPERATOR_ENDED = "operator ended"


class CallState(enum.Enum):
    RUNNING = "running"
    WAITING = "waiting"
    ANSWERED = "answered"
    CANCELLED = "cancelled"
    SETTLED = "settled"


class CallStep(enum.Enum):
    LOSE_NODE = "lose node"
    RUN_AGAIN = "run again"
    ANSWER = "answer"
    CANCEL = "cancel"
    SETTLE = "settle"


class LogState(enum.Enum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"


class LogStep(enum.Enum):
    STORE_FAILED = "store failed"
    STORE_CAUGHT_UP = "store caught up"


STREAM: Mapping[StreamState, Mapping[StreamStep, StreamState]] = {
    StreamState.LIVE: {
        StreamStep.READER_REPLACED: StreamState.LIVE,
        StreamStep.READER_LOST: StreamState.DETACHED,
        StreamStep.LAST_RESPONSE: StreamState.SEALED,
        StreamStep.SESSION_ENDED: StreamState.EXPIRED,
    },
    StreamState.DETACHED: {
        StreamStep.READER_ATTACHED: StreamState.LIVE,
        StreamStep.LAST_RESPONSE: StreamState.SEALED,
        StreamStep.SESSION_ENDED: StreamState.EXPIRED,
    },
    StreamState.SEALED: {
        StreamStep.READER_ATTACHED: StreamState.SEALED,
        StreamStep.READER_REPLACED: StreamState.SEALED,
        StreamStep.READER_LOST: StreamState.SEALED,
        StreamStep.RETENTION_PASSED: StreamState.EXPIRED,
        StreamStep.SESSION_ENDED: StreamState.EXPIRED,
    },
    StreamState.EXPIRED: {},
}

READER: Mapping[ReaderState, Mapping[ReaderStep, ReaderState]] = {
    ReaderState.STARTING: {
        ReaderStep.BEGIN: ReaderState.RESTING,
        ReaderStep.END: ReaderState.CLOSING,
        ReaderStep.FINISH: ReaderState.FINISHED,
    },
    ReaderState.RESTING: {
        ReaderStep.WAKE: ReaderState.PUMPING,
        ReaderStep.END: ReaderState.CLOSING,
        ReaderStep.FINISH: ReaderState.FINISHED,
    },
    ReaderState.PUMPING: {
        ReaderStep.CATCH_UP: ReaderState.RESTING,
        ReaderStep.END: ReaderState.CLOSING,
        ReaderStep.FINISH: ReaderState.FINISHED,
    },
    ReaderState.CLOSING: {ReaderStep.FINISH: ReaderState.FINISHED},
    ReaderState.FINISHED: {},
}

SESSION: Mapping[SessionState, Mapping[SessionStep, SessionState]] = {
    SessionState.OPENING: {
        SessionStep.HANDSHAKE_DONE: SessionState.ACTIVE,
        SessionStep.HANDSHAKE_FAILED: SessionState.ENDED,
    },
    SessionState.ACTIVE: {
        SessionStep.GRACE_PASSED: SessionState.DORMANT,
        SessionStep.CLIENT_CAME_BACK: SessionState.ACTIVE,
        SessionStep.CLIENT_DELETED: SessionState.ENDED,
        SessionStep.OPERATOR_ENDED: SessionState.ENDED,
        SessionStep.WINDOW_PASSED: SessionState.ENDED,
    },
    SessionState.DORMANT: {
        SessionStep.CLIENT_CAME_BACK: SessionState.ACTIVE,
        SessionStep.CLIENT_DELETED: SessionState.ENDED,
        SessionStep.OPERATOR_ENDED: SessionState.ENDED,
        SessionStep.WINDOW_PASSED: SessionState.ENDED,
    },
    SessionState.ENDED: {},
}

CALL: Mapping[CallState, Mapping[CallStep, CallState]] = {
    CallState.RUNNING: {
        CallStep.LOSE_NODE: CallState.WAITING,
        CallStep.RUN_AGAIN: CallState.RUNNING,
        CallStep.ANSWER: CallState.ANSWERED,
        CallStep.CANCEL: CallState.CANCELLED,
        CallStep.SETTLE: CallState.SETTLED,
    },
    CallState.WAITING: {
        CallStep.LOSE_NODE: CallState.WAITING,
        CallStep.RUN_AGAIN: CallState.RUNNING,
        CallStep.CANCEL: CallState.CANCELLED,
        CallStep.SETTLE: CallState.SETTLED,
    },
    CallState.ANSWERED: {},
    CallState.CANCELLED: {},
    CallState.SETTLED: {},
}

LOG: Mapping[LogState, Mapping[LogStep, LogState]] = {
    LogState.HEALTHY: {LogStep.STORE_FAILED: LogState.DEGRADED},
    LogState.DEGRADED: {LogStep.STORE_FAILED: LogState.DEGRADED, LogStep.STORE_CAUGHT_UP: LogState.HEALTHY},
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
