"""Makes what serves an upstream: a `Hosted` for an app, and single lanes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakSet

from perdure._core.durable_calls import CallClient
from perdure._core.envelope import SERVER
from perdure._core.eras import Era
from perdure._core.ids import RecordKind
from perdure._core.jsonrpc import JsonObject
from perdure._core.limits import Caller
from perdure.errors import Misuse
from perdure.gateway.call_runtime import UpstreamCallRuntime
from perdure.gateway.changes import UpstreamChanges
from perdure.gateway.children import Children, program_of, shared_reaper
from perdure.gateway.config import HEADER_VALUE
from perdure.gateway.face_handler import FaceHandler
from perdure.gateway.known_era import KnownEra
from perdure.gateway.lane import CORRECT_CLIENT, Lane, Reason, SessionReceiver, UpstreamUnavailable
from perdure.gateway.modern_lane import ModernLane, PassesRound
from perdure.gateway.modern_wire import HttpWire, PipeWire
from perdure.gateway.passports import Passport, Passports, session_passport
from perdure.gateway.pipe import PipeLane
from perdure.gateway.pool import OWN, Gone, LanePool, PooledLane, RequestRefused, list_tools
from perdure.gateway.session_runtime import LaneMaker, SessionRuntime
from perdure.gateway.shared_lane import SharedLane, SharedLanes
from perdure.gateway.tool_list import ToolList
from perdure.gateway.upstream import CallerLacks, Upstream
from perdure.gateway.watched_lane import NO_CALLER, MakeFor, MakeRoom, Seats, WatchedLane, caller_of, no_room
from perdure.gateway.web import WebLane, WebUpstream
from perdure.remote.endpoint import Refused as NotUsable
from perdure.remote.endpoint import token_provider
from perdure.runtime.base import Outlet, Runtime
from perdure.runtime.health import Health
from perdure.runtime.hosted import Hosted, Started
from perdure.settings import Settings
from perdure.store.records import SessionRecord

_TOOL_SECONDS = 1.0
"""How long a durable call waits until its tool is known. A server that is still starting takes longer; its tool is
served as one without a description then."""

_ANSWER_SECONDS = 10.0
"""How long a server that has started may take to answer what no client waits for: its tools, a handshake."""


class Values(NamedTuple):
    """What the upstream gets of its caller."""

    texts: tuple[tuple[str, str], ...] = ()
    """The variables of a program, or the headers for an address."""
    secrets: frozenset[str] = frozenset()
    """The parts of them that came from the caller."""


Place = tuple[Values, Passport | None]
"""What the upstream gets of a caller and its request. Requests that differ in it share no lane."""


def reach(upstream: Upstream) -> WebUpstream:
    """The way to an upstream at an address, for all lanes. Raises `Misuse`."""
    address = upstream.address
    assert address is not None
    try:
        return WebUpstream(
            address.url,
            headers={} if upstream.needs_caller else upstream.values_for({}, ""),
            token=token_provider(address.token_env, address.token_file, os.environ),
            patience=upstream.patience,
            mask=upstream.mask,
        )
    except NotUsable as refused:
        raise Misuse(upstream.mask(str(refused))) from None


@dataclass(frozen=True, kw_only=True)
class UpstreamLanes:
    upstream: Upstream
    server: Children | WebUpstream
    health: Health
    eras: Mapping[Era, KnownEra]
    """By the era of the clients."""
    seats: Seats | None
    shared: SharedLanes = field(default_factory=SharedLanes)
    passports: Passports = field(default_factory=Passports)

    def place(self, caller: Caller, origin: object) -> Place:
        """Raises `UpstreamUnavailable`."""
        return self._values(caller, origin), self.passports.shared(
            caller, origin
        ) if self.upstream.passes_tokens else None

    def _values(self, caller: Caller, origin: object) -> Values:
        if not self.upstream.needs_caller:
            return Values()
        name = self.upstream.name
        headers: Mapping[str, str] = getattr(origin, "headers", {})
        try:
            values = self.upstream.values_for(headers, caller.owner)
            secrets = self.upstream.secrets_of(headers, caller.owner)
        except CallerLacks as lacks:
            sentence = f"The server {name} needs the {lacks.what} of its caller, and {lacks}."
            raise UpstreamUnavailable(Reason.UNAUTHORIZED, sentence, advice=CORRECT_CLIENT) from None
        for key, value in values.items():  # not what was seen: it may be a secret
            if self.upstream.address is not None and not HEADER_VALUE.fullmatch(value):
                sentence = f"The header {key} for the server {name} can have visible ASCII characters only."
                raise UpstreamUnavailable(Reason.UNAUTHORIZED, sentence, advice=CORRECT_CLIENT)
            if "\0" in value:
                sentence = f"The variable {key} for the server {name} cannot have a NUL character."
                raise UpstreamUnavailable(Reason.UNAUTHORIZED, sentence, advice=CORRECT_CLIENT)
        return Values(tuple(values.items()), secrets)

    def _sharer(self, caller: Caller) -> Caller | None:
        """The caller whose process the lanes of a caller share; `None` if each has its own."""
        program = self.upstream.program
        if program is not None and program.process == "shared":
            return NO_CALLER
        return caller if program is not None and program.process == "principal" and caller.owner else None

    def admitting(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        if self.seats is None:
            return nullcontext()
        if (sharer := self._sharer(caller)) is None:
            return self.seats.reserving(caller, holds=True)
        return self.shared.admitting(sharer.owner, self.seats.reserving(sharer))

    def make_for_session(self, receiver: SessionReceiver, record: SessionRecord, origin: object) -> Lane:
        """Raises `UpstreamUnavailable`, as the other does."""
        caller = Caller(record.owner, record.address)
        passport = session_passport(origin) if self.upstream.passes_tokens else None
        return self._make(receiver, caller, (self._values(caller, origin), passport))

    def make_for_pool(self, pooled: PooledLane, caller: Caller, origin: object) -> Lane:
        return self._make(pooled, caller, self.place(caller, origin), pooled.passes_round)

    def make_for_check(self, receiver: SessionReceiver) -> Lane:
        return self._make(receiver, NO_CALLER, self.place(NO_CALLER, None))

    def _make(
        self,
        receiver: SessionReceiver,
        caller: Caller,
        place: Place,
        passes_round: PassesRound | None = None,
    ) -> Lane:
        """`passes_round`: of a lane for clients of 2026-07-28 (`ModernLane`). A process that they share with sessions
        is spoken to as for sessions."""
        values, passport = place
        if self.upstream.passes_tokens and passport is None:
            sentence = f"The server {self.upstream.name} needs the token of its caller, which comes with a request."
            raise UpstreamUnavailable(Reason.UNAUTHORIZED, sentence)
        if (sharer := self._sharer(caller)) is None:
            return self._make_own(receiver, caller, place, passes_round)
        own_place = sharer.owner, values
        return SharedLane(self.shared, own_place, lambda own: self._make_own(own, sharer, place), receiver)

    def _make_own(
        self,
        receiver: SessionReceiver,
        caller: Caller,
        place: Place,
        passes_round: PassesRound | None = None,
    ) -> Lane:
        values, passport = place
        upstream = self.upstream
        if values.secrets:
            upstream = replace(upstream, secrets=upstream.secrets | values.secrets)
        mask = upstream.mask
        make: MakeFor
        match self.server:
            case Children() as children:
                program = None
                if upstream.needs_caller:
                    program = replace(children.program, upstream=upstream, env=dict(values.texts))

                def make(own: SessionReceiver, era: Era, probe: float | None) -> Lane:
                    if era is Era.SESSION:
                        return PipeLane(children, own, program=program)
                    return ModernLane(PipeWire(children, program, probe), own, passes_round, mask)

            case WebUpstream() as web:
                if upstream.needs_caller:
                    token = None if passport is None else passport.token
                    web = web.for_caller(dict(values.texts), token, mask)
                mask = web.mask

                def make(own: SessionReceiver, era: Era, probe: float | None) -> Lane:
                    if era is Era.SESSION:
                        return WebLane(web, own)
                    return ModernLane(HttpWire(web.route()), own, passes_round, mask)

        return WatchedLane(
            make,
            receiver,
            era=self.eras[Era.SESSION if passes_round is None else Era.MODERN],
            health=self.health,
            caller=caller,
            seats=self.seats,
            call_timeout=upstream.call_timeout,
            has_callers_credentials=upstream.address is not None and upstream.needs_caller,
            mask=mask,
        )


@asynccontextmanager
async def lanes_of(
    upstream: Upstream,
    health: Health | None = None,
    make_room: MakeRoom = no_room,
    children: Children | None = None,
) -> AsyncIterator[UpstreamLanes]:
    """Make lanes during a block, and end all processes after it. `children`: those of a caller that ends them."""
    health = health or Health()
    pinned = None if upstream.era == "auto" else Era(upstream.era)
    probing = asyncio.Lock if upstream.is_program else nullcontext
    eras = {front: KnownEra(pinned=pinned, front=front, probing=probing()) for front in Era}
    async with AsyncExitStack() as stack:
        server: Children | WebUpstream
        seats = None
        if upstream.program is None:
            server = reach(upstream)
            stack.push_async_callback(server.aclose)
        elif children is not None:
            server = children
        else:
            reaper = await stack.enter_async_context(shared_reaper())
            server = Children(program_of(upstream), reaper=reaper, numbers=health.numbers)
            stack.push_async_callback(server.aclose)
            server.warm_up()
        if isinstance(server, Children) and upstream.program is not None:
            each = upstream.program.max_caller_processes
            seats = Seats(name=upstream.name, children=server, each=each, make_room=make_room)
        yield UpstreamLanes(upstream=upstream, server=server, health=health, eras=eras, seats=seats)


@dataclass(frozen=True, kw_only=True)
class UpstreamRuntimes:
    lanes: LaneMaker
    pool: LanePool
    admitting: Callable[[Caller], AbstractAsyncContextManager[None]]
    _sessions: WeakSet[SessionRuntime] = field(default_factory=WeakSet)
    repeats_sticky = True

    @property
    def answers_within(self) -> float:
        program = self.lanes.upstream.program
        return _ANSWER_SECONDS + (0.0 if program is None else program.start_timeout)

    @property
    def needs_principal(self) -> bool:
        return self.lanes.upstream.needs_caller

    @property
    def waits_for_readers(self) -> bool:
        return not self.lanes.upstream.is_program  # a pipe carries several calls, and must not wait for one's reader

    @property
    def runs_at_home(self) -> bool:
        return self.lanes.upstream.is_program

    @property
    def outlives_runtimes(self) -> bool:
        return not self.lanes.upstream.is_program

    def load(self, record: SessionRecord, outlet: Outlet) -> Runtime:
        if record.kind is RecordKind.CALL:
            return UpstreamCallRuntime(self.pool, record, outlet)
        runtime = SessionRuntime(self.lanes, record, outlet)
        self._sessions.add(runtime)
        return runtime

    def restart(self) -> None:
        """Go on with new lanes, because the upstream's code has changed."""
        self.lanes.tools.is_stale = True
        self.pool.retire()
        for runtime in list(self._sessions):
            runtime.restart()

    def may_run_again(self, record: SessionRecord, tool: str) -> bool | None:
        return self.lanes.tools.may_run_again(tool)

    async def tools(self, record: SessionRecord, origin: object) -> Mapping[str, JsonObject]:
        async with self.pool.lane(NO_CALLER, OWN) as lane:
            # Its hints alone: steps of a tool that runs elsewhere are not recorded here, whatever its `_meta` says.
            return {str(t.get("name")): {"annotations": t.get("annotations")} for t in await list_tools(lane)}


