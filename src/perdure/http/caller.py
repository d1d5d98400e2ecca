"""Names the caller: a principal or, for one that does not authenticate, the address that a request came from."""

from __future__ import annotations

import ipaddress

from starlette.types import Scope

from perdure.sessions.registry import Caller

_NETWORK = 64
"""Bits of an IPv6 address that tell callers apart: one customer has the rest to itself (RFC 6177)."""


def caller_of(owner: str, scope: Scope) -> Caller:
    """Name the caller that a request is counted for.

    Behind a proxy the address is the proxy's, unless the ASGI server was told to believe its headers; on a Unix socket
    there is none.
    """
    if owner:
        return Caller(owner)
    client = scope.get("client")
    text = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return Caller("", text[:64])
    if isinstance(address, ipaddress.IPv4Address):
        return Caller("", str(address))
    if address.ipv4_mapped is not None:
        return Caller("", str(address.ipv4_mapped))
    return Caller("", str(ipaddress.ip_network((int(address), _NETWORK), strict=False)))
