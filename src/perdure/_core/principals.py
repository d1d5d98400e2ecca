"""Principals: the text under which a session's owner is stored, and the names that people know it by.

Two texts are equal exactly if the principals are. A token's principal is the triple (client, issuer, subject); a token
without a subject is a principal of its own, with a digest as a fourth part. Where Perdure verifies the tokens of an
issuer itself, the client is left out, because a user's client may register again under another name. A user of an outer
application is known by its identity. All are JSON, so that no part can be mistaken for another.
"""

import hashlib
import json

ANONYMOUS = ""
"""The principal of callers that do not authenticate."""

_USER = "user"

_DIGEST = 32
"""Hexadecimal digits of a token's digest: 128 bits, which no two tokens share by chance."""


def token_principal(client: str | None, issuer: str | None, subject: str | None) -> str:
    """The principal that an access token stands for."""
    return json.dumps([client, issuer, subject])


def unnamed_principal(client: str, issuer: str | None, token: str) -> str:
    """The principal of a token that does not say whose it is: the token's own. All users of one OAuth client would be
    one owner otherwise."""
    digest = hashlib.sha256(b"perdure principal " + token.encode("utf-8", "surrogatepass")).hexdigest()
    return json.dumps([client, issuer, None, digest[:_DIGEST]])


def user_principal(identity: str) -> str:
    """A user of the application that Perdure is mounted in."""
    return json.dumps([_USER, identity])


def readable(principal: str) -> str:
    """The principal for people: the subject, with the client where that is another; or the identity."""
    parts = _parts(principal)
    if len(parts) < 3:
        return parts[-1] or ""
    client, _, subject, *digest = parts
    if digest:
        return f"{client} (token {(digest[0] or '')[:8]})"
    if client is None:
        return subject or ""
    return client if subject in (None, client) else f"{subject} ({client})"


def is_called(principal: str, name: str) -> bool:
    """Whether a person means this principal: by its whole text, its subject, its client or its identity."""
    parts = _parts(principal)
    return name == principal or name in ((parts[0], parts[2]) if len(parts) >= 3 else parts[-1:])


def _parts(principal: str) -> list[str | None]:
    """The principal's parts: three or four of a token, two of a user, the text itself where it is neither."""
    try:
        parts: list[str | None] = json.loads(principal)
    except ValueError:
        return [principal]
    is_principal = isinstance(parts, list) and all(part is None or isinstance(part, str) for part in parts)
    if is_principal and (len(parts) in (3, 4) or (len(parts) == 2 and parts[0] == _USER)):
        return parts
    return [principal]
