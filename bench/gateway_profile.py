"""Shows where the CPU time of a gateway's event loop goes in calls or in events, by the rooms of the package.

    python -m bench.gateway_profile stdio
    python -m bench.gateway_profile http --events

`perdure serve` runs in this process, in front of the bare program or of the SDK's HTTP server, and 8 sessions of
another process call a tool; with `--events` one session calls a tool that sends without a pause. The stack is looked at
after each 2 ms of CPU time. A sample belongs to the innermost room of Perdure on the stack, with all that it calls
(JSON, sockets); without one to the event loop. The store's own thread is not seen.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import perdure
from bench import launch
from bench.gateways import PROGRAM, free_port
from bench.launch import SqliteFile
from bench.wire import Client
from perdure.cli.entry import main

SECONDS, SESSIONS, EVERY = 15.0, 8, 0.002
EVENTS = 5_000
"""Of one call."""
PACKAGE = f"{Path(perdure.__file__).parent}{os.sep}"


async def call_for_a_while(port: int, gateway: int, what: str) -> int:
    """Have each session call, one call after the other. Returns how many calls were answered."""
    client, calls = Client(port=port, path="/mcp"), 0
    tool, arguments = ("progress", {"n": EVENTS}) if what == "events" else ("echo", {"text": "x"})
    sessions = [await client.open_session() for _ in range(1 if what == "events" else SESSIONS)]
    os.kill(gateway, signal.SIGUSR1)  # its start is over
    end = time.perf_counter() + SECONDS

    async def one(session: str) -> None:
        nonlocal calls
        wire = await client.connect()
        while time.perf_counter() < end:
            calls += 1
            await wire.ask(client.call(calls, tool, arguments, session))
        wire.close()

    await asyncio.gather(*map(one, sessions))
    return calls


def sample(kind: str, what: str) -> Counter[str]:
    """Serve until the client has ended, and count samples by rooms."""
    rooms: Counter[str] = Counter()

    def look(_: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        place = "event loop" if frame is None else frame.f_code.co_filename.removeprefix(PACKAGE).split(os.sep)[0]
        rooms[place] += 1

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        log = SqliteFile(Path(folder) / "behind.db")
        upstream = ["--", sys.executable, "-I", "-S", str(PROGRAM)]
        if kind == "http":
            behind = stack.enter_context(launch.running("sdk", Path(folder), log, cores="0"))
            upstream = [f"http://127.0.0.1:{behind.port}{behind.path}"]
        port = free_port()
        client = [sys.executable, "-m", "bench.gateway_profile", "client", str(port), str(os.getpid()), what]
        stack.enter_context(subprocess.Popen(client))
        signal.signal(signal.SIGPROF, look)
        signal.signal(signal.SIGUSR1, lambda *_: signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY) and None)
        options = ["serve", "--port", str(port), "--store", f"sqlite:{folder}/log.db", "--log-level", "error"]
        try:
            main([*options, *upstream])
        except SystemExit:
            pass
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return rooms


def run_client(port: int, gateway: int, what: str) -> None:
    """Call when the gateway listens, and stop it after that."""
    while True:
        try:
            calls = asyncio.run(call_for_a_while(port, gateway, what))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    print(f"{calls} calls", flush=True)
    os.kill(gateway, signal.SIGINT)


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        run_client(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("stdio", "http"))
    parser.add_argument("--events", action="store_true", help="events in place of calls")
    given = parser.parse_args()
    found = sample(given.kind, "events" if given.events else "calls")
    for room, count in found.most_common():
        print(f"{room:<16}{count / found.total():>6.0%}")
