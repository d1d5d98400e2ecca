"""Write the parts of the documentation that are made from the code, so that they cannot disagree with it.

    python scripts/make_docs.py            write them
    python scripts/make_docs.py --check    change nothing; name the pages that are stale, status 1 if there are any

Pages are written by hand, except what stands between `<!-- made: NAME -->` and `<!-- /made -->`.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from log_actions import records
from perdure._core import codes as error_codes
from perdure._core import delivery as rules
from perdure._core import states
from perdure._core.revisions import FIRST_SESSIONLESS, REVISIONS
from perdure.cli.entry import perdure_command
from perdure.cli.options import ServeOption
from perdure.http.refusals import Refusal
from perdure.settings import NUMBERS, Rule, Settings, rule_of
from perdure.store.maintenance import INVARIANTS
from perdure.telemetry.prometheus import METRICS
from proofs import checklist, promises, requirements

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("project/*.md"))]

_MADE = re.compile(r"(<!-- made: (\w+) -->\n)(.*?)(<!-- /made -->)", re.DOTALL)

#: Where a client meets the codes that belong neither to a refusal nor to a response in an event stream.
ELSEWHERE = {
    "PARSE_ERROR": "400",
    "CLIENT_AWAY": "in the tool that asked",
    "UNREACHABLE": "in programs that use `perdure.connect`, and from `perdure stdio`",
    "INVALID_PARAMS": "from `perdure stdio`",
    "INTERNAL_ERROR": "in programs that use `perdure.connect`, and from `perdure stdio`",
    "NO_SERVER": "in programs that use `perdure.connect`, and from `perdure stdio`",
    "TOO_MANY_AT_ONCE": "from `perdure stdio`",
}

#: Limits that a client or an operator can meet and that are not settings: the constant's module and name, what it
#: bounds, what happens beyond it.
FIXED = [
    ("perdure._core.jsonrpc", "MAX_DEPTH", "levels of nesting in a body", "400, -32700"),
    ("perdure._core.jsonrpc", "MAX_BATCH", "messages in a batch (2025-03-26)", "400, -32600"),
    ("perdure._core.jsonrpc", "MAX_ID_CHARS", "characters of a request id", "400, -32600"),
    ("perdure._core.jsonrpc", "MAX_METHOD_CHARS", "characters of a method's name", "400, -32600"),
    ("perdure._core.sticky", "MAX_STICKY", "subscriptions of one session", "429, -31004"),
    ("perdure._core.listening", "MAX_URIS", "resources that one listener names (2026-07-28)", "400, -32602"),
    ("perdure._core.listening", "MAX_URI", "characters of such a resource's URI", "400, -32602"),
    ("perdure._core.listening", "MAX_UNION", "resources that all listeners name together", "503, -31004"),
    ("perdure._core.retention", "MAX_ENDED", "records of ended sessions", "the oldest are removed"),
    (
        "perdure._core.retention",
        "MAX_ENDED_OF_CALLER",
        "records of one caller's ended sessions",
        "the oldest are removed",
    ),
    ("perdure.http.endpoint", "MAX_HANDSHAKE", "bytes of an `initialize` request", "413, -31004"),
    ("perdure.http.endpoint", "MAX_HANDSHAKE_MEMORY", "bytes that an `initialize` request takes parsed", "413, -31004"),
    ("perdure.http.request", "PACE_BYTES", "bytes that a body must bring in 20 seconds", "408, -31004"),
    ("perdure.http.recovery", "REISSUES", "sessions reissued to one caller in a row", "404 without a new one"),
    ("perdure.http.resume_tokens", "REQUESTS", "requests of one caller to the resume broker in a row", "429, -31004"),
    (
        "perdure.serve.connection",
        "HEAD_SECONDS",
        "seconds until a request's headers are complete",
        "the connection is closed",
    ),
    ("perdure.serve.token_file", "MAX_FILE", "bytes of a token file", "`perdure serve` does not start"),
]

MACHINES: list[tuple[str, Mapping[Any, Mapping[Any, Any]], enum.Enum]] = [
    ("Content", states.CONTENT, states.ContentState.OPEN),
    ("Writing", states.WRITING, states.WritingState.FOLLOWING),
    ("Reader", states.READER, states.ReaderState.STARTING),
    ("Session", states.SESSION, states.SessionState.OPENING),
    ("Call", states.CALL, states.CallState.RUNNING),
    ("Tool step", states.TOOL_STEP, states.ToolStepState.OPEN),
    ("Claim", states.CLAIM, states.ClaimState.HOLDING),
    ("Passed on", states.PASSED_ON, states.PassedOnState.RUNNING),
]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head), *([str(cell).replace("|", r"\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# Settings


def settings(_: str) -> str:
    rules = {field.name: rule_of(field) for field in dataclasses.fields(Settings)}
    chapters: dict[str, list[list[str]]] = {}
    for option in perdure_command.commands["serve"].params:
        if isinstance(option, ServeOption):
            rule = rules.get(str(option.name))
            python = f"`{option.name}`" if rule else ""
            spelled = " ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            why = rule.why if rule else str(option.help)
            row = [python, spelled, option.shown or "none", _allowed(rule) if rule else "", why]
            chapters.setdefault(option.group, []).append(row)
    head = ("setting", "option", "default", "allowed", "what it is")
    return "\n".join(f"### {chapter}\n\n{table(head, rows)}" for chapter, rows in chapters.items())


def _allowed(rule: Rule) -> str:
    match rule.kind:
        case "flag":
            return "on, off"
        case "choice":
            return ", ".join(f"`{choice}`" for choice in rule.choices)
        case "names":
            return "any number of names"
        case number:
            return f"{NUMBERS[number].format(rule.low)} to {NUMBERS[number].format(rule.high)}"


# Errors and limits


def refusals(_: str) -> str:
    ordered = sorted(Refusal, key=lambda refusal: refusal.status)
    rows = [[r.status, r.code, r.sentence, f"`{r.name}`"] for r in ordered]
    return table(("status", "code", "message", "name"), rows)


def codes(_: str) -> str:
    body = ast.parse(Path(error_codes.__file__).read_text()).body
    sentences = _sentences(body)
    rows = []
    for name, code in sorted(_codes(body), key=lambda named: -named[1]):
        statuses = ", ".join(sorted({str(refusal.status) for refusal in Refusal if refusal.code == code}))
        met = statuses or ELSEWHERE.get(name, "in the event stream")
        rows.append([code, sentences[name], met])
    return table(("code", "what it says", "where it is met"), rows)


def _codes(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Module constants that are JSON-RPC error codes."""
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(name)], value=ast.UnaryOp(ast.USub(), ast.Constant(int(code)))):
                if 31_000 <= code <= 32_999:
                    yield name, -code


