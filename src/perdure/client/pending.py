"""A call that an earlier process began, and that this process continues."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import anyio
import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, JSONRPCError, JSONRPCNotification, JSONRPCResponse, methods
from pydantic import ValidationError

from perdure.client.incoming import answer_of, named, parse
from perdure.remote.call import ToolCall
from perdure.remote.message import Message, encode, error

#: Notifications that wait for the program; beyond that the call's stream is not read further (promise 6).
ROOM = 1_000


class PendingCall:
    """Awaitable for its result; `async for` over it yields the notifications that had not been seen, until it ends.

    Awaiting skips the notifications that are left, so read them first. They also reach the client's ordinary callbacks.
    """

    def __init__(
        self,
        call: ToolCall,
        version: str,
        *,
        forget: Callable[[], None],
        cancel: Callable[[], Awaitable[object]],
        pass_on: Callable[[Message], Awaitable[None]],
    ) -> None:
        """`forget` is called when the program gets the result, `pass_on` for every message that the call has taken."""
        self.tool = call.tool
        self.arguments = call.arguments
        self.id = call.id
        self.is_taken = False
        """The program has its result."""
        self._version = version
        self._forget = forget
        self._cancel = cancel
        self._pass_on = pass_on
        self._is_abandoned = False
        self._answer: JSONRPCResponse | JSONRPCError | None = None
        self._answered = anyio.Event()
        self._put, self._notes = anyio.create_memory_object_stream[types.ServerNotification | Callable[[], None]](ROOM)

    def __repr__(self) -> str:
        return f"PendingCall(tool={self.tool!r}, arguments={self.arguments!r})"

    @property
    def is_answered(self) -> bool:
        return self._answered.is_set()

    def __await__(self) -> Generator[Any, None, types.CallToolResult]:
        return self.result().__await__()

    async def result(self) -> types.CallToolResult:
        """The call's result; raises `OutcomeUnknown`, or `MCPError` where the server answered with an error."""
        while not self.is_answered:
            try:
                item = await self._notes.receive()
                if callable(item):
                    item()
            except (anyio.EndOfStream, anyio.ClosedResourceError):
                await self._answered.wait()
        assert self._answer is not None
        self._notes.close()
        if not self._is_abandoned:
            # Only now may the call be forgotten: until its result is taken, another process could ask for it.
            self.is_taken = True
            self._forget()
        if isinstance(self._answer, JSONRPCError):
            raise named(MCPError.from_jsonrpc_error(self._answer), self.tool, self.arguments)
        return types.CallToolResult.model_validate(self._answer.result, by_name=False)

    async def __aiter__(self) -> AsyncIterator[types.ServerNotification]:
        async for item in self._notes:
            if callable(item):
                item()
            else:
                yield item

    async def cancel(self) -> None:
        """Notify the server that the result is no longer wanted."""
        if not self.is_taken:
            await self._cancel()

    # Used by the transports

    async def follow(self, answer: Callable[[], Awaitable[Message]]) -> None:
        self.end(await answer())

    def end(self, answer: Message) -> None:
        self._answer = answer_of(answer)
        self._put.close()
        self._answered.set()

    def close(self) -> None:
        """End the wait with an error: the client leaves. Another process may ask for the result."""
        if not self.is_answered:
            self._is_abandoned = True
            self.end(error(encode(self.id), CONNECTION_CLOSED, "Connection closed"))
        self._notes.close()

    async def take(self, message: Message) -> None:
        with contextlib.suppress(KeyError, ValidationError):
            parsed = parse(message)
            if isinstance(parsed, JSONRPCNotification):
                note = methods.parse_server_notification(parsed.method, self._version, parsed.params)
                await self._put.send(note)  # type: ignore[arg-type]
        await self._pass_on(message)

    def when_seen(self, mark: Callable[[], None]) -> None:
        """Call `mark` when the program has taken the notifications before it: waiting ones die with the process."""
        with contextlib.suppress(anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError):
            # Where there is no room, the previous one stays: then the next process sees a little more again.
            self._put.send_nowait(mark)
