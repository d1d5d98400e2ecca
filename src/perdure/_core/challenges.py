"""Rewrites the `WWW-Authenticate` of a server for the clients of a gateway in front of it."""

import re

MAX_CHALLENGE = 4 << 10
"""Characters of the header. Real ones have some hundred, and clients take 8 KiB of all headers."""

_METADATA = re.compile(r',?\s*resource_metadata\s*=\s*("[^"]*"|[^\s,"]+)')
_BEARER = re.compile(r"bearer(?:\s+|$)", re.IGNORECASE)
_VISIBLE = re.compile(r"[ -~]*")


def with_metadata(challenge: str, url: str) -> str:
    """The challenge of a server, with the address of the gateway's own metadata (RFC 9728) in place of the server's:
    there a client finds the resource under the address that it knows. Other schemes than `Bearer`, and characters that
    a header cannot have, are left out."""
    found = _BEARER.match(challenge)
    said = ""
    if found is not None and len(challenge) <= MAX_CHALLENGE and _VISIBLE.fullmatch(challenge):
        said = _METADATA.sub("", challenge[found.end() :]).strip(" ,")
    return "Bearer " + ", ".join(filter(None, (said, f'resource_metadata="{url}"')))
