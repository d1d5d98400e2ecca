"""Checks the addresses of authorization servers and of what they protect. The reasons are one line each."""

from urllib.parse import SplitResult, urlsplit

from perdure._core.loopback import is_loopback


def parse_issuer(text: str) -> str:
    """Check the address of an issuer. Raises `ValueError`."""
    if _parts(text).query:
        raise ValueError(f"{text!r} has a query, and the address of an issuer has none (RFC 8414)")
    return parse_key_source(text)


def parse_key_source(text: str) -> str:
    """Check an address from which keys are read: without TLS, whoever is on the way could replace them. Raises
    `ValueError`."""
    parts = _parts(text)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ValueError(f"{text!r} is not https:; keys that come over plain http: may be anyone's")
    return text


def parse_resource(text: str) -> str:
    """Check the address of a protected resource (RFC 8707). Raises `ValueError`."""
    _parts(text)
    return text


def parse_scopes(text: str) -> tuple[str, ...]:
    """Read names that are separated by commas. Raises `ValueError`."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        # The characters of RFC 6749, 3.3; a header quotes them.
        if not name or not all("!" <= character <= "~" and character not in '"\\' for character in name):
            raise ValueError(f"{name!r} is not the name of a scope; write names that are separated by commas")
    return names


def is_same_origin(address: str, other: str) -> bool:
    """Raises `ValueError` for what is no address."""
    return _origin(_parts(address)) == _origin(_parts(other))


def _origin(parts: SplitResult) -> tuple[str, str | None, int]:
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _parts(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"{text!r} is not an address such as https://login.example")
    if "@" in parts.netloc:
        raise ValueError("the address has a user name or a password; write it without")
    if "#" in text:
        raise ValueError(f"{text!r} has a fragment; write it without")
    return parts
