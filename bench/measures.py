"""What is measured. A figure counts only after what arrived was checked: all events, in order, the result last."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns, process_time

from bench.launch import Target
from bench.received import BrokenAnswerError, Event, Response
from bench.wire import Client, Wire

Figures = dict[str, float]
MS = 1e6  # nanoseconds
SECOND = 1e9
WARM_UP_EVENTS = 2_000
CONNECTIONS = 8  # callers at once: enough to keep the server's core busy
# The SDK answers a resume with nothing while it has not yet seen that the last reader left; Perdure may not.
PATIENCE = 40

# Request ids never repeat, also across sessions: the SDK's stores name a stream by its bare request id.
numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One finished `progress` call."""

    number: int
    n: int
    answer: Response

    def events(self) -> list[Event]:
        """Its events, or `BrokenAnswerError` unless they are n progress events in order and then the result."""
        if self.answer.status != 200:
            raise BrokenAnswerError(f"a call was answered {self.answer.status}: {self.answer.body()[:200]!r}")
        events = self.answer.events()
        verify(events, self.n, self.number)
        return events


def verify(events: list[Event], n: int, number: int) -> None:
    """Events 1 to n without gap or double, ids that differ, and the result of this call last."""
    ids = [event.id for event in events if event.id]
    if len(set(ids)) != len(ids):
        raise BrokenAnswerError("an event id came twice")
    messages = [event.message() for event in events if event.data]
    last = messages[-1] if messages else {}
    if last.get("id") != number or "result" not in last or last["result"].get("isError"):
        raise BrokenAnswerError(f"the last of {len(messages)} messages is not the result: {last!r}")
    if [message["params"]["progress"] for message in messages[:-1]] != list(range(1, n + 1)):
        raise BrokenAnswerError(f"expected the progress events 1 to {n} in order, got {len(messages) - 1} events")


async def progress_call(client: Client, session: str, n: int, *, rate: float = 0.0) -> Call:
    number = next(numbers)
    answer = await client.once(client.call(number, "progress", {"n": n, "rate": rate}, session))
    return Call(number=number, n=n, answer=answer)


async def events_per_second(target: Target, *, calls: int, seconds: float) -> Figures:
    """Progress events over POST SSE, from just before the first request to the last byte of the last answer.

    Each call has a session and a connection of its own, and its tool sends in a tight loop.
    """
    client = Client(port=target.port, path=target.path)
    sessions = [await client.open_session() for _ in range(calls)]
    warm = await progress_call(client, sessions[0], WARM_UP_EVENTS)
    warm.events()
    n = int(WARM_UP_EVENTS / (warm.answer.ended - warm.answer.asked) * SECOND * seconds / calls) + 1
    used = Used.by(target)
    done = await asyncio.gather(*(progress_call(client, session, n) for session in sessions))
    took = (max(call.answer.ended for call in done) - min(call.answer.asked for call in done)) / SECOND
    figures = rate(calls * n, took, Used.by(target).since(used))
    for call in done:
        call.events()
    return figures


async def calls_per_second(target: Target, *, connections: int, seconds: float, keep_alive: bool) -> Figures:
    """`echo` calls answered per second, by so many callers at once, each with a session of its own."""
    client = Client(port=target.port, path=target.path)
    sessions = [await client.open_session() for _ in range(connections)]
    began = perf_counter_ns()
    end = began + int(seconds * SECOND)
    used = Used.by(target)
    counts = await asyncio.gather(*(_caller(client, session, end, keep_alive) for session in sessions))
    took = (perf_counter_ns() - began) / SECOND
    return rate(sum(counts), took, Used.by(target).since(used))


@dataclass(frozen=True, kw_only=True)
class Used:
    """CPU seconds of the client, of the candidate's process and of its database server, which may be none."""

    here: float
    there: float
    database: float

    @classmethod
    def by(cls, target: Target) -> Used:
        return cls(here=process_time(), there=target.cpu_seconds(), database=target.log.cpu_seconds())

    def since(self, before: Used) -> Used:
        return Used(
            here=self.here - before.here, there=self.there - before.there, database=self.database - before.database
        )


def rate(count: int, took: float, used: Used) -> Figures:
    return {
        "per_second": count / took,
        "per_cpu_second": count / used.there,  # hardly moves when others want the server's core
        "cpu_us": used.there / count * 1e6,
        "client_core": used.here / took,
        "server_cores": used.there / took,
        "database_us": used.database / count * 1e6,
    }


