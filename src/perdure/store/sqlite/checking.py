"""Checks a whole SQLite file: that SQLite can read all of it, and that the rules of `store.invariants` hold in it."""

import contextlib
import sqlite3
from collections.abc import Sequence

from perdure.store.invariants import COUNTED, INVARIANTS, MOST_SHOWN, OWN_WORD, Fault, Verdict, faults_of
from perdure.store.records import RECORD_VERSION
from perdure.store.sqlite import sql_files as _sql
from perdure.store.sqlite.file import rollback

INTEGRITY = "integrity"
"""The name of the rule that SQLite itself checks."""

_VALUES = {"unanswered": (OWN_WORD,), "records": (RECORD_VERSION,)}


def check_file(connection: sqlite3.Connection) -> Verdict:
    """Look at everything, as of one moment. Writers do not wait for it; only the log beside the file cannot begin again
    meanwhile, and grows."""
    connection.execute("BEGIN")
    try:
        damage = _integrity(connection)
        if damage:
            # Queries over damaged pages would raise, or tell nonsense.
            return Verdict(counts={}, faults=damage[:MOST_SHOWN], unnamed=[INTEGRITY] if damage[MOST_SHOWN:] else [])
        counts = dict(zip(COUNTED, connection.execute(_sql.checks()["counts"]).fetchone(), strict=True))
        faults: list[Fault] = []
        unnamed: list[str] = []
        for rule in INVARIANTS:
            if rule in _sql.checks():
                named, has_more = faults_of(rule, _broken(connection, rule))
                faults += named
                unnamed += [rule] if has_more else []
        return Verdict(counts=counts, faults=faults, unnamed=unnamed)
    finally:
        rollback(connection)


def _integrity(connection: sqlite3.Connection) -> list[Fault]:
    try:
        found = [says for (says,) in connection.execute(f"PRAGMA integrity_check({MOST_SHOWN + 1})")]
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise  # it is locked, or was interrupted
        found = [str(error)]
    return [] if found == ["ok"] else [Fault(rule=INTEGRITY, where=" ".join(says.split())) for says in found]


def _broken(connection: sqlite3.Connection, rule: str) -> Sequence[str]:
    with contextlib.closing(connection.execute(_sql.checks()[rule], _VALUES.get(rule, ()))) as found:
        return [str(where) for (where,) in found.fetchmany(MOST_SHOWN + 1)]
