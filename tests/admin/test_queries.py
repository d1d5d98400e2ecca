"""What an operator is shown, as pure functions from records to lines and objects."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from perdure._core.ids import Fence, Kind, NodeId, RecordKind, SessionId, StreamId, reader_name
from perdure._core.jsonrpc import JsonObject
from perdure._core.states import CallState, SessionState, ToolStepState
from perdure._core.tool_steps import ToolStepKind
from perdure.admin import queries
from perdure.admin.queries import list_object, message_of, show_object
from perdure.admin.text import LINE, SEALED_SHOWN, STEPS_SHOWN, WHAT, list_lines, show_lines, span, summary, tail_line
from perdure.store.records import (
    NO_USAGE,
    AskRecord,
    CallRecord,
    Event,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
    ToolStepRecord,
    Usage,
    UsageRecord,
)

NOW = 1_800_000_000.0
ID = SessionId("S" * 43)
NODE, OTHER = NodeId("nodeAAAAxxxxxxxxxxxxxx"), NodeId("nodeBBBBxxxxxxxxxxxxxx")
STANDALONE, CALL = StreamId("standalonexxxxxxxxxxxx"), StreamId("callxxxxxxxxxxxxxxxxxx")


def a_stream(stream: StreamId = CALL, *, kind: Kind = Kind.CALL, sealed: bool = False, last: int = 7) -> StreamRecord:
    return StreamRecord(
        id=stream,
        session=ID,
        kind=kind,
        node=NodeId("") if sealed else NODE,
        fence=Fence(1),
        opened=NOW - 60,
        generation=2,
        last=last,
        sealed=sealed,
    )


def a_call(
    request: dict[str, object], *, method: str = "tools/call", state: CallState = CallState.RUNNING, number: int = 3
) -> CallRecord:
    return CallRecord(
        session=ID,
        incarnation=1,
        request_id=number,
        stream=CALL,
        method=method,
        request=json.dumps(request).encode(),
        principal="alice",
        attempt=2,
        state=state,
    )


RECORD = SessionRecord(
    id=ID,
    owner="alice",
    state=SessionState.ACTIVE,
    version="2025-11-25",
    client_params=b'{"clientInfo":{"name":"inspector","version":"1.2"}}',
    result=b'{"serverInfo":{"name":"shop"}}',
    initialized=True,
    sticky=(b'{"jsonrpc":"2.0","id":0,"method":"logging/setLevel","params":{"level":"debug"}}',),
    incarnation=4,
    standalone=STANDALONE,
    created=NOW - 7_300,
    active=NOW - 12,
)
OVERVIEW = list_object(
    RECORD,
    usage=Usage([a_stream(STANDALONE, kind=Kind.STANDALONE), a_stream(), a_stream(StreamId("other"))], newest=NOW - 5),
    calls=[a_call({}), a_call({}, state=CallState.WAITING)],
)
PARTS: dict[str, Any] = {
    "record": RECORD,
    "usage": Usage(
        [a_stream(STANDALONE, kind=Kind.STANDALONE), a_stream(), a_stream(StreamId("old"), sealed=True)],
        readers=[ReaderRecord(stream=CALL, reader=reader_name(OTHER, 7, NOW - 30), node=OTHER, seq=5)],
    ),
    "calls": [a_call({"params": {"name": "count"}}), a_call({}, state=CallState.ANSWERED, number=4)],
    "tool_steps": [],
    "asks": [
        AskRecord(session=ID, id="ask-1", stream=CALL, request=b'{"id":"ask-1","method":"roots/list"}', node=NODE),
    ],
    "retained": {StreamId("old"): UsageRecord(stream=StreamId("old"), opened=NOW - 60, events=6, answers=1)},
    "has_token": True,
}


def shown(nodes: frozenset[NodeId] = frozenset({NODE}), **parts: Any) -> list[str]:
    """The lines of the session above, with other parts."""
    return show_lines(show_object(**{**PARTS, **parts}), nodes=nodes, now=NOW)


# The list


def test_a_session_is_one_line() -> None:
    assert list_lines([OVERVIEW], now=NOW) == [
        f"{'ID':<43}  KIND     OWNER  STATE   AGE  ACTIVE  READER  CALLS  NODE      WHAT",
        f"{ID}  session  alice  active  2h   5s      60s     2      nodeAAAA  inspector 1.2",
    ]


def test_long_names_are_cut() -> None:
    call = {"state": "cancelled", "node": NODE, "name": "n" * 99}
    words = list_lines([{**OVERVIEW, "owner": "o" * 40, "call": call}], now=NOW)[1].split()
    assert [(len(word), word[-1]) for word in (words[2], words[-1])] == [(17, "…"), (WHAT + 1, "…")]


def test_no_owner_and_no_home_are_dashes() -> None:
    session = list_object(
        dataclasses.replace(RECORD, owner="", client_params=b"{}"),
        usage=Usage([dataclasses.replace(a_stream(STANDALONE), node=NodeId(""))]),
        calls=[a_call({})],
    )
    assert list_lines([session], now=NOW)[1].split() == [
        ID,
        "session",
        "-",
        "active",
        "2h",
        "12s",
        "-",
        "1",
        "-",
        "-",
    ]


def test_the_object_of_a_session_in_the_list_has_keys_that_stay() -> None:
    assert OVERVIEW == {
        "kind": "session",
        "id": ID,
        "owner": "alice",
        "owner_name": "alice",
        "state": "active",
        "version": "2025-11-25",
        "created": NOW - 7_300,
        "active": NOW - 5,
        "client_name": "inspector 1.2",
        "readers": 2,
        "connected": NOW - 60,
        "calls": 2,
        "streams": 3,
        "home": NODE,
        "call": None,
    }


NAME = reader_name(OTHER, 7, NOW - 30)


@pytest.mark.parametrize(
    ("stream", "row", "living", "seen"),
    [
        ({"kind": Kind.STANDALONE}, None, None, None),
        ({"kind": Kind.STANDALONE}, NAME, None, {"node": OTHER, "seq": 5, "since": NOW - 30}),
        ({"kind": Kind.STANDALONE}, NAME, {NODE}, None),  # it died with its node
        ({"kind": Kind.STANDALONE}, "an earlier release", {OTHER}, {"node": OTHER, "seq": 5, "since": None}),
        ({"delivered": 6}, None, {NODE}, {"node": NODE, "seq": 6, "since": NOW - 60}),  # it came with the call
        ({}, None, set(), None),
        ({"unread": True}, None, None, None),
        ({"unread": True}, NAME, None, {"node": OTHER, "seq": 5, "since": NOW - 30}),  # it has resumed
        ({"sealed": True}, NAME, None, None),
        ({"node": NodeId("")}, None, None, None),
    ],
)
def test_a_reader_is_connected_if_it_has_a_row_or_came_with_a_call_and_its_node_lives(
    stream: dict[str, Any], row: str | None, living: set[NodeId] | None, seen: dict[str, Any] | None
) -> None:
    read = dataclasses.replace(a_stream(), **stream)
    usage = Usage([read], readers=() if row is None else [ReaderRecord(stream=CALL, reader=row, node=OTHER, seq=5)])
    assert show_object(**{**PARTS, "usage": usage}, living=living)["streams"][0]["reader"] == seen
    listed = list_object(RECORD, calls=(), usage=usage, living=living)
    assert (listed["readers"], listed["connected"]) == ((1, seen["since"]) if seen else (0, None))
    reader = "-" if seen is None else "yes" if seen["since"] is None else f"{NOW - seen['since']:.0f}s"
    assert list_lines([listed], now=NOW)[1].split()[6] == reader


def test_a_session_is_as_active_as_its_newest_event() -> None:
    later = Usage(newest=NOW - 1)
    assert list_object(RECORD, calls=(), usage=later)["active"] == NOW - 1
    assert list_object(RECORD, calls=(), usage=Usage(newest=NOW - 99))["active"] == RECORD.active
    assert show_object(**{**PARTS, "usage": later})["active"] == NOW - 1


# Durable calls

TASK = dataclasses.replace(
    RECORD,
    kind=RecordKind.CALL,
    is_task=True,
    version="2026-07-28",
    incarnation=1,
    sticky=(),
    result=b"",
    standalone=StreamId(""),
)
RUNNING = a_call({"params": {"name": "count"}})


def test_a_call_that_its_client_can_ask_for_is_a_task_and_has_the_state_of_its_row() -> None:
    listed = list_object(TASK, usage=Usage([a_stream()]), calls=[RUNNING])
    assert (listed["kind"], listed["state"], listed["home"], listed["calls"]) == ("task", "active", None, 1)
    assert listed["call"] == {"method": "tools/call", "name": "count", "state": "running", "attempt": 2, "node": NODE}
    ended = a_call({}, state=CallState.SETTLED)
    over = list_object(dataclasses.replace(TASK, is_task=False), usage=Usage([a_stream(sealed=True)]), calls=[ended])
    assert (over["kind"], over["calls"], over["streams"], over["call"]["node"]) == ("call", 0, 0, None)
    assert list_lines([listed, over], now=NOW) == [
        f"{'ID':<43}  KIND  OWNER  STATE    AGE  ACTIVE  READER  CALLS  NODE      WHAT",
        f"{ID}  task  alice  running  2h   12s     60s     1      nodeAAAA  count",
        f"{ID}  call  alice  settled  2h   12s     -       0      -         tools/call",
    ]


def test_of_a_call_only_its_record_may_be_left() -> None:
    listed = list_object(dataclasses.replace(TASK, state=SessionState.ENDED), usage=NO_USAGE, calls=())
    assert (listed["kind"], listed["state"], listed["call"]) == ("task", "ended", None)
    assert list_lines([listed], now=NOW)[1].split()[:4] == [ID, "task", "alice", "ended"]


def test_a_task_is_shown_with_its_call_and_without_what_only_sessions_have() -> None:
    lines = shown(record=TASK, usage=Usage([a_stream()]), calls=[RUNNING], retained={}, has_token=False)
    assert lines[:10] == [
        f"task          {ID}",
        "owner         alice",
        "state         running",
        "version       2026-07-28",
        "client        inspector 1.2",
        "created       2027-01-15 05:58:20Z (2h ago)",
        "last active   2027-01-15 07:59:48Z (12s ago)",
        "connected     1 reader since 2027-01-15 07:59:00Z (60s)",
        f"node          {NODE}",
        "retained      0 events and 0 answers of 0 sealed streams",
    ]
    assert lines[10:14] == [
        "",
        "calls: 1",
        "  REQUEST  STATE    ATTEMPT  NODE      STREAM    METHOD",
        "  3        running  2        nodeAAAA  callxxxx  tools/call count",
    ]


# One session


def test_everything_about_a_session_is_shown() -> None:
    """S6"""
    assert shown() == [
        f"session       {ID}",
        "owner         alice",
        "state         active",
        "version       2025-11-25",
        "incarnation   4",
        "client        inspector 1.2",
        "initialized   yes",
        "created       2027-01-15 05:58:20Z (2h ago)",
        "last active   2027-01-15 07:59:48Z (12s ago)",
        "connected     1 reader since 2027-01-15 07:59:30Z (30s)",
        f"home          {NODE}",
        "resume token  yes",
        'sticky        logging/setLevel {"level":"debug"}',
        "retained      6 events and 1 answer of 1 sealed stream",
        "",
        "running calls: 1",
        "  REQUEST  STATE    ATTEMPT  NODE      STREAM    METHOD",
        "  3        running  2        nodeAAAA  callxxxx  tools/call count",
        "",
        "open asks: 1",
        "  ASK    NODE      STREAM    METHOD",
        "  ask-1  nodeAAAA  callxxxx  roots/list",
        "",
        "streams: 3",
        "  STREAM    KIND        LAST  STATE   AGE  GEN  NODE      READER        KEPT",
        "  standalo  standalone  7     open    60s  2    nodeAAAA  -             -",
        "  callxxxx  call        7     open    60s  2    nodeAAAA  nodeBBBB 30s  -",
        "  old       call        7     sealed  60s  2    -         -             6+1",
    ]


STEPS = [
    ToolStepRecord(
        stream=CALL,
        incarnation=1,
        request_id=3,
        number=number,
        kind=kind,
        name=name,
        state=state,
        again=False,
        own=True,
        attempt=attempt,
        began=NOW - began,
        ended=ended,
        value=b'"secret"',
    )
    for number, (kind, name, state, attempt, began, ended) in enumerate(
        [
            (ToolStepKind.STEP, "price", ToolStepState.ENDED, 1, 60, NOW - 59.75),
            (ToolStepKind.ASK, "0123abcd", ToolStepState.ENDED, 1, 59, NOW - 39),
            (ToolStepKind.STEP, "mail", ToolStepState.FAILED, 1, 39, NOW - 38.99995),
            (ToolStepKind.SLEEP, "nap", ToolStepState.OPEN, 2, 30, NOW + 3_570),
            (ToolStepKind.STEP, "mail", ToolStepState.OPEN, 2, 5, None),
            (ToolStepKind.SLEEP, "cut", ToolStepState.ENDED, 2, 4, NOW + 3_570),
        ],
        1,
    )
]


def test_a_call_whose_tool_asks_is_shown_so() -> None:
    """Also where its question is on the session's own stream."""
    ask = AskRecord(
        session=ID, id="ask-2", stream=STANDALONE, request=b"{}", node=NODE, call=CALL, incarnation=1, request_id=3
    )
    whole = show_object(**{**PARTS, "asks": [*PARTS["asks"], ask]})
    assert [call["asks"] for call in whole["calls"]] == [1, 0]
    assert [line.split()[:3] for line in shown(asks=[ask]) if line.startswith("  3 ")] == [["3", "running,", "asks"]]


