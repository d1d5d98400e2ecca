"""A disk that is full is a store that fails: live traffic continues (promise 7, S7)."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.clients.raw_http import Peer, progress, text_of
from tests.support.processes.serving import SERVE, Served, serving
from tests.support.stores.outages import TIMEOUT, begin_count, recovered

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def small_disk(tmp_path: Path, *options: str) -> AsyncIterator[tuple[Served, Path]]:
    """A server whose log lies on a disk of 2 MiB of its own; yields the server and the disk as seen from here."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m disk "$0" && exec "$@"')
    if not await asyncio.to_thread(_can_run, (*mount, str(disk), "true")):
        pytest.skip("this system lets nobody mount a disk in a namespace of its own")
    store = ("--store", f"sqlite:{disk / 'log.db'}", "--store-timeout", str(TIMEOUT))
    async with serving(
        "tests.support.servers.gated_tools:server", *store, *options, argv=(*mount, str(disk), *SERVE)
    ) as served:
        yield served, Path(f"/proc/{served.pid}/root{disk}")


def _can_run(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def fill(disk: Path) -> Path:
    """Leave no block free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return filler


async def test_a_full_disk_does_not_stop_live_traffic(tmp_path: Path) -> None:
    async with small_disk(tmp_path) as (served, disk):
        peer = await Peer(port=served.port).session()
        call = await begin_count(peer, "full", first=3, n=120)
        filler = fill(disk)
        while await peer.health() == "ok":
            await peer.call("shout", text="fill up what the log still has", times=20)
        await peer.call("open_gate", name="full")
        start = (await call.answer()).events[0].id
        assert progress(call.messages) == list(range(1, 121))
        assert text_of((await (await peer.session()).call("count", n=1)).messages[-1]) == "counted to 1"
        filler.unlink()
        await recovered(peer)
        async with await peer.resume(start) as again:
            await again.answer()
            assert again.messages == call.messages
        await call.aclose()
        told = [line for line in served.output if "the store" in line]
        assert [line for line in told if "the store fails" in line] == told[:1]
        assert [line for line in told if "the store is back" in line] == told[1:]


async def test_a_full_disk_is_one_outage_also_where_requests_are_refused(tmp_path: Path) -> None:
    async with small_disk(tmp_path, "--on-store-failure", "refuse") as (served, disk):
        peer = await Peer(port=served.port).session()
        filler = fill(disk)
        # The request itself does not fit, so nothing is left to be written later that would show that it still fails.
        while (await peer.call("count", n=1, padding="x" * 200_000)).status == 200:
            pass
        for _ in range(10):
            assert await peer.health() == "degraded"
            assert (await peer.call("count", n=1)).status == 503
            await asyncio.sleep(0.05)  # while it is tried whether the disk takes writes again
        filler.unlink()
        await recovered(peer)
        assert (await peer.call("count", n=1)).status == 200
        assert len([line for line in served.output if "the store fails" in line]) == 1


async def test_a_file_that_may_not_grow_does_not_stop_live_traffic(tmp_path: Path) -> None:
    options = ("--store", f"sqlite:{tmp_path / 'log.db'}", "--store-timeout", str(TIMEOUT))
    async with serving("tests.support.servers.gated_tools:server", *options) as served:
        peer = await Peer(port=served.port).session()
        limits = resource.prlimit(served.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(served.pid, resource.RLIMIT_FSIZE, ((tmp_path / "log.db-wal").stat().st_size, limits[1]))
        answer = await peer.call("count", n=100)
        assert progress(answer.messages) == list(range(1, 101))
        assert await peer.health() == "degraded"
        resource.prlimit(served.pid, resource.RLIMIT_FSIZE, limits)
        await recovered(peer)
        async with await peer.resume(answer.events[0].id) as again:
            assert progress((await again.answer()).messages) == list(range(1, 101))
