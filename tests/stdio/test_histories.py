"""Never a wrong session: random histories of starts, ends, crashes and thefts (T7, T9, T10).

The invariant, at every start: the bridge goes on with exactly the session whose token was written last in its slot,
whatever the instances before were doing when they died; or with a fresh one where there is no such session, where
several wait that nothing tells apart, or where a thief who had copied everything, the holder's name too, may have ended
its chain. No two that live share a session.

Host processes are made up here (the parent's identity is a value), so that histories are short and many; slots, files,
locks, the bridge's side of the broker and the broker are the real ones.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import perdure
from perdure.remote.endpoint import Endpoint
from perdure.stdio.identity import Identity, Processes, ProcessInfo
from perdure.stdio.resume_broker import ONCE, ResumeBroker
from perdure.stdio.resume_slot import Slot, Target, open_slot
from tests.support.servers.tool_server import ToolServer
from tests.support.stores import memory_files

HERE = Identity(pid=1000, start=77, boot="boot", space="space")
#: Another host, and hosts of the same pid and start: in the machine's next start, and in another container.
ELSEWHERE = [replace(HERE, pid=1001), replace(HERE, boot="next"), replace(HERE, space="container")]
TARGETS = ("http://here/mcp", "http://here/mcp?other")
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "host", "version": "1"}},
}


class Killed(BaseException):
    """The process is gone."""


class Deadly(Slot):
    """A slot whose process dies at a point."""

    def __init__(self, slot: Slot, dies: str | None) -> None:
        self._slot = slot
        self._dies = dies
        self.holder = slot.holder
        self.positions = slot.positions

    def token(self) -> str | None:
        found = self._slot.token()
        self._at("token read")
        return found

    def keep(self, token: str, /) -> bool:
        self._at("rotated")
        kept = self._slot.keep(token)
        self._at("written")
        return kept

    def forget(self) -> None:
        self._slot.forget()

    def release(self) -> None:
        self._slot.release()

    def _at(self, point: str) -> None:
        if self._dies == point:
            raise Killed


@dataclass(kw_only=True, eq=False)
class Instance:
    slot: Slot
    session: str


@dataclass(kw_only=True)
class ChangingServers:
    http: httpx2.AsyncClient
    folder: Path
    alive: list[Instance] = field(default_factory=list)
    written: dict[Path, tuple[Identity, str, str]] = field(default_factory=dict)
    """Of each slot: the host, the target and the session whose token was written there last."""
    robbed: set[str] = field(default_factory=set)
    """Sessions whose tokens a thief used who had copied everything."""
    copies: list[tuple[Instance, str]] = field(default_factory=list)

    async def start(self, identity: Identity, target: str, dies: str | None) -> None:
        if len(waiting := self.waiting(identity, target)) > 1:
            for positions in waiting:
                del self.written[positions]
        slot = await open_slot(self.folder, identity, Target(url=target), processes=_NoneDies(), patience=0)
        assert slot.holder
        assert slot.positions is not None
        *whose, due = self.written.get(slot.positions, (identity, target, None))
        assert whose == [identity, target], "a slot of another host or target"
        assert due is not None or len(waiting) != 1, "the only one that waits is not taken"
        broker = ResumeBroker(Endpoint(self.http, TARGETS[0], on_401="wants a token"), Deadly(slot, dies))
        session = None
        try:
            known = await broker.session(ONCE)
            assert known == due or (known is None and due in self.robbed), "another session than the last"
            if known is None:
                session = await self._initialize()
                await broker.get_first_token(session)
                self.written[slot.positions] = identity, target, session
            assert all(other.session != (known or session) for other in self.alive), "a session that another one has"
            self.alive.append(Instance(slot=slot, session=known or session or ""))
        except Killed:
            if session is not None and dies == "written":
                self.written[slot.positions] = identity, target, session
            elif session is not None:
                self.written.pop(slot.positions, None)
            slot.let_go()

    def waiting(self, host: Identity, target: str) -> list[Path]:
        """The slots of this host and target whose sessions no living bridge has."""
        held = [instance.slot.positions for instance in self.alive]
        return [place for place, (*whose, _) in self.written.items() if whose == [host, target] and place not in held]

    async def _initialize(self) -> str:
        accept = {"accept": "application/json, text/event-stream"}
        response = await self.http.post(TARGETS[0], json=INITIALIZE, headers=accept)
        return response.headers["mcp-session-id"]

    async def do(self, deed: str, *more: Any) -> None:
        match deed:
            case "start":
                await self.start(*more)
            case "end":
                self.end(*more)
            case "copy":
                self.copy(*more)
            case "use":
                await self.use(more[0], as_itself=more[1])

    def end(self, which: int, how: str) -> None:
        if self.alive:
            instance = self.alive.pop(which % len(self.alive))
            instance.slot.release() if how == "release" else instance.slot.let_go()

    def copy(self, which: int) -> None:
        if self.alive:
            instance = self.alive[which % len(self.alive)]
            token = instance.slot.token()
            if token is not None:
                self.copies.append((instance, token))

    async def use(self, which: int, *, as_itself: bool) -> None:
        """A thief offers a copy, under a name of its own or under the owner's."""
        if not self.copies:
            return
        instance, token = self.copies[which % len(self.copies)]
        holder = instance.slot.holder if as_itself else "f" * 64
        response = await self.http.post("http://here/resume/resume", json={"token": token, "holder": holder})
        if not as_itself:
            assert (response.status_code, response.json()) == (403, {"error": "rejected"}), "a thief got in"
        else:
            self.robbed.add(instance.session)


