"""Words every refusal of a step once, for all stores."""

from enum import StrEnum
from typing import Any

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
from perdure.store.records import MAX_MAIL
from perdure.store.steps import Append, Forward, OpenStream, PutSession, SendMail, StepRefusal


class Why(StrEnum):
    """Why a store refuses a step. The values are the words in which the functions of a database tell it."""

    GONE = "gone"
    """The stream is not there."""
    FENCED = "fenced"
    """Another writer has claimed the stream, under the fence that is given."""
    SEALED = "sealed"
    RELEASED = "released"
    """The stream has no writer any more."""
    BEHIND = "behind"
    """The stream, or what a sender forwards to it, ends at the number that is given, before what the step brings."""
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
    NOBODY = "nobody"
    """The node is not there, or no node writes the stream."""
    FULL = "full"
    """Too many messages wait for the node; or so many, for the stream."""


_STALE = {
    Why.GONE: "is not there",
    Why.FENCED: "is written under fence {}",
    Why.SEALED: "is sealed",
    Why.RELEASED: "was let go of",
}


def refusal(step: Any, why: Why, what: object = "") -> StepRefusal:
    """Give the named refusal of a step. `what` is what the store has in place of what the step supposes."""
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
            return StaleFence(f"stream {step.record.id} is there already: it {_STALE[why].format(what)}")
        case Why.CALLER, PutSession():
            return TooManySessions(f"the caller has {what} sessions", of_caller=True)
        case Why.ALL, PutSession():
            return TooManySessions(f"there are {what} sessions", of_caller=False)
        case Why.GONE, Append():
            return Behind(f"stream {step.stream} is not there", last=0)
        case Why.BEHIND, Append():
            return Behind(f"stream {step.stream} ends at {what}, before {step.events[-1].seq}", last=int(str(what)))
        case Why.BEHIND, Forward():
            return Behind(f"message {step.first - 1} for stream {step.stream} is not there", last=int(str(what)))
        case Why.GONE, Forward():
            return SessionEnded(f"stream {step.stream} is not there")
        case Why.NOBODY, Forward():
            return NodeGone(f"no node writes stream {step.stream}")
        case Why.FULL, Forward():
            return MailFull(f"{what} messages wait for stream {step.stream}")
        case Why.NOBODY, SendMail():
            return NodeGone(f"there is no node {step.node}")
        case Why.FULL, SendMail():
            return MailFull(f"{MAX_MAIL} messages wait for node {step.node}")
    return StaleFence(f"fence {step.fence} may not write stream {step.stream}: it {_STALE[why].format(what)}")
