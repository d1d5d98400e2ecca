"""Keeps the state with which the next process of a client continues, in a store.

The state is written whole each time: it is as small as the handshake and the calls that run. A store holds the state of
one client at a time.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from perdure._core import sticky
from perdure._files import private
from perdure._files.locks import HAS_FLOCK, SoleHolder, let_go_in_child, lock_file, release
from perdure.errors import StateInUse, StateUnusable
from perdure.remote import state_file
from perdure.remote.call import ToolCall
from perdure.remote.durable_calls import DurableCall
from perdure.remote.endpoint import Handshake
from perdure.remote.state_file import LAG, BadState, NewerState, StateWriter, encode, with_sticky
from perdure.telemetry.log_records import log_event

#: Turns of the event loop in which a result reaches the program: each task that waits for another one takes one.
TURNS = 20


@dataclass(kw_only=True)
class Place:
    """The place in a stream from which the next process continues."""

    position: str | None = None
    retry: int | None = None

    def moved(self, position: str | None, retry: int | None) -> None:
        self.position = position
        if retry is not None:
            self.retry = retry


@dataclass(kw_only=True)
class Running(Place, ToolCall):
    """A call of a session."""

    began: float = 0.0
    """When the call was first sent, by this machine's clock."""


@dataclass(kw_only=True)
class Ask:
    """A request of the server that was handed on and is not answered yet."""

    message: dict[str, Any]
    call: str | None
    """The call that asks; None for the standalone stream."""


@dataclass(kw_only=True)
class State(Place):
    """The whole state. The place is that of the standalone stream."""

    url: str
    start: int = 0
    """Counts the processes: it is a part of every request's id."""
    handshake: Handshake | None = None
    calls: dict[str, Running] = field(default_factory=dict)
    asks: dict[str, Ask] = field(default_factory=dict)
    sticky: list[str] = field(default_factory=list)
    """The requests to repeat in a new session: a log level, subscriptions."""
    durable_calls: dict[str, DurableCall] = field(default_factory=dict)
    discovered: dict[str, Any] | None = None
    """The result of `server/discover`, where there is no session."""

    def forget_session(self) -> None:
        self.replace_session(None)
        self.calls.clear()
        self.sticky.clear()

    def replace_session(self, handshake: Handshake | None) -> None:
        """Begin with another session. Calls that run belong to the old session, and end by themselves."""
        self.handshake, self.position, self.retry = handshake, None, None
        self.asks.clear()

    def stick(self, method: str, params: dict[str, Any]) -> None:
        """Repeat a request in later sessions, in place of those that it overrides."""
        self.sticky = with_sticky(self.sticky, sticky.encode(method, params))


def decode(data: bytes) -> State:
    """Raises `BadState`."""
    state = state_file.decode(State, data)
    if any(key != call.id for key, call in [*state.calls.items(), *state.durable_calls.items()]):
        raise BadState("a call stands under another id")
    return state


class StateStore(Protocol):
    """Keeps one client's state.

    1. `open` returns what was saved last, or None; it raises `StateInUse` while another client has it open.
    2. `save` is atomic: a later `open` returns this value or the previous one, never a part.
    3. `set_aside` moves a value that cannot be read to another place, for a person to read; it returns the place.
    4. `close` lets another client open the state.
    """

    def open(self) -> bytes | None: ...

    def save(self, data: bytes) -> None: ...

    def set_aside(self) -> str: ...

    def close(self) -> None: ...


