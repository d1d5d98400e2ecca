"""What the next instance of the bridge must know of this one: how far the host has heard, and what still runs.

No credentials, no session id and no arguments stand there: a digest binds the notes to their session. What matters is
written before it can matter: a call before it is sent, and how far the host has heard as soon as it has. Positions of
calls are written a little later (`LAG`), many at a time: after a kill an old one repeats a few log messages at worst.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perdure._files import private
from perdure.remote.endpoint import can_be_sent
from perdure.stdio.call import Asked
from perdure.telemetry.events import log_event

#: Of the form. Notes of another form are not read: the next instance then knows less, and nothing wrong.
VERSION = 1
#: Seconds by which a position on disk may be behind. Each write is a new small file, about 0.1 ms.
LAG = 0.02
#: Of the file. A running call takes some 200 bytes, and 256 of them run at most; subscriptions have 256 KiB.
MAX_BYTES = 1 << 20


@dataclass(kw_only=True)
class Noted:
    """All of it."""

    session: str = ""
    """A digest of its id."""
    position: str | None = None
    """Of the standalone stream."""
    calls: dict[str, Asked] = field(default_factory=dict)
    """Those that run, by their ids on the wire."""
    sticky: list[str] = field(default_factory=list)
    """The requests to repeat in a new session: a log level, subscriptions."""

    def encode(self) -> bytes:
        return json.dumps({"perdure": VERSION, **asdict(self)}, separators=(",", ":")).encode()


def decode(data: bytes) -> Noted:
    """Raises `ValueError` for whatever is not ours."""
    try:
        found = json.loads(data)
        if found.pop("perdure") != VERSION:
            raise ValueError("the notes have another form")
        calls = {str(key): _asked(call) for key, call in found.pop("calls").items()}
        noted = Noted(**found, calls=calls)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no notes of a bridge: {error}") from error
    is_fit = (
        isinstance(noted.session, str) and isinstance(noted.position, str | None) and isinstance(noted.sticky, list)
    )
    if not is_fit or not all(isinstance(request, str) for request in noted.sticky):
        raise ValueError("the notes are of another kind")
    if any(position and not can_be_sent(position) for position in (noted.position, *_positions(calls))):
        raise ValueError("a position is none that was noted")
    return noted


def _positions(calls: dict[str, Asked]) -> list[str | None]:
    return [asked.position for asked in calls.values()]


def _asked(found: dict[str, Any]) -> Asked:
    asked = Asked(**found)
    if not all(isinstance(value, str) for value in (asked.id, asked.method, asked.name, asked.position or "")):
        raise ValueError("a call is of another kind")
    json.loads(asked.id)
    return asked


def digest(session: str) -> str:
    return hashlib.sha256(session.encode()).hexdigest()


class Notes:
    """The notes of one slot, in memory and on disk; without a path, in memory alone.

    `where` is asked each time: a bridge whose credential the server does not take for the slot's moves to another slot.
    """

    def __init__(self, where: Callable[[], Path | None]) -> None:
        self._where = where
        self._due: asyncio.TimerHandle | None = None
        self._failing = False
        self.noted = Noted()

    def recall(self, session: str) -> None:
        """What an instance of before has noted of this session."""
        self.noted = Noted(session=digest(session))
        try:
            path = self._where()
            # Only what is this user's alone: who may write it could put words into the bridge's mouth.
            found = None if path is None else private.read(path, limit=MAX_BYTES)
            noted = None if found is None else decode(found)
        except (private.Untrusted, ValueError) as error:
            log_event(logging.WARNING, "stdio.notes_unreadable", f"the notes of before cannot be used: {error}")
            return
        if noted is not None and noted.session == self.noted.session:
            self.noted = noted

    def begin(self, session: str) -> None:
        """A session that has no before. What the server has not taken yet is repeated in it."""
        untaken = {wire_id: asked for wire_id, asked in self.noted.calls.items() if asked.position is None}
        self.noted = Noted(session=digest(session), calls=untaken, sticky=self.noted.sticky)
        self.changed()

    def changed(self) -> None:
        """Write now."""
        if (path := self._where()) is None:
            return
        if self._due is not None:
            self._due.cancel()
            self._due = None
        try:
            private.replace(path, self.noted.encode())
            self._failing = False
        except OSError as error:
            if not self._failing:
                log_event(logging.WARNING, "stdio.notes_unwritten", f"the notes cannot be written: {error}")
            self._failing = True

    def moved(self) -> None:
        """Write soon."""
        if self._where() is not None and self._due is None:
            self._due = asyncio.get_running_loop().call_later(LAG, self._write_due)

    def close(self) -> None:
        """Write what is due, and nothing more: the slot may be another instance's from now on."""
        if self._due is not None:
            self.changed()
        self._where = lambda: None

    def _write_due(self) -> None:
        self._due = None
        self.changed()
