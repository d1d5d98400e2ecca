"""HTTP to one endpoint: what is sent along, which redirects are followed, and what an error means for a request.

The distinction that matters: a request that did not leave may be sent again, one that may have arrived may not.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from perdure._core.sse import MAX_EVENT_BYTES, EventTooLarge
from perdure.remote.state import Handshake

ACCEPT_BOTH = "application/json, text/event-stream"
ACCEPT_EVENTS = "text/event-stream"

#: As the SDK's client: seconds for connecting and writing, and between two bytes of an answer.
TIMEOUT = httpx2.Timeout(30.0, read=300.0)
#: Every running call holds a connection, so their number has no limit here; the server has one.
#: An idle connection is used again for two seconds only: servers close theirs after five (uvicorn) or more, and a call
#: that meets one as it closes would have an unknown outcome.
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=2.0)
MAX_REDIRECTS = 5
#: Of a position: ours have 50 characters. It travels in a header, and servers refuse headers of more than 8 KiB.
MAX_POSITION = 1_024


def past_proxies(url: str) -> dict[str, None]:
    """The mounts of an HTTP client that keep requests to this machine away from the proxies of the environment.

    A proxy on another machine has no way to this one, and the credentials that are sent here are not for it.
    """
    host = httpx2.URL(url).host
    return {f"all://[{host}]" if ":" in host else f"all://{host}": None} if _is_this_machine(host) else {}


def _is_this_machine(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or address.is_unspecified  # 0.0.0.0 leads to this machine as well


class NotSent(Exception):
    """No byte of the request has left."""


class Broken(Exception):
    """The connection broke; the request may have arrived."""


class Wire:
    """The endpoint."""

    def __init__(self, client: httpx2.AsyncClient, url: str) -> None:
        self._client = client
        self.url = url

    @asynccontextmanager
    async def post(self, body: dict[str, Any] | bytes, handshake: Handshake | None) -> AsyncIterator[httpx2.Response]:
        """Send a message, as a value or as JSON in UTF-8."""
        headers = {"accept": ACCEPT_BOTH, "content-type": "application/json", **_session(handshake)}
        async with self._open("POST", headers, body) as response:
            yield response

    @asynccontextmanager
    async def get(self, position: str | None, handshake: Handshake | None) -> AsyncIterator[httpx2.Response]:
        accept = {"accept": ACCEPT_EVENTS, "cache-control": "no-store", **_session(handshake)}
        # An id is any text, and goes back as UTF-8 (WHATWG HTML, 9.2.4).
        headers: Any = httpx2.Headers(accept, encoding="utf-8")
        if position is not None:
            headers["last-event-id"] = position
        async with self._open("GET", headers, None) as response:
            yield response

    async def delete(self, handshake: Handshake) -> int:
        async with self._open("DELETE", {"accept": ACCEPT_BOTH, **_session(handshake)}, None) as response:
            return response.status_code

    @asynccontextmanager
    async def _open(self, method: str, headers: dict[str, str], body: Any) -> AsyncIterator[httpx2.Response]:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        request = self._client.build_request(method, self.url, headers=headers, **content)
        with _named_errors():
            response = await self._client.send(request, stream=True, follow_redirects=False)
            for _ in range(MAX_REDIRECTS):
                following = _within_origin(response)
                if following is None:
                    break
                await response.aclose()
                response = await self._client.send(following, stream=True, follow_redirects=False)
        try:
            with _named_errors():
                yield response
        finally:
            await response.aclose()


@contextmanager
def _named_errors() -> Iterator[None]:
    """Errors of the HTTP library, as the two that matter."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError) as error:
        raise NotSent(_told(error)) from error
    except (httpx2.TransportError, httpx2.DecodingError, httpx2.StreamError) as error:
        raise Broken(_told(error)) from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _session(handshake: Handshake | None) -> dict[str, str]:
    if handshake is None:
        return {}
    headers = {"mcp-session-id": handshake.session} if handshake.session else {}
    # The header came with 2025-06-18; older servers ignore it, as the SDK's client supposes too. A reattach has
    # none yet.
    return {**headers, "mcp-protocol-version": handshake.version} if handshake.version else headers


def _within_origin(response: httpx2.Response) -> httpx2.Request | None:
    """The request that follows a redirect, if it is the same one at the same place: credentials go nowhere else."""
    following = response.next_request
    if following is None:
        return None
    sent = response.request
    same = (sent.url.scheme, sent.url.host, sent.url.port) == (
        following.url.scheme,
        following.url.host,
        following.url.port,
    )
    plain = not following.url.userinfo or following.url.userinfo == sent.url.userinfo
    return following if same and plain and following.method == sent.method else None


def kind(response: httpx2.Response) -> str:
    """The media type of an answer."""
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


async def whole(response: httpx2.Response) -> bytes:
    """A body that is no event stream; not more of it than an event may have."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_EVENT_BYTES:
            raise EventTooLarge(MAX_EVENT_BYTES)
    return bytes(body)


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds until the server wants us again, where it says so: in seconds, or as a date by its own clock."""
    value = response.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    until, now = _date(value), _date(response.headers.get("date", "")) or datetime.now(UTC)
    return None if until is None else max((until - now).total_seconds(), 0.0)


def _date(value: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(value)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def can_be_sent(position: str) -> bool:
    """Whether a position may stand in a header; one that may not cannot be resumed."""
    return len(position) <= MAX_POSITION and position.isprintable() and position == position.strip()
