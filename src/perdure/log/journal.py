"""The one way into the store: in order, grouped, and held while the store fails.

Whoever has something to write puts a *source* into the queue. At the end of the event loop's turn the journal takes
what each source has by then, commits it as one group, and tells the sources. Small groups are committed at once where
the store can do that without waiting; the others go through the store's own thread, and meanwhile the next group
forms.

When the store fails (`LogState.DEGRADED`, promise 7) the steps stay in the backlog, in order. With `hold` their sources
are told that they are accepted, so that live traffic goes on from memory; with `refuse` nobody is told before they are
written. Steps are repeatable, so a commit that was given up and happened all the same does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from perdure._core.ids import StreamId
from perdure._core.states import LOG, LogState, LogStep, advance
from perdure.errors import MailFull, NodeGone, PerdureError, StaleFence, StoreError, StoreUnavailable
from perdure.settings import Settings
from perdure.store.base import Append, Event, Forward, OpenStream, PutSession, Refusals, SendMail, Step, Store
from perdure.store.cost import weigh
from perdure.telemetry.counters import Counters
from perdure.telemetry.events import log_event

T = TypeVar("T")

_logger = logging.getLogger("perdure")

_RETRY_FIRST = 0.02
_RETRY_MOST = 0.5
"""Seconds between attempts while the store fails: soon at first, then without being a burden to a store in trouble."""

_GROUP_BYTES = 1 << 20
_GROUP_STEPS = 2_048
"""How much is written in one commit, nearly: bytes, and steps and events together. More gains little, keeps the first
of them waiting for the last, and makes one operation of the store long. The source that reaches a bound is the last."""

_MOST_HELD_BYTES = 256 << 20
"""Bytes held while the store fails, besides the number of events: they may be large, and so may requests."""


class Source(Protocol):
    """Somebody with something to write."""

    def take(self) -> Sequence[Step]:
        """All there is at the moment, in order. It is written in one commit, so it should be little: the writers of a
        stream wait in `wait_for_room`."""
        ...

    def accepted(self, steps: Sequence[Step]) -> None:
        """These are written, or held: they may be shown."""
        ...

    def written(self, steps: Sequence[Step]) -> None:
        """These are in the store."""
        ...

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        """These were refused for good."""
        ...


_Part = tuple[Source, Sequence[Step]]
_Group = list[_Part]


class Journal:
    """Writes steps; knows whether the store is well."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        counters: Counters,
        *,
        holds: Callable[[], bool] = lambda: True,
        on_holding: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.state = LogState.HEALTHY
        self.has_room = True
        """No more events are held than memory should carry."""
        self._store = store
        self.clock = store.clock
        self._timeout = settings.store_timeout
        self._holding = settings.on_store_failure == "hold"
        self._claims_hold = holds
        self._on_holding = on_holding
        """Told before the first event is shown that is not written, and when everything held is."""
        self._told_holding = False
        self._most_held = settings.max_held_events
        self.counters = counters
        self._queue: deque[Source] = deque()
        self._queued_since = self._taken_since = 0.0
        self._backlog: deque[_Part] = deque()
        self._held = 0
        self._held_bytes = 0
        self._too_much = 0
        self._groups = 0
        """Groups that were written, so far."""
        self._scheduled = False
        self._writer: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def _holds(self) -> bool:
        """While the store fails, live traffic goes on from memory; but not for a node whose claims have lapsed."""
        return self._holding and self._claims_hold()

    @property
    def refuses(self) -> bool:
        """New work is refused at the moment: the store fails, and the setting says so or too much is held."""
        return self.state is LogState.DEGRADED and (not self._holds or not self.has_room)

    async def wait_for_room(self) -> None:
        await self._room.wait()

    def put(self, source: Source) -> None:
        """Queue a source, once; it is asked for its steps at the end of this turn of the loop."""
        if not self._queue:
            self._queued_since = time.perf_counter()
        self._queue.append(source)
        self._idle.clear()
        self._schedule()

    async def write(self, *steps: Step) -> None:
        """Write steps and wait until they are accepted. Raises `StoreUnavailable` where the journal refuses."""
        if not self._queue and self._writer is None and (refusals := self._at_once(steps)) is not None:
            _raise_first(refusals)
            return
        waiter = _Waiter(steps)
        self.put(waiter)
        await waiter.future

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        """Read from the store, within its time."""
        return await self._store.read(stream, after=after, limit=limit)

    async def aclose(self) -> None:
        """Write what is queued; what the store does not take within its time is lost with the process."""
        try:
            await self._wait_idle()
        except TimeoutError:
            lost = sum(len(steps) for _, steps in self._backlog)
            log_event(logging.ERROR, "journal.lost", f"the store is still failing: {lost} steps are lost", steps=lost)
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    async def _wait_idle(self) -> None:
        """Wait as long as the store takes what there is. Raises `TimeoutError` when it took nothing for its time."""
        while not self._idle.is_set():
            groups = self._groups
            try:
                async with asyncio.timeout(self._timeout):
                    await self._idle.wait()
            except TimeoutError:
                if self.state is LogState.DEGRADED and self._groups == groups:
                    raise

    # Writing

    def _schedule(self) -> None:
        busy = self._writer is not None and self.state is LogState.HEALTHY
        if self._queue and not self._scheduled and not busy:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self.state is LogState.DEGRADED:
            self._hold(list(self._taken()))
            return
        if self._writer is not None or not self._queue:
            return
        group = self._take()
        steps = _flat(group)
        refusals = self._at_once(steps)
        if refusals is None:
            self._writer = asyncio.create_task(self._write(group), name="perdure-journal")
        else:
            self._timed()
            self._done(group, refusals)
            self._settle_idle()

    def _take(self) -> _Group:
        """As much from the front of the queue as one commit should hold; the rest keeps its place."""
        self._taken_since = self._queued_since
        return _front(self._taken())

    def _taken(self) -> Iterator[_Part]:
        while self._queue:
            source = self._queue.popleft()
            if steps := source.take():
                yield source, steps

    def _at_once(self, steps: Sequence[Step]) -> Refusals | None:
        if self.state is LogState.DEGRADED or not self._claims_hold():
            return None
        try:
            return self._store.commit_now(steps)
        except Exception:
            return None  # the way through the writer meets the same failure, and deals with it

    async def _write(self, group: _Group) -> None:
        """Write a group, and whatever has queued up meanwhile, until nothing is left."""
        try:
            await self._write_group(group)
            while self._queue or self.state is LogState.DEGRADED:
                if self.state is LogState.DEGRADED:
                    await self._catch_up()
                elif group := self._take():
                    await self._write_group(group)
        finally:
            self._writer = None
            self._settle_idle()

    async def _write_group(self, group: _Group) -> None:
        try:
            await self._commit(group)
            self._timed()
        except StoreUnavailable as failure:
            self._failed(failure)
            self._too_much = _size(_flat(group))
            self._hold(group)
            self._hold(list(self._taken()))  # what came while the store was tried: nobody puts it into the queue again

    async def _commit(self, group: _Group) -> None:
        """Write a group, and tell its sources: those that are told are taken out of it. Raises `StoreUnavailable` with
        the others left in it."""
        if not self._claims_hold():
            lapsed = StaleFence("this node's lease has lapsed")
            self._done(group, [lapsed] * len(_flat(group)))
            return
        try:
            refusals = await self._store.commit(_flat(group))
        except StoreUnavailable:
            raise
        except StoreError as failure:
            # No use in trying again: one of them asks for the impossible. It must not hold up the others.
            if len(group) == 1:
                source, steps = group.pop()
                _tell(source, steps, failure)
            while group:
                await self._commit([group[0]])
                del group[0]
        else:
            self._done(group, refusals)

    def _done(self, group: _Group, refusals: Refusals) -> None:
        place = 0
        for source, steps in group:
            reasons = [reason for reason in refusals[place : place + len(steps)] if reason is not None]
            place += len(steps)
            _tell(source, steps, reasons[0] if reasons else None)
        group.clear()

    def _timed(self) -> None:
        """A group is written. Those that are held while the store fails would tell of the outage only."""
        self.counters.append_seconds.observe(time.perf_counter() - self._taken_since)

    def _settle_idle(self) -> None:
        if not self._queue and not self._backlog and self._writer is None:
            self._idle.set()
        else:
            self._schedule()

    # Holding

    def _failed(self, failure: StoreUnavailable) -> None:
        if self.state is LogState.HEALTHY:
            self.counters.outages += 1
            what = "live traffic goes on from memory" if self._holds else "new requests are refused"
            log_event(logging.ERROR, "store.degraded", f"the store fails ({failure}); {what}")
        self.state = advance(LOG, self.state, LogStep.STORE_FAILED)

    def _hold(self, group: _Group) -> None:
        if self._holds:
            self._tell_holding(True)  # other nodes must not deny what their clients are about to see here
        for source, steps in group:
            if isinstance(source, _Waiter) and not self._holds:
                source.refused(steps, StoreUnavailable("the store fails"))
                continue
            if self._holds:
                steps = _unlimited(steps)
            self._backlog.append((source, steps))
            self._held += _events(steps)
            self._held_bytes += _size(steps)
            if self._holds:
                self.counters.events_held += _events(steps)
                source.accepted(steps)
        if self._held >= self._most_held or self._held_bytes >= _MOST_HELD_BYTES:
            self.has_room = False
            self._room.clear()

    def _tell_holding(self, holding: bool) -> None:
        if holding != self._told_holding:
            self._told_holding = holding
            self._on_holding(holding)

    async def _catch_up(self) -> None:
        """Try to write the backlog until it is empty; `_flush` adds to its end meanwhile."""
        delay = _RETRY_FIRST
        while self.state is LogState.DEGRADED:
            try:
                await self._write_backlog()
            except StoreUnavailable as failure:
                self._failed(failure)
                await asyncio.sleep(delay)
                delay = min(delay * 2, _RETRY_MOST)
            else:
                self.state = advance(LOG, self.state, LogStep.STORE_CAUGHT_UP)
                self._tell_holding(False)
                log_event(logging.WARNING, "store.recovered", "the store is back; everything held is written")

    async def _write_backlog(self) -> None:
        if self._claims_hold():  # else nothing of it is written
            await self._probe()
        while self._backlog:
            group = _front(self._backlog)
            told = len(group)
            try:
                await self._commit(group)
            finally:
                self._take_from_backlog(told - len(group))
            self._groups += 1
            if self._held < self._most_held and self._held_bytes < _MOST_HELD_BYTES:
                self.has_room = True
                self._room.set()

    def _take_from_backlog(self, parts: int) -> None:
        for _ in range(parts):
            _, steps = self._backlog.popleft()
            self._held -= _events(steps)
            self._held_bytes -= _size(steps)

    async def _probe(self) -> None:
        """Write something, and take it away again. Where nothing is held that would show it (`refuse`), as much as
        failed: a full disk has room for a little."""
        await self._store.probe(1 if self._backlog else self._too_much)


