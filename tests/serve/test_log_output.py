"""What the log of a serving process shows, and how several processes write to one stderr."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from perdure.cli.serve import quiet_fastmcp
from perdure.serve.log_output import TURN_SECONDS, SharedStream, ShownRecords, name_call
from perdure.telemetry.log_records import CallIds, current_call
from tests.support.processes.serving import ROOT

LIBRARIES = ("/venv/site-packages", "/usr/lib/python3.11")


def is_shown(name: str, file: str, level: int = logging.DEBUG, target: str = "acme.servers:shop") -> bool:
    record = logging.LogRecord(name, level, file, 1, "said", (), None)
    return ShownRecords(target, LIBRARIES)(record)


@pytest.fixture
def chatty() -> Iterator[str]:
    """A library's logger whose level the user's code has set."""
    logging.getLogger("chatty").setLevel(logging.DEBUG)
    yield "chatty.pool"
    logging.getLogger("chatty").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("name", "file", "shown"),
    [
        ("perdure", "/venv/site-packages/perdure/telemetry/events.py", True),
        ("perdure.store.postgres.listen_connection", "/venv/site-packages/perdure/store/postgres/ear.py", True),
        ("mcp.server.lowlevel.server", "/venv/site-packages/mcp/server/lowlevel/server.py", False),
        ("client", "/venv/site-packages/mcp/client/session.py", False),  # the SDK's, by a name that anyone may use
        ("client", "/srv/shop/client.py", True),
        ("asyncio", "/usr/lib/python3.11/asyncio/selector_events.py", False),
        ("importlib", "<frozen importlib._bootstrap>", False),
        ("acme.orders", "/venv/site-packages/acme/orders.py", True),  # the target is installed
        ("acme", "/venv/site-packages/acme.py", True),
        ("acme_tools", "/venv/site-packages/acme_tools/orders.py", False),
        ("chatty.pool", "/venv/site-packages/chatty/pool.py", True),
    ],
)
def test_below_warning_only_perdure_and_the_user_s_own_code_are_shown(
    chatty: str, name: str, file: str, shown: bool
) -> None:
    assert is_shown(name, file) is shown
    assert is_shown(name, file, logging.WARNING)


def test_a_target_in_a_file_makes_no_library_the_user_s_own() -> None:
    assert not is_shown("mcp", "/venv/site-packages/mcp/a.py", target="./mcp/shop.py:server")
    assert is_shown("shop", "/srv/mcp/shop.py", target="./mcp/shop.py:server")


@pytest.mark.parametrize(
    ("name", "action", "named"),
    [
        ("acme.orders", None, True),
        ("perdure", "call.failed", True),
        ("perdure", "store.degraded", False),  # the call has only met it first
        ("perdure.store.postgres.listen_connection", None, False),
    ],
)
def test_a_record_names_the_call_in_which_it_was_written_if_it_is_about_that(
    name: str, action: str | None, named: bool
) -> None:
    record = logging.makeLogRecord({"name": name, "action": action})
    before = current_call.set(CallIds("a-session", "a-stream", 2))
    assert name_call(record)
    current_call.reset(before)
    assert ("session" in vars(record)) is named


WRITER = """
import logging, sys
from perdure.cli.serve import quiet_fastmcp
from perdure.serve.log_output import start_log
start_log("info", "json", target="", colors=False, shared=True)
sys.stdin.readline()
for number in range(50):
    logging.info("%s", number, extra={"worker": sys.argv[1]}, exc_info=ValueError(("x" * 70 + chr(10)) * 300))
"""


def test_records_longer_than_a_pipe_takes_in_one_piece_do_not_tear_between_processes() -> None:
    reading, writing = os.pipe()
    started = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(number)], stdin=subprocess.PIPE, stderr=writing, cwd=ROOT)
        for number in range(3)
    ]
    os.close(writing)
    for process in started:
        assert process.stdin is not None
        process.stdin.close()  # and all begin
    with open(reading, encoding="utf-8") as lines:
        told = [json.loads(line) for line in lines]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert all(line["exception"].startswith("ValueError: xxx") for line in told)
    wanted = sorted((str(worker), str(number)) for worker in range(3) for number in range(50))
    assert sorted((line["worker"], line["message"]) for line in told) == wanted


def test_a_process_that_is_stuck_while_it_writes_holds_the_others_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedStream, "_patience", 0.2)
    reading, writing = os.pipe()
    held = "import fcntl, sys; fcntl.lockf(2, fcntl.LOCK_EX); print(flush=True); sys.stdin.readline()"
    stuck = subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing
    )
    assert stuck.stdout is not None
    stuck.stdout.readline()
    with open(writing, "w", encoding="utf-8") as stream:
        handler, began = SharedStream(stream), time.monotonic()
        handler.emit(logging.makeLogRecord({"msg": "it goes on"}))
        assert time.monotonic() - began >= 0.2
        assert handler._patience == 0.0
        handler.emit(logging.makeLogRecord({"msg": "and on"}))
        stuck.communicate(b"\n")
        handler.emit(logging.makeLogRecord({"msg": "in its turn again"}))
        assert handler._patience == TURN_SECONDS
    with open(reading, "rb") as lines:
        assert lines.read() == b"it goes on\nand on\nin its turn again\n"


def test_fastmcp_is_told_by_the_environment_to_set_up_no_log_and_its_children_are_not() -> None:
    settings = pytest.importorskip("fastmcp.settings")
    with quiet_fastmcp():
        assert settings.Settings().log_enabled is False
    assert "FASTMCP_LOG_ENABLED" not in os.environ
    assert settings.Settings().log_enabled is True


def test_what_the_user_says_of_fastmcp_s_log_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTMCP_LOG_ENABLED", "true")
    with quiet_fastmcp():
        assert os.environ["FASTMCP_LOG_ENABLED"] == "true"
    assert os.environ["FASTMCP_LOG_ENABLED"] == "true"
