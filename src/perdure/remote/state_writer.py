"""Keeps the state on disk up with the state in memory.

What another process must know is written before it can matter: a call before it is sent, an end as it is told.
Positions are written soon (`LAG`), many at a time: after a crash a position that is a little old repeats a few events
and loses none.
"""

from __future__ import annotations

import asyncio
import logging
import time

from perdure.errors import StateUnusable
from perdure.remote.state import BadState, NewerState, State, decode
from perdure.remote.state_file import NoState, StateStore
from perdure.telemetry.events import log_event

#: Seconds by which a position on disk may be behind. Each write is a new small file, about 0.1 ms.
LAG = 0.02
#: Large arguments make a large file: then positions are written so seldom that it takes a twentieth of the time.
SHARE = 20


class Keeper:
    """The state of one client, and the store that it is kept in."""

    def __init__(self, store: StateStore, url: str) -> None:
        self._store = store
        self._due: asyncio.TimerHandle | None = None
        self._lag = LAG
        self._failing = False
        self._idle = isinstance(store, NoState)
        self.state = self._open(url)
        self.state.start += 1
        self._begin()

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
            aside = self._set_aside()
            log_event(
                logging.WARNING,
                "client.state_unreadable",
                f"the client's state could not be read, a new session begins: {error}",
                kept_as=aside,
            )
            return State(url=url)
        if state.url != url:
            self._store.close()
            raise StateUnusable(f"the state belongs to {state.url}, not to {url}")
        return state

    def _set_aside(self) -> str:
        try:
            return self._store.set_aside()
        except Exception as error:
            self._store.close()
            raise StateUnusable(f"the client's state cannot be read, nor put out of the way: {error}") from error

    def _begin(self) -> None:
        """The first write is the one that may fail: a start that is not written down could be used twice."""
        try:
            self._store.save(self.state.encode())
        except Exception as error:
            self._store.close()
            raise StateUnusable(f"the client's state cannot be written: {error}") from error

    def changed(self) -> None:
        """Write now."""
        if self._idle:
            return
        if self._due is not None:
            self._due.cancel()
            self._due = None
        began = time.thread_time()
        try:
            self._store.save(self.state.encode())
        except Exception as error:  # A store of the user's may raise anything; calls go on.
            if not self._failing:
                log_event(
                    logging.WARNING,
                    "client.state_unwritable",
                    f"the client's state cannot be written, what happens now is not remembered: {error}",
                )
            self._failing = True
            return
        finally:
            self._lag = max(LAG, SHARE * (time.thread_time() - began))
        if self._failing:
            log_event(logging.INFO, "client.state_written", "the client's state can be written again")
        self._failing = False

    def moved(self) -> None:
        """Write soon."""
        if self._due is None and not self._idle:
            self._due = asyncio.get_running_loop().call_later(self._lag, self.changed)

    def close(self) -> None:
        self.changed()
        self._idle = True  # a result may be taken later, but the state may be another client's by then
        self._store.close()
