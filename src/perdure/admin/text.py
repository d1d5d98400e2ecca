"""Formats the objects of `queries` as lines for people. No text of a peer can act on the terminal."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from perdure._core.jsonrpc import JsonObject
from perdure._core.principals import readable
from perdure._core.states import UNENDED
from perdure._core.text import printable
from perdure._core.tool_steps import ToolStepKind
from perdure.admin.queries import EntryKind, entry_state

SEALED_SHOWN = 20
"""Sealed streams that `show` lists, the newest: a session may keep ten thousand, and JSON has them all."""

STEPS_SHOWN = 50
"""Steps of tools that `show` lists, the newest: a call may have a thousand, and JSON has them all."""

OWNER, WHAT, LINE = 16, 26, 500
"""Characters of an owner's name, of the client of a session or the tool of a call, and of a line with a message."""

NONE = "-"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, indent: str = "") -> list[str]:
    """Return lines with columns as wide as their longest cell. Cells may hold text of a peer."""
    lines = [head, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [indent + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def span(seconds: float) -> str:
    """Return a span of time in one unit: 90s, 5m, 3h, 2d. A larger unit is used from two of it on."""
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(int(seconds), 0)}s"


def _short(name: str | None) -> str:
    return (name or NONE)[:8]


def _time(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}Z"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# --- The list, and one session ----------------------------------------------------------------------------------------


def list_lines(entries: Sequence[JsonObject], *, now: float) -> list[str]:
    """Return a line for each session or durable call, below a head."""
    rows = []
    for entry in entries:
        call, connected = entry["call"], entry["connected"]
        what = (call["name"] or call["method"]) if call else entry["client_name"] or ""
        rows.append(
            (
                entry["id"],
                entry["kind"],
                printable(readable(entry["owner"]), OWNER) or NONE,
                entry_state(entry),
                span(now - entry["created"]),
                span(now - entry["active"]),
                span(now - connected) if connected is not None else "yes" if entry["readers"] else NONE,
                str(entry["calls"]),
                _short(call["node"] if call else entry["home"]),
                printable(what, WHAT) or NONE,
            )
        )
    head = ("ID", "KIND", "OWNER", "STATE", "AGE", "ACTIVE", "READER", "CALLS", "NODE", "WHAT")
    return table(head, rows) if rows else []


def show_lines(session: JsonObject, *, nodes: Collection[str], now: float) -> list[str]:
    """Return everything about a session or durable call, in chapters. `nodes` have joined the store."""
    is_session = session["kind"] == EntryKind.SESSION.value
    unended = {state.value for state in UNENDED}
    called = [call for call in session["calls"] if not is_session or call["state"] in unended]
    calls = [
        (
            json.dumps(call["request_id"], ensure_ascii=False),
            f"{call['state']}, asks" if call["asks"] else call["state"],
            str(call["attempt"]),
            _short(call["node"]),
            _short(call["stream"]),
            _title(call),
        )
        for call in called
    ]
    asks = [
        (ask["id"], _short(ask["node"]), _short(ask["stream"]), _request(ask["request"])) for ask in session["asks"]
    ]
    return [
        *(f"{name:<12}  {printable(fact, LINE)}" for name, fact in _facts(session, nodes, now)),
        *_chapter(
            "running calls" if is_session else "calls",
            ("REQUEST", "STATE", "ATTEMPT", "NODE", "STREAM", "METHOD"),
            calls,
        ),
        *_step_lines(sorted(session["calls"], key=lambda call: call["state"] in unended), now),
        *_chapter("open asks", ("ASK", "NODE", "STREAM", "METHOD"), asks),
        *_stream_lines(session["streams"], now),
    ]


def _facts(session: JsonObject, nodes: Collection[str], now: float) -> Iterator[tuple[str, str]]:
    call = session["call"]
    is_session = session["kind"] == EntryKind.SESSION.value
    node = call["node"] if call else session["home"]
    retained = [stream for stream in session["streams"] if stream["events"] is not None]
    events, answers = (sum(stream[what] for stream in retained) for what in ("events", "answers"))
    readers = [stream["reader"] for stream in session["streams"] if stream["reader"]]
    since = min((reader["since"] for reader in readers if reader["since"] is not None), default=None)
    yield session["kind"], session["id"]
    yield "owner", readable(session["owner"]) or NONE
    yield "state", f"{session['state']}: {session['ended']}" if session["ended"] else entry_state(session)
    yield "version", session["version"] or NONE
    if is_session:
        yield "incarnation", str(session["incarnation"])
    yield "client", session["client_name"] or NONE
    if is_session:
        yield "initialized", "yes" if session["initialized"] else "no"
    for name, time in (("created", session["created"]), ("last active", session["active"])):
        yield name, f"{_time(time)} ({span(now - time)} ago)"
    connected = _counted(len(readers), "reader") if readers else "no"
    yield "connected", connected if since is None else f"{connected} since {_time(since)} ({span(now - since)})"
    yield "home" if is_session else "node", f"{node} (gone)" if node and node not in nodes else node or NONE
    if is_session:
        yield "resume token", "yes" if session["resume_token"] else "no"
    yield from (("sticky", _request(request)) for request in session["sticky"])
    of = _counted(len(retained), "sealed stream")
    yield "retained", f"{_counted(events, 'event')} and {_counted(answers, 'answer')} of {of}"


def _chapter(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["", f"{title}: {len(rows)}", *table(head, rows, indent="  ")] if rows else ["", f"{title}: none"]


def _step_lines(calls: Sequence[JsonObject], now: float) -> list[str]:
    """Return the steps of tools, if there are any."""
    rows = []
    for request_id, step in [(call["request_id"], step) for call in calls for step in call["steps"]]:
        ended = step["ended"]
        sleeps = step["kind"] == ToolStepKind.SLEEP.value and ended is not None and ended > now
        took = None if ended is None else ended - step["began"]
        rows.append(
            (
                json.dumps(request_id, ensure_ascii=False),
                step["name"],
                step["kind"],
                f"sleeps until {_time(ended)}" if sleeps else str(step["state"]),
                _time(step["began"]),
                NONE if took is None else span(took) if took >= 100 else f"{round(max(took, 0), 3):.3g}s",
                str(step["attempt"]),
            )
        )
    shown = rows[-STEPS_SHOWN:]
    lines = _chapter("steps of tools", ("REQUEST", "STEP", "KIND", "STATE", "BEGAN", "TAKES", "RUN"), shown)
    if (hidden := len(rows) - len(shown)) > 0:
        lines[1] = f"steps of tools: {len(rows):,}"
        lines.append(f"  … after {hidden:,} older ones; --json has them all")
    return lines if rows else []


def _stream_lines(streams: Sequence[JsonObject], now: float) -> list[str]:
    sealed = [stream for stream in streams if stream["sealed"]]
    shown = [stream for stream in streams if not stream["sealed"]] + sealed[::-1][:SEALED_SHOWN]
    readers = {stream["id"]: NONE for stream in shown}
    for stream in shown:
        if reader := stream["reader"]:  # its node, and for how long it has been connected
            since = "" if reader["since"] is None else f" {span(now - reader['since'])}"
            readers[stream["id"]] = _short(reader["node"]) + since
    rows = [
        (
            _short(stream["id"]),
            stream["kind"],
            str(stream["last"]),
            "sealed" if stream["sealed"] else "open",
            span(now - stream["opened"]),
            str(stream["generation"]),
            _short(stream["node"]),
            readers[stream["id"]],
            f"{stream['events']}+{stream['answers']}" if stream["events"] is not None else NONE,
        )
        for stream in shown
    ]
    lines = _chapter("streams", ("STREAM", "KIND", "LAST", "STATE", "AGE", "GEN", "NODE", "READER", "KEPT"), rows)
    if (hidden := len(streams) - len(shown)) > 0:
        lines[1] = f"streams: {len(streams)}"
        lines.append(f"  … and {hidden} older ones that are sealed; --json has them all")
    return lines


# --- The lines of `perdure tail` --------------------------------------------------------------------------------------


def tail_line(item: JsonObject) -> str:
    match item:
        case {"what": "ended"}:
            return printable(f"{item['record']} {item['session']} has ended: {item['reason']}")
        case {"what": "opened", "calls": calls}:
            requests = ", ".join(f"{_title(call)} (request {json.dumps(call['request_id'])})" for call in calls)
            text = f"opened: {requests}" if requests else "opened"
        case {"what": "event", "message": message}:
            text = summary(message)
        case _:
            first, last = item["first"], item["last"]
            text = f"gap: {f'{first} is' if first == last else f'{first} to {last} are'} no longer there"
    time = datetime.fromtimestamp(item["time"], UTC).isoformat(timespec="milliseconds")[11:23] if "time" in item else ""
    return printable(
        f"{time:<12}  {item['kind']:<10}  {_short(item['stream'])}  {item.get('seq', ''):<6}  {text}", LINE
    )


def summary(message: Any) -> str:
    """Return a message in few words: its kind (ask, notification, answer or error), then the rest as JSON."""
    match message:
        case {"method": str(), "id": id_}:
            return f"ask {_json(id_)} {_request(message)}"
        case {"method": "notifications/progress" as method}:
            params = _params(message)
            of = f"/{_json(params['total'])}" if params.get("total") is not None else ""
            token = f"(token {_json(params.get('progressToken'))})"
            done = _json(params.get("progress")) + of
            return " ".join(filter(None, (method, done, str(params.get("message") or ""), token)))
        case {"method": str()}:
            return _request(message)
        case {"error": {"code": code, "message": sentence}}:
            return f"error {_json(message.get('id'))}: {sentence} ({code})"
        case {"result": result}:
            return f"answer {_json(message.get('id'))}: {_json(result)}"
    return message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)


def _title(call: JsonObject) -> str:
    return " ".join(filter(None, (call["method"], call["name"])))


def _request(message: JsonObject) -> str:
    """Return a request or notification without its id and `_meta`."""
    params = {name: value for name, value in _params(message).items() if name != "_meta"}
    return f"{message.get('method', '?')} {_json(params) if params else ''}".rstrip()


def _params(message: JsonObject) -> JsonObject:
    params = message.get("params")
    return params if isinstance(params, dict) else {}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
