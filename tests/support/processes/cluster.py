"""Server processes that share one store, behind a proxy: killed, restarted, drained and switched by a test."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.support.clients.recording_client import looking
from tests.support.processes.serving import SERVE, Served, serving
from tests.support.proxies.cutting_proxy import CuttingProxy, cutting_proxy

GATE_FILE_TOOLS = "tests.support.servers.gate_file_tools:server"


class Cluster:
    """One server or several on one store. `server` is the newest."""

    def __init__(self, address: str, target: str, options: tuple[str, ...], stack: AsyncExitStack) -> None:
        self.address = address
        self.target = target
        self.servers: list[Served] = []
        self.proxy: CuttingProxy
        self._options = (*options, "--store", address)
        self._stack = stack

    @property
    def server(self) -> Served:
        return self.servers[-1]

    async def start(self, *, port: int = 0, argv: Sequence[str] = SERVE) -> Served:
        """One process more, of another release if its command is given; no client is sent to it yet."""
        served = await self._stack.enter_async_context(serving(self.target, *self._options, port=port, argv=argv))
        self.servers.append(served)
        return served

    async def crash(self) -> None:
        """Kill the server and start it again."""
        await self.kill()
        await self.restart()

    async def kill(self) -> None:
        """Kill the server. Clients that connect from now on wait at the proxy for the next one.

        That is what a service manager does that owns the socket, or a balancer that waits for its only server. So what
        is tested does not depend on how fast this machine starts a process.
        """
        self.proxy.hold()
        await self.server.kill()

    async def restart(self) -> None:
        await self.start()
        self.proxy.upstreams = (self.server.port,)
        self.proxy.release()

    def ask_to_stop(self, served: Served) -> None:
        served.process.send_signal(signal.SIGTERM)

    def rows(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """Read the store, as it is committed now."""
        with looking(self.address) as rows:
            return rows(query, *values)

    def sessions(self) -> list[tuple[object, ...]]:
        """Id and incarnation of every session: another handshake would show here."""
        return self.rows("SELECT id, incarnation FROM session")

    def events(self) -> int:
        """How many events of calls are in the log."""
        found = self.rows("SELECT count(*) FROM entry WHERE stream IN (SELECT key FROM stream WHERE kind = 'c')")
        count = found[0][0]
        assert isinstance(count, int)
        return count


@asynccontextmanager
async def cluster(
    place: Path | str, *options: str, processes: int = 1, target: str = GATE_FILE_TOOLS
) -> AsyncIterator[Cluster]:
    """Start so many processes, and a proxy that sends each connection to the next of them. The store is a SQLite file,
    or the one of an address. `target`: a server, or the address of one behind a gateway."""
    async with AsyncExitStack() as stack:
        it = Cluster(place if isinstance(place, str) else f"sqlite:{place}", target, options, stack)
        for _ in range(processes):
            await it.start()
        it.proxy = await stack.enter_async_context(cutting_proxy(*(served.port for served in it.servers)))
        yield it
