"""The numbers of all nodes, for Prometheus: text exposition format 0.0.4.

Several processes share one listening socket, so a scrape reaches any one of them. Each node therefore tells the store
its numbers with its heartbeat (`facts`), and whichever is scraped shows those of all, each sample with the label
`node`: its own as they are at this moment, the others' as of their last beat. No label says who a client is or what it
calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from perdure._core.ids import NodeId
from perdure._core.states import SessionState
from perdure.store.base import NodeRecord
from perdure.telemetry.events import Counters
from perdure.telemetry.families import FAMILIES, LEASE_AGE, STORED, Metric, Snapshot, escaped

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_VERSION = version("perdure")

_NODE_CHARS = 8
"""Of a node's id: enough to tell nodes apart."""


def snapshot(
    node: NodeId,
    counters: Counters,
    *,
    sessions: Mapping[str, int],
    streams: Mapping[str, int],
    readers: int,
    degraded: bool,
) -> Snapshot:
    timed = {"append": counters.append_seconds, "replay": counters.replay_seconds}
    return Snapshot(
        node=node,
        version=_VERSION,
        counters=counters.snapshot(),
        sessions=sessions,
        streams=streams,
        readers=readers,
        degraded=degraded,
        seconds={name: (tuple(histogram.counts), histogram.total) for name, histogram in timed.items()},
    )


def facts(own: Snapshot) -> bytes:
    """What a node tells of itself with each beat."""
    told = {name: value for name, value in vars(own).items() if name != "node"}
    return json.dumps(told, separators=(",", ":")).encode()


LEFT = b'{"left":true}'
"""The last facts of a node that leaves in good order."""


def has_left(record: NodeRecord) -> bool:
    """The node has left in good order, so it has not died."""
    return record.facts == LEFT


def read_facts(record: NodeRecord) -> Snapshot:
    """What another node told, as far as it can be understood: it may be older or newer, or not have told anything."""
    try:
        told = json.loads(record.facts or b"{}")
        known = {name: told[name] for name in Snapshot.__dataclass_fields__ if name != "node" and name in told}
        return Snapshot(node=record.id, **known)
    except (ValueError, TypeError):
        return Snapshot(node=record.id)


def render(
    own: Snapshot,
    others: Sequence[NodeRecord],
    ages: Mapping[NodeId, float],
    *,
    stored: Mapping[SessionState, int] | None = None,
) -> str:
    """The page: this node first, then the others by name. `stored`: sessions in the store, where it could be asked."""
    rest = sorted((read_facts(record) for record in others if record.id != own.node), key=lambda node: node.node)
    lines: list[str] = []
    for family in FAMILIES:
        lines += _head(family.name, family.kind, family.help)
        for node in (own, *rest):
            lines += _samples(family, node)
    lines += _head(LEASE_AGE[0], "gauge", LEASE_AGE[1])
    lines += [f'{LEASE_AGE[0]}{{node="{_short(node)}"}} {age:.3f}' for node, age in sorted(ages.items())]
    lines += _head(STORED[0], "gauge", STORED[1])
    if stored is not None:
        lines += [f'{STORED[0]}{{state="{state.value}"}} {stored.get(state, 0)}' for state in SessionState]
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, said: str) -> list[str]:
    return [f"# HELP {name} {said}", f"# TYPE {name} {kind}"]


def _samples(family: Metric, node: Snapshot) -> list[str]:
    """Nothing where another node's numbers are not what this release understands."""
    label = _short(node.node)
    try:
        samples = list(family.samples(node))
    except (TypeError, ValueError, AttributeError):
        return []
    return [f'{family.name}{suffix}{{node="{label}"{labels}}} {value}' for suffix, labels, value in samples]


def _short(node: NodeId) -> str:
    return escaped(node[:_NODE_CHARS])
