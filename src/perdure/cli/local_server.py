"""Serves a file for as long as one command needs it: `perdure call FILE.py TOOL` and `perdure list FILE.py`.

It is `perdure serve` in a process of its own with its log in memory, so a call is made as it is made to any server. The
process ends with its input: also if this one is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click

from perdure.cli.serve import REFUSED

_READY = re.compile(rb"perdure: serving on (http://\S+)")
_RUN = "from perdure.cli.dev import run_until_input_ends; run_until_input_ends()"
#: It has nothing to lose: the log is in memory, and the one call was answered.
_OPTIONS = ("--store", "memory:", "--host", "127.0.0.1", "--port", "0", "--workers", "1", "--drain-timeout", "0")
#: Seconds for the end of the process; one that is stuck in the target's code is killed.
STOP_SECONDS = 5.0


def is_file(address: str) -> bool:
    """Whether this is the file of a server and no address: `bakery.py` or `bakery.py:server`."""
    return "://" not in address and address.partition(":")[0].endswith(".py")


@asynccontextmanager
async def serving(target: str, *, log_level: str) -> AsyncIterator[str]:
    """Serve a target; gives its URL. Whatever is wrong with it the process says itself, and the command ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _RUN, "serve", target, *_OPTIONS, "--log-level", log_level),
        stdin=PIPE,
        stdout=PIPE,
        process_group=0,  # so that Ctrl-C, which a terminal sends to the whole group, only cancels the call
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while not (found := _READY.match(line := await process.stdout.readline())):
            if not line:
                raise click.exceptions.Exit(await process.wait() or REFUSED)
            sys.stderr.buffer.write(line)  # what the code prints when it is imported
        rest = asyncio.create_task(_pass_on(process.stdout))
        yield found[1].decode()
        rest.cancel()
    finally:
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _pass_on(output: asyncio.StreamReader) -> None:
    """What a tool prints must not be taken for the result, nor fill the pipe."""
    while data := await output.read(65_536):
        sys.stderr.buffer.write(data)
        sys.stderr.flush()
