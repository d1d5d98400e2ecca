"""Writes progress and log lines to stderr, and asks the user the questions of a tool on the terminal (elicitation).

On a terminal, progress is one line that is drawn again and again. Elsewhere each step of progress is a line. stdout is
for results.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import click
import mcp_types as types
from mcp.client.session import ClientRequestContext

from perdure._core.text import printable
from perdure.telemetry.log_records import LogLines

#: Characters of a server's text in a line, and of the server's words for one field of a form.
MAX_LINE, MAX_FIELD = 2_000, 500
#: Bytes of an answer: terminals return 4 KiB at a time, at most.
MAX_ANSWER = 4_096

_CLEAR = "\r\x1b[K"


class Declined(Exception):
    """The user closed the input (Ctrl-D) in place of an answer."""


class Terminal(logging.Handler):
    """stderr, and stdin if that is a terminal. As a handler it writes log records."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.setFormatter(LogLines("perdure: %(message)s"))
        self._name = name
        self._progress = ""
        """The progress that was shown last."""
        self._is_drawn = False
        """Whether the progress stands in the last line of a terminal."""
        self._is_asking = False
        """No progress is drawn while the user answers."""

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):
            self.line(line)

    def line(self, text: str) -> None:
        self.clear()
        self._write(f"{printable(text, MAX_LINE)}\n")

    def progress(self, progress: float, total: float | None, message: str | None) -> None:
        text = f"{self._name}: {progress:.10g}"
        if (
            total is not None and math.isfinite(progress) and math.isfinite(total) and total > 0
        ):  # servers send anything
            text += f" of {total:.10g} ({min(max(progress / total, 0.0), 1.0):.0%})"
        text += f" {printable(message, MAX_LINE)}" if message else ""
        if text == self._progress:
            return
        self._progress = text
        if not sys.stderr.isatty():
            self._write(f"{text}\n")
        elif not self._is_asking:
            columns = shutil.get_terminal_size().columns
            self._write(_CLEAR + (text if len(text) < columns else text[: max(columns - 2, 0)] + "…"))
            self._is_drawn = True

    def clear(self) -> None:
        """Remove the progress."""
        if self._is_drawn:
            self._write(_CLEAR)
            self._is_drawn = False

    async def ask(self, prompt: str) -> str:
        """Return a line of the user. Raises `Declined` at Ctrl-D. It can be cancelled, which `click.prompt` cannot."""
        self.clear()
        self._write(printable(prompt))
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        stdin = sys.stdin.fileno()
        loop.add_reader(stdin, readable.set)
        self._is_asking = True
        try:
            await readable.wait()
        except asyncio.CancelledError:
            self._write("\n")
            raise
        finally:
            loop.remove_reader(stdin)
            self._is_asking = False
        data = os.read(stdin, MAX_ANSWER)  # a whole line: the terminal returns nothing before its end
        if not data:
            self._write("\n")
            raise Declined
        return data.decode(errors="replace").strip()

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # its reader has ended
            sys.stderr.write(text)
            sys.stderr.flush()


class ElicitationForm:
    """Asks for the fields of a form one by one. An answer that does not fit is asked for again."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._turn = asyncio.Lock()
        """Tools may ask several questions at once."""

    async def answer(self, context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        # Windows has no event loop that can wait for a terminal.
        if os.name != "posix" or sys.stdin is None or not sys.stdin.isatty():
            question = printable(params.message, MAX_FIELD)
            self._terminal.line(f"perdure: not answered, because stdin is not a terminal: {question}")
            return types.ElicitResult(action="cancel")
        async with self._turn:
            for line in ("", *params.message.splitlines(), "(Ctrl-D declines)"):
                self._terminal.line(line)
            try:
                if isinstance(params, types.ElicitRequestURLParams):
                    self._terminal.line(f"The server wants you to open this address: {params.url}")
                    await self._confirm("Have you opened it?")
                    return types.ElicitResult(action="accept")
                schema = params.requested_schema
                fields = declared if isinstance(declared := schema.get("properties"), Mapping) else {}
                if not fields:
                    await self._confirm("Accept?")
                found = {
                    name: await self._ask_field(name, field, is_required=name in (schema.get("required") or ()))
                    for name, field in fields.items()
                    if isinstance(field, Mapping)
                }
                content = {name: value for name, value in found.items() if value is not None}
                return types.ElicitResult(action="accept", content=content)
            except Declined:
                self._terminal.line("declined")
                return types.ElicitResult(action="decline")

    async def _confirm(self, question: str) -> None:
        """Raises `Declined` if the user says no."""
        if not await self._ask_field(question, {"type": "boolean"}, is_required=True):
            raise Declined

    async def _ask_field(self, name: str, field: Mapping[str, Any], *, is_required: bool) -> Any:
        """Return the value of a field; None if the user leaves it out."""
        items = field.get("items") if field.get("type") == "array" else None
        item = items if isinstance(items, Mapping) else field
        kind, shown = _answer_type(item)
        if description := field.get("description"):
            self._terminal.line(f"  {printable(str(description), MAX_FIELD)}")
        shown += ", separated by commas" if item is not field else ""
        hint = printable(shown if is_required or "default" in field else f"{shown}, optional", MAX_FIELD)
        default = f" [{field['default']}]" if "default" in field else ""
        while True:
            text = await self._terminal.ask(f"  {field.get('title') or name} ({hint}){default}: "[: 2 * MAX_FIELD])
            if not text:
                if is_required and "default" not in field:
                    continue
                return field.get("default")
            try:
                if item is not field:
                    return [kind.convert(part.strip(), None, None) for part in text.split(",") if part.strip()]
                return kind.convert(text, None, None)
            except click.UsageError as error:
                self._terminal.line(f"  {error.message}")


def _answer_type(field: Mapping[str, Any]) -> tuple[click.ParamType, str]:  # type: ignore[type-arg]  # generic since click 8.4 only
    """Return click's type for the answer, and the words that say what may be written. The server checks the rest."""
    values, ways = field.get("enum"), field.get("oneOf", field.get("anyOf"))
    titles = {str(value): "" for value in values} if isinstance(values, list) else {}
    for way in ways if isinstance(ways, list) else ():
        if isinstance(way, Mapping) and "const" in way:
            titles[str(way["const"])] = way.get("title", "")
    if titles:
        shown = (f"{value} = {title}" if title else value for value, title in titles.items())
        return click.Choice(list(titles)), " | ".join(shown)
    low: Any = found if isinstance(found := field.get("minimum"), int | float) else None
    high: Any = found if isinstance(found := field.get("maximum"), int | float) else None
    match field.get("type"):
        case "integer":
            return click.IntRange(low, high), "integer"
        case "number":
            return click.FloatRange(low, high), "number"
        case "boolean":
            return click.BOOL, "y/n"
    return click.STRING, "text"
