"""The store in a SQLite file that the processes of one machine share. Uses `_files`, `settings`, `errors`, `_core`."""

from perdure.store.sqlite.store import SqliteStore as SqliteStore
