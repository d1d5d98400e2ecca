"""Formats log records as lines of text for people, or as JSON objects for machines.

Every line has a time, a level and an action: that of our own records, and the logger's name where a record is another
package's. Ids are as short as operators' commands show them; the whole id of a session is a secret.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from perdure._core.ids import parse_position
from perdure._core.text import printable
from perdure.telemetry.events import MAX_LINE, MAX_LINES, MAX_SENTENCE, SHORT, LogLines

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


def facts_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What the record was given as `extra`, its action aside; ids are shortened."""
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

    Everything beyond ASCII is escaped, so nothing that a peer wrote can end the line or act on a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "action": vars(record).get("action"),
            "message": _cut(record.getMessage().rstrip("\n")),
            "pid": record.process,
        }
        facts = {name: _value(fact) for name, fact in facts_of(record).items() if name not in told}
        told |= {name: facts.pop(name) for name in IDS if name in facts} | facts
        told |= dict(self._tracebacks(record))
        return json.dumps(told)

    def _tracebacks(self, record: logging.LogRecord) -> Iterator[tuple[str, str]]:
        if record.exc_info and record.exc_info[0] is not None:
            # The base class's handlers share the text of a traceback by the record, and so does this one.
            record.exc_text = record.exc_text or self.formatException(record.exc_info)
        if record.exc_text:
            yield "exception", _cut_lines(record.exc_text)
        if record.stack_info:
            yield "stack", _cut_lines(self.formatStack(record.stack_info))


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
