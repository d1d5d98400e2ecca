"""Tells the edge whether a server behind the gateway takes the token of a request that was passed on to it.

The edge puts a `TokenCheck` into the scope of the request, and the gateway reports to it. So the client gets the status
and the challenge of that server in place of an answer.
"""

import asyncio
import contextlib
from typing import NamedTuple

TOKEN_CHECK = "perdure.token_check"
"""In the scope of an HTTP request whose token is passed on: its `TokenCheck`."""

WAIT_SECONDS = 1.0
"""How long the head of an event stream waits to know. A server checks a token before all else; one that says nothing
for so long has accepted the request."""


class Challenge(NamedTuple):
    """The refusal of a token."""

    status: int
    header: str
    """`WWW-Authenticate` of the server; empty if it has none."""


class TokenCheck:
    def __init__(self) -> None:
        self.challenge: Challenge | None = None
        """With what the token was refused, as far as that is known."""
        self._is_known = asyncio.Event()

    def end(self, challenge: Challenge | None) -> None:
        """The token was accepted, or refused. The first report counts."""
        if not self._is_known.is_set():
            self.challenge = challenge
            self._is_known.set()

    async def wait(self) -> Challenge | None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_known.wait(), WAIT_SECONDS)
        return self.challenge


def end_check(origin: object, challenge: Challenge | None = None) -> None:
    """Report for the HTTP request that `origin` is, if its token is passed on."""
    check = getattr(origin, "scope", {}).get(TOKEN_CHECK)
    if check is not None:
        check.end(challenge)
