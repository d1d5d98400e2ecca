"""Holds one session's runtime: loaded with the first message, dropped when it is idle, loaded again from the record.

What a runtime must know beside the client's messages is sent here as well: sticky requests once more, and requests of
this process itself.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from perdure._core import sticky
from perdure._core.jsonrpc import Envelope, Request
from perdure._core.states import SessionState
from perdure.runtime.base import Runtime

if TYPE_CHECKING:
    from perdure.sessions.exchange import Exchange

_OWN_SECONDS = 10.0
"""How long a server may take to tell which tools it has."""


class RuntimeSlot:
    """Holds a runtime, or none."""

    __slots__ = ("_exchange", "_own", "_runtime", "_sent", "_subscribed", "notification_bytes", "notifications")

    def __init__(self, exchange: Exchange) -> None:
        self.notifications = 0
        """How many wait for their handler, or are being handled."""
        self.notification_bytes = 0
        """Bytes of memory that they take, estimated."""
        self._exchange = exchange
        self._runtime: Runtime | None = None
        self._sent = exchange.session.record.active
        """When something was last sent to it."""
        self._own: dict[int, asyncio.Future[bytes | None]] | None = None
        """This process's own requests that wait for their answer."""
        self._subscribed: tuple[bytes, ...] = ()
        """Subscriptions that are alive in this runtime, whatever the record says by now."""

    @property
    def is_loaded(self) -> bool:
        return self._runtime is not None

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        """Hand a message to the runtime, which is loaded if it is not there.

        `size`: the bytes of memory that a notification takes until its handler is through.
        """
        session = self._exchange.session
        if session.state is SessionState.ENDED:
            return  # a runtime that is loaded now would never be dropped
        self._sent = session.context.clock()
        runtime = self._runtime or self._load()
        if size:
            self._count(1, size)
        runtime.send(message, origin=origin, size=size)

    def handled(self, size: int) -> None:
        """A notification of that size has been handled."""
        self._count(-1, -size)

    def _count(self, notifications: int, size: int) -> None:
        self.notifications += notifications
        self.notification_bytes += size
        self._exchange.session.context.work.take(size)

    def _load(self) -> Runtime:
        session = self._exchange.session
        self._runtime = session.context.runtimes.load(session.record, self._exchange)
        subscriptions = sticky.subscriptions(session.record.sticky)
        self._subscribed = subscriptions if session.home.is_here else ()
        for request in session.record.sticky:
            if session.home.is_here or request not in subscriptions:
                self.repeat(request)
        return self._runtime

    def repeat(self, request: bytes) -> None:
        """Send a sticky request once more, if a runtime is there. Its answer is dropped."""
        if self._runtime is not None:
            body = json.loads(request)
            number = self._exchange.calls.new_number()
            message = Request(id=number, method=body["method"], params=body.get("params"), raw={})
            context = self._exchange.session.context.task_context.copy()
            context.run(self._runtime.send, message, origin=None)

    def on_sticky_accepted(self, request: bytes) -> None:
        """The runtime has taken a sticky request."""
        self._subscribed = sticky.subscriptions(sticky.after(self._subscribed, request))

    def on_home_gained(self) -> None:
        """This node is the session's home now: what the session has subscribed to lives here."""
        session = self._exchange.session
        subscriptions = sticky.subscriptions(session.record.sticky)
        if self._runtime is None:
            if subscriptions and session.state is not SessionState.ENDED:
                self._load()
            return
        self._subscribed = subscriptions
        for request in subscriptions:
            self.repeat(request)

    def on_home_lost(self) -> None:
        """Another node is the home now: no subscription may be alive twice."""
        subscribed, self._subscribed = self._subscribed, ()
        for request in subscribed:
            self.repeat(sticky.unsubscribe(request))

    def mark_initialized(self) -> None:
        """The client's `initialized` has reached another node."""
        if self._runtime is not None:
            self._runtime.mark_initialized()

    async def ask(self, method: str, params: dict[str, Any], origin: object) -> dict[str, Any] | None:
        """Ask the runtime something on this process's own behalf; `None` if it has no result."""
        number = self._exchange.calls.new_number()
        self._own = self._own if self._own is not None else {}
        future = self._own[number] = asyncio.get_running_loop().create_future()
        self.send(Request(id=number, method=method, params=params, raw={}), origin=origin)
        try:
            async with asyncio.timeout(_OWN_SECONDS):
                body = await future
        except TimeoutError:
            return None
        finally:
            del self._own[number]
        result: dict[str, Any] | None = None if body is None else json.loads(body)
        return result

    def answer_own(self, number: int, body: bytes | None) -> None:
        """Take the answer to a request of this process itself (`None`: it has no result)."""
        future = None if self._own is None else self._own.get(number)
        if future is not None and not future.done():
            future.set_result(body)

    def is_idle(self, idle: float) -> bool:
        """Whether it was not used for so long, and loading it again brings back everything that is lost with it."""
        runtime, session = self._runtime, self._exchange.session
        return (
            runtime is not None
            and session.context.clock() - self._sent >= idle
            and self._exchange.calls.runtime_is_idle
            and not self.notifications
            and not self._own
            and not runtime.keeps_state
            and not (session.home.is_here and sticky.subscriptions(session.record.sticky))
        )

    def forget(self) -> Runtime | None:
        """The runtime goes; the next message loads it again. Handlers that still run count no longer."""
        runtime, self._runtime = self._runtime, None
        self._count(-self.notifications, -self.notification_bytes)
        return runtime

    async def drop(self) -> None:
        """Let the runtime go, in silence."""
        if (runtime := self.forget()) is not None:
            self._exchange.calls.runtime_gone()
            await runtime.aclose()
