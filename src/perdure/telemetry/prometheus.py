"""Shows the numbers of all nodes to Prometheus: text exposition format 0.0.4.

Several processes share one listening socket, so a scrape reaches any one of them. Each node therefore sends the store
its numbers with its heartbeat (`facts`), and the node that is scraped shows those of all, each sample with the label
`node`: its own as they are at this moment, the others' as of their last beat. No label says who a client is or what it
calls.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

from perdure._core.ids import NodeId
from perdure._core.states import SessionState
from perdure.store.base import NodeRecord
from perdure.telemetry.counters import BUCKETS, HELP, OUTCOMES, Counters

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_VERSION = version("perdure")

_NODE_CHARS = 8
"""Of a node's id: enough to tell nodes apart."""


# --- The numbers of a node ---


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


def snapshot(node: NodeId, counters: Counters, **held: Any) -> Snapshot:
    """The numbers of this node at this moment. `held`: its `sessions`, `streams` and `readers`, and `degraded`."""
    timed = {"append": counters.append_seconds, "replay": counters.replay_seconds}
    seconds = {name: (tuple(histogram.counts), histogram.total) for name, histogram in timed.items()}
    return Snapshot(node=node, version=_VERSION, counters=counters.snapshot(), seconds=seconds, **held)


def facts(own: Snapshot) -> bytes:
    """What a node sends the store of itself with each beat."""
    sent = {name: value for name, value in vars(own).items() if name != "node"}
    return json.dumps(sent, separators=(",", ":")).encode()


LEFT = b'{"left":true}'
"""The last facts of a node that leaves in good order."""


def has_left(record: NodeRecord) -> bool:
    """The node has left in good order, so it has not died."""
    return record.facts == LEFT


def read_facts(record: NodeRecord) -> Snapshot:
    """What another node sent, as far as it can be understood: it may be older or newer, or have sent nothing yet."""
    try:
        sent = json.loads(record.facts or b"{}")
        known = {name: sent[name] for name in Snapshot.__dataclass_fields__ if name != "node" and name in sent}
        return Snapshot(node=record.id, **known)
    except (ValueError, TypeError):
        return Snapshot(node=record.id)


# --- The table ---


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a scrape shows."""

    nodes: Sequence[Snapshot]
    ages: Mapping[NodeId, float]
    stored: Mapping[SessionState, int]
    """Sessions in the store by state, all states; empty if the store could not be asked."""


Sample = tuple[str, dict[str, str], Any]
"""What is added to the metric's name, the labels, the number."""


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Callable[[Page], Iterable[Sample]]
    labels: tuple[str, ...]

    def lines(self, page: Page) -> list[str]:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}"]
        for suffix, labels, number in self.samples(page):
            escaped = (value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for value in labels.values())
            shown = ",".join(f'{name}="{value}"' for name, value in zip(labels, escaped, strict=True))
            lines.append(f"{self.name}{suffix}{{{shown}}} {number!r}")
        return lines


Values = Callable[[Snapshot], Iterable[tuple[str, str, Any]]]
"""What is added to the name, the label's value, and the number, which is `None` where the node has none."""


def _of_node(
    name: str, kind: Literal["counter", "gauge", "histogram"], says: str, values: Values, label: str = ""
) -> Metric:
    """A metric that each node has."""

    def samples(page: Page) -> Iterator[Sample]:
        for node in page.nodes:
            labels = {"node": node.node[:_NODE_CHARS]}
            # Another release's numbers may be of any kind: those that are not understood are left out.
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                for suffix, value, number in list(values(node)):
                    if isinstance(number, int | float) and isinstance(value, str):
                        own = {label: value} if value else {}
                        yield suffix, labels | own, int(number) if isinstance(number, int) else number

    return Metric(f"perdure_{name}", kind, says, samples, ("node", label) if label else ("node",))


def _gauge(name: str, says: str, numbers: Callable[[Snapshot], Mapping[str, Any]], label: str = "") -> Metric:
    """A gauge of each node, by the value of its label."""
    return _of_node(name, "gauge", says, lambda node: (("", *item) for item in numbers(node).items()), label)


def _counter(name: str, says: str, label: str = "", *counters: str) -> Metric:
    def values(node: Snapshot) -> Iterable[tuple[str, str, Any]]:
        return (("", OUTCOMES.get(counter, ""), node.counters.get(counter)) for counter in counters or (name,))

    return _of_node(f"{name}_total", "counter", says, values, label)


def _histogram(name: str) -> Metric:
    def values(node: Snapshot) -> Iterator[tuple[str, str, Any]]:
        counts, total = node.seconds.get(name, ((), 0.0))
        if len(counts) != len(BUCKETS) + 1:
            return  # another release's bounds
        within = list(itertools.accumulate(counts))
        yield from (("_bucket", str(bound), count) for bound, count in zip((*BUCKETS, "+Inf"), within, strict=True))
        yield "_sum", "", total
        yield "_count", "", within[-1]

    return _of_node(f"{name}_seconds", "histogram", HELP[f"{name}_seconds"], values, "le")


METRICS = (
    _gauge(
        "build_info", "The release that a node runs.", lambda node: {node.version: 1} if node.version else {}, "version"
    ),
    _gauge(
        "sessions",
        "Sessions in the memory of a node, by state. Several nodes may hold the same one.",
        lambda node: node.sessions,
        "state",
    ),
    _gauge("streams", "Streams in the memory of a node, by kind.", lambda node: node.streams, "kind"),
    _gauge("readers", "Event streams that clients are reading.", lambda node: {"": node.readers}),
    _gauge(
        "store_degraded",
        "1 while the store fails and the node goes on from memory, or refuses.",
        lambda node: {"": node.degraded},
    ),
    *(_counter(name, HELP[name]) for name in Counters().snapshot() if name not in OUTCOMES),
    _counter(
        "settles",
        "Calls settled for a runtime or a node that died, by outcome.",
        "outcome",
        *("calls_rerun", "calls_settled", "settles_cancelled"),
    ),
    _counter(
        "recoveries",
        "Sessions issued again for clients whose session was gone, by outcome.",
        "outcome",
        *("recoveries_tried", "recoveries_succeeded", "recoveries_failed", "recoveries_refused"),
    ),
    _histogram("append"),
    _histogram("replay"),
    Metric(
        "perdure_node_lease_age_seconds",
        "gauge",
        "Seconds since a node was last known to be alive, seen by this one.",
        lambda page: (("", {"node": node[:_NODE_CHARS]}, round(age, 3)) for node, age in sorted(page.ages.items())),
        ("node",),
    ),
    Metric(
        "perdure_store_sessions",
        "gauge",
        "Sessions in the store, by state; those that have ended are kept for a while.",
        lambda page: (("", {"state": state.value}, count) for state, count in page.stored.items()),
        ("state",),
    ),
)


def render(
    own: Snapshot,
    others: Sequence[NodeRecord],
    ages: Mapping[NodeId, float],
    *,
    stored: Mapping[SessionState, int] | None = None,
) -> str:
    """The text: this node first, then the others by name."""
    rest = sorted((read_facts(record) for record in others if record.id != own.node), key=lambda node: node.node)
    in_store = {} if stored is None else {state: stored.get(state, 0) for state in SessionState}
    page = Page(nodes=(own, *rest), ages=ages, stored=in_store)
    return "\n".join(line for metric in METRICS for line in metric.lines(page)) + "\n"