def test_the_steps_of_tools_are_shown_without_their_values() -> None:
    lines = shown(tool_steps=STEPS)
    begin = lines.index("steps of tools: 6")
    assert lines[begin - 1 : begin + 9] == [
        "",
        "steps of tools: 6",
        "  REQUEST  STEP      KIND   STATE                              BEGAN                 TAKES  RUN",
        "  3        price     step   ended                              2027-01-15 07:59:00Z  0.25s  1",
        "  3        question  ask    ended                              2027-01-15 07:59:01Z  20s    1",
        "  3        mail      step   failed                             2027-01-15 07:59:21Z  0s     1",
        "  3        nap       sleep  sleeps until 2027-01-15 08:59:30Z  2027-01-15 07:59:30Z  60m    2",
        "  3        mail #2   step   open                               2027-01-15 07:59:55Z  -      2",
        "  3        cut       sleep  ended                              2027-01-15 07:59:56Z  -      2",
        "",
    ]
    whole = show_object(**{**PARTS, "tool_steps": STEPS})
    assert whole["calls"][0]["steps"][4] == {
        "name": "mail #2",
        "kind": "step",
        "state": "open",
        "attempt": 2,
        "began": NOW - 5,
        "ended": None,
    }
    assert "secret" not in json.dumps(whole)


