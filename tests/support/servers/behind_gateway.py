"""An MCP server of the test's own process behind the gateway, over stdio.

The gateway starts a real program for each session (`stdio_relay`). That program lends its pipes to the test, which
serves them with the SDK alone. So gates and notes of a `ToolServer` work as ever, and all else is a gateway's: its
children, pipes, lanes and eras.

`PERDURE_TEST_SERVER=stdio` puts the server of every test there; `tests/http/conftest.py` names the tests of what only a
server in Perdure's own process has.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from perdure._core.lines import MAX_LINE_BYTES
from perdure.gateway.upstream import Program, Upstream
from tests.support.servers import stdio_relay

MOST = 1_000
"""Processes: tests open as many sessions as they like."""

IS_EVERYWHERE = os.environ.get("PERDURE_TEST_SERVER") == "stdio"


@asynccontextmanager
async def upstream_over_stdio(server: MCPServer | Server[Any], folder: Path) -> AsyncIterator[Upstream]:
    """The server as the upstream of a gateway in this process."""
    if isinstance(server, MCPServer):
        server.streamable_http_app()  # makes the low-level server known
        server = server.session_manager.app
    served: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    place = str(folder / "pipes")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        listener.setblocking(False)

        async def accept() -> None:
            while True:
                lender, _ = await loop.sock_accept(listener)
                task = asyncio.create_task(_serve(server, lender), name="upstream")
                served.add(task)
                task.add_done_callback(served.discard)

        accepting = asyncio.create_task(accept())
        argv = (sys.executable, "-I", "-S", stdio_relay.__file__, place)
        try:
            program = Program(argv=argv, cwd=folder, max_processes=MOST, max_caller_processes=MOST)
            yield Upstream(name="tools", program=program)
        finally:
            accepting.cancel()
            for task in served:
                task.cancel()
            await asyncio.wait({accepting, *served}, timeout=1)  # a tool may block a thread, which cannot be cancelled


async def _serve(server: Server[Any], lender: socket.socket) -> None:
    """Serve one child, until the gateway closes its input or the child is killed."""
    loop = asyncio.get_running_loop()
    with lender:
        lender.setblocking(True)  # the pipes follow at once
        _, (stdin, stdout), _, _ = socket.recv_fds(lender, 1, 2)
        lender.setblocking(False)
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdin, "rb", buffering=0)
        )
        outgoing, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(loop), os.fdopen(stdout, "wb", buffering=0)
        )
        writer = asyncio.StreamWriter(outgoing, protocol, None, loop)
        read_in, read_out = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write_in, write_out = anyio.create_memory_object_stream[SessionMessage](0)

        async def take() -> None:
            with suppress(anyio.BrokenResourceError):
                async with read_in:
                    async for line in reader:
                        if not line.endswith(b"\n"):  # the gateway has given the rest up
                            return
                        await read_in.send(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))

        async def give() -> None:
            async with write_out:
                async for message in write_out:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    writer.write(text.encode() + b"\n")
                    with suppress(ConnectionError):
                        await writer.drain()

        async def end_with_child() -> None:
            with suppress(ConnectionError):
                await loop.sock_recv(lender, 1)
            group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                for job in (take, give, end_with_child):
                    group.start_soon(job)
                await server.run(read_out, write_in, server.create_initialization_options())
                group.cancel_scope.cancel()
        finally:
            incoming.close()
            outgoing.close()
