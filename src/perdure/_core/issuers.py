"""Decides about tokens of an authorization server, the *issuer*: whose a token is, which key verifies it, and when the
issuer's keys are read again.

Keys are a JSON Web Key Set (RFC 7517). Only asymmetric algorithms are accepted: with a symmetric one, whoever has the
public key could sign.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALGORITHMS = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "RSA"),
    **dict.fromkeys(("ES256", "ES384", "ES512"), "EC"),
    "EdDSA": "OKP",
}
"""The signatures that are accepted, each with the type of its keys."""

LEEWAY = 10
"""Seconds by which the issuer's clock may differ from this machine's: more than NTP leaves, and less than what makes an
expired token useful."""

READ_AGAIN = 600.0
"""Seconds after which keys are read again: a key that the issuer has removed verifies nothing for longer."""

UNKNOWN_PAUSE = 30.0
"""Seconds between two reads because of an unknown key: a caller can name as many as it likes."""

FAILED_PAUSE = 5.0
"""Seconds after a read that failed: an issuer that restarts is back soon, and one that is down need not be asked for
every request."""

KEPT = 3600.0
"""Seconds for which keys are used while they cannot be read again. Access tokens rarely live for longer, and an issuer
that is down issues no other ones."""


class KeyState(enum.Enum):
    """The state of the key that a token names."""

    KNOWN = "the key verifies the token"
    UNKNOWN = "the issuer has no such key: the token is refused"
    UNAVAILABLE = "the keys cannot be read: nothing is known of the token"


@dataclass(frozen=True, kw_only=True)
class KeySetAge:
    """The age of the keys."""

    read: float | None
    """Seconds since they were read; `None`: never."""
    tried: float | None
    """Seconds since that was last tried; `None`: never."""

    @property
    def has_failed(self) -> bool:
        """Whether the last try was in vain."""
        return self.tried is not None and (self.read is None or self.tried < self.read)

    def is_due(self, *, is_known: bool) -> bool:
        """Whether the keys are to be read again for a token whose key is known, or is not."""
        if self.tried is not None and self.tried < (FAILED_PAUSE if self.has_failed else UNKNOWN_PAUSE):
            return False
        return self.read is None or self.read >= READ_AGAIN or not is_known

    def judge(self, *, is_known: bool) -> KeyState:
        if self.read is None or self.read >= KEPT or (self.has_failed and not is_known):
            return KeyState.UNAVAILABLE
        return KeyState.KNOWN if is_known else KeyState.UNKNOWN


def read_key_set(document: object) -> Sequence[Mapping[str, Any]]:
    """The keys of a JSON Web Key Set. Raises `ValueError`."""
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise ValueError('it has no list "keys"')
    return [key for key in keys if isinstance(key, dict)]


def find_key(keys: Sequence[Mapping[str, Any]], kid: object, algorithm: str) -> Mapping[str, Any] | None:
    """The key that a token names. A token that names none is verified with the only key that fits its algorithm."""
    fitting = [
        key
        for key in keys
        if key.get("kty") == ALGORITHMS[algorithm]
        and key.get("alg", algorithm) == algorithm
        and key.get("use", "sig") == "sig"
        and (kid is None or key.get("kid") == kid)
    ]
    return fitting[0] if fitting and (kid is not None or len(fitting) == 1) else None


@dataclass(frozen=True, kw_only=True)
class TokenNames:
    """The names of a token's owner."""

    user: str | None
    """The subject; `None` if the token names only a client."""
    client: str
    """The OAuth client; the subject if no client is named."""
    scopes: Sequence[str]


def names_in(claims: Mapping[str, Any]) -> TokenNames | None:
    """Read the claims of RFC 9068, and their older names: `azp` of OpenID Connect, `scp` of some issuers. `None`: they
    name neither a subject nor a client."""
    user = claims.get("sub") or None
    client = next(
        (found for name in ("client_id", "azp") if isinstance(found := claims.get(name), str) and found), user
    )
    if not isinstance(client, str):
        return None
    scopes = claims.get("scope", claims.get("scp"))
    if isinstance(scopes, str):
        scopes = scopes.split()
    elif not isinstance(scopes, list) or not all(isinstance(one, str) for one in scopes):
        scopes = []
    return TokenNames(user=user, client=client, scopes=scopes)
