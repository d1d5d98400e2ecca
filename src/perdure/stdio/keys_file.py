"""Keeps the keys of a host's calls without a session (2026-07-28) on disk while the calls run.

A host that starts its bridge again may send a request again whose answer it never got, as the specification says. With
the key of the earlier request the server joins both to one call. An entry names its call by a digest of the host's
name, the tool and the arguments; it holds no arguments, results or credentials.

Each bridge has a keys file of its own, and a lock beside it for as long as it lives. A bridge that starts takes over
the files of bridges of the same target that have ended. So two windows of one host that call the same tool with the
same arguments are two calls, and a call is joined once. What is not joined within `REJOIN_SECONDS` is given up: the
same request is a new one by then.
"""

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure._core.envelope import CLIENT
from perdure._files import private
from perdure._files.locks import release
from perdure._files.private import Folder, Untrusted
from perdure.remote.state_file import StateWriter, decode, encode
from perdure.stdio.resume_slot import Target
from perdure.telemetry.log_records import log_event

#: Seconds after the end of its bridge in which a call is joined. Hosts retry as soon as they are back; a person who
#: asks for the same later wants it done again.
REJOIN_SECONDS = 600.0
#: Seconds between two signs of life in the file, by which a later bridge knows when this one ended.
BEAT_SECONDS = 30.0
#: Of the file: an entry has some 300 bytes, and 256 calls run at most, beside as many that wait to be joined.
MAX_BYTES = 1 << 20
#: Calls that wait to be joined. Beyond, the oldest are given up.
MAX_LEFT = 1_000
#: Of chance in a key: no two calls have the same.
KEY_BYTES = 24


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
    """Keeps the keys of one bridge; without a folder, in memory alone. Nothing raises."""

    def __init__(self, folder: Folder | None = None, target: Target | None = None) -> None:
        self._folder = folder
        self._running: list[KeptKey] = []
        self._left: list[KeptKey] = []
        self._lock: int | None = None
        self._writer = StateWriter(self._save, _on_failing)
        kind = "" if target is None else target.digest[:40]
        self._prefix, self._name = f"{kind}-", f"{kind}-{secrets.token_hex(8)}"
        if folder is not None:
            self._take_over_all()

    def begin(self, digest: str) -> KeptKey:
        """Return the entry of a call: one that an earlier bridge left, or a new one. It is on disk before the call is
        sent."""
        if (found := self._join(lambda entry: entry.digest == digest)) is not None:
            return found
        entry = KeptKey(digest=digest, key=secrets.token_urlsafe(KEY_BYTES))
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
            log_event(logging.INFO, "stdio.call_joined", "a call of an earlier process goes on with the host's retry")
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
                entries = [] if found is None else decode(Keys, found).calls
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


def open_keys(directory: str | os.PathLike[str] | None, target: Target) -> KeysFile:
    """Open the keys of this bridge. Never raises: without a folder they are in memory."""
    if directory is None:
        return KeysFile()
    try:
        return KeysFile(Folder(directory), target)
    except (OSError, RuntimeError, ValueError) as error:
        _on_failing(error)
        return KeysFile()
