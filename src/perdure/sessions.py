"""All sessions of this process: open, find, load, rest, end.

A session answers only the principal that opened it; to anybody else it does not exist (promise 5). One that this
process does not hold is loaded from its record, once, however many ask for it (H1, H4). What is in memory counts as
long as the store's stamp says that nobody else has written anything; otherwise the record is read again first.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_json

from perdure import spans
from perdure._core.ids import Kind, SessionId, new_session_id, new_stream_id, parse_session_id
from perdure._core.jsonrpc import Request
from perdure._core.states import CallState, LogState, SessionState, SessionStep
from perdure.errors import SessionEnded, StoreUnavailable
from perdure.families import Snapshot
from perdure.house import House
from perdure.incarnations import tell_attached
from perdure.ledger import Call
from perdure.observe import note
from perdure.session import Session
from perdure.session_info import SessionInfo, numbers, session_info
from perdure.store.base import EndSession, OpenStream, PutSession, SessionRecord, StreamRecord


class Sessions:
    """The sessions that this process holds."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._by_id: dict[SessionId, Session] = {}
        self._loading: dict[SessionId, asyncio.Task[Session | None]] = {}
        self._ending: dict[SessionId, bool] = {}
        """Sessions that are being ended here (`True`: have been), of which the store may not know yet."""
        self._resting: dict[SessionId, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        """Those held at this moment."""
        return iter(list(self._by_id.values()))

    async def full(self) -> bool:
        """There is no room for another session, not even by ending one that is dormant."""
        store, most = self._house.store, self._house.settings.max_sessions
        within = self._house.journal.within_time
        if await within(store.count_sessions()) < most:
            return False
        await self._make_room()
        return await within(store.count_sessions()) >= most

    async def full_for(self, owner: str) -> bool:
        """One principal has all it may have. Callers without a name share nothing but the limit for all."""
        if not owner:
            return False
        count = await self._house.journal.within_time(self._house.store.count_sessions(owner))
        return count >= self._house.settings.max_principal_sessions

    async def _make_room(self) -> None:
        """End the session that has been dormant for longest: many clients leave without a word, and must not lock
        others out for as long as answers are kept."""
        record = await self._house.journal.within_time(self._house.store.longest_dormant())
        session = None if record is None else await self.load(record.id)
        if session is not None and session.state is SessionState.DORMANT:
            await self.end(session, SessionStep.WINDOW_PASSED, "The session made room for others")

    # Finding and loading

    async def find(self, text: str, owner: str) -> Session | None:
        """The session of that id, if it belongs to that principal and has not ended."""
        session_id = parse_session_id(text)
        if session_id is None:
            return None
        held = self._by_id.get(session_id)
        try:
            if held is None and not await self._is_owned(session_id, owner):
                return None
            session = await self.load(session_id)
        except StoreUnavailable:
            # Live traffic goes on (promise 7) with what is known here.
            if held is not None and held.record.owner == owner:
                return held
            raise
        if session is not None and session.record.owner != owner:
            # One that is not there would have been looked for in the store: neither its failure tells them apart.
            await self._house.journal.within_time(self._house.store.session(session_id))
            return None
        return session

    async def _is_owned(self, session_id: SessionId, owner: str) -> bool:
        """Asked before anything is loaded: a stranger causes no more than whoever names a session that is not there."""
        record = await self._house.journal.within_time(self._house.store.session(session_id))
        return record is not None and record.owner == owner

    async def load(self, session_id: SessionId) -> Session | None:
        """The session as the store has it at this moment."""
        if (resting := self._resting.get(session_id)) is not None:
            await asyncio.shield(resting)  # or its home would be let go of under whoever uses it
        session = self._by_id.get(session_id)
        if session is not None and session.stamp == self._house.store.stamp():
            return session
        if (task := self._loading.get(session_id)) is None:
            task = self._loading[session_id] = asyncio.create_task(self._read(session_id))
            task.add_done_callback(lambda _: self._loading.pop(session_id, None))
        return await asyncio.shield(task)

    async def _read(self, session_id: SessionId) -> Session | None:
        store, within = self._house.store, self._house.journal.within_time
        stamp = store.stamp()
        complete = self._house.journal.state is LogState.HEALTHY  # nothing is held that reading would miss
        changes = self._changes_of(session_id)
        record = await within(store.session(session_id))
        if session_id in self._ending:
            return None
        if self._changes_of(session_id) != changes:
            return await self._read(session_id)  # what was read may be from before a change of ours
        session = self._by_id.get(session_id)
        if record is None or record.state is SessionState.ENDED:
            return await self._gone(session, record) if complete else session
        if session is not None:
            session.refresh(record, stamp)
            return session
        if record.state is SessionState.OPENING:
            return None  # another node's handshake, which its client has not heard of yet
        if self._house.clock() - record.active >= self._house.settings.replay_window:
            reason = SessionStep.WINDOW_PASSED.value
            await self._house.journal.write(EndSession(session=record.id, time=record.active, reason=reason))
            return None
        with spans.load(record.id[:8]):
            return await self._build(record, stamp)

    def _changes_of(self, session_id: SessionId) -> int:
        session = self._by_id.get(session_id)
        return 0 if session is None else session.changes

    async def _gone(self, session: Session | None, record: SessionRecord | None) -> Session | None:
        if session is None:
            return None
        if record is None and session.state is SessionState.OPENING:
            return session
        self._by_id.pop(session.id, None)
        await session.was_ended("" if record is None else record.ended)
        return None

    async def _build(self, record: SessionRecord, stamp: object) -> Session | None:
        store, within = self._house.store, self._house.journal.within_time
        standalone = await within(store.stream(record.standalone))
        if standalone is None:
            return None  # it ended in this very moment
        waiting = bool(record.owner) and any(
            call.state is CallState.WAITING for call in await within(store.calls(record.id))
        )
        session = Session(self._house, record, standalone)
        session.stamp, session.waits = stamp, waiting
        session.seen = self._house.clock()  # whoever has it loaded is about to use it
        session.retained.load(await within(store.kept(record.id)))
        self._by_id[record.id] = session
        self._house.counters.sessions_loaded += 1
        try:
            await session.home.come_here()
        except SessionEnded:
            self._by_id.pop(record.id, None)
            return None
        note(logging.DEBUG, "session.loaded", "a session was loaded from its record", session=session.name)
        return session

    async def reattach(self, text: str, owner: str, params: dict[str, Any]) -> tuple[Session, int] | None:
        """Begin an incarnation of the caller's own session, if it is the same client by version and capabilities.

        Gives its number as well: the session may be further already, if two come back at once.
        """
        session = await self.find(text, owner)
        if session is None or session.state is SessionState.OPENING or not _same_client(session.record, params):
            return None
        stamp = self._house.store.stamp()
        record = await self._house.journal.within_time(self._house.store.reattach(session.id))
        if record is None:
            return None
        session.refresh(record, stamp, reattached=True)
        session.stamp = None  # a change of ours may have been written in between: the next request reads again
        await session.come_back()
        tell_attached(session)
        self._house.counters.reattaches += 1
        note(logging.INFO, "session.reattached", "a client came back to its session", session=session.name)
        return session, record.incarnation

    def held(self, session_id: SessionId) -> Session | None:
        """The session, if it is in memory."""
        return self._by_id.get(session_id)

    async def open(self, owner: str, request: Request, body: bytes) -> tuple[Session, Call]:
        """Begin a session with its `initialize` request."""
        house = self._house
        now = house.clock()
        standalone = StreamRecord(
            id=new_stream_id(house.random),
            session=new_session_id(house.random),
            kind=Kind.STANDALONE,
            node=house.node,
            fence=house.fence,
            opened=now,
        )
        record = SessionRecord(
            id=standalone.session,
            owner=owner,
            state=SessionState.OPENING,
            version="",
            client_params=to_json(request.params or {}),
            result=b"",
            initialized=False,
            sticky=(),
            incarnation=1,
            standalone=standalone.id,
            created=now,
            active=now,
        )
        session = Session(house, record, standalone)
        session.stamp = house.store.stamp()
        self._by_id[session.id] = session
        try:
            session.exchange.calls.reserve((request,), incarnation=record.incarnation)
            steps = PutSession(record=record), OpenStream(record=standalone)
            [call] = await session.accept((request,), (body,), *steps, incarnation=record.incarnation)
        except BaseException:
            self._by_id.pop(session.id, None)
            raise
        house.counters.sessions_opened += 1
        return session, call

    async def end(self, session: Session, step: SessionStep, reason: str) -> None:
        """End a session; from this moment on its id is unknown."""
        if self._by_id.pop(session.id, None) is not None:
            self._ending[session.id] = False
            await session.end(step, reason)
            self._ending[session.id] = True
            self.forget_ended()
            note(logging.INFO, "session.ended", f"a session ended: {step.value}", session=session.name)

    def is_ending(self, session_id: str) -> bool:
        """It is being ended here at this moment."""
        return session_id in self._ending

    def forget_ended(self) -> None:
        """The store knows of all sessions that were ended here, once nothing is held."""
        if self._ending and self._house.journal.state is LogState.HEALTHY:
            self._ending = {session_id: False for session_id, ended in self._ending.items() if not ended}

    async def was_ended(self, session_id: SessionId, reason: str) -> None:
        """Another process has ended a session."""
        if (session := self._by_id.pop(session_id, None)) is not None:
            await session.was_ended(reason)

    def info(self, session_id: str) -> SessionInfo | None:
        """What there is to know of a session (S6)."""
        session = self._by_id.get(SessionId(session_id))
        return None if session is None else session_info(session)

    def numbers(self) -> Snapshot:
        """What this node has to tell of itself at this moment."""
        return numbers(self._house, self._by_id.values())

    def ids(self) -> Sequence[str]:
        return list(self._by_id)

    async def rest(self, session: Session) -> None:
        """From now on the store alone knows it; the next request loads it again."""
        if self._by_id.get(session.id) is not session:
            return  # it has ended meanwhile
        task = self._resting[session.id] = asyncio.create_task(self._let_go(session))
        task.add_done_callback(lambda _: self._resting.pop(session.id, None))
        await task

    async def _let_go(self, session: Session) -> None:
        try:
            await session.rest()
        finally:
            self._by_id.pop(session.id, None)

    def running_calls(self) -> list[tuple[Session, Call]]:
        return [(session, call) for session in self._by_id.values() for call in session.exchange.calls.all_running()]

    async def aclose(self) -> None:
        """Drop every runtime; nothing is ended, nothing is told."""
        for session in self._by_id.values():
            session.orphans.close()
        await asyncio.gather(*(session.exchange.drop_runtime() for session in list(self._by_id.values())))


def _same_client(record: SessionRecord, params: dict[str, Any]) -> bool:
    """Whether a handshake would end as the recorded one did."""
    before = json.loads(record.client_params)
    versions = (before.get("protocolVersion"), record.version)
    return params.get("protocolVersion") in versions and params.get("capabilities") == before.get("capabilities")
