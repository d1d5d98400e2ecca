"""A real PgBouncer for the tests, in front of a real server.

The program is taken from the PATH, or from where Debian puts it. Where it is missing, the tests that need it are
skipped, and say so.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from tests.support.stores.postgres import as_user, free_port, server_url

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")

SECONDS = 30
"""For a start and for a stop."""


class Bouncer:
    """One PgBouncer in a folder, in front of the server at a URL."""

    def __init__(self, folder: Path, server: str, **settings: str) -> None:
        self._folder = folder
        self._user, host, port, self._database = _parts(server)
        self._settings = {
            "pool_mode": "transaction",
            "default_pool_size": "10",
            "max_client_conn": "500",
            "auth_type": "trust",
            "auth_file": str(folder / "users"),
            "admin_users": self._user,
            "listen_addr": "127.0.0.1",
            "unix_socket_dir": "",
            "server_login_retry": "0.1",
            "logfile": str(folder / "log"),
            "pidfile": str(folder / "pid"),
        } | settings
        self._server = f"host={host} port={port}"
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"postgresql://{self._user}@127.0.0.1:{self.port}/{self._database}"

    def start(self) -> None:
        """On the port of its last start, if it had one."""
        if PROGRAM is None:
            pytest.skip("no PgBouncer here: apt-get install pgbouncer")
        self.port = self.port or free_port()
        lines = [f"{name} = {value}" for name, value in {**self._settings, "listen_port": self.port}.items()]
        file = self._folder / "pgbouncer.ini"
        file.write_text("\n".join(["[databases]", f"* = {self._server}", "[pgbouncer]", *lines, ""]))
        (self._folder / "users").write_text(f'"{self._user}" ""\n')
        self._process = subprocess.Popen(
            [*as_user(), PROGRAM, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not _answers(self.port):
            if self._process.poll() is not None:
                raise RuntimeError(f"PgBouncer did not start: {(self._folder / 'log').read_text()}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """As a crash does with SIGKILL. Its clients lose their connections."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(SECONDS)
            self._process = None

    async def command(self, text: str) -> None:
        """Say something to its console, such as PAUSE or KILL."""
        console = await asyncpg.connect(f"{self.url.rpartition('/')[0]}/pgbouncer", statement_cache_size=0)
        try:
            await console.execute(text)
        finally:
            await console.close()


def _parts(server: str) -> tuple[str, str, str, str]:
    found = re.match(r"postgres(?:ql)?://([^@:]+)@([^:/]+):(\d+)/(\w+)", server)
    if found is None:
        pytest.skip("the bouncer needs a server at postgresql://USER@HOST:PORT/DATABASE, without a password")
    user, host, port, database = found.groups()
    return user, host, port, database


def _answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@asynccontextmanager
async def bouncing(folder: Path, server: str | None = None, **settings: str) -> AsyncIterator[Bouncer]:
    """A bouncer that runs, in transaction mode unless it is said otherwise."""
    bouncer = Bouncer(folder, server or server_url(), **settings)
    await asyncio.to_thread(bouncer.start)
    try:
        yield bouncer
    finally:
        await asyncio.to_thread(bouncer.stop, signal.SIGKILL)
