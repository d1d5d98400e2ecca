"""Under uvicorn itself, as `docs/using.md` has it, instead of under `perdure serve`."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from tests.support.raw import Peer
from tests.support.starting import environment

pytestmark = pytest.mark.anyio

#: The store is kept in the folder of the test.
APP = """\
import perdure
from tests.support.stubborn import server

app = perdure.asgi(server, store="sqlite:perdure.db")
"""


async def test_a_stop_with_open_streams_prints_no_traceback(tmp_path: Path) -> None:
    """uvicorn cancels them when its time for a graceful stop is over."""
    (tmp_path / "plain.py").write_text(APP)
    command = ("-m", "uvicorn", "plain:app", "--port", "0", "--timeout-graceful-shutdown", "1")
    env = environment() | {"STUBBORN_FOLDER": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=tmp_path, env=env, stdout=PIPE, stderr=STDOUT
    )
    assert process.stdout is not None
    output = b""
    try:
        while not (found := re.search(rb"running on http://127.0.0.1:(\d+)", output)):
            output += await asyncio.wait_for(process.stdout.readline(), 60)
        peer = await Peer(port=int(found[1])).session()
        async with await peer.begin("GET") as standalone, await peer.begin_call("until_there", name="bread") as call:
            assert await standalone.head() == 200
            await call.until_messages(1)
            process.send_signal(signal.SIGINT)
            rest, _ = await asyncio.wait_for(process.communicate(), 60)
            assert (await standalone.answer()).status == 200  # it has its end, not only a connection that broke
        output += rest
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert b"timeout graceful shutdown exceeded" in output
    assert b"Traceback" not in output, output.decode()
