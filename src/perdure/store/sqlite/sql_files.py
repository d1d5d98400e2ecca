"""Reads the SQL files: the versions of the schema, and the queries by name."""

import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from perdure.store.rows import shared_sql, statements_by_name

_FOLDER = files("perdure.store.sqlite") / "sql"
_MIGRATION = re.compile(r"schema_(\d+)\.sql")


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    version: int
    statements: tuple[str, ...]


@cache
def queries() -> Mapping[str, str]:
    return _statements_of("queries.sql")


@cache
def checks() -> Mapping[str, str]:
    return _statements_of("checks.sql")


def _statements_of(name: str) -> Mapping[str, str]:
    """Return the statements that both databases run, in the spelling of SQLite, and those of SQLite alone."""
    shared = re.sub(r"\$(\d+)", r"?\1", shared_sql(name).replace("perdure.", ""))
    return {**statements_by_name(shared), **statements_by_name(_read(name))}


@cache
def migrations() -> tuple[Migration, ...]:
    """Every `schema_N.sql`, in order. The first one makes the tables, the last one's version is the schema's."""
    found = (_MIGRATION.fullmatch(entry.name) for entry in _FOLDER.iterdir())
    versions = sorted((int(name[1]), name[0]) for name in found if name)
    return tuple(Migration(version=number, statements=tuple(_statements(_read(name)))) for number, name in versions)


def schema_version() -> int:
    return migrations()[-1].version


def _read(name: str) -> str:
    return _FOLDER.joinpath(name).read_text(encoding="utf-8")


def _statements(script: str) -> Iterator[str]:
    """Cut a script into statements, so that they can run within one transaction (`executescript` ends it)."""
    statement = ""
    for line in script.splitlines():
        if not line.lstrip().startswith("--"):
            statement += line + "\n"
        if statement.strip() and sqlite3.complete_statement(statement):
            yield statement.strip()
            statement = ""
