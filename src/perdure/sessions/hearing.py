"""Keeps one subscription to the server of this process open, for all lists and for all resources that are wanted."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from perdure._core.changes import EVERYTHING, Change, ChangeFilter, change_of
from perdure.log.chores import cancel_all
from perdure.runtime.base import ListeningRefused, NoListening, ServerChanges
from perdure.telemetry.log_records import log_event

ACKNOWLEDGED_WITHIN = 5.0
"""Seconds that the server may take to acknowledge a subscription in its own process: it has nothing to wait for."""

_PAUSES = (0.05, 0.2, 1.0, 5.0)
"""Seconds before a subscription that the server has ended is opened again: soon, and then without filling the log."""


class HearingState(enum.Enum):
    """What has become of the subscription."""

    SILENT = "silent"  #: it was not asked for yet
    HEARS = "hears"  #: the server has acknowledged it
    ABSENT = "absent"  #: the server serves none
    REFUSED = "refused"  #: the server refuses one that is no client's, or does not acknowledge it


class Hearing:
    """The subscription to this process's own server."""

    def __init__(
        self,
        server: ServerChanges,
        *,
        on_change: Callable[[Change], None],
        wait_for_room: Callable[[], Awaitable[None]],
        task_context: contextvars.Context,
    ) -> None:
        self.state = HearingState.SILENT
        self.honoured = ChangeFilter()
        """What the server has acknowledged."""
        self._server = server
        self._on_change = on_change
        self._wait_for_room = wait_for_room
        self._context = task_context
        self._uris: frozenset[str] = frozenset()
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def serves(self) -> bool:
        """Whether listeners can be served with what is heard here."""
        absent = self.state is HearingState.ABSENT
        return self.state is HearingState.HEARS or (absent and self._server.may_be_silent)

    def honours(self, wanted: ChangeFilter) -> ChangeFilter:
        """The part of a filter that the server honours; one that serves no subscriptions honours all."""
        return wanted if self.state is HearingState.ABSENT else wanted.within(self.honoured)

    async def cover(self, uris: Collection[str]) -> None:
        """Hear of all these resources. The next subscription is acknowledged before the last one ends, so that no
        change falls between them."""
        async with self._turn:
            is_over = self.state in (HearingState.ABSENT, HearingState.REFUSED)
            if is_over or (self._task is not None and self._uris.issuperset(uris)):
                return
            begun: asyncio.Future[HearingState] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(
                self._listen(sorted(uris), begun), name="perdure-hearing", context=self._context.copy()
            )
            try:
                async with asyncio.timeout(ACKNOWLEDGED_WITHIN):
                    self.state = await asyncio.shield(begun)
            except TimeoutError:
                self.state = HearingState.REFUSED
            except BaseException:
                await cancel_all([task])
                raise
            if self.state is HearingState.REFUSED:
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

    async def _listen(self, uris: list[str], begun: asyncio.Future[HearingState]) -> None:
        """Listen, and listen again whenever the server ends it: what was missed in between is not known."""

        def acknowledged(honoured: ChangeFilter) -> None:
            self.honoured = honoured
            if begun.done():
                self._on_change(EVERYTHING)
            else:
                begun.set_result(HearingState.HEARS)

        attempts = 0
        while True:
            ending = "the server ended it"
            try:
                await self._server.listen(uris, on_acknowledged=acknowledged, on_notification=self._take)
            except (NoListening, ListeningRefused) as failure:
                state = HearingState.ABSENT if isinstance(failure, NoListening) else HearingState.REFUSED
                if not begun.done():
                    begun.set_result(state)
                    return
                ending = repr(failure)
            except Exception as failure:  # whatever the server's handler raises
                if not begun.done():
                    begun.set_result(HearingState.REFUSED)
                    return
                ending = repr(failure)
            level = logging.DEBUG if attempts else logging.WARNING
            log_event(level, "changes.unheard", f"the subscription to the server is opened again: {ending}")
            await asyncio.sleep(_PAUSES[min(attempts, len(_PAUSES) - 1)])
            attempts += 1

    async def _take(self, method: str, params: Mapping[str, Any] | None) -> None:
        if (change := change_of(method, params)) is not None:
            self._on_change(change)
            await self._wait_for_room()

    async def aclose(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])
