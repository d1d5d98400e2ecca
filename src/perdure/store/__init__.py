"""Keeps the log: the promises of a store, and the stores; uses `_files`, `settings`, `errors` and `_core`."""

from pathlib import PurePath
from typing import TypeVar
from urllib.parse import parse_qsl

from perdure.errors import BadSetting
from perdure.store.interface import Inspect, Store
from perdure.store.maintenance import Maintenance
from perdure.store.memory import MemoryStore
from perdure.store.postgres.address import with_schema, without_password
from perdure.store.sqlite.file import Sync
from perdure.store.sqlite.maintenance import SqliteMaintenance
from perdure.store.sqlite.store import ExistingSqlite, SqliteStore, SqliteView

__all__ = [
    "Inspect",
    "MemoryStore",
    "SqliteStore",
    "Store",
    "existing_store",
    "maintenance_of",
    "open_store",
    "own_store",
    "without_password",
]

_FORMS = "memory: or sqlite:PATH or sqlite:PATH?sync=full or postgresql://USER@HOST/DATABASE"
S = TypeVar("S", bound=SqliteStore)

_SCHEMES = ("memory", "sqlite", "postgresql", "postgres")


def open_store(url: str, *, busy_timeout: float = 1.0) -> Store:
    """Return the store at an address (`memory:`, `sqlite:PATH`, `sqlite:PATH?sync=normal|full`,
    `postgresql://USER@HOST/DATABASE`), not opened yet."""
    scheme, rest = _parts(url)
    if scheme.startswith("postgres"):
        _need_asyncpg()
        from perdure.store.postgres.store import PostgresStore

        return PostgresStore(url, timeout=busy_timeout)
    return MemoryStore() if scheme == "memory" else _sqlite(SqliteStore, url, rest, busy_timeout)


def existing_store(url: str, *, writes: bool, busy_timeout: float = 5.0) -> Inspect:
    """The same for a program that does not serve: the store must exist, in this release's version.

    The store is neither made nor migrated. Without `writes` it is only read, and no server waits for that.
    """
    scheme, rest = _shared_parts(url)
    if scheme.startswith("postgres"):
        _need_asyncpg()
        from perdure.store.postgres.store import PostgresStore

        return PostgresStore(url, timeout=busy_timeout, makes=False, writes=writes)
    return _sqlite(ExistingSqlite if writes else SqliteView, url, rest, busy_timeout)


def maintenance_of(url: str) -> Maintenance:
    """Return what makes, migrates and checks the store at an address."""
    scheme, rest = _shared_parts(url)
    if scheme.startswith("postgres"):
        _need_asyncpg()
        from perdure.store.postgres.maintenance import PostgresMaintenance

        return PostgresMaintenance(url)
    path, sync = _file(url, rest)
    return SqliteMaintenance(path, sync=sync)


def own_store(url: str, name: str) -> str:
    """Return the address of the store that one of several servers has beside the others: another file, or another
    schema. `name`: letters, digits, dots, hyphens and underscores."""
    scheme, rest = _parts(url)
    if scheme == "memory":
        return url
    if scheme.startswith("postgres"):
        return with_schema(url, name)
    file = PurePath(_file(url, rest)[0])
    query = rest.partition("?")[2]
    return f"{scheme}:{file.with_name(f'{file.stem}.{name}{file.suffix}')}{query and f'?{query}'}"


def _parts(url: str) -> tuple[str, str]:
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in _SCHEMES:
        hint = "" if colon or not url else f"; did you mean 'sqlite:{url}'?"
        raise BadSetting(f"store is {without_password(url)!r}; allowed: {_FORMS}{hint}")
    if scheme == "memory" and rest:
        raise BadSetting(f"store is {url!r}; nothing may follow the colon of a store in memory")
    return scheme, rest


def _shared_parts(url: str) -> tuple[str, str]:
    scheme, rest = _parts(url)
    if scheme == "memory":
        raise BadSetting(
            f"store is {url!r}; a store in memory can be read only by its own server; give the store that the server"
            " writes, such as sqlite:PATH"
        )
    return scheme, rest


def _need_asyncpg() -> None:
    """The driver is an extra."""
    try:
        import asyncpg  # noqa: F401
    except ModuleNotFoundError as error:
        raise BadSetting("a store in PostgreSQL needs its driver: pip install 'perdure[postgres]'") from error


def _sqlite(kind: type[S], url: str, rest: str, busy_timeout: float) -> S:
    path, sync = _file(url, rest)
    return kind(path, sync=sync, busy_timeout=busy_timeout)


def _file(url: str, rest: str) -> tuple[str, Sync]:
    path, _, query = rest.partition("?")
    if path == ":memory:":
        raise BadSetting(f"store is {url!r}; for a store in memory say memory:")
    if not path or "\0" in path:
        raise BadSetting(f"store is {url!r}, without the path of a file; allowed: {_FORMS}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    sync = options.pop("sync", "normal")
    if options:
        raise BadSetting(f"store is {url!r}; unknown option {next(iter(options))!r}, only sync is known")
    match sync:
        case "normal" | "full":
            return path, sync
    raise BadSetting(f"store is {url!r}; sync is {sync!r}, allowed: normal or full")