class Steps:
    """A source for steps that nobody waits for."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def take(self) -> Sequence[Step]:
        return self._steps

    def accepted(self, steps: Sequence[Step]) -> None:
        pass

    def written(self, steps: Sequence[Step]) -> None:
        pass

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        # Mail to a node that is gone concerns nobody, and whoever lost a claim says so itself.
        level = logging.DEBUG if isinstance(reason, NodeGone | StaleFence | MailFull) else logging.ERROR
        log_event(level, "journal.refused", f"the store refused steps: {reason}")


class _Waiter:
    """A source for steps that somebody waits for."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps = steps

    def take(self) -> Sequence[Step]:
        return self._steps

    def accepted(self, steps: Sequence[Step]) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def written(self, steps: Sequence[Step]) -> None:
        pass

    def refused(self, steps: Sequence[Step], reason: PerdureError) -> None:
        if not self.future.done():
            self.future.set_exception(reason)


def _tell(source: Source, steps: Sequence[Step], refusal: PerdureError | None) -> None:
    """Tell a source what became of its steps. One that fails at that must not keep the news from the others."""
    try:
        if refusal is not None:
            source.refused(steps, refusal)
        else:
            source.accepted(steps)
            source.written(steps)
    except Exception:
        _logger.exception("a source of the journal failed", extra={"action": "journal.source"})


