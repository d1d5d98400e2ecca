"""The official TypeScript server without its session era (`tests/clients/ts2_server.mjs`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.clients.node_clients import HERE as CLIENTS
from tests.support.processes.node_programs import node_modules, program

SCRIPT = CLIENTS / "ts2_server.mjs"


def typescript_program() -> tuple[str, ...]:
    """The server over its pipes."""
    node_modules(CLIENTS)
    return str(program("node")), str(SCRIPT), "stdio"


@asynccontextmanager
async def typescript_server() -> AsyncIterator[str]:
    """The server over HTTP, at this address."""
    node_modules(CLIENTS)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(program("node"), SCRIPT, "http", stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()
