"""Finds out which era an upstream speaks, and remembers it until a lane cannot be opened.

Each era is tried on a lane of its own: at a server over a pipe the first request may decide the era for the life of its
process, so a child that was asked for one era does not serve the other. Servers with sessions answer `server/discover`
with any error, end, or say nothing: a *probe* is a lane at 2026-07-28 for which each of that is an answer.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from perdure._core.eras import Era, eras_to_try
from perdure._core.jsonrpc import JsonObject
from perdure.gateway.lane import Lane, Opened, Reason, UpstreamUnavailable

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


MakeLane = Callable[[Era, float | None], Lane]
"""Makes a lane of an era. The second argument is that of a probe: the seconds that a program has to answer
(`PipeLane`)."""


async def open_in_era(
    known: KnownEra,
    make: MakeLane,
    client_params: JsonObject,
    state: JsonObject | None = None,
    *,
    probe_seconds: float = PROBE_SECONDS,
) -> Opened:
    """Open a lane in the era that the upstream speaks: of those that `make` makes, one of each era, the first that
    opens. A lane that does not open is closed before the next one is made. Raises `UpstreamUnavailable`."""

    async def attempt(era: Era, probe: float | None) -> Opened:
        lane = make(era, probe)
        try:
            opened = await lane.open(client_params, state)
        except UpstreamUnavailable as failure:
            if failure.reason not in _NOT_OF_ERA:
                known.learnt = None
            await lane.aclose(ended=True)  # before another process is started
            raise
        known.learnt = era
        return opened

    refusals, has_probed = list[UpstreamUnavailable](), False
    if known.front is Era.MODERN and known.pinned is None:
        async with known.probing:
            if known.learnt is None:
                try:
                    return await attempt(Era.MODERN, probe_seconds)
                except UpstreamUnavailable as failure:
                    if failure.reason in _NOT_OF_ERA:
                        raise
                    known.learnt, has_probed = Era.SESSION, True
    loop = asyncio.get_running_loop()
    began = loop.time()
    for era in eras_to_try(pinned=known.pinned, known=known.learnt, front=known.front):
        # After a refused handshake, whose cause may be one client's params, no start is counted as failed.
        is_probe = era is Era.MODERN and bool(refusals)
        try:
            opened = await attempt(era, math.inf if is_probe else None)
        except UpstreamUnavailable as failure:
            if failure.reason is not Reason.VERSION and not (is_probe and failure.reason in _ENDS_PROBE):
                raise
            refusals.append(failure)
        else:
            if has_probed and era is Era.SESSION and loop.time() - began > probe_seconds:
                known.learnt = None  # it starts so slowly that the probe may have been too short
            return opened
    code = next((refusal.code for refusal in refusals if refusal.code is not None), None)
    raise UpstreamUnavailable(Reason.VERSION, " ".join(map(str, refusals)), code=code)
