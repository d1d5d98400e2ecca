"""Enters and leaves the task groups of the SDK's client and of ours, so that an error comes out as it was raised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType

from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR

from perdure._core.codes import NO_SERVER, UNREACHABLE
from perdure.client.client import Client
from perdure.client.outcomes import named


async def enter(stack: AsyncExitStack, lasting: Client, plain: Callable[[], Client]) -> Client:
    """Sessions first: they are what lasts. A server that knows none is spoken to as the SDK does."""
    refusal = await _try(stack, lasting)
    if refusal is None:
        return lasting
    reason = refusal.data.get("reason") if isinstance(refusal.data, dict) else None
    # Another way to begin does not help where the user must act, or where the server fails.
    is_final = refusal.code == NO_SERVER and reason not in ("not_found", "not_mcp", "moved", "refused")
    if is_final or refusal.code in (UNREACHABLE, INTERNAL_ERROR):
        raise named(refusal) from None
    without = plain()
    if await _try(stack, without) is not None:
        raise refusal from None
    return without


async def _try(stack: AsyncExitStack, client: Client) -> MCPError | None:
    """Enter a client; the error by which the server refused it, if it did."""
    try:
        await stack.enter_async_context(client)
    except MCPError as error:
        return error
    except BaseExceptionGroup as group:
        # The task groups of the SDK's session and of our link stand around the one error.
        found = innermost(group)
        if isinstance(found, MCPError):
            return found
        raise
    return None


def innermost(error: BaseException) -> BaseException:
    """The one error in groups of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def raised_as_it_was(stack: AsyncExitStack) -> Callable[..., Awaitable[bool]]:
    """Leave through the task groups, and let what the block raised come out as the block raised it."""

    async def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        try:
            return bool(await stack.__aexit__(kind, error, trace))
        except BaseExceptionGroup as group:
            found: BaseException = group
            while found is not error and isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
                found = found.exceptions[0]
            if found is error:
                return False  # the caller raises it again
            raise

    return leave
