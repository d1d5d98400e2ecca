"""Watches the lanes of an upstream: how it is doing, how many processes each caller has, and how long requests take."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from perdure._core.eras import Era, other_era
from perdure._core.handshakes import is_for_one_client
from perdure._core.jsonrpc import JsonObject
from perdure._core.limits import Caller, Full
from perdure.errors import TooManyProcesses
from perdure.gateway.children import Children
from perdure.gateway.known_era import KnownEra, open_in_era
from perdure.gateway.lane import Lane, Lost, Opened, Reason, RequestKey, SessionReceiver, UpstreamUnavailable
from perdure.runtime.base import CALLER
from perdure.runtime.health import Health, UpstreamState

NO_CALLER = Caller("", "")
"""The gateway itself."""


def caller_of(request: Any) -> Caller:
    """The caller of an HTTP request, as the edge has found it."""
    scope = getattr(request, "scope", None) or {}
    caller: Caller = scope.get(CALLER, NO_CALLER)
    return caller


HELD_SECONDS = 10.0
"""How long a seat is kept for a session that has opened: its lane takes it at once, unless the machine is busy."""

MakeRoom = Callable[[Caller | None], Awaitable[bool]]
"""Ends a lane that is not used, of that caller or any. Returns whether there was one."""


async def no_room(caller: Caller | None) -> bool:
    """For an upstream without lanes that are kept for later."""
    return False


@dataclass(slots=True, eq=False, kw_only=True)
class Seats:
    """Counts the processes of an upstream by their callers, and those that sessions which are about to open need."""

    name: str
    children: Children
    each: int
    """The most of one caller; the gateway's own are not limited."""
    make_room: MakeRoom
    _taken: Counter[Caller] = field(default_factory=Counter)
    _reserved: Counter[Caller] = field(default_factory=Counter)
    _held: defaultdict[Caller, deque[asyncio.TimerHandle]] = field(default_factory=lambda: defaultdict(deque))
    """Reservations whose blocks have ended."""

    @asynccontextmanager
    async def reserving(self, caller: Caller, *, holds: bool = False) -> AsyncIterator[None]:
        """Keep a seat free during a block; `holds`: and after it, until a lane takes it. Raises `TooManyProcesses`."""
        if (full := await self._lacks(caller)) is not None:
            of_caller = full is Full.FOR_CALLER
            limit = self.each if of_caller else self.children.program.settings.max_processes
            raise TooManyProcesses(self.name, limit, of_caller=of_caller)
        self._reserved[caller] += 1
        try:
            yield
        except BaseException:
            self._give_up(caller)
            raise
        if holds:
            timer = asyncio.get_running_loop().call_later(HELD_SECONDS, self._let_go, caller)
            self._held[caller].append(timer)
        else:
            self._give_up(caller)

    def _let_go(self, caller: Caller) -> None:
        """Give up the oldest seat that was held."""
        if held := self._held.get(caller):
            held.popleft().cancel()
            if not held:
                del self._held[caller]
            self._give_up(caller)

    def _give_up(self, caller: Caller) -> None:
        self._reserved -= Counter({caller: 1})

    async def take(self, caller: Caller) -> None:
        """Take a seat for a lane. Raises `UpstreamUnavailable` if the caller has too many; that all have too many is
        seen at the start of the process."""
        self._let_go(caller)
        if await self._lacks(caller) is Full.FOR_CALLER:
            sentence = f"You have {self.each} processes of the server {self.name}, your limit (max_caller_processes)."
            raise UpstreamUnavailable(Reason.LIMIT, sentence)
        self._taken[caller] += 1

    def leave(self, caller: Caller) -> None:
        self._taken -= Counter({caller: 1})

    async def _lacks(self, caller: Caller) -> Full | None:
        """Why there is no seat for a caller, after lanes that are not used have made room."""
        while (full := self._full(caller)) is not None:
            if not await self.make_room(caller if full is Full.FOR_CALLER else None):
                break
        return full

    def _full(self, caller: Caller) -> Full | None:
        if caller != NO_CALLER and self._taken[caller] + self._reserved[caller] >= self.each:
            return Full.FOR_CALLER
        return Full.FOR_ALL if self.children.room <= self._reserved.total() else None


_OF_ALL_REQUESTS = (Reason.UNREACHABLE, Reason.UNAUTHORIZED)
"""Why no request can be served."""


MakeFor = Callable[[SessionReceiver, Era, float | None], Lane]
"""As `MakeLane`, for a receiver."""


