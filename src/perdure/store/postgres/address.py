"""Reads the address of a PostgreSQL store: the options of the store, and those of the driver."""

import configparser
import hashlib
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
"""Seconds in which a connection must be made, unless the address sets another time: enough for a server on another
network, with TLS, that starts."""

LONGEST_PATIENCE = 600.0
"""Seconds that an address may set at most: a database that sleeps while it is not used wakes within seconds."""

OURS = ("schema", "listen", "connect_timeout", "channel_binding")
"""Options that the driver does not get. It does not know the last two and would send them to the server as settings."""

_HOST = re.compile(r"(\[[^]]*\]|[^][:]*)(:[0-9]*)?")
"""A host and its port."""

_TARGET = "target_session_attrs"
_TARGETS = ("any", "primary", "standby", "prefer-standby", "read-write", "read-only")
"""The values that the driver knows."""
_WRITING = ("primary", "read-write")
"""The values by which every connection finds the host that takes writes."""

MAX_SCHEMA = 40
_SCHEMA = re.compile(rf"[a-z_][a-z0-9_]{{0,{MAX_SCHEMA - 1}}}")
"""Names that need no quotes, and are short enough for the name of a channel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The database, and the store's schema in it."""

    dsn: str
    """For the driver, with its options, such as `sslmode`. Options that it does not know are settings of the server,
    such as `synchronous_commit`."""
    listen: str
    """The same for the listen connection, which needs a session of its own: past a pooler, if there is one."""
    schema: str
    shown: str
    """The address for people: without the password."""
    patience: float = OPEN_SECONDS
    """Seconds in which a connection must be made."""


def parse_address(url: str) -> Address:
    """Return the parts of an address, or raise `BadSetting`."""
    shown = without_password(url)
    store = f"store is {shown!r}"
    parts, options = _read(url, store)
    ours = {name: value for name, value in options if name in OURS}
    kept = [(name, value) for name, value in options if name not in ours]
    if not parts.path.strip("/") and not any(name in ("database", "dbname", "service") for name, _ in kept):
        raise BadSetting(f"{store}, without the name of a database; allowed: {FORM}")
    schema = ours.get("schema", DEFAULT_SCHEMA)
    if not _SCHEMA.fullmatch(schema) or schema.startswith("pg_"):
        raise BadSetting(f"{store}; schema is {schema!r}, allowed: up to 40 small letters, digits and underscores")
    target = dict(kept).get(_TARGET, "any")
    if target not in _TARGETS:
        raise BadSetting(f"{store}; {_TARGET} is {target!r}, allowed: {', '.join(_TARGETS)}")
    patience = ours.get("connect_timeout", str(OPEN_SECONDS))
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", patience) or not 0.0 < float(patience) <= LONGEST_PATIENCE:
        raise BadSetting(
            f"{store}; connect_timeout is {patience!r}, allowed: a number of seconds, more than 0, up to"
            f" {LONGEST_PATIENCE:g}"
        )
    dsn = listen = _joined(parts, kept)
    if "listen" in ours:
        direct, options = _read(ours["listen"], f"{store}; listen is {without_password(ours['listen'])!r}")
        listen = _joined(direct, [(name, value) for name, value in options if name not in OURS])
    return Address(dsn=dsn, listen=listen, schema=schema, shown=shown, patience=float(patience))


def _read(url: str, what: str) -> tuple[SplitResult, list[tuple[str, str]]]:
    """Split an address into its parts and options. Refuse what the driver cannot do, or ignores. `what` begins the
    refusal. (Python's own error for a bad address may quote a part of the password.)"""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    user, _, hosts = parts.netloc.rpartition("@")
    can_be_read = "@" not in user and all(map(_HOST.fullmatch, hosts.split(",")))
    if parts.scheme not in SCHEMES or not url.startswith(f"{parts.scheme}://") or not can_be_read:
        raise BadSetting(f"{what}, allowed: {FORM}; in a password / ? # @ are written as %2F %3F %23 %40")
    options = parse_qsl(parts.query, keep_blank_values=True)
    binding = dict(options).get("channel_binding", "prefer")
    if binding not in ("disable", "prefer"):
        raise BadSetting(
            f"{what}; channel_binding is {binding!r}, which the driver cannot do: leave it out, and have the server's"
            " certificate checked with sslmode=verify-full"
        )
    if (service := dict(options).get("service")) is not None:
        # The driver ignores a service that is not in the file, and takes a database that the address does not name.
        home = Path(os.environ.get("APPDATA", ""), "postgresql") if os.name == "nt" else Path.home()
        file = os.environ.get("PGSERVICEFILE") or home / ".pg_service.conf"
        services = configparser.ConfigParser()
        try:
            services.read(file)
            known = dict(services[service]) if services.has_section(service) else None
        except configparser.Error as error:
            raise BadSetting(f"{what}; {file} cannot be read: {type(error).__name__}") from None
        if known is None:
            raise BadSetting(f"{what}; there is no service {service!r} in {file}")
    return parts, options


def for_writing(address: Address) -> Address:
    """Return the address of the host that takes writes. Raises `BadSetting` if the address asks for another one."""
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


def with_schema(url: str, name: str) -> str:
    """Return the address with the schema of one of several servers: `perdure_NAME`. A name that no schema can have is
    spelled as one, with a digest, so that no two are alike."""
    parts, options = _read(url, f"store is {without_password(url)!r}")
    base = dict(options).get("schema", DEFAULT_SCHEMA)
    schema = f"{base}_{name}"
    if not _SCHEMA.fullmatch(schema):
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        spelled = re.sub(r"[^a-z0-9_]", "_", schema.lower())
        schema = f"{spelled[: MAX_SCHEMA - len(digest) - 1]}_{digest}"
    return _joined(parts, [*((key, value) for key, value in options if key != "schema"), ("schema", schema)])


def each_host(dsn: str) -> list[str]:
    """Return an address for each host."""
    # Not by `urlsplit`: newer releases of Python refuse an IPv6 address that is not the first of several hosts.
    scheme, slashes, rest = dsn.partition("//")
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    path = rest.removeprefix(netloc)
    user, at, hosts = netloc.rpartition("@")
    if "," not in hosts or f"{_TARGET}=prefer-standby" in path:  # the driver has to know all of these
        return [dsn]
    return [f"{scheme}{slashes}{user}{at}{host}{path}" for host in hosts.split(",")]


def without_password(url: str) -> str:
    """Return an address as it may be logged."""
    hidden = re.sub(r"((?:^|[?&])(?:password|passwd|sslpassword|listen)=)[^&]*", r"\1***", url)
    # Up to the last @: a password may have any character in it, also one that should have been quoted.
    return re.sub(r"(://[^/@:?]*):.*@", r"\1:***@", hidden, flags=re.DOTALL)


def _joined(parts: SplitResult, options: list[tuple[str, str]]) -> str:
    """Return the address with these options. A path of one slash is left out: the driver would take it for the name of
    a database, before the one that an option or a service names."""
    query = f"?{urlencode(options)}" if options else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path if parts.path != '/' else ''}{query}"
