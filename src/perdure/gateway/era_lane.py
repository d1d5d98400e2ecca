"""Finds out which era an upstream speaks, and remembers it until a lane cannot be opened.

Each era is tried on a lane of its own: at a server over a pipe the first request may decide the era for the life of its
process, so a child that was asked for one era does not serve the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from perdure._core.eras import Era, eras_to_try
from perdure._core.jsonrpc import JsonObject
from perdure.gateway.lane import AskKey, Lane, Opened, Reason, RequestKey, UpstreamUnavailable


@dataclass(kw_only=True)
class KnownEra:
    """The era of one upstream, as all its lanes for the clients of one era know it."""

    front: Era = Era.SESSION
    """Of the clients."""

    pinned: Era | None = None
    """By the configuration."""
    learnt: Era | None = None


class EraLane:
    """A lane in the era that the upstream speaks: of `lanes`, which makes one of each era, the first that opens."""

    def __init__(self, era: KnownEra, lanes: Mapping[Era, Callable[[], Lane]]) -> None:
        self._era = era
        self._lanes = lanes
        self._lane: Lane

    @property
    def state(self) -> JsonObject:
        return self._lane.state

    def listen(self, wanted: bool) -> None:
        self._lane.listen(wanted)

    async def open(self, client_params: JsonObject, state: JsonObject | None = None) -> Opened:
        era, refusals = self._era, list[str]()
        for tried in eras_to_try(pinned=era.pinned, known=era.learnt, front=era.front):
            self._lane = self._lanes[tried]()
            try:
                opened = await self._lane.open(client_params, state)
            except UpstreamUnavailable as refused:
                era.learnt = None
                if refused.reason is not Reason.VERSION:
                    raise
                await self._lane.aclose(ended=True)
                refusals.append(str(refused))
            else:
                era.learnt = tried
                return opened
        raise UpstreamUnavailable(Reason.VERSION, " ".join(refusals))

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
