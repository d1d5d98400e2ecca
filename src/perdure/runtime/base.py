"""The interface between a session and what answers its requests, in plain values and texts.

A session *loads* a runtime with the first message, *sends* it messages, and drops it when it is idle. The record has
all that the next runtime needs. A handler sends through the session's `Outlet`, in its own task, so each call has its
order and its back-pressure.

A runtime knows each request by a number of the session (`Request.id`), never by the client's id, because those repeat
after each reload. The numbers of one session never repeat.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from perdure._core.durable_calls import CallClient
from perdure._core.jsonrpc import Envelope, JsonObject, Request
from perdure._core.limits import Caller
from perdure._core.listening import ChangeFilter
from perdure._core.settling import UpstreamCall
from perdure.store.records import SessionRecord

CALLER = "perdure.caller"
"""In the scope of an HTTP request: the `Caller` that the edge has found it to be from."""


class Flow(Protocol):
    """The place where a writer waits before it goes on."""

    async def wait_for_room(self) -> None: ...


class CallEnded(Exception):
    """A call that has its answer already cannot ask its client anything."""


class Outlet(Protocol):
    """Takes the messages of a runtime: a session.

    1. `notify`, `ask` and `answer` keep the order of their calls. The first two return where to wait before the next
       message, if too much is under way.
    2. Messages of a call that has ended are dropped; only `ask` raises, because its caller would wait for ever.
    3. A runtime that was closed answers, asks and reports nothing more. A handler that goes on may still notify, but
       not for its call.
    """

    @property
    def closes_early(self) -> bool:
        """Whether `close_reader` may be called for this session's calls."""

    @property
    def is_task(self) -> bool:
        """Whether this is a durable call whose answer its client may learn later, by a handle or by a key."""

    @property
    def is_home(self) -> bool:
        """Whether this node repeats the session's subscriptions and writes its standalone stream."""

    @property
    def is_listening(self) -> bool:
        """Whether the client reads the standalone stream."""

    @property
    def kept(self) -> bytes:
        """What `keep` kept, at any node."""

    @property
    def sticky(self) -> Sequence[bytes]:
        """The sticky requests of the session, as JSON, for a runtime that begins again by itself."""

    def notify(self, method: str, params: JsonObject | None, *, call: int | None) -> Flow | None:
        """Send a notification of that call or of none. The caller must not use the params afterwards."""

    def new_ask_id(self) -> str:
        """Name the next ask. The name never repeats within a session, on any node."""

    def ask(self, ask_id: str, method: str, params: JsonObject | None, *, call: int | None) -> Flow | None:
        """Ask the client; its answer is sent to the runtime as a `Response` with that id. Raises `CallEnded` if the
        call has its answer."""

    async def begin_round(self, call: int) -> None:
        """Report that the tool of a call is called again with what its client has answered: the steps that it has done
        return."""

    def answer(self, call: int, body: bytes, *, failed: bool) -> None:
        """Answer a request with its result or, `failed`, with its error object, as JSON."""

    def interrupted(self, call: int, why: str = "its runtime failed") -> None:
        """Report that a request has ended without an answer: it was cancelled, or cut short from within. It does not
        run again. `why`: part of a sentence."""

    def crashed(self, call: int, why: str, *, may_run_again: bool | None) -> None:
        """Report that a server outside this process has lost a request that it may have run. It runs again, in this
        runtime, if its method or (`may_run_again`) its tool allows that; otherwise its outcome is unknown. `why`: part
        of a sentence."""

    def replace_result(self, result: bytes) -> None:
        """Replace the recorded result of `initialize`, because a server outside this process says another one now."""

    def unsubscribe(self, subscription: bytes) -> None:
        """Drop one of the sticky requests, a subscription, because the server refuses it now."""

    def end(self, why: str) -> None:
        """End the session soon, because it cannot go on with its server. `why`: a sentence for its client."""

    def keep(self, state: bytes) -> None:
        """Keep with the session's record what a runtime at any node needs to go on (`SessionRecord.upstream`)."""

    async def take_home(self) -> None:
        """Become the session's home, which alone begins another session at a server outside, and learn what another
        node has kept. Raises `PerdureError`."""

    async def keep_as_home(self, state: bytes) -> bool:
        """Keep as `keep` does, and wait until it is written. Returns `False` where another node has become the home
        meanwhile: it may have begun a session at the server as well, and then that one counts."""

    def keep_call(self, call: int, kept: UpstreamCall) -> None:
        """Keep with a call's row how the runtime of a later process can go on with it."""

    def handled(self, size: int) -> None:
        """Report that a notification of that `size` was handled."""

    def close_reader(self, call: int | None) -> None:
        """Close the connection of a call's stream (`None`: of the standalone stream); its client comes back."""


