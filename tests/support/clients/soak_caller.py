"""One client of 2026-07-28 in the soak of a gateway: it calls under keys, as tasks or not, and cuts connections."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

from perdure._core.envelope import CALLS
from tests.support.clients.soak_call import OUTCOME_UNKNOWN, Report
from tests.support.clients.soak_client import Manner, Ports
from tests.support.clients.task_client import TAKES_TASKS, Balancer, TaskClient, call_params

#: Takes no tasks: its call is answered on the response, or asked for again under its key.
WAITS: Mapping[str, Any] = {"extensions": {CALLS: {}}}
TOOLS = ("count", "put", "pay")


class Caller:
    """Calls one tool after the other, each until its answer has come. A balancer moves it with each request."""

    def __init__(self, number: int, seed: int, ports: Ports, diary: str, report: Report, manner: Manner) -> None:
        self._name = f"{number}"
        self._choice = random.Random(f"{seed}/{number}")
        self._balancer = Balancer(ports=ports.all, path=manner.path)
        self._diary = diary
        self._report = report
        self._manner = manner
        self._keys = itertools.count(1)
        self.open: set[str] = set()

    async def live(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            await self._one_call()

    async def _one_call(self) -> None:
        choice, tool = self._choice, self._choice.choice(TOOLS)
        key = f"{tool}-{self._name}-{next(self._keys)}"
        given = {"n": choice.randint(0, 30), "interval": choice.choice([0, 0.001, 0.02, 0.1])}
        name, arguments = self._manner.spell(tool, {**given, "log": self._diary, "key": key}, choice)
        params = call_params(name, key, **arguments)
        client = TaskClient(balancer=self._balancer, capabilities=choice.choice([TAKES_TASKS, WAITS]))
        self.open.add(key)
        self._report.counts["calls made"] += 1
        if choice.random() < 0.3:
            async with await client.begin("tools/call", params) as exchange:
                await asyncio.sleep(choice.uniform(0, 0.5))
                exchange.cut()
            self._report.counts["cuts"] += 1
        self._judge(key, await client.resolved(await client.insist("tools/call", params)))
        self.open.discard(key)

    def _judge(self, key: str, outcome: dict[str, Any]) -> None:
        self._report.counts["answers"] += 1
        if outcome.get("error", {}).get("code") == OUTCOME_UNKNOWN:
            self._report.counts["unknown outcomes told"] += 1
        elif "result" not in outcome:
            self._report.fault("refused", f"{key}: {outcome}")
