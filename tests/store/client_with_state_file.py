"""A client that keeps its state in a file: prints the id of its session, then waits for the end of stdin."""

from __future__ import annotations

import sys

import anyio

import perdure
from perdure.errors import StateInUse


async def main(*arguments: str) -> None:
    url, state = arguments
    try:
        async with perdure.connect(url, state=state) as client:
            print(client.session_id, flush=True)
            await anyio.to_thread.run_sync(sys.stdin.read)
    except StateInUse as error:
        print(error, flush=True)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
