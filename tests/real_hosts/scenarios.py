"""What happens to a host's call, and how what was seen is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from tests.real_hosts.stage import Stage

#: Seconds that a call runs before something happens to it, so that the host has seen what it will see.
MIDST = 1.5
#: Seconds for which a killed server is away.
AWAY = 2
#: Seconds of a long call: many hosts give up after 60.
LONG = 70


async def _plain(stage: Stage) -> None:
    await _midst(stage)
    stage.open_gate()


async def _long(stage: Stage) -> None:
    await stage.began()
    await asyncio.sleep(LONG)
    stage.open_gate()


async def _cut(stage: Stage) -> None:
    await _midst(stage)
    stage.proxy.cut()
    await asyncio.sleep(1)
    stage.open_gate()


async def _kill(stage: Stage) -> None:
    await _midst(stage)
    await _restart(stage)
    stage.open_gate()


async def _between(stage: Stage) -> None:
    stage.model.before_next = lambda: _restart(stage)
    stage.open_gate()


async def _host_again(stage: Stage) -> None:
    await _midst(stage)
    await stage.end_host()
    await stage.start_host_again()
    await stage.began(2)
    stage.open_gate()


async def _ask(stage: Stage) -> None:
    await stage.began()


async def _midst(stage: Stage) -> None:
    await stage.began()
    await asyncio.sleep(MIDST)


async def _restart(stage: Stage) -> None:
    await stage.kill()
    await asyncio.sleep(AWAY)
    await stage.serve()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One story, which is a column of the table."""

    title: str
    tools: tuple[str, ...]
    """What the model asks for."""
    story: Callable[[Stage], Coroutine[None, None, None]]
    is_stdio: bool = False


SCENARIOS = {
    "plain": Scenario(title="plain", tools=("bake",), story=_plain),
    "long": Scenario(title="70 s, silent", tools=("rest",), story=_long),
    "cut": Scenario(title="cut", tools=("bake",), story=_cut),
    "cut_silent": Scenario(title="cut, silent", tools=("sell",), story=_cut),
    "kill": Scenario(title="kill", tools=("bake",), story=_kill),
    "kill_no_hint": Scenario(title="kill, no hint", tools=("sell",), story=_kill),
    "between": Scenario(title="kill between calls", tools=("bake", "bake"), story=_between),
    "host_again": Scenario(title="host started again", tools=("bake", "bake"), story=_host_again),
    "stdio": Scenario(title="plain", tools=("bake",), story=_plain, is_stdio=True),
    "stdio_cut": Scenario(title="cut, silent", tools=("sell",), story=_cut, is_stdio=True),
    "stdio_kill": Scenario(title="kill", tools=("bake",), story=_kill, is_stdio=True),
    "stdio_kill_no_hint": Scenario(title="kill, no hint", tools=("sell",), story=_kill, is_stdio=True),
    "question": Scenario(title="question", tools=("mix",), story=_ask),
}

#: Characters of what has no name. Hosts put the reason at the end.
QUOTED = 80
#: What a model can go on from.
GOOD = ("result", "-31001")


def outcome(tool: str, shown: str | None, *, has_ended: bool) -> str:
    """A name for what the host showed its model of a call; what has no name is quoted."""
    if shown is None:
        return "the host ended" if has_ended else "the host hangs"
    if f"{tool} is done" in shown:
        return "result"
    if "outcome unknown" in shown:
        return "-31001"
    return f"“…{' '.join(shown.split())[-QUOTED:]}”"
