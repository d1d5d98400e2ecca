"""Admits requests: finds the caller's session, checks limits, and turns failures into refusals."""

from collections.abc import Callable
from contextlib import suppress

from starlette.requests import Request as HttpRequest
from starlette.types import Scope

from perdure._core.ids import SessionId
from perdure._core.limits import Caller, Full, Quota
from perdure._core.states import SessionState
from perdure.assembly import ServerProcess
from perdure.errors import HeldElsewhere, SessionEnded, StoreError, StoreUnavailable
from perdure.http.credentials import Credentials
from perdure.http.recovery import Recovery
from perdure.http.refusals import HttpRefusal, Refusal, session_gone
from perdure.http.request import Bodies, Headers
from perdure.sessions.calls_by_id import RESUME
from perdure.sessions.session import Session
from perdure.telemetry import tracing as spans
from perdure.telemetry.counters import Counters

FAILURES = (HttpRefusal, StoreError, SessionEnded)
"""What a handler may raise: `refusal_of` turns it into the answer."""


class SessionAccess:
    """Gives handlers the sessions of their callers, or the reason to refuse a request."""

    def __init__(self, process: ServerProcess, is_draining: Callable[[], bool]) -> None:
        self.context = process.context
        self.settings = process.context.settings
        self.sessions = process.sessions
        self.principal_calls = process.settler.principal_calls
        self.bodies = Bodies(self.settings)
        self.credentials = Credentials()
        self.is_draining = is_draining
        self._recovery = Recovery(process.context, process.sessions)

    async def find(self, headers: Headers, owner: str, scope: Scope, *, checked_later: bool = False) -> Session:
        """Find the session that a request names, if it is the caller's. A foreign session and none are answered alike.

        The handler has the session in use (`Session.in_use`) before it waits for anything, until the request has its
        response, or a reader that holds the session. `checked_later`: the record is not read again where it is in
        memory (`SessionRegistry.find`)."""
        text = headers.get(b"mcp-session-id")
        if not text:
            raise HttpRefusal(Refusal.NO_SESSION_ID)
        session = await self.sessions.find(text.decode("latin-1"), owner, checked_later=checked_later)
        if session is None or session.keeper.record.state is SessionState.OPENING:
            raise await self._recovery.gone(headers, owner, scope)
        return session

    async def come_back(self, session: Session, scope: Scope, *, resume: bool = True) -> None:
        """A client has come to its session. `resume`: calls that wait for their principal run again in the context of
        this request."""
        spans.add_attributes(session=session.name)
        if "user" in scope:
            self.credentials.bring(session.id, scope)
        await session.come_back()
        if session.waits and resume:
            await self.principal_calls.resume(session, HttpRequest(scope))
        scope[RESUME] = self.resume

    async def resume(self, session_id: SessionId, http: HttpRequest) -> None:
        """Run the calls of a session again that wait for the principal of a request."""
        async with self.sessions.using(session_id) as session:
            if session is not None:
                self.credentials.bring(session.id, http.scope)
                await self.principal_calls.resume(session, http)

    async def check(self, session: Session, headers: Headers, owner: str, scope: Scope) -> None:
        """Refuse if a session that was `checked_later` no longer exists. While the store fails, the session in memory
        counts."""
        with suppress(StoreUnavailable):
            if await self.sessions.load(session.id) is None:
                raise await self._recovery.gone(headers, owner, scope)

    def refuse_readers(self, caller: Caller) -> None:
        quota = self.context.hub.open
        if (full := quota.lacks(caller)) is not None:
            refuse_full(full, Refusal.TOO_MANY_READERS, quota, "max_readers")

    def refuse_work(self, caller: Caller, size: int) -> None:
        quota = self.context.work
        if (full := quota.lacks(caller, size)) is not None:
            refuse_full(full, Refusal.TOO_MUCH_WORK, quota, "max_work")

    def refuse_calls(self, caller: Caller, count: int) -> None:
        if self.context.running.lacks(caller, count):
            raise HttpRefusal(Refusal.TOO_MANY_OWN_CALLS, limit=self.settings.max_principal_calls)

    def refuse_if_draining(self) -> None:
        if self.is_draining():
            raise HttpRefusal(Refusal.STOPPING)


def refuse_full(full: Full | None, for_all: Refusal, quota: Quota, what: str) -> None:
    """Raise `HttpRefusal` where a quota lacks room: for all callers, or for this one."""
    if full is Full.FOR_ALL:
        raise HttpRefusal(for_all, limit=quota.most)
    if full is Full.FOR_CALLER:
        raise HttpRefusal(Refusal.OWN_SHARE, limit=quota.each, what=what)


def refusal_of(failure: Exception, request_id: int | str | None, counters: Counters) -> HttpRefusal:
    """Return the refusal of a request that failed: its session has ended, or the store fails, unless it was refused."""
    counters.requests_refused += 1
    if isinstance(failure, SessionEnded):
        counters.sessions_not_found += 1
        failure = session_gone()
    elif not isinstance(failure, HttpRefusal):
        failure = HttpRefusal(Refusal.HELD_ELSEWHERE if isinstance(failure, HeldElsewhere) else Refusal.STORE_FAILS)
    if failure.id is None:
        failure.id = request_id
    return failure
