"""Finds processes by a word in their environment, whichever process has started them."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]

MARK = "SCRIPTED_MARK"
"""In the environment of each process that a test of the gateway starts, and of those below it: whose it is."""


def marked(word: bytes) -> list[psutil.Process]:
    """Return the processes that have a word in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                if word in file.read().split(b"\0"):
                    found.append(process)
        except OSError:
            continue
    return found
