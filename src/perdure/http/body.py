"""Reads a request: the headers that every one must have, its body within limits, and the media types."""

import asyncio
import ipaddress
from urllib.parse import urlsplit

from starlette.types import Message, Receive

from perdure.http.refusals import Refusal, Refused
from perdure.settings import Settings

Headers = dict[bytes, bytes]

PACE_SECONDS = 20.0
PACE_BYTES = 10_000
"""A body must bring so many bytes in so much time, as long as it is not complete: what Apache asks for by default
(`RequestReadTimeout body=20,MinRate=500`), and less than the slowest telephone line brings."""


_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "[::1]"})


class ClientGone(Exception):
    """The client left before its request was there."""


class HostAndOrigin:
    """Refuses requests from other sites (DNS rebinding), and headers that are too large."""

    def __init__(self, settings: Settings) -> None:
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in (*settings.allowed_origins, *settings.cors_origins))
        self._most = settings.max_headers

    def check(self, raw: list[tuple[bytes, bytes]], headers: Headers, *, beside: bool = False) -> None:
        """Raise `Refused` unless the request may come in. `beside`: beside the endpoint, where it may come under any IP
        address, to which no name is rebound (what scrapes the metrics knows servers by their addresses), and from the
        server's own pages (a login has forms)."""
        if sum(len(name) + len(value) for name, value in raw) > self._most:
            raise Refused(Refusal.HEADERS_TOO_LARGE, limit=self._most)
        names = [name for name, _ in raw if name in (b"host", b"origin")]
        for name in names:
            # A proxy in front may have judged another of two lines than this does (RFC 9112, 3.2).
            if (count := names.count(name)) > 1:
                raise Refused(Refusal.REPEATED_HEADER, count=count, name=name.decode().capitalize())
        host = headers.get(b"host", b"").decode("latin-1").lower()
        bare = _without_port(host)
        # Listed as it is, without its port, with any port (`name:*`), or everything is (`*`).
        is_known = bare in _THIS_MACHINE or {"*", host, bare, f"{bare}:*"} & self._hosts
        if not is_known and not (beside and _is_address(bare)):
            raise Refused(Refusal.TEST_HOST if bare == "testserver" else Refusal.BAD_HOST, host=host or "(none)")
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
            raise Refused(Refusal.BAD_ORIGIN, origin=given.decode("latin-1"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(value: str) -> str:
    head, colon, port = value.rpartition(":")
    return head if colon and port.isascii() and port.isdigit() else value


class Bodies:
    """Reads bodies, of all requests together no more at once than memory should carry."""

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.max_body
        self._timeout = settings.stream_timeout
        self._most = max(settings.max_bodies, settings.max_body)
        self._held = 0
        """Bytes of bodies that are not complete yet. One that arrives in one piece is never counted, so ordinary
        messages get through while others fill this up."""

    async def read(self, receive: Receive, headers: Headers) -> bytes:
        """The whole body, or `Refused` as soon as it is known to be too large, too slow or too much."""
        declared = headers.get(b"content-length", b"")
        digits = declared.lstrip(b"0")
        # Python refuses to read a number of more than 4,300 digits, so one that has more than the limit is not read.
        if declared.isdigit() and (len(digits) > len(str(self._limit)) or int(digits or b"0") > self._limit):
            raise Refused(Refusal.BODY_TOO_LARGE, limit=self._limit)
        now = asyncio.get_running_loop().time
        end = now() + self._timeout
        try:
            async with asyncio.timeout_at(min(end, now() + PACE_SECONDS)) as pace:
                return await self._collect(receive, pace, end)
        except TimeoutError:
            if now() < end:
                refusal = Refusal.BODY_STALLED
                raise Refused(refusal, least=PACE_BYTES, seconds=f"{PACE_SECONDS:g}") from None
            raise Refused(Refusal.BODY_TOO_SLOW, limit=f"{self._timeout:g}") from None

    async def _collect(self, receive: Receive, pace: asyncio.Timeout, end: float) -> bytes:
        now = asyncio.get_running_loop().time
        chunks: list[bytes] = []
        size = lately = 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                chunks.append(chunk)
                if size + len(chunk) > self._limit:
                    raise Refused(Refusal.BODY_TOO_LARGE, limit=self._limit)
                if not message.get("more_body", False):
                    return b"".join(chunks)
                if self._held + len(chunk) > self._most:
                    raise Refused(Refusal.TOO_MANY_BODIES, limit=self._most)
                size += len(chunk)
                self._held += len(chunk)
                lately += len(chunk)
                if lately >= PACE_BYTES:
                    lately = 0
                    pace.reschedule(min(end, now() + PACE_SECONDS))
        finally:
            self._held -= size


def replayed(body: bytes) -> Receive:
    """A `receive` that gives the body again, for tools that look at the HTTP request."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def replayed_first(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read already, once, and then whatever comes."""
    waiting = [body]

    async def receive_again() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return receive_again


def accepts(headers: Headers) -> tuple[bool, bool]:
    """Whether the client takes JSON, and whether it takes event streams."""
    accept = headers.get(b"accept", b"").lower()
    kinds = {kind.partition(b";")[0].strip() for kind in accept.split(b",")}
    everything = b"*/*" in kinds
    return (
        everything or bool(kinds & {b"application/json", b"application/*"}),
        everything or bool(kinds & {b"text/event-stream", b"text/*"}),
    )


def require_json(headers: Headers) -> None:
    """Raise `Refused` unless the body says that it is JSON."""
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise Refused(Refusal.MEDIA_TYPE, seen=content_type.decode("latin-1") or "(none)")
