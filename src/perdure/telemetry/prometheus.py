"""Shows the numbers of all nodes to Prometheus: text exposition format 0.0.4.

Several processes share one listening socket, so a scrape reaches any one of them. Each node therefore sends the store
its numbers with its heartbeat (`facts`), and the node that is scraped shows those of all, each sample with the label
`node`: its own as they are at this moment, the others' as of their last beat. No label names a client or its calls.
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
from perdure._core.tool_steps import ToolStepKind
from perdure.store.records import Measures, NodeRecord, Survey
from perdure.telemetry.counters import BUCKETS, CALL_BUCKETS, HELP, OUTCOMES, Counters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_VERSION = version("perdure")

_ON_A_SERVER = " (Stores on a server.)"
_OF_GATEWAY = " (Servers that are not Python code.)"

CALL_STATES = (SessionState.ACTIVE, SessionState.DORMANT)
"""The states of durable calls in the store: they have no handshake, and leave no record when they have ended."""

_NODE_CHARS = 8
"""Of a node's id: enough to tell nodes apart."""


# --- The numbers of a node ---


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The numbers of one node at one moment. An older release may lack some of them."""

    node: NodeId
    version: str = ""
    started: float | None = None
    """When it joined the store, by the store's clock; only in the facts of a beat."""
    counters: Mapping[str, int] = field(default_factory=dict)
    sessions: Mapping[str, int] = field(default_factory=dict)
    """By state, of those in this node's memory."""
    durable_calls: int | None = None
    """In this node's memory."""
    streams: Mapping[str, int] = field(default_factory=dict)
    """By kind, of those in this node's memory."""
    readers: int | None = None
    open_readers: Mapping[str, int] = field(default_factory=dict)
    """Event streams by kind, those without a session among them."""
    held_bytes: int | None = None
    """What this node holds in memory while the store fails."""
    degraded: bool | None = None
    seconds: Mapping[str, tuple[Sequence[int], float]] = field(default_factory=dict)
    """Latencies: how many within each bound, and their sum."""
    store: Mapping[str, float] = field(default_factory=dict)
    """Figures of this node's connections to a store on a server, by name."""
    listening: int = 0
    """The number of the node's last announcement to others that it has listeners; 0: it has none. Other nodes read it
    (`sessions.listening`)."""


def snapshot(node: NodeId, counters: Counters, *, measures: Measures | None = None, **held: Any) -> Snapshot:
    """The numbers of this node at this moment. `held`: its `sessions`, `durable_calls`, `streams`, `readers`,
    `open_readers`, `held_bytes` and `degraded`. `measures`: those of its store."""
    timed = counters.seconds()
    if measures is not None:
        timed |= {f"store_{name}": histogram for name, histogram in measures.seconds.items()}
        held["store"] = measures.figures
    seconds = {name: (tuple(histogram.counts), histogram.total) for name, histogram in timed.items()}
    return Snapshot(node=node, version=_VERSION, counters=counters.snapshot(), seconds=seconds, **held)


def facts(own: Snapshot) -> bytes:
    """The numbers of a node as it writes them into the store with each beat."""
    sent = {name: value for name, value in vars(own).items() if name != "node"}
    return json.dumps(sent, separators=(",", ":")).encode()


LEFT = b'{"left":true}'
"""The last facts of a node that leaves in good order."""


def has_left(record: NodeRecord) -> bool:
    """Whether the node has left in good order, so it has not died."""
    return record.facts == LEFT


def read_facts(record: NodeRecord) -> Snapshot:
    """Read the facts of another node, which may run another release or may have written none yet."""
    try:
        sent = json.loads(record.facts or b"{}")
        known = {name: sent[name] for name in Snapshot.__dataclass_fields__ if name != "node" and name in sent}
        return Snapshot(node=record.id, **known)
    except (ValueError, TypeError):
        return Snapshot(node=record.id)


# --- The table ---


