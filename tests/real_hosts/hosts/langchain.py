"""The MCP client of langchain-mcp-adapters, in a LangChain agent that asks its model by OpenAI's Chat Completions."""

from __future__ import annotations

import json

from tests.real_hosts.host import KEPT_BY_PROGRAM, NAME, PROMPT, TWICE, Host, Place, Start

AGENT = """
import asyncio, json, sys
from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.tools import load_mcp_tools
from langchain_openai import ChatOpenAI
model, name, server, prompt = sys.argv[1:]
async def main():
    chat = ChatOpenAI(model="gpt-5", base_url=model + "/v1", api_key="none")
    async with MultiServerMCPClient({name: json.loads(server)}).session(name) as session:
        agent = create_agent(chat, await load_mcp_tools(session))
        found = await agent.ainvoke({"messages": [{"role": "user", "content": prompt}]})
        print(found["messages"][-1].content)
asyncio.run(main())
"""


def start(place: Place) -> Start:
    bridge = {"transport": "stdio", "command": place.stdio[0], "args": place.stdio[1:]}
    server = bridge if place.is_stdio else {"transport": "streamable_http", "url": place.url}
    return Start([str(place.installed / "python"), "-c", AGENT, place.model, NAME, json.dumps(server), PROMPT])


_RAISES = "raises a protocol error in the agent, which ends unless its program handles tool errors"

HOST = Host(
    name="langchain-mcp-adapters",
    registry="pypi",
    packages={"langchain-mcp-adapters": "0.3.2", "langchain": "1.4.7", "langchain-openai": "1.7.3"},
    start=start,
    left_out=KEPT_BY_PROGRAM,
    own_limits={**dict.fromkeys(("kill_no_hint", "kill_late_no_hint", "stdio_kill_no_hint"), _RAISES), "away": TWICE},
)
