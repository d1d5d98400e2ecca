"""Reads requests of both eras: host and origin, the body within limits, media types, and the message.

The SDK's own functions judge what 2026-07-28 asks of headers."""

import asyncio
import contextlib
import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope

from perdure._core.durable_calls import MAX_KEY, CallClient, is_key
from perdure._core.envelope import KEY, KEY_HEADER, TASKS
from perdure._core.jsonrpc import Batch, Envelope, InvalidMessage, JsonObject, Request, parse_body
from perdure.http.credentials import principal_of
from perdure.http.refusals import HttpRefusal, Refusal
from perdure.settings import Settings

Headers = dict[bytes, bytes]

PACE_SECONDS = 20.0
PACE_BYTES = 10_000
"""A body must bring so many bytes in so much time, as long as it is not complete: what Apache asks for by default
(`RequestReadTimeout body=20,MinRate=500`), and less than the slowest telephone line brings."""

_JSON_KINDS = frozenset({b"*/*", b"application/*", b"application/json"})
_EVENT_KINDS = frozenset({b"*/*", b"text/*", b"text/event-stream"})

KEY_MEMBER = f"_meta[{KEY!r}]"
"""Where a request has its key, as a refusal calls it."""

REQUEST_ID = "perdure.request_id"
"""In the scope of a request whose message was read: the id that a refusal answers."""

_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "[::1]"})


class ClientGone(Exception):
    """The client left before its request had arrived."""


class HostAndOrigin:
    """Refuses requests from other sites (DNS rebinding), and headers that are too large."""

    def __init__(self, settings: Settings) -> None:
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in (*settings.allowed_origins, *settings.cors_origins))
        self._most = settings.max_headers

    def check(self, raw: list[tuple[bytes, bytes]], headers: Headers, *, beside: bool = False) -> None:
        """Raise `HttpRefusal` unless the request is admitted. `beside`: its path is beside the endpoint, where any IP
        address is a good host, because no name is rebound to an address (a scraper of metrics knows servers by their
        addresses), and the server's own pages are a good origin (a login has forms)."""
        if sum([len(name) + len(value) for name, value in raw]) > self._most:
            raise HttpRefusal(Refusal.HEADERS_TOO_LARGE, limit=self._most)
        names = [name for name, _ in raw if name in (b"host", b"origin")]
        for name in names:
            # A proxy in front may have judged another of two lines than this does (RFC 9112, 3.2).
            if (count := names.count(name)) > 1:
                raise HttpRefusal(Refusal.REPEATED_HEADER, count=count, name=name.decode().capitalize())
        host = headers.get(b"host", b"").decode("latin-1").lower()
        bare = _without_port(host)
        # Listed as it is, without its port, with any port (`name:*`), or everything is (`*`).
        is_known = bare in _THIS_MACHINE or bool({"*", host, bare, f"{bare}:*"} & self._hosts)
        if not is_known and beside:
            with contextlib.suppress(ValueError):
                ipaddress.ip_address(bare.strip("[]"))
                is_known = True
        if not is_known:
            raise HttpRefusal(Refusal.TEST_HOST if bare == "testserver" else Refusal.BAD_HOST, host=host or "(none)")
        if (given := headers.get(b"origin")) is None:
            return
        origin = given.decode("latin-1").lower()
        # Listed as it is (an origin without a port has the scheme's own), with any port (`…:*`), or everything is.
        if {"*", origin, f"{_without_port(origin)}:*"} & self._origins:
            return
        if beside and origin in (f"https://{host}", f"http://{host}"):
            return
        try:
            parts = urlsplit(origin)
            is_here = parts.scheme in ("http", "https") and _without_port(parts.netloc) in _THIS_MACHINE
        except ValueError:
            is_here = False  # no address at all
        if not is_here:
            raise HttpRefusal(Refusal.BAD_ORIGIN, origin=given.decode("latin-1"))


def _without_port(value: str) -> str:
    head, colon, port = value.rpartition(":")
    return head if colon and port.isascii() and port.isdigit() else value


