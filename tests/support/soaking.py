"""One client of the soak: it opens sessions, calls, loses connections, moves between servers and counts what it got.

It keeps positions and nothing else. Whatever it meets that no promise allows goes into the report as a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.raw import Exchange, Peer, SessionPeer, message
from tests.support.site import until
from tests.support.witness import Told

OUTCOME_UNKNOWN = -31001
CANCELLED = -32800

#: Seconds before another attempt where nobody answered: a server that was killed is back in one or two.
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


@dataclass
class Ports:
    """Where servers answer at the moment; an entry stays while its server is down."""

    all: list[int]

    def any(self, choice: random.Random) -> int:
        return choice.choice(self.all)


class Gone(Exception):
    """The session is not there any more."""


class Visitor:
    """A client with one session at a time."""

    def __init__(self, number: int, seed: int, ports: Ports, diary: str, report: Report) -> None:
        self.name = f"{number}"
        self.choice = random.Random(f"{seed}/{number}")
        self.ports = ports
        self.diary = diary
        self.report = report
        self.counts = report.counts
        self.keys = itertools.count(1)
        self.open: dict[str, Told] = {}

    async def live(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            await self.one_session(is_over)

    async def one_session(self, is_over: Callable[[], bool]) -> None:
        session = await self.insist(self.initialize)
        self.counts["sessions"] += 1
        visit = Visit(self, session)
        listening = asyncio.create_task(visit.listen())
        try:
            # A reader that comes without a position later would be sent what belongs to calls without a reader (R5).
            await until(lambda: visit.standalone.position or listening.done())
            for _ in range(self.choice.randint(2, 8)):
                if is_over():
                    break
                await asyncio.gather(*(visit.one_call() for _ in range(self.choice.randint(1, 3))))
            await visit.hear_the_rest()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        visit.judge_the_standalone_stream()
        if self.choice.random() < 0.5:
            answer = await self.insist(lambda port: SessionPeer(port=port, headers=session.headers, id="").delete())
            if answer.status not in (200, 404):  # 404: the answer to an earlier attempt was lost
                self.report.fault("refused", f"DELETE {answer.status}")

    async def initialize(self, port: int) -> SessionPeer:
        try:
            return await Peer(port=port).session()
        except AssertionError as refused:  # a server that stops, or that died between the two messages
            raise ConnectionError from refused

    async def insist(self, request: Callable[[int], Awaitable[Any]]) -> Any:
        """Ask one server or the other until one answers."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(OSError, TimeoutError):
                answer = await request(self.ports.any(self.choice))
                if getattr(answer, "status", 200) not in (0, *BUSY):
                    return answer
            await asyncio.sleep(PAUSE)
        raise TimeoutError("nobody answered")


