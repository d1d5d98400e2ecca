"""`perdure.connect` makes the SDK's client over a session that lasts: the one line that a user of the SDK changes.

The client names outcomes, lists earlier calls, and calls safe tools again.
"""

import functools
import hashlib
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext
from functools import partial
from typing import Any

import httpx2
import mcp
import mcp_types as types
from mcp.client import ClientExtension, advertise
from mcp.client.session import (
    ElicitationFnT,
    ListRootsFnT,
    LoggingFnT,
    MessageHandlerFnT,
    SamplingFnT,
)
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from perdure._core.codes import INTERNAL_ERROR, NO_SERVER, UNREACHABLE
from perdure._core.envelope import CALLS, TASKS
from perdure._core.reconnect import Patience
from perdure._core.sse import MAX_EVENT_BYTES
from perdure.client.incoming import CallbackLimit, Incoming, OnGap, named, naming
from perdure.client.memory import Memory, StateStore
from perdure.client.modern_era import ModernEra
from perdure.client.pending import PendingCall
from perdure.client.session_era import SessionEra
from perdure.client.transport import Transport
from perdure.errors import Misuse
from perdure.remote.endpoint import Bearer, Endpoint, TokenProvider
from perdure.remote.endpoint import http_client as new_http_client
from perdure.remote.route import ClientLimits

#: Seconds for one handshake, however lively the answer is: as long as an answer may be silent.
HANDSHAKE_SECONDS = 300.0
#: A server that never answered is not waited for: a wrong address fails at once. A call that needs a new session, and
#: does not reach the server, has patience of its own.
ONCE = Patience(max_time=0.0, max_tries=1)


class Client(mcp.Client):
    """The SDK's client (`mcp.Client`) over a session that lasts. `perdure.connect` makes it."""

    def __init__(self, era: Callable[..., SessionEra | ModernEra], **options: Any) -> None:
        """`era` makes what is below the SDK's client."""
        limit = self._callback_limit = CallbackLimit()
        self._transport = Transport(era(self, callback_limit=limit))
        for name in ("logging_callback", "message_handler"):
            if options[name] is not None:
                options[name] = limit.counted(options[name])
        super().__init__(self._transport.streams(), **options)

    async def __aenter__(self) -> "Client":
        await super().__aenter__()
        if isinstance(self._transport.era, ModernEra):
            self._transport.era.begin()
        return self

    @property
    def session_id(self) -> str | None:
        """The session as the server knows it; None where there are no sessions."""
        return self._transport.era.session_id

    def pending(self) -> list[PendingCall]:
        """The calls that an earlier process has left running and whose results were not taken yet."""
        return self._transport.pending

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
        """As the SDK's; a call whose outcome is unknown raises `OutcomeUnknown`.

        The result is not checked against the tool's output schema, because the SDK asks for that after the answer.
        At 2026-07-28 `meta` may have a key of the caller's own (`dev.perdure/key`): calls with equal keys are one call,
        also those of different processes.
        """
        if progress_callback is not None:
            progress_callback = self._callback_limit.counted(progress_callback)
        more: dict[str, Any] = {"input_responses": input_responses, "request_state": request_state}
        transport = self._transport
        rounds = transport.era.rounds(meta) if isinstance(transport.era, ModernEra) else nullcontext(meta)
        with naming(name, arguments), rounds as keyed, transport.handover(name, arguments) as handover:
            more["meta"] = handover.meta(keyed)
            found = await super().call_tool(name, arguments, read_timeout_seconds, progress_callback, **more)
            return handover.unmasked(found)