@dataclass(frozen=True, kw_only=True)
class Page:
    nodes: Sequence[Snapshot]
    ages: Mapping[NodeId, float]
    stored: Mapping[SessionState, int]
    """Sessions in the store by state, all states; empty if the store could not be read."""
    stored_calls: Mapping[SessionState, int]
    """Durable calls in the store, in the same way."""
    survey: Survey | None = None
    """`None` for a store without a survey, or if the store could not be read."""


MetricKind = Literal["counter", "gauge", "histogram"]

Sample = tuple[str, dict[str, str], Any]
"""The suffix of the metric's name, the labels, the number."""


@dataclass(frozen=True)
class Metric:
    name: str
    kind: MetricKind
    help: str
    samples: Callable[[Page], Iterable[Sample]]
    labels: tuple[str, ...]

    def lines(self, pages: Mapping[str, Page]) -> list[str]:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}"]
        samples = ((upstream, *sample) for upstream, page in pages.items() for sample in self.samples(page))
        for upstream, suffix, labels, number in samples:
            labels = {"upstream": upstream, **labels} if upstream else labels
            escaped = (value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for value in labels.values())
            shown = ",".join(f'{name}="{value}"' for name, value in zip(labels, escaped, strict=True))
            lines.append(f"{self.name}{suffix}{{{shown}}} {number!r}")
        return lines


Values = Callable[[Snapshot], Iterable[tuple[str, str, Any]]]
"""The suffix of the name, the label's value, and the number, which is `None` where the node has none."""


def _of_node(name: str, kind: MetricKind, says: str, values: Values, label: str = "") -> Metric:
    def samples(page: Page) -> Iterator[Sample]:
        for node in page.nodes:
            labels = {"node": node.node[:_NODE_CHARS]}
            # Another release may report numbers in another form: those are left out.
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                for suffix, value, number in list(values(node)):
                    if isinstance(number, int | float) and isinstance(value, str):
                        own = {label: value} if value else {}
                        yield suffix, labels | own, int(number) if isinstance(number, int) else number

    return Metric(f"perdure_{name}", kind, says, samples, ("node", label) if label else ("node",))


def _gauge(name: str, says: str, label: str = "", *, member: str = "") -> Metric:
    """A gauge of each node: the number that is a member of its snapshot, or the numbers by the value of the label."""

    def values(node: Snapshot) -> Iterable[tuple[str, str, Any]]:
        found = getattr(node, member or name)
        return (("", *item) for item in (found.items() if label else [("", found)]))

    return _of_node(name, "gauge", says, values, label)


def _counter(name: str, says: str, *counters: str) -> Metric:
    """A counter of each node; or several, by their outcome."""

    def values(node: Snapshot) -> Iterable[tuple[str, str, Any]]:
        return (("", OUTCOMES.get(counter, ""), node.counters.get(counter)) for counter in counters or (name,))

    return _of_node(f"{name}_total", "counter", says, values, "outcome" if counters else "")


_TOOL_STEPS = {
    "tool_steps_ended": ToolStepKind.STEP,
    "tool_steps_failed": ToolStepKind.STEP,
    "tool_steps_slept": ToolStepKind.SLEEP,
    "tool_steps_answered": ToolStepKind.ASK,
}


def _tool_steps(page: Page) -> Iterator[Sample]:
    for node in page.nodes:
        labels, counters = {"node": node.node[:_NODE_CHARS]}, node.counters
        for counter, kind in _TOOL_STEPS.items() if isinstance(counters, Mapping) else ():
            if isinstance(number := counters.get(counter), int):
                yield "", {**labels, "kind": kind.value, "outcome": OUTCOMES[counter]}, number


def _upstream_gauge(name: str) -> Metric:
    return _of_node(name, "gauge", HELP[name] + _OF_GATEWAY, lambda node: [("", "", node.counters.get(name))])


def _of_store(name: str, kind: MetricKind, says: str, label: str = "", **figures: str) -> Metric:
    """A metric that each node has with a store on a server. `figures`: the store's names for the label's values."""
    figures = figures or {"": name.removesuffix("_total")}

    def values(node: Snapshot) -> Iterable[tuple[str, str, Any]]:
        return (("", value, node.store.get(figure)) for value, figure in figures.items())

    return _of_node(f"store_{name}", kind, says + _ON_A_SERVER, values, label)


