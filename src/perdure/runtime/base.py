"""The interface between a session and what answers its requests, in plain values and texts.

A session *loads* a runtime with the first message that needs one, *sends* it messages, and lets it go when it is idle;
the record says all that the next one has to know. What the runtime says goes through the session's `Outlet`, in the
task of the handler that says it, so order and back-pressure come by themselves, call by call.

A runtime knows each request under a number that the session gave it (`Request.id`), never under the client's id: those
repeat after each reload. The numbers of one session never repeat.
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
    """Takes what a runtime says: a session.

    1. `notify`, `ask` and `answer` keep the order of their calls. The first two return where to wait before more is
       said, if too much is under way.
    2. What concerns a call that has ended is dropped; only `ask` raises, because its caller would wait for ever.
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
        """Send a notification, which belongs to that call or to none. The params are the session's from then on."""

    def new_ask_id(self) -> str:
        """Name the next ask. The name never repeats within a session, on any node."""

    def ask(self, ask_id: str, method: str, params: JsonObject | None, *, call: int | None) -> Flow | None:
        """Ask the client; its answer is sent to the runtime as a `Response` with that id. Raises `CallEnded` if the
        call has its answer."""

    def answer(self, call: int, body: bytes, *, failed: bool) -> None:
        """Answer a request with its result or, `failed`, with its error object, as JSON."""

    def interrupted(self, call: int) -> None:
        """Tell that a request has ended without an answer: it was cancelled, or cut short from within."""

    def handled(self, size: int) -> None:
        """Tell that a notification which was sent with that `size` has been handled."""

    def close_reader(self, call: int | None) -> None:
        """Close the connection on which a call's messages go (`None`: the standalone one); its client comes back."""


class Runtime(Protocol):
    """Answers one session's requests while it is in memory."""

    @property
    def keeps_state(self) -> bool:
        """Whether handlers keep something in it that dropping it would lose."""

    def send(self, message: Envelope, *, origin: object, size: int = 0) -> None:
        """Hand over a message, in the caller's context; messages are taken in their order.
        Of a request and a notification `id`, `method` and `params` count, of a response `raw`. `origin` is what the
        message came with (an HTTP request) or `None`; only the runtime and the edge look into it. A notification with a
        `size` is reported to `Outlet.handled`, once.
        """

    def mark_initialized(self) -> None:
        """Take note that the client's `initialized` has reached another node."""

    async def aclose(self) -> None:
        """End it in silence. Handlers are stopped; one that does not stop is left to itself after a short time."""


class Runtimes(Protocol):
    """Makes runtimes."""

    def load(self, record: SessionRecord, outlet: Outlet) -> Runtime:
        """Start a runtime for a session that may have had others before. Must be called in an event loop."""

    async def tools(self, record: SessionRecord, origin: object) -> Mapping[str, JsonObject]:
        """The tools that the server shows a session's client, by name. `origin`: as of `Runtime.send`. Raises whatever
        the server's handler raises."""


class NoListening(Exception):
    """The server does not serve `subscriptions/listen`."""


class ListeningRefused(Exception):
    """The server serves `subscriptions/listen`, and refuses a listener that is no client's."""


class ServerChanges(Protocol):
    """The server as the source of changes, to one listener in its own process."""

    @property
    def may_be_silent(self) -> bool:
        """Whether clients are served that listen to a server which knows no `subscriptions/listen`: its tools report
        changes by other means."""

    async def listen(
        self,
        uris: Sequence[str],
        *,
        on_acknowledged: Callable[[ChangeFilter], None],
        on_notification: Callable[[str, Mapping[str, Any] | None], Awaitable[None]],
    ) -> None:
        """Listen to all lists and to these resources, until it is cancelled or the server ends it.

        Raises `NoListening` or `ListeningRefused` in place of the acknowledgement."""

    async def digest(self, method: str) -> bytes | None:
        """A digest of the list whose changes a notification reports, as a request of this process's own gets it. `None`
        if the server does not say. Raises whatever the server's handler raises."""
