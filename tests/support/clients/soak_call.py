"""One call of the soak, from its POST to its answer, and the judgement on what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.clients.raw_http import message
from tests.support.clients.recording_client import Told

if TYPE_CHECKING:
    from tests.support.clients.soak_client import Visit

OUTCOME_UNKNOWN = -31001
CANCELLED = -32800
ASK = "elicitation/create"
#: The tools that ask. Each is answered with its own question, which is the key of its call.
ASKING = ("ask", "inquire")

#: Seconds before another attempt where no server answered: a server that was killed is back in one or two.
PAUSE = 0.05
#: Attempts before a request counts as hung: a minute.
ATTEMPTS = 1200

#: Statuses of a server that is about to stop, or has too much to do: come back elsewhere.
BUSY = (429, 503)


@dataclass
class Report:
    """What all clients together have seen."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, kind: str, what: object) -> None:
        self.counts[kind] += 1
        self.faults.append(f"{kind}: {what}")


class Call:
    """One call, from its POST to its answer."""

    def __init__(self, visit: Visit, tool: str, request_id: int) -> None:
        visitor = visit.visitor
        self.visit = visit
        self.tool = tool
        self.id = request_id
        self.key = f"{tool}-{visitor.name}-{next(visitor.keys)}"
        self.told = Told(name=self.key)
        self.report = visit.report
        self.counts = visit.counts
        self.choice = visit.choice
        self.notices: range = range(0)
        self.last = 0
        self.cancel_after = self.choice.randint(1, 20) if self.choice.random() < 0.15 else 0
        self.cancelled = False
        self.sending: list[asyncio.Task[None]] = []

    def noting(self) -> dict[str, str]:
        return {"log": self.visit.visitor.diary, "key": self.key}

    def counting(self) -> dict[str, Any]:
        self.last = self.choice.randint(0, 30)
        return {"n": self.last, "interval": self.choice.choice([0, 0.001, 0.02, 0.1])}

    def announcing(self) -> dict[str, Any]:
        count = self.choice.randint(1, 5)
        first = next(self.visit.notices)
        for _ in range(count - 1):
            next(self.visit.notices)
        self.notices = range(first, first + count)
        self.visit.announced |= set(self.notices)
        return {"n": count, "start": first}

    async def run(self, body: bytes) -> None:
        self.counts["calls made"] += 1
        if not await self.post(body):
            return
        self.counts["calls accepted"] += 1
        self.visit.visitor.open[self.key] = self.told
        await self.read_to_the_answer()
        await asyncio.gather(*self.sending)
        self.judge()
        del self.visit.visitor.open[self.key]

    async def post(self, body: bytes) -> bool:
        """Send the request. One without an answer is not sent again, because it may have been accepted."""
        for _ in range(ATTEMPTS):
            try:
                exchange = await self.visit.elsewhere().begin("POST", body)
            except OSError:
                await asyncio.sleep(PAUSE)
                continue  # no connection, so nothing was sent
            status = 0
            with contextlib.suppress(OSError, TimeoutError):
                status = await self.visit.read_some(self.told, exchange, self.heard)
            if status in BUSY:
                self.counts["turned away"] += 1
                await asyncio.sleep(PAUSE)
                continue
            if status not in (0, 200):
                self.report.fault("refused", f"POST {self.key}: {status}")
                return False
            if not self.told.position:
                self.counts["unheard of"] += 1
                return False
            return True
        self.report.fault("without answer", f"{self.key}: nobody took it")
        return False

    async def read_to_the_answer(self) -> None:
        for _ in range(ATTEMPTS):
            if self.told.answers:
                return
            with contextlib.suppress(OSError, TimeoutError):
                exchange = await self.visit.elsewhere().resume(self.told.position)
                self.counts["resumes"] += 1
                status = await self.visit.read_some(self.told, exchange, self.heard)
                if status not in (0, 200, *BUSY):
                    self.report.fault("refused", f"GET of {self.key} behind {self.told.position}: {status}")
                    return
            await asyncio.sleep(PAUSE)

    def heard(self, said: dict[str, Any]) -> None:
        self.counts["events"] += 1
        if (answering := self.visit.answering(said)) is not None:
            self.later(answering)
        if self.cancel_after and not self.cancelled and len(self.told.events) >= self.cancel_after:
            self.cancelled = True
            params = {"requestId": self.id, "reason": "soak"}
            self.later(self.visit.send(message("notifications/cancelled", params)))

    def later(self, sending: Any) -> None:
        self.sending.append(asyncio.create_task(sending))

    def judge(self) -> None:
        told = self.told
        asked = sum(m.get("method") == ASK for m in told.messages)
        most_asks = self.visit.visitor.manner.most_asks if self.tool in ASKING else 0
        judge_order(told, self.report, skipped=max(0, most_asks - asked))
        if len(told.answers) != 1:
            kind = "without answer" if not told.answers else "twice"
            self.report.fault(kind, f"{self.key} has {len(told.answers)} answers")
            return
        (answer,) = told.answers
        if answer["id"] != self.id:
            self.report.fault("out of order", f"{self.key} got the answer of {answer['id']}")
        self.counts["answers"] += 1
        if told.progress != sorted(set(told.progress)):
            self.report.fault("out of order", f"progress of {self.key}: {told.progress}")
        code = answer.get("error", {}).get("code")
        if code == OUTCOME_UNKNOWN:
            self.counts["unknown outcomes told"] += 1
        elif code == CANCELLED and self.cancelled:
            self.counts["cancelled"] += 1
        elif code is not None or answer["result"].get("isError"):
            self.report.fault("refused", f"{self.key}: {answer}")
        else:
            self.judge_result(answer["result"])

    def judge_result(self, result: dict[str, Any]) -> None:
        if self.tool == "announce":
            self.visit.certain |= set(self.notices)
        elif self.tool in ASKING:
            if not re.search(rf"\b{self.key}\b", json.dumps(result)):
                self.report.fault("out of order", f"{self.key} was answered {result}")
        else:
            missing = set(range(1, self.last + 1)) - set(self.told.progress)
            self.visit.elsewhere_told |= {(self.id, number) for number in missing}


def judge_order(told: Told, report: Report, *, skipped: int = 0) -> None:
    """Numbers of a stream rise by one; so many in all may be left out, for asks that were closed before they were
    read."""
    seen: set[int] = set()
    last = 0
    for position in told.positions:
        if position.seq in seen:
            report.fault("twice", f"event {position.seq} of {told.name}")
        elif position.seq < last:
            report.fault("out of order", f"event {position.seq} after {last} of {told.name}")
        elif (missing := position.seq - last - 1) <= skipped:
            skipped -= missing
        else:
            report.fault("lost", f"events {last + 1} to {position.seq - 1} of {told.name}")
        seen.add(position.seq)
        last = max(last, position.seq)
    if told.gaps:
        report.fault("lost", f"a gap was told in {told.name}: {told.gaps}")
