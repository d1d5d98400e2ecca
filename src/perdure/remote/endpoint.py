"""An endpoint sends HTTP requests to one address, follows redirects within the origin, and names what went wrong.

With `http11`, the only module of the engine that knows the HTTP library.
"""

from __future__ import annotations

import inspect
import ipaddress
import logging
import os
import re
import ssl
import stat
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import anyio
import httpx2

from perdure._core.delivery import EVENTS, Attempt, Body, Failure, Meaning, body_of, doubts_session, of_response
from perdure._core.loopback import is_loopback
from perdure._core.sse import EventTooLarge
from perdure.remote.http11 import Direct, Exchange, Times, head_of, lines_of, origin_of
from perdure.remote.message import Message, messages_in
from perdure.telemetry.log_records import log_event

_SESSION = "mcp-session-id"
#: The library decodes compressed responses; requests past it do not ask for compression.
_PLAIN = {"accept-encoding": "identity"}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ALWAYS = {
    "POST": {"accept": f"application/json, {EVENTS}", "content-type": "application/json"},
    "GET": {"accept": EVENTS, "cache-control": "no-store"},
    "DELETE": {"accept": f"application/json, {EVENTS}"},
}

#: As the SDK's client: seconds for connecting and writing, and between two bytes of an answer.
TIMES = Times(connect=30.0, write=30.0, read=300.0)
#: Idle connections that are kept. Each running call holds one more, without a limit here; the server has one.
MAX_IDLE = 20
#: Seconds for which an idle connection is used again: servers close theirs after five (uvicorn) or more, and a call
#: that meets one as it closes would have an unknown outcome.
IDLE_SECONDS = 2.0
MAX_REDIRECTS = 5
#: Of a position: ours have 50 characters. It travels in a header, and servers refuse headers of more than 8 KiB.
MAX_POSITION = 1_024
#: Characters of a TLS library's own words that are shown.
_MAX_SHOWN = 300
#: Beats of a server that may be missed: one may be late, and one may be lost with a packet that is sent again.
MISSED_BEATS = 3
#: Seconds. Comments that follow each other faster are padding for proxies, not a beat.
LEAST_BEAT = 1.0
#: Of the token's file. A signed token with many claims has some 10 KiB.
MAX_TOKEN_BYTES = 64 << 10
_FIT = re.compile(r"[!-~]+")
#: Errors of the HTTP library before anything of a request has left.
_LIBRARY_ERRORS = (httpx2.TransportError, httpx2.DecodingError, httpx2.StreamError)
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)

#: Failures that waiting does not mend.
FINAL = (Failure.UNTRUSTED, Failure.NO_CREDENTIALS)

TokenProvider = Callable[[], str | Awaitable[str]]


@dataclass(kw_only=True)
class Handshake:
    """The session as both sides agreed on it."""

    session: str
    request: dict[str, Any]
    """The params of `initialize`."""
    result: dict[str, Any]
    initialized: bool = False
    """Both sides have accepted it. Before that, no other process may continue it."""
    is_adopted: bool = False
    """Another process has begun it."""

    @property
    def version(self) -> str:
        return str(self.result.get("protocolVersion", ""))


class Refused(Exception):
    """The server, or the way to it, refuses for good, and waiting does not mend it. `reason` is a word for machines."""

    def __init__(self, reason: str, sentence: str, *, status: int = 0, challenge: str | None = None) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.status = status
        """Of the server's response, if that is the refusal."""
        self.challenge = challenge
        """`WWW-Authenticate` of a 401 or 403, or empty; `None` for any other refusal."""


class Unavailable(Exception):
    """The server did not answer within the limits; asking again later may help."""

    def __init__(self, reason: str, *, at_least: float | None = None) -> None:
        super().__init__(reason)
        self.at_least = at_least
        """Seconds that the server asked for."""


class RequestFailed(Exception):
    """One HTTP request has no response, or its response broke off. `failure` says whether it may have arrived."""

    def __init__(self, failure: Failure, reason: str, *, refusal: Refused | None = None) -> None:
        super().__init__(reason)
        self.failure = failure
        self.refusal = refusal or Refused("refused", reason)
        """For the failures in `FINAL`."""


