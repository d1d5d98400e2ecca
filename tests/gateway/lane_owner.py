"""A process that owns a lane, to be killed by a test: prints a line when its lane is open, with the pids of the reaper,
of the launcher, of the server and of a process below it.

    python -m tests.gateway.lane_owner [SETTING=VALUE ...]
"""

from __future__ import annotations

import asyncio
import sys

import psutil  # type: ignore[import-untyped]

from perdure.gateway.children import Children, Reaper
from tests.gateway.pipe_lanes import CLIENT, Lane, scripted


async def main() -> None:
    reaper = Reaper()
    server = scripted(*sys.argv[1:])
    # A launcher that stays above the server, as npx does.
    children = Children(scripted(argv=("/bin/sh", "-c", '"$@"; exit 0', "sh", *server.settings.argv)), reaper=reaper)
    lane = Lane(children)
    await lane.open(CLIENT)
    below = await lane.call({"spawn": 600})
    server_pid = await lane.call({"pid": True})
    print(reaper.pid, psutil.Process(int(server_pid)).ppid(), server_pid, below, flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
