"""Host and Origin: refuses requests from other sites (DNS rebinding), and headers that are too large."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from perdure.http.refusals import Refusal, Refused
from perdure.settings import Settings

_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "[::1]"})


class HostAndOrigin:
    """Checks the headers that every request must have."""

    def __init__(self, settings: Settings) -> None:
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in (*settings.allowed_origins, *settings.cors_origins))
        self._most = settings.max_headers

    def check(self, raw: list[tuple[bytes, bytes]], headers: Mapping[bytes, bytes]) -> None:
        """Raise `Refused` unless the request may come in."""
        if sum(len(name) + len(value) for name, value in raw) > self._most:
            raise Refused(Refusal.HEADERS_TOO_LARGE, limit=self._most)
        names = [name for name, _ in raw if name in (b"host", b"origin")]
        for name in names:
            # A proxy in front may have judged another of two lines than this does (RFC 9112, 3.2).
            if (count := names.count(name)) > 1:
                raise Refused(Refusal.REPEATED_HEADER, count=count, name=name.decode().capitalize())
        host = headers.get(b"host", b"").decode("latin-1").lower()
        bare = _without_port(host)
        # Listed as it is, without its port, with any port (`name:*`), or everything is (`*`).
        if bare not in _THIS_MACHINE and not {"*", host, bare, f"{bare}:*"} & self._hosts:
            raise Refused(Refusal.BAD_HOST, host=host or "(none)")
        origin = headers.get(b"origin")
        if origin is not None and not self._origin_allowed(origin.decode("latin-1").lower()):
            raise Refused(Refusal.BAD_ORIGIN, origin=origin.decode("latin-1"))

    def _origin_allowed(self, origin: str) -> bool:
        """Listed as it is (an origin without a port has the scheme's own), with any port (`…:*`), or everything is."""
        if {"*", origin, f"{_without_port(origin)}:*"} & self._origins:
            return True
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False  # no address at all
        return parts.scheme in ("http", "https") and _without_port(parts.netloc) in _THIS_MACHINE


def _without_port(value: str) -> str:
    head, colon, port = value.rpartition(":")
    return head if colon and port.isascii() and port.isdigit() else value
