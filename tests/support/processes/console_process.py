"""Start `perdure console` in a process of its own, and ask it over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
from asyncio.subprocess import STDOUT
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.clients.raw_http import Answer, Exchange, Peer
from tests.support.processes.starting import Program, start

READY = re.compile(r"perdure: console on http://127\.0\.0\.1:(\d+)/(?:\?token=(\S+))?")
#: What programs show; a ticket is for browsers, and is good for one.
TOKEN = "a-token-that-stays-the-same"
START_SECONDS = 60
#: A state that a test waits for comes within this time, also on a busy machine.
WAIT_SECONDS = 60.0
LOOK = 0.05

Json = dict[str, Any]


@dataclass(kw_only=True)
class Live:
    """A live view: the objects that it has sent so far, and those that it sends next."""

    exchange: Exchange
    seen: list[Json] = field(default_factory=list)

    async def until(self, is_wanted: Callable[[Json], bool]) -> Json:
        """Read until an object comes that is wanted; returns it."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                while len(self.seen) < len(self.exchange.messages):
                    self.seen.append(self.exchange.messages[len(self.seen)])
                    if is_wanted(self.seen[-1]):
                        return self.seen[-1]
                assert await self.exchange.read() or len(self.seen) < len(self.exchange.messages), self.seen

    async def what(self, what: str) -> Json:
        return await self.until(lambda one: one["what"] == what)

    async def ended(self) -> bool:
        """Wait for the end; returns whether the console has ended the view."""
        while await self.exchange.read():
            pass
        return self.exchange.parser.complete


@dataclass(kw_only=True)
class Console:
    process: Program
    port: int
    token: str
    output: list[str]

    def peer(self, **headers: str) -> Peer:
        return Peer(port=self.port, headers={"accept": "*/*", **headers})

    @property
    def known(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    async def ask(self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
        return await self.peer().ask(method, path=path, headers=self.known if headers is None else headers)

    async def get(self, path: str) -> Json:
        answer = await self.ask(path)
        assert answer.status == 200, answer
        found: Json = answer.json
        return found

    async def refused(self, path: str, **more: Any) -> tuple[int, str]:
        """The status of a refusal, and its sentence."""
        answer = await self.ask(path, **more)
        assert list(answer.json) == ["error"], answer
        return answer.status, answer.json["error"]

    async def until(self, path: str, is_wanted: Callable[[Json], Any]) -> Json:
        """Ask again and again, as a page does, until the answer is the one that is wanted."""
        found: Json = {}
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not is_wanted(found := await self.get(path)):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            raise AssertionError(f"the last answer was {json.dumps(found)}") from None
        return found

    @asynccontextmanager
    async def live(self, path: str) -> AsyncIterator[Live]:
        async with await self.peer().begin("GET", path=path, headers=self.known) as exchange:
            assert await exchange.head() == 200, await exchange.answer()
            yield Live(exchange=exchange)


@asynccontextmanager
async def consoling(
    store: str, *options: str, cwd: Path | None = None, has_ticket: bool = False
) -> AsyncIterator[Console]:
    """A console that answers. It ends with the block, by SIGTERM and with status 0. Its token is in a file;
    `has_ticket`: it prints an address for a browser instead."""
    with contextlib.ExitStack() as stack:
        if not has_ticket:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            (path := Path(folder) / "token").write_text(TOKEN)
            path.chmod(0o600)
            options = ("--token-file", str(path), *options)
        async with _started(store, *options, cwd=cwd) as console:
            yield console


@asynccontextmanager
async def _started(store: str, *options: str, cwd: Path | None) -> AsyncIterator[Console]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    arguments = ("console", "--store", store, "--port", "0", *options)
    process = await start("perdure", *arguments, cwd=cwd, env={**env, "PYTHONUNBUFFERED": "1"}, errors=STDOUT)
    assert process.stdout is not None
    output: list[str] = []
    console: Console | None = None
    try:
        async with asyncio.timeout(START_SECONDS):
            while line := await process.stdout.readline():
                output.append(line.decode().rstrip())
                if found := READY.search(output[-1]):
                    console = Console(process=process, port=int(found[1]), token=found[2] or TOKEN, output=output)
                    break
        if console is None:
            raise RuntimeError("the console ended before it was ready:\n" + "\n".join(output))
        yield console
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(15)
        rest, _ = await asyncio.wait_for(process.communicate(), WAIT_SECONDS)
        assert (process.returncode, rest.decode()) == (0, "")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        print(*output, sep="\n")
