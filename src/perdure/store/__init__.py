"""Keeps the log: what a store promises, and the stores; uses `_files`, `settings`, `errors` and `_core`."""

from urllib.parse import parse_qsl

from perdure.errors import BadSetting
from perdure.store.base import Store
from perdure.store.memory import MemoryStore
from perdure.store.sqlite.store import ExistingSqlite, SqliteStore, SqliteView

__all__ = ["MemoryStore", "SqliteStore", "Store", "existing_store", "open_store"]

_FORMS = "memory: or sqlite:PATH or sqlite:PATH?sync=full or postgresql://USER@HOST/DATABASE"
_SCHEMES = ("memory", "sqlite", "postgresql", "postgres")


def open_store(url: str, *, busy_timeout: float = 1.0) -> Store:
    """Give the store at an address (`memory:`, `sqlite:PATH`, `sqlite:PATH?sync=normal|full`,
    `postgresql://USER@HOST/DATABASE`), not opened yet."""
    scheme, rest = _parts(url)
    if scheme.startswith("postgres"):
        return _postgres(url, timeout=busy_timeout, makes=True)
    return MemoryStore() if scheme == "memory" else _sqlite(SqliteStore, url, rest, busy_timeout)


def existing_store(url: str, *, writes: bool, busy_timeout: float = 5.0) -> Store:
    """The same for a program that does not serve: the store must be there, in this release's version.

    The store is neither made nor migrated. Without `writes` it is only read, and no server waits for that.
    """
    scheme, rest = _parts(url)
    if scheme.startswith("postgres"):
        return _postgres(url, timeout=busy_timeout, makes=False)
    if scheme == "memory":
        raise BadSetting(
            f"store is {url!r}; a store in memory can be read only by its own server; give the store that the server"
            " writes, such as sqlite:PATH"
        )
    return _sqlite(ExistingSqlite if writes else SqliteView, url, rest, busy_timeout)


def _parts(url: str) -> tuple[str, str]:
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in _SCHEMES:
        raise BadSetting(f"store is {url!r}; allowed: {_FORMS}")
    if scheme == "memory" and rest:
        raise BadSetting(f"store is {url!r}; nothing may follow the colon of a store in memory")
    return scheme, rest


def _postgres(url: str, *, timeout: float, makes: bool) -> Store:
    try:
        from perdure.store.postgres.store import PostgresStore  # its driver is an extra
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        raise BadSetting("a store in PostgreSQL needs its driver: pip install 'perdure[postgres]'") from error
    return PostgresStore(url, timeout=timeout, makes=makes)


def _sqlite(kind: type[SqliteStore], url: str, rest: str, busy_timeout: float) -> SqliteStore:
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
            return kind(path, sync=sync, busy_timeout=busy_timeout)
    raise BadSetting(f"store is {url!r}; sync is {sync!r}, allowed: normal or full")
