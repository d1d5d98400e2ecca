"""Keeps which resources the listeners of all nodes want to hear of.

Each node writes what its own listeners want, a batch at a time, beside its changes stream; so what a node wanted is
kept as long as its stream is, and the node may have died. A resource that no listener wants any more stays for a
while, because its listener may come back and asks what has changed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from perdure._core.changes import MAX_UNION, WantedUris, decode_wanted, heard_since
from perdure._core.ids import SessionId
from perdure._core.limits import Caller, share_of
from perdure.errors import PerdureError
from perdure.log.journal import Steps
from perdure.log.stream import Stream
from perdure.sessions.context import ServerContext
from perdure.store.records import AskRecord
from perdure.store.steps import CloseAsk, OpenAsk

_ID_BYTES = 16


class TooManyResources(PerdureError):
    """The listeners of all nodes would name more resources than they may; or those of one caller here would."""

    def __init__(self, limit: int, *, of_caller: bool) -> None:
        super().__init__()
        self.limit = limit
        self.of_caller = of_caller


class WantedResources:
    """The resources that are wanted, here and elsewhere."""

    def __init__(self, context: ServerContext, own: Callable[[], Stream | None], *, linger: float) -> None:
        self._context = context
        self._own = own
        self._linger = linger
        self._listeners: Counter[str] = Counter()
        """How many listeners here want each resource."""
        self._rows: dict[str, WantedUris] = {}
        """What this node has written."""
        self._callers: dict[str, Caller] = {}
        """Of the rows, whose listeners named their resources first."""
        self._unused: dict[str, float] = {}
        """Of the rows, those that no listener needs, and since when."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def here(self) -> Collection[str]:
        """The resources that this node has written that it wants."""
        return {uri for row in self._rows.values() for uri in row.uris}

    async def everywhere(self, session: SessionId) -> dict[str, float]:
        """The resources that any node wants, and since when each is heard of without a break. Raises `StoreError`."""
        asks = await self._context.store.asks(session)
        return heard_since([*(decode_wanted(ask.request) for ask in asks), *self._rows.values()])

    async def add(self, session: SessionId, uris: Iterable[str], union: Collection[str], caller: Caller) -> bool:
        """Want resources for a listener here; tells whether that is news for the other nodes. Raises `StoreError`, or
        `TooManyResources` beyond `MAX_UNION` or the caller's share of it. What was added is given back with
        `release`."""
        uris = list(uris)
        new = [uri for uri in uris if uri not in self.here]
        if len(union) + sum(uri not in union for uri in new) > MAX_UNION:
            raise TooManyResources(MAX_UNION, of_caller=False)
        share = share_of(MAX_UNION, self._context.settings.max_share)
        own = sum(len(self._rows[name].uris) for name, whose in self._callers.items() if whose == caller)
        if new and own + len(new) > share:
            raise TooManyResources(share, of_caller=True)
        self._listeners.update(uris)
        try:
            if new:
                await self._write(session, WantedUris(uris=tuple(new), since=self._context.clock()), caller)
        except BaseException:
            self.release(uris)
            raise
        return bool(new)

    async def write_again(self, session: SessionId) -> None:
        """Write all of it once more: this node has begun another changes stream."""
        self._unused = {}
        for name, row in list(self._rows.items()):
            await self._write(session, row, self._callers[name])
            del self._rows[name], self._callers[name]
        self._look()

    async def _write(self, session: SessionId, row: WantedUris, caller: Caller) -> None:
        name, stream = self._context.random(_ID_BYTES).hex(), self._own()
        if stream is None:
            return  # all of it is written again with the next stream
        ask = AskRecord(session=session, id=name, stream=stream.id, request=row.encode(), node=self._context.node)
        self._rows[name], self._callers[name] = row, caller
        try:
            await self._context.journal.write(OpenAsk(record=ask))
        except BaseException:
            del self._rows[name], self._callers[name]
            raise

    def release(self, uris: Iterable[str]) -> None:
        """A listener here does not want these any more."""
        self._listeners.subtract(list(uris))  # a mapping would count by its values
        self._listeners = +self._listeners
        self._look()

    def _look(self) -> None:
        """See which rows are unused, and have those forgotten that were for long."""
        self.close()
        now = asyncio.get_running_loop().time()
        for name, row in self._rows.items():
            if any(uri in self._listeners for uri in row.uris):
                self._unused.pop(name, None)
            else:
                self._unused.setdefault(name, now)
        gone = [name for name, since in self._unused.items() if since <= now - self._linger]
        stream = self._own()
        if gone and stream is not None:
            self._context.journal.put(Steps([CloseAsk(session=stream.session, id=name) for name in gone]))
            for name in gone:
                del self._rows[name], self._unused[name], self._callers[name]
        if self._unused:
            first = min(self._unused.values()) + self._linger
            self._timer = asyncio.get_running_loop().call_at(first, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
