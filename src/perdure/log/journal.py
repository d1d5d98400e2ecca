"""Groups steps and commits them: the one way into the store.

A *source* with something to write is put into the queue. At the end of the event loop's turn the journal takes the
steps of all sources, commits them as one group, and calls the sources back. Small groups are committed at once where
the store can do that without waiting. The others go through the store's own thread while the next group forms.

When the store fails (`is_degraded`, promise 7) the steps stay in the backlog, in order. With `hold` their sources
learn that they are held, so live traffic continues from memory; with `refuse` they learn nothing before the steps are
written. Steps are repeatable, so a commit that was given up and happened all the same does no harm.

A store whose file was replaced (`is_lost`) never comes back. Calls that run finish from memory, also with `refuse`, and
the process ends.

A node whose claim is FROZEN (`_core.states.CLAIM`) writes nothing and shows nothing more until the claim is renewed.
Everything that a BURIED node holds is refused, because other nodes write its streams.

A store may come back without its last commits. It refuses the next append to a stream as `Behind`, and the journal asks
the source what to write instead, before it goes on with anything else.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

from perdure._core.leases import Claim
from perdure._core.states import ClaimState
from perdure.errors import (
    Behind,
    MailFull,
    NodeGone,
    PerdureError,
    StaleFence,
    StoreError,
    StoreReplaced,
    StoreUnavailable,
)
from perdure.settings import Settings
from perdure.store.interface import Store
from perdure.store.notes import probe
from perdure.store.steps import Append, Forward, OpenStream, PutSession, Refusals, Step, weigh
from perdure.telemetry.counters import Counters
from perdure.telemetry.log_records import log_event

_logger = logging.getLogger("perdure")

T = TypeVar("T")

GROUP_BYTES = 1 << 20
GROUP_STEPS = 2_048
"""The size of one commit, in bytes, and in steps and events together. The source that reaches a bound is the last.
More gains little, and keeps the first source waiting for the last."""

MOST_HELD_BYTES = 256 << 20
"""Bytes held while the store fails, besides the number of events: they may be large, and so may requests."""

_FAILURES = (StoreUnavailable, StoreReplaced)
"""Errors that make the journal hold steps. Other errors of the store refuse the steps for good."""

_RETRY_FIRST = 0.02
_RETRY_MOST = 0.5
"""Seconds between attempts while the store fails: soon at first, then without being a burden to a store in trouble."""

AHEAD = 4
"""Events that a call may be ahead of the log without a place in the line: a call that sends rarely never waits."""

SHARED_TURN = 64
"""Events of all calls in one turn while others wait in the line, nearly: about five milliseconds. A request takes about
ten turns. Fewer would make commits small, and those cost more for each event."""

SOLE_TURN = 256
"""Events in one turn while no call waits: as many as a call may run ahead (`RUN_AHEAD`), so a call that is alone is not
slowed."""

QUEUED_BYTES = 256 * 1024
"""Bytes of events that may be queued to be written; again as many as a call may run ahead."""


class Source(Protocol):
    """Has steps to write, and learns what became of them."""

    def take(self) -> Sequence[Step]:
        """All steps, in order. They are written in one commit, so they should be few."""

    def held(self, steps: Sequence[Step]) -> None:
        """These steps are held while the store fails. They may be shown; where `Journal.lapses`, final answers may
        not."""

    def written(self, steps: Sequence[Step]) -> None:
        """The store has these steps: they may be shown."""

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        """The store refused these steps for good."""

    def after_loss(self, steps: Sequence[Step], reason: Behind) -> Sequence[Step]:
        """The store has lost what came before these steps. Returns what is written in their place, before anything else
        of this source; nothing: the steps are refused for good."""


Part = tuple[Source, Sequence[Step]]
Group = list[Part]


class Journal:
    def __init__(
        self,
        store: Store,
        settings: Settings,
        counters: Counters,
        *,
        claim: Claim | None = None,
        lapses: bool = False,
        on_holding: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.is_degraded = False
        """The store fails, and steps are held or refused until it is back (promise 7)."""
        self.backlog = Backlog(settings.max_held_events, on_holding)
        self.turns = Turns()
        self.store = store
        self.clock = store.clock
        self._timeout = settings.store_timeout
        self._holding = settings.on_store_failure == "hold"
        self.is_lost = False
        """The store's file does not exist any more: nothing that is held is ever written."""
        self._claim = claim or Claim()
        self.lapses = lapses
        """The claim of a live node may lapse, and another node then settles its calls. So a final answer is shown only
        when it is in the store: the other node might give another answer (promise 3)."""
        self.counters = counters
        self._queue: deque[Source] = deque()
        self._queued_since = self._taken_since = self.time = 0.0
        """`time` is the store's time at which the first source was queued: the time of all events until the queue is
        taken."""
        self._too_much = 0
        """Bytes of the group at which the store failed."""
        self._groups = 0
        self._refused = 0
        """Steps that were refused since the store last began to fail."""
        self.doubts = 0
        """How often the store may have lost something: it was unreachable, or it is behind."""
        self._has_lapsed = False
        """The claim has lapsed since the store began to fail. Other nodes may write this node's streams, so nothing
        that is held is shown before the store has it."""
        self._scheduled = False
        self._writer: asyncio.Task[None] | None = None

    @property
    def may_show(self) -> bool:
        """Accepted steps may be shown: this node holds its claim, and has held it since everything was last written."""
        return not self._has_lapsed and time.monotonic() < self._claim.until

    @property
    def _is_buried(self) -> bool:
        return self._claim.at(time.monotonic()) is ClaimState.BURIED

    def check_claim(self) -> None:
        """Raises `StoreUnavailable` unless this node holds its claim. Called before the node writes or claims a stream,
        because the process may have stood still, and a stream of a buried node never has a writer."""
        if time.monotonic() >= self._claim.until:
            raise StoreUnavailable("it has not answered this node for so long that the node's lease has lapsed")

    @property
    def refuses(self) -> bool:
        """New work is refused: the claim has lapsed; or the store fails, with `refuse` or with too much held."""
        return not self.may_show or (self.is_degraded and not (self._holding and self.backlog.has_room))

    @property
    def _is_behind(self) -> bool:
        """The store has failed, and there is something to catch up with. A buried node only has its backlog refused."""
        return self.is_degraded and (bool(self.backlog.parts) or not self._is_buried)

    def put(self, source: Source) -> None:
        """Queue a source, once. It is asked for its steps at the end of this turn of the loop."""
        if not self._queue:
            self._queued_since = time.perf_counter()
            self.time = self.clock()
        self._queue.append(source)
        if not self._scheduled:
            self._schedule()

    async def write(self, *steps: Step, may_be_held: bool = True) -> None:
        """Write steps and wait until they are accepted. Raises `StoreUnavailable` where the journal refuses, or where
        it would hold steps that may not be held because only the store can decide on them."""
        if not self._queue and self._writer is None and (refusals := self._at_once(steps)) is not None:
            for refusal in refusals:
                if refusal is not None:
                    raise refusal
            return
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.put(Steps(steps, outcome, may_be_held=may_be_held))
        await outcome

    async def aclose(self) -> None:
        """Write what is queued. If the store takes nothing for `store_timeout`, the rest is lost with the process."""
        while self._queue or self._writer is not None:
            if self._writer is None:
                await asyncio.sleep(0)  # until `_flush`
                continue
            groups = self._groups
            await asyncio.wait({self._writer}, timeout=0 if self.is_lost else self._timeout)
            if self._writer is not None and self.is_degraded and self._groups == groups:
                lost = sum(len(steps) for _, steps in self.backlog.parts)
                sentence = f"the store is still failing: {lost} steps are lost"
                log_event(logging.ERROR, "journal.lost", sentence, steps=lost)
                break
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    # Writing

    def _schedule(self) -> None:
        if self._queue and not self._scheduled and (self._writer is None or self.is_degraded):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._is_behind:
            self._hold(list(self._taken()))
            return
        if self._writer is not None or not self._queue:
            return
        group = front(self._taken())
        refusals = self._at_once(flat(group))
        if refusals is not None:
            self.counters.append_seconds.observe(time.perf_counter() - self._taken_since)
            self._done(group, refusals)
        if group:
            self._writer = asyncio.create_task(self._write(group), name="perdure-journal")
        elif self._queue:
            self._schedule()

    def _taken(self) -> Iterator[Part]:
        self._taken_since = self._queued_since
        while self._queue:
            source = self._queue.popleft()
            if not self._queue:
                self.turns.on_taken()
            if steps := source.take():
                yield source, steps

    def _at_once(self, steps: Sequence[Step]) -> Refusals | None:
        if self.is_degraded or self._has_lapsed or time.monotonic() >= self._claim.until:
            return None
        try:
            return self.store.commit_now(steps)
        except Exception:
            return None  # the way through the writer meets the same failure, and deals with it

    async def _write(self, group: Group) -> None:
        """Write a group, and whatever is queued meanwhile, until nothing is left."""
        try:
            await self._write_group(group)
            while self._queue or self._is_behind:
                if self._is_behind:
                    await self._catch_up()
                elif group := front(self._taken()):
                    await self._write_group(group)
        finally:
            self._writer = None
            self._schedule()

    async def _write_group(self, group: Group) -> None:
        try:
            await self._commit(group)
            # Groups that are held while the store fails would only measure the outage.
            self.counters.append_seconds.observe(time.perf_counter() - self._taken_since)
        except _FAILURES as failure:
            self._failed(failure)
            self._too_much = weigh(flat(group))[1]
            self._hold(group)
            self._hold(list(self._taken()))  # queued while the store was tried, so not put into the queue again

    async def _commit(self, group: Group) -> None:
        """Write a group, and remove from it the sources that were called back. If the store fails, the others stay."""
        while group:
            if self._is_buried:
                self._done(group, [StaleFence("other nodes have buried this one")] * len(flat(group)))
                return
            self.check_claim()
            try:
                refusals = await self._asked(self.store.commit(flat(group)))
            except _FAILURES:
                raise
            except StoreError as failure:
                # No use in trying again: one of them asks for the impossible. It must not hold up the others.
                if len(group) == 1:
                    self._done(group, [failure] * len(flat(group)))
                while group:
                    await self._commit([group[0]])
                    del group[0]
            else:
                self._done(group, refusals)

    async def _asked(self, answer: Awaitable[T]) -> T:
        """Wait for the store, and turn an exception that it must not raise into `StoreUnavailable`: the journal goes
        on."""
        try:
            return await answer
        except StoreError:
            raise
        except Exception as error:
            raise StoreUnavailable(f"the store broke: {error!r}") from error

    def _done(self, group: Group, refusals: Sequence[PerdureError | None]) -> None:
        """Call the sources of a group back. The steps that a source writes after a loss (`Source.after_loss`) stay in
        the group. They are written before everything that is queued or held after them, and held steps of the same
        source are refused until then."""
        outcomes = iter(refusals)
        again: Group = []
        for source, steps in group:
            reasons = [reason for reason in islice(outcomes, len(steps)) if reason is not None]
            reason = reasons[0] if reasons else None
            if isinstance(reason, Behind) and (instead := source.after_loss(steps, reason)):
                self.doubts += 1
                again.append((source, instead))
                continue
            self._refused += len(reasons)
            try:
                if reason is None:
                    source.written(steps)
                else:
                    source.refused(steps, reason)
            except Exception:  # a source that fails must not hold up the others
                _logger.exception("a source of the journal failed", extra={"action": "journal.source"})
        group[:] = again

    # Holding

    def lose(self) -> None:
        self.is_lost = self._holding = True

    def _failed(self, failure: StoreError) -> None:
        if isinstance(failure, StoreReplaced):
            self.lose()
        if not self.is_degraded and not self.is_lost:  # the node logs the loss
            self._refused = 0
            self.counters.outages += 1
            what = "calls continue from memory" if self._holding and self.may_show else "new requests are refused"
            log_event(logging.ERROR, "store.degraded", f"the store fails ({failure}); {what}")
        self.is_degraded = True
        self._note_lapse()

    def _note_lapse(self) -> None:
        if time.monotonic() >= self._claim.until:
            self._has_lapsed = True

    def _hold(self, group: Group) -> None:
        self._note_lapse()
        holds, backlog = self._holding and self.may_show, self.backlog
        if holds:
            backlog.set_shown(True)  # other nodes must not deny what their clients are about to see here
        for source, steps in group:
            if isinstance(source, Steps) and source.outcome is not None and not (holds and source.may_be_held):
                source.refused(steps, StoreUnavailable("the store fails"))
                continue
            if holds:
                steps = [_without_limit(step) for step in steps]
            events = backlog.add(source, steps)
            if holds:
                self.counters.events_held += events
                source.held(steps)

    async def _catch_up(self) -> None:
        delay, backlog = _RETRY_FIRST, self.backlog
        while self._is_behind:
            try:
                if not self._is_buried:  # else nothing of it is written
                    self.check_claim()
                    # Write something, and take it away again. Where nothing is held that would show it (`refuse`), as
                    # much as failed: a full disk has room for a little.
                    await self._asked(probe(self.store, 1 if backlog.parts else self._too_much))
                while group := front(backlog.parts):
                    taken = len(group)
                    try:
                        await self._commit(group)
                    finally:
                        backlog.replace(taken, group)
                    self._groups += 1
            except _FAILURES as failure:
                self._failed(failure)
                await asyncio.sleep(delay)
                delay = min(delay * 2, _RETRY_MOST)
            else:
                self.doubts += 1
                backlog.set_shown(False)
                lost = self._refused
                if self._is_buried:
                    log_event(
                        logging.ERROR,
                        "journal.lost",
                        f"this node was buried while the store did not answer it: {lost} steps are lost",
                        steps=lost,
                    )
                    return
                self.is_degraded = False
                self._has_lapsed = False
                what = f"the held steps are written, but for {lost} that it refused"
                log_event(
                    logging.WARNING,
                    "store.recovered",
                    f"the store is back; {what if lost else 'all held steps are written'}",
                )


