"""Authenticates callers by the console's token or by the key of its page; no web page of another origin has access.

The printed address has a ticket, which is good for one browser. The page exchanges the ticket for a key, keeps the key
where only pages of its own scheme, host and port can read it, and sends it in a header, which a page of another origin
cannot do. A reader of the address in a list of processes or in the browser's history has a used ticket. The key is
derived from the token, so a console that is started again with the same token accepts it.

There is no cookie, because a browser sends the cookies of one program on a machine to all others there, whatever their
port is.

A page whose name an attacker lets point at 127.0.0.1 (DNS rebinding) sends that name in the `Host` header. So a host is
accepted only if it is `localhost`, a plain IP address, or a name that the operator has given.
"""

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.console.http import API, refuse

MIN_TOKEN = 16
"""Characters of a token that an operator gives: 64 bits, even if they are only hexadecimal digits."""

TOKEN_BYTES = 32
"""Random bytes of a ticket, and of a token that is made at the start."""

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

ENTER = "/api/enter"
"""Where a ticket, or the token, is exchanged for the key."""


class Ticket:
    """The once-only word of the printed address. When it is used there is a new one, with which `on_new` is called."""

    def __init__(self, on_new: Callable[[str], None] = lambda _: None) -> None:
        self.word = secrets.token_urlsafe(TOKEN_BYTES)
        self._on_new = on_new

    def use(self, given: str) -> bool:
        """Whether this is the ticket; from then on it is not."""
        if not is_same(given, self.word):
            return False
        self.word = secrets.token_urlsafe(TOKEN_BYTES)
        self._on_new(self.word)
        return True


class AuthMiddleware:
    """Refuses requests before they reach the console's app, and adds security headers to all answers."""

    def __init__(self, app: ASGIApp, *, token: str, ticket: Ticket, allowed_hosts: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
        self._ticket = ticket
        self._hosts = frozenset(host.lower() for host in allowed_hosts) | {"localhost"}
        self._key = hmac.new(token.encode(), b"perdure console page", hashlib.sha256).hexdigest()

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
        """Return the answer to a request that is not passed on; `None` if it is."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_known(hosts[0]):
            return refuse(
                scope, 421, "this console is not known under that host; use the address it printed, or --allowed-host"
            )
        if not scope["path"].startswith(API):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        secret = given.strip() if scheme.lower() == "bearer" else ""
        is_token = is_same(secret, self._token)
        if scope["path"] == ENTER and scope["method"] == "POST":
            if is_token or self._ticket.use(secret):
                return JSONResponse({"key": self._key})
        elif is_token or is_same(secret, self._key):
            return None
        wrong = "this token is wrong, or was used before; " if secret else ""
        answer = refuse(scope, 401, f"{wrong}open the newest address that `perdure console` has printed")
        answer.headers["www-authenticate"] = 'Bearer realm="perdure console"'
        return answer

    def _is_known(self, host: str) -> bool:
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


def is_same(given: str, secret: str) -> bool:
    """Compare in a time that depends neither on the secret nor on its length."""
    digests = (hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest() for word in (given, secret))
    return hmac.compare_digest(*digests)
