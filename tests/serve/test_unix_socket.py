"""`perdure serve --uds`: who may connect, which files are removed, and that sessions and workers are served there."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

import perdure
from perdure.errors import Misuse
from perdure.serve.listener import LOCK_LOOKS, listening_at
from tests.client.conftest import text
from tests.support.processes.starting import Program, can_fork, start

BASIC_TOOLS = "tests.support.servers.basic_tools:server"


@pytest.mark.parametrize("mode", ["600", "660", "666"])
def test_the_file_has_its_mode_and_goes_with_the_server(tmp_path: Path, mode: str) -> None:
    path, before = tmp_path / "sock", os.umask(0o022)
    try:
        with listening_at(path, mode=mode):
            assert stat.S_IMODE(path.stat().st_mode) == int(mode, 8)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_only_a_socket_on_which_no_process_listens_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    path.write_text("precious")
    with pytest.raises(Misuse, match="sock exists and is not a socket; remove it"), listening_at(path, mode="600"):
        pass
    assert path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # its process died: the file stays
    with listening_at(path, mode="600"):
        with pytest.raises(Misuse, match="another process listens at"), listening_at(path, mode="600"):
            pass
        assert path.is_socket()
    assert not path.exists()


def test_a_folder_that_another_user_keeps_locked_neither_holds_up_a_start_nor_an_end(tmp_path: Path) -> None:
    locked = os.open(tmp_path, os.O_RDONLY)
    waits: list[float] = []
    try:
        with listening_at(tmp_path / "first", mode="600", sleep=waits.append):
            fcntl.flock(locked, fcntl.LOCK_EX)
            said = f"another process keeps {tmp_path} locked; choose a path in another folder with --uds"
            second = listening_at(tmp_path / "second", mode="600", sleep=waits.append)
            with pytest.raises(Misuse, match=re.escape(said)), second:
                pass
            assert len(waits) == LOCK_LOOKS
        assert [path.name for path in tmp_path.iterdir()] == ["first"], "it is stale, and goes with the next start"
    finally:
        os.close(locked)
    with listening_at(tmp_path / "first", mode="600"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_too_busy_to_accept_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as clients:
        busy.bind(str(path))
        busy.listen(0)
        with pytest.raises(BlockingIOError):  # noqa: PT012
            while True:
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        with pytest.raises(Misuse, match="another process listens at"), listening_at(path, mode="600"):
            pass
        assert path.is_socket()


def test_a_socket_that_another_server_put_there_is_not_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with listening_at(path, mode="600"):
        path.unlink()
        second = contextlib.ExitStack()
        second.enter_context(listening_at(path, mode="600"))
    assert path.is_socket()
    second.close()
    assert not path.exists()


def test_a_start_waits_while_another_one_looks_at_the_same_directory(tmp_path: Path) -> None:
    path, errors, waits = tmp_path / "sock", [], threading.Event()

    def wait(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    def start_another() -> None:
        try:
            with listening_at(path, mode="600", sleep=wait):
                pass
        except Misuse as refused:
            errors.append(str(refused))

    directory = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(str(path))  # bound, and not listened on yet: it looks like a stale one
        other = threading.Thread(target=start_another)
        other.start()
        while other.is_alive() and not waits.is_set():
            os.sched_yield()
        first.listen()
        os.close(directory)
        other.join()
        assert errors == [f"another process listens at {path}; stop it, or choose another path with --uds"]
        assert path.is_socket()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("none/sock", "cannot listen at {}: No such file or directory"),
        ("s" * 120, "cannot listen at '{}': its {size} bytes are too long for a Unix socket"),
    ],
)
def test_a_path_that_cannot_be_is_one_line(tmp_path: Path, name: str, line: str) -> None:
    path = tmp_path / name
    with pytest.raises(Misuse) as refused, listening_at(path, mode="600"):
        pass
    assert str(refused.value) == line.format(path, size=len(str(path)))


@contextlib.asynccontextmanager
async def serving_at(path: Path, *options: str) -> AsyncIterator[Program]:
    forks = "--workers" in options and can_fork()
    module = "tests.support.processes.forked_workers" if forks else "perdure"
    store = f"sqlite:{path.parent / 'log.db'}"
    program = await start(module, "serve", BASIC_TOOLS, "--uds", str(path), "--store", store, *options, errors=None)
    assert program.stdout is not None
    try:
        assert (await program.stdout.readline()).decode() == f"perdure: serving on unix:{path}, path /mcp\n"
        yield program
    finally:
        program.kill()
        await program.communicate()


@pytest.mark.anyio
async def test_sessions_are_served_there_over_a_kill_and_by_workers(tmp_path: Path) -> None:
    path, state = tmp_path / "sock", tmp_path / "state"

    async def whoami() -> tuple[str | None, str]:
        transport = httpx2.AsyncHTTPTransport(uds=str(path))
        async with (
            httpx2.AsyncClient(transport=transport) as http,
            perdure.connect("http://localhost/mcp", http_client=http, state=state) as client,
        ):
            return client.session_id, text(await client.call_tool("whoami", {"header": "host"}))

    async with serving_at(path) as server:
        session, told = await whoami()
        assert '"localhost"' in told
        server.kill()
        await server.wait()
    assert path.is_socket()
    async with serving_at(path, "--workers", "2") as server:
        assert (await whoami())[0] == session
        server.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await server.wait() == 0
    assert not path.exists()
