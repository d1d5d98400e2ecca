"""Formats the objects of `queries` as lines for people: they end at the terminal's edge, and columns stand in line.

What a peer wrote cannot act on the terminal.
"""

import itertools
import json
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from perdure._core.jsonrpc import JsonObject
from perdure._core.principals import readable
from perdure._core.text import printable
from perdure.admin.queries import UNENDED, Shown

SEALED_SHOWN = 20
"""Sealed streams that `show` lists, the newest: a session may keep ten thousand, and JSON has them all."""

OWNER = 16
"""Columns for an owner's name in the list: what 80 of them leave."""

WHAT = 26
"""Columns for the client of a session, or the tool of a call: what 80 of them leave beside an id."""

CALL_HEADS = ("REQUEST", "STATE", "ATTEMPT", "NODE", "STREAM", "METHOD")

NONE = "-"

_SHORT = 8
"""Characters of a stream's or node's id that tell it from others on a screen."""


# --- The terminal -----------------------------------------------------------------------------------------------------


def width(text: str) -> int:
    """The columns that a text takes: two for wide characters, none for those that join the one before."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int | None) -> str:
    """The text, or as much of it as fits with a mark that there is more."""
    if columns is None or width(text) <= columns:
        return text
    used = itertools.accumulate(map(_columns, text[: max(columns, 0)]))
    return f"{text[: sum(end < columns for end in used)]}…" if columns > 0 else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, indent: str = "") -> list[str]:
    """Lines with columns as wide as their widest cell. Cells may hold what a peer wrote."""
    lines = [head, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    return [
        indent + "  ".join(cell + " " * (wide - width(cell)) for cell, wide in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def span(seconds: float) -> str:
    """A span of time in one unit: 90s, 5m, 3h, 2d. A larger unit is used from two of it on."""
    for worth, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * worth:
            return f"{int(seconds // worth)}{unit}"
    return f"{max(int(seconds), 0)}s"


def _short(name: str | None) -> str:
    return (name or NONE)[:_SHORT]


# --- The list, and one session ----------------------------------------------------------------------------------------


def list_lines(sessions: Sequence[JsonObject], *, now: float, columns: int | None) -> list[str]:
    """A line for each session or single call; two where the terminal is too narrow for the whole id beside the rest."""
    if not sessions:
        return []
    facts = [
        (
            cut(printable(readable(session["owner"])), OWNER) or NONE,
            _state(session),
            span(now - session["created"]),
            span(now - session["active"]),
            _connected(session, now),
            str(session["calls"]),
            _short(session["call"]["node"] if session["call"] else session["home"]),
            cut(printable(_what(session)), WHAT) or NONE,
        )
        for session in sessions
    ]
    heads = ("OWNER", "STATE", "AGE", "ACTIVE", "READER", "CALLS", "NODE", "WHAT")
    names = [(session["id"], session["kind"]) for session in sessions]
    wide = table(("ID", "KIND", *heads), [(*name, *cells) for name, cells in zip(names, facts, strict=True)])
    if columns is None or max(map(width, wide)) <= columns:
        return wide
    # What a session or task is for stands beside its id, so that the rest fits into 80 columns.
    named = table(("ID", "KIND", heads[-1]), [(*name, cells[-1]) for name, cells in zip(names, facts, strict=True)])
    pairs = zip(named, table(heads[:-1], [cells[:-1] for cells in facts], indent="  "), strict=True)
    return [cut(line, columns) for pair in pairs for line in pair]


def _connected(session: JsonObject, now: float) -> str:
    """For how long a client has been connected."""
    if session["connected"] is not None:
        return span(now - session["connected"])
    return "yes" if session["readers"] else NONE


def _what(session: JsonObject) -> str:
    """The client of a session; of a single call, the tool that it runs."""
    call = session["call"]
    return str((call["name"] or call["method"]) if call else session["client_name"] or "")


def _state(session: JsonObject) -> str:
    """The state of a session; of a single call, that of its row."""
    return str((session["call"] or session)["state"])


def show_lines(session: JsonObject, *, nodes: Collection[str], now: float, columns: int | None) -> list[str]:
    """Everything about a session or single call, in chapters. `nodes` have joined the store."""
    is_session = session["kind"] == Shown.SESSION.value
    calls = [
        (
            json.dumps(call["request_id"], ensure_ascii=False),
            call["state"],
            str(call["attempt"]),
            _short(call["node"]),
            _short(call["stream"]),
            _title(call),
        )
        for call in session["calls"]
        if not is_session or call["state"] in {state.value for state in UNENDED}
    ]
    asks = [
        (ask["id"], _short(ask["node"]), _short(ask["stream"]), _request(ask["request"])) for ask in session["asks"]
    ]
    lines = [
        *(f"{name:<12}  {printable(fact)}" for name, fact in _about(session, nodes, now)),
        *_chapter(
            "running calls" if is_session else "calls",
            ("REQUEST", "STATE", "ATTEMPT", "NODE", "STREAM", "METHOD"),
            calls,
        ),
        *_chapter("open asks", ("ASK", "NODE", "STREAM", "METHOD"), asks),
        *_streams(session["streams"], now),
    ]
    return [cut(line, columns) for line in lines]


def _about(session: JsonObject, nodes: Collection[str], now: float) -> Iterator[tuple[str, str]]:
    call = session["call"]
    is_session = session["kind"] == Shown.SESSION.value
    node = call["node"] if call else session["home"]
    kept = [stream for stream in session["streams"] if stream["events"] is not None]
    events, answers = (sum(stream[what] for stream in kept) for what in ("events", "answers"))
    yield session["kind"], session["id"]
    yield "owner", readable(session["owner"]) or NONE
    yield "state", f"{session['state']}: {session['ended']}" if session["ended"] else _state(session)
    yield "version", session["version"] or NONE
    if is_session:
        yield "incarnation", str(session["incarnation"])
    yield "client", session["client_name"] or NONE
    if is_session:
        yield "initialized", "yes" if session["initialized"] else "no"
    for name, time in (("created", session["created"]), ("last active", session["active"])):
        yield name, f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}Z ({span(now - time)} ago)"
    yield "connected", _readers(session["streams"], now)
    yield "home" if is_session else "node", f"{node} (gone)" if node and node not in nodes else node or NONE
    if is_session:
        yield "resume token", "yes" if session["resume_token"] else "no"
    yield from (("sticky", _request(request)) for request in session["sticky"])
    of = _counted(len(kept), "sealed stream")
    yield "retained", f"{_counted(events, 'event')} and {_counted(answers, 'answer')} of {of}"


def _reader(reader: JsonObject | None, now: float) -> str:
    """Where a reader is, and for how long it has been there."""
    if reader is None:
        return NONE
    return _short(reader["node"]) + ("" if reader["since"] is None else f" {span(now - reader['since'])}")


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _readers(streams: Sequence[JsonObject], now: float) -> str:
    """How many readers are connected, and the first of them since when."""
    readers = [stream["reader"] for stream in streams if stream["reader"]]
    since = min((reader["since"] for reader in readers if reader["since"] is not None), default=None)
    said = _counted(len(readers), "reader") if readers else "no"
    if since is None:
        return said
    return f"{said} since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S}Z ({span(now - since)})"


def _chapter(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["", f"{title}: {len(rows)}", *table(head, rows, indent="  ")] if rows else ["", f"{title}: none"]


def _streams(streams: Sequence[JsonObject], now: float) -> list[str]:
    sealed = [stream for stream in streams if stream["sealed"]]
    shown = [stream for stream in streams if not stream["sealed"]] + sealed[::-1][:SEALED_SHOWN]
    rows = [
        (
            _short(stream["id"]),
            stream["kind"],
            str(stream["last"]),
            "sealed" if stream["sealed"] else "open",
            span(now - stream["opened"]),
            str(stream["generation"]),
            _short(stream["node"]),
            _reader(stream["reader"], now),
            f"{stream['events']}+{stream['answers']}" if stream["events"] is not None else NONE,
        )
        for stream in shown
    ]
    lines = _chapter("streams", ("STREAM", "KIND", "LAST", "STATE", "AGE", "GEN", "NODE", "READER", "KEPT"), rows)
    if (hidden := len(streams) - len(shown)) > 0:
        lines[1] = f"streams: {len(streams)}"
        lines.append(f"  … and {hidden} older ones that are sealed; --json has them all")
    return lines


# --- What is followed -------------------------------------------------------------------------------------------------


def tail_line(seen: JsonObject, *, columns: int | None) -> str:
    match seen:
        case {"what": "ended"}:
            return cut(printable(f"{seen['record']} {seen['session']} has ended: {seen['reason']}"), columns)
        case {"what": "opened", "calls": calls}:
            asked = ", ".join(f"{_title(call)} (request {json.dumps(call['request_id'])})" for call in calls)
            says = f"opened: {asked}" if asked else "opened"
        case {"what": "event", "message": message}:
            says = summary(message)
        case _:
            first, last = seen["first"], seen["last"]
            says = f"gap: {f'{first} is' if first == last else f'{first} to {last} are'} no longer there"
    time = datetime.fromtimestamp(seen["time"], UTC).isoformat(timespec="milliseconds")[11:23] if "time" in seen else ""
    line = f"{time:<12}  {seen['kind']:<10}  {_short(seen['stream'])}  {seen.get('seq', ''):<6}  {says}"
    return cut(printable(line), columns)


def summary(message: Any) -> str:
    """A message in few words: whether it asks, tells or answers, and then the rest as JSON."""
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
    """A request or notification without its id and `_meta`."""
    params = {name: value for name, value in _params(message).items() if name != "_meta"}
    return f"{message.get('method', '?')} {_json(params) if params else ''}".rstrip()


def _params(message: JsonObject) -> JsonObject:
    params = message.get("params")
    return params if isinstance(params, dict) else {}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
