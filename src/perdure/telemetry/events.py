"""Writes log records with a sentence for people and a stable `action` for machines, and formats them as lines.

Clients import this module as well, so it uses `_core` only.
"""

import asyncio
import logging
from contextvars import ContextVar
from typing import NamedTuple

from perdure._core.text import printable

_logger = logging.getLogger("perdure")

SHORT = 8
"""Characters of an id that tell it from others. The whole id of a session is a secret, and no record has more of it."""

MAX_SENTENCE = 2_000
"""Characters of a sentence or of a fact: room for any of ours and the reason in it, which a peer may have written."""


def log_event(level: int, action: str, sentence: str, /, **facts: object) -> None:
    """Log a sentence for people, with `action` and the facts as attributes for machines.

    A sentence may name what a peer wrote (a method, a reason), so both are made harmless here, for every handler.
    """
    if _logger.isEnabledFor(level):
        safe = {name: _harmless(name, fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        _logger.log(level, printable(sentence, MAX_SENTENCE), extra={"action": action, **safe})


def _harmless(name: str, fact: str) -> str:
    return printable(fact[:SHORT] if name == "session" else fact, MAX_SENTENCE)


class CallIds(NamedTuple):
    """Names the call whose handler runs."""

    session: str
    stream: str
    call: int | str


current_call: ContextVar[CallIds | None] = ContextVar("perdure_call", default=None)
"""Set where a call is handed to its handler, so that a record of the user's code can name the call that it is of."""

PEER_RECORDS = 5
PEER_SECONDS = 60.0
"""Records of one action that peers can cause in so much time. The first few say what is wrong and where;
thousands would fill the disk and hide everything else. The counters count them all."""


class PeerLog:
    """Logs what peers cause: of each action a few records in a minute, and then one with the number of the others.

    It belongs to one process's event loop, whose timer writes that last one.
    """

    def __init__(self) -> None:
        self._written: dict[str, int] = {}

    def log_event(self, level: int, action: str, sentence: str, /, **facts: object) -> None:
        """As `log_event` does, unless there were too many of that action lately."""
        if action not in self._written:
            asyncio.get_running_loop().call_later(PEER_SECONDS, self._sum_up, level, action)
        count = self._written[action] = self._written.get(action, 0) + 1
        if count <= PEER_RECORDS:
            log_event(level, action, sentence, **facts)

    def _sum_up(self, level: int, action: str) -> None:
        more = self._written.pop(action) - PEER_RECORDS
        if more > 0:
            sentence = f"{more} more records of {action} within {PEER_SECONDS:g} s were not written"
            log_event(level, action, sentence, suppressed=more)


MAX_LINE = 4_000
"""Characters of a line: more than our sentences and the lines of tracebacks have, less than a peer may write."""

MAX_LINES = 400
"""Lines of a record: Python folds repeated lines of a deep traceback to far fewer, but an exception's text may have any
number."""


class LogLines(logging.Formatter):
    """Every record begins at the left edge, and what follows its first line (a traceback) is indented.

    The SDK and the target log method names, prompt names and exceptions whose texts peers have written. A line break in
    one of them would begin what looks like a record, and an escape sequence would act on the operator's terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        # The base class keeps the traceback's text in the record, for other handlers: only the lines are made safe.
        first, *rest = super().format(record).split("\n")
        if len(rest) > MAX_LINES:
            rest = [*rest[:MAX_LINES], f"… {len(rest) - MAX_LINES} more lines"]
        return "\n".join([printable(first, MAX_LINE), *(printable(f"    {line}", MAX_LINE) for line in rest)])