def _front(parts: Iterable[_Part]) -> _Group:
    """As many of the parts as one commit should hold."""
    group: _Group = []
    count = size = 0
    for part in parts:
        group.append(part)
        rows, its_size, _ = weigh(part[1])
        count, size = count + rows, size + its_size
        if count >= _GROUP_STEPS or size >= _GROUP_BYTES:
            break
    return group


def _flat(group: _Group) -> list[Step]:
    return [step for _, steps in group for step in steps]


def _unlimited(steps: Sequence[Step]) -> Sequence[Step]:
    """Steps that are held count as accepted: they must not be refused for a limit when they are written."""
    if not any(isinstance(step, PutSession | OpenStream) for step in steps):
        return steps
    return [_without_limit(step) for step in steps]


def _without_limit(step: Step) -> Step:
    if isinstance(step, PutSession):
        return replace(step, limits=None)
    return replace(step, most_calls=None) if isinstance(step, OpenStream) else step


def _events(steps: Sequence[Step]) -> int:
    return sum(
        len(step.events) if isinstance(step, Append) else len(step.payloads)
        for step in steps
        if isinstance(step, Append | Forward)
    )


def _size(steps: Sequence[Step]) -> int:
    """Bytes of other people's making in the steps, nearly."""
    events = sum(len(event.payload) for step in steps if isinstance(step, Append) for event in step.events)
    events += sum(len(step.message) for step in steps if isinstance(step, SendMail))
    events += sum(len(payload) for step in steps if isinstance(step, Forward) for payload in step.payloads)
    return events + sum(len(call.request) for step in steps if isinstance(step, OpenStream) for call in step.calls)


def _raise_first(refusals: Refusals) -> None:
    for refusal in refusals:
        if refusal is not None:
            raise refusal
