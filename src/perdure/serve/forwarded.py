"""Names the client of a request that came over a proxy: the address that a trusted proxy reports, in place of its own.

Only the peers that the operator names are believed (`--forwarded-allow-ips`), because any other client can write these
headers itself. Proxies add themselves at the end of the list, so it is read from there: the first address that is not a
trusted proxy's is the client's, whatever stands before it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

MAX_HOPS = 64
"""Addresses that are read of a header, from its end. A request passes a handful of proxies; the rest is a client's."""

EVERYONE = "*"

_FOR = re.compile(r'(?:^|;)\s*for\s*=\s*(?:"([^"]*)"|([^\s;,"]*))', re.IGNORECASE)

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedProxies:
    """The peers that are believed about their clients: addresses, networks, or everyone."""

    def __init__(self, names: Iterable[str]) -> None:
        """Raises `ValueError` for a name that is none of these."""
        names = [name for name in names if name]
        self._everyone = EVERYONE in names
        try:
            self._networks = [ipaddress.ip_network(name) for name in names if name != EVERYONE]
        except ValueError as error:
            raise ValueError(f"{error}; name addresses (127.0.0.1), networks (10.0.0.0/8), or * for everyone") from None

    def __bool__(self) -> bool:
        return self._everyone or bool(self._networks)

    def trusts(self, peer: _Address | None) -> bool:
        """Whether a peer is a trusted proxy. One without an address came over a Unix socket."""
        return self._everyone or (peer is not None and any(peer in network for network in self._networks))

    def client_of(self, peer: str | None, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Return the client's address, if a trusted proxy reports one.

        A proxy writes one of the two headers and may pass the other on as its client sent it: if they disagree, neither
        is believed.
        """
        if not self.trusts(_read(peer or "")):
            return None
        plain = self._first_stranger(_values(headers, b"x-forwarded-for"))
        # The node that each element of `Forwarded` names (RFC 7239, 4).
        found = map(_FOR.search, _values(headers, b"forwarded"))
        formal = self._first_stranger("" if node is None else node[1] or node[2] or "" for node in found)
        return None if plain and formal and plain != formal else plain or formal

    def _first_stranger(self, hops: Iterable[str]) -> str | None:
        """Return the last address that is not a proxy's, or the farthest proxy's if the rest cannot be read."""
        found: str | None = None
        for hop in list(hops)[: -MAX_HOPS - 1 : -1]:
            address = _read(hop)
            if address is None:
                break  # `unknown`, a name that hides the address, or nonsense
            found = str(address)
            if self._everyone or not self.trusts(address):
                break
        return found


def with_forwarded_clients(app: ASGIApp, trusted: TrustedProxies) -> ASGIApp:
    """Wrap an application, which then sees the clients of trusted proxies."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            peer = scope.get("client")
            client = trusted.client_of(peer[0] if peer else None, scope["headers"])
            if client is not None:
                scope = {**scope, "client": (client, 0)}
        await app(scope, receive, send)

    return answer


def _values(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> list[str]:
    """Return the elements of a list header, over all its lines."""
    lines = [value.decode("latin-1") for key, value in headers if key == name]
    return [element.strip() for element in ",".join(lines).split(",") if element.strip()]


def _read(text: str) -> _Address | None:
    """Read an address, with or without a port."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped
