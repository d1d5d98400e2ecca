"""A client process that a test kills: `python -m tests.client.client_child URL STATE TOOL ARGS`.

Prints one JSON line for each thing that happens. With TOOL `-` it calls nothing and follows the calls that a process of
before has left, until all have ended; with `look` it takes their notifications, and not their results. With `all` it
makes the calls of `ARGS["calls"]` at once. With `fatal` after `ARGS` it kills itself as its call leaves the state.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import mcp_types as types
from mcp.client.session import ClientRequestContext

import perdure
from perdure.client.memory import StateFile, decode


class Fatal(StateFile):
    """The process dies with the write that forgets its call."""

    _had_call = False

    def save(self, data: bytes) -> None:
        super().save(data)
        state = decode(data)
        has_call = bool(state.calls or state.durable_calls)
        if self._had_call and not has_call:
            os.kill(os.getpid(), signal.SIGKILL)
        self._had_call = has_call


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def answer(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
    say(asked=params.message)
    if params.message.startswith("hang"):
        if "answers" in sys.argv[5:]:
            return types.ElicitResult(action="accept", content={"answer": "at last"})
        await asyncio.Event().wait()
    return types.ElicitResult(action="accept", content={"answer": "yes"})


async def report(progress: float, total: float | None, message: str | None) -> None:
    say(progress=progress)


async def main(url: str, state: str, tool: str, arguments: str) -> None:
    mode = "2026-07-28" if "modern" in sys.argv[5:] else "auto"
    kept = Fatal(state) if "fatal" in sys.argv[5:] else state
    async with perdure.connect(url, state=kept, mode=mode, elicitation_callback=answer) as client:
        say(session=client.session_id, pending=[[call.tool, call.arguments] for call in client.pending()])
        if tool == "all":
            calls = json.loads(arguments)["calls"]
            async with asyncio.TaskGroup() as group:
                for name, given in calls:
                    group.create_task(client.call_tool(name, given))
            return
        if tool not in ("-", "look"):
            result = await client.call_tool(tool, json.loads(arguments), progress_callback=report)
            say(result=text(result))
            await asyncio.sleep(30 if kept is not state else 0)
            return
        for call in client.pending():
            try:
                async for note in call:
                    if isinstance(note, types.ProgressNotification):
                        say(progress=note.params.progress)
                if tool == "look":
                    say(ended=call.tool)
                    await asyncio.Event().wait()
                say(result=text(await call))
            except perdure.OutcomeUnknown as unknown:
                say(unknown=unknown.tool, arguments=unknown.arguments, reason=unknown.reason)


def text(result: types.CallToolResult) -> str:
    return "".join(part.text for part in result.content if isinstance(part, types.TextContent))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
