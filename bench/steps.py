"""What a step of a tool costs, beside a plain commit to a SQLite file and a step of DBOS: microseconds of CPU time.

    python -m bench.steps [--rounds 7] [--steps 400]

They take turns, each time in a new process with its own SQLite file, so that what else the machine does meets each of
them. DBOS is measured if it is installed.
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
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import MCPServer

import perdure
from perdure._core.tool_steps import StepHistory
from perdure.store import SqliteStore
from perdure.store.steps import OpenStream, PutSession
from perdure.testing import _values as values

VALUE = "x" * 18
"""20 bytes as JSON."""

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


server = MCPServer("steps", log_level="WARNING")


@server.tool(meta=perdure.RESUMABLE)
async def steps(count: int, again: bool) -> float:
    return await clocked(lambda: perdure.step("effect", effect, again=again), count)


@contextlib.asynccontextmanager
async def tool(path: Path) -> AsyncIterator[Callable[[int, bool], Awaitable[float]]]:
    app = perdure.asgi(server, store=f"sqlite:{path}")
    http = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False))
    serving = asyncio.create_task(http.serve())
    while not http.started:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    async with perdure.connect(f"http://127.0.0.1:{port}/mcp", mode="legacy") as client:

        async def call(count: int, again: bool) -> float:
            result = await client.call_tool("steps", {"count": count, "again": again})
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


async def read_back(path: Path) -> float:
    """Milliseconds of CPU time in which a call that runs again has its 1,000 steps."""
    async with SqliteStore(str(path)) as store:
        fence = await store.join(values.NODE)
        opening = OpenStream(record=values.a_stream(fence), calls=(values.a_call(),))
        await store.commit([PutSession(record=values.a_session()), opening])
        await store.commit(
            [values.a_put_tool_step(fence, n, value=json.dumps(VALUE).encode()) for n in range(1, 1_001)]
        )
        begin = time.process_time()
        assert len(StepHistory(await store.tool_steps(values.STREAM)).marks) == 1_000
        return (time.process_time() - begin) * 1e3


async def perdure_again(folder: Path, count: int) -> float:
    async with tool(folder / "log.db") as call:
        return await call(count, True)


async def perdure_once(folder: Path, count: int) -> float:
    async with tool(folder / "log.db") as call:
        return await call(count, False)


CANDIDATES = {
    "plain commit": plain_commit,
    "step, again=True (1 commit)": perdure_again,
    "step (2 commits)": perdure_once,
    "DBOS step": dbos_step,
}


def one(name: str, count: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(CANDIDATES[name](Path(folder), count))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=400, help="of each round, at most 950")
    given = arguments.parse_args()
    names = [name for name in CANDIDATES if name != "DBOS step" or importlib.util.find_spec("dbos")]
    found: dict[str, list[float]] = {name: [] for name in names}
    spawn = multiprocessing.get_context("spawn")
    for _ in range(given.rounds):
        for name in names:
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                found[name].append(process.submit(one, name, given.steps).result())
    for name, figures in found.items():
        ratio = statistics.median(mine / plain for mine, plain in zip(figures, found["plain commit"], strict=True))
        median, least = statistics.median(figures), min(figures)
        print(f"{name:<28}{median:9.1f} µs (least {least:.1f}), {ratio:.1f} times a plain commit")
    with tempfile.TemporaryDirectory() as folder:
        milliseconds = asyncio.run(read_back(Path(folder) / "steps.db"))
    print(f"{'1,000 steps read back':<28}{milliseconds:9.1f} ms")


if __name__ == "__main__":
    main()