class Bodies:
    """Reads bodies, and limits the memory that all incomplete bodies take together."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.max_body
        self._timeout = settings.stream_timeout
        self._most = max(settings.session_work, settings.max_body)
        self._held = 0
        """Bytes of bodies that are not complete yet. A body that arrives in one piece is never counted, so ordinary
        messages are served while unfinished bodies take all the room."""

    async def read(self, receive: Receive, headers: Headers) -> bytes:
        """Read the whole body. Raises `HttpRefusal` as soon as it is too large, too slow or too much."""
        declared = headers.get(b"content-length", b"")
        digits = declared.lstrip(b"0")
        # Python refuses to read a number of more than 4,300 digits, so one that has more than the limit is not read.
        if declared.isdigit() and (len(digits) > len(str(self._limit)) or int(digits or b"0") > self._limit):
            raise HttpRefusal(Refusal.BODY_TOO_LARGE, limit=self._limit)
        now = asyncio.get_running_loop().time
        end = now() + self._timeout
        chunks: list[bytes] = []
        size = lately = 0
        try:
            async with asyncio.timeout_at(min(end, now() + PACE_SECONDS)) as pace:
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientGone
                    chunk: bytes = message.get("body", b"")
                    chunks.append(chunk)
                    if size + len(chunk) > self._limit:
                        raise HttpRefusal(Refusal.BODY_TOO_LARGE, limit=self._limit)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
                    if self._held + len(chunk) > self._most:
                        raise HttpRefusal(Refusal.TOO_MANY_BODIES, limit=self._most)
                    size += len(chunk)
                    self._held += len(chunk)
                    lately += len(chunk)
                    if lately >= PACE_BYTES:
                        lately = 0
                        pace.reschedule(min(end, now() + PACE_SECONDS))
        except TimeoutError:
            if now() < end:
                refusal = Refusal.BODY_STALLED
                raise HttpRefusal(refusal, least=PACE_BYTES, seconds=f"{PACE_SECONDS:g}") from None
            raise HttpRefusal(Refusal.BODY_TOO_SLOW, limit=f"{self._timeout:g}") from None
        finally:
            self._held -= size


def replayed(body: bytes) -> Receive:
    """A `receive` that returns the body again, for tools that read the HTTP request."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def replayed_first(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body that was read already, once, and then what the client sends."""
    waiting = [body]

    async def receive_again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return receive_again


def require_accept(headers: Headers, *, json: bool = True, events: bool = True) -> None:
    """Raise `HttpRefusal` unless the client takes the media types of the response."""
    accept = headers.get(b"accept", b"").lower()
    given = {kind.partition(b";")[0].strip() for kind in accept.split(b",")}
    lacks_json = json and given.isdisjoint(_JSON_KINDS)
    if lacks_json or (events and given.isdisjoint(_EVENT_KINDS)):
        kinds = ["application/json"] * json + ["text/event-stream"] * events
        raise HttpRefusal(Refusal.NOT_ACCEPTABLE, kinds=" and ".join(kinds))


def require_json(headers: Headers) -> None:
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise HttpRefusal(Refusal.MEDIA_TYPE, seen=content_type.decode("latin-1") or "(none)")


def parse(scope: Scope, body: bytes) -> Envelope | Batch:
    try:
        message = parse_body(body)
    except InvalidMessage as error:
        raise HttpRefusal(Refusal.BAD_MESSAGE, id=error.id, code=error.code, reason=error.reason) from None
    if isinstance(message, Request):
        scope[REQUEST_ID] = message.id
    return message


@dataclass(frozen=True, kw_only=True, slots=True)
class ModernRequest:
    """A request of 2026-07-28 that the SDK's functions have found in order."""

    message: Request
    body: bytes
    client: CallClient
    owner: str
    http: HttpRequest
    size: int
    """Bytes of memory that it takes, estimated."""

    @property
    def params(self) -> JsonObject:
        return self.message.params or {}


def read_modern(scope: Scope, headers: Headers, body: bytes, *, size: int, json_only: bool) -> ModernRequest | None:
    """Read a request of 2026-07-28; `None` if it is to be refused, which the SDK's own handler does.

    A body that only our parser refuses is refused here, as one of a session is: the SDK's handler would run the call,
    and a key in it would mean nothing."""
    from mcp.shared.inbound import InboundLadderRejection, classify_inbound_request, find_duplicated_routing_header

    require_accept(headers, events=not json_only)
    message = parse(scope, body)
    named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    if not isinstance(message, Request) or find_duplicated_routing_header(named) is not None:
        return None
    route = classify_inbound_request(message.raw, headers=dict(named))
    if isinstance(route, InboundLadderRejection):
        return None
    capabilities = route.client_capabilities or {}
    return ModernRequest(
        message=message,
        body=body,
        client=CallClient(version=route.protocol_version, info=route.client_info, capabilities=capabilities),
        owner=principal_of(scope),
        http=HttpRequest(scope, replayed(body)),
        size=size,
    )


def needs_tasks() -> HttpRefusal:
    needed: JsonObject = {"requiredCapabilities": {"extensions": {TASKS: {}}}}
    return HttpRefusal(Refusal.NEEDS_TASKS, capability=TASKS, data=needed)


def read_key(request: ModernRequest) -> str | None:
    """The key of a call, from its `_meta` or its header."""
    meta = request.params.get("_meta") or {}
    given = {KEY_MEMBER: meta[KEY]} if KEY in meta else {}
    headers = request.http.headers.getlist(KEY_HEADER)
    if len(headers) > 1:  # a gateway may have added another one
        raise HttpRefusal(Refusal.REPEATED_HEADER, count=len(headers), name=KEY_HEADER)
    if headers:
        given[KEY_HEADER] = headers[0]
    for where, key in given.items():
        if not is_key(key):
            raise HttpRefusal(Refusal.BAD_KEY, where=where, limit=MAX_KEY, seen=repr(key))
    if len(set(given.values())) > 1:
        where, other = given
        raise HttpRefusal(Refusal.KEYS_DIFFER, where=where, other=other)
    return next(iter(given.values()), None)
