"""Answers requests for sessions that are gone (H2, H3, H6): 404, in all methods, with what to do in `data.recovery`.

With `recover="reissue"` a new session is opened first, and the 404 names its id: a client that continues with that id
at once finds a session whose handshake is done. A lost session is replaced once: no two callers share the new one, so
an id that leaked is worth nothing, and a client that asks for the lost session again opens no more. Text that is not a
session id is not a lost session. Most clients never read the new id. A caller that left a new session unused gets no
other one, because it would leave that one unused as well.
"""

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Scope

from perdure._core.ids import SessionId, parse_session_id
from perdure._core.jsonrpc import Notification, Request
from perdure._core.limits import Caller, RateLimit
from perdure._core.revisions import REVISIONS
from perdure._core.states import SessionState, SessionStep
from perdure.errors import SessionEnded, StoreError, TooManyProcesses, TooManySessions
from perdure.http.credentials import caller_of
from perdure.http.refusals import HttpRefusal, Refusal, session_gone
from perdure.http.request import Headers
from perdure.sessions.context import ServerContext
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.session import Session
from perdure.store.records import SessionRecord
from perdure.telemetry.log_records import log_event

REISSUES = 200
REISSUES_A_SECOND = 0.5
"""New sessions in place of lost ones that one principal, or one address without a principal, gets in a row, and how
fast that comes back. Each lost session is replaced once, so a client in a loop has to make up ids; after a restart all
clients of an office come from one address."""

_MOST_REMEMBERED = 10_000
"""Replaced sessions, and programs that got a new one, that are remembered; beyond, the oldest is forgotten."""

ADOPTION_SECONDS = 10.0
"""A client that takes the new id does so with its next request, which follows at once; one that restarts a whole fleet
takes some seconds. A session that is unused after this time was not taken."""

_MOST_AGENT = 200
"""Bytes of a User-Agent that are kept: enough to distinguish programs."""

_OLDEST = next(iter(REVISIONS))

_Program = tuple[Caller, bytes]
"""Caller and User-Agent: whether a new session is taken depends on the program that asks."""

K = TypeVar("K")
V = TypeVar("V")


class Recovery:
    """Refuses requests for a session that is gone, and may open another one in its place."""

    def __init__(self, context: ServerContext, sessions: SessionRegistry) -> None:
        self._context = context
        self._sessions = sessions
        recover = context.settings.recover
        self._reissues = recover == "reissue" or (recover == "auto" and not context.store.shared)
        self._monotonic = context.hub.monotonic
        self._limit = RateLimit[Caller](REISSUES, per_second=REISSUES_A_SECOND)
        self._replaced: dict[tuple[str, str], None] = {}
        """Lost sessions that were replaced, by owner and id."""
        self._given: dict[_Program, tuple[SessionId, float]] = {}
        """The last new session that each program got, and when."""

    async def gone(self, headers: Headers, owner: str, scope: Scope) -> HttpRefusal:
        """The refusal for a session that does not exist, or is not the caller's: the two are the same (promise 5)."""
        self._context.counters.sessions_not_found += 1
        text = headers.get(b"mcp-session-id", b"").decode("latin-1")
        record: SessionRecord | None = None
        if (session_id := parse_session_id(text)) is not None:
            with suppress(StoreError):
                record = await self._context.store.session(session_id)
        if record is not None and (record.owner != owner or not record.ended):
            record = None
        why = None if record is None else record.ended
        deleted = why == SessionStep.CLIENT_DELETED.value or self._sessions.is_ending(text)
        lost, caller = (owner, text), caller_of(owner, scope)
        program = caller, headers.get(b"user-agent", b"")[:_MOST_AGENT]
        # Clients that take a new id take it from the answer to a POST. One that listens as well may do that first.
        asks = self._reissues and scope["method"] == "POST" and session_id is not None
        wanted = asks and not deleted and lost not in self._replaced
        if not wanted or await self._left_unused(program) or lost in self._replaced:
            return session_gone(why=why)
        if not self._limit.take(caller, now=self._monotonic()):
            self._context.counters.recoveries_refused += 1
            self._context.peer_log.log_event(
                logging.WARNING,
                "session.loop",
                "a caller lost too many sessions to be given another one",
                session=text,
            )
            return session_gone(why=why)
        _remember(self._replaced, lost, None)  # before the handshake, during which the same id may be asked for
        session: Session | None = None
        try:
            session = await self._reissue(headers, caller, record, scope)
        finally:
            if session is None:
                self._replaced.pop(lost, None)
        if session is None:
            return session_gone(why=why)
        _remember(self._given, program, (session.id, self._monotonic()))
        return session_gone("continue", why, session=session.id)

    async def _left_unused(self, program: _Program) -> bool:
        """Whether the program got a new session earlier and made no request on it, at any process."""
        session_id, at = self._given.get(program, (None, 0.0))
        if session_id is None or self._monotonic() - at < ADOPTION_SECONDS:
            return False
        store = self._context.store
        try:
            record = await store.session(session_id)
            handshake_only = len(await store.calls(session_id)) <= 1
        except StoreError:
            return True
        if record is None or record.ended or not handshake_only:
            self._given.pop(program, None)  # another request of the program may have been faster
            return False
        self._context.counters.recoveries_refused += 1
        return True

    async def _reissue(
        self, headers: Headers, caller: Caller, record: SessionRecord | None, scope: Scope
    ) -> Session | None:
        """Open a new session in place of a lost one, with the params of the lost one's handshake, or at least its
        version; `None` where there is no room for it."""
        counters = self._context.counters
        if record is not None and record.client_params:
            params: dict[str, Any] = json.loads(record.client_params)
        else:
            version = headers.get(b"mcp-protocol-version", b"").decode("latin-1") or _OLDEST
            client = {"name": "unknown", "version": "unknown"}
            params = {"protocolVersion": version, "capabilities": {}, "clientInfo": client}
        raw = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        request, http = Request(id=0, method="initialize", params=params, raw=raw), HttpRequest(scope)
        is_done = False
        try:
            async with asyncio.timeout(self._context.runtimes.answers_within):
                # Without giving up another one, which would be lost and replaced in its turn.
                body = json.dumps(raw).encode()
                session, call = await self._sessions.open(caller, request, body, makes_room=False)
                try:
                    with call.stream.pinned():
                        session.link.start(call, http)
                        await call.stream.wait_over()
                finally:
                    if session.state is not SessionState.ACTIVE:
                        await self._sessions.end(session, SessionStep.HANDSHAKE_FAILED, "The handshake failed")
                if is_done := session.state is SessionState.ACTIVE:
                    initialized = Notification(method="notifications/initialized", params=None, raw={})
                    session.link.pass_on(initialized, http)
        except (TooManySessions, TooManyProcesses):
            return None
        except (StoreError, SessionEnded, TimeoutError) as failure:
            self._context.peer_log.log_event(
                logging.ERROR, "session.reissue", f"no new session could be made in place of a lost one: {failure!r}"
            )
        counters.recoveries_tried += 1
        if not is_done:
            counters.recoveries_failed += 1
            raise HttpRefusal(Refusal.REISSUE_FAILED)
        counters.recoveries_succeeded += 1
        log_event(logging.INFO, "session.reissued", "a lost session was replaced by a new one", session=session.name)
        return session


def _remember(table: dict[K, V], key: K, value: V) -> None:
    """Enter the newest; beyond the limit the oldest entry is deleted."""
    table.pop(key, None)
    table[key] = value
    if len(table) > _MOST_REMEMBERED:
        del table[next(iter(table))]