def test_the_steps_of_a_call_that_has_ended_are_shown_before_those_of_running_ones() -> None:
    of_ended = dataclasses.replace(STEPS[0], name="earlier", request_id=4)
    lines = shown(tool_steps=[STEPS[0], of_ended])
    begin = lines.index("steps of tools: 2")
    assert [line.split()[1] for line in lines[begin + 2 : begin + 4]] == ["earlier", "price"]


def test_of_many_steps_the_newest_are_shown_and_the_rest_is_counted() -> None:
    many = [dataclasses.replace(STEPS[0], number=number) for number in range(1, 1_001)]
    lines = shown(tool_steps=many)
    begin = lines.index("steps of tools: 1,000")
    assert lines[begin + 2].split()[1:3] == ["price", f"#{1_001 - STEPS_SHOWN}"]
    assert lines[begin + 2 + STEPS_SHOWN] == f"  … after {1_000 - STEPS_SHOWN} older ones; --json has them all"


def test_why_a_session_ended_is_shown() -> None:
    record = dataclasses.replace(
        RECORD, state=SessionState.ENDED, ended="operator ended", sticky=(), client_params=b"?"
    )
    lines = shown(record=record, usage=NO_USAGE, calls=(), asks=(), retained={}, has_token=False)
    assert "resume token  no" in lines
    assert "state         ended: operator ended" in lines
    assert "client        -" in lines
    assert lines[-5:] == ["running calls: none", "", "open asks: none", "", "streams: none"]


