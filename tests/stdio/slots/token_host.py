"""A real host: `python -m tests.stdio.slots.token_host FOLDER`. It forks bridges that only keep tokens.

It reads lines of JSON: `{"start": COUNT, "target": NAME}` starts bridges at once and says for each one which token it
offered and which one it keeps now; `{"kill": [PID, …]}` kills them. The end of its input ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys

from perdure.stdio.identity import identify
from perdure.stdio.resume_slot import open_slot
from tests.stdio.fake_hosts import target

PATIENCE = 0.2
"""Shorter than that of real bridges: the first ones of a target wait for it in vain."""


#: Its end is the host's: bridges wait for it.
_LIFELINE, _HELD = os.pipe()


def main(folder: str) -> None:
    for line in sys.stdin:
        match json.loads(line):
            case {"start": count, "target": name}:
                said = [_start(folder, name) for _ in range(count)]
                print(json.dumps([json.loads(os.read(end, 4096)) for end in said]), flush=True)
                for end in said:
                    os.close(end)
            case {"kill": pids}:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                for pid in pids:
                    os.waitpid(pid, 0)
                print(json.dumps([]), flush=True)


def _start(folder: str, name: str) -> int:
    """What the bridge says can be read from this pipe."""
    said, saying = os.pipe()
    if os.fork() == 0:
        os.close(_HELD)
        try:
            os.write(saying, json.dumps(asyncio.run(_live(folder, name))).encode())
            os.read(_LIFELINE, 1)
        finally:
            os._exit(0)
    os.close(saying)
    return said


async def _live(folder: str, name: str) -> dict[str, object]:
    identity = identify()
    slot = await open_slot(folder, identity, target(name), patience=PATIENCE)
    offered, token = slot.token(), secrets.token_urlsafe(48)
    kept = slot.keep(token)
    host = None if identity is None else identity.pid
    return {"pid": os.getpid(), "host": host, "offered": offered, "kept": token if kept else None}


if __name__ == "__main__":
    main(sys.argv[1])
