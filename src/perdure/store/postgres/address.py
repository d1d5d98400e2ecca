"""Reads the address of a PostgreSQL store: what is ours in it, and what the driver gets."""

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from perdure.errors import BadSetting

SCHEMES = ("postgresql", "postgres")
FORM = "postgresql://USER@HOST/DATABASE"
DEFAULT_SCHEMA = "perdure"

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


def parse_address(url: str) -> Address:
    """Give the parts of an address, or raise `BadSetting`."""
    shown = without_password(url)
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is not a number
    except ValueError as error:
        raise BadSetting(f"store is {shown!r}: {error}; allowed: {FORM}") from None
    options = parse_qsl(parts.query, keep_blank_values=True)
    ours = {name: value for name, value in options if name in ("schema", "listen")}
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
    dsn = _joined(parts, kept)
    listen = ours.get("listen", dsn)
    if urlsplit(listen).scheme not in SCHEMES:
        raise BadSetting(f"store is {shown!r}; listen is {without_password(listen)!r}, allowed: {FORM}")
    return Address(dsn=dsn, listen=listen, schema=schema, shown=shown)


def without_password(url: str) -> str:
    """Give an address as it may be logged."""
    hidden = re.sub(r"(://[^/@:?]*):[^/?]*@", r"\1:***@", url)
    return re.sub(r"((?:^|[?&])(?:password|passwd|listen)=)[^&]*", r"\1***", hidden)


def _joined(parts: SplitResult, options: list[tuple[str, str]]) -> str:
    """The address with these options. Several hosts stay as they are."""
    query = f"?{urlencode(options)}" if options else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path}{query}"