def _sentences(body: list[ast.stmt]) -> dict[str, str]:
    """The strings that stand right below assignments, by name."""
    found = {}
    for statement, below in itertools.pairwise(body):
        match statement, below:
            case (
                (ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name))),
                ast.Expr(ast.Constant(str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def limits(_: str) -> str:
    fixed = [
        [what, f"{getattr(importlib.import_module(module), name):,}".removesuffix(".0"), beyond]
        for module, name, what, beyond in FIXED
    ]
    return table(("what", "limit", "beyond"), fixed)


def metrics(_: str) -> str:
    """Each metric with its own labels; all but a few have `node`, and `le` comes with histograms."""
    rows = []
    for metric in METRICS:
        own = ", ".join(label for label in metric.labels if label not in ("node", "le"))
        rows.append([f"`{metric.name}{{{own}}}`" if own else f"`{metric.name}`", metric.help])
    return table(("metric", "what it says"), rows)


def alerts(_: str) -> str:
    """What each alert rule says, with … for what Prometheus fills in."""
    [group] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "perdure.rules.yml").read_text())["groups"]
    rows = [
        [
            f"`{rule['alert']}`",
            rule["labels"]["severity"],
            re.sub(r"{{.*?}}", "…", rule["annotations"]["summary"]),
            rule.get("for", "at once"),
        ]
        for rule in group["rules"]
    ]
    return table(("alert", "severity", "what it says", "for"), rows)


def invariants(_: str) -> str:
    rows = [[f"`{name}`", rule.says, rule.promise or ""] for name, rule in INVARIANTS.items()]
    return table(("rule", "what holds", "promise"), rows)


