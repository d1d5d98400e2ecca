"""Names the caller of a request, keeps the credentials of running calls, and watches when a token expires.

A call sees the newest token of its principal, not only the one it began with (R9). The SDK hands a call the context of
the request that brought it, with the user in it, and copies that context. So the user in it is one object for all calls
of a session, and a request with another token of the same principal replaces the token in that object. Tokens stay in
this process: a call that runs in another one keeps the token that it knows.

A request that lasts ends with the token that it showed: when the token expires, or when the verifier no longer accepts
it (`OpenRequests.check`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from starlette.types import Scope

from perdure._core.ids import SessionId
from perdure._core.limits import Caller
from perdure._core.principals import ANONYMOUS, token_principal, unnamed_principal, user_principal
from perdure.errors import Misuse

if TYPE_CHECKING:
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
    from mcp.server.auth.provider import AccessToken, TokenVerifier

_NETWORK = 64
"""Bits of an IPv6 address that tell callers apart: one customer has the rest to itself (RFC 6177)."""

_READ_AGAIN = 60.0
"""Seconds until the clock is read again: it may be set, and a machine may sleep."""

SHOWN = "perdure.shown"
"""In the scope of a request: its `ShownToken`, or `None`. The request gets nothing once that is not good any more, also
if other requests bring newer tokens: another client may have shown this one."""

_wall_clock = time.time
"""The clock that the SDK's bearer check reads."""


class OpenRequests:
    """Requests that last, each with the token that it showed and the function that ends it."""

    def __init__(self) -> None:
        self._open: dict[object, tuple[AccessToken, Callable[[], None]]] = {}

    @contextmanager
    def ending_with(self, token: AccessToken, end: Callable[[], None]) -> Iterator[None]:
        key = object()
        self._open[key] = token, end
        try:
            yield
        finally:
            del self._open[key]

    async def check(self, verifier: TokenVerifier) -> int:
        """End the requests whose token is another's now, or nobody's. Returns how many there were."""
        from mcp.server.auth.provider import principal_components

        ended = 0
        found: dict[str, AccessToken | None] = {}
        for token, end in list(self._open.values()):
            if token.token not in found:
                found[token.token] = await verifier.verify_token(token.token)
            now = found[token.token]
            if now is None or principal_components(now) != principal_components(token):
                end()
                ended += 1
        return ended


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A request's token, for as long as the request lasts."""

    token: AccessToken
    open_requests: OpenRequests
    """The requests among which this one is if it lasts."""


def shown_token(scope: Scope, open_requests: OpenRequests) -> ShownToken | None:
    user = _bearer(scope)
    return None if user is None else ShownToken(user.access_token, open_requests)


def _bearer(scope: Scope) -> AuthenticatedUser | None:
    """The user of a bearer token; `None` for any other caller."""
    if (user := scope.get("user")) is None:
        return None  # a gateway without authentication does not import the SDK
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser

    return user if isinstance(user, AuthenticatedUser) else None


def while_good(seconds: float, scope: Scope) -> float:
    """The seconds, or those until the token of a request expires, if these are fewer. By the rule of the SDK's bearer
    check a token is good to the end of its last second."""
    shown: ShownToken | None = scope[SHOWN]
    if shown is None or not shown.token.expires_at:
        return seconds
    return min(seconds, max(0.0, shown.token.expires_at + 1 - _wall_clock()))


@contextmanager
def ending_with_token(scope: Scope, end: Callable[[], None]) -> Iterator[None]:
    """Call `end` if the token of a request expires within the block, or is found to be no longer good."""
    shown: ShownToken | None = scope[SHOWN]
    if shown is None:
        yield
        return
    loop = asyncio.get_running_loop()
    timers: list[asyncio.Handle] = []

    def read_clock() -> None:
        left = while_good(_READ_AGAIN, scope)
        timers[:] = [loop.call_later(left, read_clock) if left else loop.call_soon(end)]

    with shown.open_requests.ending_with(shown.token, end):
        if shown.token.expires_at:
            read_clock()
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()


def renew(user: AuthenticatedUser, token: AccessToken) -> None:
    """Give a user a token of the same principal, unless it expires sooner: its request was late."""
    held = user.access_token.expires_at
    if held is None or token.expires_at is None or token.expires_at >= held:
        user.access_token, user.scopes = token, token.scopes


class Credentials:
    """The users of the sessions in which calls run, here."""

    def __init__(self) -> None:
        self._users: WeakValueDictionary[SessionId, AuthenticatedUser] = WeakValueDictionary()
        """The contexts of running calls keep them alive."""

    def bring(self, session: SessionId, scope: Scope) -> None:
        """Take the token of a request: running calls of the session see it, and so does what the request begins."""
        if (shown := _bearer(scope)) is None:
            return
        from mcp.server.auth.middleware.auth_context import auth_context_var

        user = self._users.get(session)
        if user is None:
            user = self._users[session] = type(shown)(shown.access_token)
        else:
            renew(user, shown.access_token)
        scope["user"] = user
        auth_context_var.set(user)


def principal_of(scope: Scope) -> str:
    """Name the caller: one name for each (client, issuer, subject), whatever token it shows. A token without a subject
    has a name of its own, and one that Perdure has verified by its issuer's keys has the name of issuer and subject.

    An outer application may authenticate its own users. Then the user's identity is the name: a display name is not
    unique, and two users who share one would share sessions (promise 5).
    """
    user: Any = scope.get("user")
    if user is None:
        return ANONYMOUS
    if (bearer := _bearer(scope)) is not None:
        from mcp.server.auth.provider import principal_components

        from perdure.http.issuer_tokens import IssuerToken

        token = bearer.access_token
        if isinstance(token, IssuerToken):
            return token.principal
        client, issuer, subject = principal_components(token)
        return token_principal(client, issuer, subject) if subject else unnamed_principal(client, issuer, token.token)
    if not getattr(user, "is_authenticated", False):
        return ANONYMOUS
    try:
        identity = user.identity
    except (AttributeError, NotImplementedError):  # Starlette's BaseUser leaves it to its subclasses
        identity = None
    if not identity:
        raise Misuse(f"the application's {type(user).__name__} has no identity; sessions need one to know their owner")
    return user_principal(str(identity))


def client_without_subject(scope: Scope) -> str | None:
    """The OAuth client of a token without a subject; `None` for any other caller."""
    user = _bearer(scope)
    if user is None or user.access_token.subject:
        return None
    return user.access_token.client_id


def caller_of(owner: str, scope: Scope) -> Caller:
    """Name the caller that a request is counted for.

    With a proxy in front the address is the proxy's, unless the ASGI server believes its headers
    (`--forwarded-allow-ips`); on a Unix socket there is none.
    """
    if owner:
        return Caller(owner)
    client = scope.get("client")
    return Caller("", _network(str(client[0]) if client else ""))


@lru_cache(maxsize=1024)
def _network(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text[:64]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _NETWORK), strict=False))
