"""Checks a whole PostgreSQL schema: that the rules of `store.invariants` hold in it."""

from perdure.store.invariants import COUNTED, INVARIANTS, MOST_SHOWN, OWN_WORD, Fault, Verdict, faults_of
from perdure.store.postgres import sql_files
from perdure.store.postgres.connections import Connection
from perdure.store.records import RECORD_VERSION

_VALUES = {"unanswered": (OWN_WORD,), "records": (RECORD_VERSION,)}


async def check_schema(connection: Connection, schema: str) -> Verdict:
    """Check everything within a transaction that sees one moment. What a query needs the server keeps; a few sentences
    come back."""
    checks = sql_files.checks(schema)
    [row] = await connection.fetch(checks["counts"])
    faults: list[Fault] = []
    unnamed: list[str] = []
    for rule in INVARIANTS:
        query = f"SELECT * FROM ({checks[rule].rstrip(';')}) AS broken LIMIT {MOST_SHOWN + 1}"
        found = await connection.fetch(query, *_VALUES.get(rule, ()))
        named, has_more = faults_of(rule, [where for (where,) in found])
        faults += named
        unnamed += [rule] if has_more else []
    return Verdict(counts=dict(zip(COUNTED, row, strict=True)), faults=faults, unnamed=unnamed)
