"""Serves the listeners of this node with the changes of all nodes, by cues.

A cue says "read that item again", so a needless one costs one read, and no node has to know what a listener has seen.
Each node has one subscription to its own server (`ServerSubscription`). A node with listeners says so in its beat, and
asks every other node by mail to subscribe to the resources that its listeners name; it acknowledges a listener when
they have done so. A change is mail to the nodes with listeners. A node that joins asks the nodes with listeners before
it serves. Where a change may be missed (a listener that comes back, a node that died, a subscription that broke off, a
node that answered late), the listener gets a cue for each resource that it named, and for each list that may differ.

One host refuses the call that it was about to make when a list is said to have changed, so a needless cue for a list is
not cheap. A node therefore keeps a digest of each list, and where it is in doubt it sends a cue only if the digest
differs from the last one, or is unknown. What the server itself reports is always passed on: a list may differ by
caller, and the digest is of the list that the process's own request gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from perdure._core import mail
from perdure._core.ids import NodeId
from perdure._core.limits import Caller, Quota, share_of
from perdure._core.listening import (
    ALL_RESOURCES,
    ANYTHING,
    LISTS,
    MAX_UNION,
    MAX_URIS,
    Change,
    ChangeFilter,
    Cue,
    DueChanges,
    change_of,
)
from perdure.errors import NodeGone, PerdureError, StoreUnavailable
from perdure.log.chores import OnDemand, cancel_all
from perdure.log.journal import Steps
from perdure.log.nodes import mail_to
from perdure.runtime.base import NoListening, ServerChanges
from perdure.sessions.context import ServerContext
from perdure.store.records import Overview
from perdure.telemetry.log_records import log_event
from perdure.telemetry.prometheus import read_facts

SUBSCRIBED_WITHIN = 2.0
"""Seconds that a new listener waits for the other nodes to subscribe to what it names. They answer within milliseconds;
one that hangs, has died or is of another release must not keep a listener waiting."""

ANSWERED_WITHIN = 0.5
"""Seconds that a node which joins waits for the nodes with listeners before it serves. If one answers later, its
listeners get a cue for everything."""

ASKED_AGAIN = 10.0
"""Seconds until a node that did not answer is asked again: a node that hangs must not find a full mailbox."""

DIGEST_SECONDS = 1.0
"""Seconds that the server may take to list something: a listener waits for it. The digest is unknown beyond."""

RETURNS_WITHIN = 60.0
"""Seconds in which a listener that was cut off comes back. One that begins so soon after a list may have changed gets a
cue for the list; a client that was away for longer has to read its lists anyway, as the revision says."""

MAX_UNSENT = 1_000
"""Changes that wait for the store, for one node; beyond, that node is told that anything may have changed."""

_PAUSES = (0.05, 0.2, 1.0, 5.0)
"""Seconds before a subscription that the server has ended is opened again: soon, and then without filling the log."""

LEFT_OVER = 100
"""Resources that no listener here names any more of which other nodes may still be subscribed, beside as many as are
named: they are asked again, for less, when there are more. So a listener that comes back causes no mail."""


class TooManyResources(PerdureError):
    """The listeners of all nodes would name more resources than they may; or those of one caller here would."""

    def __init__(self, limit: int, *, of_caller: bool) -> None:
        super().__init__()
        self.limit = limit
        self.of_caller = of_caller


class SubscriptionState(enum.Enum):
    NONE = "none"  #: it was not asked for yet
    OPEN = "open"  #: the server has acknowledged it
    ABSENT = "absent"  #: the server serves no subscriptions
    REFUSED = "refused"  #: the server refuses one that comes from no client, or does not acknowledge it


@dataclass(eq=False)
class ServerSubscription:
    _server: ServerChanges
    _: KW_ONLY
    on_notification: Callable[[str, Mapping[str, Any] | None], None]
    on_gap: Callable[[], None]
    """Called when the server has ended the subscription and acknowledges the next one: what changed in between is not
    known."""
    task_context: contextvars.Context
    _state: SubscriptionState = SubscriptionState.NONE
    _honoured: ChangeFilter = field(default_factory=ChangeFilter)
    """The filter that the server has acknowledged."""
    _uris: frozenset[str] = frozenset()
    _task: asyncio.Task[None] | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def serves(self) -> bool:
        """Whether this process can serve listeners. A server without subscriptions may report changes by other
        means."""
        is_absent = self._state is SubscriptionState.ABSENT
        return self._state is SubscriptionState.OPEN or (is_absent and self._server.may_be_silent)

    def honours(self, wanted: ChangeFilter) -> ChangeFilter:
        """The part of a filter that the server honours; a server without subscriptions honours all of it."""
        return wanted if self._state is SubscriptionState.ABSENT else wanted.within(self._honoured)

    async def cover(self, uris: Collection[str]) -> None:
        """Subscribe to all these resources. The next subscription is acknowledged before the last one ends, so that no
        change falls between them."""
        async with self._turn:
            has_failed = self._state is SubscriptionState.REFUSED and not self._server.may_recover
            if (
                has_failed
                or self._state is SubscriptionState.ABSENT
                or (self._task is not None and self._uris.issuperset(uris))
            ):
                return
            begun: asyncio.Future[SubscriptionState] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(
                self._listen(sorted(uris), begun), name="perdure-subscription", context=self.task_context.copy()
            )
            try:
                async with asyncio.timeout(self._server.acknowledges_within):
                    self._state = await asyncio.shield(begun)
            except TimeoutError:
                self._state = SubscriptionState.REFUSED
            except BaseException:
                await cancel_all([task])
                raise
            if self._state is SubscriptionState.REFUSED:
                await cancel_all([task])
                sentence = "the server acknowledges no subscription of its own process: changes reach the listeners of"
                sentence += " the process in which they happen, and no others"
                log_event(logging.WARNING, "changes.refused", sentence)
                return
            before, self._task = self._task, task
            self._uris = frozenset(uris)
            if before is not None:
                await cancel_all([before])

    async def _listen(self, uris: list[str], begun: asyncio.Future[SubscriptionState]) -> None:
        """Listen, and listen again whenever the server ends it."""

        async def notified(method: str, params: Mapping[str, Any] | None) -> None:
            self.on_notification(method, params)

        def acknowledged(honoured: ChangeFilter) -> None:
            self._honoured = honoured
            if begun.done():
                self.on_gap()
            else:
                begun.set_result(SubscriptionState.OPEN)

        attempts = 0
        while True:
            ending = "the server ended it"
            try:
                await self._server.listen(uris, on_acknowledged=acknowledged, on_notification=notified)
            except Exception as failure:  # also whatever the server's handler raises
                if not begun.done():
                    is_absent = isinstance(failure, NoListening)
                    begun.set_result(SubscriptionState.ABSENT if is_absent else SubscriptionState.REFUSED)
                    return
                ending = repr(failure)
            level = logging.DEBUG if attempts else logging.WARNING
            log_event(level, "changes.unheard", f"the subscription to the server is opened again: {ending}")
            await asyncio.sleep(_PAUSES[min(attempts, len(_PAUSES) - 1)])
            attempts += 1

    async def aclose(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])


@dataclass(slots=True, eq=False)
class ChangeListener:
    """One listener at this node, as `http.listening` serves it."""

    due: DueChanges
    _on_close: Callable[[ChangeListener], None]
    _on_due: Callable[[], None] = field(default=lambda: None)

    @property
    def honoured(self) -> Mapping[str, Any]:
        return self.due.filter.wire

    @property
    def is_over(self) -> bool:
        return not self.honoured

    def watch(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due

    def add(self, changes: Iterable[Change]) -> None:
        wanted = [self.due.add(change) for change in changes]
        if any(wanted):
            self._on_due()

    def take(self) -> Sequence[Cue]:
        return self.due.take()

    def close(self) -> None:
        self._on_close(self)


class ListDigests:
    """Knows which lists may have changed, and when."""

    def __init__(self, server: ServerChanges, monotonic: Callable[[], float]) -> None:
        self._server = server
        self._monotonic = monotonic
        self._digests: dict[str, bytes] = {}
        """Of the lists that listeners here have been told of, as far as known."""
        self._changed = dict.fromkeys(LISTS.values(), monotonic())
        """When each list may have changed last."""

    def note_change(self, method: str) -> None:
        """The server has reported a change. The digest is unknown: read now, it could include a later change."""
        if method in self._changed:
            self._digests.pop(method, None)
            self._changed[method] = self._monotonic()

    async def differing(self) -> Sequence[Change]:
        """Read the lists; returns those that differ from when they were read before, or that cannot be compared."""

        async def read_digest(method: str) -> bytes | None:
            try:
                async with asyncio.timeout(DIGEST_SECONDS):
                    return await self._server.digest(method)
            except Exception:  # whatever the server's handler raises
                return None

        changed = dict(self._changed)
        read = await asyncio.gather(*map(read_digest, changed))
        found = []
        for method, digest in zip(changed, read, strict=True):
            if self._changed[method] != changed[method]:
                continue  # the server reported a change while the list was read: that is a cue by itself
            if digest is None or digest != self._digests.get(method):
                found.append(Change(method))
                self.note_change(method)
            if digest is not None:
                self._digests[method] = digest
        return found

    def recent(self) -> Sequence[Change]:
        """The lists that may have changed while a listener was on its way back."""
        since = self._monotonic() - RETURNS_WITHIN
        return [Change(method) for method, changed in self._changed.items() if changed >= since]


@dataclass(slots=True, eq=False)
class _Announcement:
    """A request to other nodes to subscribe to more, and the nodes that have not answered yet."""

    since: float
    waiting: set[NodeId]
    is_overdue: bool = False
    """A listener was acknowledged although nodes had not answered."""
    done: asyncio.Event = field(default_factory=asyncio.Event)


class _NodeWithListeners(NamedTuple):
    number: int
    filter: ChangeFilter


class Listening:
    """The listeners of this node, and the other nodes that have any. Nothing runs before the first listener comes, at
    whatever node."""

    def __init__(self, context: ServerContext, server: ServerChanges, *, beat: Callable[[], Awaitable[None]]) -> None:
        """`beat` writes this node's beat, with `number` in it."""
        self._context = context
        self._beat = beat
        self._listeners: set[ChangeListener] = set()
        self._begun = 0
        """Listeners here, those that are not acknowledged yet among them."""
        self._named: Counter[str] = Counter()
        """Resources, and how many listeners here name each."""
        self._first: dict[str, Caller] = {}
        """Of each resource, the caller whose listener named it first; it counts as that caller's."""
        self._shares = Quota(MAX_UNION, each=share_of(MAX_UNION, context.settings.max_share))
        self._announced: set[str] | None = None
        """Resources to which other nodes were asked to subscribe; `None` while they know of no listener here."""
        self._number = 0
        """Of the last announcement."""
        self._announcements: dict[int, _Announcement] = {}
        self._nodes: dict[NodeId, _NodeWithListeners] = {}
        self._to_answer: dict[NodeId, int] = {}
        """Nodes that wait for this one to subscribe to more, each with the number of its last announcement."""
        self._asked: dict[NodeId, float] = {}
        """Nodes with listeners whose announcement this node lacks, and when it has asked for it."""
        self._is_started = False
        self._answered = asyncio.Event()
        self._unsent: dict[NodeId, dict[Change, None]] = {}
        self._suspects: tuple[frozenset[NodeId], frozenset[NodeId]] = (frozenset(), frozenset())
        """In the last round: nodes without listeners any more, and those whose announcement was missing."""
        self._doubts = context.journal.doubts
        self._lists = ListDigests(server, context.hub.monotonic)
        self._subscription = ServerSubscription(
            server, on_notification=self.heard, on_gap=self._on_gap, task_context=context.task_context
        )
        self._turn = asyncio.Lock()
        failure = "changes could not be exchanged with other nodes, and wait"
        self._subscribes = OnDemand(self._subscribe, name="perdure-listening-subscribe", failure=failure)
        self._sends = OnDemand(self._send, name="perdure-listening-send", failure=failure)
        self._doubt = OnDemand(self._cue_doubtful, name="perdure-listening-doubt", failure=failure)
        context.change_listeners.append(self.heard)

    @property
    def number(self) -> int:
        """For the beat: the number of the last announcement; 0 while no listener is here."""
        return 0 if self._announced is None else self._number

    def __len__(self) -> int:
        return len(self._listeners)

    async def start(self) -> None:
        """Learn what the listeners of other nodes want, before this node serves. Raises `StoreError`."""
        context = self._context
        for record in await context.store.nodes():
            is_other = record.id != context.node
            if is_other and read_facts(record).listening and not await context.nodes.is_dead(record.id):
                self._ask(record.id)
        if self._asked:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWERED_WITHIN):
                    await self._answered.wait()
        self._is_started = True

    async def aclose(self) -> None:
        await self._subscribes.aclose()
        await self._doubt.aclose()
        await self._subscription.aclose()
        await self._sends.aclose()
        for node, changes in self._unsent.items():
            self._put_mail([node], _message(changes))

    # Listeners

    async def join(self, wanted: ChangeFilter, *, caller: Caller) -> ChangeListener | None:
        """Begin to listen. `None`: this process cannot subscribe to its server, and only the server itself can serve a
        listener. Raises `StoreError`, or `TooManyResources`."""
        if self._context.journal.is_degraded:
            raise StoreUnavailable("other nodes cannot be asked to subscribe to more")
        self._begun += 1
        is_named = False
        try:
            async with self._turn:
                new = [uri for uri in wanted.uris if uri not in self._named]
                if new and len(self._union() | set(new)) > MAX_UNION:
                    raise TooManyResources(MAX_UNION, of_caller=False)
                if new and self._shares.held_by(caller) + len(new) > self._shares.each:
                    raise TooManyResources(self._shares.each, of_caller=True)
                self._named.update(list(wanted.uris))  # a mapping would count by its values
                self._first.update(dict.fromkeys(new, caller))
                self._shares.take(caller, len(new))
                is_named = True
                await self._subscription.cover(self._union())
                if self._subscription.serves:
                    await self._announce(wanted.uris)
            if self._subscription.serves:
                await self._wait_subscribed()
                if not self._listeners:
                    await self._lists.differing()  # those that changed while no listener was here are recent now
                honoured = self._subscription.honours(wanted)

                def leave(left: ChangeListener) -> None:
                    if left in self._listeners:
                        self._listeners.discard(left)
                        self._release(wanted.uris)

                listener = ChangeListener(DueChanges(honoured), leave)
                self._listeners.add(listener)
                listener.add([*self._lists.recent(), ALL_RESOURCES])
                return listener
        except BaseException:
            self._release(wanted.uris if is_named else ())
            raise
        self._release(wanted.uris)
        return None

    def _release(self, uris: Iterable[str]) -> None:
        """A listener here is gone."""
        self._begun -= 1
        for uri in uris:
            self._named[uri] -= 1
            if not self._named[uri]:
                self._shares.take(self._first.pop(uri), -1)
                del self._named[uri]

    def _union(self) -> set[str]:
        return {*self._named, *(uri for node in self._nodes.values() for uri in node.filter.uris)}

    # Changes

    def heard(self, method: str, params: Mapping[str, Any] | None) -> None:
        """The server of this process, or a tool to its caller, has sent a notification. Passed on if it reports a
        change; never waits or fails."""
        if (change := change_of(method, params)) is None:
            return
        self._cue([change])
        for node, other in self._nodes.items():
            if other.filter.admits(change):
                self._queue(node, change)

    def _on_gap(self) -> None:
        """This node may have missed changes of its server."""
        self._doubt.want()
        self.cue_others()

    def on_death(self) -> None:
        """A node has died, and may have published what it had no time to send."""
        self._doubt.want()

    def cue_others(self) -> None:
        """Report to the other nodes with listeners that anything may have changed."""
        for node in self._nodes:
            self._queue(node, ANYTHING)

    def _cue(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._lists.note_change(change.method)
        for listener in list(self._listeners):
            listener.add(changes)

    async def _cue_doubtful(self) -> None:
        """Anything may have changed."""
        if self._listeners:
            differing = await self._lists.differing()
            for listener in list(self._listeners):
                listener.add([*differing, ALL_RESOURCES])

    def _queue(self, node: NodeId, change: Change) -> None:
        unsent = self._unsent.setdefault(node, {})
        unsent[change] = None
        if len(unsent) > MAX_UNSENT:
            self._unsent[node] = {ANYTHING: None}
        self._sends.want()

    async def _send(self) -> None:
        """Send what has changed. Changes of one item that come meanwhile are one."""
        unsent, self._unsent = self._unsent, {}
        sent = (self._context.journal.write(*mail_to([node], _message(changes))) for node, changes in unsent.items())
        try:
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
        except asyncio.CancelledError:
            self._unsent = unsent | self._unsent
            raise
        failures = []
        for (node, changes), outcome in zip(unsent.items(), outcomes, strict=True):
            if outcome is not None and not isinstance(outcome, NodeGone):
                self._unsent[node] = changes | self._unsent.get(node, {})  # sent in the next round
                failures.append(outcome)
        if failures:
            raise failures[0]

    # Asking the other nodes

    async def _announce(self, uris: Collection[str]) -> None:
        """Ask all other nodes to subscribe to resources, unless they were asked before."""
        before = self._announced
        if before is not None and before.issuperset(uris):
            return
        self._announced = {*(before or ()), *uris}
        try:
            if before is None:
                self._number += 1
                await self._beat()  # nodes are read after it is written: a node that joins later sees it, and asks
            others = {record.id for record in await self._context.store.nodes()} - {self._context.node}
        except BaseException:
            self._announced = before
            raise
        self._announce_to_all(others, uris, adds=before is not None)

    def _announce_to_all(self, nodes: Collection[NodeId], uris: Collection[str], *, adds: bool) -> None:
        if nodes:
            self._number += 1
            self._announcements[self._number] = _Announcement(self._context.hub.monotonic(), set(nodes))
            self._send_announcement(nodes, uris, adds=adds)

    def _send_announcement(self, nodes: Collection[NodeId], uris: Collection[str], *, adds: bool) -> None:
        """Send resources under the last number, in parts that mail can hold."""
        left, own = list(uris), self._context.node
        while True:
            part, left = left[:MAX_URIS], left[MAX_URIS:]
            message = mail.Announced(node=own, number=self._number, uris=part, adds=adds, has_more=bool(left))
            self._put_mail(nodes, message)
            if not left:
                return
            adds = True

    async def _wait_subscribed(self) -> None:
        """Wait until the other nodes have subscribed to what this one has announced, or for `SUBSCRIBED_WITHIN`."""
        open_ = list(self._announcements.values())
        try:
            async with asyncio.timeout(SUBSCRIBED_WITHIN):
                for announcement in open_:
                    await announcement.done.wait()
        except TimeoutError:
            for announcement in open_:
                announcement.is_overdue = True

    def _settle(self, nodes: Collection[NodeId], *, through: int) -> None:
        """Nodes have answered, or are gone."""
        for number, announcement in list(self._announcements.items()):
            if number <= through:
                announcement.waiting.difference_update(nodes)
            if not announcement.waiting:
                announcement.done.set()
                del self._announcements[number]
                if announcement.is_overdue:
                    self._doubt.want()

    def on_mail(self, message: mail.ListeningMail) -> None:
        own = self._context.node
        match message:
            case mail.Changed():
                self._cue([Change(method, uri) for method, uri in message.changes])
            case mail.Unheard():
                self._doubt.want()
            case mail.Announced():
                known = self._nodes.get(message.node) if message.adds else None
                uris = {**(known.filter.uris if known else {}), **dict.fromkeys(message.uris)}
                wanted = ChangeFilter(methods=frozenset(LISTS.values()), uris=uris)
                self._nodes[message.node] = _NodeWithListeners(message.number, wanted)
                if not message.has_more:
                    self._to_answer[message.node] = message.number
                    self._subscribes.want()
            case mail.Joined() if self._announced is not None:
                self._send_announcement([message.node], self._announced, adds=False)
            case mail.Subscribed() if message.asker == own:  # otherwise it is mail of a node that this one has buried
                self._settle([message.node], through=message.number)

    async def _subscribe(self) -> None:
        """Subscribe to everything that is wanted, and answer the nodes that asked for it."""
        answers, self._to_answer = self._to_answer, {}
        try:
            await self._subscription.cover(self._union())
        except BaseException:
            self._to_answer = answers | self._to_answer
            raise
        for node, number in answers.items():
            self._put_mail([node], mail.Subscribed(asker=node, node=self._context.node, number=number))
            if self._asked.pop(node, None) is not None and self._is_started:
                self._queue(node, ANYTHING)  # what this process published before that was not sent there
        if not self._asked:
            self._answered.set()

    def _ask(self, node: NodeId) -> None:
        self._asked[node] = self._context.hub.monotonic()
        self._put_mail([node], mail.Joined(node=self._context.node))

    def _put_mail(self, nodes: Collection[NodeId], message: mail.ListeningMail) -> None:
        for step in mail_to(nodes, message):
            self._context.journal.put(Steps((step,)))

    # Rounds

    def go_round(self, seen: Overview | None) -> None:
        """Repeat what failed, and compare what this node knows with the beats of the others. A beat may be older than
        mail, so this node acts when two rounds agree."""
        if self._to_answer:
            self._subscribes.want()
        if self._unsent:
            self._sends.want()
        if self._doubts != self._context.journal.doubts:  # the store has lost its tail, and mail with it
            self._doubts = self._context.journal.doubts
            self._doubt.want()
        if seen is None:
            return
        others = {record.id: record for record in seen.nodes if record.id != self._context.node}
        if self._announced is not None and not self._begun:
            self._announced = None  # the others see it by the next beat
        elif self._announced is not None and len(self._announced) > 2 * len(self._named) + LEFT_OVER:
            self._announced = set(self._named)
            self._announce_to_all(others, self._announced, adds=False)
        listening = {node: read_facts(record).listening for node, record in others.items() if node not in seen.dead}
        gone = frozenset(node for node in self._nodes if not listening.get(node))
        known = {node: announced.number for node, announced in self._nodes.items()}
        unknown = {node for node, number in listening.items() if number > known.get(node, 0)}
        last_gone, last_unknown = self._suspects
        self._suspects = gone, frozenset(unknown)
        for node in gone & last_gone:
            del self._nodes[node]
        now = self._context.hub.monotonic()
        for node in unknown & last_unknown:
            if self._asked.get(node, -math.inf) < now - ASKED_AGAIN:
                self._ask(node)
        self._asked = {node: time for node, time in self._asked.items() if node in others}
        long_ago = now - SUBSCRIBED_WITHIN
        for number, announcement in list(self._announcements.items()):
            if announcement.since < long_ago:  # this round has seen the others after it was sent
                self._settle(announcement.waiting - others.keys(), through=number)


def _message(changes: Collection[Change]) -> mail.ListeningMail:
    return mail.Unheard() if ANYTHING in changes else mail.Changed(changes=[list(change) for change in changes])