def actions(_: str) -> str:
    """Each action, with everything that is said under it."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for record in records():
        levels, sentences = found.setdefault(record.action, ([], []))
        levels.append(record.level)
        sentences.append(record.sentence)
    rows = [
        [f"`{action}`", ", ".join(dict.fromkeys(levels)), "; ".join(dict.fromkeys(sentences))]
        for action, (levels, sentences) in sorted(found.items())
    ]
    return table(("action", "level", "sentence"), rows)


# Hosts

STDIO = "Through `perdure stdio`"
"""The part of the results that is shown beside the others."""


def hosts(_: str) -> str:
    """What `make hosts` saw: the hosts, a table for each part, and limits of the hosts' own."""
    files = sorted((ROOT / "tests" / "real_hosts" / "results").glob("*.json"))
    seen = sorted((json.loads(file.read_text()) for file in files), key=lambda result: str(result["host"]).lower())
    parts = dict.fromkeys(scenario["part"] for result in seen for scenario in result["seen"].values())
    tables = [f"**{part}.**\n\n{_through_stdio(seen) if part == STDIO else _scenarios(seen, part)}" for part in parts]
    limits: dict[str, dict[str, list[str]]] = {}
    for result in seen:
        for scenario in result["seen"].values():
            if scenario["limit"]:
                way = "through stdio: " if scenario["part"] == STDIO else ""
                titles = limits.setdefault(scenario["limit"], {}).setdefault(result["host"], [])
                titles.append(f"{way}{scenario['title']}")
        for reason in dict.fromkeys(result["left_out"].values()):
            limits.setdefault(reason, {}).setdefault(result["host"], [])
    lines = (f"- {_with_titles(cells)}: {limit}.\n" for limit, cells in limits.items())
    return "\n".join((_clients(seen), *tables, "**Limits of the hosts' own.**\n", "".join(lines)))


def _with_titles(cells: dict[str, list[str]]) -> str:
    """The hosts, those with the same scenarios together."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for host, titles in cells.items():
        alike.setdefault(tuple(titles), []).append(host)
    return "; ".join(
        f"{'; '.join(hosts)} ({'; '.join(titles)})" if titles else "; ".join(hosts) for titles, hosts in alike.items()
    )


def _clients(seen: list[dict[str, Any]]) -> str:
    """What each host is, and says of itself."""
    rows = []
    for result in seen:
        caller, days = result["caller"], sorted({scenario["date"] for scenario in result["seen"].values()})
        rows.append(
            [
                f"{result['host']} {result['version']}",
                f"`{caller['name']}`",
                f"{caller['revision']}, tasks" if caller["tasks"] else caller["revision"],
                "yes" if caller["token"] else "no",
                " to ".join(dict.fromkeys((days[0], days[-1]))),
            ]
        )
    return table(("host", "name", "speaks", "progress token", "played"), rows)


def _scenarios(seen: list[dict[str, Any]], part: str) -> str:
    """A row for each host, a column for each scenario."""
    played = [_cells(result, part) for result in seen]
    titles = dict.fromkeys(title for cells in sorted(played, key=len, reverse=True) for title in cells)
    rows = [
        [result["host"], *(cells.get(title, "–") for title in titles)]
        for result, cells in zip(seen, played, strict=True)
    ]
    return table(("host", *titles), rows)


def _through_stdio(seen: list[dict[str, Any]]) -> str:
    """Which scenarios were played so too, and the hosts for which one came out in another way."""
    played = [(result["host"], _cells(result, STDIO), _cells(result)) for result in seen]
    titles = dict.fromkeys(title for _, cells, _ in played for title in cells)
    others: dict[tuple[str, str], list[str]] = {}
    for host, cells, direct in played:
        for title, cell in cells.items():
            if cell != direct.get(title):
                others.setdefault((title, cell), []).append(host)
    same = "Each host shows the same" if not others else "Each host shows the same, but for the lines below,"
    lines = "".join(
        f"- {title}: {cell} for {_most(hosts, [result['host'] for result in seen])}.\n"
        for (title, cell), hosts in others.items()
    )
    return f"{same} in the scenarios {'; '.join(f'“{title}”' for title in titles)}.\n\n{lines}"


def _most(hosts: list[str], of: list[str]) -> str:
    """Name the hosts, or, if these are most of all, name the others."""
    rest = [host for host in of if host not in hosts]
    if len(rest) >= len(hosts):
        return "; ".join(hosts)
    return f"all but {'; '.join(rest)}" if rest else "all"


def _cells(result: dict[str, Any], part: str | None = None) -> dict[str, str]:
    """The cells of a part by their titles; without one, of all parts that are at the server's address."""
    seen = result["seen"].values()
    return {s["title"]: _cell(s) for s in seen if s["part"] == part or (part is None and s["part"] != STDIO)}