def _histogram(name: str, says: str = "", *, bounds: Sequence[float] = BUCKETS) -> Metric:
    def values(node: Snapshot) -> Iterator[tuple[str, str, Any]]:
        counts, total = node.seconds.get(name, ((), 0.0))
        if len(counts) != len(bounds) + 1:
            return  # another release's bounds
        within = list(itertools.accumulate(counts))
        yield from (("_bucket", str(bound), count) for bound, count in zip((*bounds, "+Inf"), within, strict=True))
        yield "_sum", "", total
        yield "_count", "", within[-1]

    return _of_node(f"{name}_seconds", "histogram", says or HELP[f"{name}_seconds"], values, "le")


def _of_page(name: str, says: str, label: str, numbers: Callable[[Page], Mapping[str, float]]) -> Metric:
    """A gauge that does not depend on the node that is scraped, by the value of its label."""

    def samples(page: Page) -> Iterator[Sample]:
        yield from (("", {label: value}, number) for value, number in numbers(page).items())

    return Metric(f"perdure_{name}", "gauge", says, samples, (label,))


def _surveyed(name: str, says: str, label: str, member: str, *, where: str = _ON_A_SERVER) -> Metric:
    """A gauge of the store: a member of its survey."""

    def numbers(page: Page) -> Mapping[str, float]:
        return {} if page.survey is None else dict(sorted(getattr(page.survey, member).items()))

    return _of_page(f"store_{name}", says + where, label, numbers)