@dataclass(frozen=True)
class UpstreamTools:
    """The tools of an upstream, for durable calls."""

    _pool: LanePool
    _reading: set[asyncio.Task[None]] = field(default_factory=set)

    serves_tasks = False

    @property
    def server_info(self) -> JsonObject:
        return {SERVER: self._pool.server_info}

    async def tool(self, name: str, owner: str, client: CallClient, origin: Any) -> JsonObject | None:
        tools = self._pool.tools
        if tools.tools is None:
            if not self._reading:
                task = asyncio.create_task(self._read(client, origin), name="perdure-tools")
                self._reading.add(task)
                task.add_done_callback(self._reading.discard)
            await asyncio.wait(set(self._reading), timeout=_TOOL_SECONDS)
        return (tools.tools or {}).get(name)

    async def tools(self, owner: str, client: CallClient, origin: Any) -> Sequence[JsonObject]:
        return list((self._pool.tools.tools or {}).values())

    async def _read(self, client: CallClient, origin: Any) -> None:
        """Take a lane, on which the call can run next: its handshake reads the list."""
        try:
            async with self._pool.lane(caller_of(origin), client, origin):
                pass
        except (UpstreamUnavailable, RequestRefused, Gone):
            pass  # the call itself is answered with the reason


def host_upstream(upstream: Upstream, settings: Settings, *, children: Children | None = None) -> Hosted:
    """Prepare an upstream to be run by an app. `children`: those of a caller that ends them."""
    health = Health(numbers=None if children is None else children.numbers)

    @asynccontextmanager
    async def start() -> AsyncIterator[Started]:
        async def make_room(caller: Caller | None) -> bool:
            return await pool.end_unused(caller)

        async with lanes_of(upstream, health, make_room, children) as lanes:
            tools = ToolList(upstream.may_run_again)
            pool = LanePool(upstream=upstream, make=lanes.make_for_pool, place=lanes.place, tools=tools)
            maker = LaneMaker(upstream=upstream, make=lanes.make_for_session, tools=tools, numbers=health.numbers)
            runtimes = UpstreamRuntimes(lanes=maker, pool=pool, admitting=lanes.admitting)
            if isinstance(lanes.server, Children):
                lanes.server.on_restart.append(runtimes.restart)
            try:
                changes = UpstreamChanges(pool, runtimes.answers_within)
                upstream_tools = UpstreamTools(pool)
                yield Started(
                    runtimes=runtimes,
                    sessionless=FaceHandler(pool, upstream_tools, settings),
                    tools=upstream_tools,
                    changes=None if settings.eras == "session" else changes,
                )
            finally:
                await pool.aclose()
                if maker.closing:
                    await asyncio.wait(maker.closing)

    return Hosted(web=None, start=start, name=upstream.name, health=health, passes_tokens=upstream.passes_tokens)


@asynccontextmanager
async def lane_for_check(upstream: Upstream, receiver: SessionReceiver) -> AsyncIterator[Lane]:
    """Make one lane, not opened yet."""
    async with lanes_of(upstream) as lanes:
        yield lanes.make_for_check(receiver)
