"""A store, the servers that come and go on it, and a client that remembers what it was shown."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.clients.raw_http import Peer, SessionPeer
from tests.support.clients.recording_client import Told, assert_answered_once, assert_logged, assert_sound, is_accepted
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.crashing_servers import CrashingServer, CrashingServers, Point
from tests.support.servers.gate_file_tools import diary


@dataclass
class ChangingServers:
    """What one story is about."""

    folder: Path
    cradle: CrashingServers
    address: str
    """Where its store is."""
    told: dict[str, Told] = field(default_factory=dict)

    @property
    def diary(self) -> Path:
        return self.folder / "diary"

    def runs(self, key: str) -> int:
        return sum(noted == key for noted, _ in diary(self.diary))

    def heard(self, key: str) -> list[int]:
        """The progress of a call that may not have begun yet."""
        return self.told[key].progress if key in self.told else []

    async def start(self, point: Point | None = None, *, sync: str = "") -> CrashingServer:
        address = f"{self.address}?sync={sync}" if sync else self.address
        options = ("--store", address, "--retry", "100ms")
        return await self.cradle.start(GATE_FILE_TOOLS, *options, folder=self.folder, point=point)

    async def open_session(self, server: CrashingServer) -> None:
        self.peer = await Peer(port=server.port).session()
        self.requests: dict[str, int] = {}

    def move_to(self, server: CrashingServer) -> None:
        self.peer = SessionPeer(port=server.port, headers=self.peer.headers, id=self.peer.id, calls=self.peer.calls)

    async def call(self, key: str, tool: str, n: int = 0, **more: Any) -> None:
        """Make a call, and read what comes until it is over or the server is dead."""
        told = self.told[key] = Told(name=key)
        if n:
            more["n"] = n
        body = self.peer.call_body(tool, log=str(self.diary), key=key, **more)
        self.requests[key] = self.peer.calls
        with contextlib.suppress(ConnectionError):  # nobody is there any more
            await told.read_all(await self.peer.begin("POST", body))

    async def listen(self) -> None:
        """Read the standalone stream until the connection is lost."""
        told = self.told.setdefault("standalone", Told(name="standalone"))
        with contextlib.suppress(ConnectionError):
            await told.read_all(await self.peer.resume(told.position))

    async def come_back(self) -> None:
        for told in self.told.values():
            if told.name != "standalone" and told.position:
                await told.come_back(self.peer)

    def judge(self) -> None:
        for told in self.told.values():
            told.assert_whole()
            assert_logged(self.address, told)
        for key, request_id in self.requests.items():
            if not is_accepted(self.address, request_id):
                assert (self.told[key].events, self.told[key].position, self.runs(key)) == ([], "", 0), key
        assert_answered_once(self.address)
        assert_sound(self.address)
