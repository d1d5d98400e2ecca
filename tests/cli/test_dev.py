"""`perdure dev`: new code while sessions and calls go on."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from asyncio.subprocess import STDOUT
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest
from mcp import Client

from tests.support.clients.raw_http import Peer
from tests.support.processes.serving import READY, START_SECONDS, Served, serving
from tests.support.processes.starting import start
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

BAKERY = """\
from pathlib import Path
import anyio
from mcp.server.mcpserver import Context, MCPServer
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

mcp = MCPServer("bakery", version="1", log_level="WARNING")

@mcp.tool()
async def bake(ctx: Context) -> str:
    await ctx.report_progress(1)
    while not Path("baked").exists():
        await anyio.sleep(0.01)
    await ctx.report_progress(2)
    return "the first recipe"

@mcp.tool()
def taste() -> str:
    return "of the first recipe"

@mcp.custom_route("/recipe", methods=["GET"])
async def recipe(request: Request) -> Response:
    return PlainTextResponse("first")
"""
SECOND = BAKERY.replace("first", "other")  # of the same length
BROKEN = BAKERY + "oven = (\n"


def save(folder: Path, source: str) -> None:
    """Write as many editors do: another file, which takes the name of the first; in the same second."""
    (folder / "bakery.py~").write_text(source)
    os.utime(folder / "bakery.py~", (1_000_000_000, 1_000_000_000))
    (folder / "bakery.py~").replace(folder / "bakery.py")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


async def saw(served: Served, text: str, times: int = 1) -> None:
    await until(lambda: sum(text in line for line in served.output) >= times)


async def taste(client: Client) -> str:
    return str((await client.call_tool("taste", {})).content[0].text)  # type: ignore[union-attr]


def developing(folder: Path, *options: str, forks: bool = True) -> AbstractAsyncContextManager[Served]:
    return serving("bakery.py", "--no-console", *options, cwd=folder, command="dev", forks=forks)


async def test_a_session_and_its_running_call_go_on_while_the_code_changes(tmp_path: Path) -> None:
    save(tmp_path, BAKERY)
    told: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        told.append(progress)

    async with developing(tmp_path, forks=False) as served, Client(served.url, mode="legacy") as client:
        call = asyncio.create_task(client.call_tool("bake", {}, progress_callback=on_progress))
        await until(lambda: told)
        assert await taste(client) == "of the first recipe"
        save(tmp_path, SECOND)
        await saw(served, "the new code serves")
        assert await taste(client) == "of the other recipe"
        (tmp_path / "baked").touch()
        assert (await call).content[0].text == "the first recipe"  # type: ignore[union-attr]
        assert [number for number in told if number.is_integer()] == [1, 2]  # on a busy machine heartbeats come, too
        assert (await client.call_tool("bake", {})).content[0].text == "the other recipe"  # type: ignore[union-attr]
        assert sum(READY.search(line) is not None for line in served.output) == 1


async def test_no_request_over_a_kept_connection_is_lost_and_none_gets_the_old_code_after_the_new(
    tmp_path: Path,
) -> None:
    """A connection is handed to the new process between two requests; its client does not notice."""
    save(tmp_path, BAKERY)
    async with developing(tmp_path) as served:
        peer = Peer(port=served.port)
        request = peer.request("GET", path="/recipe")
        over = asyncio.Event()

        async def ask_again_and_again() -> list[bytes]:
            seen = []
            async with await peer.begin("GET", path="/recipe") as talk:
                while not over.is_set():
                    answer = await talk.answer()
                    seen.append(answer.body)
                    if answer.header("connection") == "close":
                        await talk.aclose()
                        talk = await peer.begin("GET", path="/recipe")
                    else:
                        await talk.again(request)
                await talk.answer()
                await talk.aclose()
            return seen

        async with await peer.open(request) as idle, await peer.open(request) as half, asyncio.TaskGroup() as group:
            assert (await idle.answer()).body == (await half.answer()).body == b"first"
            asking = [group.create_task(ask_again_and_again()) for _ in range(4)]
            await half.again(request[:10])
            save(tmp_path, SECOND)
            await saw(served, "the new code serves")
            for _ in range(2):
                await idle.again(request)
                assert (await idle.answer()).body == b"other"
            await half.send(request[10:])
            answer = await half.answer()  # it was begun at the old process, which therefore answers it
            assert (answer.body, answer.header("connection")) == (b"first", "close")
            over.set()
        for task in asking:
            assert [body for body, _ in itertools.groupby(task.result())] == [b"first", b"other"]


async def test_code_that_cannot_be_imported_is_shown_and_the_old_code_serves_until_it_is_mended(tmp_path: Path) -> None:
    save(tmp_path, BAKERY)
    async with developing(tmp_path) as served, Client(served.url, mode="legacy") as client:
        save(tmp_path, BROKEN)
        await saw(served, "the old code continues to serve")
        line = BROKEN.count("\n")
        *frames, told = served.output[-5:]
        assert frames == [
            f'  File "{tmp_path}/bakery.py", line {line}',
            "    oven = (",
            "           ^",
            "SyntaxError: '(' was never closed",
        ]
        kept = "the old code continues to serve: bakery.py cannot be imported: SyntaxError: '(' was never closed"
        assert f"{kept} (bakery.py:{line})" in told
        assert await taste(client) == "of the first recipe"
        save(tmp_path, "import no_such_flour\n")
        await saw(served, "the old code continues to serve", 2)
        assert "No module named 'no_such_flour' (bakery.py:1)" in served.output[-1]
        save(tmp_path, "import pathlib, time\npathlib.Path('hangs').touch()\ntime.sleep(3600)\n")
        await until((tmp_path / "hangs").exists)
        assert await taste(client) == "of the first recipe"
        save(tmp_path, SECOND)
        await saw(served, "the new code serves")
        assert await taste(client) == "of the other recipe"


async def test_code_that_is_broken_from_the_start_is_waited_for_and_a_closed_terminal_ends_it(tmp_path: Path) -> None:
    save(tmp_path, BROKEN)
    arguments = ("dev", "bakery.py", "--port", "0", "--no-console")
    process = await start("tests.support.processes.forked_workers", *arguments, cwd=tmp_path, errors=STDOUT)
    served = Served(process=process, url="", port=0)

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            served.output.append(line.decode().rstrip())

    reading = asyncio.create_task(read())
    try:
        await saw(served, "the next change of the code is waited for: bakery.py cannot be imported: SyntaxError")
        assert names_in(tmp_path) == {"bakery.py"}
        save(tmp_path, BAKERY)
        await saw(served, "serving on http://127.0.0.1:")
        async with Client(served.output[-1].split()[-1], mode="legacy") as client:
            assert await taste(client) == "of the first recipe"
        served.send(signal.SIGHUP)
        assert await served.wait() == 0
    finally:
        await served.kill()
        await reading


async def test_a_worker_that_dies_while_the_code_is_broken_is_started_when_it_is_mended(tmp_path: Path) -> None:
    save(tmp_path, BAKERY)
    async with developing(tmp_path) as served:
        async with Client(served.url, mode="legacy") as client:
            save(tmp_path, BROKEN)
            await saw(served, "the old code continues to serve")
            workers = [child for child in psutil.Process(served.pid).children() if child.name() != "template"]
            workers[0].kill()
            await saw(served, "the next change of the code is waited for")
            save(tmp_path, SECOND)
            await until(lambda: len(psutil.Process(served.pid).children()) == 2)
            assert await taste(client) == "of the other recipe"
        assert await served.stop() == 0


async def test_the_console_is_served_beside_it_and_ends_with_it_even_if_it_is_killed(tmp_path: Path) -> None:
    save(tmp_path, BAKERY)
    async with serving("bakery.py", cwd=tmp_path, command="dev") as served, httpx2.AsyncClient(trust_env=False) as http:
        await saw(served, "perdure: console on ")
        [line] = [line for line in served.output if "perdure: console on " in line]
        address, _, token = line.removeprefix("perdure: console on ").partition("?token=")
        async with Client(served.url, mode="legacy"):
            entered = await http.post(f"{address}api/enter", headers={"Authorization": f"Bearer {token}"})
            answer = await http.get(f"{address}api/store", headers={"Authorization": f"Bearer {entered.json()['key']}"})
        assert (answer.status_code, answer.json()["store"]) == (200, "sqlite:perdure.db")
        assert answer.json()["counts"]["sessions"] == 1
        [console] = [
            one for one in psutil.Process(served.pid).children() if "run_until_input_ends" in " ".join(one.cmdline())
        ]
        await served.kill()
        await until(lambda: not console.is_running() or console.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("none.py",), "no file 'none.py'"),
        (("flour.py",), "flour.py has no MCP server; it has kilos (int); call one server, mcp or app, or write"),
        (("flour.py", "--store", "memory:"), "perdure dev needs a store that processes share, and memory: is not one"),
        (("flour.py", "--reload-dir", "none"), "--reload-dir: 'none' is not a folder"),
        (("flour.py", "--reload-include", "a,b"), "--reload-include: 'a,b' is not one name"),
        (("flour.py", "--open", "--no-console"), "--open opens the console, and --no-console leaves it out"),
    ],
)
async def test_what_cannot_be_served_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, arguments: tuple[str, ...], line: str
) -> None:
    (tmp_path / "flour.py").write_text("kilos = 2\n")
    process = await start("perdure", "dev", *arguments, "--port", "0", "--log-level", "error", cwd=tmp_path)
    said, errors = await asyncio.wait_for(process.communicate(), START_SECONDS)
    assert (process.returncode, said) == (2, b"")
    assert re.fullmatch(rf"perdure: {re.escape(line)}[^\n]*\n", errors.decode()), errors
    assert names_in(tmp_path) == {"flour.py"}
