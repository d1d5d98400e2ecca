"""Writes progress, log lines and questions to stderr, and reads answers from the terminal. stdout is for results.

On a terminal, progress is one line that is drawn again and again; lines are written above it. Elsewhere each step of
progress is a line. (Click's progress bar has a fixed length, and cannot have lines above it.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import sys
from typing import TextIO

from perdure._core.text import printable
from perdure.telemetry.events import LogLines

#: Columns of the bar itself.
BAR = 24
#: Characters of a server's text in a line.
MAX_SHOWN = 2_000
#: Bytes of an answer: terminals give 4 KiB at a time, at most.
MAX_ANSWER = 4_096

_CLEAR = "\r\x1b[K"


class Declined(Exception):
    """The user closed the input (Ctrl-D) in place of an answer."""


class Terminal:
    """stderr, and stdin if that is a terminal."""

    def __init__(self, name: str, *, output: TextIO | None = None) -> None:
        self._name = name
        self._output = sys.stderr if output is None else output
        self._is_drawn_on = self._output.isatty()
        self._bar = ""
        """What stands in the last line of a terminal."""
        self._last = ""
        self._prompt = ""
        """The question that is not answered yet; no bar is drawn meanwhile."""

    @property
    def can_ask(self) -> bool:
        """Not on Windows, whose event loop cannot wait for a terminal."""
        return os.name == "posix" and sys.stdin is not None and sys.stdin.isatty()

    def line(self, text: str) -> None:
        """A line, above the bar if there is one."""
        bar, said = self._bar, printable(text, MAX_SHOWN)
        self.clear()
        self._write(f"\n{said}\n{self._prompt}" if self._prompt else f"{said}\n")
        self._draw(bar)

    def progress(self, progress: float, total: float | None, message: str | None) -> None:
        said = f"{self._name}: {progress_words(progress, total, message)}"
        if said == self._last:
            return
        self._last = said
        if not self._is_drawn_on:
            self._write(f"{said}\n")
            return
        self._draw(progress_bar(self._name, progress, total, message, columns=shutil.get_terminal_size().columns))

    def clear(self) -> None:
        """Take the bar away."""
        if self._bar:
            self._write(_CLEAR)
            self._bar = ""

    async def ask(self, prompt: str) -> str:
        """A line of the user, without its end. Raises `Declined` at Ctrl-D. It can be cancelled: no thread waits."""
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
        data = os.read(stdin, MAX_ANSWER)  # a whole line: the terminal gives nothing before its end
        if not data:
            self._write("\n")
            raise Declined
        return data.decode(errors="replace").rstrip("\n")

    def _draw(self, bar: str) -> None:
        if bar and self._is_drawn_on and not self._prompt:
            self._write(_CLEAR + bar)
            self._bar = bar

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # its reader has gone
            self._output.write(text)
            self._output.flush()


class TerminalLog(logging.Handler):
    """Writes log records above the bar."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal
        self.setFormatter(LogLines("perdure: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):
            self._terminal.line(line)


def progress_words(progress: float, total: float | None, message: str | None) -> str:
    share = _share(progress, total)
    counted = _number(progress) if share is None or total is None else f"{_number(progress)} of {_number(total)}"
    percent = "" if share is None else f" ({share:.0%})"
    return f"{counted}{percent}" + (f" {printable(message, MAX_SHOWN)}" if message else "")


def progress_bar(name: str, progress: float, total: float | None, message: str | None, *, columns: int) -> str:
    """One line that fits into the terminal."""
    share = _share(progress, total)
    words = progress_words(progress, total, message)
    if share is None:
        line = f"{name}  {words}"
    else:
        full = int(BAR * share)
        line = f"{name}  [{'#' * full}{'-' * (BAR - full)}]  {words}"
    return line if len(line) < columns else line[: max(columns - 2, 0)] + "…"


def _share(progress: float, total: float | None) -> float | None:
    """How much is done, from 0 to 1; None if that is not known. Servers may send anything."""
    if total is None or not (math.isfinite(progress) and math.isfinite(total)) or total <= 0:
        return None
    return min(max(progress / total, 0.0), 1.0)


def _number(value: float) -> str:
    return f"{value:.10g}"
