"""Attempts at one thing until it works: remember what went wrong last, and wait until the next one is due.

The course (`_core/reconnect.py`) has the rule; here it meets the clock.
"""

from __future__ import annotations

import math
import random
import time

import anyio

from perdure._core.reconnect import Course, Patience, Step, delay


class Attempts:
    """`most_asked`: seconds for which a server that asks for more time is waited for at most."""

    def __init__(self, patience: Patience, *, course: Course | None = None, most_asked: float = math.inf) -> None:
        self.trouble = ""
        """What went wrong last; the caller reads it when patience has ended."""
        self.course = course or Course()
        self._patience = patience
        self._most_asked = most_asked

    def failed(self, trouble: str, *, at_least: float | None = None) -> None:
        self.trouble = trouble
        asked = min(at_least or 0.0, self._most_asked)
        self.course = self.course.failed(time.monotonic(), at_least=asked)

    async def wait(self) -> bool:
        """Wait until the next attempt; False if there shall be none."""
        seconds = delay(self.course, self._patience, now=time.monotonic(), chance=random.random())
        if seconds is None:
            self.course = self.course.step(Step.GAVE_UP)
            return False
        await anyio.sleep(seconds)
        self.course = self.course.step(Step.WAITED)
        return True
