"""`perdure.connect` makes the client: the one line that a user of the SDK changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any

import httpx2
import mcp_types as types
from mcp.client.session import ElicitationFnT, ListRootsFnT, LoggingFnT, MessageHandlerFnT, SamplingFnT
from mcp.client.streamable_http import streamable_http_client

from perdure._core.reconnect import Patience
from perdure._core.sse import MAX_EVENT_BYTES
from perdure.client.callback_limit import CallbackLimit
from perdure.client.client import Client
from perdure.client.incoming import OnGap
from perdure.client.memory import Memory
from perdure.client.task_groups import enter, raised_as_it_was
from perdure.client.transport import Transport
from perdure.errors import Misuse
from perdure.remote.auth import Bearer, TokenProvider
from perdure.remote.endpoint import Endpoint, http_client
from perdure.remote.limits import Limits
from perdure.remote.state_file import StateStore, state_store

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
    callbacks = {
        "read_timeout_seconds": read_timeout_seconds,
        "sampling_callback": sampling_callback,
        "elicitation_callback": elicitation_callback,
        "list_roots_callback": list_roots_callback,
        "logging_callback": logging_callback,
        "message_handler": message_handler,
        "client_info": client_info,
        **options,
    }
    async with AsyncExitStack() as stack:
        http = await _http_client(stack, url, http_client, headers, auth)
        memory = stack.enter_context(closing(Memory(state_store(state), address(url))))
        endpoint = Endpoint(http, url, on_401="does not accept the credentials of `auth`, or wants some")
        ends = state is None if terminate_on_close is None else terminate_on_close
        limits = _limits(patience or Patience())
        lasting = partial(Transport, endpoint, limits, memory, on_gap=on_gap, ends_session=ends)
        plain = partial(_plain, url, http, rerun_safe_tools, callbacks)
        client = await enter(stack, _lasting(lasting, rerun_safe_tools, callbacks), plain)
        stack.push_async_exit(raised_as_it_was(stack.pop_all()))
        yield client


def address(url: str) -> str:
    """The server as the state knows it. A password or a key in the URL is not written, but another is noticed."""
    found = httpx2.URL(url).copy_with(userinfo=b"", fragment=None)
    if not found.query:
        return str(found)
    return f"{found.copy_with(query=None)}?{hashlib.sha256(found.query).hexdigest()[:16]}"


def _limits(patience: Patience) -> Limits:
    return Limits(
        patience=patience,
        listening=patience,
        handshake=ONCE,
        handshake_seconds=HANDSHAKE_SECONDS,
        message_bytes=MAX_EVENT_BYTES,
        counts_from_request=False,
    )


def _lasting(transport: Callable[..., Transport], rerun_safe_tools: bool, callbacks: dict[str, Any]) -> Client:
    limit = CallbackLimit()
    counted = {
        name: limit.counted(callbacks[name])
        for name in ("logging_callback", "message_handler")
        if callbacks[name] is not None
    }
    return Client(
        None,
        lambda on_renewed: transport(callback_limit=limit, on_renewed=on_renewed),
        callback_limit=limit,
        rerun_safe_tools=rerun_safe_tools,
        mode="legacy",
        **{**callbacks, **counted},
    )


def _plain(url: str, http: httpx2.AsyncClient, rerun_safe_tools: bool, callbacks: dict[str, Any]) -> Client:
    transport = streamable_http_client(url, http_client=http)
    limit = CallbackLimit()
    return Client(transport, None, callback_limit=limit, rerun_safe_tools=rerun_safe_tools, mode="auto", **callbacks)


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
