"""How Perdure on PostgreSQL grows: `python -m bench.scaling [--nodes 1 2 4 8] [--sessions 1000 10000 100000]`.

Part one: 1, 2, 4 and 8 nodes serve the same sessions from one server. Sixteen callers, each with a session of its own,
send each call to the next node. Part two: one node serves from a database that holds more and more sessions. The cores
are the same all the time, so calls a second do not rise with nodes; what tells is the CPU time of a call, of the nodes
and of the database: as long as it stays the same, each further machine brings what the first one did.

It writes `results/scaling.json` and `results/scaling.png`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import uvloop

from bench import machine, measures, plot, postgres
from bench.launch import Target, files, running
from bench.measures import Figures
from bench.received import BrokenAnswerError
from bench.report import RESULTS
from bench.wire import Client
from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.states import SessionState
from perdure.store import open_store
from perdure.store.records import SessionRecord, StreamRecord
from perdure.store.steps import OpenStream, PutSession

CALLERS = 16
RESUMES = 20
MISSED = 100
AT_ONCE = 500  # sessions that are stored in one commit
SETTINGS = {"max_sessions": 1_000_000, "max_address_sessions": 1_000_000}
KIND = "perdure-postgres"


async def calls(nodes: Sequence[Target], seconds: float) -> Figures:
    """Calls a second, by callers that go from node to node; CPU time of a call, of all nodes and of the database."""
    clients = [Client(port=node.port, path=node.path) for node in nodes]
    sessions = [await clients[n % len(clients)].open_session() for n in range(CALLERS)]
    for session in sessions:  # each node has each session loaded
        for client in clients:
            await _echo(client, session)
    loop = asyncio.get_running_loop()
    used, database, began = sum(node.cpu_seconds() for node in nodes), nodes[0].log.cpu_seconds(), loop.time()
    done = sum(await asyncio.gather(*(_caller(clients, n, s, began + seconds) for n, s in enumerate(sessions))))
    took = loop.time() - began
    return {
        "calls_per_second": done / took,
        "node_us": (sum(node.cpu_seconds() for node in nodes) - used) / done * 1e6,
        "database_us": (nodes[0].log.cpu_seconds() - database) / done * 1e6,
    }


async def _caller(clients: Sequence[Client], first: int, session: str, end: float) -> int:
    wires = [await client.connect() for client in clients]
    count = 0
    for turn in itertools.count(first):
        if asyncio.get_running_loop().time() >= end:
            break
        place = turn % len(clients)
        number = next(measures.numbers)
        answer = await wires[place].ask(clients[place].call(number, "echo", {"text": f"echo {number}"}, session))
        _check(answer.status, answer.body(), number)
        count += 1
    for wire in wires:
        wire.close()
    return count


async def _echo(client: Client, session: str) -> None:
    number = next(measures.numbers)
    answer = await client.once(client.call(number, "echo", {"text": f"echo {number}"}, session))
    _check(answer.status, answer.body(), number)


def _check(status: int, body: bytes, number: int) -> None:
    if status != 200 or f'"echo {number}"'.encode() not in body:
        raise BrokenAnswerError(f"echo was answered {status}: {body[:200]!r}")


async def stored_sessions(url: str, first: int, count: int) -> None:
    """Put sessions at rest into the store, as a node leaves them that has served them."""
    async with open_store(url) as store:
        for start in range(first, first + count, AT_ONCE):
            names = range(start, min(start + AT_ONCE, first + count))
            await store.commit([PutSession(record=_session(number)) for number in names])
            await store.commit([OpenStream(record=_standalone(number)) for number in names])


def _session(number: int) -> SessionRecord:
    return SessionRecord(
        id=SessionId(f"{number:043d}"),
        owner="",
        state=SessionState.DORMANT,
        version="2025-11-25",
        client_params=b'{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"b","version":"1"}}',
        result=b"{}",
        initialized=True,
        sticky=(),
        incarnation=1,
        standalone=StreamId(f"{number:022d}"),
        created=1.7e9,
        active=4e9,  # long after any cutoff
        address=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
    )


def _standalone(number: int) -> StreamRecord:
    return StreamRecord(
        id=StreamId(f"{number:022d}"),
        session=SessionId(f"{number:043d}"),
        kind=Kind.STANDALONE,
        node=NodeId(""),
        fence=Fence(1),
        opened=1.7e9,
    )


async def resumes(node: Target) -> Figures:
    found = await measures.replay(node, missed=MISSED, times=RESUMES)
    return {"resume_ms": found["ms"]}


def measure_nodes(server: postgres.Server, counts: Sequence[int], seconds: float, cores: str) -> dict[int, Figures]:
    found: dict[int, Figures] = {}
    for count in counts:
        with ExitStack() as stack:
            folder, database = stack.enter_context(files()), stack.enter_context(server.database())
            nodes = [
                stack.enter_context(running(KIND, folder, database, cores=cores, settings=SETTINGS))
                for _ in range(count)
            ]
            found[count] = uvloop.run(calls(nodes, seconds))
            with server.logging_statements() as said:
                idle = measures.idle_node(nodes, sessions=2, seconds=seconds, count=said)
                found[count] |= {f"idle_{name}": value for name, value in uvloop.run(idle).items()}
        print(f"{count} nodes: {_spelled(found[count])}", flush=True)
    return found


def measure_sessions(server: postgres.Server, sizes: Sequence[int], seconds: float, cores: str) -> dict[int, Figures]:
    found: dict[int, Figures] = {}
    with ExitStack() as stack:
        folder, database = stack.enter_context(files()), stack.enter_context(server.database())
        stored = 0
        for size in sorted(sizes):
            uvloop.run(stored_sessions(database.url, stored, size - stored))
            stored = size
            with running(KIND, folder, database, cores=cores, settings=SETTINGS) as node:
                found[size] = uvloop.run(calls([node], seconds)) | uvloop.run(resumes(node))
            found[size]["mib"] = database.size() / 2**20
            print(f"{size:,} sessions: {_spelled(found[size])}", flush=True)
    return found


def _spelled(figures: Figures) -> str:
    return ", ".join(f"{name} {value:,.1f}" for name, value in figures.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how Perdure on PostgreSQL grows.")
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--sessions", nargs="*", type=int, default=[10**3, 10**4, 10**5])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measure")
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    every = ",".join(map(str, cores))
    here, bystanders = machine.describe(), machine.Bystanders()
    with postgres.serving(set(cores)) as server:
        here["postgres"] = server.version
        results: dict[str, Any] = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": here,
            "nodes": measure_nodes(server, given.nodes, given.seconds, every),
            "sessions": measure_sessions(server, given.sessions, given.seconds, every),
        }
        here["others"] = bystanders.share(less=server.cpu_seconds())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scaling.json").write_text(json.dumps(results, indent=1) + "\n")
    plot.draw_scaling(results)
    print(f"other processes used {here['others']:.0%} of the machine meanwhile")


if __name__ == "__main__":
    main()
