"""Keeps the log in a SQLite file that the processes of one machine share; uses `_files`, `settings`, `errors` and
`_core`."""

from perdure.store.sqlite.store import SqliteStore as SqliteStore
