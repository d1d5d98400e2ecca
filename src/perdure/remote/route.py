"""The way to one server that all requests of a client share, and the log of how the server does."""

import enum
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import Protocol

from perdure._core.reconnect import Patience
from perdure._core.text import format_duration
from perdure.remote.endpoint import Endpoint, shown
from perdure.telemetry.log_records import log_event


class Notice(enum.Enum):
    """An event of a link, for the log."""

    WAITING = "the server cannot be reached, and is tried again"
    REACHED = "the server answers"
    REFUSED = "the server, or the way to it, refuses for good"
    SESSION_GONE = "the session is gone, a new one is begun"
    NOT_RENEWED = "no new session could be begun"
    NOT_REPEATED = "a sticky request could not be repeated in the new session"
    NOT_SENT = "a notification or a reply could not be sent"
    POSITION_LOST = "the server refuses the position of the standalone stream"
    LISTENING_LOST = "the standalone stream is given up"


class Report(Protocol):
    """`why` says more about it; `reason` is the word for machines of a refusal."""

    def __call__(self, notice: Notice, why: str = "", *, reason: str = "") -> None: ...


@dataclass(eq=False)
class ConnectionLog:
    """Writes a link's notices to the log: once that the server is away or refuses, and again after it has answered."""

    url: str
    _: KW_ONLY
    level: int
    """Of a server that is away."""
    first_wait: float
    """Seconds of patience for a server that has not answered yet; without, the handshake's error says why."""
    skips: Collection[Notice] = ()
    """Notices for which the program raises an error."""
    mask: Callable[[str], str] = str
    """Hides secrets."""
    _has_answered: bool = False
    _last: str | None = None
    """The last refusal in the log, "" for an unreachable server, None for one that answers."""

    def __post_init__(self) -> None:
        self._where = self.mask(shown(self.url))

    def __call__(self, notice: Notice, why: str = "", *, reason: str = "") -> None:
        if notice in self.skips:
            return
        why = self.mask(why)
        match notice:
            case Notice.WAITING if self._last is None and (self._has_answered or self.first_wait):
                self._last, level = "", self.level
                sentence = f"{self._where} cannot be reached, and is tried again: {why}"
                if not self._has_answered and self.first_wait < math.inf:
                    sentence = f"waiting for {self._where}, for {format_duration(self.first_wait)} at most: {why}"
                log_event(level, "remote.waiting", sentence)
            case Notice.REACHED:
                if self._last is not None:
                    log_event(logging.INFO, "remote.reached", f"{self._where} answers again")
                self._last, self._has_answered = None, True
            case Notice.REFUSED if self._last != why:
                self._last = why
                log_event(logging.ERROR, "remote.refused", why, reason=reason)
            case Notice.SESSION_GONE:
                sentence = f"the session at {self._where} is gone; a new one is begun"
                log_event(logging.WARNING, "remote.session_gone", sentence)
            case Notice.NOT_RENEWED:
                sentence = f"no new session could be begun at {self._where}: {why}"
                log_event(logging.WARNING, "remote.not_renewed", sentence)
            case Notice.NOT_REPEATED:
                sentence = f"subscriptions or the log level at {self._where} are lost: {why}"
                log_event(logging.WARNING, "remote.not_repeated", sentence)
            case Notice.NOT_SENT:
                sentence = f"a notification or a reply could not be sent to {self._where}: {why}"
                log_event(logging.WARNING, "remote.not_sent", sentence)
            case Notice.POSITION_LOST:
                sentence = f"{self._where} refused the position; the missed messages are not repeated"
                log_event(logging.WARNING, "remote.position_lost", sentence)
            case Notice.LISTENING_LOST:
                sentence = f"the standalone stream of {self._where} is given up, and its messages are missed: {why}"
                log_event(logging.WARNING, "remote.standalone_lost", sentence)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientLimits:
    """How long one client waits for what, and how large a message may be."""

    patience: Patience
    """For requests, and for messages without an answer."""
    listening: Patience
    """For the standalone stream."""
    handshake: Patience
    handshake_seconds: float
    """For one handshake, however lively the server is."""
    message_bytes: int
    """The largest message of the server that is read."""
    following: Patience | None = None
    """For a call that has a position, in place of `patience`."""
    counts_from_request: bool
    """Patience runs from the moment when a message was handed over, and a server that asks for more time than it has
    does not get it. Otherwise it runs from the first failure, and a server may ask for any time."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """One server, how long and how it is tried, and the receiver of errors."""

    endpoint: Endpoint
    limits: ClientLimits
    complain: Callable[[Exception], Awaitable[object]]
    """Takes what is not a message, and stray answers."""
    report: Report
    """Takes whether the server is away or answers."""
    prefix: str
    """Begins request ids that never repeat within a session, not even over several processes."""
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def new_id(self) -> str:
        # Not a number, also not as a string: the SDK takes "7" for 7.
        return f"{self.prefix}.{next(self._numbers)}"
