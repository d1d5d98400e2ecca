"""Lets in the caller that has the console's token, and no web page of another origin.

The token comes once in the address that the command prints. The answer puts a cookie of its own in its place, so that
the token is neither in the address bar nor in the browser's history. The cookie's name and value are made of the token:
a console that is started again with the same token knows it, and the consoles of one machine, whose cookies a browser
keeps together, do not take each other's place.

A name that an attacker lets point at 127.0.0.1 (DNS rebinding) is in the `Host` header of what its page sends. So a
host is known here only if it is `localhost`, a plain IP address, or a name that the operator has given. A page of
another origin has no cookie, because that is SameSite=Strict; beside that `Origin` is checked on everything that
changes anything.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MIN_TOKEN = 16
"""Characters of a token that an operator gives: 64 bits, even if they are only hexadecimal digits."""

TOKEN_BYTES = 32
"""Random bytes of a token that is made at the start."""

COOKIE_SECONDS = 30 * 86_400
"""For as long a browser stays signed in at a console that keeps its token."""

POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none';"
    " img-src 'self' data:"
)

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

API = "/api/"
"""What is below this path shows the store. The files of the page hold nothing of it."""

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class Entrance:
    """Stands in front of the console's app."""

    def __init__(self, app: ASGIApp, *, token: str, allowed_hosts: Collection[str] = ()) -> None:
        self._app = app
        self._token = hashlib.sha256(token.encode()).digest()
        self._hosts = frozenset(host.lower() for host in allowed_hosts) | {"localhost"}
        self._cookie = f"perdure_console_{hashlib.sha256(b'name ' + self._token).hexdigest()[:8]}"
        self._value = hmac.new(token.encode(), b"perdure console cookie", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers["cache-control"] = "no-store" if scope["path"].startswith(API) else "no-cache"
            await send(message)

        refusal = self._answer(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send_on)

    def _answer(self, scope: Scope) -> Response | None:
        """The answer to a request that goes no further; `None` if it does."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._knows(hosts[0]):
            return refuse(
                scope, 421, "this console is not known under that host; use the address it printed, or --allowed-host"
            )
        if scope["method"] not in _SAFE and not self._is_own(headers, hosts[0]):
            return refuse(scope, 403, "a page of another origin may not change anything here")
        if scope["path"] == "/" and (given := self._given(scope)) is not None:
            return self._welcome() if self._is_token(given) else self._stranger(scope, "the token in this address")
        if scope["path"].startswith(API) and not self._is_known(headers):
            return self._stranger(scope, "this request's token" if "authorization" in headers else "")
        return None

    def _knows(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name, _, port = name[1:].partition("]")
            if port and port[0] != ":":
                return False
        else:
            name = name.partition(":")[0]
        if name.rstrip(".") in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_own(self, headers: Headers, host: str) -> bool:
        """Whether a change comes from the console's own page, or from a program that shows the token itself."""
        origins = headers.getlist("origin")
        if not origins:
            return "authorization" in headers
        return len(origins) == 1 and origins[0].lower() in (f"http://{host.lower()}", f"https://{host.lower()}")

    def _given(self, scope: Scope) -> str | None:
        return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)).get("token")

    def _is_token(self, given: str) -> bool:
        digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(digest, self._token)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        kept = cookies.get(self._cookie)
        return kept is not None and hmac.compare_digest(kept.value.encode(), self._value.encode())

    def _welcome(self) -> Response:
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self._cookie, self._value, max_age=COOKIE_SECONDS, httponly=True, samesite="strict", path="/")
        return answer

    def _stranger(self, scope: Scope, what: str) -> Response:
        wrong = f"{what} is wrong; " if what else ""
        answer = refuse(scope, 401, f"{wrong}open the address that `perdure console` printed when it started")
        answer.headers["www-authenticate"] = 'Bearer realm="perdure console"'
        return answer


def refuse(scope: Scope, status: int, sentence: str) -> Response:
    """Answer with one sentence: as JSON to a program, as text to a person."""
    if scope["path"].startswith(API):
        return JSONResponse({"error": sentence}, status_code=status)
    return PlainTextResponse(f"{sentence}\n", status_code=status)