@dataclass(slots=True, eq=False)
class Steps:
    """A source of a few steps. A caller may wait for their outcome."""

    _steps: Sequence[Step]
    outcome: asyncio.Future[None] | None = None
    _: KW_ONLY
    may_be_held: bool = True
    on_end: Callable[[PerdureError | None], None] | None = None
    """Called when the steps are written, or with the reason for which they were refused."""

    def take(self) -> Sequence[Step]:
        return self._steps

    def held(self, steps: Sequence[Step]) -> None:
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(None)

    def written(self, steps: Sequence[Step]) -> None:
        self.held(steps)
        if self.on_end is not None:
            self.on_end(None)

    def after_loss(self, steps: Sequence[Step], reason: Behind) -> Sequence[Step]:
        return ()

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        if self.on_end is not None:
            self.on_end(reason)
        elif self.outcome is None:
            # Mail to a dead node concerns no node, and a writer that lost its claim logs that itself.
            level = logging.DEBUG if isinstance(reason, NodeGone | StaleFence | MailFull) else logging.ERROR
            log_event(level, "journal.refused", f"the store refused steps: {reason}")
        elif not self.outcome.done():
            self.outcome.set_exception(reason)


class Backlog:
    """The parts that wait for the store, the oldest first."""

    __slots__ = ("_events", "_most_events", "_on_holding", "_room", "_shows", "bytes", "has_room", "parts")

    def __init__(self, most_events: int, on_holding: Callable[[bool], None]) -> None:
        """`on_holding` is called before the first unwritten event is shown, and when all held steps are written."""
        self.has_room = True
        self.parts: deque[Part] = deque()
        self._most_events = most_events
        self._on_holding = on_holding
        self._shows = False
        self._events = self.bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    def set_shown(self, shown: bool) -> None:
        if shown != self._shows:
            self._shows = shown
            self._on_holding(shown)

    def add(self, source: Source, steps: Sequence[Step]) -> int:
        """Hold steps. Returns the number of events in them."""
        self.parts.append((source, steps))
        return self._count(steps, 1)

    def replace(self, taken: int, left: Group) -> None:
        """Put `left` in place of the first `taken` parts: the others are written or refused."""
        for _ in range(taken):
            self._count(self.parts.popleft()[1], -1)
        for part in reversed(left):
            self.parts.appendleft(part)
            self._count(part[1], 1)

    def _count(self, steps: Sequence[Step], sign: int) -> int:
        events = sum(
            len(step.events) if isinstance(step, Append) else len(step.payloads)
            for step in steps
            if isinstance(step, Append | Forward)
        )
        self._events += sign * events
        self.bytes += sign * weigh(steps)[1]
        self.has_room = self._events < self._most_events and self.bytes < MOST_HELD_BYTES
        if self.has_room:
            self._room.set()
        else:
            self._room.clear()
        return events

    async def wait_for_room(self) -> None:
        await self._room.wait()


