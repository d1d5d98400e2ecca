"""The tools of `asking_tools` that FastMCP has words for, in a FastMCP server."""

from __future__ import annotations

import anyio
from fastmcp import Context, FastMCP
from pydantic import BaseModel

server = FastMCP("fastmcp_asking_tools", version="1")


class Answer(BaseModel):
    answer: str


async def _elicit(question: str, ctx: Context) -> str:
    result = await ctx.elicit(question, Answer)
    return result.data.answer if result.action == "accept" else result.action


@server.tool
async def ask_each(questions: list[str], ctx: Context) -> str:
    """Ask one after the other."""
    return " ".join([await _elicit(question, ctx) for question in questions])


@server.tool
async def ask_all(questions: list[str], ctx: Context) -> str:
    """Ask everything at once."""
    answers = [""] * len(questions)

    async def one(place: int) -> None:
        answers[place] = await _elicit(questions[place], ctx)

    async with anyio.create_task_group() as group:
        for place in range(len(questions)):
            group.start_soon(one, place)
    return " ".join(answers)
