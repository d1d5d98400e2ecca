"""Keeps one `subscriptions/listen` of 2026-07-28 open: sends it again whenever it ends (`_core/listening.py`)."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from perdure._core.listening import Cue, Subscription
from perdure._core.reconnect import Patience
from perdure.remote.call import Ended
from perdure.remote.message import Message
from perdure.remote.stream import pause_before_return


class Listener:
    """`send` sends the request once, passes notifications to `hear`, and returns the end. `patience` sets the pauses
    between two requests."""

    def __init__(self, send: Callable[[], Awaitable[Message | Ended]], patience: Patience) -> None:
        self._send = send
        self._patience = patience
        self._subscription = Subscription()

    @property
    def honored(self) -> Mapping[str, Any]:
        """What the server agreed to notify of."""
        return self._subscription.honored or {}

    def hear(self, method: str, params: Mapping[str, Any]) -> tuple[bool, Sequence[Cue]]:
        """Take a notification. Returns whether to hand it on, and the cues to hand on after it."""
        self._subscription, hands_on, cues = self._subscription.heard(method, params)
        return hands_on, cues

    async def end(self) -> Message:
        """The answer that ends the subscription. A request without an answer does not."""
        unanswered = 0
        while True:
            found = await self._send()
            if isinstance(found, Ended):
                unanswered += 1
            elif (after := self._subscription.ended(is_error=found.is_error)) is None:
                return found
            else:
                self._subscription, unanswered = after, 0
            await pause_before_return(self._subscription.barren + unanswered, self._patience)
