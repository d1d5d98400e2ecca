"""Listening to changes of a server's lists and resources (`subscriptions/listen` of 2026-07-28), at both ends.

A change means nothing but "read it again". So two changes of one item are one cue, and a needless cue costs one read.

**Server.** A listener names the items that it wants in a filter; the items that have changed are due to it, each once.

**Client.** The revision has no way to resume a broken subscription: a client sends the request again
(`_core/delivery.py`), and the server acknowledges it again. The client cannot tell what it missed in between. So after
each acknowledgement but the first, it hands on one cue for each thing that the server agreed to notify of. A server
that ends a subscription in good order (because it stops, or to balance its load) is listened to again as well, later
each time that the subscription brought no change. An error ends the subscription, and so does a server that agreed to
nothing.
`clients/browser/src/subscription.ts` has the same rules; `tests/vectors/listening.json` tests both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
CANCELLED = "notifications/cancelled"
UPDATED = "notifications/resources/updated"
"""A resource has changed; `uri` names it."""

LISTS = {
    "toolsListChanged": "notifications/tools/list_changed",
    "promptsListChanged": "notifications/prompts/list_changed",
    "resourcesListChanged": "notifications/resources/list_changed",
}
"""The fields of a filter that ask for changes of a list, each with the notification that it lets pass."""

URIS = "resourceSubscriptions"
"""The field of a filter that names resources."""

METHODS = frozenset({*LISTS.values(), UPDATED})
"""The notifications that report changes."""

MAX_URIS = 1_000
"""Resources that one listener may name. A stock client holds 1,024 events that were not read, and gives up its
subscription beyond that; one cue for each resource and each list must not bring it there."""

MAX_URI = 2_048
"""Characters of a resource's URI that a listener may name: what browsers and proxies carry without trouble."""

MAX_UNION = 10_000
"""Resources that the listeners of all nodes may name together. Each node subscribes to all of them at its server, and
has them in memory: 20 MiB at the most, and mostly well below one."""


class Change(NamedTuple):
    """One item that has changed: a list, or a resource."""

    method: str
    uri: str = ""


ALL_RESOURCES = Change(UPDATED)
"""Any resource may have changed."""

ANYTHING = Change("")
"""Any list and any resource may have changed."""


class BadFilter(ValueError):
    """The filter of a listener cannot be served; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeFilter:
    """The items that a listener wants to hear of."""

    methods: frozenset[str] = frozenset()
    uris: Mapping[str, None] = field(default_factory=dict)
    """In the order in which they were named."""

    def admits(self, change: Change) -> bool:
        """Whether a change is wanted. A resource that was named stands for those below it as well."""
        if change.method != UPDATED:
            return change.method in self.methods
        uri = change.uri
        slashes = [place for place, character in enumerate(uri) if character == "/"]
        return uri in self.uris or any(uri[:end] in self.uris for place in slashes for end in (place, place + 1))

    def within(self, other: ChangeFilter) -> ChangeFilter:
        """The items that both filters name."""
        uris = {uri: None for uri in self.uris if uri in other.uris}
        return ChangeFilter(methods=self.methods & other.methods, uris=uris)

    @property
    def wire(self) -> dict[str, Any]:
        """The filter as an acknowledgement names it."""
        fields: dict[str, Any] = {name: True for name, method in LISTS.items() if method in self.methods}
        return fields | ({URIS: list(self.uris)} if self.uris else {})


def read_filter(raw: Mapping[str, Any]) -> ChangeFilter:
    """The part of a listener's filter that names changes; raises `BadFilter` beyond the limits. Types were checked."""
    wanted = read_honoured(raw)
    uris = wanted.uris
    if len(uris) > MAX_URIS:
        raise BadFilter(f"{URIS} names {len(uris)} resources; a listener may name {MAX_URIS}")
    longest = max((len(uri) for uri in uris), default=0)
    if longest > MAX_URI:
        raise BadFilter(f"{URIS} names a URI of {longest} characters; {MAX_URI} are allowed")
    return wanted


def read_honoured(raw: Mapping[str, Any]) -> ChangeFilter:
    """A filter as a server acknowledges it."""
    methods = frozenset(method for name, method in LISTS.items() if raw.get(name) is True)
    return ChangeFilter(methods=methods, uris=dict.fromkeys(str(uri) for uri in raw.get(URIS) or ()))


def change_of(method: str, params: Mapping[str, Any] | None) -> Change | None:
    """The change that a server's notification reports; `None` if it reports none."""
    if method == UPDATED:
        uri = (params or {}).get("uri")
        return Change(method, uri) if isinstance(uri, str) and uri else None
    return Change(method) if method in METHODS else None


class Cue(NamedTuple):
    """A notification for a listener, without the id of its subscription."""

    method: str
    params: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class DueChanges:
    """The items that have changed since a listener was last sent something: each once, however often it changed.

    So a client that does not read costs no more than its filter.
    """

    filter: ChangeFilter
    _due: dict[Change, None] = field(default_factory=dict)

    def add(self, change: Change) -> bool:
        """Take a change in; returns whether the listener wants it."""
        if change == ALL_RESOURCES:
            wanted = [Change(UPDATED, uri) for uri in self.filter.uris]
        else:
            wanted = [change] if self.filter.admits(change) else []
        self._due.update(dict.fromkeys(wanted))
        if len(self._due) > MAX_URIS + len(LISTS):  # the server names resources below those that were named
            self._due = {due: None for due in self._due if due.method != UPDATED}
            self.add(ALL_RESOURCES)
        return bool(wanted)

    def take(self) -> Sequence[Cue]:
        """Everything that is due; nothing is due afterwards."""
        due, self._due = self._due, {}
        return [Cue(change.method, {"uri": change.uri} if change.uri else {}) for change in due]


# --- At the client


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
        if self.honored is None:
            return after, True, ()
        honored = after.honored or {}
        lists = [Cue(method, {}) for name, method in LISTS.items() if honored.get(name) is True]
        uris = honored.get(URIS)
        return after, True, [*lists, *(Cue(UPDATED, {"uri": uri}) for uri in (uris if isinstance(uris, list) else ()))]

    def ended(self, *, is_error: bool) -> Subscription | None:
        """The state with which the client listens again after a pause; None if the answer is the subscription's end."""
        return None if is_error or not self.honored else replace(self, barren=self.barren + 1)
