"""The official Python SDK 1.x, whose experimental client runs tools as tasks of 2025-11-25.

It takes calls as JSON lines on stdin, and prints what it sees the same way (see stock.py), in its own environment.
"""

# mypy: ignore-errors
# The types of the SDK are those of another version here.

import asyncio
import json
import sys

import mcp.types as types
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client


def say(**seen: object) -> None:
    print(json.dumps(seen), flush=True)


async def on_elicit(_: object, params: types.ElicitRequestParams) -> types.ElicitResult:
    say(asked=params.message)
    return types.ElicitResult(action="accept", content={"answer": "forty-two"})


async def call(session: ClientSession, number: int, tool: str, arguments: dict[str, object]) -> None:
    try:
        created = await session.experimental.call_tool_as_task(tool, arguments)
        task = created.task.taskId
        async for _ in session.experimental.poll_task(task):
            pass
        result = await session.experimental.get_task_result(task, types.CallToolResult)
        block = result.content[0]
        text = block.text if isinstance(block, types.TextContent) else ""
        say(call=number, answer=("error: " if result.isError else "") + text)
    except Exception as error:  # whatever the client raises is what the story sees
        code = getattr(getattr(error, "error", None), "code", None)
        say(call=number, answer=f"error: {error}", code=code)


async def main() -> None:
    async with (
        streamablehttp_client(sys.argv[1]) as (read, write, _),
        ClientSession(read, write, elicitation_callback=on_elicit) as session,
    ):
        say(ready=str((await session.initialize()).protocolVersion))
        calls: list[asyncio.Task[None]] = []
        while line := await asyncio.to_thread(sys.stdin.readline):
            given = json.loads(line)
            calls.append(asyncio.create_task(call(session, len(calls), given["tool"], given["arguments"])))


asyncio.run(main())
