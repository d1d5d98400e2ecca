"""The MCP client of google-adk, in an agent that asks its model by Gemini's `generateContent`."""

from __future__ import annotations

import json

from tests.real_hosts.host import KEPT_BY_PROGRAM, PROMPT, TWICE, Host, Place, Start

AGENT = """
import asyncio, json, sys
from google.adk.agents import LlmAgent
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner
from google.adk.tools.mcp_tool import McpToolset, StdioConnectionParams, StreamableHTTPConnectionParams
from mcp.types import ElicitResult
model, server, prompt = sys.argv[1:]
async def answer(context, question):
    return ElicitResult(action="accept", content={"flour": "rye"})
async def main():
    params = json.loads(server)
    kind = StreamableHTTPConnectionParams if "url" in params else StdioConnectionParams
    bakery = McpToolset(connection_params=kind(**params), elicitation_callback=answer)
    agent = LlmAgent(name="baker", model=Gemini(model="gemini-2.5-pro", base_url=model), tools=[bakery])
    await InMemoryRunner(agent=agent).run_debug(prompt)
    await bakery.close()
asyncio.run(main())
"""


def start(place: Place) -> Start:
    bridge = {"server_params": {"command": place.stdio[0], "args": place.stdio[1:]}, "timeout": 120}
    server = bridge if place.is_stdio else {"url": place.url}
    argv = [str(place.installed / "python"), "-c", AGENT, place.model, json.dumps(server), PROMPT]
    return Start(argv, {"GOOGLE_API_KEY": "none"})


HOST = Host(
    name="google-adk",
    registry="pypi",
    packages={"google-adk[mcp]": "2.13.0"},
    client="google-adk",
    start=start,
    own_limits={"away": TWICE},
    left_out=KEPT_BY_PROGRAM,
)
