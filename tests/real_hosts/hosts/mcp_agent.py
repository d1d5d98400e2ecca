"""The MCP client of mcp-agent, in an agent that asks its model by OpenAI's Chat Completions."""

from __future__ import annotations

import json

from tests.real_hosts.host import KEPT_BY_PROGRAM, NAME, PROMPT, TWICE, Host, Place, Start

AGENT = """
import asyncio, json, sys
from mcp.types import ElicitResult
from mcp_agent.agents.agent import Agent
from mcp_agent.app import MCPApp
from mcp_agent.config import LoggerSettings, MCPServerSettings, MCPSettings, OpenAISettings, Settings
from mcp_agent.workflows.llm.augmented_llm_openai import OpenAIAugmentedLLM
model, name, server, prompt = sys.argv[1:]
settings = Settings(
    mcp=MCPSettings(servers={name: MCPServerSettings(**json.loads(server))}),
    openai=OpenAISettings(base_url=model + "/v1", api_key="none", default_model="gpt-5"),
    logger=LoggerSettings(type="console", level="info"),
)
async def answer(question):
    return ElicitResult(action="accept", content={"flour": "rye"})
async def main():
    async with MCPApp(name="baker", settings=settings, elicitation_callback=answer).run():
        async with Agent(name="baker", instruction="Bake.", server_names=[name]) as agent:
            print(await (await agent.attach_llm(OpenAIAugmentedLLM)).generate_str(prompt))
asyncio.run(main())
"""


def start(place: Place) -> Start:
    bridge = {"transport": "stdio", "command": place.stdio[0], "args": place.stdio[1:]}
    server = bridge if place.is_stdio else {"transport": "streamable_http", "url": place.url}
    return Start([str(place.installed / "python"), "-c", AGENT, place.model, NAME, json.dumps(server), PROMPT])


HOST = Host(
    name="mcp-agent",
    registry="pypi",
    # It needs the Python SDK of before 2.0, and does not say so.
    packages={"mcp-agent[openai]": "0.2.6", "mcp": "1.30.0"},
    start=start,
    own_limits={"away": TWICE},
    left_out=KEPT_BY_PROGRAM,
)
