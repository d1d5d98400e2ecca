"""Notices: the events of a link that its client writes to its log, under the client's own action names."""

from __future__ import annotations

import enum
from typing import Protocol


class Notice(enum.Enum):
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
