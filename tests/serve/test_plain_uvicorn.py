"""Under uvicorn itself, as `docs/using.md` has it, instead of under `perdure serve`."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.modern_requests import modern
from tests.support.clients.raw_http import Exchange, Peer
from tests.support.processes.starting import environment

pytestmark = pytest.mark.anyio

#: The store is kept in the folder of the test.
APP = """\
import perdure
from tests.support.servers.slow_tools import server

app = perdure.asgi(server, store="sqlite:perdure.db")
"""


@asynccontextmanager
async def plain_uvicorn(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A process, and its port. It cancels what is open a second after it was told to stop."""
    (folder / "plain.py").write_text(APP)
    command = ("-m", "uvicorn", "plain:app", "--port", "0", "--timeout-graceful-shutdown", "1")
    env = environment() | {"STUBBORN_FOLDER": str(folder)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=folder, env=env, stdout=PIPE, stderr=STDOUT
    )
    assert process.stdout is not None
    output = b""
    try:
        while not (found := re.search(rb"running on http://127.0.0.1:(\d+)", output)):
            output += await asyncio.wait_for(process.stdout.readline(), 60)
        yield process, int(found[1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_stop_with_open_streams_listeners_and_calls_prints_no_traceback(tmp_path: Path) -> None:
    """uvicorn cancels them when its time for a graceful stop is over."""
    key = {"_meta": {"dev.perdure/key": "order-1"}}
    calls = [{}, key, key, {"_meta": {"progressToken": "p"}}]  # the third joins the second
    async with plain_uvicorn(tmp_path) as (process, port), AsyncExitStack() as stack:
        peer = Peer(port=port)
        session = await peer.session()
        standalone = await stack.enter_async_context(await session.begin("GET"))
        assert await standalone.head() == 200
        in_session = await stack.enter_async_context(await session.begin_call("until_there", name="bread"))
        await in_session.until_messages(1)

        async def begin(method: str, params: dict[str, Any]) -> Exchange:
            body, headers = modern(method, params)
            return await stack.enter_async_context(await peer.begin("POST", body, headers=headers))

        listening = await begin("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        assert await listening.until_messages(1)
        for more in calls:
            call = await begin("tools/call", {"name": "until_there", "arguments": {"name": "bread"}} | more)
        await call.until_messages(1)
        process.send_signal(signal.SIGINT)
        said, _ = await asyncio.wait_for(process.communicate(), 60)
        assert (await standalone.answer()).status == 200  # it has its end, not only a connection that broke
        await listening.answer()
        assert listening.messages[-1]["result"]["resultType"] == "complete"  # it may listen elsewhere
    assert b"timeout graceful shutdown exceeded" in said
    assert b"Traceback" not in said, said.decode()
