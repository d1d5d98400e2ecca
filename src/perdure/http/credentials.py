"""Credentials of running calls: a call sees the newest token of its principal, not only the one it began with (R9).

The SDK hands a call the context of the request that brought it, with the user in it, and copies that context. So the
user in it is one object for all calls of a session, and a request with another token of the same principal replaces the
token in that object. Tokens stay in this process: a call that runs in another one keeps the token that it knows.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from mcp.server.auth.middleware.auth_context import auth_context_var
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.types import Scope

from perdure._core.ids import SessionId


class RenewableUser(AuthenticatedUser):
    """An authenticated user whose token is replaced while calls run."""

    def renew(self, token: AccessToken) -> None:
        """Take a token of the same principal, unless it expires sooner: it is a request that was late."""
        held = self.access_token.expires_at
        if held is None or token.expires_at is None or token.expires_at >= held:
            self.access_token, self.scopes = token, token.scopes


class Credentials:
    """The users of the sessions in which calls run, here."""

    def __init__(self) -> None:
        self._users: WeakValueDictionary[SessionId, RenewableUser] = WeakValueDictionary()
        """The contexts of running calls keep them. Without calls there is no one to show a token to."""

    def bring(self, session: SessionId, scope: Scope) -> None:
        """Take the token of a request: running calls of the session see it, and so does what the request begins."""
        shown = scope.get("user")
        if not isinstance(shown, AuthenticatedUser):
            return
        user = self._users.get(session)
        if user is None:
            user = self._users[session] = RenewableUser(shown.access_token)
        else:
            user.renew(shown.access_token)
        scope["user"] = user
        auth_context_var.set(user)
