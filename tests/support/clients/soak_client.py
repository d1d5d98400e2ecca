"""One client of the soak: it opens sessions, calls, loses connections, moves between servers and counts what it got.

It keeps positions and nothing else. Everything that it meets and no promise allows is a fault of the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.support.clients.raw_http import Exchange, Peer, SessionPeer
from tests.support.clients.recording_client import Told
from tests.support.clients.soak_call import ASK, ASKING, ATTEMPTS, BUSY, PAUSE, Call, Report, judge_order
from tests.support.servers.in_process import until


@dataclass
class Ports:
    """Where servers answer at the moment; an entry stays while its server is down."""

    all: list[int]

    def any(self, choice: random.Random) -> int:
        return choice.choice(self.all)


Spelling = Callable[[str, dict[str, Any], random.Random], tuple[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How the tools of the soak are called at one server."""

    path: str = "/mcp"
    tools: tuple[str, ...] = ("count", "put", "pay", "ask", "announce")
    spell: Spelling = lambda tool, arguments, _: (tool, arguments)
    """The server's own name of a tool, and its arguments."""
    most_asks: int = 1
    """How often one call may ask."""
    asks_anywhere: bool = False
    """Asks may come on the standalone stream: where several calls run, a pipe does not say which one asks."""


class Visitor:
    """A client with one session at a time."""

    def __init__(
        self, number: int, seed: int, ports: Ports, diary: str, report: Report, manner: Manner | None = None
    ) -> None:
        self.name = f"{number}"
        self.manner = manner or Manner()
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
            await asyncio.gather(*visit.sending)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        visit.judge_the_standalone_stream()
        if self.choice.random() < 0.5:
            answer = await self.insist(lambda port: visit.peer(port).delete())
            if answer.status not in (200, 404):  # 404: the answer to an earlier attempt was lost
                self.report.fault("refused", f"DELETE {answer.status}")

    async def initialize(self, port: int) -> SessionPeer:
        try:
            return await Peer(port=port, path=self.manner.path).session()
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
        self.asking = 0
        """Calls of tools that ask."""
        self.sending: list[asyncio.Task[None]] = []
        self.notices = itertools.count(1)
        self.announced: set[int] = set()
        self.certain: set[int] = set()
        """Notices of the calls that have reported sending them."""
        self.elsewhere_told: set[tuple[int, int]] = set()
        """Progress, by token and number, that did not come on its call's stream: it is on this one then (R5)."""

    def peer(self, port: int) -> SessionPeer:
        return SessionPeer(port=port, headers=self.session.headers, path=self.session.path, id=self.session.id)

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
            "inquire": lambda call: {"question": call.key},
            "announce": lambda call: call.announcing(),
        }
        manner = self.visitor.manner
        tool = self.choice.choice(manner.tools)
        call = Call(self, tool, next(self.ids))
        self.asking += tool in ASKING
        name, arguments = manner.spell(tool, kinds[tool](call) | call.noting(), self.choice)
        body = self.session.call_body(name, id=call.id, **arguments)
        await call.run(body)

    # The standalone stream

    async def listen(self) -> None:
        """Keep a reader there, through one server or the other."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                exchange = await self.elsewhere().resume(self.standalone.position)
                await self.read_some(self.standalone, exchange, self.overheard)
            await asyncio.sleep(PAUSE)

    def overheard(self, said: dict[str, Any]) -> None:
        if (answering := self.answering(said)) is not None:
            self.sending.append(asyncio.create_task(answering))

    def answering(self, said: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        """The answer to an ask, which is its question; `None` for any other message."""
        if said.get("method") != ASK:
            return None
        self.counts["asks answered"] += 1
        result = {"action": "accept", "content": {"answer": said["params"]["message"]}}
        return self.send(json.dumps({"jsonrpc": "2.0", "id": said["id"], "result": result}).encode())

    async def read_some(self, told: Told, exchange: Exchange, on_message: Callable[[Any], None] | None = None) -> int:
        """Read until the connection ends, is lost, or is cut by this client; returns the status."""
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
        manner = self.visitor.manner
        judge_order(self.standalone, self.report, skipped=manner.asks_anywhere * manner.most_asks * self.asking)
