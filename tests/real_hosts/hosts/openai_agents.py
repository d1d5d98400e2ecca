"""The MCP client of openai-agents, in an agent that asks its model by OpenAI's Chat Completions."""

from __future__ import annotations

import json

from tests.real_hosts.host import KEPT_BY_PROGRAM, PROMPT, TWICE, Host, Place, Start

AGENT = """
import asyncio, json, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStdio, MCPServerStreamableHttp
from openai import AsyncOpenAI
model, server, prompt = sys.argv[1:]
set_tracing_disabled(True)
async def main():
    params = json.loads(server)
    kind = MCPServerStdio if "command" in params else MCPServerStreamableHttp
    async with kind(params, client_session_timeout_seconds=120) as bakery:
        client = AsyncOpenAI(base_url=model + "/v1", api_key="none")
        chat = OpenAIChatCompletionsModel(model="gpt-5", openai_client=client)
        found = await Runner.run(Agent(name="baker", model=chat, mcp_servers=[bakery]), prompt)
        print(found.final_output)
asyncio.run(main())
"""


def start(place: Place) -> Start:
    bridge = {"command": place.stdio[0], "args": place.stdio[1:]}
    server = bridge if place.is_stdio else {"url": place.url, "sse_read_timeout": 300}
    return Start([str(place.installed / "python"), "-c", AGENT, place.model, json.dumps(server), PROMPT])


_HIDES = "shows its model a sentence of its own in place of every protocol error"

HOST = Host(
    name="openai-agents",
    registry="pypi",
    packages={"openai-agents": "0.24.0"},
    start=start,
    left_out=KEPT_BY_PROGRAM,
    own_limits={**dict.fromkeys(("kill_no_hint", "kill_late_no_hint", "stdio_kill_no_hint"), _HIDES), "away": TWICE},
)
