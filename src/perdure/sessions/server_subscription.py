"""Keeps one subscription to the server of this process open: to all lists, and to all resources that listeners name."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from perdure._core.listening import Change, ChangeFilter, change_of
from perdure.log.chores import cancel_all
from perdure.runtime.base import NoListening, ServerChanges
from perdure.telemetry.log_records import log_event

ACKNOWLEDGED_WITHIN = 5.0
"""Seconds that the server may take to acknowledge a subscription in its own process: it has nothing to wait for."""

_PAUSES = (0.05, 0.2, 1.0, 5.0)
"""Seconds before a subscription that the server has ended is opened again: soon, and then without filling the log."""


class SubscriptionState(enum.Enum):
    """State of the subscription."""

    NONE = "none"  #: it was not asked for yet
    OPEN = "open"  #: the server has acknowledged it
    ABSENT = "absent"  #: the server serves no subscriptions
    REFUSED = "refused"  #: the server refuses one that comes from no client, or does not acknowledge it


class ServerSubscription:
    """The subscription to this process's own server."""

    def __init__(
        self,
        server: ServerChanges,
        *,
        on_change: Callable[[Change], None],
        on_gap: Callable[[], None],
        task_context: contextvars.Context,
    ) -> None:
        """`on_gap` is called when the server has ended the subscription and acknowledges the next one: what changed in
        between is not known."""
        self._state = SubscriptionState.NONE
        self._honoured = ChangeFilter()
        """The filter that the server has acknowledged."""
        self._server = server
        self._on_change = on_change
        self._on_gap = on_gap
        self._context = task_context
        self._uris: frozenset[str] = frozenset()
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def serves(self) -> bool:
        """Whether this process can serve listeners. A server without subscriptions may report changes by other
        means."""
        is_absent = self._state is SubscriptionState.ABSENT
        return self._state is SubscriptionState.OPEN or (is_absent and self._server.may_be_silent)

    def honours(self, wanted: ChangeFilter) -> ChangeFilter:
        """The part of a filter that the server honours; a server without subscriptions honours all of it."""
        return wanted if self._state is SubscriptionState.ABSENT else wanted.within(self._honoured)

    async def cover(self, uris: Collection[str]) -> None:
        """Subscribe to all these resources. The next subscription is acknowledged before the last one ends, so that no
        change falls between them."""
        async with self._turn:
            is_over = self._state in (SubscriptionState.ABSENT, SubscriptionState.REFUSED)
            if is_over or (self._task is not None and self._uris.issuperset(uris)):
                return
            begun: asyncio.Future[SubscriptionState] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(
                self._listen(sorted(uris), begun), name="perdure-subscription", context=self._context.copy()
            )
            try:
                async with asyncio.timeout(ACKNOWLEDGED_WITHIN):
                    self._state = await asyncio.shield(begun)
            except TimeoutError:
                self._state = SubscriptionState.REFUSED
            except BaseException:
                await cancel_all([task])
                raise
            if self._state is SubscriptionState.REFUSED:
                await cancel_all([task])
                log_event(
                    logging.WARNING,
                    "changes.refused",
                    "the server acknowledges no subscription of its own process: changes reach the listeners of the"
                    " process in which they happen, and no others",
                )
                return
            before, self._task = self._task, task
            self._uris = frozenset(uris)
            if before is not None:
                await cancel_all([before])

    async def _listen(self, uris: list[str], begun: asyncio.Future[SubscriptionState]) -> None:
        """Listen, and listen again whenever the server ends it."""

        def acknowledged(honoured: ChangeFilter) -> None:
            self._honoured = honoured
            if begun.done():
                self._on_gap()
            else:
                begun.set_result(SubscriptionState.OPEN)

        attempts = 0
        while True:
            ending = "the server ended it"
            try:
                await self._server.listen(uris, on_acknowledged=acknowledged, on_notification=self._take)
            except Exception as failure:  # also whatever the server's handler raises
                if not begun.done():
                    is_absent = isinstance(failure, NoListening)
                    begun.set_result(SubscriptionState.ABSENT if is_absent else SubscriptionState.REFUSED)
                    return
                ending = repr(failure)
            level = logging.DEBUG if attempts else logging.WARNING
            log_event(level, "changes.unheard", f"the subscription to the server is opened again: {ending}")
            await asyncio.sleep(_PAUSES[min(attempts, len(_PAUSES) - 1)])
            attempts += 1

    async def _take(self, method: str, params: Mapping[str, Any] | None) -> None:
        if (change := change_of(method, params)) is not None:
            self._on_change(change)

    async def aclose(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])
