"""Listening: decides what a client hands on of a `subscriptions/listen`, and whether it listens again after an end.

The revision has no way to read a broken subscription on: a client sends the request again (`_core/delivery.py`), and
the server acknowledges it again. The client cannot tell what it missed in between. So after each acknowledgement but
the first, it hands on one cue for each thing that the server agreed to notify of: that costs one read too many, and
misses none. A server that ends a subscription in good order (because it stops, or to balance its load) is listened to
again as well, later each time that the subscription brought no change. An error ends the subscription, and so does a
server that agreed to nothing. `clients/browser/src/subscription.ts` has the same rules; `tests/vectors/listening.json`
tests both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perdure._core.jsonrpc import JsonObject

ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
UPDATED = "notifications/resources/updated"
CANCELLED = "notifications/cancelled"
#: The notification for each field of a filter.
CHANGES = {
    "toolsListChanged": "notifications/tools/list_changed",
    "promptsListChanged": "notifications/prompts/list_changed",
    "resourcesListChanged": "notifications/resources/list_changed",
}

Cue = tuple[str, JsonObject]
"""The method and the params of a notification that the client makes itself, without the subscription's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subscription:
    """One `subscriptions/listen`, over as many connections and ends as it takes."""

    honored: Mapping[str, Any] | None = None
    """What the server agreed to; None before the first acknowledgement."""
    barren: int = 0
    """Ends in a row before which no change was notified: the pause before listening again grows with them."""

    def heard(self, method: str, params: Mapping[str, Any]) -> tuple[Subscription, bool, Sequence[Cue]]:
        """The state after a notification, whether to hand the notification on, and the cues to hand on after it."""
        if method == CANCELLED:
            return self, False, ()  # the end of the connection follows, and says the same
        if method != ACKNOWLEDGED:
            return replace(self, barren=0), True, ()
        found = params.get("notifications")
        after = replace(self, honored=found if isinstance(found, Mapping) else {})
        return after, True, () if self.honored is None else after._cues()

    def ended(self, *, is_error: bool) -> Subscription | None:
        """The state with which the client listens again after a pause; None if the answer is the subscription's end."""
        return None if is_error or not self.honored else replace(self, barren=self.barren + 1)

    def _cues(self) -> list[Cue]:
        honored = self.honored or {}
        uris = honored.get("resourceSubscriptions")
        lists: list[Cue] = [(method, {}) for name, method in CHANGES.items() if honored.get(name) is True]
        return [*lists, *((UPDATED, {"uri": uri}) for uri in (uris if isinstance(uris, list) else ()))]
