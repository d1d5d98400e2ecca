"""One picture of the results: bars per candidate, and the resume's time over the log's size."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from bench.report import RESULTS

PANELS = (
    ("events_1.per_second", "events per second, one call", "{:,.0f}"),
    ("calls_new.per_second", "calls per second, new connection each", "{:,.0f}"),
    ("replay_10000.per_second", "10,000 missed events, events per second", "{:,.0f}"),
    ("memory", "KiB per idle session with a GET stream", "{:.1f}"),
    ("replay_100.ms", "100 missed events, milliseconds", "{:.1f}"),
)
LABELS = {
    "perdure-sqlite": "Perdure, SQLite",
    "perdure-postgres": "Perdure, PostgreSQL",
    "perdure-sqlite-full": "Perdure, SQLite, full sync",
    "perdure-memory": "Perdure, memory",
    "sdk": "official SDK, no store",
    "sdk-memory": "official SDK, memory store",
    "mcp-persist": "mcp-persist, SQLite",
}
COLOURS = {"perdure-sqlite": "#0b6e4f", "perdure-postgres": "#2f5d9b"}
OURS, THEIRS, INK = "#0b6e4f", "#b8bdc4", "#333333"


def draw(results: dict[str, Any]) -> None:
    """Write results/latest.png."""
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 6.8))
    for axis, (key, title, spelled) in zip(axes.flat, PANELS, strict=False):
        _bars(axis, _cells(results["summary"], key), title, spelled)
    _growth(axes.flat[-1], results["growth"])
    figure.text(0.01, 0.01, _footnote(results), fontsize=8, color="#777777")
    figure.tight_layout(rect=(0, 0.03, 1, 1), w_pad=2.5, h_pad=2.5)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "latest.png", dpi=130)
    pyplot.close(figure)


def _cells(summary: dict[str, Any], key: str) -> dict[str, dict[str, float]]:
    if key != "memory":
        return {LABELS[kind]: summary[key][kind] for kind in LABELS if kind in summary[key]}
    loaded, dropped = summary["memory_loaded.kib"], summary["memory_idle.kib"]
    cells = {"Perdure, SQLite, runtime dropped": dropped["perdure-sqlite"]} if "perdure-sqlite" in dropped else {}
    return cells | {LABELS[kind]: loaded[kind] for kind in LABELS if kind in loaded and kind != "perdure-sqlite-full"}


def _bars(axis: Axes, cells: dict[str, dict[str, float]], title: str, spelled: str) -> None:
    names = list(cells)[::-1]
    values = [cells[name]["median"] for name in names]
    errors = [
        [max(0.0, cells[name]["median"] - cells[name]["low"]) for name in names],
        [max(0.0, cells[name]["high"] - cells[name]["median"]) for name in names],
    ]
    colours = [OURS if name.startswith("Perdure") else THEIRS for name in names]
    axis.barh(names, values, color=colours, height=0.62, xerr=errors, error_kw={"ecolor": INK, "elinewidth": 1})
    for place, name in enumerate(names):
        axis.text(cells[name]["high"], place, "  " + spelled.format(cells[name]["median"]), va="center", fontsize=9)
    axis.set_ylim(len(names) - len(LABELS) - 0.5, len(names) - 0.5)  # bars as thick in every panel
    axis.set_xlim(0, max((cells[name]["high"] for name in names), default=1) * 1.22)
    _plain(axis, title)
    axis.xaxis.set_visible(False)
    axis.spines["bottom"].set_visible(False)


def _growth(axis: Axes, growth: dict[str, dict[Any, dict[str, float]]]) -> None:
    for kind, sizes in growth.items():
        stored, colour = [int(size) for size in sizes], COLOURS[kind]
        for which, label, style in (("old_ms", "oldest stream", "-o"), ("new_ms", "newest stream", "--s")):
            times = [figures[which] for figures in sizes.values()]
            axis.plot(stored, times, style, color=colour, label=f"{LABELS[kind]}, {label}", markersize=4)
    _plain(axis, "100 missed events, ms, by events stored")
    if growth:
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=9)
    else:
        axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes, color="#777777")
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines["bottom"].set_visible(False)


SCALING = (
    ("nodes", "nodes on one server", ("node_us", "database_us"), "CPU of a call, µs"),
    ("nodes", "nodes on one server", ("idle_statements",), "statements a second of an idle node"),
    ("sessions", "sessions stored", ("node_us", "database_us"), "CPU of a call, µs"),
    ("sessions", "sessions stored", ("resume_ms",), "100 missed events, ms"),
)
SCALED = {
    "node_us": ("nodes", "#0b6e4f"),
    "database_us": ("database", "#2f5d9b"),
    "idle_statements": ("", "#2f5d9b"),
    "resume_ms": ("", "#0b6e4f"),
}


def draw_scaling(results: dict[str, Any]) -> None:
    """Write results/scaling.png."""
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.4))
    for axis, (part, over, names, title) in zip(axes.flat, SCALING, strict=True):
        found = results[part]
        for name in names:
            label, colour = SCALED[name]
            places, values = [int(size) for size in found], [figures[name] for figures in found.values()]
            axis.plot(places, values, "-o", color=colour, label=label, markersize=4)
        _plain(axis, title)
        axis.set_xlabel(over, fontsize=9, color=INK)
        axis.set_ylim(bottom=0)
        if found:
            axis.set_xscale("log", base=2 if part == "nodes" else 10)
            axis.minorticks_off()
            axis.set_xticks([int(size) for size in found], [f"{int(size):,}" for size in found])
        if len(names) > 1:
            axis.legend(frameon=False, fontsize=9)
    note = f"{results['when']}, {results['machine']['cpu']}; nodes, database and client share the same cores"
    figure.text(0.01, 0.01, note, fontsize=8, color="#777777")
    figure.tight_layout(rect=(0, 0.05, 1, 1), w_pad=2.0)
    figure.savefig(RESULTS / "scaling.png", dpi=130)
    pyplot.close(figure)


def _plain(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize=10, loc="left", color=INK)
    axis.tick_params(length=0, labelsize=9, colors=INK)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _footnote(results: dict[str, Any]) -> str:
    machine, plan = results["machine"], results["plan"]
    return (
        f"{results['when']}, {machine['cpu']}, server on one core, client on the other; "
        f"median of {plan['rounds']} rounds, lines show the range"
    )