def test_a_home_that_is_gone_is_told() -> None:
    assert f"home          {NODE} (gone)" in shown(nodes=frozenset())


def test_of_many_sealed_streams_the_newest_are_shown_and_the_rest_is_counted() -> None:
    old = [a_stream(StreamId(f"{number:08}"), sealed=True) for number in range(SEALED_SHOWN + 5)]
    lines = shown(usage=Usage([PARTS["usage"].streams[0], *old]))
    chapter = lines[lines.index(f"streams: {SEALED_SHOWN + 6}") + 2 :]
    assert [line.split()[0] for line in chapter[:3]] == ["standalo", "00000024", "00000023"]
    assert chapter[-1] == "  … and 5 older ones that are sealed; --json has them all"


def test_the_object_of_a_session_has_everything() -> None:
    """S6"""
    seen = show_object(**PARTS)
    assert seen["client"] == {"clientInfo": {"name": "inspector", "version": "1.2"}}
    assert seen["sticky"][0]["method"] == "logging/setLevel"
    assert [(call["name"], call["state"], call["node"]) for call in seen["calls"]] == [
        ("count", "running", NODE),
        (None, "answered", NODE),
    ]
    assert seen["asks"][0]["request"] == {"id": "ask-1", "method": "roots/list"}
    assert seen["streams"][1] == {
        "id": CALL,
        "kind": "call",
        "last": 7,
        "sealed": False,
        "generation": 2,
        "opened": NOW - 60,
        "node": NODE,
        "reader": {"node": OTHER, "seq": 5, "since": NOW - 30},
        "events": None,
        "answers": None,
    }
    assert (seen["home"], seen["ended"], seen["streams"][2]["events"]) == (NODE, None, 6)
    assert seen["resume_token"] is True
    assert json.loads(json.dumps(seen)) == seen


