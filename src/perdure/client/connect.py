"""`perdure.connect` makes the SDK's client over a session that lasts: the one line that a user of the SDK changes.

The client names outcomes, lists earlier calls, and calls safe tools again.
"""

import contextlib
import functools
import hashlib
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Any

import httpx2
import mcp
import mcp_types as types
from mcp.client import Transport as SDKTransport
from mcp.client.session import ElicitationFnT, ListRootsFnT, LoggingFnT, MessageHandlerFnT, SamplingFnT
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError

from perdure._core.codes import INTERNAL_ERROR, NO_SERVER, UNREACHABLE
from perdure._core.reconnect import Patience
from perdure._core.sse import MAX_EVENT_BYTES
from perdure.client.incoming import CallbackLimit, OnGap, named, naming
from perdure.client.memory import Memory, StateStore
from perdure.client.pending import PendingCall
from perdure.client.transport import Transport
from perdure.errors import Misuse, OutcomeUnknown, Unreachable
from perdure.remote.endpoint import Bearer, Endpoint, TokenProvider, http_client
from perdure.remote.stream import Limits
from perdure.telemetry.events import log_event

#: Seconds for one handshake, however lively the answer is: as long as an answer may be silent.
HANDSHAKE_SECONDS = 300.0
#: Patience is for servers that were there: a wrong address fails at once. A call that needs a new session, and
#: finds the server away, has patience of its own.
ONCE = Patience(max_time=0.0, max_tries=1)
#: Pages of `tools/list` that are read to find out what a tool says of itself.
TOOL_PAGES = 100


class Client(mcp.Client):
    """Everything that `mcp.Client` has, over a session that lasts. Made by `perdure.connect`."""

    def __init__(
        self,
        plain: SDKTransport | None,
        lasting: Callable[..., Transport] | None,
        *,
        rerun_safe_tools: bool,
        **options: Any,
    ) -> None:
        """`plain` is a transport of the SDK, `lasting` makes ours; one of them is given."""
        limit = self._callback_limit = CallbackLimit()
        self._rerun_safe_tools = rerun_safe_tools
        self._transport: Transport | None = None
        if lasting is not None:
            # Another session may be another server's: what was negotiated is that of the new one.
            self._transport = lasting(callback_limit=limit, on_renewed=lambda result: self.session.adopt(result))
            plain = self._transport.streams()
            for name in ("logging_callback", "message_handler"):
                if options[name] is not None:
                    options[name] = limit.counted(options[name])
        assert plain is not None
        super().__init__(plain, **options)

    @property
    def session_id(self) -> str | None:
        """The session as the server knows it; None where there are no sessions."""
        handshake = None if self._transport is None else self._transport.handshake
        return None if handshake is None else handshake.session or None

    def pending(self) -> list[PendingCall]:
        """The calls that an earlier process has left running and whose results were not taken yet."""
        return [] if self._transport is None else self._transport.pending

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        read_timeout_seconds: float | None = None,
        progress_callback: ProgressFnT | None = None,
        *,
        input_responses: types.InputResponses | None = None,
        request_state: str | None = None,
        meta: types.RequestParamsMeta | None = None,
    ) -> types.CallToolResult:
        """As the SDK's; a call whose outcome is unknown raises `OutcomeUnknown`."""
        if progress_callback is not None:
            progress_callback = self._callback_limit.counted(progress_callback)
        more: dict[str, Any] = {"input_responses": input_responses, "request_state": request_state, "meta": meta}
        call = partial(super().call_tool, name, arguments, read_timeout_seconds, progress_callback, **more)
        try:
            with naming(name, arguments):
                return await call()
        except OutcomeUnknown as unknown:
            if not await self._may_be_called_again(name, unknown):
                raise
            log_event(logging.INFO, "client.call_again", "a tool that may run twice is called again", tool=name)
            try:
                with naming(name, arguments):
                    return await call()
            except Unreachable:
                raise unknown from None  # the first one may have run, whatever became of the second

    async def _may_be_called_again(self, tool: str, unknown: OutcomeUnknown) -> bool:
        """Whether the caller allows it, and the server marks the tool as read-only or idempotent."""
        # What the server calls unknown it has run again already, where it could (docs/protocol.md, Settling).
        told_by_client = isinstance(unknown.data, dict) and unknown.data.get("told_by") == "client"
        if not self._rerun_safe_tools or not told_by_client:
            return False
        cursor: str | None = None
        with contextlib.suppress(MCPError):  # then it cannot be found out
            for _ in range(TOOL_PAGES):
                page = await self.list_tools(cursor=cursor)
                hints = next((found.annotations for found in page.tools if found.name == tool), None)
                if hints is not None:
                    return hints.read_only_hint is True or hints.idempotent_hint is True
                if (cursor := page.next_cursor) is None:
                    break
        return False


def _named(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A method of the SDK's client whose errors have the names that ours have."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        with naming():
            return await method(*args, **kwargs)

    return call


for _name, _method in inspect.getmembers(mcp.Client, inspect.isfunction):
    # Behind a mark of deprecation stands the function itself.
    if not _name.startswith("_") and _name != "call_tool" and inspect.iscoroutinefunction(inspect.unwrap(_method)):
        setattr(Client, _name, _named(_method))


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
        ours = partial(client, None, lasting, mode="legacy")
        yield await _enter(stack, ours, lambda: client(plain(), None, mode="auto"))


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


async def _enter(stack: AsyncExitStack, *ways: Callable[[], Client]) -> Client:
    """Sessions first: they are what lasts. A server that knows none is spoken to as the SDK does."""
    refusals: list[MCPError] = []
    for make in ways:
        client = make()
        try:
            await stack.enter_async_context(_entered(client))
            return client
        except (MCPError, BaseExceptionGroup) as error:
            # The task groups of the SDK's session and of our link may stand around the one error.
            if not isinstance(found := _innermost(error), MCPError):
                raise
            refusals.append(found)
        first = refusals[0]
        reason = first.data.get("reason") if isinstance(first.data, dict) else None
        # Another way to begin does not help where the user must act, or where the server fails.
        is_final = first.code == NO_SERVER and reason not in ("not_found", "not_mcp", "moved", "refused")
        if is_final or first.code in (UNREACHABLE, INTERNAL_ERROR):
            raise named(first) from None
    raise refusals[0] from None


def _innermost(error: BaseException, *, until: BaseException | None = None) -> BaseException:
    """The one error in groups of one; a group that is looked for counts as one."""
    while error is not until and isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def _entered(client: Client) -> AsyncIterator[None]:
    """Leave through the task groups, and let what the block raised come out as the block raised it."""
    raised: BaseException | None = None
    try:
        async with client:
            try:
                yield
            except BaseException as error:
                raised = error
                raise
    except BaseExceptionGroup as group:
        if raised is None or _innermost(group, until=raised) is not raised:
            raise
    else:
        return
    raise raised
