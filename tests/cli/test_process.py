"""`perdure serve` in a process of its own: ready line, signals, stores, tokens, logging."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.serving import Line, log_lines
from tests.support.processes.starting_sync import Program, start_interpreter
from tests.support.processes.starting_sync import start as start_module

SECONDS = 30
FREE_PORT = ("--port", "0")

HELLO = """\
import logging
from mcp.server.mcpserver import MCPServer
server = MCPServer("hello")
logging.getLogger("hello").warning("a warning of the target")
"""


@pytest.fixture
def hello(tmp_path: Path) -> Path:
    (tmp_path / "hello_server.py").write_text(HELLO)
    return tmp_path


def start(folder: Path, *options: str, target: str = "hello_server:server") -> Program:
    return start_module("perdure", "serve", target, *FREE_PORT, *options, cwd=folder)


@pytest.fixture
def served(hello: Path) -> Iterator[tuple[Program, int]]:
    # The others are forks of a process that has everything imported; here nothing but the command itself is at work.
    process = start_interpreter(
        "perdure", "serve", "hello_server:server", *FREE_PORT, "--log-level", "error", cwd=hello
    )
    try:
        yield process, port_of(process)
    finally:
        process.kill()
        process.communicate()


def port_of(process: Program) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"perdure: serving on http://127\.0\.0\.1:(\d+)/mcp\n", line)
    assert found, (line, process.communicate(timeout=SECONDS))
    return int(found[1])


def ended(process: Program) -> tuple[int | None, str, str]:
    said, errors = process.communicate(timeout=SECONDS)
    return process.returncode, said, errors


INITIALIZE = (
    b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},'
    b'"clientInfo":{"name":"t","version":"1"}}}'
)
HEADERS = (
    "host: 127.0.0.1:{port}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\n{more}"
)


def exchange(port: int, method: str, body: bytes = b"", more: str = "") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    head = f"{method} /mcp HTTP/1.1\r\n{HEADERS.format(port=port, more=more)}content-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def open_session(port: int, more: str = "") -> str:
    with exchange(port, "POST", INITIALIZE, f"connection: close\r\n{more}") as connection:
        received = b"".join(iter(lambda: connection.recv(65_536), b""))
    found = re.search(rb"(?i)mcp-session-id: (\S+)", received)
    assert found, received
    return found[1].decode()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly_while_a_stream_is_open(served: tuple[Program, int], sent: signal.Signals) -> None:
    process, port = served
    session = open_session(port)
    with exchange(port, "GET", more=f"mcp-session-id: {session}\r\n") as stream:
        assert stream.recv(65_536).startswith(b"HTTP/1.1 200 OK")
        process.send_signal(sent)
        while stream.recv(65_536):
            pass
    assert ended(process) == (0, "", "")


def test_the_store_is_made_in_the_current_directory_by_default(served: tuple[Program, int], hello: Path) -> None:
    open_session(served[1])
    assert (hello / "perdure.db").is_file()


def test_logging_is_ours_with_the_level_asked_for(hello: Path) -> None:
    process = start(hello, "--store", "memory:")
    port_of(process)
    process.send_signal(signal.SIGTERM)
    status, said, errors = ended(process)
    assert (status, said) == (0, "")
    assert log_lines(errors.splitlines()) == [Line("WARNING", "hello", "a warning of the target")]


def test_others_that_could_reach_it_are_warned_about(hello: Path) -> None:
    process = start(hello, "--store", "memory:", "--host", "0.0.0.0")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("perdure: serving on http://0.0.0.0:")
    process.send_signal(signal.SIGTERM)
    status, _, errors = ended(process)
    assert status == 0
    sentence = "other machines can reach 0.0.0.0, and everyone may use it: set --tokens or --issuer"
    assert Line("WARNING", "serve.open", sentence) in log_lines(errors.splitlines())


def refused(process: Program) -> str:
    status, said, errors = ended(process)
    assert (status, said) == (2, "")
    found = re.fullmatch(r"perdure: ([^\n]+)\n", errors)
    assert found, errors
    return found[1]


def test_an_object_that_is_no_server_is_refused(hello: Path) -> None:
    (hello / "number.py").write_text("server = 42\n")
    assert "the object to serve is a builtins.int, not an MCP server" in refused(
        start(hello, target="number.py:server")
    )


def test_a_store_that_cannot_be_is_refused(hello: Path) -> None:
    assert "x.db" in refused(start(hello, "--store", "sqlite:no/such/dir/x.db", "--log-level", "error"))


def test_a_server_whose_own_start_fails_is_refused(hello: Path) -> None:
    (hello / "broken.py").write_text(
        "from contextlib import asynccontextmanager\n"
        "from mcp.server.mcpserver import MCPServer\n"
        "@asynccontextmanager\n"
        "async def lifespan(server):\n"
        "    raise KeyError('DATABASE')\n"
        "    yield\n"
        "server = MCPServer('broken', lifespan=lifespan)\n"
    )
    status, said, errors = ended(start(hello, "--store", "memory:", target="broken.py:server"))
    assert (status, said) == (2, "")
    assert errors.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{hello}/broken.py", line 5, in lifespan',
        "    raise KeyError('DATABASE')",
        "KeyError: 'DATABASE'",
        "perdure: the server did not start: KeyError: 'DATABASE' (broken.py:5)",
    ]


def test_tokens_decide_who_comes_in(hello: Path) -> None:
    (hello / "tokens").write_text("alice:0123456789abcdef\n")
    (hello / "tokens").chmod(0o600)
    process = start(hello, "--store", "memory:", "--tokens", "tokens", "--log-level", "error")
    try:
        port = port_of(process)
        for header, status in [("", b"401"), ("authorization: Bearer 0123456789abcdef\r\n", b"200")]:
            with exchange(port, "POST", INITIALIZE, header) as connection:
                assert connection.recv(65_536).split(b" ")[1] == status
    finally:
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "", "")