# What is followed


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            {"method": "notifications/progress", "params": {"progressToken": 3, "progress": 2, "total": 10}},
            "notifications/progress 2/10 (token 3)",
        ),
        (
            {"method": "notifications/progress", "params": {"progressToken": "a", "progress": 0.5, "message": "half"}},
            'notifications/progress 0.5 half (token "a")',
        ),
        (
            {"method": "notifications/message", "params": {"level": "info", "data": "é"}},
            'notifications/message {"level":"info","data":"é"}',
        ),
        ({"method": "notifications/tools/list_changed"}, "notifications/tools/list_changed"),
        ({"id": "ask-1", "method": "roots/list", "params": {"_meta": {"a": 1}}}, 'ask "ask-1" roots/list'),
        ({"id": 3, "result": {"content": []}}, 'answer 3: {"content":[]}'),
        ({"id": 3, "error": {"code": -31001, "message": "interrupted"}}, "error 3: interrupted (-31001)"),
        ({"id": 3, "error": "odd"}, '{"id": 3, "error": "odd"}'),
    ],
)
def test_a_message_is_told_in_few_words(message: dict[str, object], line: str) -> None:
    assert summary(message_of(json.dumps(message).encode())) == line


@pytest.mark.parametrize("payload", [b"", b"\xff\xfe", b"[1]", b"7", b"not json"])
def test_what_is_no_message_is_shown_as_it_is(payload: bytes) -> None:
    assert summary(message_of(payload)) == payload.decode(errors="replace")


OF_CALL = {"stream": CALL, "kind": "call"}
COUNT = a_call({"params": {"name": "count"}})


