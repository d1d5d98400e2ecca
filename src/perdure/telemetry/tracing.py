"""Traces requests: OpenTelemetry spans with stable names.

Only OpenTelemetry's API is needed. Without its SDK a request costs a few microseconds more and an event nothing: no
span and no attribute belongs to a single event.

A request's span is current while the request is handled, and the runtime gets its messages in that context, so the
spans that the MCP SDK makes for handlers are its children. The parent of a request's span is the span of the
application around us if that is instrumented, else the one that the request's headers name (`traceparent`, or what the
configured propagators read).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.propagate import extract, inject
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, get_current_span, get_tracer
from opentelemetry.trace import set_span_in_context as within

from perdure._core.text import printable

if TYPE_CHECKING:
    from perdure.telemetry.counters import Counters

Headers = Sequence[tuple[bytes, bytes]]
"""As in ASGI: names in lower case."""

REQUESTS: Final = {"POST": "perdure.post", "GET": "perdure.get", "DELETE": "perdure.delete"}
SESSION: Final = "perdure.session"
STREAM: Final = "perdure.stream"
ERROR: Final = "error.type"

_MOST_CHARS = 128
"""Of a header that a client made up; positions of ours are shorter."""

_tracer = get_tracer("perdure")
_NO_SPAN = nullcontext()


class TracedReader(Protocol):
    """The attributes of a reader that the span of its request uses."""

    stream: Any
    cursor: int
    live_from: int
    failure: Exception | None


class RequestSpan:
    """The span of one request at the endpoint, from its arrival until its response has ended."""

    __slots__ = ("_reader", "_span", "_token")

    def __init__(self, span: Span, context: Context | None) -> None:
        self._span = span
        self._token: Token[Context] | None = None if context is None else contexts.attach(within(span, context))
        self._reader: TracedReader | None = None

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._token is None:
            return
        if self._reader is not None:
            error = error or self._reader.failure
        if isinstance(error, Exception):  # a cancelled request is a client that left, or the end of the process
            self._span.record_exception(error)
            self._span.set_attribute(ERROR, type(error).__qualname__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        contexts.detach(self._token)
        self._span.end()

    def refused(self, name: str, status: int, sentence: str) -> None:
        """Record a refusal of the endpoint. `nothing_more` is not an error: the stream was read to its end."""
        self._span.set_attributes({ERROR: name, "http.response.status_code": status})
        if name != "nothing_more":
            self._span.set_status(Status(StatusCode.ERROR, sentence))

    def reads(self, reader: TracedReader, *, session: str, resumes: bool, counters: Counters) -> Replay | None:
        """Record that the response is a stream. Returns the replay of the events that its reader has missed, if it came
        by GET (`resumes`) and missed any."""
        missed = max(0, reader.live_from - reader.cursor) if resumes else 0
        stream: str = reader.stream.id
        replay = Replay(session=session, stream=stream, missed=missed, counters=counters) if missed else None
        if self._span.is_recording():
            self._reader = reader
            self._span.set_attributes(_reading(session, stream, missed))
        return replay


class Replay:
    """The span and the duration of a replay: from the arrival of a reader until it has the events that existed then."""

    __slots__ = ("_began", "_counters", "_span")

    def __init__(self, *, session: str, stream: str, missed: int, counters: Counters) -> None:
        self._counters = counters
        self._began = time.perf_counter()
        self._span = _tracer.start_span("perdure.replay", attributes=_reading(session, stream, missed))

    def at(self, cursor: int, *, end: int) -> Replay | None:
        """Record how far the reader has got. Returns this replay, or `None` once it is complete."""
        if cursor < end:
            return self
        self._counters.replay_seconds.observe(time.perf_counter() - self._began)
        self._counters.replays_completed += 1
        self._span.end()
        return None

    def give_up(self) -> None:
        """Record that the reader has left, or was ended, before the replay was complete."""
        self._counters.replays_abandoned += 1
        if self._span.is_recording():
            self._span.set_status(Status(StatusCode.ERROR, "the reader left before it had caught up"))
            self._span.end()


class _AsgiHeaders(Getter[dict[bytes, bytes]]):
    def get(self, carrier: dict[bytes, bytes], key: str) -> list[str] | None:
        value = carrier.get(key.lower().encode())
        return None if value is None else [value.decode("latin-1")]

    def keys(self, carrier: dict[bytes, bytes]) -> list[str]:
        return [name.decode("latin-1") for name in carrier]


_HEADERS = _AsgiHeaders()
_UNTRACED = RequestSpan(INVALID_SPAN, None)
"""The span of every request while no tracer records and no trace passes through, so that an idle stream keeps none."""


def request(method: str, headers: Headers) -> RequestSpan:
    """Begin the span of a request. Use it with `with`, around all work for the request."""
    current = contexts.get_current()
    inside = get_current_span(current).get_span_context().is_valid
    context = current
    if not inside:
        named = dict(headers)
        # Lines of one name are one list (RFC 9110, 5.3); joining them makes a header invalid that may stand only once.
        if len(named) != len(headers):
            named = {}
            for name, value in headers:
                named[name] = named[name] + b"," + value if name in named else value
        context = extract(named, context=current, getter=_HEADERS)
    kind = SpanKind.INTERNAL if inside else SpanKind.SERVER
    span = _tracer.start_span(REQUESTS.get(method, "perdure.request"), context=context, kind=kind)
    if context is current and not span.get_span_context().is_valid:
        return _UNTRACED
    position = next((value for name, value in headers if name == b"last-event-id"), b"") if method == "GET" else b""
    if position and span.is_recording():
        span.set_attribute("perdure.last_event_id", printable(position[:_MOST_CHARS].decode("latin-1")))
    return RequestSpan(span, context)


def add_attributes(**attributes: str) -> None:
    """Add attributes to the current request's span: `session` (never its whole id), `stream`."""
    span = get_current_span()
    if span.is_recording():
        span.set_attributes({f"perdure.{name}": value for name, value in attributes.items()})


def load(session: str) -> AbstractContextManager[Span]:
    """The span of loading a session from its record."""
    return _tracer.start_as_current_span("perdure.load", attributes={SESSION: session})


@contextmanager
def ask(method: str, ask_id: str, meta: dict[str, Any]) -> Iterator[None]:
    """The span of a question to the client, as the SDK names it. `meta` gets the trace context for the client."""
    attributes = {"mcp.method.name": method, "jsonrpc.request.id": ask_id}
    with _tracer.start_as_current_span(f"MCP send {method}", kind=SpanKind.CLIENT, attributes=attributes):
        inject(meta)
        yield


def tool_step(label: str) -> AbstractContextManager[object]:
    """The span of a step of a tool, below that of its handler. A step that returns has none."""
    if not get_current_span().is_recording():
        return _NO_SPAN
    return _tracer.start_as_current_span("perdure.step", attributes={"perdure.step": label})


def settle(session: str, stream: str, *, outcome: str) -> AbstractContextManager[Span]:
    """The span of settling a call. Outcomes: `rerun`, `unknown`, `cancelled`."""
    attributes = {SESSION: session, STREAM: stream, "perdure.outcome": outcome}
    return _tracer.start_as_current_span("perdure.settle", attributes=attributes)


def _reading(session: str, stream: str, missed: int) -> dict[str, str | int]:
    replay = "active" if missed else "none"
    return {SESSION: session, STREAM: stream, "perdure.replay": replay, "perdure.missed_events": missed}