def _cell(scenario: dict[str, Any]) -> str:
    """The outcome, and how often the tool began; a host's own words are in the results."""
    outcome = "lost" if scenario["outcome"].startswith("“") else scenario["outcome"]
    return f"{outcome} ({scenario['began']})"


# Rooms, states and revisions


def rooms(_: str) -> str:
    """Each package's first sentence: what the room is for, and which rooms it may use."""
    package = ROOT / "src" / "perdure"
    rows = []
    for source in sorted(package.glob("*/__init__.py")):
        text = " ".join((ast.get_docstring(ast.parse(source.read_text())) or "").split())
        purpose, uses = re.split(r"(?<=[.]) ", text)[0].rstrip(".").split("; uses ")
        room = source.parent.name
        rows.append([f"[`{room}`](../src/perdure/{room})", purpose, uses])
    return table(("room", "what it does", "uses"), rows)


def diagrams(_: str) -> str:
    theory = dict(re.findall(r"^\*\*([\w ]+)\.\*\* (.+?)(?=\n\n|\Z)", states.__doc__ or "", re.DOTALL | re.MULTILINE))
    return "\n".join(
        f"## {name}\n\n{theory[name].strip()}\n\n```mermaid\n{_mermaid(moves, first)}```\n"
        for name, moves, first in MACHINES
    )


def _mermaid(moves: Mapping[Any, Mapping[Any, Any]], first: enum.Enum) -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    for state, ways in moves.items():
        for target in dict.fromkeys(ways.values()):
            steps = ", ".join(step.value for step, after in ways.items() if after is target)
            lines.append(f"    {state.value} --> {target.value}: {steps}")
        if not ways:
            lines.append(f"    {state.value} --> [*]")
    return "".join(f"{line}\n" for line in lines)


def revisions(_: str) -> str:
    said = {True: "yes", False: "no"}
    rows = [
        [r.version, said[r.batches], said[r.primes], said[r.closes_early], said[r.tasks]] for r in REVISIONS.values()
    ]
    rows.append([f"{FIRST_SESSIONLESS} and later", *["no sessions"] * 4])
    early = "a tool may close its connection early"
    return table(("revision", "batches", "priming event", early, "tasks in sessions"), rows)


def delivery(_: str) -> str:
    """What a client does with a response or a failure: a row for each, a column for each kind of thing that it sent."""
    by_post, by_get, keyed = list(rules.Column)[:5], list(rules.Column)[5:8], list(rules.Column)[8:]
    return "\n".join(
        (
            "**By POST.**\n",
            _meanings(rules.RESPONDED, by_post),
            "**By GET.** A call with a position, and the standalone stream.\n",
            _meanings(rules.RESPONDED, by_get),
            "**By POST, without a session.** (2026-07-28; reads are calls that may be repeated, as above.)\n",
            _meanings(rules.RESPONDED, keyed),
            "**No response, or one that broke off.**\n",
            _meanings(rules.FAILED, list(rules.Column)),
            "| | what the client does next |\n| --- | --- |",
            "".join(f"| {meaning.name.lower()} | {meaning.value} |\n" for meaning in rules.Meaning),
        )
    )


def _meanings(rows: Mapping[Any, Mapping[rules.Column, rules.Meaning]], columns: list[rules.Column]) -> str:
    cells = (
        [*row.value[:1], *(cell[c].name.lower() if c in cell else "" for c in columns), *row.value[1:]]
        for row, cell in rows.items()
        if not cell.keys().isdisjoint(columns)
    )
    return table(("what came", *(column.value for column in columns), "because"), cells)


MAKERS: dict[str, Callable[[str], str]] = {
    maker.__name__: maker
    for maker in (
        settings,
        refusals,
        codes,
        limits,
        metrics,
        alerts,
        invariants,
        actions,
        hosts,
        rooms,
        diagrams,
        revisions,
        delivery,
        checklist,
        promises,
        requirements,
    )
}


def made(text: str) -> str:
    """A page with its made parts as they should be."""
    return _MADE.sub(lambda part: f"{part[1]}\n{MAKERS[part[2]](part[3]).strip()}\n\n{part[4]}", text)


def main() -> int:
    stale = [page for page in PAGES if made(page.read_text()) != page.read_text()]
    for page in stale:
        if "--check" in sys.argv[1:]:
            print(f"{page.relative_to(ROOT)} is stale; run scripts/make_docs.py")
        else:
            page.write_text(made(page.read_text()))
            print(f"{page.relative_to(ROOT)} is written")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
