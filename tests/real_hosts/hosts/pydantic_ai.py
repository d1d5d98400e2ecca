"""The MCP client of pydantic-ai, in an agent that asks its model by OpenAI's Chat Completions."""

from __future__ import annotations

import json

from tests.real_hosts.host import KEPT_BY_PROGRAM, NAME, PROMPT, TWICE, Host, Place, Start

AGENT = """
import json, sys
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model, server, prompt = sys.argv[1:]
bakery = MCPToolset(json.loads(server))
provider = OpenAIProvider(base_url=model + "/v1", api_key="none")
print(Agent(OpenAIChatModel("gpt-5", provider=provider), toolsets=[bakery]).run_sync(prompt).output)
"""


def start(place: Place) -> Start:
    bridge = {"command": place.stdio[0], "args": place.stdio[1:]}
    server = {"mcpServers": {NAME: bridge}} if place.is_stdio else place.url
    return Start([str(place.installed / "python"), "-c", AGENT, place.model, json.dumps(server), PROMPT])


HOST = Host(
    name="pydantic-ai",
    registry="pypi",
    packages={"pydantic-ai-slim[mcp,openai]": "2.66.0"},
    client="fastmcp",
    start=start,
    own_limits={"away": TWICE},
    left_out=KEPT_BY_PROGRAM,
)
