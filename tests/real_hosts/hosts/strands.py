"""The MCP client of strands, in an agent that asks its model by OpenAI's Chat Completions."""

from __future__ import annotations

import json

from tests.real_hosts.host import KEPT_BY_PROGRAM, PROMPT, TWICE, Host, Place, Start

AGENT = """
import json, sys
from mcp import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from strands import Agent
from strands.models.openai import OpenAIModel
from strands.tools.mcp import MCPClient
model, server, prompt = sys.argv[1:]
params = json.loads(server)
if "url" in params:
    transport = lambda: streamable_http_client(params["url"])
else:
    transport = lambda: stdio_client(StdioServerParameters(**params))
chat = OpenAIModel(client_args={"base_url": model + "/v1", "api_key": "none"}, model_id="gpt-5")
print(Agent(model=chat, tools=[MCPClient(transport)])(prompt))
"""


def start(place: Place) -> Start:
    bridge = {"command": place.stdio[0], "args": place.stdio[1:]}
    server = bridge if place.is_stdio else {"url": place.url}
    return Start([str(place.installed / "python"), "-c", AGENT, place.model, json.dumps(server), PROMPT])


HOST = Host(
    name="strands",
    registry="pypi",
    packages={"strands-agents[openai]": "1.62.0"},
    start=start,
    own_limits={"away": TWICE},
    left_out=KEPT_BY_PROGRAM,
)
