"""Stock MCP clients behind one small face, so that one story can be told with each of them.

Nothing here reconnects, counts or repairs: what a story sees is what the client's own callbacks were given. The Python
clients run in the test's process. The TypeScript ones are scripts that take calls as JSON lines on their standard input
and print what they see as JSON lines; they end when the input ends.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp import Client, ClientSession
from mcp.client.session import ClientRequestContext, IncomingMessage
from mcp.client.streamable_http import streamable_http_client

from tests.support.node import program

HERE = Path(__file__).parent

#: What a story waits for comes within milliseconds, or never; seconds are for a busy machine.
PATIENCE = 10

#: What every client answers when it is asked.
USER_SAYS = "forty-two"
MODEL_SAYS = "a poem"


@dataclass(kw_only=True, eq=False)
class Call:
    """One tool call and what its caller has seen of it."""

    progress: list[int] = field(default_factory=list)
    #: The text of the result, or `error: …` when the call failed.
    answer: str | None = None
    #: The positions that the client told its caller; only the TypeScript clients do, the Python ones stay at none.
    tokens: list[str] = field(default_factory=list)


class StockClient(ABC):
    """A connected client: the calls it made, the notices and questions it was given."""

    def __init__(self) -> None:
        self.protocol = ""
        self.notices: list[str] = []
        self.asked: list[str] = []
        self._changed = asyncio.Event()

    @abstractmethod
    async def knows(self, call: Call, positions: int) -> None:
        """Wait until the client has taken in that many positions of a call, which the proxy has seen on their way."""

    @abstractmethod
    async def call(self, tool: str, /, **arguments: Any) -> Call:
        """Begin a call; the client reports on it as it goes."""

    async def until(self, state: Callable[[], bool]) -> None:
        """Wait until a state of what was seen is reached."""
        async with asyncio.timeout(PATIENCE):
            while not state():
                self._changed.clear()
                await self._changed.wait()

    async def answer(self, call: Call) -> str:
        await self.until(lambda: call.answer is not None)
        assert call.answer is not None
        return call.answer

    async def result(self, tool: str, /, **arguments: Any) -> str:
        return await self.answer(await self.call(tool, **arguments))

    def changed(self) -> None:
        self._changed.set()


class PythonClient(StockClient):
    """The official Python SDK; `connect` says through which of its two doors."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        super().__init__()
        self.session: ClientSession | Client | None = None
        self._tasks = tasks
        self._calls: list[asyncio.Task[None]] = []

    async def knows(self, call: Call, positions: int) -> None:
        """Nothing to wait for: what reached its socket is read before a reset is."""

    async def call(self, tool: str, /, **arguments: Any) -> Call:
        call = Call()
        self._calls.append(self._tasks.create_task(self._call(call, tool, arguments)))
        return call

    def hang_up(self) -> None:
        """Give up the calls that still run, so that a story that failed can end."""
        for call in self._calls:
            call.cancel()

    async def _call(self, call: Call, tool: str, arguments: dict[str, Any]) -> None:
        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            call.progress.append(int(progress))
            self.changed()

        assert self.session is not None
        try:
            result = await self.session.call_tool(tool, arguments, progress_callback=on_progress)
            call.answer = _text(result)
        except Exception as error:  # whatever the client raises is what the story sees
            call.answer = f"error: {error}"
        self.changed()

    async def on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, types.ResourceUpdatedNotification):
            self.notices.append(str(message.params.uri))
            self.changed()

    async def on_elicit(self, context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        self.asked.append(params.message)
        self.changed()
        return types.ElicitResult(action="accept", content={"answer": USER_SAYS})

    async def on_sample(
        self, context: ClientRequestContext, params: types.CreateMessageRequestParams
    ) -> types.CreateMessageResult:
        content = params.messages[0].content
        assert isinstance(content, types.TextContent)
        self.asked.append(content.text)
        self.changed()
        text = types.TextContent(type="text", text=MODEL_SAYS)
        return types.CreateMessageResult(role="assistant", content=text, model="none")


def _text(result: types.CallToolResult) -> str:
    content = result.content[0]
    assert isinstance(content, types.TextContent)
    return f"error: {content.text}" if result.is_error else content.text


@asynccontextmanager
async def python_client(url: str, *, mode: str = "legacy") -> AsyncIterator[StockClient]:
    """`mcp.Client`, the high-level one."""
    async with asyncio.TaskGroup() as tasks:
        seen = PythonClient(tasks)
        async with Client(
            url,
            mode=mode,
            message_handler=seen.on_message,
            elicitation_callback=seen.on_elicit,
            sampling_callback=seen.on_sample,
        ) as client:
            seen.session, seen.protocol = client, client.protocol_version
            try:
                yield seen
            finally:
                seen.hang_up()


@asynccontextmanager
async def python_session(url: str) -> AsyncIterator[StockClient]:
    """`ClientSession` on `streamable_http_client`, the low-level one."""
    async with asyncio.TaskGroup() as tasks:
        seen = PythonClient(tasks)
        async with (
            streamable_http_client(url) as (read, write),
            ClientSession(
                read,
                write,
                message_handler=seen.on_message,
                elicitation_callback=seen.on_elicit,
                sampling_callback=seen.on_sample,
            ) as session,
        ):
            seen.protocol = str((await session.initialize()).protocol_version)
            seen.session = session
            try:
                yield seen
            finally:
                seen.hang_up()


class NodeClient(StockClient):
    """A script of this folder under node."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self._process = process
        self._calls: list[Call] = []
        self.ended = False
        #: What the script's client reported through `onerror`; part of the message when a story fails.
        self.errors: list[str] = []

    async def knows(self, call: Call, positions: int) -> None:
        """A reset throws away what fetch has received and nobody has read yet, so wait for the client's own word."""
        await self.until(lambda: len(call.tokens) >= positions)

    async def call(self, tool: str, /, **arguments: Any) -> Call:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tool": tool, "arguments": arguments}).encode() + b"\n")
        await self._process.stdin.drain()
        self._calls.append(Call())
        return self._calls[-1]

    async def listen(self) -> None:
        """Take in what the script prints until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._saw(**json.loads(line))
            self.changed()
        self.ended = True
        self.changed()

    def _saw(
        self,
        *,
        ready: str | None = None,
        call: int | None = None,
        progress: int | None = None,
        token: str | None = None,
        answer: str | None = None,
        notice: str | None = None,
        asked: str | None = None,
        error: str | None = None,
    ) -> None:
        if ready is not None:
            self.protocol = ready
        if notice is not None:
            self.notices.append(notice)
        if asked is not None:
            self.asked.append(asked)
        if error is not None:
            self.errors.append(error)
        if call is not None and progress is not None:
            self._calls[call].progress.append(progress)
        if call is not None and token is not None:
            self._calls[call].tokens.append(token)
        if call is not None and answer is not None:
            self._calls[call].answer = answer


@asynccontextmanager
async def node_client(script: str, url: str) -> AsyncIterator[StockClient]:
    process = await asyncio.create_subprocess_exec(
        program("node"), HERE / script, url, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    client = NodeClient(process)
    async with AsyncExitStack() as stack:
        listening = await stack.enter_async_context(asyncio.TaskGroup())
        listening.create_task(client.listen())
        stack.push_async_callback(_end, process)
        await client.until(lambda: bool(client.protocol) or client.ended)
        assert client.protocol, f"{script} ended before it was connected: {client.errors}"
        yield client


async def _end(process: asyncio.subprocess.Process) -> None:
    """End of input is the script's sign to close; one that does not is killed, so that no story leaves a process."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 5)
    except TimeoutError:
        process.kill()
        await process.wait()
