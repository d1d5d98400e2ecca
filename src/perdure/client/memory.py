"""A client's memory opens its state and writes it to the store."""

from __future__ import annotations

import logging

from perdure.errors import StateUnusable
from perdure.remote.state import BadState, NewerState, State, decode
from perdure.remote.state_file import NoState, StateStore
from perdure.remote.state_writer import StateWriter
from perdure.telemetry.events import log_event


class Memory:
    """Opens the state, and writes it down: `changed` at once, `moved` soon."""

    def __init__(self, store: StateStore, url: str) -> None:
        self._store = store
        self.state = self._open(url)
        self.state.start += 1
        self._writer = StateWriter(self._save, _tell)
        try:
            # The first write is the one that may fail: a start that is not written down could be used twice.
            self._save()
        except Exception as error:
            store.close()
            raise StateUnusable(f"the client's state cannot be written: {error}") from error
        if isinstance(store, NoState):
            self._writer.close()
        self.changed = self._writer.changed
        self.moved = self._writer.moved

    def _open(self, url: str) -> State:
        data = self._store.open()
        if data is None:
            return State(url=url)
        try:
            state = decode(data)
        except NewerState as error:
            self._store.close()
            raise StateUnusable(str(error)) from error
        except BadState as error:
            try:
                aside = self._store.set_aside()
            except Exception as failure:
                self._store.close()
                raise StateUnusable(
                    f"the client's state cannot be read, nor put out of the way: {failure}"
                ) from failure
            sentence = f"the client's state could not be read, a new session begins: {error}"
            log_event(logging.WARNING, "client.state_unreadable", sentence, kept_as=aside)
            return State(url=url)
        if state.url != url:
            self._store.close()
            raise StateUnusable(f"the state belongs to {state.url}, not to {url}")
        return state

    def _save(self) -> None:
        self._store.save(self.state.encode())

    def end(self, call: str) -> None:
        """A call is over: forget it, if it was remembered."""
        if call in self.state.calls:
            self.state.end(call)
            self.changed()

    def answered(self, ask: object) -> None:
        """A request of the server has its reply, or was withdrawn."""
        if self.state.asks.pop(str(ask), None) is not None:
            self.changed()

    def close(self) -> None:
        self.changed()
        self._writer.close()  # a result may be taken later, but the state may be another client's by then
        self._store.close()


def _tell(error: Exception | None) -> None:
    if error is None:
        log_event(logging.INFO, "client.state_written", "the client's state can be written again")
    else:
        sentence = f"the client's state cannot be written, what happens now is not remembered: {error}"
        log_event(logging.WARNING, "client.state_unwritable", sentence)