class Heartbeat:
    """Notices a connection whose other end has vanished without closing it, by one server's beat.

    TCP says nothing when a laptop changes its network or a firewall forgets a flow: the connection looks silent, and a
    call may well be silent for minutes. Only a server that keeps its idle connections alive with comments
    shows its end: where the comments stop, the server is gone.

    **The rule.** The time between two comments in a row, with nothing between them, is the server's beat; the longest
    that was heard counts. A stream that has a position and is silent for three beats is resumed. All streams of a
    client share what was heard, as one server writes them all. A server that sends no comments is left alone, and so is
    a stream without a position: to break it could cost a call its answer. After a cut the beat is learnt again, so that
    a server that has changed its beat is cut off once.
    """

    def __init__(self) -> None:
        self._beat: float | None = None

    @property
    def limit(self) -> float | None:
        """Seconds of silence that are too many; None if that is not known."""
        return None if self._beat is None else self._beat * MISSED_BEATS

    def heard(self, seconds: float) -> None:
        """Two comments came, so long one after the other."""
        if seconds >= LEAST_BEAT:
            self._beat = max(seconds, self._beat or 0.0)

    def missed(self) -> None:
        self._beat = None


class HttpResponse:
    """A response whose headers have arrived."""

    def __init__(self, response: httpx2.Response | Exchange) -> None:
        self._response = response
        self._headers: Mapping[str, str] = response.headers
        self._chunks: AsyncIterator[bytes] | None = None
        self._text = ""
        self.status = response.status_code
        self.media = self._headers.get("content-type", "").partition(";")[0].strip().lower()
        """The media type, without parameters."""
        self.session = self._headers.get(_SESSION, "")
        """The session that the server has named; "" if it has not."""

    @property
    def retry_after(self) -> float | None:
        """Seconds until the next request, if the server says so: in seconds, or as a date by its own clock."""
        value = self._headers.get("retry-after", "").strip()
        if not value:
            return None
        if value.isascii() and value.isdigit():
            return float(value[:9])
        until, now = _date(value), _date(self._headers.get("date", "")) or datetime.now(UTC)
        return None if until is None else max((until - now).total_seconds(), 0.0)

    @property
    def challenge(self) -> str | None:
        """How to authenticate, or empty, if the server wants that."""
        return self._headers.get("www-authenticate", "") if self.status in (401, 403) else None

    @property
    def is_encoded(self) -> bool:
        return self._headers.get("content-encoding", "identity") != "identity"

    @property
    def redirect(self) -> str | None:
        """The address that the server redirects to, if it does."""
        following = None if isinstance(self._response, Exchange) else self._response.next_request
        return None if following is None else shown(str(following.url))

    @property
    def has_ended(self) -> bool:
        """Whether the body is known to be at its end."""
        return isinstance(self._response, Exchange) and self._response.has_ended

    async def receive(self) -> bytes:
        """The next bytes of the body; b"" at its end. Raises `RequestFailed`."""
        try:
            if isinstance(self._response, Exchange):
                return await self._response.receive()
            if self._chunks is None:
                self._chunks = self._response.aiter_bytes()
            async for chunk in self._chunks:
                return chunk
            return b""
        except _LIBRARY_ERRORS as error:
            raise _named(error) from error

    async def gather(self, seconds: float) -> None:
        """Read nothing for so long: `receive` then returns all bytes that have arrived meanwhile."""
        if isinstance(self._response, Exchange):
            await self._response.gather(seconds)
        else:
            await anyio.sleep(seconds)

    async def aclose(self) -> None:
        if isinstance(self._chunks, AsyncGenerator):
            await self._chunks.aclose()
        await self._response.aclose()

    async def whole(self, limit: int) -> bytes:
        """The body, where it is not a stream. Raises `EventTooLarge`."""
        body = bytearray()
        while chunk := await self.receive():
            body += chunk
            if len(body) > limit:
                raise EventTooLarge(limit)
        return bytes(body)

    async def meaning(self, attempt: Attempt, request_id: str | None, limit: int) -> tuple[Meaning, Message | None]:
        """The meaning for the request (`_core/delivery.py`), and the response message in the body, if there is one.

        Raises `EventTooLarge`, and `RequestFailed` where the body breaks off.
        """
        body, message = Body.NONE, None
        is_stream = self.status == 200 and self.media == EVENTS
        if request_id is not None and not is_stream:
            self._text = (await self.whole(limit)).decode("utf-8", "replace")
            try:
                found = messages_in(self._text)
            except ValueError:
                found = []
            for one in found:
                if (body := body_of(one.body, request_id)) is not Body.NONE:
                    message = one
                    break
        says_when = self.retry_after is not None
        if is_stream and isinstance(self._response, Exchange):
            # It may be open for days, as thousands of others are.
            self._headers, self._response.raw_headers = {}, []
        return of_response(attempt, status=self.status, media=self.media, body=body, says_when=says_when), message

    def doubts_session(self, message: Message | None) -> bool:
        """Whether the response, or the error on its stream, reads as if the server did not know the session."""
        if message is None:
            return doubts_session(status=self.status, code=None, sentence=self._text[:_MAX_SHOWN])
        code = message.body["error"].get("code") if message.is_error else None
        return message.is_error and doubts_session(status=self.status, code=code, sentence=message.why)