@pytest.mark.parametrize(
    ("item", "members", "line"),
    [
        (
            queries.opened(a_stream(), [COUNT]),
            {
                **{"what": "opened", "time": NOW - 60, **OF_CALL},
                "calls": [{"request_id": 3, "method": "tools/call", "name": "count"}],
            },
            "07:59:00.000  call        callxxxx          opened: tools/call count (request 3)",
        ),
        (
            queries.opened(a_stream(STANDALONE, kind=Kind.STANDALONE), ()),
            {"what": "opened", "time": NOW - 60, "stream": STANDALONE, "kind": "standalone", "calls": []},
            "07:59:00.000  standalone  standalo          opened",
        ),
        (
            queries.trimmed(a_stream(), 1, 10),
            {"what": "gap", **OF_CALL, "first": 1, "last": 10},
            "              call        callxxxx          gap: 1 to 10 are no longer there",
        ),
        (
            queries.trimmed(a_stream(), 11, 11),
            {"what": "gap", **OF_CALL, "first": 11, "last": 11},
            "              call        callxxxx          gap: 11 is no longer there",
        ),
        (
            queries.appended(a_stream(), Event(12, NOW + 0.25, b'{"id":3,"result":{}}', True)),
            {
                "what": "event",
                "time": NOW + 0.25,
                **OF_CALL,
                "seq": 12,
                "final": True,
                "message": {"id": 3, "result": {}},
            },
            "08:00:00.250  call        callxxxx  12      answer 3: {}",
        ),
        (
            queries.appended(a_stream(), Event(13, NOW, b"odd", False)),
            {"what": "event", "time": NOW, **OF_CALL, "seq": 13, "final": False, "message": "odd"},
            "08:00:00.000  call        callxxxx  13      odd",
        ),
        (
            queries.ended(ID, "client deleted"),
            {"what": "ended", "session": ID, "record": "session", "reason": "client deleted"},
            f"session {ID} has ended: client deleted",
        ),
        (
            queries.ended(ID, "answered", kind=queries.EntryKind.TASK),
            {"what": "ended", "session": ID, "record": "task", "reason": "answered"},
            f"task {ID} has ended: answered",
        ),
    ],
)
def test_each_thing_that_happens_is_an_object_and_a_line(item: JsonObject, members: JsonObject, line: str) -> None:
    assert (item, tail_line(item)) == (members, line)


def test_a_line_with_a_large_message_is_cut() -> None:
    payload = json.dumps({"id": 3, "result": {"text": "bread " * 100}}).encode()
    line = tail_line(queries.appended(a_stream(), Event(1, NOW, payload)))
    assert (len(line), line[-1]) == (LINE + 1, "…")


# What a peer wrote does no harm


NASTY = "\x1b[2J\x9b31m\r\n\N{RIGHT-TO-LEFT OVERRIDE}\ud800"


@pytest.mark.parametrize(
    "lines",
    [
        lambda: list_lines([{**OVERVIEW, "owner": NASTY, "id": NASTY, "version": NASTY}], now=NOW),
        lambda: shown(
            record=dataclasses.replace(
                RECORD, owner=NASTY, client_params=json.dumps({"clientInfo": {"name": NASTY}}).encode()
            ),
            calls=[a_call({"params": {"name": NASTY}})],
            asks=[AskRecord(session=ID, id=NASTY, stream=CALL, request=b'{"method":"\xc2\x9b"}', node=NODE)],
        ),
        lambda: [
            tail_line(
                queries.appended(a_stream(), Event(1, NOW, json.dumps({"id": 1, "method": NASTY}).encode())),
            )
        ],
    ],
    ids=["list", "show", "tail"],
)
def test_nothing_that_a_peer_wrote_reaches_the_terminal_as_a_command(lines: Callable[[], list[str]]) -> None:
    written = lines()
    assert all(line.isprintable() for line in written)
    assert any("\N{REPLACEMENT CHARACTER}" in line for line in written)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-5, "0s"),
        (0, "0s"),
        (119.9, "119s"),
        (120, "2m"),
        (7_199, "119m"),
        (7_200, "2h"),
        (172_800, "2d"),
        (1e9, "11574d"),
    ],
)
def test_a_span_is_said_in_one_unit(seconds: float, said: str) -> None:
    assert span(seconds) == said
