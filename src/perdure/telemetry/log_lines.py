"""Writes log records as lines that a peer cannot forge."""

from __future__ import annotations

import logging

from perdure._core.text import printable

MAX_LINE = 4_000
"""Characters of a line: more than our sentences and the lines of tracebacks have, less than a peer may write."""

MAX_LINES = 400
"""Lines of a record: Python folds repeated lines of a deep traceback to far fewer, but an exception's text may have any
number."""

_INDENT = "    "


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
        return "\n".join([printable(first, MAX_LINE), *(printable(_INDENT + line, MAX_LINE) for line in rest)])
