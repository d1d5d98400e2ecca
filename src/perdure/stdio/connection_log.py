"""Writes the link's notices to the bridge's log."""

from __future__ import annotations

import logging

from perdure.remote.endpoint import shown
from perdure.remote.link import Notice
from perdure.telemetry.events import log_event


class ConnectionLog:
    """Says once that a server is away or refuses, and again when that comes back after a success."""

    def __init__(self, url: str) -> None:
        self._where = shown(url)
        self._last: str | None = None
        """The refusal that was said last, "" for a server that is away, None for one that answers."""

    def __call__(self, notice: Notice, why: str = "", *, reason: str = "") -> None:
        match notice:
            case Notice.REFUSED if self._last != why:
                self._last = why
                log_event(logging.ERROR, "stdio.refused", why, reason=reason)
            case Notice.WAITING if self._last is None:
                self._last = ""
                log_event(
                    logging.WARNING, "stdio.waiting", f"{self._where} cannot be reached, and is tried again: {why}"
                )
            case Notice.REACHED if self._last is not None:
                self._last = None
                log_event(logging.INFO, "stdio.reached", f"{self._where} answers again")
            case Notice.SESSION_GONE:
                log_event(logging.WARNING, "stdio.session_gone", "the session is gone; a new one is begun")
            case Notice.NOT_RENEWED:
                log_event(logging.WARNING, "stdio.not_renewed", f"no new session could be begun: {why}")
            case Notice.NOT_REPEATED:
                log_event(logging.WARNING, "stdio.not_repeated", f"subscriptions or the log level are lost: {why}")
            case Notice.NOT_SENT:
                log_event(logging.WARNING, "stdio.not_told", f"a message of the host could not be sent: {why}")
            case Notice.POSITION_LOST:
                log_event(
                    logging.WARNING,
                    "stdio.position_lost",
                    "the server refused the position; what was missed is not repeated",
                )
            case Notice.LISTENING_LOST:
                log_event(
                    logging.WARNING,
                    "stdio.standalone_lost",
                    f"the standalone stream is given up, what belongs to no call is missed: {why}",
                )
