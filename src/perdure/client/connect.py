"""`perdure.connect` makes the client: the one line that a user of the SDK changes."""

import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from types import TracebackType
from typing import Any

import httpx2
import mcp_types as types
from mcp.client.session import ElicitationFnT, ListRootsFnT, LoggingFnT, MessageHandlerFnT, SamplingFnT
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR

from perdure._core.codes import NO_SERVER, UNREACHABLE
from perdure._core.reconnect import Patience
from perdure._core.sse import MAX_EVENT_BYTES
from perdure.client.client import Client
from perdure.client.incoming import OnGap, named
from perdure.client.memory import Memory, StateStore
from perdure.client.transport import Transport
from perdure.errors import Misuse
from perdure.remote.endpoint import Bearer, Endpoint, TokenProvider, http_client
from perdure.remote.stream import Limits

#: Seconds for one handshake, however lively the answer is: as long as an answer may be silent.
HANDSHAKE_SECONDS = 300.0
#: Patience is for servers that were there: a wrong address fails at once. A call that needs a new session, and
#: finds the server away, has patience of its own.
ONCE = Patience(max_time=0.0, max_tries=1)


@asynccontextmanager
async def connect(
    url: str,
    *,
    state: str | os.PathLike[str] | StateStore | None = None,
    headers: Mapping[str, str] | None = None,
    auth: httpx2.Auth | TokenProvider | None = None,
    patience: Patience | None = None,
    on_gap: OnGap | None = None,
    rerun_safe_tools: bool = False,
    terminate_on_close: bool | None = None,
    http_client: httpx2.AsyncClient | None = None,
    read_timeout_seconds: float | None = None,
    sampling_callback: SamplingFnT | None = None,
    elicitation_callback: ElicitationFnT | None = None,
    list_roots_callback: ListRootsFnT | None = None,
    logging_callback: LoggingFnT | None = None,
    message_handler: MessageHandlerFnT | None = None,
    client_info: types.Implementation | None = None,
    **options: Any,
) -> AsyncIterator[Client]:
    """A client of the SDK over a session that lasts.

    `state` is where the session is remembered: a path, or a store of your own. Without it the session lives as long as
    the block. `headers` go along with every request; `auth` is an `httpx2.Auth` (the SDK's OAuth providers are), or a
    function that gives a bearer token. `patience` says how long a server that is away is waited for. `on_gap` is called
    for events that the server no longer has. `rerun_safe_tools` lets calls whose outcome is unknown be made again,
    once, if the server marks the tool as read-only or idempotent. `terminate_on_close` ends the session with the
    block: the default without `state`, and not with it. The rest is handed to `mcp.Client`.
    """
    client: Callable[..., Client] = partial(
        Client,
        rerun_safe_tools=rerun_safe_tools,
        read_timeout_seconds=read_timeout_seconds,
        sampling_callback=sampling_callback,
        elicitation_callback=elicitation_callback,
        list_roots_callback=list_roots_callback,
        logging_callback=logging_callback,
        message_handler=message_handler,
        client_info=client_info,
        **options,
    )
    async with AsyncExitStack() as stack:
        http = await _http_client(stack, url, http_client, headers, auth)
        memory = stack.enter_context(closing(Memory(state, address(url))))
        endpoint = Endpoint(http, url, on_401="does not accept the credentials of `auth`, or wants some")
        ends = state is None if terminate_on_close is None else terminate_on_close
        lasting = partial(Transport, endpoint, _limits(patience), memory, on_gap=on_gap, ends_session=ends)
        plain = partial(streamable_http_client, url, http_client=http)
        yield await _enter(stack, client(None, lasting, mode="legacy"), lambda: client(plain(), None, mode="auto"))


def address(url: str) -> str:
    """The server as the state knows it. A password or a key in the URL is not written, but another is noticed."""
    found = httpx2.URL(url).copy_with(userinfo=b"", fragment=None)
    if not found.query:
        return str(found)
    return f"{found.copy_with(query=None)}?{hashlib.sha256(found.query).hexdigest()[:16]}"


def _limits(given: Patience | None) -> Limits:
    patience = given or Patience()
    return Limits(
        patience=patience,
        listening=patience,
        handshake=ONCE,
        handshake_seconds=HANDSHAKE_SECONDS,
        message_bytes=MAX_EVENT_BYTES,
        counts_from_request=False,
    )


async def _http_client(
    stack: AsyncExitStack,
    url: str,
    own: httpx2.AsyncClient | None,
    headers: Mapping[str, str] | None,
    auth: httpx2.Auth | TokenProvider | None,
) -> httpx2.AsyncClient:
    """The user's own, which stays open; or one for this block."""
    if own is not None:
        if headers is not None or auth is not None:
            raise Misuse("headers and auth are those of the http_client that was given: set them there")
        return own
    given = auth if auth is None or isinstance(auth, httpx2.Auth) else Bearer(auth)
    return await stack.enter_async_context(http_client(url, headers=headers, auth=given))


async def _enter(stack: AsyncExitStack, lasting: Client, plain: Callable[[], Client]) -> Client:
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
    except (MCPError, BaseExceptionGroup) as error:
        # The task groups of the SDK's session and of our link may stand around the one error.
        if isinstance(found := _innermost(error), MCPError):
            return found
        raise
    stack.push_async_exit(_raised_as_it_was(stack.pop_all()))
    return None


def _innermost(error: BaseException, *, until: BaseException | None = None) -> BaseException:
    """The one error in groups of one; a group that is looked for counts as one."""
    while error is not until and isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _raised_as_it_was(stack: AsyncExitStack) -> Callable[..., Awaitable[bool]]:
    """Leave through the task groups, and let what the block raised come out as the block raised it."""

    async def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        try:
            return bool(await stack.__aexit__(kind, error, trace))
        except BaseExceptionGroup as group:
            if error is not None and _innermost(group, until=error) is error:
                return False  # the caller raises it again
            raise

    return leave
