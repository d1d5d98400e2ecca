"""Writes what happens to the connection to the log: once that a server is away, and once that it answers again."""

import logging

from perdure.remote.endpoint import shown
from perdure.remote.link import Notice
from perdure.telemetry.events import log_event


class ConnectionLog:
    """The log of one client."""

    def __init__(self, url: str) -> None:
        self._where = shown(url)
        self._is_away: bool | None = None
        """None before the server has answered once: a handshake is not repeated, and its error says why."""

    def __call__(self, notice: Notice, why: str = "", *, reason: str = "") -> None:
        match notice:
            case Notice.WAITING if self._is_away is False:
                self._is_away = True
                log_event(logging.INFO, "client.waiting", f"{self._where} is tried again: {why}")
            case Notice.REACHED:
                if self._is_away:
                    log_event(logging.INFO, "client.reached", f"{self._where} answers again")
                self._is_away = False
            case Notice.SESSION_GONE:
                log_event(logging.WARNING, "client.session_gone", "the session is gone; a new one is begun")
            case Notice.NOT_SENT:
                log_event(logging.WARNING, "client.not_told", f"a notification or a reply could not be sent: {why}")
            case Notice.LISTENING_LOST:
                sentence = f"the standalone stream is given up, what belongs to no call is missed: {why}"
                log_event(logging.WARNING, "client.standalone_lost", sentence)
