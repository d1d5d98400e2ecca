"""What happens to a host's call, and how what was seen is named."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.real_hosts.model import WAIT
from tests.real_hosts.stage import Stage

#: Seconds that a call runs before something happens to it, so that the host has seen what it will see.
MIDST = 1.5
#: Seconds for which a killed server is away, and for which it is away long.
AWAY, LONG_AWAY = 2, 20
#: Seconds of a long call: many hosts give up after 60.
LONG = 70
#: Seconds after which a host that takes tasks has one (`task_after` is 10).
HANDED = 12
#: The time of the rule for early answers.
EARLY = "5s"


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


async def _kill_late(stage: Stage) -> None:
    await _held(stage)
    await _restart(stage)
    stage.open_gate()


async def _long_away(stage: Stage) -> None:
    await _midst(stage)
    await _restart(stage, LONG_AWAY)
    stage.open_gate()


async def _between(stage: Stage) -> None:
    stage.model.before_next = lambda: _restart(stage)
    stage.open_gate()


async def _early(stage: Stage) -> None:
    await stage.model.has_asked(2)
    await asyncio.sleep(MIDST)
    stage.open_gate()


async def _host_again(stage: Stage) -> None:
    await _held(stage)
    await stage.end_host()
    await stage.start_host_again()
    await asyncio.sleep(MIDST)
    stage.open_gate()


async def _host_again_early(stage: Stage) -> None:
    thought = asyncio.Event()

    async def think() -> None:
        await thought.wait()

    stage.model.before_next = think  # until its host has ended
    await stage.model.has_asked(2)
    await asyncio.sleep(MIDST)
    await stage.end_host()
    thought.set()
    stage.model.before_next = None
    stage.model.forget_last()
    await stage.start_host_again()
    await stage.model.has_asked(2)
    await asyncio.sleep(MIDST)
    stage.open_gate()


async def _ask(stage: Stage) -> None:
    await stage.began()


async def _midst(stage: Stage) -> None:
    await stage.began()
    await asyncio.sleep(MIDST)


async def _held(stage: Stage) -> None:
    """As long as a host with tasks needs to have one; others have waited as long."""
    await stage.began()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stage.model.holds(1), HANDED)
    await asyncio.sleep(MIDST)


async def _restart(stage: Stage, away: float = AWAY) -> None:
    await stage.kill()
    await asyncio.sleep(away)
    await stage.serve()


class Part(StrEnum):
    """A table of its own."""

    SERVER = "At the server's address"
    STDIO = "Through `perdure stdio`"
    CONVERSATION = "Early answers, hosts that are started again, and questions"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One story, which is a column of a table."""

    part: Part
    title: str
    tools: tuple[str, ...]
    """What the model asks for."""
    story: Callable[[Stage], Coroutine[None, None, None]]
    early: bool = False
    """Whether the server answers this host early."""

    @property
    def is_stdio(self) -> bool:
        return self.part is Part.STDIO


def _server(title: str, tool: str, story: Callable[[Stage], Coroutine[None, None, None]]) -> Scenario:
    return Scenario(part=Part.SERVER, title=title, tools=(tool,), story=story)


def _stdio(title: str, tool: str, story: Callable[[Stage], Coroutine[None, None, None]]) -> Scenario:
    return Scenario(part=Part.STDIO, title=title, tools=(tool,), story=story)


_TWICE, _WAITS = ("bake", "bake"), ("rest", WAIT)

SCENARIOS = {
    "plain": _server("plain", "bake", _plain),
    "long": _server("70 s, silent", "rest", _long),
    "cut": _server("cut", "bake", _cut),
    "cut_silent": _server("cut, silent", "sell", _cut),
    "kill": _server("kill", "bake", _kill),
    "kill_no_hint": _server("kill, no hint", "sell", _kill),
    "kill_late": _server("kill after 12 s", "bake", _kill_late),
    "kill_late_no_hint": _server("kill after 12 s, no hint", "sell", _kill_late),
    "away": _server("kill, 20 s", "bake", _long_away),
    "between": Scenario(part=Part.SERVER, title="kill between calls", tools=_TWICE, story=_between),
    "stdio": _stdio("plain", "bake", _plain),
    "stdio_long": _stdio("70 s, silent", "rest", _long),
    "stdio_cut": _stdio("cut, silent", "sell", _cut),
    "stdio_kill": _stdio("kill", "bake", _kill),
    "stdio_kill_no_hint": _stdio("kill, no hint", "sell", _kill),
    "stdio_away": _stdio("kill, 20 s", "bake", _long_away),
    "stdio_between": Scenario(part=Part.STDIO, title="kill between calls", tools=_TWICE, story=_between),
    "stdio_early": Scenario(part=Part.STDIO, title="early answer", tools=_WAITS, story=_early, early=True),
    "stdio_host_again_early": Scenario(
        part=Part.STDIO, title="started again after it", tools=_WAITS, story=_host_again_early, early=True
    ),
    "early": Scenario(part=Part.CONVERSATION, title="early answer", tools=_WAITS, story=_early, early=True),
    "host_again_early": Scenario(
        part=Part.CONVERSATION, title="started again after it", tools=_WAITS, story=_host_again_early, early=True
    ),
    "host_again": Scenario(
        part=Part.CONVERSATION, title="started again in the call", tools=("bake",), story=_host_again
    ),
    "question": Scenario(part=Part.CONVERSATION, title="question", tools=("mix",), story=_ask),
}

#: Characters of what has no name. Hosts put the reason at the end.
QUOTED = 80
#: What a model can go on from.
GOOD = ("result", "-31001")
#: The host says so in `initialize`.
NO_QUESTIONS = "declares no elicitation"
#: What the host that was started again showed of its call was not its result.
NOT_KEPT = "not kept"
#: What needs no limit in words.
PLAIN = (*GOOD, NO_QUESTIONS, NOT_KEPT)


def outcome(scenario: Scenario, shown: str | None, caller: Mapping[str, Any], *, has_ended: bool) -> str:
    """A name for what was seen of a scenario: what the host showed its model of the call, and what it said of itself
    when it called. What has no name is quoted."""
    name = named(scenario.tools[0], shown, has_ended=has_ended)
    if scenario.story is _ask and caller and not caller["elicitation"]:
        return NO_QUESTIONS
    if scenario.story is _host_again and name not in GOOD:
        return NOT_KEPT
    return name


def named(tool: str, shown: str | None, *, has_ended: bool) -> str:
    if shown is None:
        return "the host ended" if has_ended else "the host hangs"
    if f"{tool} is done" in shown:
        return "result"
    if "outcome unknown" in shown:
        return "-31001"
    if f"{tool} was told" in shown:
        return "declined"
    return f"“…{' '.join(shown.split())[-QUOTED:]}”"
