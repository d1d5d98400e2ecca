"""Measures how soon the calls of a process that dies, or stands still, are settled at another one, on PostgreSQL.

    python -m tests.liveness --times 10

A process that is killed is looked up, because it is on the same machine: two seconds at most. One that stands still is
there, and its lease tells: fifteen seconds with the default lease. Ends with status 1 if one of them takes longer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import time

from perdure import Settings
from perdure._core.leases import BEATS_IN_LEASE
from tests.support.clients.raw_http import Peer, SessionPeer
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.serving import serving
from tests.support.stores.postgres import store_url

#: Seconds, by what happens to the process.
GOALS = {signal.SIGKILL: 2.0, signal.SIGSTOP: 15.0}

#: Seconds between two beats of a process, with the default lease. The signal comes at any moment between two.
BEAT = Settings().lease / BEATS_IN_LEASE


async def settle(how: signal.Signals) -> float:
    """Seconds from the signal until a reader at the other process has the call's answer."""
    options = ("--store", store_url())
    async with serving(GATE_FILE_TOOLS, *options) as doomed, serving(GATE_FILE_TOOLS, *options) as living:
        peer = await Peer(port=doomed.port).session()
        there = SessionPeer(port=living.port, headers=peer.headers, id=peer.id)
        async with await peer.begin_call("pay", n=1, gate="/nowhere", pauses=[1]) as call:
            await call.until_messages(1)
            async with await there.resume(call.position) as reader:
                await reader.head()
                await asyncio.sleep(random.uniform(0, BEAT))
                began = time.monotonic()
                doomed.send(how)
                try:
                    [answer] = await reader.until_messages(1)
                    seconds = time.monotonic() - began
                finally:
                    doomed.send(signal.SIGCONT)
        assert answer["error"]["code"] == -31001, answer
    return seconds


async def measure(how: signal.Signals, times: int) -> bool:
    found = sorted([await settle(how) for _ in range(times)])
    middle, goal = statistics.median(found), GOALS[how]
    print(f"{how.name}: {times} times, {found[0]:.2f} to {found[-1]:.2f} s, median {middle:.2f} s (at most {goal:g} s)")
    return found[-1] <= goal


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how soon calls of a dead process are settled.")
    parser.add_argument("--times", type=int, default=10)
    given = parser.parse_args()
    kept = [asyncio.run(measure(how, given.times)) for how in GOALS]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
