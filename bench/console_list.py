"""Fills a store with sessions, and measures what the console's list costs, and what it does to a server under load.

    python bench/console_list.py [--store ADDRESS] [--sessions 100000] [--seconds 10]

ADDRESS is an empty store: a SQLite file, or a PostgreSQL schema; without it a file in a temporary folder is used. A
server and a console are started on the store, both by their commands. Clients call a tool that does nothing, first
without the console, then while a page is open that reads the list every second (and a filtered list, and a session) as
a browser does. Printed are the times of pages, and the calls that the server has answered in each phase. Server,
console and clients share this machine's processors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2 as httpx

import perdure
from perdure._core.ids import NodeId, SessionId, StreamId
from perdure._core.principals import token_principal
from perdure._core.states import SessionState
from perdure.store import open_store
from perdure.store.records import SessionRecord
from perdure.store.steps import PutSession

CLIENTS = 4
TOKEN = "token-of-the-measurement"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
PAGES = 30
PARAMS = json.dumps({"clientInfo": {"name": "inspector", "version": "1"}, "capabilities": {"roots": {}}}).encode()
RESULT = json.dumps({"serverInfo": {"name": "bakery", "version": "1"}, "instructions": "x" * 400}).encode()
TARGET = """\
from mcp.server.mcpserver import MCPServer
server = MCPServer("bench", log_level="ERROR")
@server.tool()
async def nothing() -> str:
    return "done"
"""


async def fill(address: str, count: int) -> None:
    """As many sessions, of a thousand owners, whose last activity is spread over an hour."""
    async with open_store(address, busy_timeout=60) as store:
        await store.join(NodeId("filler"))
        now = time.time()
        for first in range(0, count, 1_000):
            steps = []
            for number in range(first, min(count, first + 1_000)):
                active = now - 7_200 + 3_600 * ((number * 7_919) % count) / count
                record = SessionRecord(
                    id=SessionId(secrets.token_urlsafe(32)),
                    owner=token_principal("app", None, f"user-{number % 1_000}"),
                    state=SessionState.DORMANT if number % 4 else SessionState.ACTIVE,
                    version="2025-11-25",
                    client_params=PARAMS,
                    result=RESULT,
                    initialized=True,
                    sticky=(),
                    incarnation=1,
                    standalone=StreamId(secrets.token_urlsafe(16)),
                    created=active - 60,
                    active=active,
                )
                steps.append(PutSession(record=record))
            await store.commit(steps)
        await store.leave(NodeId("filler"))


@contextlib.asynccontextmanager
async def running(folder: Path, ready: str, *arguments: str) -> AsyncIterator[tuple[str, int]]:
    """A command of perdure, the address that it has printed, and its process id."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "perdure", *arguments), cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        while ready not in (line := (await process.stdout.readline()).decode()):
            assert line, "it ended before it was ready"
        yield line.split(ready)[1].split()[0], process.pid
    finally:
        process.terminate()
        await process.communicate()


async def load(url: str, seconds: float) -> list[float]:
    """The time of each call."""
    took: list[float] = []

    async def call() -> None:
        async with perdure.connect(url) as client:
            until = time.perf_counter() + seconds
            while (began := time.perf_counter()) < until:
                await client.call_tool("nothing", {})
                took.append(time.perf_counter() - began)

    await asyncio.gather(*(call() for _ in range(CLIENTS)))
    return took


async def look(address: str) -> None:
    """A page that is open: it reads what it shows with each change, as a browser does. Prints the time of each read."""
    async with httpx.AsyncClient(base_url=address, headers=HEADERS, timeout=60) as client:

        async def get(what: str, path: str) -> Any:
            began = time.perf_counter()
            answer = await client.get(path)
            print(json.dumps([what, time.perf_counter() - began]), flush=True)
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = await get("the first page", "/api/sessions")
        async with client.stream("GET", "/api/live") as live:
            async for line in live.aiter_lines():
                if line.startswith("data:"):
                    page = await get("a page", "/api/sessions?limit=100")
                    await get("the next page", f"/api/sessions?limit=100&offset={page['next']}")
                    await get("a page of one owner", "/api/sessions?owner=user-7")
                    await get("one session", f"/api/sessions/{first['items'][-1]['id']}")
                    await get("the store", "/api/store")


async def cost(address: str, pid: int) -> None:
    """The processor time that the console takes for one page, while nothing else happens."""
    async with httpx.AsyncClient(base_url=address, headers=HEADERS, timeout=60) as client:
        for what, path in (
            ("a page of 100", "/api/sessions?limit=100"),
            ("a page of one owner", "/api/sessions?owner=user-7"),
            ("a page of one tool", "/api/sessions?tool=nothing"),
            ("a page of one", "/api/sessions?limit=1"),
        ):
            await client.get(path)
            used = processor_seconds(pid)
            for _ in range(PAGES):
                assert (await client.get(path)).status_code == 200
            print(f"{what}: {1_000 * (processor_seconds(pid) - used) / PAGES:.1f} ms of processor time", flush=True)


def tell(what: str, seconds: list[float]) -> None:
    ms = sorted(1_000 * one for one in seconds)
    print(f"{what}: {len(ms)} times, median {statistics.median(ms):.1f} ms, slowest {ms[-1]:.1f} ms", flush=True)


def each_call(used: float, took: list[float]) -> None:
    print(f"the server used {1_000 * used / len(took):.2f} ms of processor time for each call", flush=True)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def measure(address: str, folder: Path, *, sessions: int, seconds: float) -> None:
    (folder / "target.py").write_text(TARGET)
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    console_command = ("console", "--port", "0", "--store", address, "--token-file", "token")
    began = time.perf_counter()
    await fill(address, sessions)
    print(f"{sessions:,} sessions written in {time.perf_counter() - began:.0f} s", flush=True)
    serve = ("serve", "target.py:server", "--port", "0", "--store", address, "--max-sessions", str(2 * sessions))
    async with running(folder, "serving on ", *serve) as (url, server):
        await load(url, 2)
        for turn in range(2):
            before = processor_seconds(server)
            took = await load(url, seconds)
            tell(f"turn {turn + 1}, without the console: {len(took) / seconds:.0f} calls/s", took)
            each_call(processor_seconds(server) - before, took)
            async with running(folder, "console on ", *console_command) as (console, pid):
                page = await asyncio.create_subprocess_exec(
                    sys.executable, __file__, "--look", console, stdout=asyncio.subprocess.PIPE
                )
                assert page.stdout is not None
                await page.stdout.readline()
                used, before, at = processor_seconds(pid), processor_seconds(server), time.perf_counter()
                took = await load(url, seconds)
                share = (processor_seconds(pid) - used) / (time.perf_counter() - at)
                tell(f"turn {turn + 1}, with an open page: {len(took) / seconds:.0f} calls/s", took)
                each_call(processor_seconds(server) - before, took)
                print(f"the console used {share:.0%} of one processor and {memory(pid):.0f} MB", flush=True)
                page.terminate()
                times: dict[str, list[float]] = {}
                for line in (await page.communicate())[0].splitlines():
                    what, one = json.loads(line)
                    times.setdefault(what, []).append(one)
                for what, each in times.items():
                    tell(what, each)
                await cost(console, pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store")
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--look", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.look:
        asyncio.run(look(given.look))
    with tempfile.TemporaryDirectory() as folder:
        address = given.store or f"sqlite:{folder}/perdure.db"
        asyncio.run(measure(address, Path(folder), sessions=given.sessions, seconds=given.seconds))


if __name__ == "__main__":
    main()
