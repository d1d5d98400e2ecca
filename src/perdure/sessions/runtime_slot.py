"""One session's runtime: loaded with the first message, dropped when it is idle, loaded again from the record.

What a runtime must know beside the client's messages is fed here as well: sticky requests once more, and requests of
our own.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCRequest, JSONRPCResponse
from starlette.requests import Request as HttpRequest

from perdure._core import sticky
from perdure.runtime.base import Flow
from perdure.runtime.sdk import Heard, Runtime
from perdure.sessions.ledger import Calls
from perdure.sessions.messages import stand_in
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.sessions.session import Session

_private_ids = itertools.count(1)

_OWN_SECONDS = 10.0
"""How long a server may take to tell which tools it has."""


class RuntimeSlot:
    """Holds a runtime, or none. An exchange is one, rather than has one: sessions at rest are counted in bytes."""

    __slots__ = ("_fed", "_private", "_runtime", "_subscribed", "calls", "closed", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.calls = Calls(session.context.work)
        """What the runtime is running."""
        self.closed = False
        """The session has ended."""
        self._runtime: Runtime | None = None
        self._fed = session.record.active
        self._private: dict[str, asyncio.Future[dict[str, Any] | None]] | None = None
        self._subscribed: tuple[bytes, ...] = ()
        """Subscriptions that are alive in this runtime, whatever the record says by now."""

    def emit(self, message: JSONRPCMessage, related: int | str | None) -> Flow | None:
        """What the runtime sends."""
        raise NotImplementedError

    def interrupted(self, number: object) -> None:
        """The runtime cut a call short."""
        raise NotImplementedError

    def abandon(self, reason: str) -> None:
        """Nobody will answer the running calls any more."""
        raise NotImplementedError

    @property
    def work(self) -> int:
        """Bytes of memory that messages take which are being handled, estimated."""
        return self.calls.size + (0 if self._runtime is None else self._runtime.heard.size)

    @property
    def notifications(self) -> int:
        """How many wait for their handler, or are being handled."""
        return 0 if self._runtime is None else self._runtime.heard.count

    def feed(self, message: JSONRPCMessage, metadata: ServerMessageMetadata, *, size: int = 0) -> None:
        """Hand a message to the runtime, which is loaded if it is not there.

        `size`: the bytes of memory that a notification takes until its handler is through.
        """
        if self.closed:
            return  # a runtime that is loaded now would never be dropped
        self._fed = self.session.context.clock()
        runtime = self._runtime or self._load()
        context = contextvars.copy_context()
        if size:
            runtime.heard.add(size, context)
        runtime.inbox.feed(context, SessionMessage(message, metadata))

    def metadata(self, http: HttpRequest | None) -> ServerMessageMetadata:
        """What goes with a message to the runtime."""
        as_json = self.session.context.settings.json_response
        return ServerMessageMetadata(request_context=http or stand_in(self.session.id), can_send_request=not as_json)

    def _load(self) -> Runtime:
        context, record = self.session.context, self.session.record
        runtime = Runtime(
            context.server,
            context.lifespan_state,
            self,
            record,
            ask_ids=context.ask_ids,
            node=context.node,
            context=context.task_context.copy(),
            heard=Heard(context.work),
        )
        runtime.task.add_done_callback(lambda _: self._runtime_ended(runtime))
        self._runtime = runtime
        subscriptions = sticky.subscriptions(record.sticky)
        self._subscribed = subscriptions if self.session.home.here else ()
        for request in record.sticky:
            if self.session.home.here or request not in subscriptions:
                self._repeat(runtime, request)
        return runtime

    def repeat(self, request: bytes) -> None:
        """Another node has taken a sticky request that concerns every runtime."""
        if self._runtime is not None:
            self._repeat(self._runtime, request)

    def stuck(self, request: bytes) -> None:
        """The runtime has taken a sticky request."""
        self._subscribed = sticky.subscriptions(sticky.after(self._subscribed, request))

    def _repeat(self, runtime: Runtime, request: bytes) -> None:
        """Feed a sticky request once more; nobody hears its answer."""
        message = JSONRPCRequest.model_validate_json(request, by_name=False)
        message.id = f"sticky-{next(_private_ids)}"
        runtime.inbox.feed(self.session.context.task_context.copy(), SessionMessage(message, self.metadata(None)))

    def came_home(self) -> None:
        """This node is the session's home now: what the session has subscribed to lives here."""
        subscriptions = sticky.subscriptions(self.session.record.sticky)
        if self._runtime is None:
            if subscriptions and not self.closed:
                self._load()
            return
        self._subscribed = subscriptions
        for request in subscriptions:
            self._repeat(self._runtime, request)

    def left_home(self) -> None:
        """Another node is the home now: no subscription may be alive twice."""
        subscribed, self._subscribed = self._subscribed, ()
        if self._runtime is not None:
            for request in subscribed:
                self._repeat(self._runtime, sticky.unsubscribe(request))

    def mark_initialized(self) -> None:
        """The client's `initialized` has reached another node."""
        if self._runtime is not None:
            self._runtime.mark_initialized()

    async def ask_runtime(
        self, method: str, params: Mapping[str, Any] | None, http: HttpRequest | None
    ) -> dict[str, Any] | None:
        """Ask the runtime something on our own behalf; `None` if it has no result for us."""
        name = f"own-{next(_private_ids)}"
        self._private = self._private if self._private is not None else {}
        future: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._private[name] = future
        message = JSONRPCRequest(jsonrpc="2.0", id=name, method=method, params=dict(params or {}))
        self.feed(message, self.metadata(http))
        try:
            async with asyncio.timeout(_OWN_SECONDS):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._private[name]

    def answer_own(self, message: JSONRPCResponse | JSONRPCError) -> None:
        """An answer to a request of our own; one to a repeated sticky request is heard by nobody."""
        future = None if self._private is None else self._private.get(str(message.id))
        if future is not None and not future.done():
            future.set_result(message.result if isinstance(message, JSONRPCResponse) else None)

    def _runtime_ended(self, runtime: Runtime) -> None:
        """A runtime that ends by itself has failed: what it was running gets its answer all the same."""
        if self._runtime is not runtime:
            return
        self._runtime = None
        runtime.heard.close()
        failure = None if runtime.task.cancelled() else runtime.task.exception()
        name = self.session.name
        log_event(logging.ERROR, "runtime.failed", f"a session's runtime ended: {failure!r}", session=name)
        self.abandon("its runtime failed")
        self.calls.runtime_gone()

    @property
    def loaded(self) -> bool:
        return self._runtime is not None

    def is_idle(self, idle: float) -> bool:
        """It was not used for so long, and nothing would be lost with it that loading it again does not bring back."""
        runtime = self._runtime
        return (
            runtime is not None
            and self.session.context.clock() - self._fed >= idle
            and self.calls.runtime_is_idle
            and not runtime.heard.count
            and not self._private
            and not runtime.keeps_state
            and not (self.session.home.here and sticky.subscriptions(self.session.record.sticky))
        )

    async def drop_runtime(self) -> None:
        """Let the runtime go; the next message loads it again."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            self.calls.runtime_gone()
            runtime.heard.close()
            await runtime.aclose()
