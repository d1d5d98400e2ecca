"""Tools of steps that play a script: `perdure serve tests.support.servers.step_tools:server`.

A script is a list of acts: `{"step": name}` with `again` or `check`, `{"sleep": seconds}`, `{"ask": question}`,
`{"each": [script, …]}` for tasks that run at once, `{"gate": path}`, and `{"exit": name}` for a step that ends the
process in good order. Each effect adds a line to a diary, `<name>
<key> <pid>`. A process kills itself at the points that are named in `die`, once at each: `before charge` its step
begins, `in charge` before the effect, `behind charge` after the effect, `after charge`, when the tool has its value.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.from_thread
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

import perdure
from tests.support.servers.gate_file_tools import IDEMPOTENT, pass_gate

server = MCPServer("step_tools", version="1", log_level="WARNING")

Script = list[dict[str, Any]]


class Answer(BaseModel):
    answer: str


def effects(folder: Path | str) -> list[tuple[str, str, int]]:
    """Name, key and process of each effect, in their order."""
    path = Path(folder) / "effects"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(name, key, int(pid)) for name, key, pid in (line.split() for line in lines)]


def die_at(folder: str, point: str, die: Sequence[str]) -> None:
    """Kill this process at a point, the first time. What is written `before charge *3` dies three times."""
    for wanted in die:
        name, _, times = wanted.partition(" *")
        for number in range(int(times or 1)) if name == point else ():
            try:
                os.close(os.open(f"{folder}/died {point} {number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


class Player:
    """Plays a script in one folder."""

    def __init__(self, folder: str, die: Sequence[str], ctx: Context | None) -> None:
        self.folder = folder
        self.die = die
        self.ctx = ctx

    def effect(self, name: str) -> str:
        die_at(self.folder, f"in {name}", self.die)
        file = os.open(f"{self.folder}/effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, f"{name} {perdure.step_key()} {os.getpid()}\n".encode())
        os.close(file)
        die_at(self.folder, f"behind {name}", self.die)
        return f"{name} {os.getpid()}"

    def exit(self, name: str) -> None:
        self.effect(name)
        sys.exit(3)

    def check(self, name: str) -> str | Any:
        """Whether the effect is in the diary, as an API would know it by its key."""
        done = [key for _, key, _ in effects(self.folder)]
        return f"{name} was done" if str(perdure.step_key()) in done else perdure.NOT_DONE

    async def slow_effect(self, name: str, gate: str) -> str:
        """An effect that waits at a gate before its end."""
        done = self.effect(name)
        await pass_gate(gate)
        return done

    async def whole(self, script: Script) -> str:
        """Play a script once its caller has the task."""
        await pass_gate(f"{self.folder}/begin")
        return " ".join(await self.play(script))

    async def play(self, script: Script) -> list[str]:
        values: list[str] = []
        for act in script:
            match act:
                case {"step": name}:
                    die_at(self.folder, f"before {name}", self.die)
                    how: dict[str, Any] = {"again": act.get("again", False)}
                    if act.get("check"):
                        how["check"] = lambda name=name: self.check(name)
                    if "at" in act:
                        values.append(await perdure.step(name, self.slow_effect, name, act["at"], **how))
                    else:
                        values.append(await perdure.step(name, self.effect, name, **how))
                    die_at(self.folder, f"after {name}", self.die)
                case {"sleep": seconds}:
                    await perdure.sleep(seconds, name=act.get("name", "sleep"))
                case {"ask": question}:
                    assert self.ctx is not None
                    told = await self.ctx.elicit(question, Answer)
                    values.append(told.data.answer if told.action == "accept" else told.action)
                    die_at(self.folder, f"after {question}", self.die)
                case {"each": scripts}:
                    for part in await asyncio.gather(*(self.play(each) for each in scripts)):
                        values += part
                case {"exit": name}:
                    await perdure.step(name, self.exit, name, again=True)
                case {"gate": gate}:
                    await pass_gate(gate)
                case {"point": point}:
                    die_at(self.folder, point, self.die)
                case {"first": one, "then": other}:  # code that has changed
                    fresh = not os.path.exists(f"{self.folder}/changed")  # noqa: ASYNC240
                    os.close(os.open(f"{self.folder}/changed", os.O_CREAT))
                    values += await self.play(one if fresh else other)
                case _:
                    raise ValueError(act)
        return values


@server.tool(meta=perdure.RESUMABLE)
async def play(script: Script, folder: str, ctx: Context, die: list[str] = []) -> str:  # noqa: B006
    return await Player(folder, die, ctx).whole(script)


@server.tool(annotations=IDEMPOTENT)
async def play_again(script: Script, folder: str, ctx: Context, die: list[str] = []) -> str:  # noqa: B006
    return await Player(folder, die, ctx).whole(script)


@server.tool()
async def play_once(script: Script, folder: str, ctx: Context, die: list[str] = []) -> str:  # noqa: B006
    return await Player(folder, die, ctx).whole(script)


@server.tool(meta=perdure.RESUMABLE)
async def play_catching(script: Script, folder: str, ctx: Context, die: list[str] = []) -> str:  # noqa: B006
    try:
        return await Player(folder, die, ctx).whole(script)
    except Exception as failure:
        return f"caught {type(failure).__name__}"


@server.tool(meta=perdure.RESUMABLE)
def play_sync(names: list[str], folder: str, die: list[str] = []) -> str:  # noqa: B006
    player = Player(folder, die, None)
    anyio.from_thread.run(pass_gate, f"{folder}/begin")
    values = []
    for name in names:
        values.append(perdure.step_sync(name, player.effect, name))
        die_at(folder, f"after {name}", die)
    return " ".join(values)
