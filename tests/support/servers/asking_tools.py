"""Tools that ask their client something: `perdure serve tests.support.servers.asking_tools:server`.

Each notes when it begins, and the answers that it got, in a file of the test (`log`), as the tools of
`gate_file_tools` do: so a test counts effects over all processes.
"""

from __future__ import annotations

import anyio
import mcp_types as types
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from pydantic import BaseModel

from tests.support.servers.gate_file_tools import IDEMPOTENT, census, note, pass_gate

server = MCPServer("asking_tools", version="1", log_level="WARNING")


server.tool()(census)


class Answer(BaseModel):
    answer: str


async def _elicit(question: str, ctx: Context) -> str:
    result = await ctx.elicit(question, Answer)
    return result.data.answer if result.action == "accept" else result.action


@server.tool()
async def ask(question: str, ctx: Context, log: str = "") -> str:
    """Ask once."""
    answer = await _elicit(question, ctx)
    note(log, answer)
    return answer


@server.tool(annotations=IDEMPOTENT)
async def ask_again(question: str, ctx: Context, log: str = "") -> str:
    """Ask once; may run again, and asks again then."""
    return await ask(question, ctx, log)


@server.tool()
async def ask_all(questions: list[str], ctx: Context, log: str = "") -> str:
    """Ask everything at once."""
    answers = [""] * len(questions)

    async def one(place: int) -> None:
        answers[place] = await _elicit(questions[place], ctx)
        note(log, answers[place])

    async with anyio.create_task_group() as group:
        for place in range(len(questions)):
            group.start_soon(one, place)
    return " ".join(answers)


@server.tool()
async def ask_each(questions: list[str], ctx: Context, log: str = "") -> str:
    """Ask one after the other."""
    answers = []
    for question in questions:
        answers.append(await _elicit(question, ctx))
        note(log, answers[-1])
    return " ".join(answers)


@server.tool()
async def wait(gate: str) -> str:
    """Wait at a gate."""
    await pass_gate(gate)
    return "went through"


@server.tool()
async def sample(prompt: str, ctx: Context) -> str:
    """Ask the client's model."""
    message = types.SamplingMessage(role="user", content=types.TextContent(type="text", text=prompt))
    params = types.CreateMessageRequestParams(messages=[message], max_tokens=9)
    related = ServerMessageMetadata(related_request_id=ctx.request_id)
    result = await ctx.session.send_request(
        types.CreateMessageRequest(params=params), types.CreateMessageResult, metadata=related
    )
    assert isinstance(result.content, types.TextContent)
    return result.content.text


@server.tool()
async def roots(ctx: Context) -> str:
    """Ask for the client's roots, on the connection's own channel."""
    result = await ctx.session.send_request(types.ListRootsRequest(), types.ListRootsResult)
    return ", ".join(str(root.uri) for root in result.roots)


@server.tool()
async def try_to_ask(ctx: Context) -> str:
    """Ask, and return the outcome if the client cannot be asked."""
    try:
        return await _elicit("Well?", ctx)
    except MCPError as refused:
        return f"{refused.code} {refused.data}"


@server.tool()
async def fill(size: int) -> str:
    """Answer with so many characters."""
    return "x" * size


@server.tool()
async def wait_and_ask(gate: str, ctx: Context) -> str:
    """Wait at a gate, ask, and wait at another one."""
    await pass_gate(f"{gate}.1")
    answer = await _elicit("Well?", ctx)
    await pass_gate(f"{gate}.2")
    return answer
