"""Opens a SQLite file as it is, or refuses it: for operators, whose commands make and migrate nothing."""

import contextlib
import os
import sqlite3
from urllib.parse import quote

from perdure.errors import StoreError, StoreUnavailable
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.file import APPLICATION_ID, named, open_reader, pragma, refuse_newer
from perdure.store.sqlite.store import SqliteStore

PATIENCE = 5.0
"""Seconds to wait for a server that holds the file: an operator has more time than a request."""


def refuse_unfit(path: str) -> None:
    """Raise unless there is a store of this release at the path. Nothing is made or changed."""
    if not os.path.exists(path):
        raise StoreUnavailable(f"there is no SQLite file {path}")
    with (
        named(path, "opened"),
        # Not `mode=ro`: that leaves the log's files behind if no other program has the file open.
        contextlib.closing(sqlite3.connect(f"file:{quote(path)}?mode=rw", uri=True, timeout=PATIENCE)) as file,
    ):
        if pragma(file, "application_id") != APPLICATION_ID:
            raise StoreError(
                f"the SQLite file {path} is not a Perdure store; give the file that a server was started with"
            )
        refuse_newer(file, path)
        version = pragma(file, "user_version")
    if version < (ours := _sql.schema_version()):
        raise StoreError(
            f"the SQLite file {path} has version {version}, written by an older release; a server of this one brings it"
            f" to version {ours} when it starts, and so does `perdure store migrate`"
        )


class ExistingSqlite(SqliteStore):
    """A store that must be there already."""

    async def open(self) -> None:
        refuse_unfit(self._path)
        await super().open()


class SqliteView(SqliteStore):
    """A store that is only read. It has no writer, so no other process waits for a lock of it."""

    _watch: sqlite3.Connection | None = None

    async def open(self) -> None:
        refuse_unfit(self._path)
        with named(self._path, "opened"):
            self._watch = open_reader(self._path, busy_timeout=PATIENCE)
        self._readers.open()

    async def aclose(self) -> None:
        self._readers.close()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def stamp(self) -> object:
        """SQLite's own count of what others have committed, as this connection has seen it."""
        if self._watch is None:
            raise StoreUnavailable(f"the SQLite file {self._path} is closed")
        with named(self._path, "read"):
            return self._watch.execute("PRAGMA data_version").fetchone()[0]
