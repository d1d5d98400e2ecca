"""Keeps on disk how far the host has read and which calls run, for the next process.

The file holds no credentials, no session id and no arguments: a digest binds it to its session. A fact is written
before it can matter: a call before it is sent, and the host's position in the standalone stream as soon as it has
moved. Positions of calls are written a little later, many at a time (`remote/state_file.py`): after a kill an old one
repeats a few log messages at worst.
"""

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from perdure._core.sticky import after as sticky_after
from perdure._files import private
from perdure.remote import state_file
from perdure.remote.endpoint import can_be_sent
from perdure.remote.state_file import BadState, StateWriter, encode
from perdure.telemetry.log_records import log_event

#: Of the file. A running call takes some 200 bytes, and 256 of them run at most; subscriptions have 256 KiB.
MAX_BYTES = 1 << 20


@dataclass(kw_only=True)
class RunningCall:
    """A request of the host that runs."""

    id: str  #: as the host wrote it, as JSON
    method: str
    name: str = ""  #: of the tool
    position: str | None = None


@dataclass(kw_only=True)
class Positions:
    """The content of the file."""

    session: str = ""  #: a digest of its id
    position: str | None = None  #: of the standalone stream
    calls: dict[str, RunningCall] = field(default_factory=dict)  #: those that run, by their ids on the wire
    sticky: list[str] = field(default_factory=list)
    """The requests to repeat in a new session: a log level, subscriptions."""


def decode(data: bytes) -> Positions:
    """Raises `ValueError` for what is not ours."""
    found = state_file.decode(Positions, data)
    for call in found.calls.values():
        json.loads(call.id)
    for position in (found.position, *(call.position for call in found.calls.values())):
        if position and not can_be_sent(position):
            raise BadState("a position cannot be sent")
    return found


def digest(session: str) -> str:
    return hashlib.sha256(session.encode()).hexdigest()


class PositionsFile:
    """Keeps the positions of one slot, in memory and on disk; without a path, in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.positions = Positions()

        def save() -> None:
            if path is not None:
                private.replace(path, encode(self.positions))

        def on_failing(error: Exception | None) -> None:
            if error is not None:
                log_event(logging.WARNING, "stdio.positions_unwritten", f"the positions cannot be written: {error}")

        writer = StateWriter(save, on_failing)
        # Written now, soon, and for the last time: the slot may be another process's from then on.
        self.changed, self._moved, self.close = writer.changed, writer.moved, writer.close

    def recall(self, session: str) -> None:
        """Read the positions of an earlier process, if they are of this session."""
        self.positions = Positions(session=digest(session))
        try:
            # Only what is this user's alone: who may write it could put words into the bridge's mouth.
            found = None if self._path is None else private.read(self._path, limit=MAX_BYTES)
            read_back = None if found is None else decode(found)
        except (private.Untrusted, ValueError) as error:
            sentence = f"the positions of an earlier process are not used: {error}"
            log_event(logging.WARNING, "stdio.positions_unreadable", sentence)
            return
        if read_back is not None and read_back.session == self.positions.session:
            self.positions = read_back

    def begin(self, session: str) -> None:
        """Begin the positions of a new session. What the server has not taken yet is repeated in it."""
        untaken = {wire_id: call for wire_id, call in self.positions.calls.items() if call.position is None}
        self.positions = Positions(session=digest(session), calls=untaken, sticky=self.positions.sticky)
        self.changed()

    def add_call(self, wire_id: str, call: RunningCall) -> None:
        self.positions.calls[wire_id] = call
        self.changed()

    def move_call(self, wire_id: str, position: str | None) -> None:
        if (call := self.positions.calls.get(wire_id)) is None:
            return  # it can be repeated, or its session is gone
        is_first, call.position = call.position is None, position
        if is_first:
            self.changed()  # without a position the next process could not go on at all
        else:
            self._moved()

    def end_call(self, wire_id: str) -> None:
        if self.positions.calls.pop(wire_id, None) is not None:
            self.changed()

    def move(self, position: str | None) -> None:
        """Note that the host has everything of the standalone stream up to there."""
        self.positions.position = position
        self.changed()

    def stick(self, request: bytes) -> None:
        """Repeat a request in later sessions, in place of those that it overrides."""
        kept = tuple(earlier.encode() for earlier in self.positions.sticky)
        self.positions.sticky = [one.decode() for one in sticky_after(kept, request)]
        self.changed()
