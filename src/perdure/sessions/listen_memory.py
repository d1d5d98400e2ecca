"""Remembers for a while that a caller had a listener, in whatever process, so that it hears what it has missed.

A stock client has no position. If its connection broke, it listens again, and nothing else tells that it has listened
before. Of each caller the store keeps one small record with the time at which a listener of its last ended. The record
is ACTIVE while a listener is open: a client may be back before the node that served it has noticed that it left.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter, deque

from perdure._core.changes import CLOCK_SLACK
from perdure._core.ids import SessionId, new_session_id
from perdure._core.limits import Caller
from perdure._core.states import SessionState
from perdure.log.journal import Steps
from perdure.sessions.change_log import plain_record
from perdure.sessions.context import ServerContext
from perdure.store.steps import ChangeSession, EndSession, PutSession

_FORGOTTEN = "forgotten"


class ListenMemory:
    """The callers whose listeners have ended lately."""

    def __init__(self, context: ServerContext, *, seconds: float) -> None:
        self.seconds = seconds
        self._context = context
        self._open: Counter[Caller] = Counter()
        """How many listeners of each caller are here."""
        self._written: deque[tuple[float, SessionId, float]] = deque()
        """Records that this node has written: when to forget them, and the time that they had then."""
        self._timer: asyncio.TimerHandle | None = None

    async def has(self, secret: bytes, caller: Caller) -> bool:
        """Whether a listener of the caller's ended within the time, or is open. Raises `StoreError`."""
        record = await self._context.store.session(_name(secret, caller))
        if record is None or record.state is SessionState.ENDED:
            return False
        since = self._context.clock() - self.seconds - CLOCK_SLACK
        return record.state is SessionState.ACTIVE or record.active >= since

    def begin(self, secret: bytes, caller: Caller) -> None:
        """A listener of the caller's is open."""
        self._open[caller] += 1
        if self.seconds and self._open[caller] == 1:
            self._write(_name(secret, caller), SessionState.ACTIVE)

    def end(self, secret: bytes, caller: Caller) -> None:
        """A listener of the caller's has ended."""
        self._open[caller] -= 1
        is_last = not self._open[caller]
        if is_last:
            del self._open[caller]
        if not self.seconds:
            return
        name = _name(secret, caller)
        now = self._write(name, SessionState.DORMANT if is_last else SessionState.ACTIVE)
        if not is_last:
            return
        loop = asyncio.get_running_loop()
        self._written.append((loop.time() + self.seconds + 2 * CLOCK_SLACK, name, now))
        if self._timer is None:
            self._timer = loop.call_at(self._written[0][0], self._forget)

    def _write(self, name: SessionId, state: SessionState) -> float:
        now = self._context.clock()
        put = PutSession(record=plain_record(name, now, state=state))
        self._context.journal.put(Steps((put, ChangeSession(session=name, state=state, active=now))))
        return now

    def _forget(self) -> None:
        """Remove what has had its time, unless another listener of the same caller has ended since."""
        self._timer = None
        loop, steps = asyncio.get_running_loop(), []
        while self._written and self._written[0][0] <= loop.time():
            _, name, active = self._written.popleft()
            steps.append(EndSession(session=name, time=active, reason=_FORGOTTEN, unused_since=active))
        if steps:
            self._context.journal.put(Steps(steps))
        if self._written:
            self._timer = loop.call_at(self._written[0][0], self._forget)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _name(secret: bytes, caller: Caller) -> SessionId:
    """The id of a caller's record: no client can guess it, and every node finds it."""
    digest = hmac.digest(secret, b"\0".join((caller.owner.encode(), caller.address.encode())), hashlib.sha256)
    return new_session_id(lambda size: digest[:size])
