"""The lines of the log of `perdure serve`. A peer cannot write into it what is not so, nor act on the terminal."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.telemetry.log_records import MAX_LINE, MAX_LINES, MAX_SENTENCE, JsonLines, LogLines, TextLines, log_event
from tests.support.clients.modern_requests import modern
from tests.support.clients.raw_http import VERSION, Peer, message
from tests.support.processes.serving import serving

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


pytestmark = pytest.mark.anyio

FORGED = "2026-11-16T15:04:05.123Z ERROR    call.failed         forged"
EVIL = f"a\n{FORGED}\x1b[2J\u202e\x85\u2028\r{FORGED}"
SAFE = f"a�{FORGED}�[2J����{FORGED}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STUBBORN_FOLDER", str(tmp_path))
    return tmp_path


async def test_what_a_peer_wrote_forges_no_line_and_reaches_no_terminal() -> None:
    options = ("--store", "memory:", "--log-level", "debug")
    async with serving("tests.support.servers.slow_tools:server", *options) as served:
        peer = Peer(port=served.port)
        client = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": EVIL, "version": EVIL}}
        assert (await peer.ask("POST", message("initialize", client, id=0))).status == 200
        session = await peer.session()
        for body in (
            message(EVIL, {}, id=1),
            message("tools/call", {"name": EVIL, "arguments": {EVIL: EVIL}}, id=2),
            message("prompts/get", {"name": EVIL}, id=3),  # the SDK logs a traceback
            message("resources/read", {"uri": EVIL}, id=4),
            message("logging/setLevel", {"level": EVIL}, id=5),
            message(EVIL),
        ):
            assert (await session.ask("POST", body)).status in (200, 202)
        for name in ("last-event-id", "mcp-protocol-version", "mcp-session-id", "user-agent"):
            await session.ask("GET" if name == "last-event-id" else "DELETE", headers={name: "\x1b[2J\x85"})
        assert await served.stop() == 0
    assert all(line.isprintable() for line in served.output)
    assert [line for line in served.output if line.startswith(FORGED)] == []
    said = iter(served.output)
    assert any("the handler of prompts/get failed" in line for line in said)
    assert "    ValueError: Unknown prompt: a" in said  # and what the peer wrote behind it, indented like it
    assert next(said) == f"    {SAFE[2:]}"


def test_a_record_of_ours_is_safe_in_any_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="perdure"):
        log_event(logging.INFO, "call.rerun", f"a request runs again ({EVIL})", stream=EVIL, rows=3)
    [record] = caplog.records
    assert (record.message, vars(record)["stream"], vars(record)["rows"]) == (f"a request runs again ({SAFE})", SAFE, 3)


@pytest.mark.parametrize("length", [MAX_SENTENCE, MAX_SENTENCE + 1])
def test_a_sentence_has_a_limit(caplog: pytest.LogCaptureFixture, length: int) -> None:
    with caplog.at_level(logging.INFO, logger="perdure"):
        log_event(logging.INFO, "call.rerun", "x" * length)
    [record] = caplog.records
    assert record.message == "x" * MAX_SENTENCE + "…" * (length - MAX_SENTENCE)


@pytest.mark.parametrize("over", [0, 1])
def test_lines_and_their_number_have_limits(over: int) -> None:
    front = "2026-11-16T15:04:05.123Z ERROR    mcp                 "
    long = "x" * (MAX_LINE - len(front) + over)
    many = "\ny" * (MAX_LINES + over)
    first, *rest = LogLines("%(message)s").format(a_record(f"{front}{long}{many}")).split("\n")
    assert first == f"{front}{long}"[:MAX_LINE] + "…" * over
    assert rest == ["    y"] * MAX_LINES + ["    … 1 more lines"] * over


def a_record(sentence: str, *, level: int = logging.WARNING, name: str = "perdure", **facts: object) -> Any:
    """A record of 15:04:05.123 on 16 November 2026."""
    facts = {"created": 1_794_841_445.1234, "process": 4242, **facts}
    return logging.makeLogRecord(
        {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "msg": sentence} | facts
    )


GAP: dict[str, Any] = {
    "action": "stream.gap",
    "session": "LpAKL48j",
    "stream": "K3vJx0o8Qm2uYb7dT5aLwA",
    "position": "cK3vJx0o8Qm2uYb7dT5aLwA.000002.0000000042",
    "call": 'a "b"',
    "node": "Y7Ive-ON7DUUdNKwZ_tKXQ",
}


def test_a_line_has_a_time_a_level_an_action_a_sentence_and_the_ids_shortened() -> None:
    assert TextLines().format(a_record("events are gone", **GAP, rows=3)) == (
        "2026-11-16T15:04:05.123Z WARNING  stream.gap          events are gone"
        '  session=LpAKL48j stream=K3vJx0o8 position=K3vJx0o8.2.42 call="a \\"b\\"" node=Y7Ive-ON'
    )


def test_a_record_of_other_code_has_its_logger_s_name_for_an_action_and_ids_stay_on_its_first_line() -> None:
    record = a_record("one\ntwo", name="bakery.oven", level=logging.INFO, node="Y7Ive-ON7DUUdNKwZ_tKXQ")
    assert TextLines().format(record).split("\n") == [
        "2026-11-16T15:04:05.123Z INFO     bakery.oven         one  node=Y7Ive-ON",
        "    two",
    ]


def test_a_long_sentence_is_cut_and_the_ids_behind_it_are_not() -> None:
    line = TextLines().format(a_record("x" * MAX_LINE, **GAP))
    assert len(line) <= MAX_LINE
    assert line.endswith('xx…  session=LpAKL48j stream=K3vJx0o8 position=K3vJx0o8.2.42 call="a \\"b\\"" node=Y7Ive-ON')


def test_only_a_terminal_gets_escape_codes_and_a_peer_s_are_removed_there_as_well() -> None:
    record = a_record(EVIL)
    plain, colored = TextLines().format(record), TextLines(colors=True).format(record)
    assert "\x1b" not in plain
    assert colored == plain.replace("WARNING", "\x1b[33mWARNING\x1b[0m", 1)


def test_json_is_one_object_in_one_line_with_the_facts_and_the_exception_inside() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        record = a_record(EVIL, **GAP, rows=3, far=float("inf"), what=["a"], exc_info=sys.exc_info(), pid=-1)
    line = JsonLines().format(record)
    assert line.isascii()
    assert line.isprintable()
    told = json.loads(line)
    assert told.pop("exception").endswith(f"ValueError: {EVIL}")
    assert list(told.items()) == [
        ("time", "2026-11-16T15:04:05.123Z"),
        ("level", "warning"),
        ("logger", "perdure"),
        ("action", "stream.gap"),
        ("message", EVIL),
        ("pid", 4242),
        ("session", "LpAKL48j"),
        ("stream", "K3vJx0o8"),
        ("position", "K3vJx0o8.2.42"),
        ("call", 'a "b"'),
        ("node", "Y7Ive-ON"),
        ("rows", 3),
        ("far", "inf"),
        ("what", "['a']"),
    ]


@pytest.mark.parametrize("over", [0, 1])
def test_text_and_tracebacks_in_json_have_limits(over: int) -> None:
    record = a_record("x" * (MAX_LINE + over), exc_text="\n".join(["y"] * (MAX_LINES + over)), name="bakery")
    told = json.loads(JsonLines().format(record))
    assert told["message"] == "x" * MAX_LINE + "…" * over
    assert told["exception"].split("\n") == ["y"] * MAX_LINES + ["… 1 more lines"] * over
    assert told["action"] is None


def test_no_record_has_the_whole_id_of_a_session(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="perdure"):
        log_event(logging.INFO, "session.ended", "a session ended", session="S" * 43)
    assert vars(caplog.records[0])["session"] == "S" * 8


async def test_each_tool_call_is_a_line_with_its_tool_and_how_it_ended() -> None:
    """Calls of sessions, with their ids, and calls without one."""
    options = ("--store", "memory:", "--log-level", "info", "--log-format", "json")
    async with serving("tests.support.servers.slow_tools:server", *options) as served:
        peer = Peer(port=served.port)
        session = await peer.session()
        call = {"name": "look_for", "arguments": {"name": "."}}
        for params in (call, {**call, "arguments": {}}):
            assert (await session.ask("POST", message("tools/call", params, id=7))).status == 200
        body, headers = modern("tools/call", call)
        assert (await peer.ask("POST", body, headers=headers)).status == 200
        assert await served.stop() == 0
    lines = [json.loads(line) for line in served.output if line.startswith("{")]
    told = [line for line in lines if line["action"] == "call.answered"]
    ended = ("look_for has answered after ", "look_for gave an error after ", "look_for has answered after ")
    assert [line["message"].startswith(said) for line, said in zip(told, ended, strict=True)] == [True] * 3
    assert [line.get("call") for line in told] == [7, 7, None]
    assert all(session.headers["mcp-session-id"].startswith(line["session"]) for line in told[:2])
