"""Writes what happens to the connection to the log: once that a server is away, and once that it answers again."""

import logging

from perdure._core.reconnect import Patience
from perdure._core.text import format_duration
from perdure.remote.endpoint import shown
from perdure.remote.link import Notice
from perdure.telemetry.log_records import log_event


class ConnectionLog:
    """The log of one client. `handshake` is its patience for a server that has not answered yet."""

    def __init__(self, url: str, handshake: Patience) -> None:
        self._where = shown(url)
        self._is_away: bool | None = None
        """None before the server has answered once."""
        self._handshake = handshake

    def __call__(self, notice: Notice, why: str = "", *, reason: str = "") -> None:
        match notice:
            # Without patience a handshake is not repeated, and its error says why.
            case Notice.WAITING if self._is_away is None and self._handshake.max_time:
                self._is_away = True
                limit = format_duration(self._handshake.max_time)
                log_event(logging.INFO, "client.waiting", f"waiting for {self._where}, for {limit} at most: {why}")
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