class Endpoint:
    """`on_401` ends the sentence about a 401: what the user can do.

    `direct`: requests go over it, past the library above it, unless the server redirects or encodes; the client then
    has no other auth than a `Bearer`, and cookies are not kept. `times` are those of such requests. `mask` hides the
    secrets of addresses in sentences.
    """

    def __init__(
        self,
        client: httpx2.AsyncClient,
        url: str,
        *,
        on_401: str,
        direct: Direct | None = None,
        times: Times = TIMES,
        mask: Callable[[str], str] = str,
    ) -> None:
        self._client = client
        self._mask = mask
        self._headers: Mapping[str, str] = {}
        self._bearer: Bearer | None = None
        self._address = httpx2.URL(url)
        self._on_401 = on_401
        self._direct = direct
        self._times = times
        self._origin = origin_of(self._address)
        self._lines: dict[str, list[bytes]] = {}
        """Of each method: the lines of a request's head that are always the same."""
        self.url = url
        self.heartbeat = Heartbeat()

    def at(self, url: str) -> Endpoint:
        """Another address of the same server, with the same client and credentials."""
        return Endpoint(self._client, url, on_401=self._on_401, mask=self._mask)

    def carrying(self, headers: Mapping[str, str], token: TokenProvider | None, *, on_401: str) -> Endpoint:
        """The same address over the same connections, with headers and a token beside or in place of those of the
        client. `token` is asked for each request."""
        made = copy(self)
        made._headers, made._on_401 = headers, on_401
        made._bearer = None if token is None else Bearer(token, keeps=False)
        return made

    def post(
        self, body: bytes, handshake: Handshake | None, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[HttpResponse]:
        """Send a message, as JSON in UTF-8. Raises `RequestFailed`, as the others do."""
        return self._open("POST", handshake, headers or {}, body)

    def get(self, position: str | None, handshake: Handshake | None) -> AbstractAsyncContextManager[HttpResponse]:
        return self._open("GET", handshake, {} if position is None else {"last-event-id": position})

    async def delete(self, handshake: Handshake) -> None:
        async with self._open("DELETE", handshake, {}):
            return

    @asynccontextmanager
    async def _open(
        self, method: str, handshake: Handshake | None, headers: Mapping[str, str], body: bytes | None = None
    ) -> AsyncIterator[HttpResponse]:
        headers = {**self._headers, **headers}
        if handshake is not None and handshake.session:
            headers[_SESSION] = handshake.session
        if handshake is not None and handshake.version:
            # The header came with 2025-06-18; older servers ignore it, as the SDK's client supposes too. A reattach has
            # none yet.
            headers["mcp-protocol-version"] = handshake.version
        # A header that cannot be encoded is not an error of the auth flow.
        request = self._request(method, headers, body) if self._direct is None else None
        try:
            response = None
            if self._direct is not None:
                response = await self._send_direct(self._direct, method, headers, body)
            if response is None:
                response = await self._send(request or self._request(method, headers, body))
        except _LIBRARY_ERRORS as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                    # TLS does not fit: trying again cannot help.
                    said = str(getattr(cause, "verify_message", "") or cause.reason)
                    sentence = f"{self._mask(shown(self.url))} cannot be trusted: {said[:_MAX_SHOWN]} (TLS)"
                    refusal = Refused("tls", sentence)
                    raise RequestFailed(Failure.UNTRUSTED, sentence, refusal=refusal) from error
                cause = cause.__cause__ or cause.__context__
            raise _named(error) from error
        except Exception as error:
            # The user's auth flow may raise anything. Nothing of the request has left then.
            refusal = Refused("no_credentials", f"{type(error).__name__}: {error}")
            refusal = error if isinstance(error, Refused) else refusal
            raise RequestFailed(Failure.NO_CREDENTIALS, str(refusal), refusal=refusal) from error
        try:
            yield response
        finally:
            await response.aclose()

    def _request(self, method: str, headers: Mapping[str, str], body: bytes | None) -> httpx2.Request:
        # A position is any text, and is sent back as UTF-8 (WHATWG HTML, 9.2.4).
        encoded = httpx2.Headers({**headers, **_ALWAYS[method]}, encoding="utf-8" if method == "GET" else "ascii")
        return self._client.build_request(method, self._address, headers=encoded, content=body)

    async def _send(self, request: httpx2.Request) -> HttpResponse:
        auth = self._bearer or self._client.auth
        response = await self._client.send(request, stream=True, auth=auth, follow_redirects=False)
        for _ in range(MAX_REDIRECTS):
            following = _within_origin(response)
            if following is None:
                break
            await response.aclose()
            response = await self._client.send(following, stream=True, auth=auth, follow_redirects=False)
        return HttpResponse(response)

    async def _send_direct(
        self, direct: Direct, method: str, headers: Mapping[str, str], body: bytes | None
    ) -> HttpResponse | None:
        """The response, if the library is not needed for it."""
        if (lines := self._lines.get(method)) is None:
            always = {**_ALWAYS[method], **_PLAIN}
            lines = self._lines[method] = lines_of(self._client.build_request(method, self._address, headers=always))
        lines = [*lines, *(f"{name}: {value}".encode() for name, value in headers.items())]
        bearer, token = self._bearer or self._client.auth, None
        if isinstance(bearer, Bearer):
            token = await bearer.token()
            lines.append(b"authorization: Bearer " + token.encode("ascii"))
        exchange = await direct.exchange(self._origin, head_of(lines, body) + (body or b""), self._times)
        if token is not None and exchange.status_code in (401, 403):
            assert isinstance(bearer, Bearer)
            if (newer := await bearer.token(token)) != token:
                await exchange.aclose()
                lines[-1] = b"authorization: Bearer " + newer.encode("ascii")
                exchange = await direct.exchange(self._origin, head_of(lines, body) + (body or b""), self._times)
        if exchange.status_code in _REDIRECTS:
            await exchange.aclose()
            return None
        response = HttpResponse(exchange)
        if response.is_encoded:
            return HttpResponse(httpx2.Response(exchange.status_code, headers=exchange.raw_headers, stream=exchange))
        return response

    def refusal(self, response: HttpResponse) -> Refused:
        """The refusal that a response is which is neither an answer nor a passing trouble."""
        status, where = response.status, self._mask(shown(self.url))
        if status == 401:
            reason, sentence = "unauthorized", f"{where} {self._on_401} (HTTP 401)"
        elif status == 403:
            reason, sentence = "forbidden", f"{where} does not let us in (HTTP 403)"
        elif status in (404, 405, 410):
            hint = "" if httpx2.URL(self.url).path.strip("/") else "; its address has a path, most often /mcp"
            reason, sentence = "not_found", f"there is no MCP server at {where} (HTTP {status}){hint}"
        elif (place := response.redirect) is not None:
            place = self._mask(place)
            reason, sentence = "moved", f"{where} sends us to {place}, which is not followed: use that address"
        elif status < 300:
            seen = "JSON that is no response to the request" if response.media == "application/json" else response.media
            code = "" if status == 200 else f"HTTP {status} and "
            sentence = f"{where} is not an MCP server: it answers with {code}{seen or 'no content type'}"
            reason = "not_mcp"
        elif status >= 500:
            reason, sentence = "server_error", f"{where} fails at the request (HTTP {status})"
        else:
            reason, sentence = "refused", f"{where} refuses the request (HTTP {status})"
        return Refused(reason, sentence, status=status, challenge=response.challenge)


def _named(error: Exception) -> RequestFailed:
    """An error of the HTTP library, as one of the two that matter: nothing was sent, or it may have arrived."""
    failure = Failure.NOT_SENT if isinstance(error, _NOT_SENT) else Failure.LOST
    return RequestFailed(failure, ": ".join(filter(None, (type(error).__name__, str(error)))))


def _within_origin(response: httpx2.Response) -> httpx2.Request | None:
    """The request that follows a redirect within the origin: credentials are sent nowhere else."""
    sent, following = response.request, response.next_request
    if following is None or following.method != sent.method:
        return None
    here, there = sent.url, following.url
    same = (here.scheme, here.host, here.port) == (there.scheme, there.host, there.port)
    return following if same and there.userinfo in (b"", here.userinfo) else None


def _date(value: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(value)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def shown(url: str) -> str:
    """An address as it may be shown: without credentials and query."""
    try:
        return str(httpx2.URL(url).copy_with(userinfo=b"", query=None, fragment=None))
    except (httpx2.InvalidURL, ValueError):
        return "the given address"


def can_be_sent(position: str) -> bool:
    """Whether a position may stand in a header; one that may not cannot be resumed."""
    return len(position) <= MAX_POSITION and position.isprintable() and position == position.strip()


class Bearer(httpx2.Auth):
    """Keeps a token in memory until the server refuses it; it is never written anywhere. Without `keeps`, the provider
    knows which token is for the next request."""

    def __init__(self, provider: TokenProvider, *, keeps: bool = True) -> None:
        self._provider = provider
        self._keeps = keeps
        self._token: str | None = None
        self._turn = anyio.Lock()

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        used = await self.token()
        request.headers["authorization"] = f"Bearer {used}"
        response = yield request
        if response.status_code == 401:
            request.headers["authorization"] = f"Bearer {await self.token(used)}"
            yield request

    async def token(self, refused: str | None = None) -> str:
        """The token that is used from now on; several requests that were refused together ask once."""
        if refused is None and self._token is not None and self._keeps:
            return self._token
        async with self._turn:
            if self._token is None or self._token == refused or not self._keeps:
                given = self._provider()
                self._token = await given if inspect.isawaitable(given) else given
            return self._token


def http_client(
    url: str, *, headers: Mapping[str, str] | None = None, auth: httpx2.Auth | None = None
) -> httpx2.AsyncClient:
    """The client of `client_and_transport`."""
    return client_and_transport(url, headers=headers, auth=auth)[0]


def client_and_transport(
    url: str, *, headers: Mapping[str, str] | None = None, auth: httpx2.Auth | None = None, times: Times = TIMES
) -> tuple[httpx2.AsyncClient, Direct | None]:
    """An HTTP client for one endpoint, by the proxies of the environment, if there are any on the way; and the
    transport to the endpoint, if there are none.

    Requests to this machine do not go to a proxy: one on another machine has no way to this one, and the credentials
    that are sent here are not for it. Raises `OSError`, `ValueError` and `ImportError` where the environment names
    certificates or proxies that cannot be used.
    """
    address = httpx2.URL(url)
    # Loading the certificates takes longer than all else here. The scheme as it is understood, not as it is spelled.
    # Redirects to another scheme are not followed, but the user's auth flow may ask its own servers.
    needs_tls = address.scheme != "http" or not isinstance(auth, Bearer | None)
    tls = httpx2.create_ssl_context() if needs_tls else None
    proxies = urllib.request.getproxies()
    mounts: dict[str, httpx2.AsyncBaseTransport] = {}
    direct = None
    if is_this_machine(address.host) or not proxies.keys() & {address.scheme, "all"}:
        host = f"[{address.host}]" if ":" in address.host else address.host
        mounts[f"all://{host}"] = direct = Direct(tls=tls, max_idle=MAX_IDLE, idle_seconds=IDLE_SECONDS)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE, keepalive_expiry=IDLE_SECONDS)
    timeout = httpx2.Timeout(connect=times.connect, write=times.write, read=times.read, pool=times.connect)
    client = httpx2.AsyncClient(
        headers=headers, auth=auth, timeout=timeout, limits=limits, mounts=mounts, verify=False if tls is None else tls
    )
    return client, direct


def is_this_machine(host: str) -> bool:
    """Whether a connection to a host ends at this machine: one to 0.0.0.0 does as well."""
    try:
        is_unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_unspecified = False
    return is_unspecified or is_loopback(host)


# Addresses and tokens that a user gave to a command. The token comes from the environment or from a file, never from
# the command line, which every user of the machine can read.


def token_provider(env: str | None, file: Path | None, environ: Mapping[str, str]) -> Callable[[], str] | None:
    """Reads the user's token each time that it is called: the program that renews it writes it to its file.

    None if the user gave none. Raises `Refused` if there is no token now.
    """
    if env is None and file is None:
        return None
    where = f"the variable {env} of --token-env" if file is None else f"the file {file} of --token-file"

    def provider() -> str:
        reason = "no_credentials"
        if file is not None:
            try:
                with file.open("rb") as opened:
                    data = opened.read(MAX_TOKEN_BYTES + 1)
                    mode = os.fstat(opened.fileno()).st_mode
            except OSError as error:
                raise Refused(reason, f"{where} cannot be read: {error.strerror}") from error
            if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
                log_event(logging.WARNING, "remote.token_file_open", f"{where} can be read by other users")
            if len(data) > MAX_TOKEN_BYTES:
                raise Refused(reason, f"{where} is larger than {MAX_TOKEN_BYTES} bytes")
            text = data.decode("utf-8", "replace")
        elif env is not None and env in environ:
            text = environ[env]
        else:
            raise Refused(reason, f"{where} is not set")
        if not _FIT.fullmatch(token := text.strip()):
            # The message omits the text: it is a secret.
            raise Refused(reason, f"{where} does not hold a token: one line of visible ASCII characters is expected")
        return token

    provider()
    return provider


def check_address(url: str) -> None:
    """Raise `Refused` unless this is the address of a server, without credentials in it."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise Refused("bad_address", f"the address cannot be read: {error}") from error
    bad = ""
    if parsed.scheme not in ("http", "https"):
        bad = f"{shown(url)} is not the address of an MCP server: it must begin with http:// or https://"
    elif not parsed.host:
        bad = f"{shown(url)} is not the address of an MCP server: it has no host"
    elif parsed.port is not None and not 0 < parsed.port < 65_536:
        bad = f"{shown(url)} is not an address: there is no port {parsed.port}"
    elif parsed.userinfo:
        bad = "credentials must not stand in the address: give them with --token-env or --token-file"
    if bad:
        raise Refused("bad_address", bad)


def checked_client(url: str, token: TokenProvider | None) -> httpx2.AsyncClient:
    """Raises `Refused` where the address, the proxies or the certificates cannot be used."""
    return checked_transport(url, token)[0]


def checked_transport(
    url: str, token: TokenProvider | None, *, headers: Mapping[str, str] | None = None, times: Times = TIMES
) -> tuple[httpx2.AsyncClient, Direct | None]:
    """As `client_and_transport`. Raises `Refused`, as `checked_client`."""
    check_address(url)
    try:
        return client_and_transport(url, headers=headers, auth=None if token is None else Bearer(token), times=times)
    except OSError as error:
        sentence = f"the certificates that are trusted (SSL_CERT_FILE) cannot be read: {error.strerror or error}"
        raise Refused("bad_certificates", sentence) from error
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        # Not all of it: some libraries add advice.
        first_line = str(error).partition("\n")[0].partition(". ")[0]
        sentence = f"the proxy that the environment names cannot be used: {first_line}"
        raise Refused("bad_proxy", sentence) from error


def on_401(token: TokenProvider | None) -> str:
    """The end of a sentence about a 401: what the user can do."""
    return "wants a token: see --token-env and --token-file" if token is None else "does not accept the given token"
