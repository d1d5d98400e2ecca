"""What there is to measure of a node, and the table of metrics made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from perdure._core.ids import NodeId
from perdure.telemetry.events import BUCKETS


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The numbers of one node at one moment. An older release may lack some of them."""

    node: NodeId
    version: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)
    sessions: Mapping[str, int] = field(default_factory=dict)
    """By state, of those in this node's memory."""
    streams: Mapping[str, int] = field(default_factory=dict)
    """By kind, of those in this node's memory."""
    readers: int | None = None
    degraded: bool | None = None
    seconds: Mapping[str, tuple[Sequence[int], float]] = field(default_factory=dict)
    """Latencies: how many within each bound, and their sum."""


Sample = tuple[str, str, str]
"""What is added to the family's name, the labels besides the node's, the value."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Callable[[Snapshot], Iterator[Sample]]
    labels: str = ""
    """For the documentation: the labels besides the node's."""


METRICS = {
    "sessions_opened": "Sessions opened by initialize.",
    "sessions_loaded": "Sessions loaded from their records.",
    "reattaches": "Clients that came back to their session with initialize.",
    "sessions_ended": "Sessions ended: deleted by their client, expired, or without a handshake.",
    "sessions_not_found": "Requests answered 404 because there is no such session for the caller.",
    "call_streams": "Streams opened by POST.",
    "standalone_readers": "GETs attached to a standalone stream.",
    "resumes": "GETs that named a position.",
    "events_appended": "Events appended to streams.",
    "events_replayed": "Events that a reader got from further back than the moment it came.",
    "gaps": "Gaps told to readers: events that are no longer there.",
    "orphans_told": "Times that a client was told of a call whose position it had lost.",
    "positions_lost": "Positions that could not be honoured.",
    "take_overs": "Readers ended because a newer one took their stream.",
    "slow_readers_ended": "Readers ended because they took nothing for stream_timeout.",
    "calls_accepted": "Requests written into the ledger.",
    "calls_answered": "Requests answered by the server behind.",
    "calls_cancelled": "Requests cancelled by their client.",
    "nodes_settled": "Dead nodes whose calls this one has settled.",
    "resume_chains_opened": "Chains of resume tokens that the broker opened.",
    "resume_tokens_accepted": "Resume tokens that led back to their session.",
    "resume_tokens_rejected": "Resume tokens that the broker rejected, for whatever reason.",
    "resume_chains_revoked": "Chains of resume tokens revoked because a retired token was used again.",
    "requests_refused": "Requests that the endpoint answered with 400 and above.",
    "outages": "Times that the store began to fail.",
    "events_held": "Events that went on live from memory while the store failed.",
}

SETTLES = {"rerun": "calls_rerun", "unknown": "calls_settled", "cancelled": "settles_cancelled"}
RECOVERIES = {outcome: f"recoveries_{outcome}" for outcome in ("tried", "succeeded", "failed", "refused")}


def _counter(name: str) -> Callable[[Snapshot], Iterator[Sample]]:
    def samples(node: Snapshot) -> Iterator[Sample]:
        if name in node.counters:
            yield "", "", _number(node.counters[name])

    return samples


def _outcomes(of: Mapping[str, str]) -> Callable[[Snapshot], Iterator[Sample]]:
    def samples(node: Snapshot) -> Iterator[Sample]:
        for outcome, name in of.items():
            if name in node.counters:
                yield "", f',outcome="{outcome}"', _number(node.counters[name])

    return samples


def _by(label: str, numbers: Callable[[Snapshot], Mapping[str, int]]) -> Callable[[Snapshot], Iterator[Sample]]:
    def samples(node: Snapshot) -> Iterator[Sample]:
        for value, count in numbers(node).items():
            yield "", f',{label}="{escaped(value)}"', _number(count)

    return samples


def _gauge(number: Callable[[Snapshot], int | None]) -> Callable[[Snapshot], Iterator[Sample]]:
    def samples(node: Snapshot) -> Iterator[Sample]:
        if (value := number(node)) is not None:
            yield "", "", _number(value)

    return samples


def _histogram(name: str) -> Callable[[Snapshot], Iterator[Sample]]:
    def samples(node: Snapshot) -> Iterator[Sample]:
        counts, total = node.seconds.get(name, ((), 0.0))
        if len(counts) != len(BUCKETS) + 1:
            return  # another release's bounds
        within = 0
        for bound, count in zip((*BUCKETS, "+Inf"), counts, strict=True):
            within += count
            yield "_bucket", f',le="{bound}"', _number(within)
        yield "_sum", "", _number(total)
        yield "_count", "", _number(within)

    return samples


def _build(node: Snapshot) -> Iterator[Sample]:
    if node.version:
        yield "", f',version="{escaped(node.version)}"', "1"


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        raise TypeError
    return repr(int(value) if isinstance(value, int) else value)


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


FAMILIES = (
    Metric(
        name="perdure_build_info",
        kind="gauge",
        help="The release that a node runs.",
        samples=_build,
        labels="version",
    ),
    Metric(
        name="perdure_sessions",
        kind="gauge",
        help="Sessions in the memory of a node, by state. Several nodes may hold the same one.",
        samples=_by("state", lambda node: node.sessions),
        labels="state",
    ),
    Metric(
        name="perdure_streams",
        kind="gauge",
        help="Streams in the memory of a node, by kind.",
        samples=_by("kind", lambda node: node.streams),
        labels="kind",
    ),
    Metric(
        name="perdure_readers",
        kind="gauge",
        help="Event streams that clients are reading.",
        samples=_gauge(lambda node: node.readers),
    ),
    Metric(
        name="perdure_store_degraded",
        kind="gauge",
        help="1 while the store fails and the node goes on from memory, or refuses.",
        samples=_gauge(lambda node: node.degraded),
    ),
    *(
        Metric(name=f"perdure_{name}_total", kind="counter", help=said, samples=_counter(name))
        for name, said in METRICS.items()
    ),
    Metric(
        name="perdure_settles_total",
        kind="counter",
        help="Calls settled for a runtime or a node that died, by outcome.",
        samples=_outcomes(SETTLES),
        labels="outcome",
    ),
    Metric(
        name="perdure_recoveries_total",
        kind="counter",
        help="Sessions issued again for clients whose session was gone, by outcome.",
        samples=_outcomes(RECOVERIES),
        labels="outcome",
    ),
    Metric(
        name="perdure_append_seconds",
        kind="histogram",
        help="From the first thing put into a group until the group is written.",
        samples=_histogram("append"),
        labels="le",
    ),
    Metric(
        name="perdure_replay_seconds",
        kind="histogram",
        help="From the coming of a reader until it has caught up with what was there.",
        samples=_histogram("replay"),
        labels="le",
    ),
)

LEASE_AGE = ("perdure_node_lease_age_seconds", "Seconds since a node was last known to be alive, seen by this one.")
STORED = ("perdure_store_sessions", "Sessions in the store, by state; those that have ended are kept for a while.")
"""Those that are not the numbers of one node about itself."""
