"""Finds the caller's session, and puts a reader on one of its streams: what every method of the endpoint needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request as HttpRequest
from starlette.types import Scope

from perdure._core import sse
from perdure._core.states import SessionState
from perdure.cluster.settler import Settler
from perdure.errors import SessionEnded, StoreError
from perdure.http.body import Bodies
from perdure.http.credentials import Credentials
from perdure.http.event_stream import EventStreamResponse
from perdure.http.recovery import Recovery
from perdure.http.refusals import RECOVERY, Refusal, Refused, refusal_of
from perdure.log.reader import Reader
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.store.base import Event
from perdure.telemetry import tracing as spans

Headers = dict[bytes, bytes]


class SessionAccess:
    """The endpoint's way to sessions."""

    def __init__(self, context: ServerContext, sessions: SessionRegistry, settler: Settler, bodies: Bodies) -> None:
        self.context = context
        self.bodies = bodies
        self.sessions = sessions
        self.settler = settler
        self.recovery = Recovery(context, sessions, monotonic=context.hub.monotonic)
        self.credentials = Credentials()
        self.draining = False
        self.settings = context.settings
        self._retry_ms = round(context.settings.retry * 1000)

    @asynccontextmanager
    async def session(
        self, headers: Headers, owner: str, scope: Scope, *, resume: bool = True
    ) -> AsyncIterator[Session]:
        """The session that a request names, if it is the caller's. A foreign one and none are answered alike.

        It is in use until the request has its response, or a reader that holds it.
        `resume`: calls that wait for their principal run again in the context of this request.
        """
        text = headers.get(b"mcp-session-id")
        if not text:
            raise Refused(Refusal.NO_SESSION_ID)
        try:
            session = await self.sessions.find(text.decode("latin-1"), owner)
            if session is None or session.state is SessionState.OPENING:
                raise await self.recovery.gone(headers, owner, scope)
        except (SessionEnded, StoreError) as failure:
            raise self._refused(failure) from None
        with session.in_use():
            try:
                spans.tell(session=session.name)
                self.credentials.bring(session.id, scope)
                await session.come_back()
                if session.waits and resume:
                    await self.settler.waiting.resume(session, HttpRequest(scope))
            except (SessionEnded, StoreError) as failure:
                raise self._refused(failure) from None
            yield session

    def _refused(self, failure: SessionEnded | StoreError) -> Refused:
        if isinstance(failure, SessionEnded):
            return self.gone()
        return Refused(refusal_of(failure, Refusal.STORE_UNREADABLE))

    def refuse_if_draining(self, request_id: int | str | None = None) -> None:
        """Refuse new work once the end has begun: it goes elsewhere."""
        if self.draining:
            raise Refused(Refusal.STOPPING, id=request_id)

    def gone(self) -> Refused:
        """The session ended while a request for it was on its way."""
        self.context.counters.sessions_not_found += 1
        return Refused(Refusal.SESSION_GONE, data=RECOVERY)

    def read(
        self,
        session: Session,
        stream: Stream,
        *,
        cursor: int,
        told: bytes = b"",
        ahead: Sequence[Event] = (),
        arrival: int | None = None,
    ) -> EventStreamResponse:
        """Attach a reader, primed where the revision knows that (A9): its priming id is exactly where it starts.

        `ahead`: the first events behind the cursor, where they have been read already.
        """
        if session.state is SessionState.ENDED:
            raise self.gone()
        preamble, retry = told, b""
        if session.keeper.revision.primes:
            retry = sse.encode_retry(self._retry_ms)
            name = stream.position(cursor).priming(self.context.random)
            preamble = sse.encode_priming(name.encode(), self._retry_ms) + told
        reader = Reader(
            self.context.hub,
            stream,
            session,
            cursor=cursor,
            arrival=self.context.hub.arrive() if arrival is None else arrival,
            ahead=ahead,
            preamble=preamble,
            retry=retry,
        )
        self.context.hub.attach(reader)
        return EventStreamResponse(session, reader)
