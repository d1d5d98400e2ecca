"""Finds out which era an upstream speaks, and remembers it until a lane cannot be opened.

Each era is tried on a lane of its own: at a server over a pipe the first request may decide the era for the life of its
process, so a child that was asked for one era does not serve the other. Servers with sessions answer `server/discover`
with any error, end, or say nothing: a *probe* is a lane at 2026-07-28 for which each of that is an answer.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from perdure._core.eras import Era, eras_to_try, other_era
from perdure._core.jsonrpc import JsonObject
from perdure.gateway.lane import AskKey, Lane, Opened, Reason, RequestKey, UpstreamUnavailable

PROBE_SECONDS = 5.0
"""How long a program may be silent at a probe before a session is tried: a client waits meanwhile, and a program that
has started answers at once."""

_NOT_OF_ERA = frozenset(
    {
        Reason.NO_PROGRAM,
        Reason.BACKING_OFF,
        Reason.LIMIT,
        Reason.UNREACHABLE,
        Reason.UNAUTHORIZED,
        Reason.FORBIDDEN,
    }
)
"""Failures of a handshake that say nothing about the era."""

_ENDS_PROBE = (Reason.DIED, Reason.NO_HANDSHAKE)
"""Failures of a probe of a program that has refused a session."""


@dataclass(kw_only=True)
class KnownEra:
    """The era of one upstream, as all its lanes for the clients of one era know it."""

    front: Era = Era.SESSION
    """Of the clients."""

    pinned: Era | None = None
    """By the configuration."""
    learnt: Era | None = None
    probing: AbstractAsyncContextManager[None] = field(default_factory=asyncio.Lock)
    """Held by a lane that probes: the others wait for what it learns, or each would start a process for it. Lanes to an
    address do not wait, because it may be away for long."""


MakeLane = Callable[[float | None], Lane]
"""Makes a lane. The argument is that of a probe: the seconds that a program has to answer (`PipeLane`)."""


class EraLane:
    """A lane in the era that the upstream speaks: of `lanes`, which makes one of each era, the first that opens."""

    def __init__(
        self,
        era: KnownEra,
        lanes: Mapping[Era, MakeLane],
        *,
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        self._era = era
        self._lanes = lanes
        self._probe_seconds = probe_seconds
        self._tried: Era
        self._lane: Lane

    @property
    def state(self) -> JsonObject:
        return self._lane.state

    def listen(self, wanted: bool) -> None:
        self._lane.listen(wanted)

    async def open(self, client_params: JsonObject, state: JsonObject | None = None) -> Opened:
        era, refusals, has_probed = self._era, list[UpstreamUnavailable](), False
        if era.front is Era.MODERN and era.pinned is None:
            async with era.probing:
                if era.learnt is None:
                    try:
                        return await self._try(Era.MODERN, client_params, state, probe=self._probe_seconds)
                    except UpstreamUnavailable as failure:
                        if failure.reason in _NOT_OF_ERA:
                            raise
                        era.learnt, has_probed = Era.SESSION, True
        loop = asyncio.get_running_loop()
        began = loop.time()
        for tried in eras_to_try(pinned=era.pinned, known=era.learnt, front=era.front):
            # After a refused handshake, whose cause may be one client's params, no start is counted as failed.
            is_probe = tried is Era.MODERN and bool(refusals)
            try:
                opened = await self._try(tried, client_params, state, probe=math.inf if is_probe else None)
            except UpstreamUnavailable as failure:
                if failure.reason is not Reason.VERSION and not (is_probe and failure.reason in _ENDS_PROBE):
                    raise
                refusals.append(failure)
            else:
                if has_probed and tried is Era.SESSION and loop.time() - began > self._probe_seconds:
                    era.learnt = None  # it starts so slowly that the probe may have been too short
                return opened
        code = next((refusal.code for refusal in refusals if refusal.code is not None), None)
        raise UpstreamUnavailable(Reason.VERSION, " ".join(map(str, refusals)), code=code)

    async def _try(
        self, era: Era, client_params: JsonObject, state: JsonObject | None, *, probe: float | None
    ) -> Opened:
        """Open a lane, and learn from it."""
        self._tried, self._lane = era, self._lanes[era](probe)
        try:
            opened = await self._lane.open(client_params, state)
        except UpstreamUnavailable as failure:
            if failure.reason not in _NOT_OF_ERA:
                self._era.learnt = None
            await self._lane.aclose(ended=True)  # before another process is started
            raise
        self._era.learnt = era
        return opened

    def request(self, key: RequestKey, method: str, params: JsonObject | None) -> None:
        self._lane.request(key, method, params)

    def follow(self, key: RequestKey, method: str, params: JsonObject | None, state: JsonObject) -> None:
        self._lane.follow(key, method, params, state)

    def cancel(self, key: RequestKey, params: JsonObject | None) -> None:
        self._lane.cancel(key, params)

    def notify(self, method: str, params: JsonObject | None) -> None:
        self._lane.notify(method, params)

    def reply(self, ask: AskKey, response: JsonObject) -> None:
        self._lane.reply(ask, response)

    async def aclose(self, *, ended: bool) -> None:
        await self._lane.aclose(ended=ended)

    def forget_era(self) -> None:
        """Try the other era first at the next lane: the upstream was replaced."""
        self._era.learnt = other_era(self._tried)
