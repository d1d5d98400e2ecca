"""Starting and stopping: one line when ready, a clean end on a signal, one reason when it does not start."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes.starting_sync import Program, start

ROOT = Path(__file__).parents[2]
SECONDS = 30


@contextmanager
def started(mode: str) -> Iterator[Program]:
    process = start("tests.serve.small_app", mode, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready_port(process: Program) -> int:
    """The port told by the ready line, which must be the first thing said."""
    assert process.stdout is not None
    found = re.fullmatch(r"perdure: serving on http://127\.0\.0\.1:(\d+)/\n", process.stdout.readline())
    assert found
    return int(found[1])


@contextmanager
def open_stream(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        read_to(connection, b"begun\r\n")
        yield connection


def read_to(connection: socket.socket, mark: bytes) -> None:
    received = b""
    while not received.endswith(mark):
        data = connection.recv(4096)
        assert data
        received += data


def rest(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(4096):
        received += data
    return received


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_open_streams_and_the_process_with_status_0(sent: signal.Signals) -> None:
    with started("fine") as process:
        with open_stream(ready_port(process)) as stream:
            process.send_signal(sent)
            if sent is signal.SIGTERM:  # a second one does no harm to a clean end
                process.send_signal(sent)
            assert rest(stream).endswith(b"0\r\n\r\n")
        assert process.communicate(timeout=SECONDS) == ("", "")
        assert process.returncode == 0


def test_what_is_loaded_is_not_searched_for_garbage_again_and_again() -> None:
    """A full collection of a server and its libraries stops all calls for 50 ms."""
    with started("looks-for-itself") as process, open_stream(ready_port(process)) as stream:
        process.send_signal(signal.SIGTERM)
        assert b"not found" in rest(stream)


def test_a_second_signal_does_not_wait_for_the_drain() -> None:
    with started("drains-for-ever") as process:
        with open_stream(ready_port(process)) as stream:
            process.send_signal(signal.SIGTERM)
            read_to(stream, b"draining\r\n")
            process.send_signal(signal.SIGTERM)
            assert rest(stream) == b"5\r\nended\r\n0\r\n\r\n"
        assert process.communicate(timeout=SECONDS) == ("", "")
        assert process.returncode == 0


ENDS = {
    "fine": (0, r""),  # right after the ready line
    "drain-raises": (0, r"draining failed\n.*ValueError: no plug\n"),
    "stuck-thread": (0, r"perdure: ended without waiting for what does not stop\n"),
    "stop-raises": (1, r".*disk full.*"),
}


@pytest.mark.parametrize("mode", ENDS)
def test_a_signal_ends_the_process_whatever_fails_meanwhile(mode: str) -> None:
    with started(mode) as process:
        ready_port(process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
    status, expected = ENDS[mode]
    assert process.returncode == status
    assert re.fullmatch(expected, errors, re.DOTALL)


def test_a_request_that_does_not_end_is_cut_off_without_a_traceback() -> None:
    with started("hangs") as process:
        with open_stream(ready_port(process)):
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=SECONDS)
        assert errors == "Cancel 1 running task(s), timeout graceful shutdown exceeded\n"
        assert process.returncode == 0


def test_control_c_twice_does_not_wait_for_a_request_that_does_not_end() -> None:
    with started("hangs") as process:
        with open_stream(ready_port(process)) as stream:
            process.send_signal(signal.SIGINT)
            read_to(stream, b"hanging\r\n")
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=SECONDS) == ("", "")
        assert process.returncode == 1


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("start-raises", r"the server did not start: KeyError: 'DATABASE' \(tests/serve/small_app\.py:\d+\)"),
        ("start-refuses", r"log\.db is too new"),
    ],
)
def test_an_app_that_does_not_start_gives_its_reason_and_nothing_else(mode: str, reason: str) -> None:
    with started(mode) as process:
        said, errors = process.communicate(timeout=SECONDS)
    assert said == ""
    assert re.fullmatch(f"refused: {reason}\n", errors)


def test_a_process_that_other_nodes_have_buried_says_so_and_ends() -> None:
    """Whatever started it starts another one, which joins as a new node."""
    with started("buried") as process:
        with socket.create_connection(("127.0.0.1", ready_port(process)), timeout=SECONDS) as stream:
            stream.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert rest(stream).endswith(b"ended\r\n0\r\n\r\n")
        said, errors = process.communicate(timeout=SECONDS)
    reason = "Other nodes took this process for dead, and have settled its calls; another one can take its place."
    assert (said, errors, process.returncode) == (f"{reason}\n", "", 1)


def test_a_worker_that_leaves_frees_the_port_and_ends_at_once_without_connections() -> None:
    with started("worker") as process:
        port = ready_port(process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_worker_that_leaves_waits_for_its_tasks() -> None:
    """They have a time of their own, beyond that of other calls."""
    with started("worker-with-a-task") as process:
        port = ready_port(process)
        process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                with contextlib.suppress(ConnectionResetError):  # it was in the queue of the socket that closed
                    socket.create_connection(("127.0.0.1", port)).close()
        process.send_signal(signal.SIGUSR2)
        output, _ = process.communicate(timeout=SECONDS)
        assert (output, process.returncode) == ("the task is over\n", 0)


def test_a_worker_that_leaves_waits_for_an_idle_connection_as_long_as_it_may_be_idle() -> None:
    with (
        started("worker") as process,
        socket.create_connection(("127.0.0.1", ready_port(process)), timeout=SECONDS) as idle,
    ):
        began = time.monotonic()
        process.send_signal(signal.SIGUSR1)
        assert idle.recv(1) == b""
        assert time.monotonic() - began > 1  # KEEP_ALIVE_SECONDS of the small app
        assert process.wait() == 0
