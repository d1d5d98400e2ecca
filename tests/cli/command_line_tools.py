"""A server to be tried from the command line: arguments of every kind, questions, log lines, a resource, a prompt."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field

from tests.support.servers.gate_file_tools import note, pass_gate

server = MCPServer("kitchen", version="2", instructions="Ask the cook.", log_level="WARNING")


class Dough(BaseModel):
    """What is kneaded."""

    flour: str
    grams: int = 500


class Oven(StrEnum):
    WOOD = "wood"
    GAS = "gas"


class Order(BaseModel):
    """What `order` asks for."""

    bread: Literal["rye", "spelt"]
    loaves: int = Field(default=2, ge=1, le=12, description="How many")
    sliced: bool = Field(description="Cut it")
    weight: float = Field(default=1.5)
    name: str = Field(default="", title="Name on the box")


@server.tool(annotations=ToolAnnotations(idempotent_hint=True, read_only_hint=False))
async def bake(
    loaves: Annotated[int, Field(ge=1, le=100, description="How many")],
    ctx: Context,
    oven: Oven = Oven.WOOD,
    gate: str = "",
    log: str = "",
) -> str:
    """Bake bread, loaf by loaf.

    Wait at the gate after the second loaf.
    """
    note(log, "bake")
    for loaf in range(1, loaves + 1):
        await ctx.report_progress(loaf, loaves, f"loaf {loaf}")
        if loaf == 2:
            await pass_gate(gate)
    return f"{loaves} loaves from the {oven.value} oven"


@server.tool()
async def knead(
    dough: Dough, seeds: list[str], turns: list[int] | None = None, hot: bool = False, salt: float | None = None
) -> dict[str, object]:
    """Give back what was understood."""
    return {"dough": dough.model_dump(), "seeds": seeds, "turns": turns, "hot": hot, "salt": salt}


@server.tool()
async def order(ctx: Context) -> str:
    """Ask what is wanted."""
    await ctx.log("info", "the cook listens")
    await ctx.log("debug", "the cook yawns")
    result = await ctx.elicit("What shall it be?", Order)
    return result.data.model_dump_json() if result.action == "accept" else result.action


@server.tool()
async def wait(log: str) -> str:
    """Wait for ever, and note that it began and that it was cancelled."""
    note(log, "began")
    try:
        await anyio.sleep_forever()
    finally:
        note(log, "cancelled")
    return "never"


@server.tool()
async def burn() -> str:
    """Fail."""
    raise ValueError("the bread is black\x1b[2J")


@server.resource("menu://today")
def menu() -> str:
    """What there is."""
    return "rye, spelt"


@server.prompt()
def recipe(bread: str) -> str:
    """How it is made."""
    return f"How do I bake {bread}?"


def has_noted(path: Path, key: str) -> bool:
    return path.exists() and any(line.startswith(f"{key} ") for line in path.read_text().splitlines())
