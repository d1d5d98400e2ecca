"""What a step of a tool costs, beside a plain commit to a SQLite file and a step of DBOS: microseconds of CPU time.

    python -m bench.steps [--rounds 7] [--steps 400] [--postgres URL]

They take turns, each time in a new process with its own SQLite file, so that what else the machine does meets each of
them. DBOS is measured if it is installed, PostgreSQL if there is an empty database: what its server takes is not in the
figures. They are written to `results/steps.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import sqlite3
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer

import perdure
from bench import machine
from perdure._core.jsonrpc import Request
from perdure.sessions.ledger import Call
from perdure.sessions.tool_steps import ToolSteps, course_of
from perdure.steps import call_steps, handler_task
from perdure.store import SqliteStore
from perdure.store.steps import OpenStream, PutSession
from perdure.telemetry.counters import Counters
from perdure.testing import _values as values

VALUE = "x" * 18
"""20 bytes as JSON."""

LARGE = "x" * 9_998
"""10,000 bytes as JSON: 950 of them are within the limit of a call."""

WARM_UP = 50
"""Of them are done before the clock runs."""


async def clocked(work: Callable[[], Awaitable[object]], count: int) -> float:
    """Microseconds of CPU time for one."""
    for _ in range(WARM_UP):
        await work()
    begin = time.process_time()
    for _ in range(count):
        await work()
    return (time.process_time() - begin) / count * 1e6


async def effect() -> str:
    return VALUE


async def large_effect() -> str:
    return LARGE


server = MCPServer("steps", log_level="WARNING")


@server.tool(meta=perdure.RESUMABLE)
async def steps(count: int, again: bool, large: bool) -> float:
    do = large_effect if large else effect
    return await clocked(lambda: perdure.step("effect", do, again=again), count)


@contextlib.asynccontextmanager
async def tool(store: str) -> AsyncIterator[Callable[[int, bool, bool], Awaitable[float]]]:
    app = perdure.asgi(server, store=store)
    http = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False))
    serving = asyncio.create_task(http.serve())
    while not http.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    async with perdure.connect(f"http://127.0.0.1:{port}/mcp", mode="legacy") as client:

        async def call(count: int, again: bool, large: bool) -> float:
            result = await client.call_tool("steps", {"count": count, "again": again, "large": large})
            return float(result.content[0].text)  # type: ignore[union-attr]

        yield call
    http.should_exit = True
    await serving


async def plain_commit(folder: Path, count: int) -> float:
    """A row in its own commit, as durable as Perdure's."""
    file = sqlite3.connect(folder / "plain.db", isolation_level=None)
    file.execute("PRAGMA journal_mode=WAL")
    file.execute("PRAGMA synchronous=NORMAL")
    file.execute("CREATE TABLE step (number INTEGER PRIMARY KEY, name TEXT, value BLOB)")

    async def write() -> None:
        file.execute("INSERT INTO step (name, value) VALUES (?, ?)", ("effect", json.dumps(await effect())))

    figure = await clocked(write, count)
    file.close()
    return figure


async def dbos_step(folder: Path, count: int) -> float:
    """With its defaults on SQLite."""
    from dbos import DBOS

    DBOS(config={"name": "steps", "system_database_url": f"sqlite:///{folder}/dbos.db", "log_level": "WARNING"})
    step = DBOS.step()(effect)

    @DBOS.workflow()
    async def workflow() -> float:
        return await clocked(step, count)

    DBOS.launch()
    figure = float(await workflow())
    DBOS.destroy()
    return figure


async def read_back(path: Path, value: str) -> float:
    """Milliseconds of CPU time in which a call that runs again reads its 1,000 steps, and has them all returned."""
    async with SqliteStore(str(path)) as store:
        fence = await store.join(values.NODE)
        opening = OpenStream(record=values.a_stream(fence), calls=(values.a_call(),))
        await store.commit([PutSession(record=values.a_session()), opening])
        body = json.dumps(value).encode()
        await store.commit([values.a_put_tool_step(fence, n, name="effect", value=body) for n in range(1, 1_001)])
        request = Request(id=1, method="tools/call", params={}, raw={})
        stream: Any = SimpleNamespace(id=values.STREAM, fence=fence, session=values.SESSION)
        call = Call(number=1, request=request, key=(1, 1), sent_in=1, token=None, stream=stream, attempt=2)
        context: Any = SimpleNamespace(clock=store.clock, counters=Counters())
        handler_task.set(asyncio.current_task())
        begin = time.process_time()
        course = course_of(await store.tool_steps(values.STREAM), 1, 1)
        log = ToolSteps(context, call, course)
        call_steps.set(lambda: log)
        for _ in range(1_000):
            assert await perdure.step("effect", effect) == value
        return (time.process_time() - begin) * 1e3


