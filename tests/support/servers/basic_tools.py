"""The tool server that the tests serve: `perdure serve tests.support.servers.basic_tools:server`.

Tools that must be caught in the middle wait at a *gate*, a name that another call opens, so that tests wait for states
and never for time. Gates live in the memory of the process and open once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import anyio
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    SamplingMessage,
    TextContent,
    ToolAnnotations,
)
from pydantic import BaseModel

server = MCPServer("toolbox", version="1", log_level="WARNING")

_gates: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)

READ_ONLY = ToolAnnotations(read_only_hint=True)


async def _pass(gate: str) -> None:
    """Wait at a gate, if there is one."""
    if gate:
        await _gates[gate].wait()


class Answer(BaseModel):
    """What `ask` asks the client's user for."""

    answer: str


@server.tool(annotations=READ_ONLY)
async def count(n: int, ctx: Context, interval: float = 0, gate: str = "", pauses: Sequence[int] = ()) -> str:
    """Report progress 1 … n, then answer.

    With a gate: wait at `<gate>/<number>` after each number in `pauses`, and open `<gate>/done` at the end.
    """
    for number in range(n + 1):
        if number:
            await ctx.report_progress(number, n)
            await anyio.sleep(interval)
        if number in pauses:
            await _gates[f"{gate}/{number}"].wait()
    _gates[f"{gate}/done"].set()
    return f"counted to {n}"


@server.tool()
async def close_early(n: int, ctx: Context, gate: str = "") -> str:
    """Report progress 1 … n; half way, close this call's own SSE connection (SEP-1699), then wait at the gate."""
    half = n // 2
    for number in range(1, n + 1):
        await ctx.report_progress(number, n)
        if number == half:
            await ctx.close_sse_stream()
            await _pass(gate)
    return f"closed after {half} of {n}"


@server.tool()
async def announce(n: int, ctx: Context, start: int = 1, gate: str = "") -> str:
    """Send n numbered `notifications/resources/updated` that belong to no call: they go to the standalone stream.

    With a gate: wait there first, and open `<gate>/done` when all are sent.
    """
    await _pass(gate)
    for number in range(start, start + n):
        await ctx.session.send_resource_updated(f"notice://{number}")
    _gates[f"{gate}/done"].set()
    return f"announced {n}"


@server.tool()
async def gate(name: str) -> str:
    """Wait until the gate is open."""
    await _pass(name)
    return f"went through {name}"


@server.tool()
async def open_gate(name: str) -> str:
    """Open the gate for the calls that wait at it, and for all later ones."""
    _gates[name].set()
    return f"opened {name}"


@server.tool()
async def ask(question: str, ctx: Context, gate: str = "") -> str:
    """Elicit an answer from the client's user."""
    await _pass(gate)
    result = await ctx.elicit(question, Answer)
    return result.data.answer if result.action == "accept" else result.action


@server.tool()
async def sample(prompt: str, ctx: Context) -> str:
    """Let the client's model answer."""
    # `create_message` of the session is deprecated and warns; this is the same request.
    result = await ctx.session.send_request(
        CreateMessageRequest(
            params=CreateMessageRequestParams(
                messages=[SamplingMessage(role="user", content=TextContent(type="text", text=prompt))], max_tokens=100
            )
        ),
        CreateMessageResult,
        metadata=ServerMessageMetadata(related_request_id=ctx.request_id),
    )
    return result.content.text if isinstance(result.content, TextContent) else result.content.type


@server.tool()
async def boom(message: str = "boom", code: int = 0) -> str:
    """Raise: a result with `isError`, or with a code a JSON-RPC error."""
    raise MCPError(code, message) if code else RuntimeError(message)


@server.tool(annotations=READ_ONLY)
async def whoami(ctx: Context, header: str = "user-agent") -> dict[str, str | None]:
    """Return the caller: the subject and client of the access token, and one header of the HTTP request."""
    token = get_access_token()
    return {
        "subject": token.subject if token else None,
        "client": token.client_id if token else None,
        "header": ctx.headers.get(header) if ctx.headers else None,
    }
