"""The SQL files beside this module: the versions of the schema, and the queries by name.

A version of the schema is what a release needs: its tables and its functions. Two releases write at once while a
deployment is being replaced, so the functions of a release have its version in their names (`commit_1`), and a later
release adds others beside them (`commit_2`). What no release that may still run uses is dropped by a later migration.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from perdure.store.postgres.address import DEFAULT_SCHEMA
from perdure.store.rows import statements_by_name

_FOLDER = files("perdure.store.postgres") / "sql"


OLDEST: Mapping[int, int] = {
    1: 1,
}
"""For each version, which has a file `schema_N.sql`: the oldest version whose releases can use the schema afterwards.
Older ones refuse it when they start, so all their processes have to be stopped before."""

VERSION = max(OLDEST)

_MADE = re.compile(rf"^CREATE (?:UNLOGGED )?(?:TABLE|VIEW|FUNCTION) {DEFAULT_SCHEMA}\.(\w+)", re.MULTILINE)

_SET_VERSION = """
INSERT INTO {schema}.version (version, oldest) VALUES ({version}, {oldest})
ON CONFLICT (one) DO UPDATE SET version = excluded.version, oldest = excluded.oldest;
"""


@cache
def queries(schema: str) -> Mapping[str, str]:
    """The statements of `queries.sql` by name, for one schema."""
    return statements_by_name(_read("queries.sql", schema))


@cache
def checks(schema: str) -> Mapping[str, str]:
    """The statements of `checks.sql` by name, for one schema."""
    return statements_by_name(_read("checks.sql", schema))


def migration(version: int, schema: str) -> str:
    """The script that leads to a version, and says so in the schema."""
    said = _SET_VERSION.format(schema=schema, version=version, oldest=OLDEST[version])
    return f"{_read(f'schema_{version}.sql', schema)}\n{said}"


@cache
def made() -> frozenset[str]:
    """The names of the tables, views and functions that this release makes."""
    scripts = (migration(version, DEFAULT_SCHEMA) for version in OLDEST)
    return frozenset(name for script in scripts for name in _MADE.findall(script))


def _read(name: str, schema: str) -> str:
    """The files are written for the schema `perdure`; nothing else in them is spelled like that."""
    return _FOLDER.joinpath(name).read_text(encoding="utf-8").replace(f"{DEFAULT_SCHEMA}.", f"{schema}.")