def _named(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a method of the SDK's client, so that it raises the errors of this package."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        with naming():
            return await method(*args, **kwargs)

    return call


for _name, _method in inspect.getmembers(mcp.Client, inspect.isfunction):
    # A deprecated method is a wrapper around the function.
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
    rerun_safe_tools: bool | None = None,
    terminate_on_close: bool | None = None,
    wait_for_server: bool = False,
    http_client: httpx2.AsyncClient | None = None,
    mode: str = "auto",
    read_timeout_seconds: float | None = None,
    sampling_callback: SamplingFnT | None = None,
    elicitation_callback: ElicitationFnT | None = None,
    list_roots_callback: ListRootsFnT | None = None,
    logging_callback: LoggingFnT | None = None,
    message_handler: MessageHandlerFnT | None = None,
    client_info: types.Implementation | None = None,
    extensions: Sequence[ClientExtension] | None = None,
    **options: Any,
) -> AsyncIterator[Client]:
    """A client of the SDK over a session that lasts, or over requests that are sent until they are answered.

    `state` is where the session, and calls that run, are remembered: a path, or a store of your own. Without it they
    live as long as the block. `headers` go along with every request; `auth` is an `httpx2.Auth` (the SDK's OAuth
    providers are), or a function that returns a bearer token. `patience` says how long a server that is away is waited
    for. `on_gap` is called for events that the server no longer has. `rerun_safe_tools` lets calls whose outcome is
    unknown be made again, if the server marks the tool as read-only or idempotent: once in a session (the default is
    not), a few times at 2026-07-28 (the default, because that revision has clients repeat requests).
    `terminate_on_close` ends the session with the block: the default without `state`, and not with it.
    `wait_for_server` has `patience` for a server that does not answer yet; otherwise a wrong address fails at once.

    `mode` says which revisions are spoken: "legacy" those with sessions, "2026-07-28" that one, which has none, and
    "auto" what the state was left with, else sessions, else 2026-07-28. The rest is handed to `mcp.Client`.
    """
    if mode not in ("auto", "legacy", *MODERN_PROTOCOL_VERSIONS):
        raise Misuse(f"mode is {mode!r}, and must be 'auto', 'legacy' or one of {list(MODERN_PROTOCOL_VERSIONS)}")
    client: Callable[..., Client] = partial(
        Client,
        read_timeout_seconds=read_timeout_seconds,
        sampling_callback=sampling_callback,
        elicitation_callback=elicitation_callback,
        list_roots_callback=list_roots_callback,
        logging_callback=logging_callback,
        message_handler=message_handler,
        client_info=client_info,
        **options,
    )
    if http_client is not None and (headers is not None or auth is not None):
        raise Misuse("headers and auth are those of the http_client that was given: set them there")
    limits = limits_of(patience, waits=wait_for_server)
    async with AsyncExitStack() as stack:
        if http_client is None:
            given = auth if auth is None or isinstance(auth, httpx2.Auth) else Bearer(auth)
            http_client = await stack.enter_async_context(new_http_client(url, headers=headers, auth=given))
        memory = stack.enter_context(closing(Memory(state, address(url))))
        endpoint = Endpoint(http_client, url, on_401="does not accept the credentials of `auth`, or wants some")

        def era(kind: Callable[..., Any], client: Client, callback_limit: CallbackLimit, **options: Any) -> Any:
            incoming = Incoming(memory, callback_limit, on_gap)
            return kind(incoming, incoming.route(endpoint, limits), session=lambda: client.session, **options)

        ends = state is None if terminate_on_close is None else terminate_on_close
        with_session = partial(era, SessionEra, reruns=rerun_safe_tools is True, ends_session=ends)
        without = partial(era, ModernEra, reruns=rerun_safe_tools is not False)
        # The extensions that the era without sessions follows. A user's own for tasks is left alone.
        known = {getattr(one, "identifier", None) for one in extensions or ()}
        followed = [*(extensions or ()), *(advertise(own) for own in (TASKS, CALLS) if own not in known)]
        sessions = partial(client, with_session, mode="legacy", extensions=extensions)
        requests = partial(client, without, mode="auto", extensions=followed)
        ways = [sessions, requests] if mode == "auto" else [sessions if mode == "legacy" else requests]
        if memory.state.durable_calls or (memory.state.discovered is not None and memory.state.handshake is None):
            ways.reverse()
        yield await _enter(stack, *ways)


def address(url: str) -> str:
    """The server's address as the state keeps it: without a password or a key, and different for another key."""
    found = httpx2.URL(url).copy_with(userinfo=b"", fragment=None)
    if not found.query:
        return str(found)
    return f"{found.copy_with(query=None)}?{hashlib.sha256(found.query).hexdigest()[:16]}"


def limits_of(given: Patience | None, *, waits: bool = False) -> ClientLimits:
    """`waits`: the first handshake has patience as well."""
    patience = given or Patience()
    return ClientLimits(
        patience=patience,
        listening=patience,
        handshake=patience if waits else ONCE,
        handshake_seconds=HANDSHAKE_SECONDS + (patience.max_time if waits else 0.0),
        message_bytes=MAX_EVENT_BYTES,
        counts_from_request=False,
    )


async def _enter(stack: AsyncExitStack, *ways: Callable[[], Client]) -> Client:
    """Enter the first way that the server knows."""
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
    """The one error in groups of one; the group `until` counts as one."""
    while error is not until and isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def _entered(client: Client) -> AsyncIterator[None]:
    """Enter the client. An error of the caller's block is raised as it is, not in a group of the task groups."""
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
