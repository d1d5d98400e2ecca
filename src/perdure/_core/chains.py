"""Chains of resume tokens: decides what each use of a token does.

A token is 48 random bytes: 16 name its chain, 32 are a secret of it. A chain belongs to one session and one holder, and
knows two secrets at most, as hashes: the *current* one, and the *next* one, which was issued and is not confirmed yet.
A caller learns a chain's name only from one of its tokens. So a token that names a chain and is neither of the two was
voided or retired before: it is used a second time, by a thief or by the owner it was copied from. The server cannot
tell which of them is the owner, so it revokes the chain. This needs no memory of retired secrets, however many there
were.

The old token stays valid until the new one is confirmed, and a new one that was written down and not confirmed is valid
as well. So a holder that dies at any point has a valid token, whichever of the two it finds (T10).
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
from dataclasses import dataclass, replace

from perdure._core.ids import SessionId

NAME_BYTES = 16
"""128 bits: it is found by its hash, and never guessed."""

SECRET_BYTES = 32
"""256 bits (T12)."""

TOKEN_LENGTH = 64
"""Characters of a token: 48 bytes in base64url, which needs no padding."""


class Action(enum.Enum):
    """The purpose for which a token is used."""

    RESUME = "resume"
    CONFIRM = "confirm"
    REVOKE = "revoke"


class Outcome(enum.Enum):
    """The result of a use."""

    ACCEPTED = "accepted"
    ENDED = "its holder ended the chain"
    REUSED = "the token was used before: the chain is revoked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A session's chain, as it is stored: every value but the session is a SHA-256 in hex (T12)."""

    name: str
    session: SessionId
    holder: str
    current: str
    next: str = ""
    """Empty if none waits to be confirmed."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Token:
    """The holder's secret. Neither it nor its hashes are shown in a log."""

    name: bytes
    secret: bytes

    @property
    def text(self) -> str:
        return base64.urlsafe_b64encode(self.name + self.secret).decode()

    def renewed(self, secret: bytes) -> Token:
        """Another token of the same chain."""
        return replace(self, secret=secret)


def read_token(text: str) -> Token:
    """The token in a text of `TOKEN_LENGTH` characters; if the text is not a token, one that belongs to no chain."""
    try:
        raw = base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != NAME_BYTES + SECRET_BYTES or base64.urlsafe_b64encode(raw).decode() != text:
        raw = hashlib.sha384(text.encode("utf-8", "surrogatepass")).digest()
    return Token(name=raw[:NAME_BYTES], secret=raw[NAME_BYTES:])


def hashed(value: bytes) -> str:
    """The stored form of a random value. It has enough bits that neither salt nor a slow hash would help."""
    return hashlib.sha256(value).hexdigest()


def opened(token: Token, *, session: SessionId, holder: str) -> Chain:
    """A new chain, whose first token needs no confirmation: before it there is none to fall back to."""
    return Chain(name=hashed(token.name), session=session, holder=hashed(holder.encode()), current=hashed(token.secret))


def is_held_by(chain: Chain, holder: str) -> bool:
    return hmac.compare_digest(chain.holder, hashed(holder.encode()))


def use(chain: Chain, action: Action, token: Token, *, fresh: bytes) -> tuple[Chain | None, Outcome]:
    """The chain after a use of one of its tokens (`None`: revoked), and the outcome. `fresh`: the secret to issue."""
    secret = hashed(token.secret)
    # Both are compared, whichever it is.
    is_current, is_next = hmac.compare_digest(chain.current, secret), hmac.compare_digest(chain.next, secret)
    if not is_current and not is_next:
        return None, Outcome.REUSED
    if action is Action.REVOKE:
        return None, Outcome.ENDED
    if is_next:  # it was written down: the current one is retired, also where its holder died before it could confirm
        chain = replace(chain, current=chain.next, next="")
    if action is Action.RESUME:  # a next one that was not confirmed is void
        chain = replace(chain, next=hashed(fresh))
    return chain, Outcome.ACCEPTED
