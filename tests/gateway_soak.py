"""A soak of the gateway: two gateways on one store in front of a program and of an HTTP server, and what kills all.

    python -m tests.gateway_soak --minutes 2 --seed 7
    python -m tests.gateway_soak --store postgres

Three clients with sessions have a process of the program each, two have sessions at the HTTP server, and one client of
2026-07-28 calls each of them. Processes of the program are killed and paused, the HTTP server and the gateways are
killed and started again; gateways are stopped as well.

Everything that is chosen is chosen from the seed. It stops by itself, prints what it has counted, and ends with status
1 if a promise was broken. Beside those of `tests/soak.py`: no process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from perdure.store import own_store
from tests import soak
from tests.soak import ALL_AT_ONCE, GENTLE, finish, judge_the_diary, judge_the_log, tell
from tests.support.clients.soak_call import ASK, Report
from tests.support.clients.soak_caller import Caller
from tests.support.clients.soak_client import Manner, Ports, Visitor
from tests.support.processes.marked_processes import MARK, marked
from tests.support.processes.soak_nodes import Nodes
from tests.support.processes.starting import Program, start
from tests.support.servers import scripted_stdio
from tests.support.servers.in_process import until
from tests.support.stores.soak_store import PostgresServer, SoakedStore, SqliteFile, running

GATEWAYS = 2
#: Clients with sessions, at the program and at the HTTP server.
VISITORS = {"program": 3, "web": 2}
#: Seconds from one harm to the next.
BETWEEN = (0.3, 2.5)
#: What happens next, and how often in proportion.
ACTS = {"kill of a child": 5, "pause of a child": 1, "kill of the upstream": 2, "gateways": 3, "kill of both": 1}
#: Seconds for which a child is paused, and the HTTP server is away.
PAUSE, AWAY = (0.1, 2.0), (0.0, 1.5)
#: Seconds after which the process of a session that was left is ended.
IDLE = 3.0
#: Seconds within which what a dead gateway has left is gone: the reaper's time of grace, on a busy machine.
GONE = 30.0

COUNTED = (
    "sessions", "calls made", "calls accepted", "unheard of", "turned away", "answers", "events", "cuts", "resumes",
    "asks answered", "cancelled", "orphans", "unknown outcomes told", "kills", "stops", "kills of children",
    "pauses of children", "kills of the upstream", "buried", "runs again",
)  # fmt: skip
FAULTS = (*soak.FAULTS, "processes left")

_NAMES = {"count": "read_only", "put": "idempotent", "inquire": "idempotent"}
#: A call at a server that repeats its asks after a gateway's death asks as often as gateways die in it.
_MOST_ASKS = 10


def _elicitation(given: dict[str, Any]) -> dict[str, Any]:
    return {"message": given["question"], "requestedSchema": {"type": "object", "properties": {}}}


def spell_for_program(tool: str, given: dict[str, Any], choice: random.Random) -> tuple[str, dict[str, Any]]:
    """A call of the scripted server over stdio."""
    steps: list[dict[str, Any]] = [{"diary": given["log"], "key": given["key"]}]
    if "question" in given:
        steps.append({"ask": ASK, "params": _elicitation(given)})
    elif tool == "announce":
        notices = range(given["start"], given["start"] + given["n"])
        method = "notifications/resources/updated"
        steps += [{"notify": method, "params": {"uri": f"notice://{number}"}} for number in notices]
    else:
        steps.append({"progress": given["n"], "every": given["interval"]})
    return _NAMES.get(tool, "plain"), {"do": steps}


def spell_for_web(tool: str, given: dict[str, Any], choice: random.Random) -> tuple[str, dict[str, Any]]:
    """A call of the scripted server over HTTP, which may cut its own connection."""
    steps: list[list[Any]] = [["diary", given["log"], given["key"]]]
    if "question" in given:
        steps.append(["ask", ASK, _elicitation(given)])
    else:
        for number in range(1, given["n"] + 1):
            steps += [["progress", number], ["sleep", given["interval"]]]
            if choice.random() < 0.02:
                steps.append(["cut"])
    return _NAMES.get(tool, "plain"), {"steps": steps}


MANNERS = {
    "program": Manner(
        path="/mcp/program",
        tools=("count", "put", "pay", "ask", "inquire", "announce"),
        spell=spell_for_program,
        most_asks=_MOST_ASKS,
        asks_anywhere=True,
    ),
    # Without notices: one that belongs to a call is repeated if the call is followed after a gateway's death.
    "web": Manner(
        path="/mcp/web", tools=("count", "put", "pay", "ask", "inquire"), spell=spell_for_web, most_asks=_MOST_ASKS
    ),
}


class GatewaySoak:
    def __init__(
        self,
        folder: Path,
        store: SoakedStore,
        *,
        seconds: float,
        seed: int,
        between: tuple[float, float] = BETWEEN,
    ) -> None:
        self.report = Report()
        store.nodes = GATEWAYS
        self._folder = folder
        self._diary = folder / "diary"
        self._store = store
        self._seed = seed
        self._between = between
        self._choice = random.Random(f"{seed}/killer")
        self._ports = Ports([0] * GATEWAYS)
        self._seconds = seconds
        self._deadline = 0.0
        self._upstream: Program | None = None
        self._upstream_port = 0
        self._to_end: set[psutil.Process] = set()
        """Processes of gateways that have been ended, or will be."""

    def _over(self) -> bool:
        return time.monotonic() >= self._deadline

    async def run(self) -> Report:
        mark = f"{MARK}={self._folder}".encode()
        try:
            async with running(self._store), AsyncExitStack() as stack:
                await self._start_upstream()
                nodes = Nodes(stack, self._store, self._ports, self.report, target=f"--servers={self._configure()}")
                await nodes.start()
                self._deadline = time.monotonic() + self._seconds
                clients = list(self._clients())
                tasks = [asyncio.create_task(client.live(self._over)) for client in clients]
                tasks.append(asyncio.create_task(self._harm(nodes)))
                await finish(tasks, clients, self.report, seconds=self._seconds)
                for name in MANNERS:
                    await judge_the_log(own_store(self._store.address, name), self.report)
                await self._end(nodes)
        finally:
            await self._kill_upstream()
        await self._judge_what_is_left(mark)
        judge_the_diary(self._diary, self.report)
        return self.report

    def _clients(self) -> list[Visitor | Caller]:
        clients: list[Visitor | Caller] = []
        for name, manner in MANNERS.items():
            given = (self._seed, self._ports, str(self._diary), self.report, manner)
            clients += [Visitor(len(clients) + number, *given) for number in range(VISITORS[name])]
            clients.append(Caller(len(clients), *given))
        return clients

    def _configure(self) -> Path:
        words = [scripted_stdio.__file__, f"starts={self._folder / 'starts'}"]
        program = {
            "command": sys.executable,
            "args": ["-I", "-S", *words],
            "env": {MARK: str(self._folder)},
            # Half of the sessions are not ended by their clients, and a caller may have sixteen processes.
            "perdure": {"process_idle": IDLE},
        }
        web = {"type": "http", "url": f"http://127.0.0.1:{self._upstream_port}/mcp"}
        file = self._folder / "mcp.json"
        file.write_text(json.dumps({"mcpServers": {"program": program, "web": web}}))
        return file

    # The HTTP server

    async def _start_upstream(self) -> None:
        words = ("--port", str(self._upstream_port))
        self._upstream = await start("tests.support.servers.scripted_http", *words, errors=None)
        assert self._upstream.stdout is not None
        self._upstream_port = int(await self._upstream.stdout.readline())

    async def _kill_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.kill()
            await self._upstream.wait()

    # Harm

    async def _harm(self, nodes: Nodes) -> None:
        while not self._over():
            await asyncio.sleep(self._choice.uniform(*self._between))
            [act] = self._choice.choices(list(ACTS), list(ACTS.values()))
            match act:
                case "kill of a child":
                    if (pid := self._some_child()) is not None:
                        self.report.counts["kills of children"] += 1
                        _send(pid, signal.SIGKILL)
                case "pause of a child":
                    await self._pause_a_child()
                case "kill of the upstream":
                    await self._harm_upstream()
                case "gateways":
                    await self._end_some(nodes, gentle=not self._choice.randrange(GENTLE))
                case "kill of both":
                    await asyncio.gather(self._harm_upstream(), self._end_some(nodes, gentle=False))
            await nodes.revive()

    def _some_child(self) -> int | None:
        """One of the newest children; an earlier one may be gone, and its number be another's."""
        starts = self._folder / "starts"
        pids = [int(line) for line in starts.read_text().split()] if starts.exists() else []
        living = [pid for pid in pids[-20:] if is_ours(pid, str(self._folder))]
        return self._choice.choice(living) if living else None

    async def _pause_a_child(self) -> None:
        seconds, pid = self._choice.uniform(*PAUSE), self._some_child()
        if pid is not None:
            self.report.counts["pauses of children"] += 1
            _send(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            _send(pid, signal.SIGCONT)

    async def _harm_upstream(self) -> None:
        self.report.counts["kills of the upstream"] += 1
        await self._kill_upstream()
        await asyncio.sleep(self._choice.uniform(*AWAY))
        await self._start_upstream()

    async def _end_some(self, nodes: Nodes, *, gentle: bool) -> None:
        place = self._choice.randrange(GATEWAYS)
        places = [place] if self._choice.randrange(ALL_AT_ONCE) else range(GATEWAYS)
        self._to_end |= nodes.children()
        await asyncio.gather(*(nodes.end(place, gentle=gentle) for place in places))

    # The end

    async def _end(self, nodes: Nodes) -> None:
        """Stop one gateway and kill the other: neither may leave a process, nor keep a zombie while it lives."""
        self._to_end |= nodes.children()
        try:
            async with asyncio.timeout(GONE):
                await until(lambda: not any(map(_is_zombie, nodes.children())))
        except TimeoutError:
            self.report.fault("processes left", f"zombies: {[one for one in nodes.children() if _is_zombie(one)]}")
        await nodes.end(0, gentle=True)
        await nodes.end(1, gentle=False)

    async def _judge_what_is_left(self, mark: bytes) -> None:
        def left() -> list[psutil.Process]:
            ended = [process for process in self._to_end if process.is_running() and not _is_zombie(process)]
            return [*ended, *marked(mark)]

        try:
            async with asyncio.timeout(GONE):
                await until(lambda: not left())
        except TimeoutError:
            for process in left():
                self.report.fault("processes left", process)


def is_ours(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _send(pid: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill gateways and servers under load, and count what is lost.")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="perdure-soak-") as folder:
        place = Path(folder)
        store: SoakedStore = SqliteFile(place) if given.store == "sqlite" else PostgresServer(place)
        soak = GatewaySoak(place, store, seconds=given.minutes * 60, seed=given.seed)
        report = asyncio.run(soak.run())
    print(tell(report, given.seed, (*COUNTED, *FAULTS)))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
