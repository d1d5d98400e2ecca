"""Keeps the tokens of callers that are passed on to an upstream (`auth = "pass"`), in memory alone.

The edge renews the token in a user's object when a later request of the same session or call shows a newer one. So a
passport knows users, and asks each of them for its token when one is needed.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from perdure._core.limits import Caller

_Kind = tuple[Caller, str, frozenset[str]]


class Passport:
    """Tokens of one principal that may stand for each other."""

    def __init__(self, user: Any, *, kind: _Kind | None = None) -> None:
        """`kind`: of the tokens that it takes; any token of its users otherwise."""
        self._kind = kind
        self._newest = user.access_token
        self._users: WeakSet[Any] = WeakSet([user])

    def add(self, user: Any) -> None:
        self._users.add(user)

    def token(self) -> str:
        """The token that is good for longest."""
        shown = [user.access_token for user in self._users]
        if self._kind is not None:
            shown = [token for token in shown if _kind(self._kind[0], token) == self._kind]
        self._newest = max([*shown, self._newest], key=lambda token: token.expires_at or math.inf)
        return str(self._newest.token)


class Passports:
    """The passports that requests without a session share: those of one principal, one OAuth client and the same
    scopes. Otherwise a client could do with another's token what its own does not allow."""

    def __init__(self) -> None:
        self._shared: WeakValueDictionary[_Kind, Passport] = WeakValueDictionary()

    def shared(self, caller: Caller, origin: object) -> Passport | None:
        """The passport for a request; `None` if it has shown no token."""
        if (user := _user(origin)) is None:
            return None
        kind = _kind(caller, user.access_token)
        passport = self._shared.get(kind)
        if passport is None:
            passport = self._shared[kind] = Passport(user, kind=kind)
        passport.add(user)
        return passport


def session_passport(origin: object) -> Passport | None:
    """The passport for the session of a request: the newest token that its client shows counts, whatever its scopes."""
    user = _user(origin)
    return None if user is None else Passport(user)


def _user(origin: object) -> Any:
    user = getattr(origin, "scope", {}).get("user")
    return user if hasattr(user, "access_token") else None


def _kind(caller: Caller, token: Any) -> _Kind:
    return caller, token.client_id, frozenset(token.scopes)
