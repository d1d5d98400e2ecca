"""Changes of a server's lists and resources: which a listener wants, how far it has heard, and what is due to it.

A change says nothing but "fetch again". So two changes of one item are one cue, a cue too many does no harm, and a
listener that may have missed something gets a cue for each item that it wants. How far a listener has heard is a
position: a number for each *changes stream*, of which every node writes one, and the time.

    {"time": 1794830400.25, "nodes": {"K3vJx0o8Qm2uYb7dT5aLwA": 12, "9fQxVb3mR1yTz6nKc0pLsg": 4}}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perdure._core.extension import POSITION
from perdure._core.ids import StreamId
from perdure._core.losses import GAP

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
"""The notifications that tell of changes."""

STATE = "notifications/perdure/changes"
"""An event of a changes stream that is no change itself: `state` says what has become of the stream's writer."""

SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"
"""In `_meta` of all that a listener is sent: the id of its request."""

MAX_URIS = 1_000
"""Resources that one listener may name. A stock client holds 1,024 events that were not looked at and gives its
subscription up beyond; one cue for each resource and each list must not bring it there."""

MAX_URI = 2_048
"""Characters of a resource's URI that a listener may name: what browsers and proxies carry without trouble."""

MAX_UNION = 10_000
"""Resources that the listeners of all nodes may name together. Each node hears all of them from its server, and has
them in memory: 20 MiB at the most, and mostly well below one."""

MAX_NAMED = 1_000
"""Changes streams that a position may name. A node writes a position with a few dozen at the most."""

KEPT_CHANGES = 1_000
"""Events that one changes stream keeps. One behind which more has happened is answered with a cue for each item."""

KEPT_STREAMS = 16
"""Changes streams of nodes that are gone which are kept, however young: a process that is restarted again and again
leaves one each time, and each takes 30 bytes in every position."""

CLOCK_SLACK = 2.0
"""Seconds by which the store's clock may differ between nodes, and by which a cue may come late into the log."""

_STREAM = re.compile(r"[A-Za-z0-9_-]{22}")
_MOST = 1 << 53
"""Numbers above are not exact in JSON."""


class Change(NamedTuple):
    """One item that has changed: a list, or a resource."""

    method: str
    uri: str = ""


EVERYTHING = Change("")
"""Any item may have changed."""


class BadFilter(ValueError):
    """The filter of a listener cannot be served; the message says why."""


class BadPosition(ValueError):
    """What a listener brought as its position is not one; the message says why."""


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
        return change.uri in self.uris or any(above in self.uris for above in _above(change.uri))

    def items(self) -> list[Change]:
        """Every item."""
        lists = [Change(method) for method in LISTS.values() if method in self.methods]
        return lists + [Change(UPDATED, uri) for uri in self.uris]

    def within(self, other: ChangeFilter) -> ChangeFilter:
        """What both want."""
        uris = {uri: None for uri in self.uris if uri in other.uris}
        return ChangeFilter(methods=self.methods & other.methods, uris=uris)

    @property
    def wire(self) -> dict[str, Any]:
        """The filter as an acknowledgement names it."""
        told: dict[str, Any] = {name: True for name, method in LISTS.items() if method in self.methods}
        return told | ({URIS: list(self.uris)} if self.uris else {})


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