class StateFile:
    """One file, readable by its owner alone, and beside it `PATH.lock`, held while a client uses it.

    The lock is the operating system's (`flock`), so that it is free as soon as its holder is dead. It stands on a file
    of its own because the state is replaced by renaming. What `save` has written survives the death of this process;
    a power cut may take the last moments with it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._sole = SoleHolder(os.fspath(self._beside("lock")))
        """In place of the lock, where the system has no `flock`."""

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def open(self) -> bytes | None:
        try:
            if HAS_FLOCK:
                self._lock = lock_file(self._beside("lock"))
            if not (self._lock is not None if HAS_FLOCK else self._sole.take(patience=0)):
                raise StateInUse(f"another client uses the state {self.path}")
            let_go_in_child(self)
            return private.read(self.path, limit=None, may_be_shared=True)
        except (private.Untrusted, OSError, sqlite3.Error) as reason:
            self.close()
            raise StateUnusable(f"the state {self.path} cannot be used: {reason}") from reason

    def save(self, data: bytes) -> None:
        private.replace(self.path, data)

    def set_aside(self) -> str:
        aside = self._beside("unreadable")
        self.path.replace(aside)
        return str(aside)

    def close(self) -> None:
        self._sole.release()
        if self._lock is not None:
            release(self._lock)
            self._lock = None

    def let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Memory:
    """Opens the state, and writes it down: `changed` at once, `moved` soon.

    `store` is what a user gave: a path, a store of their own, or nothing; then the session ends with the process.
    """

    def __init__(self, store: str | os.PathLike[str] | StateStore | None, url: str) -> None:
        self.state = State(url=url)
        self._store = StateFile(store) if isinstance(store, str | os.PathLike) else store
        self._writer = StateWriter(self._save, _on_failing)
        self.changed = self._writer.changed
        self.moved = self._writer.moved
        self._due: list[Callable[[], None]] = []
        """What deletes calls soon."""
        if self._store is None:
            self.state.start = 1
            self._writer.close()
            return
        data = self._store.open()
        try:
            if data is not None:
                self._recall(self._store, data)
            self.state.start += 1
            # The first write is the one that may fail: a start that is not written down could be used twice.
            self._save()
        except Exception as error:
            self._store.close()
            if isinstance(error, StateUnusable):
                raise
            raise StateUnusable(f"the client's state cannot be written: {error}") from error

    def _recall(self, store: StateStore, data: bytes) -> None:
        try:
            state = decode(data)
        except NewerState as error:
            raise StateUnusable(str(error)) from error
        except BadState as error:
            try:
                aside = store.set_aside()
            except Exception as failure:
                sentence = f"the client's state cannot be read, nor put out of the way: {failure}"
                raise StateUnusable(sentence) from failure
            sentence = f"the client's state could not be read, a new session begins: {error}"
            log_event(logging.WARNING, "client.state_unreadable", sentence, kept_as=aside)
            return
        if state.url != self.state.url:
            raise StateUnusable(f"the state belongs to {state.url}, not to {self.state.url}")
        self.state = state

    def _save(self) -> None:
        if self._store is not None:
            self._store.save(encode(self.state))

    def end(self, call: str) -> None:
        """Delete a call that has ended, and its questions."""
        if self.state.calls.pop(call, None) is not None:
            self.state.asks = {key: ask for key, ask in self.state.asks.items() if ask.call != call}
            self.changed()

    def end_durable(self, call: DurableCall) -> None:
        """Delete a call without a session that has ended. Another call may have its key by now."""
        if self.state.durable_calls.get(call.id) is call:
            del self.state.durable_calls[call.id]
            self.changed()

    def soon(self, forget: Callable[[], None]) -> None:
        """Delete a call whose result is handed to the program in this moment.

        A process that is killed before the program has it, on its way through tasks that wait for each other, leaves
        the call to the next one. Twice is harmless, never is not.
        """
        loop = asyncio.get_running_loop()

        def run(turns: int) -> None:
            if turns:  # a loop that stood still has run the timer before the tasks
                loop.call_soon(run, turns - 1)
            elif forget in self._due:
                self._due.remove(forget)
                forget()

        self._due.append(forget)
        loop.call_later(LAG, run, TURNS)

    def answered(self, ask: object) -> None:
        """Delete a question that has its reply, or was withdrawn."""
        if self.state.asks.pop(str(ask), None) is not None:
            self.changed()

    def close(self) -> None:
        while self._due:
            self._due.pop()()
        self.changed()
        self._writer.close()  # a result may be taken later, but the state may be another client's by then
        if self._store is not None:
            self._store.close()


def _on_failing(error: Exception | None) -> None:
    if error is None:
        log_event(logging.INFO, "client.state_written", "the client's state can be written again")
    else:
        sentence = f"the client's state cannot be written, what happens now is not remembered: {error}"
        log_event(logging.WARNING, "client.state_unwritable", sentence)