class Visit:
    """A session's calls and its standalone stream."""

    def __init__(self, visitor: Visitor, session: SessionPeer) -> None:
        self.visitor = visitor
        self.session = session
        self.choice = visitor.choice
        self.report = visitor.report
        self.counts = visitor.report.counts
        self.ids = itertools.count(1)
        self.standalone = Told(name=f"{visitor.name} standalone")
        self.notices = itertools.count(1)
        self.announced: set[int] = set()
        self.certain: set[int] = set()
        """Notices of calls that said they sent them."""
        self.elsewhere_told: set[tuple[int, int]] = set()
        """Progress, by token and number, that did not come on its call's stream: it is on this one then (R5)."""

    def peer(self, port: int) -> SessionPeer:
        return SessionPeer(port=port, headers=self.session.headers, id=self.session.id)

    def elsewhere(self) -> SessionPeer:
        return self.peer(self.visitor.ports.any(self.choice))

    async def send(self, body: bytes) -> None:
        """Something that is not a request: accepted with 202 in whatever process it arrives."""
        answer = await self.visitor.insist(lambda port: self.peer(port).ask("POST", body))
        if answer.status != 202:
            self.report.fault("refused", f"{body!r}: {answer.status} {answer.body!r}")

    # Calls

    async def one_call(self) -> None:
        kinds: dict[str, Callable[[Call], dict[str, Any]]] = {
            "count": lambda call: call.counting(),
            "put": lambda call: call.counting(),
            "pay": lambda call: call.counting(),
            "ask": lambda call: {"question": call.key},
            "announce": lambda call: call.announcing(),
        }
        tool = self.choice.choice(list(kinds))
        call = Call(self, tool, next(self.ids))
        arguments = kinds[tool](call)
        body = self.session.call_body(tool, id=call.id, **arguments, **call.noting())
        await call.run(body)

    # The standalone stream

    async def listen(self) -> None:
        """Keep a reader there, through one server or the other."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                await self.read_some(self.standalone, await self.elsewhere().resume(self.standalone.position))
            await asyncio.sleep(PAUSE)

    async def read_some(self, told: Told, exchange: Exchange, on_message: Callable[[Any], None] | None = None) -> int:
        """Read until the connection ends, is lost, or is cut by us; gives the status."""
        patience = self.choice.choice([1, 2, 3, 5, 8, 1000, 1000])
        begun = len(told.events)
        async with exchange:
            more = True
            while more and len(told.events) - begun < patience:
                known = len(told.events)
                more = await told.read(exchange)
                for event in told.events[known:]:
                    if on_message is not None:
                        on_message(json.loads(event.data))
            if more:
                self.counts["cuts"] += 1
                exchange.cut()
            return exchange.parser.status

    async def hear_the_rest(self) -> None:
        """Wait for the notices that were announced for certain."""
        for _ in range(ATTEMPTS):
            if self.certain <= set(self.standalone.notices) and self.elsewhere_told <= self.orphans():
                return
            await asyncio.sleep(PAUSE)

    def orphans(self) -> set[tuple[int, int]]:
        told = [m["params"] for m in self.standalone.messages if m.get("method") == "notifications/progress"]
        return {(int(params["progressToken"]), int(params["progress"])) for params in told}

    def judge_the_standalone_stream(self) -> None:
        heard = self.standalone.notices
        for token, number in self.elsewhere_told - self.orphans():
            self.report.fault("lost", f"progress {number} of request {token}, {self.standalone.name}")
        self.counts["orphans"] += len(self.elsewhere_told)
        for number, times in Counter(heard).items():
            if times > 1 or number not in self.announced:
                self.report.fault("twice", f"notice {number} of {self.standalone.name}, {times} times")
        for number in self.certain - set(heard):
            self.report.fault("lost", f"notice {number} of {self.standalone.name}")
        judge_order(self.standalone, self.report)


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
        """Send it. A request that nobody answered is not sent again: it may have been accepted."""
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
        if said.get("method") == "elicitation/create":
            answer = {
                "jsonrpc": "2.0",
                "id": said["id"],
                "result": {"action": "accept", "content": {"answer": self.key}},
            }
            self.later(self.visit.send(json.dumps(answer).encode()))
            self.counts["asks answered"] += 1
        if self.cancel_after and not self.cancelled and len(self.told.events) >= self.cancel_after:
            self.cancelled = True
            params = {"requestId": self.id, "reason": "soak"}
            self.later(self.visit.send(message("notifications/cancelled", params)))

    def later(self, sending: Any) -> None:
        self.sending.append(asyncio.create_task(sending))

    def judge(self) -> None:
        told = self.told
        unread = self.tool == "ask" and not any(m.get("method") == "elicitation/create" for m in told.messages)
        judge_order(told, self.report, skipped=int(unread))
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
            self.judge_result(answer["result"]["content"][0]["text"])

    def judge_result(self, text: str) -> None:
        if self.tool == "announce":
            self.visit.certain |= set(self.notices)
        elif self.tool == "ask":
            if text != self.key:
                self.report.fault("out of order", f"{self.key} was answered {text}")
        else:
            missing = set(range(1, self.last + 1)) - set(self.told.progress)
            self.visit.elsewhere_told |= {(self.id, number) for number in missing}


def judge_order(told: Told, report: Report, *, skipped: int = 0) -> None:
    """Numbers of a stream rise by one; so many may be left out, for asks that were closed before they were read."""
    seen: set[int] = set()
    last = 0
    for position in told.positions:
        if position.seq in seen:
            report.fault("twice", f"event {position.seq} of {told.name}")
        elif position.seq < last:
            report.fault("out of order", f"event {position.seq} after {last} of {told.name}")
        elif position.seq == last + 1 + skipped:
            skipped = 0
        elif position.seq > last + 1:
            report.fault("lost", f"events {last + 1} to {position.seq - 1} of {told.name}")
        seen.add(position.seq)
        last = max(last, position.seq)
    if told.gaps:
        report.fault("lost", f"a gap was told in {told.name}: {told.gaps}")
