"""The plans of statements that run with each call: each finds its rows by a key, also while the tables are small."""

from __future__ import annotations

import re

import pytest

from perdure.store.postgres import sql_files
from perdure.store.postgres.store import PostgresStore
from tests.support.postgres import connection, new_schema, store_url
from tests.support.stores import BUSY_SECONDS

pytestmark = pytest.mark.anyio

VALUES = {
    r"texts\[[^]]*\]": "$1::text",
    r"numbers\[[^]]*\]": "$2::bigint",
    r"times\[[^]]*\]": "$3::float8",
    r"\b(k|s\.key)\b": "$4::bigint",
}
"""The variables of `commit_1`, and what stands in for them."""


def changes_of_calls(schema: str) -> list[str]:
    """The statements of a commit that change a call which they find by its stream."""
    found = re.findall(r"UPDATE perdure\.call SET.*?;", sql_files.migration(1, "perdure"), re.DOTALL)
    statements = [statement for statement in found if re.search(r"WHERE stream = ", statement)]
    for variable, value in VALUES.items():
        statements = [re.sub(variable, value, statement) for statement in statements]
    return [statement.replace("perdure.", f"{schema}.").rstrip(";") for statement in statements]


async def test_a_call_that_ends_is_found_by_its_stream_and_not_among_all_that_run() -> None:
    """A plan is kept for as long as its connection, so one that was made for an empty table has to be good for all."""
    schema = new_schema()
    url = store_url(schema)
    async with PostgresStore(url, timeout=BUSY_SECONDS):
        pass
    with connection(url) as run:
        run("SET plan_cache_mode = force_generic_plan")
        statements = changes_of_calls(schema)
        assert len(statements) == 2
        for statement in statements:
            run(f"PREPARE change (text, bigint, float8, bigint) AS {statement}")
            plan = " ".join(row[0] for row in run("EXPLAIN EXECUTE change ('', 0, 0, 0)"))
            run("DEALLOCATE change")
            assert "call_pkey" in plan
            assert "call_open" not in plan