METRICS = (
    _of_node(
        "build_info",
        "gauge",
        "The release that a node runs.",
        lambda node: [("", node.version, 1)] if node.version else [],
        "version",
    ),
    _gauge("sessions", "Sessions in the memory of a node, by state. Several nodes may hold the same one.", "state"),
    _gauge(
        "durable_calls",
        "Durable calls (2026-07-28) in the memory of a node: they run there, or a client there asks for them.",
    ),
    _gauge("streams", "Streams in the memory of a node, by kind.", "kind"),
    _gauge("readers", "Event streams that clients are reading."),
    _gauge(
        "open_readers",
        "The same by kind: of a call, of a session's standalone stream, or of a client without a session (2026-07-28).",
        "kind",
    ),
    _gauge(
        "held_bytes", "Bytes that a node holds in memory because the store fails; they are written when it is back."
    ),
    _gauge(
        "store_degraded", "1 while the store fails and the node continues from memory, or refuses.", member="degraded"
    ),
    *(_counter(name, HELP[name]) for name in Counters().snapshot() if name not in OUTCOMES),
    _counter(
        "replays",
        "Replays for readers that had missed something, by outcome.",
        *("replays_completed", "replays_abandoned", "replays_refused"),
    ),
    _counter(
        "settles",
        "Calls settled for a runtime or a node that died, by outcome.",
        *("calls_rerun", "calls_followed", "calls_settled", "settles_cancelled"),
    ),
    Metric(
        "perdure_tool_steps_total",
        "counter",
        "Steps of tools, their sleeps and answers to their questions that were recorded, by kind and outcome.",
        _tool_steps,
        ("node", "kind", "outcome"),
    ),
    _counter(
        "recoveries",
        "Sessions issued again for clients whose session was gone, by outcome.",
        *("recoveries_tried", "recoveries_succeeded", "recoveries_failed", "recoveries_refused"),
    ),
    _histogram("call", bounds=CALL_BUCKETS),
    _histogram("append"),
    _histogram("replay"),
    *map(_upstream_gauge, ("upstream_up", "upstream_children")),
    *(
        _counter(name, HELP[name] + _OF_GATEWAY)
        for name in ("upstream_starts", "upstream_restarts", "upstream_handshakes_repeated")
    ),
    *(
        _histogram(name, HELP[f"{name}_seconds"] + _OF_GATEWAY, bounds=CALL_BUCKETS)
        for name in ("upstream_start", "upstream_request")
    ),
    _of_page(
        "node_lease_age_seconds",
        "Seconds since this node last saw a sign of life of another node.",
        "node",
        lambda page: {node[:_NODE_CHARS]: round(age, 3) for node, age in sorted(page.ages.items())},
    ),
    _of_page(
        "store_sessions",
        "Sessions in the store, by state; those that have ended are kept for a while.",
        "state",
        lambda page: {state.value: count for state, count in page.stored.items()},
    ),
    _of_page(
        "store_durable_calls",
        "Durable calls in the store, by state: active ones have not ended; dormant ones have, and their answers are"
        " kept for clients with a handle or a key.",
        "state",
        lambda page: {state.value: count for state, count in page.stored_calls.items()},
    ),
    _histogram("store_commit", "From sending a commit to the store's server until it is answered." + _ON_A_SERVER),
    _histogram("store_read", "From sending a read to the store's server until it is answered." + _ON_A_SERVER),
    _of_store(
        "connections",
        "gauge",
        "Connections of a node to the store's server, by what they do.",
        "state",
        busy="connections_busy",
        idle="connections_idle",
    ),
    _of_store("waiting", "gauge", "Commits and reads of a node that wait for a connection."),
    _of_store("connections_lost_total", "counter", "Connections that were lost or given up, to be made again."),
    _of_store("polls", "gauge", "1 if a node polls the store, because it gets no notifications."),
    _of_store(
        "hints_total",
        "counter",
        "Hints between nodes to read streams or mail.",
        "direction",
        sent="hints_sent",
        heard="hints_heard",
    ),
    _of_store(
        "slots_total",
        "counter",
        "Slots of expired events or answers that a node found, by outcome.",
        "outcome",
        emptied="slots_emptied",
        put_off="slots_put_off",
    ),
    _surveyed(
        "retained_events",
        "Events that the store keeps, by kind: answers are kept for longer. A SQLite file is counted a part with each"
        " scrape, so in a large one this is some minutes old; PostgreSQL estimates it, with what waits to be emptied.",
        "kind",
        "kept",
        where="",
    ),
    _surveyed(
        "retained_bytes",
        "Bytes of these events: of their messages in SQLite, of their tables in PostgreSQL.",
        "kind",
        "kept_bytes",
        where="",
    ),
    _surveyed(
        "file_bytes",
        "Size of the SQLite file, by part: what is used, what is free in it and will be used again, and the log beside"
        " it.",
        "part",
        "files",
        where=" (Stores in a file.)",
    ),
    _surveyed("bytes", "Size of a table, with its indexes.", "table", "sizes"),
    _surveyed("rows", "Rows of a table, as the server estimates them.", "table", "rows"),
    _surveyed("rotated_timestamp_seconds", "When the present slot began to be written.", "part", "rotated"),
    _surveyed("replication_lag_bytes", "Bytes that a standby has still to replay.", "standby", "lag_bytes"),
    _surveyed(
        "replication_lag_seconds", "Seconds that a standby lags, as the primary sees it.", "standby", "lag_seconds"
    ),
)


def page_of(
    own: Snapshot,
    others: Sequence[NodeRecord],
    ages: Mapping[NodeId, float],
    *,
    stored: Mapping[SessionState, int] | None = None,
    stored_calls: Mapping[SessionState, int] | None = None,
    survey: Survey | None = None,
) -> Page:
    """The numbers of a server: this node first, then the others by name."""
    rest = sorted((read_facts(record) for record in others if record.id != own.node), key=lambda node: node.node)
    in_store = {} if stored is None else {state: stored.get(state, 0) for state in SessionState}
    calls = {} if stored_calls is None else {state: stored_calls.get(state, 0) for state in CALL_STATES}
    return Page(nodes=(own, *rest), ages=ages, stored=in_store, stored_calls=calls, survey=survey)


def render(pages: Mapping[str, Page]) -> str:
    """The text. Each sample has the label `upstream`: the name of its page, unless that is empty."""
    return "\n".join(line for metric in METRICS for line in metric.lines(pages)) + "\n"
