"""Writes log records, each with a sentence for people and a stable `action` for machines, and formats them as lines of
text or as JSON objects.

Every line has a time, a level and an action: that of our own records, and the logger's name for a record of another
package. Ids are as short as operators' commands show them, because the whole id of a session is a secret. Clients
import this module as well, so it uses `_core` only.
"""

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NamedTuple

from perdure._core.ids import parse_position
from perdure._core.text import printable

_logger = logging.getLogger("perdure")

SHORT = 8
"""Characters of an id that tell it from others."""

MAX_SENTENCE = 2_000
"""Characters of a sentence or of a fact: room for any of ours and for its reason, which a peer may have written."""

MAX_LINE = 4_000
"""Characters of a line: more than our sentences and the lines of tracebacks have, less than a peer may write."""

MAX_LINES = 400
"""Lines of a record: Python folds repeated lines of a deep traceback to far fewer, but an exception's text may have any
number."""

PEER_RECORDS = 5
PEER_SECONDS = 60.0
"""Records of one action that peers can cause in so much time. The first few say what is wrong and where; thousands
would fill the disk and hide everything else. The counters count them all."""

IDS = ("session", "stream", "position", "call", "node")
"""Facts that say what a record is about, in the order in which a line shows them."""

KEYS = ("time", "level", "logger", "action", "message", "pid")
"""Members that each JSON object has. No fact has one of these names."""

_ACTION = 19
"""Columns of an action: the longest of a server's. A logger's name may be longer, and moves only its own line."""

_TIME = len("2026-11-16T15:04:05.123Z")
_COLORS = {logging.DEBUG: "2", logging.INFO: "32", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}

_PLAIN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
"""Attributes that every record has. All others are facts."""


# --- Writing ----------------------------------------------------------------------------------------------------------


is_logged = _logger.isEnabledFor
"""Whether records of a level are written: a sentence that is written for each call is made only then."""


def log_event(level: int, action: str, sentence: str, /, **facts: object) -> None:
    """Log a sentence for people, with `action` and the facts as attributes for machines.

    A sentence may hold text of a peer (a method, a reason), so both are made harmless here, for every handler.
    """
    if _logger.isEnabledFor(level):
        if isinstance(session := facts.get("session"), str):
            facts["session"] = session[:SHORT]
        safe = {name: printable(fact, MAX_SENTENCE) if isinstance(fact, str) else fact for name, fact in facts.items()}
        _logger.log(level, printable(sentence, MAX_SENTENCE), extra={"action": action, **safe})


class CallIds(NamedTuple):
    """Names the call whose handler runs."""

    session: str
    stream: str
    call: int | str


current_call: ContextVar[CallIds | None] = ContextVar("perdure_call", default=None)
"""Set where a call is handed to its handler, so that records of the user's code can name their call."""


class PeerLog:
    """Logs records that peers cause: a few of each action in a minute, and then one with the number of the others.

    It belongs to one process's event loop, whose timer writes the last one.
    """

    def __init__(self) -> None:
        self._written: dict[str, int] = {}

    def log_event(self, level: int, action: str, sentence: str, /, **facts: object) -> None:
        """As `log_event`, unless there were too many records of this action within the minute."""
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


# --- Formatting -------------------------------------------------------------------------------------------------------


def facts_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """The members of a record's `extra`, without its action; ids are shortened."""
    given = {name: value for name, value in vars(record).items() if name not in _PLAIN and name != "action"}
    return {name: shortened(name, value) for name, value in given.items()}


def shortened(name: str, value: object) -> object:
    """A fact as lines show it: of an id, its beginning; of a position, the stream's beginning, generation, number."""
    if name not in IDS or name == "call" or not isinstance(value, str):
        return value
    if name == "position" and (position := parse_position(value)) is not None:
        return f"{position.stream[:SHORT]}.{position.generation}.{position.seq}"
    return value[:SHORT]


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class LogLines(logging.Formatter):
    """Formats records so that each begins at the left edge, and its further lines (a traceback) are indented.

    The SDK and the target log method names, prompt names and exceptions with texts of peers. A line break in one of
    them would look like the beginning of a record, and an escape sequence would act on the operator's terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        # The base class keeps the traceback's text in the record, for other handlers: only the lines are made safe.
        first, *rest = super().format(record).split("\n")
        if len(rest) > MAX_LINES:
            rest = [*rest[:MAX_LINES], f"… {len(rest) - MAX_LINES} more lines"]
        return "\n".join([printable(first, MAX_LINE), *(printable(f"    {line}", MAX_LINE) for line in rest)])


class TextLines(LogLines):
    """Writes a record as a line: time, level, action, sentence, ids. A traceback follows, indented."""

    def __init__(self, *, colors: bool = False) -> None:
        super().__init__()
        self._colors = colors

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class names it so
        action = vars(record).get("action") or record.name
        front = f"{_time(record)} {record.levelname:<8} {action:<{_ACTION}} "
        facts = facts_of(record)
        ids = "".join(f" {name}={_cell(facts[name])}" for name in IDS if facts.get(name) not in (None, ""))
        sentence, _, more = record.message.rstrip("\n").partition("\n")
        line = front + printable(sentence, MAX_LINE - len(front) - len(ids) - 2) + (ids and f" {ids}")
        return f"{line}\n{more}" if more else line

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)  # without escape codes, whatever a peer wrote
        color = _COLORS.get(record.levelno) if self._colors else None
        if color is None:
            return line
        level = _TIME + 1 + len(record.levelname)
        return f"{line[: _TIME + 1]}\x1b[{color}m{line[_TIME + 1 : level]}\x1b[0m{line[level:]}"


def _cell(value: object) -> str:
    """A fact as one word."""
    text = printable(str(value), SHORT * 4)
    return text if text and not any(sign in text for sign in ' "=') else json.dumps(text, ensure_ascii=False)


class JsonLines(logging.Formatter):
    """Writes a record as one JSON object in one line, with its facts as members and a traceback as text.

    Everything beyond ASCII is escaped, so no text of a peer can end the line or act on a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        members: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "action": vars(record).get("action"),
            "message": _cut(record.getMessage().rstrip("\n")),
            "pid": record.process,
        }
        facts = {name: _value(fact) for name, fact in facts_of(record).items() if name not in members}
        members |= {name: facts.pop(name) for name in IDS if name in facts} | facts
        if record.exc_info and record.exc_info[0] is not None:
            # The base class's handlers share the text of a traceback by the record, and so does this one.
            record.exc_text = record.exc_text or self.formatException(record.exc_info)
        if record.exc_text:
            members["exception"] = _cut_lines(record.exc_text)
        if record.stack_info:
            members["stack"] = _cut_lines(self.formatStack(record.stack_info))
        return json.dumps(members)


def _value(fact: object) -> object:
    """A fact as JSON can hold it."""
    match fact:
        case None | bool() | int():
            return fact
        case float():
            return fact if math.isfinite(fact) else str(fact)
    return _cut(str(fact), MAX_SENTENCE)


def _cut(text: str, most: int = MAX_LINE) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _cut_lines(text: str) -> str:
    lines = text.split("\n")
    more = [f"… {len(lines) - MAX_LINES} more lines"] if len(lines) > MAX_LINES else []
    return "\n".join([*(_cut(line) for line in lines[:MAX_LINES]), *more])
