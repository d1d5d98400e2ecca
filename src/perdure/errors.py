"""What can go wrong, as a tree.

    PerdureError
    ├── Misuse                    the program that uses Perdure asked for something impossible
    │   ├── BadSetting            a setting's value is out of its range
    │   └── BadTarget             the object to serve is not an MCP server, or cannot be found
    ├── StoreError                the log
    │   ├── StoreUnavailable      it fails or does not answer; trying again may help
    │   ├── StoreTooNew           the file was written by a newer release
    │   ├── StaleFence            another writer has taken over; this one may write nothing more
    │   ├── IdTaken               a running request of the session has this id already
    │   ├── NodeGone              there is no such node (any more)
    │   └── MailFull              a node has not dealt with its mail for too long
    └── SessionEnded              the session ended while a request for it was on its way

What a *peer* does wrong is not an exception that leaves the package: the HTTP edge answers it (`http/answers.py`).
"""


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


class StoreError(PerdureError):
    """The store refused."""


class StoreUnavailable(StoreError):
    """The store fails or does not answer."""


class StoreTooNew(StoreError):
    """The store was written by a newer release."""


class StaleFence(StoreError):
    """Another writer has taken over."""


class IdTaken(StoreError):
    """A running request of this session has this id already."""


class NodeGone(StoreError):
    """There is no such node."""


class MailFull(StoreError):
    """Too much mail waits for this node."""


class SessionEnded(PerdureError):
    """The session has ended."""
