"""What an operator is shown of sessions: lines for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from perdure._core.ids import NodeId
from perdure._core.principals import readable
from perdure.admin.as_json import KINDS
from perdure.admin.queries import UNENDED, Overview, Picture
from perdure.admin.summaries import call_title, members, request, short
from perdure.admin.terminal import clean, cut, moment, span, table, width
from perdure.store.base import StreamRecord

SEALED_SHOWN = 20
"""Sealed streams that `show` lists, the newest: a session may keep ten thousand, and JSON has them all."""

OWNER = 16
"""Columns for an owner's name in the list: what 80 of them leave."""

NONE = "-"

_HEAD = ("OWNER", "STATE", "VERSION", "AGE", "SEEN", "CALLS", "STREAMS", "HOME")


# --- The list ---------------------------------------------------------------------------------------------------------


def list_lines(sessions: Sequence[Overview], *, now: float, columns: int | None) -> list[str]:
    """A line for each session; two where the terminal is too narrow for the whole id beside the rest."""
    if not sessions:
        return []
    facts = [_facts(session, now) for session in sessions]
    ids = [clean(session.id) for session in sessions]
    wide = table(("SESSION", *_HEAD), [(name, *cells) for name, cells in zip(ids, facts, strict=True)])
    if columns is None or max(map(width, wide)) <= columns:
        return wide
    head, *below = table(_HEAD, facts, indent="  ")
    pairs = [("SESSION", head), *zip(ids, below, strict=True)]
    return [cut(line, columns) for pair in pairs for line in pair]


def _facts(session: Overview, now: float) -> tuple[str, ...]:
    return (
        cut(clean(readable(session.owner)), OWNER) or NONE,
        session.state.value,
        clean(session.version) or NONE,
        span(now - session.created),
        span(now - session.active),
        str(session.calls),
        str(session.streams),
        short(session.home),
    )


# --- One session ------------------------------------------------------------------------------------------------------


def show_lines(seen: Picture, *, now: float, columns: int | None) -> list[str]:
    """Everything about a session, in chapters."""
    lines = [
        *_about(seen, now),
        *_chapter("running calls", ("REQUEST", "STATE", "ATTEMPT", "NODE", "STREAM", "METHOD"), _calls(seen)),
        *_chapter("open asks", ("ASK", "NODE", "STREAM", "METHOD"), _asks(seen)),
        *_streams(seen, now),
    ]
    return [cut(line, columns) for line in lines]


def _about(seen: Picture, now: float) -> Iterator[str]:
    record = seen.record
    facts = [
        ("session", record.id),
        ("owner", readable(record.owner) or NONE),
        ("state", f"{record.state.value}: {record.ended}" if record.ended else record.state.value),
        ("version", record.version or NONE),
        ("incarnation", str(record.incarnation)),
        ("client", _client(record.client_params)),
        ("initialized", "yes" if record.initialized else "no"),
        ("created", f"{moment(record.created)} ({span(now - record.created)} ago)"),
        ("last active", f"{moment(record.active)} ({span(now - record.active)} ago)"),
        ("home", _node(seen, seen.home)),
        ("resume token", "yes" if seen.resumable else "no"),
        *(("sticky", request(sent)) for sent in record.sticky),
        ("retained", _retained(seen)),
    ]
    for name, fact in facts:
        yield f"{name:<12}  {clean(fact)}"


def _chapter(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["", f"{title}: {len(rows)}", *table(head, rows, indent="  ")] if rows else ["", f"{title}: none"]


def _calls(seen: Picture) -> list[tuple[str, ...]]:
    writers = {stream.id: stream.node for stream in seen.streams}
    return [
        (
            clean(json.dumps(call.request_id, ensure_ascii=False)),
            call.state.value,
            str(call.attempt),
            short(writers.get(call.stream, NodeId(""))),
            short(call.stream),
            clean(call_title(call)),
        )
        for call in seen.calls
        if call.state in UNENDED
    ]


def _asks(seen: Picture) -> list[tuple[str, ...]]:
    return [(clean(ask.id), short(ask.node), short(ask.stream), clean(request(ask.request))) for ask in seen.asks]


def _streams(seen: Picture, now: float) -> list[str]:
    sealed = [stream for stream in seen.streams if stream.sealed]
    shown = [stream for stream in seen.streams if not stream.sealed] + sealed[::-1][:SEALED_SHOWN]
    head = ("STREAM", "KIND", "LAST", "STATE", "AGE", "GEN", "NODE", "READER", "KEPT")
    lines = _chapter("streams", head, [_stream(seen, stream, now) for stream in shown])
    if (hidden := len(seen.streams) - len(shown)) > 0:
        lines[1] = f"streams: {len(seen.streams)}"
        lines.append(f"  … and {hidden} older ones that are sealed; --json has them all")
    return lines


def _stream(seen: Picture, stream: StreamRecord, now: float) -> tuple[str, ...]:
    reader, kept = seen.readers.get(stream.id), seen.kept.get(stream.id)
    return (
        short(stream.id),
        KINDS[stream.kind],
        str(stream.last),
        "sealed" if stream.sealed else "open",
        span(now - stream.opened),
        str(stream.generation),
        short(stream.node),
        f"{short(reader.node)} at {reader.seq}" if reader else NONE,
        f"{kept.events}+{kept.answers}" if kept else NONE,
    )


def _client(params: bytes) -> str:
    info = members(params).get("clientInfo")
    if not isinstance(info, dict):
        return NONE
    return " ".join(str(info[name]) for name in ("name", "version") if name in info) or NONE


def _node(seen: Picture, node: NodeId) -> str:
    if not node:
        return NONE
    return node if node in seen.nodes else f"{node} (gone)"


def _retained(seen: Picture) -> str:
    events, answers = (sum(getattr(kept, name) for kept in seen.kept.values()) for name in ("events", "answers"))
    return (
        f"{_counted(events, 'event')} and {_counted(answers, 'answer')} of {_counted(len(seen.kept), 'sealed stream')}"
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
