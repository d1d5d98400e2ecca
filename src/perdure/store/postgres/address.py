"""Reads the address of a PostgreSQL store: what is ours in it, and what the driver gets."""

import configparser
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from perdure.errors import BadSetting

SCHEMES = ("postgresql", "postgres")
FORM = "postgresql://USER@HOST/DATABASE"
DEFAULT_SCHEMA = "perdure"

OPEN_SECONDS = 10.0
"""How long a connection may take to be made, if the address does not say it: a server on another network, with TLS,
that starts."""

LONGEST_PATIENCE = 600.0
"""The most that an address may ask for: a database that sleeps while it is not used wakes within seconds."""

OURS = ("schema", "listen", "connect_timeout", "channel_binding")
"""Options that the driver does not get. It knows the last two not: it would send them to the server as settings."""

_HOST = re.compile(r"(\[[^]]*\]|[^][:]*)(:[0-9]*)?")
"""One of several hosts, and its port."""

_TARGET = "target_session_attrs"
_TARGETS = ("any", "primary", "standby", "prefer-standby", "read-write", "read-only")
"""The values that the driver knows."""
_WRITING = ("primary", "read-write")
"""Those by which every connection finds the server that takes writes, whichever of several hosts that is."""

_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,39}")
"""Names that need no quotes, and that are short enough to stand in the name of a channel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where the database is, and which schema in it is the store's."""

    dsn: str
    """As the driver reads it: with its own options, such as `sslmode` and `target_session_attrs`. Options that it does
    not know are settings of the server, such as `synchronous_commit`."""
    listen: str
    """The same for the one connection that needs a session of its own: past a pooler, if there is one."""
    schema: str
    shown: str
    """The address for people: without the password."""
    patience: float = OPEN_SECONDS
    """Seconds in which a connection must be made."""


def parse_address(url: str) -> Address:
    """Give the parts of an address, or raise `BadSetting`."""
    shown = without_password(url)
    parts = _split(url)
    if parts is None:
        raise BadSetting(
            f"store is {shown!r}, which cannot be read; allowed: {FORM}; in a password / ? # @ are written as"
            " %2F %3F %23 %40"
        )
    options = parse_qsl(parts.query, keep_blank_values=True)
    ours = {name: value for name, value in options if name in OURS}
    kept = [(name, value) for name, value in options if name not in ours]
    if parts.scheme not in SCHEMES or not url.startswith(f"{parts.scheme}://"):
        raise BadSetting(f"store is {shown!r}; allowed: {FORM}")
    if not parts.path.strip("/") and not any(name in ("database", "dbname", "service") for name, _ in kept):
        raise BadSetting(f"store is {shown!r}, without the name of a database; allowed: {FORM}")
    schema = ours.get("schema", DEFAULT_SCHEMA)
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise BadSetting(
            f"store is {shown!r}; schema is {schema!r}, allowed: up to 40 small letters, digits and underscores"
        )
    target = dict(kept).get(_TARGET, "any")
    if target not in _TARGETS:
        raise BadSetting(f"store is {shown!r}; {_TARGET} is {target!r}, allowed: {', '.join(_TARGETS)}")
    _refuse_binding(options, shown)
    _refuse_unknown_service(options, shown)
    dsn = _joined(parts, kept)
    listen = _listening(ours["listen"], shown) if "listen" in ours else dsn
    patience = _patience(ours.get("connect_timeout", str(OPEN_SECONDS)), shown)
    return Address(dsn=dsn, listen=listen, schema=schema, shown=shown, patience=patience)


def _listening(url: str, shown: str) -> str:
    """The second address, as the driver reads it."""
    parts = _split(url)
    if parts is None or parts.scheme not in SCHEMES:
        raise BadSetting(f"store is {shown!r}; listen is {without_password(url)!r}, allowed: {FORM}")
    options = parse_qsl(parts.query, keep_blank_values=True)
    _refuse_binding(options, shown)
    _refuse_unknown_service(options, shown)
    return _joined(parts, [(name, value) for name, value in options if name not in OURS])


