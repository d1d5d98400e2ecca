"""The errors that Perdure raises, as a tree.

    PerdureError
    ├── Misuse                    the program that uses Perdure asked for something impossible
    │   ├── BadSetting            a setting's value is out of its range
    │   └── BadTarget             the object to serve is not an MCP server, or cannot be found
    │       └── TargetFailed      its own code raised an error, when it was imported or started
    ├── StoreError                the store refuses or fails
    │   ├── StoreUnavailable      it fails or does not answer; trying again may help
    │   │   └── HeldElsewhere     another node holds what is not written yet; trying again helps
    │   ├── StoreLost             this process cannot use the store any more
    │   │   ├── StoreTooNew       the file was written by a newer release
    │   │   ├── StoreReplaced     the file was deleted, or another one is in its place
    │   │   └── NodeBuried        other nodes took this process for dead, and have settled its calls
    │   ├── StaleFence            another writer has taken over; this one may write nothing more
    │   ├── StaleRecord           a session's record was changed since it was read
    │   ├── Behind                the store has lost what came before; its writer, or sender, knows of it
    │   ├── IdTaken               a running request of the session has this id already
    │   ├── TooManySessions       the caller, or the store, has as many open sessions as it may
    │   ├── TooManyCalls          the session has as many running calls as it may
    │   ├── NodeGone              there is no such node (any more)
    │   └── MailFull              too much waits for a node, or for the writer of a stream
    ├── StepFailed                a step of a tool failed with an error that cannot be made again
    ├── StepLimit                 a call does too many steps, or a step's value is too large
    ├── StepMismatch              a call that runs again does not do what it had done
    ├── SessionEnded              the session ended while a request for it was on its way
    ├── TooManyProcesses          a server outside this process has as many processes as it may
    └── ClientError               `perdure.connect`
        ├── OutcomeUnknown        a call was sent, and its outcome is not known (also an `MCPError`)
        ├── Unreachable           the server did not answer within the limits; the call was not run (also an `MCPError`)
        ├── EventsLost            the server says that events are gone
        └── StateError            the client's state cannot be used
            ├── StateInUse        another client holds it
            └── StateUnusable     it cannot be kept there, or belongs to something else

A peer's mistake is not an exception that leaves the package: the HTTP edge answers it (`http/refusals.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure._core.losses import Gap
    from perdure.errors_sdk import OutcomeUnknown as OutcomeUnknown
    from perdure.errors_sdk import Unreachable as Unreachable


class PerdureError(Exception):
    """Something in Perdure went wrong."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)


class Misuse(PerdureError):
    """Perdure was asked for something impossible."""


class BadSetting(Misuse, ValueError):
    """A setting's value is out of its range."""


class BadTarget(Misuse):
    """The object to serve is not an MCP server."""


class TargetFailed(BadTarget):
    """The code to serve raised an error."""

    def __init__(self, message: str | None = None, *, traceback: str) -> None:
        super().__init__(message)
        self.traceback = traceback
        """The frames of the user's own code, as Python prints them."""


class StoreError(PerdureError):
    """The store refused."""


class StoreUnavailable(StoreError):
    """The store fails or does not answer."""


class HeldElsewhere(StoreUnavailable):
    """Another node holds what the store does not take at the moment."""


class StoreLost(StoreError):
    """This process cannot use its store any more."""

    state = "lost"
    """The state that `/healthz` shows."""


class StoreTooNew(StoreLost):
    """The store was written by a newer release."""

    state = "store too new"


class StoreReplaced(StoreLost):
    """The store's file was deleted, or another one is in its place."""

    state = "store replaced"


class NodeBuried(StoreLost):
    """Other nodes took this process for dead, and have settled its calls; another one can take its place."""

    state = "buried"


class StaleFence(StoreError):
    """Another writer has taken over."""


class StaleRecord(StoreError):
    """A session's record was changed since it was read."""


class Behind(StoreError):
    """The store has lost what came before."""

    def __init__(self, message: str | None = None, *, last: int) -> None:
        super().__init__(message)
        self.last = last
        """The number of the last event, or message, that the store has; 0 if it has none."""


class IdTaken(StoreError):
    """A running request of this session has this id already."""


class TooManySessions(StoreError):
    """There are as many open sessions as there may be."""

    def __init__(self, message: str | None = None, *, of_caller: bool) -> None:
        super().__init__(message)
        self.of_caller = of_caller
        """The caller has reached its limit; otherwise the store has."""


class TooManyCalls(StoreError):
    """This session has as many running calls as it may."""


class NodeGone(StoreError):
    """There is no such node."""


class MailFull(StoreError):
    """Too much waits for this node, or for the writer of this stream."""


class StepFailed(PerdureError):
    """A step of a tool failed with an error that cannot be made again."""

    def __init__(self, name: str, kind: str, message: str) -> None:
        super().__init__(f"step {name!r} failed: {kind}: {message}")
        self.args = (name, kind, message)
        self.name = name
        self.kind = kind
        """The class of the error."""
        self.message = message

    def __str__(self) -> str:
        return f"step {self.name!r} failed: {self.kind}: {self.message}"


class StepLimit(PerdureError):
    """A call does too many steps, or a step's value is too large."""


class StepMismatch(PerdureError):
    """A call that runs again does not do what it had done."""


class SessionEnded(PerdureError):
    """The session has ended."""


class TooManyProcesses(PerdureError):
    """The server behind the gateway has as many processes as it may."""

    def __init__(self, upstream: str, limit: int, *, of_caller: bool) -> None:
        super().__init__()
        self.upstream = upstream
        self.limit = limit
        self.of_caller = of_caller
        """The caller has reached its limit; otherwise the server has."""


class ClientError(PerdureError):
    """The client cannot do what it was asked for."""


class EventsLost(ClientError):
    """Events that this client had not seen are no longer there."""

    def __init__(self, gap: Gap) -> None:
        super().__init__(f"events {gap.first} to {gap.last} are lost ({gap.reason})")
        self.gap = gap


class StateError(ClientError):
    """The client's state cannot be used."""


class StateInUse(StateError):
    """Another client holds this state."""


class StateUnusable(StateError):
    """The client's state cannot be kept there."""


def __getattr__(name: str) -> Any:
    # They need the SDK, which takes most of a second to import, so it is imported when one of them is used.
    if name in ("OutcomeUnknown", "Unreachable"):
        from perdure import errors_sdk

        return getattr(errors_sdk, name)
    raise AttributeError(f"module 'perdure.errors' has no attribute {name!r}")
