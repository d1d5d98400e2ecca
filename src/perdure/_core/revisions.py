"""Protocol revisions of the session era, and what each of them changes, as data.

Sources: the transports pages of 2025-03-26, 2025-06-18 and 2025-11-25.
2024-11-05 is what the official SDK still negotiates by `initialize`; it is served like the oldest revision here.
"""

import re
from dataclasses import dataclass

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """The behaviour of sessions that negotiated this version."""

    version: str
    batches: bool
    """POST bodies may be arrays; one stream then owes several responses."""
    primes: bool
    """Every event stream begins with an event that carries only an id, and with `retry`."""
    closes_early: bool
    """The server may close a connection before it has responded; the client reconnects for it (SEP-1699)."""
    tasks: bool = False
    """A client may ask for a call as a task."""


REVISIONS: dict[str, Revision] = {
    revision.version: revision
    for revision in (
        Revision(version="2024-11-05", batches=False, primes=False, closes_early=False),
        Revision(version="2025-03-26", batches=True, primes=False, closes_early=False),
        Revision(version="2025-06-18", batches=False, primes=False, closes_early=False),
        Revision(version="2025-11-25", batches=False, primes=True, closes_early=True, tasks=True),
    )
}

LATEST_SESSION = max(REVISIONS)
"""The newest revision with sessions: what a gateway speaks to either side where it may choose."""

DURABLE_CALL = Revision(version="2026-07-28", batches=False, primes=False, closes_early=False)
"""A request of a revision without sessions, which is a session of one call."""

FIRST_SESSIONLESS = "2026-07-28"
"""From this revision on there are no sessions; those requests go to the official SDK's own handler."""


def is_sessionless(version: str) -> bool:
    """Whether a version names a revision without sessions: 2026-07-28 or any later date."""
    return _DATE.fullmatch(version) is not None and version >= FIRST_SESSIONLESS