def _above(uri: str) -> Iterable[str]:
    """The resources above one, with and without the slash at their end."""
    for place, character in enumerate(uri):
        if character == "/":
            yield uri[:place]
            yield uri[: place + 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangesPosition:
    """How far a listener has heard: a number for each changes stream, as of a time of the store's."""

    time: float
    seqs: Mapping[StreamId, int] = field(default_factory=dict)

    @property
    def wire(self) -> dict[str, Any]:
        return {"time": round(self.time, 3), "nodes": dict(self.seqs)}


def read_position(raw: object) -> ChangesPosition:
    """Read a position from `_meta`; raises `BadPosition`."""
    if not isinstance(raw, dict) or raw.keys() != {"time", "nodes"}:
        raise BadPosition("it must be an object with `time` and `nodes`, as a notification brought it")
    time, nodes = raw["time"], raw["nodes"]
    if isinstance(time, bool) or not isinstance(time, int | float) or not -_MOST <= time <= _MOST:
        raise BadPosition("`time` must be a number of seconds")
    if not isinstance(nodes, dict):
        raise BadPosition("`nodes` must be an object")
    if len(nodes) > MAX_NAMED:
        raise BadPosition(f"`nodes` names {len(nodes)} streams; {MAX_NAMED} are allowed")
    for name, seq in nodes.items():
        if _STREAM.fullmatch(name) is None:
            raise BadPosition("`nodes` has a name that is not one of Perdure's")
        if isinstance(seq, bool) or not isinstance(seq, int) or not 0 <= seq <= _MOST:
            raise BadPosition("`nodes` has a value that is not a number of an event")
    return ChangesPosition(time=float(time), seqs={StreamId(name): seq for name, seq in nodes.items()})


# --- Events of a changes stream


def encode_change(change: Change) -> bytes:
    """A change as an event of a changes stream."""
    params = {"uri": change.uri} if change.method == UPDATED else None
    if change == EVERYTHING:
        return encode_state("unsure")
    return _encode(change.method, params)


def encode_state(state: str) -> bytes:
    """What has become of a writer: `left` in good order, `died`, or `unsure` what it has missed."""
    return _encode(STATE, {"state": state})


def decode_event(payload: bytes) -> Change | None:
    """The change that an event tells of; `None` if it tells of none, or of one that this release does not know."""
    message = json.loads(payload)
    method, params = message.get("method"), message.get("params") or {}
    if method == STATE:
        return None if params.get("state") == "left" else EVERYTHING
    return change_of(method, params)


def is_end(payload: bytes) -> bool:
    """Whether an event is the last one of its stream."""
    message = json.loads(payload)
    return bool(message.get("method") == STATE and message["params"].get("state") in ("left", "died"))


def change_of(method: str, params: Mapping[str, Any] | None) -> Change | None:
    """The change that a server's notification tells of; `None` if it tells of none."""
    if method == UPDATED:
        uri = (params or {}).get("uri")
        return Change(method, uri) if isinstance(uri, str) else None
    return Change(method) if method in METHODS else None


def _encode(method: str, params: Mapping[str, Any] | None) -> bytes:
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    return json.dumps(message if params is None else message | {"params": params}, separators=(",", ":")).encode()


# --- What is due to a listener


class Notification(NamedTuple):
    """A notification for a listener, but for the id of its subscription."""

    method: str
    params: Mapping[str, Any]
    meta: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class DueChanges:
    """The items that have changed since a listener was last sent something: each once, however often it changed.

    So a client that does not read costs no more than its filter. Cues that are sent together carry the position from
    before them, all but the last: a client that was cut off among them gets the others when it comes again.
    """

    filter: ChangeFilter
    sent: ChangesPosition
    """The position that the listener has."""
    _due: dict[Change, None] = field(default_factory=dict)
    _gap: str = ""

    @property
    def is_empty(self) -> bool:
        return not self._due and not self._gap

    def add(self, change: Change) -> bool:
        """Take a change in; tells whether it is wanted."""
        wanted = self.filter.items() if change == EVERYTHING else [change] if self.filter.admits(change) else []
        self._due.update(dict.fromkeys(wanted))
        if len(self._due) > MAX_URIS + len(LISTS):  # resources below those that were named
            self._due = dict.fromkeys(self.filter.items())
        return bool(wanted)

    def add_gap(self, reason: str) -> None:
        """What has changed since the listener's position is not known: tell it, and have it fetch everything."""
        self._gap = reason
        self.add(EVERYTHING)

    def take(self, now: ChangesPosition) -> Sequence[Notification]:
        """All that is due, and nothing is due any more. `now`: as far as all changes were added here."""
        due, self._due = list(self._due), {}
        gap, self._gap = self._gap, ""
        before, self.sent = {POSITION: self.sent.wire}, now
        told = [Notification(GAP, {"stream": "changes", "reason": gap}, before)] if gap else []
        for change in due:
            told.append(Notification(change.method, {"uri": change.uri} if change.uri else {}, before))
        if told:
            told[-1] = told[-1]._replace(meta={POSITION: now.wire})
        return told


# --- Which streams are kept


class EndedStream(NamedTuple):
    """A changes stream whose node is gone."""

    id: StreamId
    ended: float


def streams_to_drop(ended: Sequence[EndedStream], *, now: float, ttl: float) -> tuple[Sequence[StreamId], float]:
    """The streams of nodes that are gone which are not kept any longer, and the time before which positions are lost
    by that: a position from before it may not name a stream that is dropped, and that had something for it."""
    oldest_first = sorted(ended, key=lambda stream: stream.ended)
    expired = [stream for stream in oldest_first if stream.ended < now - ttl]
    beyond = oldest_first[len(expired) : max(len(expired), len(oldest_first) - KEPT_STREAMS)]
    dropped = [*expired, *beyond]
    floor = max((stream.ended for stream in dropped), default=-math.inf) + CLOCK_SLACK
    return [stream.id for stream in dropped], floor


# --- Resources that listeners want


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedUris:
    """Resources that listeners of one node want to hear of, and since when every node hears of them."""

    uris: tuple[str, ...]
    since: float

    def encode(self) -> bytes:
        return json.dumps({"uris": self.uris, "since": self.since}, separators=(",", ":")).encode()


def decode_wanted(raw: bytes) -> WantedUris:
    fields = json.loads(raw)
    return WantedUris(uris=tuple(fields["uris"]), since=float(fields["since"]))


def heard_since(wanted: Iterable[WantedUris]) -> dict[str, float]:
    """Since when each resource has been heard of without a break."""
    since: dict[str, float] = {}
    for row in wanted:
        for uri in row.uris:
            since[uri] = min(row.since, since.get(uri, row.since))
    return since