async def _caller(client: Client, session: str, end: int, keep_alive: bool) -> int:
    count = 0
    wire = await client.connect()
    while perf_counter_ns() < end:
        number = next(numbers)
        answer = await wire.ask(client.call(number, "echo", {"text": f"echo {number}"}, session))
        if answer.status != 200 or f'"echo {number}"'.encode() not in answer.body():
            raise BrokenAnswerError(f"echo was answered {answer.status}: {answer.body()[:200]!r}")
        count += 1
        if not keep_alive:
            wire.close()
            wire = await client.connect()
    wire.close()
    return count


async def latency(target: Target, *, seconds: float, rate: float = 0.0, events_per_second: float) -> Figures:
    """Milliseconds from just before the tool's send to the read that held the event's last byte.

    An event leaves only once the store has it, so for a durable candidate this is the time of an append, plus
    encoding, HTTP, the socket and the client. `rate` 0 is a tight loop (full load).
    """
    client = Client(port=target.port, path=target.path)
    session = await client.open_session()
    n = max(100, int((rate or events_per_second) * seconds))
    call = await progress_call(client, session, n, rate=rate)
    progress = [event for event in call.events() if event.data][:-1]
    late = sorted((event.arrived - int(event.message()["params"]["message"])) / MS for event in progress)
    return {"p50": late[len(late) // 2], "p99": late[int(len(late) * 0.99)], "max": late[-1], "events": len(late)}


@dataclass(frozen=True, kw_only=True)
class Missed:
    """A finished call whose events a client asks for again."""

    session: str
    position: str
    number: int
    n: int

    async def resume(self, client: Client, *, tries: int) -> float:
        """Seconds from the GET (its connection stands already) to the last missed event, checked."""
        for _ in range(tries):
            wire = await client.connect()
            try:
                answer = await wire.ask(client.get(self.session, self.position), until_result=True)
            finally:
                wire.close()
            if answer.status != 200:
                raise BrokenAnswerError(f"a resume was answered {answer.status}: {answer.body()[:200]!r}")
            events = [event for event in answer.events() if event.data]
            if events:
                verify(events, self.n, self.number)
                return (events[-1].arrived - answer.asked) / SECOND
            await asyncio.sleep(0.005)
        raise BrokenAnswerError("a resume brought no events")


async def make_missed(client: Client, session: str, count: int) -> Missed:
    """A call of `count` events, the result among them, and the position before the first."""
    call = await progress_call(client, session, count - 1)
    first = call.events()[0]
    if first.data or not first.id:
        raise BrokenAnswerError("the stream did not begin with a position")
    return Missed(session=session, position=first.id, number=call.number, n=count - 1)


async def replay(target: Target, *, missed: int, times: int) -> Figures:
    """A client that missed so many events asks for them, again and again."""
    client = Client(port=target.port, path=target.path)
    what = await make_missed(client, await client.open_session(), missed)
    tries = 1 if target.kind.startswith(("perdure", "gateway")) else PATIENCE
    await what.resume(client, tries=tries)
    took = [await what.resume(client, tries=tries) for _ in range(times)]
    return {
        "ms": statistics.median(took) * 1e3,
        "worst_ms": max(took) * 1e3,
        "per_second": missed / statistics.median(took),
    }


async def memory_per_session(target: Target, *, sessions: int, settle: float) -> Figures:
    """KiB of the server's private memory (USS) and RSS for each idle session with an open GET stream."""
    client = Client(port=target.port, path=target.path)
    wires = await _open_streams(client, max(50, sessions // 10))  # pays for what is allocated once
    await asyncio.sleep(settle)
    private, resident = target.private_bytes(), target.resident_bytes()
    wires += await _open_streams(client, sessions)
    await asyncio.sleep(settle)
    figures = {
        "kib": (target.private_bytes() - private) / sessions / 1024,
        "rss_kib": (target.resident_bytes() - resident) / sessions / 1024,
    }
    for wire in wires:
        wire.close()
    return figures


async def _open_streams(client: Client, count: int) -> list[Wire]:
    left = iter(range(count))
    opened = await asyncio.gather(*(_opener(client, left) for _ in range(CONNECTIONS)))
    return [wire for wires in opened for wire in wires]


async def _opener(client: Client, left: Iterator[int]) -> list[Wire]:
    return [await _open_stream(client) for _ in left]


async def _open_stream(client: Client) -> Wire:
    """Open a session and its GET stream."""
    session = await client.open_session()
    wire = await client.connect()
    answer = await wire.open(client.get(session))
    if answer.status != 200:
        raise BrokenAnswerError(f"the GET stream was answered {answer.status}")
    return wire


async def resume_while_growing(target: Target, *, sizes: list[int], missed: int, times: int) -> dict[int, Figures]:
    """The time of a resume of `missed` events while the log holds more and more of others.

    The oldest stream and a fresh one take turns.
    """
    client = Client(port=target.port, path=target.path)
    oldest = await make_missed(client, await client.open_session(), missed)
    stored, found = missed, {}
    for size in sizes:
        while stored < size:
            stored += await _fill(client, size - stored)
        newest = await make_missed(client, await client.open_session(), missed)
        stored += missed
        if (counted := target.log.rows()) < size:
            raise BrokenAnswerError(f"the log holds {counted} events, not {size}")
        took = [(await oldest.resume(client, tries=1), await newest.resume(client, tries=1)) for _ in range(times)]
        found[size] = {
            "old_ms": statistics.median(old for old, _ in took) * 1e3,
            "new_ms": statistics.median(new for _, new in took) * 1e3,
            "counted": float(counted),
            "file_mib": target.log.size() / 2**20,
        }
    return found


async def _fill(client: Client, count: int) -> int:
    """Store up to 40,000 events through four sessions at once."""
    each = max(1, min(count, 40_000) // 4)
    done = await asyncio.gather(*(_fill_one(client, each) for _ in range(4)))
    return sum(call.n + 1 for call in done)


async def _fill_one(client: Client, n: int) -> Call:
    call = await progress_call(client, await client.open_session(), n)
    call.events()
    return call


# --- Several nodes on one log ---------------------------------------------------------------------------------------

PACE = 50.0  # events a second: slow enough that each event is on its own
SETTLE = 15.0  # seconds in which a session comes to rest: its last chore, a look for orphans, is due after 13


async def event_at_other_node(nodes: Sequence[Target], *, events: int) -> Figures:
    """Milliseconds from just before the tool's send at one node to the read of a client at the other."""
    here, there = (Client(port=node.port, path=node.path) for node in nodes)
    session = await here.open_session()
    number = next(numbers)
    writing, reading = await here.connect(), await there.connect()
    begun = await writing.open(here.call(number, "progress", {"n": events, "rate": PACE}, session))
    # The client tells nothing while it reads.
    while not (position := next((event.id for event in begun.events()), "")):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    answer = await reading.ask(there.get(session, position), until_result=True)
    writing.close()
    reading.close()
    if answer.status != 200:
        raise BrokenAnswerError(f"the other node answered {answer.status}: {answer.body()[:200]!r}")
    arrived = [event for event in answer.events() if event.data]
    verify(arrived, events, number)
    # The first ones were there before the reader was.
    late = sorted((event.arrived - int(event.message()["params"]["message"])) / MS for event in arrived[10:-1])
    return {"p50": late[len(late) // 2], "p99": late[int(len(late) * 0.99)], "max": late[-1]}


async def idle_node(
    nodes: Sequence[Target], *, sessions: int, seconds: float, count: Callable[[], int] | None
) -> Figures:
    """Statements a second, and percent of a core, of each of some nodes that serve open sessions to which nothing
    happens. Each session has an open GET stream at its own node."""
    wires = []
    for node in nodes:
        client = Client(port=node.port, path=node.path)
        wires += [await _open_stream(client) for _ in range(sessions)]
    await asyncio.sleep(SETTLE)
    used, database = sum(node.cpu_seconds() for node in nodes), nodes[0].log.cpu_seconds()
    if count is not None:
        count()
    await asyncio.sleep(seconds)
    figures = {
        "core_percent": (sum(node.cpu_seconds() for node in nodes) - used) / seconds / len(nodes) * 100,
        "database_percent": (nodes[0].log.cpu_seconds() - database) / seconds / len(nodes) * 100,
    }
    if count is not None:
        figures["statements"] = count() / seconds / len(nodes)
    for wire in wires:
        wire.close()
    return figures
