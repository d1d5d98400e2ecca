"""A peer cannot write into the log of `perdure serve` what is not so, nor act on the terminal that shows it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from perdure.telemetry.events import MAX_LINE, MAX_LINES, MAX_SENTENCE, LogLines, log_event
from tests.support.raw import VERSION, Peer, message
from tests.support.serving import serving

pytestmark = pytest.mark.anyio

FORGED = "perdure: ERROR: forged"
EVIL = f"a\n{FORGED}\x1b[2J\u202e\x85\u2028\r{FORGED}"
SAFE = f"a�{FORGED}�[2J����{FORGED}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STUBBORN_FOLDER", str(tmp_path))
    return tmp_path


def formatted(record: logging.LogRecord) -> list[str]:
    return LogLines("perdure: %(levelname)s: %(message)s").format(record).split("\n")


async def test_what_a_peer_wrote_forges_no_line_and_reaches_no_terminal() -> None:
    options = ("--store", "memory:", "--log-level", "debug")
    async with serving("tests.support.stubborn:server", *options) as served:
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
    assert "perdure: ERROR: handler for 'prompts/get' raised" in said
    assert "    ValueError: Unknown prompt: a" in said  # and what the peer wrote behind it, indented like it
    assert next(said) == f"    {SAFE[2:]}"
    assert "perdure: DEBUG: no handler for notification a" in said
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
    long = "x" * (MAX_LINE - len("perdure: ERROR: ") + over)
    many = "\ny" * (MAX_LINES + over)
    record = logging.LogRecord("mcp", logging.ERROR, "", 0, long + many, (), None)
    first, *rest = formatted(record)
    assert first == f"perdure: ERROR: {long}"[:MAX_LINE] + "…" * over
    assert rest == ["    y"] * MAX_LINES + ["    … 1 more lines"] * over
