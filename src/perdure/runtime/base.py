"""The interface between a session and what answers its requests, in plain values and texts.

A session *loads* a runtime with the first message, *sends* it messages, and drops it when it is idle. The record has
all that the next runtime needs. A handler sends through the session's `Outlet`, in its own task, so each call has its
order and its back-pressure.

A runtime knows each request by a number of the session (`Request.id`), never by the client's id, because those repeat
after each reload. The numbers of one session never repeat.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from perdure._core.jsonrpc import Envelope, JsonObject
from perdure._core.listening import ChangeFilter
from perdure.store.records import SessionRecord


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

    def notify(self, method: str, params: JsonObject | None, *, call: int | None) -> Flow | None:
        """Send a notification of that call or of none. The caller must not use the params afterwards."""

    def new_ask_id(self) -> str:
        """Name the next ask. The name never repeats within a session, on any node."""

    def ask(self, ask_id: str, method: str, params: JsonObject | None, *, call: int | None) -> Flow | None:
        """Ask the client; its answer is sent to the runtime as a `Response` with that id. Raises `CallEnded` if the
        call has its answer."""

    def answer(self, call: int, body: bytes, *, failed: bool) -> None:
        """Answer a request with its result or, `failed`, with its error object, as JSON."""

    def interrupted(self, call: int) -> None:
        """Report that a request has ended without an answer: it was cancelled, or cut short from within."""

    def handled(self, size: int) -> None:
        """Report that a notification of that `size` was handled."""

    def close_reader(self, call: int | None) -> None:
        """Close the connection of a call's stream (`None`: of the standalone stream); its client comes back."""


class Runtime(Protocol):
    """Answers one session's requests while it is in memory."""

    @property
    def keeps_state(self) -> bool:
        """Whether handlers keep state in it that dropping it would lose."""

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        """Hand over a message, in the caller's context; messages are taken in their order.
        Requests and notifications are read from `id`, `method` and `params`, responses from `raw`. `origin` is the HTTP
        request of the message or `None`; only the runtime and the edge read it. A notification with a `size` is
        reported to `Outlet.handled`, once.
        """

    def mark_initialized(self) -> None:
        """Note that another node has received the client's `initialized`."""

    async def aclose(self) -> None:
        """End it without a message. Handlers are stopped; one that does not stop in a short time is left running."""


class Runtimes(Protocol):
    def load(self, record: SessionRecord, outlet: Outlet) -> Runtime:
        """Start a runtime for a session. Must be called in an event loop."""

    async def tools(self, record: SessionRecord, origin: object) -> Mapping[str, JsonObject]:
        """The tools that the server lists for a session's client, by name. `origin`: as in `Runtime.send`. Raises
        whatever the server's handler raises."""


class NoListening(Exception):
    """The server does not serve `subscriptions/listen`."""


class ServerChanges(Protocol):
    """Reports changes of the server to one listener in its own process."""

    @property
    def may_be_silent(self) -> bool:
        """Whether clients may listen to a server without `subscriptions/listen`, because its tools report changes by
        other means."""

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
