"""Keeps on disk what the next bridge needs: how far the host has read, which calls run, and the keys of calls.

**Positions** belong to a session, and their file is beside the session's token. The file holds no credentials, no
session id and no arguments: a digest binds it to its session. A fact is written before it can matter: a call before it
is sent, and the host's position in the standalone stream as soon as it has moved. Positions of calls are written a
little later, many at a time (`remote/state_file.py`): after a kill an old one repeats a few log messages at worst.

**Keys** belong to calls without a session (2026-07-28). A host that starts its bridge again may send a request again
whose answer it never got, as the specification says. With the key of the earlier request the server joins both to one
call. An entry names its call by a digest of the host's name, the tool and the arguments; it holds no arguments, results
or credentials. Each bridge has a keys file of its own, and a lock beside it for as long as it lives. A bridge that
starts takes over the files of bridges of the same target that have ended. So two windows of one host that call the same
tool with the same arguments are two calls, and a call is joined once. What is not joined within `REJOIN_SECONDS` is
given up: the same request is a new one by then.
"""

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure._core.envelope import CLIENT
from perdure._files import private
from perdure._files.locks import release
from perdure._files.private import Folder, Untrusted
from perdure.remote import state_file
from perdure.remote.durable_calls import new_key
from perdure.remote.endpoint import can_be_sent
from perdure.remote.state_file import BadState, StateWriter, encode, with_sticky
from perdure.stdio.resume_slot import Target
from perdure.telemetry.log_records import log_event

#: Bytes of a file. A running call takes 200 to 300, and 256 of them run at most; subscriptions have 256 KiB.
MAX_BYTES = 1 << 20
#: Seconds after the end of its bridge in which a call is joined. Hosts retry as soon as they are back; a person who
#: asks for the same later wants it done again.
REJOIN_SECONDS = 600.0
#: Seconds between two signs of life in the file, by which a later bridge knows when this one ended.
BEAT_SECONDS = 30.0
#: Calls that wait to be joined. Beyond, the oldest are given up.
MAX_LEFT = 1_000


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
    calls: dict[str, RunningCall] = field(default_factory=dict)  #: running calls, by their ids on the wire
    sticky: list[str] = field(default_factory=list)
    """The requests to repeat in a new session: a log level, subscriptions."""


def decode(data: bytes) -> Positions:
    """Raises `ValueError` for a file that is not one of ours."""
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
        except (Untrusted, ValueError) as error:
            sentence = f"the positions of an earlier process are not used: {error}"
            log_event(logging.WARNING, "stdio.positions_unreadable", sentence)
            return
        if read_back is not None and read_back.session == self.positions.session:
            self.positions = read_back

    def begin(self, session: str) -> None:
        """Begin the positions of a new session. Requests that the server has not taken yet are repeated in it."""
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
            self.changed()  # without a position the next process could not continue
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
        """Repeat a request in later sessions, in place of the requests that it overrides."""
        self.positions.sticky = with_sticky(self.positions.sticky, request)
        self.changed()


# Keys


@dataclass(kw_only=True)
class KeptKey:
    """A call that runs, or may run."""

    digest: str
    key: str
    task: str = ""
    """The handle of its task, once there is one."""
    left: float = 0.0
    """When its bridge ended; 0 while it lives."""


@dataclass(kw_only=True)
class Keys:
    """The content of the file."""

    calls: list[KeptKey]


