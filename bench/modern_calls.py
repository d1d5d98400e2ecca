"""What is measured of 2026-07-28: calls that are on the log, and tasks that are asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from bench.launch import Target
from bench.measures import SECOND, Figures, Used, numbers, rate
from bench.received import BrokenAnswerError, Response
from bench.wire import Client, Wire

MODERN = "2026-07-28"
TASKS: dict[str, Any] = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
KEY = "dev.perdure/key"

keys = itertools.count(1)


def request(client: Client, method: str, params: dict[str, Any], *, number: int, tasks: bool, key: str = "") -> bytes:
    """One request, with what the revision wants in its headers."""
    meta: dict[str, Any] = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": TASKS if tasks else {},
    }
    if key:
        meta[KEY] = key
    message = {"jsonrpc": "2.0", "id": number, "method": method, "params": {**params, "_meta": meta}}
    name = params.get("name") or params.get("taskId")
    headers = {"Mcp-Protocol-Version": MODERN, "Mcp-Method": method, "Mcp-Name": name}
    return client.post(message, headers=headers)


def echo(client: Client, *, tasks: bool = False, keyed: bool = False) -> tuple[bytes, bytes]:
    """A call, and what its answer must contain."""
    number = next(numbers)
    params = {"name": "echo", "arguments": {"text": f"echo {number}"}}
    key = f"key-{next(keys)}" if keyed else ""
    return request(client, "tools/call", params, number=number, tasks=tasks, key=key), f'"echo {number}"'.encode()


async def calls_per_second(
    target: Target, *, connections: int, seconds: float, tasks: bool = False, keyed: bool = False
) -> Figures:
    """`echo` calls answered per second on kept connections, by so many callers at once."""
    client = Client(port=target.port, path=target.path)
    return await _rate_of(target, connections, seconds, lambda: echo(client, tasks=tasks, keyed=keyed))


async def polls_per_second(target: Target, *, connections: int, seconds: float, running: bool) -> Figures:
    """`tasks/get` answered per second, of a task that runs or of one that has ended. (The server holds no poll.)"""
    client = Client(port=target.port, path=target.path)
    task = await begin_task(client, 3_600.0 if running else 0.3)
    wanted = b'"working"' if running else b'"completed"'
    while wanted not in (await client.once(poll(client, task))).body():
        pass
    return await _rate_of(target, connections, seconds, lambda: (poll(client, task), wanted))


async def end_seen(target: Target, *, times: int) -> Figures:
    """Milliseconds from the end of a tool until a client that polls has seen it."""
    client = Client(port=target.port, path=target.path)
    late: list[float] = []
    for _ in range(times):
        task = await begin_task(client, 0.4)
        while True:
            answer = await client.once(poll(client, task))
            result = json.loads(answer.body())["result"]
            if result["status"] == "completed":
                ended = int(result["result"]["content"][0]["text"])
                late.append((answer.ended - ended) / 1e6)
                break
    late.sort()
    return {"p50": late[len(late) // 2], "worst": late[-1]}


async def begin_task(client: Client, seconds: float) -> str:
    """A task that takes so long; its id."""
    params = {"name": "sleep", "arguments": {"seconds": seconds}}
    answer = await client.once(request(client, "tools/call", params, number=next(numbers), tasks=True))
    result = json.loads(answer.body())["result"]
    if result.get("resultType") != "task":
        raise BrokenAnswerError(f"a call was not answered with a task: {answer.body()[:200]!r}")
    return str(result["taskId"])


def poll(client: Client, task: str) -> bytes:
    return request(client, "tasks/get", {"taskId": task}, number=next(numbers), tasks=True)


async def _rate_of(
    target: Target, connections: int, seconds: float, make: Callable[[], tuple[bytes, bytes]]
) -> Figures:
    client = Client(port=target.port, path=target.path)
    wires = [await client.connect() for _ in range(connections)]
    _checked(await wires[0].ask(make()[0]), b"")  # the first call lists the tools
    began = perf_counter_ns()
    end = began + int(seconds * SECOND)
    used = Used.by(target)
    counts = await asyncio.gather(*(_ask_until(wire, end, make) for wire in wires))
    took = (perf_counter_ns() - began) / SECOND
    figures = rate(sum(counts), took, Used.by(target).since(used))
    for wire in wires:
        wire.close()
    return figures


async def _ask_until(wire: Wire, end: int, make: Callable[[], tuple[bytes, bytes]]) -> int:
    count = 0
    while perf_counter_ns() < end:
        asked, wanted = make()
        _checked(await wire.ask(asked), wanted)
        count += 1
    return count


def _checked(answer: Response, wanted: bytes) -> None:
    if answer.status != 200 or wanted not in answer.body():
        raise BrokenAnswerError(f"a request was answered {answer.status}: {answer.body()[:200]!r}")
