"""Runs on timers: drops idle runtimes, puts unused sessions to rest, ends expired ones, and sweeps the store."""

import asyncio
import logging
from dataclasses import dataclass, field

from perdure._core import mail
from perdure._core.retention import cutoffs
from perdure._core.states import SessionState, SessionStep
from perdure.errors import StoreError
from perdure.log.chores import Chores
from perdure.log.nodes import mail_to
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.telemetry.log_records import log_event

_TEND_MOST = 30.0
_TEND_LEAST = 0.05
"""Seconds between two rounds over all sessions, whatever the settings say."""

ROUND_SECONDS = 3_600.0
"""How long a call waits for what its client was asked by a round. Such a client has no handle by which it would come
back later: it answers as soon as its user has, or never."""

_EXPIRE_AT_ONCE = 1_000
"""Sessions ended one by one before a sweep: about a second of work. Their records are limited as well
(`_core.retention.MAX_ENDED`)."""

_TEND_AT_ONCE = 100
"""Sessions that are tended before other tasks get their turn."""


@dataclass(slots=True, eq=False)
class Housekeeping:
    _context: ServerContext
    _sessions: SessionRegistry
    _chores: Chores = field(default_factory=Chores)
    _times_are_written: bool = True
    """The store knows when each session was last used, as of the last round over all of them."""

    async def tend(self) -> None:
        """Drop idle runtimes, turn unused sessions dormant, end those whose time has passed; runs for ever."""
        settings = self._context.settings
        shortest = min(settings.runtime_idle, settings.session_grace, settings.replay_window, settings.cleanup_interval)
        while True:
            await asyncio.sleep(max(_TEND_LEAST, min(_TEND_MOST, shortest / 2)))
            await self._tend_all()

    async def _tend_all(self) -> None:
        # On its own, or `tend` would hold on to the last session while it sleeps.
        healthy = not self._context.journal.is_degraded
        for place, session in enumerate(self._sessions):
            with self._chores.surviving("a session could not be looked after", session.id):
                await self._tend_session(session)
            if place % _TEND_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._times_are_written = healthy
        self._sessions.forget_ended()

    async def _tend_session(self, session: Session) -> None:
        if session.state is SessionState.ENDED:
            return  # while another one was tended
        settings, now = self._context.settings, self._context.clock()
        away = 0.0 if session.is_connected else now - session.seen
        if session.state is SessionState.OPENING:
            if away >= settings.session_grace:
                await self._sessions.end(session, SessionStep.HANDSHAKE_FAILED, "The handshake took too long")
            return
        session.keeper.keep_fresh(busy=session.is_busy)
        if session.is_durable_call:
            if not session.is_busy:
                self._sessions.let_go(session)
            elif now - session.seen >= min(settings.task_ttl, settings.replay_window):
                session.link.asks.give_up()  # as long as its task is kept when it has ended
            elif now - session.seen >= ROUND_SECONDS and session.asks_by_round:
                session.link.asks.give_up()
            return
        session.enforce_limits()
        if away >= settings.session_grace:
            session.link.asks.give_up()
        elif away >= settings.session_grace / 4 and session.link.asks.open:
            # Ask the other nodes whether the client is attached there: an ask waits here for its answer.
            missed = mail.Missed(session=session.id, node=self._context.node)
            session.context.put(*mail_to(self._context.nodes.others, missed))
        unused_for = min(settings.session_grace, settings.replay_window)
        if not session.waits and await self._is_unused(session, unused_for):
            # No time ends what is held in memory: it rests first, and what rests may expire.
            await self._sessions.rest(session)
            if now - session.keeper.active >= settings.replay_window:
                await self._sessions.expire(session.id)
        elif session.link.runtime.is_idle(settings.runtime_idle):
            await session.link.runtime.drop()

    async def _is_unused(self, session: Session, seconds: float) -> bool:
        """Whether it was not used for so long, at this node or any other."""
        if session.is_busy or self._context.clock() - max(session.keeper.active, session.seen) < seconds:
            return False
        if self._context.journal.is_degraded:
            return False  # what rests is known to the store alone, and the store does not know everything now
        if not self._context.nodes.alone:
            try:
                await self._sessions.load(session.id)  # with what the others have written
            except StoreError:
                return False
        return not session.is_busy and self._context.clock() - session.keeper.active >= seconds

    async def sweep(self) -> None:
        """Remove what has expired from the store, on a timer; runs for ever."""
        while True:
            await asyncio.sleep(self._context.settings.cleanup_interval)
            await self._sweep_once()

    async def _sweep_once(self) -> None:
        # On its own, or `sweep` would hold on to the last session while it sleeps.
        context, settings = self._context, self._context.settings
        if context.journal.is_degraded or not self._times_are_written:
            return  # the store does not know yet what was used meanwhile
        before = cutoffs(
            now=context.clock(),
            event_ttl=settings.event_ttl,
            replay_window=settings.replay_window,
            task_ttl=settings.task_ttl,
        )
        try:
            # End the sessions at rest whose time has passed, so that their clients learn why and operators see it. What
            # is beyond the limit is swept with the rest.
            for _ in range(_EXPIRE_AT_ONCE):
                record = await context.store.longest_dormant()
                if record is None or not await self._sessions.expire(record.id):
                    break
            rows = await context.store.sweep(before)
        except Exception as failure:  # whatever it is, the next time it may work
            log_event(logging.WARNING, "store.sweep", f"expired rows could not be removed: {failure}")
            return
        for session in self._sessions:
            with self._chores.surviving("a session could not take note of the removed rows", session.id):
                session.retained.swept(before)
        if rows:
            log_event(logging.INFO, "store.swept", f"{rows} expired rows were removed", rows=rows)