@dataclass(eq=False)
class WatchedLane:
    """A lane in the era that the upstream speaks. It reports the health of its upstream, has a seat, and gives up
    requests that take too long."""

    _make: MakeFor
    _receiver: SessionReceiver
    _: KW_ONLY
    era: KnownEra
    health: Health
    caller: Caller
    seats: Seats | None
    call_timeout: float | None
    has_callers_credentials: bool = False
    mask: Callable[[str], str] = str
    """Hides the secrets that the upstream is given: what it says of itself is logged and shown."""
    _era: Era = field(init=False)
    _lane: Lane = field(init=False)
    """The one that is tried or, when it is open, used; in the era above."""
    _has_lane: bool = False
    _has_seat: bool = False
    _timers: dict[RequestKey, asyncio.TimerHandle] = field(default_factory=dict)
    _begun: dict[RequestKey, float] = field(default_factory=dict)
    _is_renewing: bool = False
    """The upstream has lost the session, and the handshake of the next one was not answered."""

    def __post_init__(self) -> None:
        receiver = self._receiver
        self.on_notification, self.on_position = receiver.on_notification, receiver.on_position
        self.on_ask, self.on_ask_withdrawn = receiver.on_ask, receiver.on_ask_withdrawn

    @property
    def state(self) -> JsonObject:
        return self._lane.state

    def _make_lane(self, era: Era, probe: float | None) -> Lane:
        self._era, self._lane, self._has_lane = era, (lane := self._make(self, era, probe)), True
        self.notify, self.reply, self.listen = lane.notify, lane.reply, lane.listen
        return lane

    async def open(self, client_params: JsonObject, state: JsonObject | None = None) -> Opened:
        if self.seats is not None:
            await self.seats.take(self.caller)
            self._has_seat = True
        began = time.perf_counter()
        try:
            opened = await open_in_era(self.era, self._make_lane, client_params, state)
        except UpstreamUnavailable as unmasked:
            failure = unmasked.masked(self.mask)
            self._report(failure)
            raise failure from None
        if opened.is_new:  # otherwise the upstream was not asked anything yet
            self.health.report(UpstreamState.UP)
            self.health.numbers.upstream_start_seconds.observe(time.perf_counter() - began)
        return replace(opened, mask=self.mask)

    def request(self, key: RequestKey, method: str, params: JsonObject | None) -> None:
        self._begun[key] = time.perf_counter()
        self._lane.request(key, method, params)
        self._limit(key)

    def follow(self, key: RequestKey, method: str, params: JsonObject | None, state: JsonObject) -> None:
        self._lane.follow(key, method, params, state)
        self._limit(key)

    def _limit(self, key: RequestKey) -> None:
        if self.call_timeout is not None:
            self._timers[key] = asyncio.get_running_loop().call_later(self.call_timeout, self._time_out, key)

    def cancel(self, key: RequestKey, params: JsonObject | None) -> None:
        self._forget(key)
        self._lane.cancel(key, params)

    async def aclose(self, *, ended: bool) -> None:
        try:
            if self._has_lane:
                await self._lane.aclose(ended=ended)
        finally:
            self._leave()

    # What the lane reports

    def _report(self, failure: UpstreamUnavailable) -> None:
        """Note why the upstream has not served a handshake, or a request."""
        health, waits = self.health, failure.retry_after
        if self.has_callers_credentials and failure.challenge is not None:
            health.report(UpstreamState.UP)  # it refuses one caller
        elif is_for_one_client(failure.code, is_up=health.state is UpstreamState.UP):
            health.note_failure(str(failure))
        elif failure.reason is not Reason.LIMIT:
            is_down = waits is None or failure.reason is Reason.UNREACHABLE  # which was waited for already
            next_try = None if waits is None else time.time() + waits
            health.report(UpstreamState.DOWN if is_down else UpstreamState.BACKING_OFF, str(failure), next_try=next_try)

    def _report_up(self) -> None:
        # The processes of a program do not tell of each other: that one answers does not say that the next one starts.
        if self.seats is None:
            self._is_renewing = False
            if self.health.state is not UpstreamState.UP:
                self.health.report(UpstreamState.UP)

    async def on_gone(self) -> JsonObject | None:
        self._is_renewing = True
        return await self._receiver.on_gone()

    async def on_renewed(self, opened: Opened) -> None:
        self._report_up()
        await self._receiver.on_renewed(opened)

    def on_answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        if (began := self._forget(key)) is not None:
            self.health.numbers.upstream_request_seconds.observe(time.perf_counter() - began)
        self._report_up()
        self._receiver.on_answer(key, body, failed=failed)

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        self._forget(key)
        lost = lost.masked(self.mask)
        if lost.has_other_era:
            self.era.learnt = other_era(self._era)  # the upstream was replaced
        # All else may be about this request alone.
        if lost.unavailable is not None and (self._is_renewing or lost.unavailable.reason in _OF_ALL_REQUESTS):
            self._report(lost.unavailable)
        self._receiver.on_lost(key, lost)

    def on_closed(self, why: str) -> None:
        self._leave()
        why = self.mask(why)
        self.health.note_failure(why)
        self._receiver.on_closed(why)

    def _forget(self, key: RequestKey) -> float | None:
        """Stop the request's timer. Returns when the request began."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        return self._begun.pop(key, None)

    def _time_out(self, key: RequestKey) -> None:
        self._forget(key)
        self._lane.cancel(key, {"reason": "it took too long"})
        why = f"the server did not answer within {self.call_timeout:g} s (call_timeout)"
        self._receiver.on_lost(key, Lost(ran=True, why=why, is_final=True))

    def _leave(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self.seats is not None and self._has_seat:
            self._has_seat = False
            self.seats.leave(self.caller)
