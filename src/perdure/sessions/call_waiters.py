"""Wakes requests that wait for a change of a single call, wherever the call runs."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from perdure._core.ids import NodeId, StreamId


class CallWaiters:
    """The requests of this process that wait: a poll that is held, or a request with the key of a call."""

    def __init__(self, hint: Callable[[NodeId, Sequence[StreamId]], None], others: Callable[[], Iterable[NodeId]]):
        self._hint = hint
        self._others = others
        self._waiting: dict[StreamId, set[asyncio.Future[None]]] = {}
        self.is_over = False
        """The process ends: requests no longer wait."""

    def watch(self, stream: StreamId) -> "Watched":
        """Notice every change from now on."""
        return Watched(self._waiting, stream)

    def wake(self, streams: Iterable[StreamId]) -> None:
        """Streams may have changed, here or at another node."""
        if not self._waiting:
            return
        for stream in streams:
            for waiting in self._waiting.get(stream, ()):
                if not waiting.done():
                    waiting.set_result(None)

    def wake_all(self) -> None:
        self.wake(list(self._waiting))

    def end(self) -> None:
        """Wake every request of this process, for the last time."""
        self.is_over = True
        self.wake_all()

    def tell(self, stream: StreamId) -> None:
        """A call that runs here has changed: wake the requests that wait for it, at all nodes."""
        self.wake((stream,))
        for node in self._others():
            self._hint(node, (stream,))


class Watched:
    """One request that waits, as a context manager."""

    def __init__(self, waiting: dict[StreamId, set[asyncio.Future[None]]], stream: StreamId) -> None:
        self._all = waiting
        self._stream = stream
        self._future: asyncio.Future[None]

    def __enter__(self) -> "Watched":
        self._renew()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _renew(self) -> None:
        self._future = asyncio.get_running_loop().create_future()
        self._all.setdefault(self._stream, set()).add(self._future)

    def _leave(self) -> None:
        waiting = self._all.get(self._stream, set())
        waiting.discard(self._future)
        if not waiting:
            self._all.pop(self._stream, None)

    async def changed(self, seconds: float) -> bool:
        """Wait for the next change, for some time at most. Returns whether there was one."""
        await asyncio.wait({self._future}, timeout=seconds)
        changed = self._future.done()
        if changed:
            self._leave()
            self._renew()
        return changed
