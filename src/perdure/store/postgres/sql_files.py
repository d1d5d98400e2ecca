"""The SQL files beside this module: what makes a store's schema, and the queries by name."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from perdure.store.postgres.address import DEFAULT_SCHEMA
from perdure.store.sql_text import statements_by_name

_FOLDER = files("perdure.store.postgres") / "sql"

MIGRATIONS: Mapping[int, tuple[str, ...]] = {1: ("tables_1.sql", "steps_1.sql", "others_1.sql")}
"""The files that lead to each version from the one before it, in order."""

VERSION = max(MIGRATIONS)


@cache
def queries(schema: str) -> Mapping[str, str]:
    """The statements of `queries.sql` by name, for one schema."""
    return statements_by_name(_read("queries.sql", schema))


def migration(version: int, schema: str) -> str:
    """The script that leads to a version."""
    return "\n".join(_read(name, schema) for name in MIGRATIONS[version])


def _read(name: str, schema: str) -> str:
    """The files are written for the schema `perdure`; nothing else in them is spelled like that."""
    return _FOLDER.joinpath(name).read_text(encoding="utf-8").replace(f"{DEFAULT_SCHEMA}.", f"{schema}.")
