"""`perdure stdio` from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx2

from perdure._core.codes import NO_SERVER
from perdure._core.jsonrpc import InvalidMessage, Request, parse_body
from perdure._core.reconnect import Patience
from perdure.client.auth import Bearer
from perdure.client.wire import LIMITS, TIMEOUT, Wire
from perdure.stdio import logs, troubles
from perdure.stdio.bridge import Bridge
from perdure.stdio.messages import encode, error
from perdure.stdio.notes import Notes
from perdure.stdio.pipes import HostGone, Line, Output, lines
from perdure.stdio.resuming import Resuming

#: As click and `perdure serve` have it: what was asked for cannot be done.
REFUSED = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user gave."""

    url: str
    token_env: str | None = None
    token_file: Path | None = None
    token_dir: Path | None = None
    resume: bool = True
    patience: float = Patience().max_time
    log_level: str = "info"
    log_file: Path | None = None


class BadCredentials(Exception):
    """They cannot be had."""


def run(options: Options, arguments: list[str]) -> int:
    """The exit status: 0 at the end of stdin, 128 and the number for a signal, 2 if it could never work."""
    log, unwritten = _log(options)
    try:
        return anyio.run(_run, options, arguments, unwritten)
    finally:
        log.finish()


def _log(options: Options) -> tuple[logs.Unblocked, str | None]:
    try:
        return logs.set_up(options.log_level, options.log_file), None
    except OSError as failure:
        return logs.set_up(options.log_level, None), f"the log file {options.log_file} cannot be written: {failure}"
