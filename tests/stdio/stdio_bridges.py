"""`perdure stdio` as a host sees it: processes with a pipe to speak MCP over."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from tests.support.processes.serving import python_path

#: What a story waits for comes within milliseconds, or never; seconds are for a busy machine.
PATIENCE = 60
#: For an end that waits for nothing. A bridge that waited for its server or a call would take a minute, or for ever.
PROMPTLY = 20
#: Bytes of a line that a test reads.
LONGEST = 1 << 27

Message = dict[str, Any]


class Bridge:
    """One `perdure stdio` that runs. It is spoken to as a host does; ids begin again with each."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, log: Path) -> None:
        self.log = log
        self.heard: list[Message] = []
        """Notifications and requests, in order."""
        self.order: list[str] = []
        """What came, in a word each."""
        self._reader = reader
        self._writer = writer
        self._transport = cast(asyncio.ReadTransport, writer.transport)
        self._ids = itertools.count()
        self._answers: dict[Any, Message] = {}
        self._changed = asyncio.Event()
        self.ended = False
        self.listening = asyncio.create_task(self._listen())

    # Saying

    def say(self, message: object) -> None:
        self.say_bytes(json.dumps(message).encode() + b"\n")

    def say_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    def begin(self, method: str, params: Any = None, *, id: Any = None) -> Any:  # noqa: A002 - JSON-RPC's word
        """Send a request; its id."""
        request_id = next(self._ids) if id is None else id
        self.say({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params or {}})
        return request_id

    def begin_call(self, tool: str, /, *, token: Any = None, **arguments: Any) -> Any:
        meta = {} if token is None else {"_meta": {"progressToken": token}}
        return self.begin("tools/call", {"name": tool, "arguments": arguments, **meta})

    def notify(self, method: str, **params: Any) -> None:
        self.say({"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})})

    async def request(self, method: str, params: Any = None) -> Message:
        return await self.answer(self.begin(method, params))

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """The text of a tool's result."""
        return text_of(await self.answer(self.begin_call(tool, **arguments)))

    async def handshake(self, version: str = "2025-11-25", **capabilities: Any) -> Message:
        """Call as hosts do; returns the result, or the whole answer if it is an error."""
        client = {"name": "host", "version": "1"}
        params = {"protocolVersion": version, "capabilities": capabilities, "clientInfo": client}
        answer = await self.request("initialize", params)
        if "error" in answer:
            return answer
        self.notify("notifications/initialized")
        return dict(answer["result"])

    # Hearing

    async def answer(self, request_id: Any) -> Message:
        await self.until(lambda: request_id in self._answers, f"an answer to {request_id!r}")
        return self._answers.pop(request_id)

    def has_answer(self, request_id: Any) -> bool:
        return request_id in self._answers

    async def until(self, state: Callable[[], bool], what: str = "") -> None:
        """Wait for a state of what was heard."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not state():
                    assert not self.ended, f"it ended without {what}: {self.told()}"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"waited in vain for {what}: {self.heard} {self.told()}") from None

    def notices(self) -> list[int]:
        """The numbers of the notices that belong to no call."""
        said = [message["params"]["uri"] for message in self.heard if message["method"].endswith("resources/updated")]
        return [int(uri.removeprefix("notice://")) for uri in said if uri.startswith("notice://")]

    def progress(self) -> list[tuple[Any, int]]:
        found = [message["params"] for message in self.heard if message["method"] == "notifications/progress"]
        return [(params["progressToken"], params["progress"]) for params in found]

    def reports(self) -> list[Message]:
        """Return the reports of calls of an earlier instance. (One with a sentence is the server's, about orphans.)"""
        found = [message["params"] for message in self.heard if message["method"] == "notifications/message"]
        return [params["data"] for params in found if isinstance(params["data"], dict)]

    def asked(self) -> list[Message]:
        return [message for message in self.heard if "id" in message]

    def told(self) -> list[str]:
        """What it wrote to stderr."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    async def logged(self, sentence: str, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE):
            while sum(sentence in line for line in self.told()) < times:  # noqa: ASYNC110 - a file has no events
                await asyncio.sleep(0.01)

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "method" in message:
                    self.heard.append(message)
                    self.order.append(message["method"])
                else:
                    self._answers[message["id"]] = message
                    self.order.append(f"answer {json.dumps(message['id'])}")
                self._changed.set()
        except ConnectionError:
            pass
        self.ended = True
        self._changed.set()

    def stop_reading(self) -> None:
        """The host leaves what the bridge writes in the pipe."""
        self._transport.pause_reading()

    def read_again(self) -> None:
        self._transport.resume_reading()

    def close_input(self) -> None:
        """The host closes the bridge's stdin."""
        if not self._writer.is_closing():
            self._writer.write_eof()


class HostedBridge(Bridge):
    """A bridge that a host started."""

    host: Host
    pid: int

    async def end(self) -> int:
        """Close its stdin, and wait for its exit status."""
        self.close_input()
        return await self.wait()

    async def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        os.kill(self.pid, how)
        return await self.wait()

    async def wait(self) -> int:
        status = int(await self.host.order({"wait": self.pid}))
        self.host.running.remove(self)
        await asyncio.wait([self.listening])
        self._writer.close()
        return status


class HostProcess:
    """A process of `stdio_host`. It serves one test after the other, because it takes a second to start."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tests.stdio.stdio_host"),
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, order: Message) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().decode()

    def end(self) -> None:
        with self._process:  # closes the pipes, and waits
            assert self._process.stdin is not None
            self._process.stdin.close()


class Host:
    """A host, for as long as a test lives."""

    def __init__(self, process: HostProcess, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.running: list[HostedBridge] = []
        self._process = process
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens"

    async def start(
        self,
        *options: str,
        url: str | None = None,
        command: Sequence[str] = (),
        point: Message | None = None,
        held: str | None = None,
        **environ: str,
    ) -> HostedBridge:
        """Start a bridge, to the URL or to a program. The directory of the tokens is the same for all hosts of a test.

        It kills itself at the `point`; when it has written what is `held`, its writer is held (`stdio_host`).
        """
        name = f"{self.pid}-{next(self._numbers)}"
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
        path = self.folder / f"{name}.sock"
        server = await asyncio.start_unix_server(lambda *ends: connected.set_result(ends), path, limit=LONGEST)
        log = self.folder / f"{name}.log"
        order = {
            "socket": str(path),
            "log": str(log),
            "environ": {"PERDURE_TOKEN_DIR": str(self.tokens), **environ},
            "arguments": [*options, "--", *command] if command else [url or self.url, *options],
            "point": point,
            "held": held,
        }
        pid = int(await self.order(order))
        async with asyncio.timeout(PATIENCE):
            bridge = HostedBridge(*await connected, log)
        server.close()
        bridge.host, bridge.pid = self, pid
        self.running.append(bridge)
        return bridge

    async def session(self, *options: str, **capabilities: Any) -> HostedBridge:
        """Start a bridge and shake hands."""
        bridge = await self.start(*options)
        await bridge.handshake(**capabilities)
        return bridge

    async def order(self, order: Message) -> str:
        async with self._turn:
            return await asyncio.to_thread(self._process.order, order)


#: Host processes that no test uses at the moment.
_idle: list[HostProcess] = []


@asynccontextmanager
async def a_host(folder: Path, url: str) -> AsyncIterator[Host]:
    """Folders have short names: a socket's path may have 100 characters."""
    process = _idle.pop() if _idle else await asyncio.to_thread(HostProcess)
    host = Host(process, folder, url)
    try:
        yield host
    finally:
        for bridge in list(host.running):
            os.kill(bridge.pid, signal.SIGKILL)
            await bridge.wait()
        _idle.append(process)


def end_hosts() -> None:
    while _idle:
        _idle.pop().end()


def text_of(answer: Message) -> str:
    assert "result" in answer, answer
    return str(answer["result"]["content"][0]["text"])
