"""Stores: where the log is kept. `open_store` finds the one that an address names."""

from __future__ import annotations

from urllib.parse import parse_qsl

from perdure.errors import BadSetting
from perdure.store.base import Store
from perdure.store.memory import MemoryStore
from perdure.store.sqlite import SqliteStore

__all__ = ["MemoryStore", "SqliteStore", "Store", "open_store"]

_FORMS = "memory: or sqlite:PATH or sqlite:PATH?sync=full"


def open_store(url: str, *, busy_timeout: float = 1.0) -> Store:
    """The store that an address names: `memory:`, `sqlite:PATH`, `sqlite:PATH?sync=normal|full`. Not opened yet."""
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in ("memory", "sqlite"):
        raise BadSetting(f"store is {url!r}; allowed: {_FORMS}")
    if scheme == "memory":
        if rest:
            raise BadSetting(f"store is {url!r}; a store in memory takes nothing behind the colon")
        return MemoryStore()
    return _sqlite(url, rest, busy_timeout)


def _sqlite(url: str, rest: str, busy_timeout: float) -> SqliteStore:
    path, _, query = rest.partition("?")
    if path == ":memory:":
        raise BadSetting(f"store is {url!r}; for a store in memory say memory:")
    if not path or "\0" in path:
        raise BadSetting(f"store is {url!r}, which names no file; allowed: {_FORMS}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    sync = options.pop("sync", "normal")
    if options:
        raise BadSetting(f"store is {url!r}; unknown option {next(iter(options))!r}, only sync is known")
    match sync:
        case "normal" | "full":
            return SqliteStore(path, sync=sync, busy_timeout=busy_timeout)
    raise BadSetting(f"store is {url!r}; sync is {sync!r}, allowed: normal or full")