def _refuse_binding(options: list[tuple[str, str]], shown: str) -> None:
    """What an address demands and the driver cannot do is not passed over."""
    binding = dict(options).get("channel_binding", "prefer")
    if binding not in ("disable", "prefer"):
        raise BadSetting(
            f"store is {shown!r}; channel_binding is {binding!r}, which the driver cannot do: leave it out, and have"
            " the server's certificate checked with sslmode=verify-full"
        )


def _refuse_unknown_service(options: list[tuple[str, str]], shown: str) -> None:
    """The driver passes over a service that is not in the file, and takes a database that the address does not name."""
    service = dict(options).get("service")
    if service is None:
        return
    home = Path(os.environ.get("APPDATA", ""), "postgresql") if os.name == "nt" else Path.home()
    file = os.environ.get("PGSERVICEFILE") or home / ".pg_service.conf"
    services = configparser.ConfigParser()
    try:
        services.read(file)
        known = dict(services[service]) if services.has_section(service) else None
    except configparser.Error as error:
        raise BadSetting(f"store is {shown!r}; {file} cannot be read: {type(error).__name__}") from None
    if known is None:
        raise BadSetting(f"store is {shown!r}; there is no service {service!r} in {file}")


def _patience(text: str, shown: str) -> float:
    seconds = float(text) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text) else 0.0
    if not 0.0 < seconds <= LONGEST_PATIENCE:
        raise BadSetting(
            f"store is {shown!r}; connect_timeout is {text!r}, allowed: a number of seconds, more than 0, up to"
            f" {LONGEST_PATIENCE:g}"
        )
    return seconds


def for_writing(address: Address) -> Address:
    """Give the address of a store that is written: of several hosts, the one that takes writes. Raises `BadSetting` if
    it asks for another one."""
    parts = urlsplit(address.dsn)
    options = parse_qsl(parts.query, keep_blank_values=True)
    target = dict(options).get(_TARGET)
    is_one_of_several = len(each_host(address.dsn)) > 1
    if target is None and is_one_of_several:
        dsn = _joined(parts, [*options, (_TARGET, "read-write")])
        return replace(address, dsn=dsn, listen=dsn if address.listen == address.dsn else address.listen)
    if target in _WRITING or target is None or (target == "any" and not is_one_of_several):
        return address
    raise BadSetting(
        f"store is {address.shown!r}; {_TARGET} is {target!r}, by which a server that only reads may answer; a store"
        f" that is written needs {_TARGET}=read-write"
    )


def each_host(dsn: str) -> list[str]:
    """Give an address for each of its hosts."""
    # Not by `urlsplit`: newer releases of Python refuse an IPv6 address that is not the first of several hosts.
    scheme, slashes, rest = dsn.partition("//")
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    path = rest.removeprefix(netloc)
    user, at, hosts = netloc.rpartition("@")
    if "," not in hosts or f"{_TARGET}=prefer-standby" in path:  # of those the driver has to see all
        return [dsn]
    return [f"{scheme}{slashes}{user}{at}{host}{path}" for host in hosts.split(",")]


def _split(url: str) -> SplitResult | None:
    """The parts of an address; `None` if its hosts cannot be told. (What Python says of a bad one may quote a part of
    the password.)"""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    user, _, hosts = parts.netloc.rpartition("@")
    return parts if "@" not in user and all(map(_HOST.fullmatch, hosts.split(","))) else None


def without_password(url: str) -> str:
    """Give an address as it may be logged."""
    hidden = re.sub(r"((?:^|[?&])(?:password|passwd|sslpassword|listen)=)[^&]*", r"\1***", url)
    # As far as the last @: a password may have any sign in it, also one that should have been written in another way.
    return re.sub(r"(://[^/@:?]*):.*@", r"\1:***@", hidden, flags=re.DOTALL)


def _joined(parts: SplitResult, options: list[tuple[str, str]]) -> str:
    """The address with these options. Several hosts stay as they are. A path of one slash goes: the driver would take
    it for the name of a database, before the one that an option or a service names."""
    query = f"?{urlencode(options)}" if options else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path if parts.path != '/' else ''}{query}"
