"""Finds the caller's session, and puts a reader on one of its streams: what every method of the endpoint needs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType

from starlette.requests import Request as HttpRequest
from starlette.types import Scope

from perdure._core import sse
from perdure._core.limits import Caller, Full, Quota
from perdure._core.states import SessionState
from perdure.assembly import ServerProcess
from perdure.errors import HeldElsewhere, SessionEnded, StaleRecord, StoreError, StoreUnavailable
from perdure.http.body import Bodies, Headers
from perdure.http.credentials import Credentials
from perdure.http.event_stream import EventStreamResponse
from perdure.http.recovery import Recovery
from perdure.http.refusals import Refusal, Refused, session_gone
from perdure.log.reader import Reader
from perdure.log.stream import Stream
from perdure.sessions.session import Session, SessionHistory
from perdure.store.records import Event
from perdure.telemetry import tracing as spans


class SessionAccess:
    """The endpoint's way to sessions."""

    def __init__(self, process: ServerProcess, is_draining: Callable[[], bool]) -> None:
        self.context = process.context
        self.settings = process.context.settings
        self.sessions = process.sessions
        self.waiting = process.settler.waiting
        self.bodies = Bodies(self.settings)
        self.credentials = Credentials()
        self._recovery = Recovery(process.context, process.sessions)
        self._is_draining = is_draining
        self._retry_ms = round(self.settings.retry * 1000)
        self._retry = sse.encode_retry(self._retry_ms)

    async def find(self, headers: Headers, owner: str, scope: Scope, *, checked_later: bool = False) -> Session:
        """The session that a request names, if it is the caller's. A foreign one and none are answered alike.

        The caller has it in use (`Session.in_use`) before it waits for anything, until the request has its response, or
        a reader that holds it. `checked_later`: the record is not read again where it is in memory
        (`SessionRegistry.find`).
        """
        text = headers.get(b"mcp-session-id")
        if not text:
            raise Refused(Refusal.NO_SESSION_ID)
        with self.refusing(Refusal.STORE_UNREADABLE):
            session = await self.sessions.find(text.decode("latin-1"), owner, checked_later=checked_later)
            if session is None or session.state is SessionState.OPENING:
                raise await self._recovery.gone(headers, owner, scope)
        return session

    async def come_back(self, session: Session, scope: Scope, *, resume: bool = True) -> None:
        """A client has come to its session. `resume`: calls that wait for their principal run again in the context of
        this request."""
        with self.refusing(Refusal.STORE_UNREADABLE):
            spans.tell(session=session.name)
            self.credentials.bring(session.id, scope)
            await session.come_back()
            if session.waits and resume:
                await self.waiting.resume(session, HttpRequest(scope))

    async def check(self, session: Session, headers: Headers, owner: str, scope: Scope) -> None:
        """Look whether a session that was `checked_later` is still there. While the store fails, what is known here
        counts."""
        with suppress(StoreUnavailable):
            if await self.sessions.load(session.id) is None:
                raise await self._recovery.gone(headers, owner, scope)

    def refusing(self, otherwise: Refusal) -> AbstractContextManager[None, None]:
        """Refuse what cannot be done because the session has ended, or because the store fails: another node knows
        more, or what the caller was about to do fails (`otherwise`). A record that was changed is for the caller."""
        return _Refusing(self, otherwise)

    @property
    def is_draining(self) -> bool:
        """The end has begun."""
        return self._is_draining()

    def refuse_readers(self, caller: Caller) -> None:
        """Refuse an event stream more than may be open."""
        refuse_full(self.context.hub.open.lacks(caller), Refusal.TOO_MANY_READERS, self.context.hub.open, "max_readers")

    def refuse_work(self, caller: Caller, size: int) -> None:
        """Refuse a message that would take more memory than may be taken."""
        refuse_full(self.context.work.lacks(caller, size), Refusal.TOO_MUCH_WORK, self.context.work, "max_work")

    def refuse_calls(self, caller: Caller, count: int) -> None:
        """Refuse requests of a caller that has as many running as it may."""
        if self.context.running.lacks(caller, count):
            raise Refused(Refusal.TOO_MANY_OWN_CALLS, limit=self.settings.max_principal_calls)

    def refuse_if_draining(self) -> None:
        """Refuse new work once the end has begun: it goes elsewhere."""
        if self.is_draining:
            raise Refused(Refusal.STOPPING)

    def gone(self) -> Refused:
        """The session ended while a request for it was on its way."""
        self.context.counters.sessions_not_found += 1
        return session_gone()

    def read(
        self,
        session: Session,
        stream: Stream,
        *,
        cursor: int,
        told: bytes = b"",
        ahead: Sequence[Event] = (),
        arrival: int | None = None,
        progress: float | None = None,
    ) -> EventStreamResponse:
        """Attach a reader, primed where the revision knows that (A9): its priming id is exactly where it starts.

        `ahead`: the first events behind the cursor, where they have been read already. `progress`: what the client's
        position says of it.
        """
        if session.state is SessionState.ENDED:
            raise self.gone()
        preamble, retry = told, b""
        if session.keeper.revision.primes:
            retry = self._retry
            name = stream.position(cursor, progress).priming(self.context.random)
            preamble = sse.encode_priming(name.encode(), self._retry_ms) + told
        reader = Reader(
            self.context.hub,
            stream,
            SessionHistory(session),
            cursor=cursor,
            arrival=self.context.hub.arrive() if arrival is None else arrival,
            caller=session.link.calls.caller,
            ahead=ahead,
            preamble=preamble,
            retry=retry,
            progress=progress,
        )
        self.context.hub.attach(reader)
        return EventStreamResponse(session, reader)


def refuse_full(full: Full | None, for_all: Refusal, quota: Quota, what: str) -> None:
    """Raise `Refused` where a quota lacks room: for all callers, or for this one."""
    if full is Full.FOR_ALL:
        raise Refused(for_all, limit=quota.most)
    if full is Full.FOR_CALLER:
        raise Refused(Refusal.OWN_SHARE, limit=quota.each, what=what)


class _Refusing:
    """`SessionAccess.refusing`. (Each request enters it three times; a generator takes six times as long.)"""

    __slots__ = ("_access", "_otherwise")

    def __init__(self, access: SessionAccess, otherwise: Refusal) -> None:
        self._access = access
        self._otherwise = otherwise

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is None or isinstance(error, StaleRecord):
            return
        if isinstance(error, SessionEnded):
            raise self._access.gone() from None
        if isinstance(error, StoreError):
            raise Refused(Refusal.HELD_ELSEWHERE if isinstance(error, HeldElsewhere) else self._otherwise) from None