def digest_of(params: Mapping[str, Any]) -> str:
    """Return the name of a call: equal for requests of one host that a tool cannot tell apart."""
    info = (params.get("_meta") or {}).get(CLIENT)
    host = info.get("name") if isinstance(info, Mapping) else None
    asked = [host, params.get("name"), params.get("arguments") or {}]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class KeysFile:
    """Keeps the keys of one bridge; without a directory that can be used, in memory alone. Nothing raises."""

    def __init__(self, directory: str | os.PathLike[str] | None = None, target: Target | None = None) -> None:
        self._folder: Folder | None = None
        self._running: list[KeptKey] = []
        self._left: list[KeptKey] = []
        self._lock: int | None = None
        self._writer = StateWriter(self._save, _on_failing)
        kind = "" if target is None else target.digest[:40]
        self._prefix, self._name = f"{kind}-", f"{kind}-{secrets.token_hex(8)}"
        try:
            self._folder = None if directory is None else Folder(directory)
        except (OSError, RuntimeError, ValueError) as error:
            _on_failing(error)
        self._take_over_all()

    def begin(self, digest: str) -> KeptKey:
        """Return the entry of a call: one that an earlier bridge left, or a new one. It is on disk before the call is
        sent."""
        if (found := self._join(lambda entry: entry.digest == digest)) is not None:
            return found
        entry = KeptKey(digest=digest, key=new_key())
        self._running.append(entry)
        self._writer.changed()
        return entry

    def resume(self, task: str) -> KeptKey | None:
        """Return the entry that an earlier bridge left of a task whose question the host answers now."""
        return self._join(lambda entry: entry.task == task)

    def _join(self, is_wanted: Callable[[KeptKey], bool]) -> KeptKey | None:
        self._take_over_all()  # a host may start a bridge before it has ended the earlier one
        self._give_up()
        found = next((entry for entry in self._left if is_wanted(entry)), None)
        if found is not None:
            self._left.remove(found)
            found.left = 0.0
            self._running.append(found)
            self._writer.changed()
            log_event(logging.INFO, "stdio.call_joined", "the host's retry continues a call of an earlier process")
        return found

    def note_task(self, entry: KeptKey, task: str) -> None:
        entry.task = task
        self._writer.changed()

    def end(self, entry: KeptKey) -> None:
        if entry in self._running:
            self._running.remove(entry)
            self._writer.changed()

    def beat(self) -> None:
        """Write a sign of life to the file, if calls run."""
        if self._running:
            self._writer.changed()

    def close(self) -> None:
        """Leave the calls that run to the next bridge."""
        now = time.time()
        for entry in self._running:
            entry.left = now
        if self._running:
            self._writer.changed()
        self._writer.close()
        if self._folder is not None and self._lock is not None:
            if not self._running and not self._left:
                self._folder.remove(f"calls-{self._name}", f"calling-{self._name}")
            release(self._lock)
            self._folder.close()
        self._folder = self._lock = None

    # On disk

    def _take_over_all(self) -> None:
        """Take over what bridges of this target have left that have ended."""
        if (folder := self._folder) is None:
            return
        try:
            if self._lock is None:
                self._lock = folder.lock(f"calling-{self._name}")
            for name in folder.names():
                if name.startswith(f"calling-{self._prefix}") and name != f"calling-{self._name}":
                    self._take_over(folder, name.removeprefix("calling-"))
        except OSError as error:
            _on_failing(error)
            self._folder = None

    def _take_over(self, folder: Folder, name: str) -> None:
        """Take over the calls of a bridge that has ended. They are in this file before the other one is deleted."""
        if (lock := folder.lock(f"calling-{name}")) is None:
            return  # its bridge lives
        try:
            ended = folder.changed(f"calls-{name}") / 1e9
            try:
                found = folder.read(f"calls-{name}", limit=MAX_BYTES)
                entries = [] if found is None else state_file.decode(Keys, found).calls
            except (Untrusted, ValueError) as error:
                log_event(logging.WARNING, "stdio.keys_unreadable", f"calls of an earlier process are lost: {error}")
                entries = []
            for entry in entries:
                entry.left = entry.left or ended
            self._left += entries
            self._give_up()
            self._writer.changed()
            folder.remove(f"calls-{name}", f"calling-{name}")
        finally:
            release(lock)

    def _give_up(self) -> None:
        oldest = time.time() - REJOIN_SECONDS
        self._left = [entry for entry in self._left if entry.left >= oldest][-MAX_LEFT:]

    def _save(self) -> None:
        if self._folder is not None:
            data = encode(Keys(calls=[*self._left, *self._running]))
            # As the positions: it survives the death of this process, and a power cut ends the host as well.
            private.replace(self._folder.path / f"calls-{self._name}", data)


def _on_failing(error: Exception | None) -> None:
    if error is not None:
        sentence = f"keys of calls cannot be written, so that a retry after a restart runs again: {error}"
        log_event(logging.WARNING, "stdio.keys_unwritten", sentence)
