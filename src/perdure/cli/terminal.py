"""Writes progress and log lines to stderr, and asks the user on the terminal what a tool wants to know (elicitation).

On a terminal, progress is one line that is drawn again and again; lines are written above it. Elsewhere each step of
progress is a line. stdout is for results.
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

#: Characters of a server's text in a line.
MAX_SHOWN = 2_000
#: Characters of the server's words for one field of a form.
MAX_WORDS = 500
#: Bytes of an answer: terminals return 4 KiB at a time, at most.
MAX_ANSWER = 4_096

_CLEAR = "\r\x1b[K"


class Declined(Exception):
    """The user closed the input (Ctrl-D) in place of an answer."""


class Terminal:
    """stderr, and stdin if that is a terminal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_drawn_on = sys.stderr.isatty()
        self._progress = ""
        """The progress that was shown last."""
        self._is_drawn = False
        """Whether the progress stands in the last line of a terminal."""
        self._prompt = ""
        """The question that is not answered yet; no progress is drawn meanwhile."""

    @property
    def can_ask(self) -> bool:
        """Not on Windows, whose event loop cannot wait for a terminal."""
        return os.name == "posix" and sys.stdin is not None and sys.stdin.isatty()

    def line(self, text: str) -> None:
        """Write a line, above the progress if it is drawn."""
        was_drawn, text = self._is_drawn, printable(text, MAX_SHOWN)
        self.clear()
        self._write(f"\n{text}\n{self._prompt}" if self._prompt else f"{text}\n")
        if was_drawn:
            self._draw()

    def progress(self, progress: float, total: float | None, message: str | None) -> None:
        text = f"{self._name}: {progress_words(progress, total, message)}"
        if text != self._progress:
            self._progress = text
            if self._is_drawn_on:
                self._draw()
            else:
                self._write(f"{text}\n")

    def clear(self) -> None:
        """Remove the progress."""
        if self._is_drawn:
            self._write(_CLEAR)
            self._is_drawn = False

    async def ask(self, prompt: str) -> str:
        """Return a line of the user. Raises `Declined` at Ctrl-D. It can be cancelled, which `click.prompt` cannot."""
        self.clear()
        self._prompt = printable(prompt)
        self._write(self._prompt)
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        stdin = sys.stdin.fileno()
        loop.add_reader(stdin, readable.set)
        try:
            await readable.wait()
        except asyncio.CancelledError:
            self._write("\n")
            raise
        finally:
            loop.remove_reader(stdin)
            self._prompt = ""
        data = os.read(stdin, MAX_ANSWER)  # a whole line: the terminal returns nothing before its end
        if not data:
            self._write("\n")
            raise Declined
        return data.decode(errors="replace").strip()

    def _draw(self) -> None:
        if not self._prompt:
            columns = shutil.get_terminal_size().columns
            shown = self._progress if len(self._progress) < columns else self._progress[: max(columns - 2, 0)] + "…"
            self._write(_CLEAR + shown)
            self._is_drawn = True

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # its reader has gone
            sys.stderr.write(text)
            sys.stderr.flush()


class TerminalLog(logging.Handler):
    """Writes log records above the progress."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal
        self.setFormatter(LogLines("perdure: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):
            self._terminal.line(line)


def progress_words(progress: float, total: float | None, message: str | None) -> str:
    words = f"{progress:.10g}"
    if total is not None and math.isfinite(progress) and math.isfinite(total) and total > 0:  # servers send anything
        words += f" of {total:.10g} ({min(max(progress / total, 0.0), 1.0):.0%})"
    return f"{words} {printable(message, MAX_SHOWN)}" if message else words


class ElicitationForm:
    """Asks for the fields of a form one by one. An answer that does not fit is asked for again."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._turn = asyncio.Lock()
        """Tools may ask several questions at once."""

    async def answer(self, context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        if not self._terminal.can_ask:
            question = printable(params.message, MAX_WORDS)
            self._terminal.line(f"perdure: not answered, because stdin is not a terminal: {question}")
            return types.ElicitResult(action="cancel")
        async with self._turn:
            for line in ("", *params.message.splitlines(), "(Ctrl-D declines)"):
                self._terminal.line(line)
            try:
                content = await self._fill(params)
            except Declined:
                self._terminal.line("declined")
                return types.ElicitResult(action="decline")
        return types.ElicitResult(action="accept", content=content)

    async def _fill(self, params: types.ElicitRequestParams) -> dict[str, Any] | None:
        if isinstance(params, types.ElicitRequestURLParams):
            self._terminal.line(f"The server wants you to open this address: {params.url}")
            await self._confirm("Have you opened it?")
            return None
        schema = params.requested_schema
        fields = schema.get("properties")
        if not isinstance(fields, Mapping) or not fields:
            await self._confirm("Accept?")
            return {}
        found = {}
        for name, field in fields.items():
            if isinstance(field, Mapping):
                value = await self._ask_field(name, field, is_required=name in (schema.get("required") or ()))
                if value is not None:
                    found[name] = value
        return found

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
            self._terminal.line(f"  {printable(str(description), MAX_WORDS)}")
        shown += ", separated by commas" if item is not field else ""
        hint = printable(shown if is_required or "default" in field else f"{shown}, optional", MAX_WORDS)
        default = f" [{field['default']}]" if "default" in field else ""
        while True:
            text = await self._terminal.ask(f"  {field.get('title') or name} ({hint}){default}: "[: 2 * MAX_WORDS])
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
    """Return click's type for the answer, and the words that say what may be written."""

    def limit(key: str) -> Any:
        return found if isinstance(found := field.get(key), int | float) else None

    ways = field.get("oneOf", field.get("anyOf"))
    titled = ways if isinstance(ways, list) else []
    values = field.get("enum")
    titles = {str(value): "" for value in values} if isinstance(values, list) else {}
    titles |= {str(one["const"]): one.get("title", "") for one in titled if isinstance(one, Mapping) and "const" in one}
    if titles:
        return click.Choice(list(titles)), " | ".join(
            f"{value} = {name}" if name else value for value, name in titles.items()
        )
    match field.get("type"):
        case "integer":
            return click.IntRange(limit("minimum"), limit("maximum")), "integer"
        case "number":
            return click.FloatRange(limit("minimum"), limit("maximum")), "number"
        case "boolean":
            return click.BOOL, "y/n"
    return click.STRING, "text"