def front(parts: Iterable[Part]) -> Group:
    group: Group = []
    count = size = 0
    for part in parts:
        group.append(part)
        rows, its_size, _ = weigh(part[1])
        count, size = count + rows, size + its_size
        if count >= GROUP_STEPS or size >= GROUP_BYTES:
            break
    return group


def flat(group: Group) -> list[Step]:
    return [step for _, steps in group for step in steps]


def _without_limit(step: Step) -> Step:
    """A held step counts as accepted: neither a limit nor a changed record may refuse it later."""
    if isinstance(step, PutSession):
        return replace(step, limits=None)
    return replace(step, most_calls=None, seen=None) if isinstance(step, OpenStream) else step


class Turns:
    """Shares each turn of the event loop, and the queue of the journal, between calls that send without a pause.

    If hundreds of calls ran ahead of the log by hundreds of events in one turn, the turn and the commit after it would
    take seconds, and every quick call waits for two commits: of its row, and of its answer. So all calls together have
    a share of each turn. A call that is ahead when the share is used up waits in a line. The share counts events and
    bytes, not time, so a busy machine does not make it smaller.
    """

    __slots__ = ("_line", "_scheduled", "queued", "sent")

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()
        self._scheduled = False
        self.sent = 0
        """Events in this turn. Streams count what they append here."""
        self.queued = 0
        """Bytes of the events that were sent since the journal last took everything."""

    @property
    def is_over(self) -> bool:
        """The share of this turn is used up."""
        if not self._scheduled:
            self._schedule()  # a call sends, so the next turn is another one
        return self.sent >= (SHARED_TURN if self._line else SOLE_TURN) or self.queued >= QUEUED_BYTES

    async def wait(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        if not self._scheduled:
            self._schedule()
        await place

    def on_taken(self) -> None:
        self.queued = 0
        if self._line and not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin the next turn. One call continues in it; if it sends less than the share, this is called again soon."""
        self._scheduled = False
        self.sent = 0
        if self.queued >= QUEUED_BYTES:
            return  # `on_taken` continues
        while self._line:
            if not (place := self._line.popleft()).done():  # it may have been cancelled
                place.set_result(None)
                break
        if self._line:
            self._schedule()
