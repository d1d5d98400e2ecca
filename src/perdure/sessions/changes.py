"""Brings what changes in one process to the listeners of all.

Every node keeps one subscription to its own server (`Hearing`), writes what it hears to its own changes stream
(`ChangeLog`), and follows the streams of all nodes while it has listeners (`ChangeFeed`). Nothing of it is there before
the first listener comes, at any node: that node writes to all others, and acknowledges its listener once they hear.
It does the same when a listener names resources that no listener here has named. A node that does not answer in time
is waited for behind the acknowledgement; the listener then gets a cue for what it may have missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure._core import mail
from perdure._core.changes import (
    CLOCK_SLACK,
    EVERYTHING,
    UPDATED,
    Change,
    ChangeFilter,
    ChangesPosition,
    DueChanges,
    change_of,
)
from perdure._core.ids import SESSION_BYTES, NodeId, SessionId, StreamId, new_session_id
from perdure._core.limits import Caller
from perdure._core.states import LogState
from perdure.errors import StoreError, StoreUnavailable
from perdure.log.chores import OnDemand, cancel_all
from perdure.log.journal import Steps
from perdure.runtime.base import ServerChanges
from perdure.sessions.change_feed import ChangeFeed, ChangeListener
from perdure.sessions.change_log import ChangeLog
from perdure.sessions.context import ServerContext, mail_to
from perdure.sessions.hearing import Hearing
from perdure.sessions.listen_memory import ListenMemory
from perdure.sessions.wanted import WantedResources
from perdure.telemetry.log_records import log_event

SECRET = "changes"
"""The secret of the store that names the record of the changes streams, and the records of callers."""

HEARD_WITHIN = 2.0
"""Seconds that a new listener waits for the other nodes to hear what it wants. They answer within milliseconds; one
that hangs, has died or is of another release must not keep a listener waiting."""

LINGER = 2.0
"""A resource stays wanted for so many times `listen_memory` behind its last listener."""


@dataclass(slots=True, eq=False)
class _Announcement:
    """What this node has asked the others to hear, and the nodes that have not answered yet."""

    number: int
    since: float
    waiting: set[NodeId] = field(default_factory=set)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, nodes: Collection[NodeId]) -> None:
        """These nodes have answered, or are gone."""
        self.waiting.difference_update(nodes)
        if not self.waiting:
            self.done.set()


class Changes:
    """The changes of this node and of all others. Nothing runs before the first listener comes, at whatever node."""

    def __init__(self, context: ServerContext, server: ServerChanges) -> None:
        self._context = context
        self._secret = b""
        self._session: SessionId | None = None
        """The record of all changes streams, once this node writes one."""
        self._wanted_filter = ChangeFilter()
        self._log = ChangeLog(context, on_shown=self._on_shown, on_opened=self._on_opened)
        self._feed = ChangeFeed(context, lambda: self._log.stream)
        linger = LINGER * context.settings.listen_memory
        self._wanted = WantedResources(context, lambda: self._log.stream, linger=linger)
        self._memory = ListenMemory(context, seconds=context.settings.listen_memory)
        self._hearing = Hearing(
            server,
            on_change=self._log.append,
            wait_for_room=self._log.wait_for_room,
            task_context=context.task_context,
        )
        self._turn = asyncio.Lock()
        self._announced: dict[int, _Announcement] = {}
        self._number = 0
        self._to_answer: dict[NodeId, int] = {}
        """The nodes that wait for this one to hear more, each with its last number."""
        self._is_unwritten = False
        """What is wanted here is to be written beside another stream."""
        self._grows = OnDemand(self._grow, name="perdure-changes-grow", on_failure=self._not_grown)
        self._doubts: set[asyncio.Task[None]] = set()
        context.changed.connect(self.heard)

    # Beginning and ending

    async def start(self) -> None:
        """Hear this node's server from the beginning, if listeners may be at other nodes. Raises `StoreError`."""
        secret = (await self._context.store.secrets()).get(SECRET)
        if secret is not None and await self._context.store.session(_record_of(secret)) is not None:
            async with self._turn:
                await self._activate()

    async def _activate(self) -> None:
        """Begin to write changes, and to hear of them."""
        if self._session is not None:
            return
        store = self._context.store
        self._secret = await store.keep_secret(SECRET, self._context.random(SESSION_BYTES))
        session = _record_of(self._secret)
        await self._feed.begin(session)
        await self._log.open(session)
        self._session = session
        await self._cover(await self._wanted.everywhere(session))
        log_event(logging.DEBUG, "changes.begun", "changes of the server are written for the listeners of all nodes")

    async def _cover(self, uris: Collection[str]) -> None:
        self._wanted_filter = ChangeFilter(uris=dict.fromkeys(uris))
        await self._hearing.cover(uris)

    async def aclose(self) -> None:
        """Stop hearing, and leave the word that this node has left."""
        await self._grows.aclose()
        await cancel_all(list(self._doubts))
        await self._hearing.aclose()
        await self._feed.aclose()
        self._wanted.close()
        self._memory.close()
        await self._log.aclose()

    # What happens here

    def heard(self, method: str, params: Mapping[str, Any] | None) -> None:
        """A tool has sent a notification by other means than a subscription; taken if it tells of a change that a
        listener at any node may want. Never waits or fails."""
        change = change_of(method, params)
        if self._session is None or change is None:
            return
        if change.method != UPDATED or self._wanted_filter.admits(change):
            self._log.append(change)

    def _on_shown(self, stream: StreamId, seq: int, changes: Sequence[Change]) -> None:
        self._feed.show_own(stream, seq, changes)

    def _on_opened(self) -> None:
        """This node has begun a stream: the others look for it. What it wants is written beside it."""
        for node in self._context.nodes.others:
            self._context.store.hint(node, [])
        if self._session is not None:
            self._is_unwritten = True
            self._grows.want()

    # Listeners

    def __len__(self) -> int:
        return len(self._feed)

    async def join(
        self, wanted: ChangeFilter, *, position: ChangesPosition | None, caller: Caller
    ) -> ChangeListener | None:
        """Begin to listen. `None`: this node's server is not heard, and only the server itself can serve a listener.
        Raises `StoreError`, or `TooManyResources`."""
        if self._context.journal.state is LogState.DEGRADED:
            raise StoreUnavailable("other nodes cannot be asked to hear more")
        async with self._turn:
            await self._activate()
            if not self._hearing.serves:
                return None
            assert self._session is not None
            union = await self._wanted.everywhere(self._session) if wanted.uris else {}
            is_news = await self._wanted.add(self._session, wanted.uris, union, caller)
            try:
                if is_news or not self._number:
                    await self._cover({*union, *wanted.uris, *self._wanted_filter.uris})
                    await self._announce()
            except BaseException:
                self._wanted.release(wanted.uris)
                raise
        try:
            unanswered = await self._wait_heard()
            honoured = self._hearing.honours(wanted)
            listener = await self._feed.join(lambda now: DueChanges(honoured, position or now))
        except BaseException:
            self._wanted.release(wanted.uris)
            raise
        listener.on_left = lambda: self._wanted.release(wanted.uris)
        try:
            await self._catch_up(listener.due, position, caller, union)
        except BaseException:
            listener.close()
            raise
        self._memory.begin(self._secret, caller)
        listener.on_left = lambda: self._left(wanted, caller)
        for announcement in unanswered:
            self._doubt(announcement, listener)
        return listener

    def _left(self, wanted: ChangeFilter, caller: Caller) -> None:
        self._wanted.release(wanted.uris)
        self._memory.end(self._secret, caller)

    async def _catch_up(
        self, due: DueChanges, position: ChangesPosition | None, caller: Caller, since: Mapping[str, float]
    ) -> None:
        """Add what a listener has missed."""
        if position is not None:
            await self._feed.catch_up(due, position)
            for uri in due.filter.uris:
                if uri not in since or since[uri] + CLOCK_SLACK > position.time:
                    due.add(Change(UPDATED, uri))  # no node heard of it for a part of that time
            return
        if (memory := self._memory).seconds:
            then = self._context.clock() - memory.seconds
            self._feed.add_deaths(due, then)
            if await memory.has(self._secret, caller):
                await self._feed.catch_up_from(due, then)

    # Asking the other nodes

    async def _announce(self) -> None:
        """Ask all other nodes to hear what is wanted. They are read after that was written: a node that joins later
        reads what is wanted before it serves."""
        assert self._session is not None
        context = self._context
        others = {record.id for record in await context.store.nodes()} - {context.node}
        self._number += 1
        announcement = _Announcement(self._number, context.hub.monotonic(), others)
        announcement.settle(())
        if others:
            self._announced[self._number] = announcement
            message = mail.Wanted(session=self._session, node=context.node, number=self._number)
            for step in mail_to(others, message):
                context.journal.put(Steps((step,)))

    async def _wait_heard(self) -> Sequence[_Announcement]:
        """Wait until the other nodes hear what was asked for; gives what is unanswered after `HEARD_WITHIN`."""
        asked = list(self._announced.values())
        if asked:
            waits = [asyncio.ensure_future(announcement.done.wait()) for announcement in asked]
            try:
                await asyncio.wait(waits, timeout=HEARD_WITHIN)
            finally:
                for wait in waits:
                    wait.cancel()
        return [announcement for announcement in asked if not announcement.done.is_set()]

    def _doubt(self, announcement: _Announcement, listener: ChangeListener) -> None:
        """Tell a listener that it may have missed anything, once the nodes have answered that had not in time."""

        async def settle() -> None:
            await announcement.done.wait()
            listener.hear(EVERYTHING)

        task = asyncio.create_task(settle(), name="perdure-changes-doubt")
        self._doubts.add(task)
        task.add_done_callback(self._doubts.discard)

    def on_mail(self, message: mail.Wanted | mail.Heard) -> None:
        """Another node asks this one to hear more; or it has done so."""
        if isinstance(message, mail.Wanted):
            self._to_answer[message.node] = max(message.number, self._to_answer.get(message.node, 0))
            self._grows.want()
            return
        self._settle([message.node], through=message.number)

    def _settle(self, nodes: Collection[NodeId], *, through: int) -> None:
        for announcement in list(self._announced.values()):
            if announcement.number <= through:
                announcement.settle(nodes)
            if announcement.done.is_set():
                del self._announced[announcement.number]

    async def _grow(self) -> None:
        """Hear all that is wanted, and answer the nodes that asked for it."""
        async with self._turn:
            await self._activate()
            assert self._session is not None
            answers, self._to_answer = self._to_answer, {}
            try:
                if self._is_unwritten:
                    await self._wanted.write_again(self._session)
                    self._is_unwritten = False
                await self._cover(await self._wanted.everywhere(self._session))
            except BaseException:
                self._to_answer = answers | self._to_answer
                raise
        for node, number in answers.items():
            message = mail.Heard(session=self._session, node=self._context.node, number=number)
            self._context.journal.put(Steps(mail_to([node], message)))

    def _not_grown(self, failure: Exception, again: bool) -> None:
        level = logging.DEBUG if again or isinstance(failure, StoreError) else logging.ERROR
        log_event(level, "changes.grow", f"what listeners of other nodes want could not be heard: {failure!r}")

    # Looking

    def on_hint(self, streams: Sequence[StreamId]) -> Sequence[StreamId]:
        """Streams may have grown; without any, all may have. Gives those that are no changes streams."""
        return self._feed.on_hint(streams)

    def go_round(self) -> None:
        """Do again what has failed, and no longer wait for nodes that are gone."""
        if self._session is not None:
            self._log.reopen()
        if self._to_answer or self._is_unwritten:
            self._grows.want()
        long_ago = self._context.hub.monotonic() - HEARD_WITHIN
        for announcement in list(self._announced.values()):
            if announcement.since < long_ago:  # the others are known since
                gone = announcement.waiting.difference(self._context.nodes.others)
                self._settle(gone, through=announcement.number)


def _record_of(secret: bytes) -> SessionId:
    return new_session_id(lambda size: secret[:size])
