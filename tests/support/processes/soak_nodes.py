"""The serving processes of a soak: started, killed, stopped, paused, and started again if they have ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from contextlib import AsyncExitStack

import psutil  # type: ignore[import-untyped]

from tests.support.clients.raw_http import Peer
from tests.support.clients.soak_call import Report
from tests.support.clients.soak_client import Ports
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.serving import Served, serving
from tests.support.stores.soak_store import SoakedStore

OPTIONS = ("--retry", "100ms", "--drain-timeout", "3s", "--max-sessions", "100000")
#: The message of a process whose calls another one has settled. It ends with status 1, and its supervisor starts one.
BURIED = "took this process for dead"
#: Seconds between two reads of a node's health.
LOOK = 0.05


class Nodes:
    """The serving processes, as many as the store asks for, each in its place."""

    def __init__(
        self, stack: AsyncExitStack, store: SoakedStore, ports: Ports, report: Report, target: str = GATE_FILE_TOOLS
    ) -> None:
        self._target = target
        self._stack = stack
        self._store = store
        self._ports = ports
        self._report = report
        self._places: list[Served] = []
        self._ended: list[Served] = []
        """The servers whose end was noticed."""
        self._paused: list[Served] = []

    async def start(self) -> None:
        for place in range(self._store.nodes):
            self._places.append(await self._serve(place))

    async def _serve(self, place: int) -> Served:
        options = (*OPTIONS, *self._store.options, "--store", self._store.address)
        served = await self._stack.enter_async_context(serving(self._target, *options))
        self._ports.all[place] = served.port
        return served

    async def revive(self) -> None:
        """Start those again that have ended, as a supervisor does."""
        for place, served in enumerate(self._places):
            if self._has_ended(served):
                self._places[place] = await self._serve(place)

    async def end(self, place: int, *, gentle: bool) -> None:
        served = self._places[place]
        if self._has_ended(served):
            return
        gentle = gentle and served not in self._paused  # one that stands still cannot stop
        self._report.counts["stops" if gentle else "kills"] += 1
        self._ended.append(served)
        status = await (served.stop() if gentle else served.kill())
        if gentle and status != 0 and not _is_buried(served):
            self._report.fault("refused", f"a server asked to stop ended with {status}: {served.output[-3:]}")

    async def pause(self, place: int, seconds: float) -> None:
        """Stop a process for a while (SIGSTOP). It continues, or ends because others have settled its calls."""
        served = self._places[place]
        self._report.counts["pauses"] += 1
        served.send(signal.SIGSTOP)
        self._paused.append(served)
        try:
            await asyncio.sleep(seconds)
        finally:
            served.send(signal.SIGCONT)
            self._paused.remove(served)

    def children(self) -> set[psutil.Process]:
        """The children of the living processes."""
        found: set[psutil.Process] = set()
        for served in self._places:
            with contextlib.suppress(psutil.NoSuchProcess):
                if served.process.returncode is None:
                    found |= set(psutil.Process(served.pid).children())
        return found

    async def all_well(self) -> None:
        """Wait until each process has written what it holds, or has ended."""
        for served in self._places:
            await self._well(served)

    async def _well(self, served: Served) -> None:
        while served.process.returncode is None:
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                if await Peer(port=served.port).health() == "ok":
                    return
            await asyncio.sleep(LOOK)

    def _has_ended(self, served: Served) -> bool:
        """It has ended. By itself it may only because others have settled its calls."""
        status = served.process.returncode
        if status is None or served in self._ended:
            return status is not None
        self._ended.append(served)
        if _is_buried(served):
            self._report.counts["buried"] += 1
        else:
            self._report.fault("refused", f"a server ended by itself with {status}: {served.output[-3:]}")
        return True


def _is_buried(served: Served) -> bool:
    return any(BURIED in line for line in served.output)