class _NoneDies(Processes):
    """All hosts live: nothing is swept away."""

    boot = "boot"
    space = "space"

    def look(self, pid: int) -> ProcessInfo | None:
        return ProcessInfo(pid=pid, parent=1, start=77, name="host", words=("host",))

    def is_gone(self, pid: int, start: int) -> bool:
        return False


_POINTS = ("token read", "rotated", "written")
_HOST = st.sampled_from([HERE] * 5 + ELSEWHERE)
_TARGET = st.sampled_from([TARGETS[0], TARGETS[0], TARGETS[1]])
_start = st.tuples(st.just("start"), _HOST, _TARGET, st.none())
_start_and_die = st.tuples(st.just("start"), _HOST, _TARGET, st.sampled_from(_POINTS))
_end = st.tuples(st.just("end"), st.integers(0, 3), st.sampled_from(["release", "die"]))
_copy = st.tuples(st.just("copy"), st.integers(0, 3))
_use = st.tuples(st.just("use"), st.integers(0, 3), st.booleans())
#: Most of a history is one host that starts, dies and starts again.
_deeds = st.one_of(_start, _end, _start_and_die, _start, _end, _copy, _use)


class Place:
    """A server and a loop that outlive the histories: making them again takes longer than a history."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._over = asyncio.Event()
        self._serving = runner.get_loop().create_task(self._serve())
        self._app: perdure.App
        self._addresses = map(str, itertools.count())
        runner.run(self._begun())

    def run(self, history: list[tuple[Any, ...]]) -> None:
        self._runner.run(self._live(history))

    async def _serve(self) -> None:
        settings = perdure.Settings(allowed_hosts=("here",), max_principal_sessions=100_000, max_sessions=100_000)
        app = perdure.asgi(ToolServer().server, store="memory:", settings=settings)
        async with app.lifespan():
            self._app = app
            self._begins.set()
            await self._over.wait()
            app.begin_stop()

    async def _begun(self) -> None:
        self._begins = asyncio.Event()
        await self._begins.wait()

    async def _end(self) -> None:
        self._over.set()
        await self._serving

    def end(self) -> None:
        self._runner.run(self._end())

    async def _live(self, history: list[tuple[Any, ...]]) -> None:
        # Each history has an address of its own: the broker takes so many requests from one.
        transport = httpx2.ASGITransport(app=self._app, client=(next(self._addresses), 1))
        with tempfile.TemporaryDirectory(prefix="p-", dir=memory_files.SMALL) as folder:
            world = ChangingServers(http=httpx2.AsyncClient(transport=transport), folder=Path(folder) / "tokens")
            for deed, *more in history:
                await world.do(deed, *more)
            for instance in world.alive:
                instance.slot.release()


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with asyncio.Runner() as runner:
        made = Place(runner)
        yield made
        made.end()


@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate], suppress_health_check=list(HealthCheck))
@given(history=st.lists(_deeds, min_size=16, max_size=24))
def test_no_instance_ever_gets_a_wrong_session(place: Place, history: list[tuple[Any, ...]]) -> None:
    place.run(history)
