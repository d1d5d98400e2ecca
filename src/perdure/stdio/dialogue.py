"""The dialogue with the host: which progress tokens and which open asks are this host's.

Hosts count their requests from 0 or 1 each time they start their server. On the wire a request has an id that is never
used again, and its progress token is that id. The host gets both back as it gave them. So nothing of an earlier process
can be taken for something of this one.
"""

from __future__ import annotations

import logging
import re

from perdure._core import splice
from perdure.remote.message import Message, encode
from perdure.telemetry.events import log_event

#: Asks of the server that the host has not answered. The answer to one that was forgotten is not sent.
MAX_ASKS = 1_000
#: In front of the progress token of an earlier incarnation's call. Our own tokens have no colon.
_OF_EARLIER = re.compile(r"^\d+:")


class Dialogue:
    """Progress tokens of the host's calls, and the server's asks that wait for the host."""

    def __init__(self) -> None:
        self._tokens: dict[str, str] = {}
        """Progress tokens on the wire, and those of the host behind them, as JSON."""
        self._asks: dict[str, None] = {}
        """The ids of open asks, as JSON."""

    def add_token(self, wire_id: str, token: str) -> None:
        self._tokens[wire_id] = token

    def remove_token(self, wire_id: str) -> None:
        self._tokens.pop(wire_id, None)

    def to_host(self, message: Message) -> str | None:
        """The server's message as the host gets it; None if it is not for this host."""
        if message.is_request:
            self._asks[_same_id(splice.cut(message.text, "id") or "null")] = None
            if len(self._asks) > MAX_ASKS:
                del self._asks[next(iter(self._asks))]
        elif message.method == "notifications/progress":
            return self._with_own_token(message)
        elif message.method == "notifications/cancelled":
            # Only if this host was asked: it has never seen the asks of an earlier process.
            ask = splice.cut(message.text, "params", "requestId") or "null"
            return message.text if self.close_ask(ask) else None
        return None if message.method is None else message.text

    def _with_own_token(self, message: Message) -> str | None:
        """A host that sends `initialize` twice begins another incarnation. What its earlier calls say from then on
        carries the number of theirs in front of the token."""
        found = message.params.get("progressToken")
        own = self._tokens.get(_OF_EARLIER.sub("", found)) if isinstance(found, str) else None
        if own is None:
            log_event(logging.DEBUG, "stdio.progress_dropped", "progress of a call that this process has not made")
            return None
        return splice.replaced(message.text, own, "params", "progressToken")

    def close_ask(self, ask: str) -> bool:
        """An ask is answered or withdrawn; whether it was open."""
        return self._asks.pop(_same_id(ask), False) is None

    def close_asks(self) -> list[str]:
        """The session is another one: no tool waits for these answers any more."""
        asks, self._asks = list(self._asks), {}
        return asks


def _same_id(text: str) -> str:
    """An id in one spelling: `"\\u00e9"` and `"é"` are the same, and the two sides escape differently."""
    found = splice.decode(text)
    return encode(found) if isinstance(found, str) else text