def of_perdure(address: str, *, again: bool, large: bool = False) -> Callable[[Path, int], Awaitable[float]]:
    """Steps on a store; `{}` in its address stands for a file."""

    async def measured(folder: Path, count: int) -> float:
        async with tool(address.format(folder / "log.db")) as call:
            return await call(count, again, large)

    return measured


FILE, SYNCED = "sqlite:{}", "sqlite:{}?sync=full"

CANDIDATES: dict[str, Callable[[Path, int], Awaitable[float]]] = {
    "plain commit": plain_commit,
    "step, again=True (1 commit)": of_perdure(FILE, again=True),
    "step (2 commits)": of_perdure(FILE, again=False),
    "again=True, 10,000 bytes": of_perdure(FILE, again=True, large=True),
    "step, 10,000 bytes": of_perdure(FILE, again=False, large=True),
    "again=True, ?sync=full": of_perdure(SYNCED, again=True),
    "step, ?sync=full": of_perdure(SYNCED, again=False),
    "DBOS step": dbos_step,
}


def candidates(postgres: str | None) -> dict[str, Callable[[Path, int], Awaitable[float]]]:
    found = {name: run for name, run in CANDIDATES.items() if name != "DBOS step" or importlib.util.find_spec("dbos")}
    if postgres:
        address = postgres.replace("{", "{{").replace("}", "}}")
        found["again=True, PostgreSQL"] = of_perdure(address, again=True)
        found["step, PostgreSQL"] = of_perdure(address, again=False)
    return found


def one(name: str, count: int, postgres: str | None) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measured(candidates(postgres)[name], Path(folder), count))


async def _measured(run: Callable[[Path, int], Awaitable[float]], folder: Path, count: int) -> float:
    return await run(folder, count)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=400, help="of each round, at most 950")
    arguments.add_argument("--postgres", help="the address of an empty database")
    given = arguments.parse_args()
    names = [*candidates(given.postgres)]
    found: dict[str, list[float]] = {name: [] for name in names}
    back: dict[str, list[float]] = {"20 bytes": [], "10,000 bytes": []}
    when, here, bystanders = datetime.now(UTC), machine.describe(), machine.Bystanders()
    spawn = multiprocessing.get_context("spawn")
    for _ in range(given.rounds):
        for name in names:
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                found[name].append(process.submit(one, name, given.steps, given.postgres).result())
        for size, value in zip(back, (VALUE, LARGE), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                back[size].append(asyncio.run(read_back(Path(folder) / "steps.db", value)))
    rows = {}
    for name, figures in found.items():
        ratio = statistics.median(mine / plain for mine, plain in zip(figures, found["plain commit"], strict=True))
        rows[name] = {"median_us": statistics.median(figures), "least_us": min(figures), "times_a_plain_commit": ratio}
        print(
            f"{name:<28}{rows[name]['median_us']:9.1f} µs (least {min(figures):.1f}), {ratio:.1f} times a plain commit"
        )
    for size, figures in back.items():
        print(f"{f'1,000 steps return, {size}':<34}{statistics.median(figures):9.1f} ms (least {min(figures):.1f})")
    results = {
        "when": when.isoformat(timespec="seconds"),
        "machine": {**here, "others": bystanders.share()},
        "rounds": given.rounds,
        "steps": given.steps,
        "cpu_us": rows,
        "return_1000_ms": {
            size: {"median": statistics.median(figures), "least": min(figures)} for size, figures in back.items()
        },
        "runs": {"cpu_us": found, "return_1000_ms": back},
    }
    (Path(__file__).parent / "results" / "steps.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