class Runtime(Protocol):
    """Answers one session's requests while it is in memory. What has a default concerns some kinds only."""

    __slots__ = ()

    @property
    def keeps_state(self) -> bool:
        """Whether handlers keep state in it that dropping it would lose."""
        return False

    @property
    def begun(self) -> asyncio.Future[None] | None:
        """Done when a durable call was handed to a server that had to be started or reached first: the time until its
        client gets a handle counts from then. `None`: it counts at once."""
        return None

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        """Hand over a message, in the caller's context; messages are taken in their order.
        Requests and notifications are read from `id`, `method` and `params`, responses from `raw`. `origin` is the HTTP
        request of the message or `None`; only the runtime and the edge read it. A notification with a `size` is
        reported to `Outlet.handled`, once.
        """

    def mark_initialized(self) -> None:
        """Note that another node has received the client's `initialized`."""
        return

    def on_home_moved(self) -> None:
        """This node has become the session's home, or is it no longer (`Outlet.is_home`). Called only where
        `Runtimes.repeats_sticky`."""
        return

    def follow(self, call: Request, state: JsonObject, *, origin: object) -> None:
        """Go on with a request that a server outside this process still runs for an earlier process, by what was kept
        (`Outlet.keep_call`). It is answered as one that was sent. Called only where something was kept."""

    async def aclose(self, *, ended: bool) -> None:
        """End it without a message. Handlers are stopped; one that does not stop in a short time is left running.
        `ended`: its session is over, and no other runtime will go on with it."""


class Runtimes(Protocol):
    @property
    def needs_principal(self) -> bool:
        """Whether a request of a principal can run again only with the credentials of that principal."""

    @property
    def waits_for_readers(self) -> bool:
        """Whether a call can wait for its slow reader (`Flow`). Otherwise the oldest events of its stream are trimmed,
        as those of the standalone stream are."""

    @property
    def runs_at_home(self) -> bool:
        """Whether the requests of a session run at its home alone, because what answers them is there: a process."""

    @property
    def repeats_sticky(self) -> bool:
        """Whether a runtime repeats the session's sticky requests by itself, when it begins and when the home moves
        (`Outlet.sticky`)."""

    @property
    def outlives_runtimes(self) -> bool:
        """Whether the server goes on with a session while no runtime is loaded, and may send something."""

    @property
    def answers_within(self) -> float:
        """Seconds that the server may take to answer a request that no client waits for, its start included."""

    def admitting(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """Keep room for one more session of a caller, during the block in which it opens. Raises `TooManyProcesses`
        before the block."""

    def may_run_again(self, record: SessionRecord, tool: str) -> bool | None:
        """Whether a tool says so of itself, if that is known without asking."""

    def load(self, record: SessionRecord, outlet: Outlet) -> Runtime:
        """Start a runtime for a session. Must be called in an event loop."""

    async def tools(self, record: SessionRecord, origin: object) -> Mapping[str, JsonObject]:
        """The tools that the server lists for a session's client, by name. `origin`: as in `Runtime.send`. Raises
        whatever the server's handler raises."""


class Tools(Protocol):
    """The server's descriptions of its tools, for durable calls."""

    @property
    def serves_tasks(self) -> bool:
        """Whether the server answers the tasks extension by itself."""

    @property
    def server_info(self) -> JsonObject:
        """The server's entry in the `_meta` of results."""

    async def tool(self, name: str, owner: str, client: CallClient, origin: Any) -> JsonObject | None:
        """A tool as the caller's `tools/list` shows it; `None` if it is not there, or not in time. `origin`: the
        caller's HTTP request."""

    async def tools(self, owner: str, client: CallClient, origin: Any) -> Sequence[JsonObject]:
        """All tools as the caller's `tools/list` shows them, as far as they are known in time. A server outside this
        process is not started for them."""


class NoListening(Exception):
    """The server does not serve `subscriptions/listen`."""


class ServerChanges(Protocol):
    """Reports changes of the server to one listener in its own process."""

    @property
    def may_be_silent(self) -> bool:
        """Whether clients may listen to a server without `subscriptions/listen`, because its tools report changes by
        other means."""

    @property
    def acknowledges_within(self) -> float:
        """Seconds that the server may take to acknowledge a subscription, its start included."""

    @property
    def may_recover(self) -> bool:
        """Whether a server that fails to acknowledge a subscription may do so later: it is outside this process."""

    async def listen(
        self,
        uris: Sequence[str],
        *,
        on_acknowledged: Callable[[ChangeFilter], None],
        on_notification: Callable[[str, Mapping[str, Any] | None], Awaitable[None]],
    ) -> None:
        """Listen to all lists and to these resources, until it is cancelled or the server ends it.

        Raises `NoListening`, or whatever the server's handler raises."""

    async def digest(self, method: str) -> bytes | None:
        """A digest of the list whose change a notification reports, over all its pages. `None` if the server does not
        say. Raises whatever the server's handler raises."""
