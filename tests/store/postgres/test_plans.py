"""The plans of statements that run with each call: each finds its rows by a key, also while the tables are small."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import asyncpg
import pytest

from perdure.store.postgres import layout
from perdure.store.postgres.store import PostgresStore
from tests.support.stores.postgres import connection, new_schema, store_url
from tests.support.stores.shared_store import BUSY_SECONDS

pytestmark = pytest.mark.anyio

VALUES = {
    r"texts\[[^]]*\]": "$1::text",
    r"numbers\[[^]]*\]": "$2::bigint",
    r"times\[[^]]*\]": "$3::float8",
    r"blobs\[[^]]*\]": "''::bytea",
    r"\b(k|s\.key)\b": "$4::bigint",
}
"""The variables of `commit_1`, and what stands in for them."""


def changes_of_calls(schema: str) -> list[str]:
    """The statements of a commit that change a call which they find by its stream."""
    found = re.findall(r"UPDATE perdure\.call SET.*?;", layout.migration(1, "perdure"), re.DOTALL)
    statements = [statement for statement in found if re.search(r"WHERE stream = ", statement)]
    for variable, value in VALUES.items():
        statements = [re.sub(variable, value, statement) for statement in statements]
    return [statement.replace("perdure.", f"{schema}.").rstrip(";") for statement in statements]


@pytest.fixture
async def schema() -> AsyncIterator[str]:
    """The schema of an empty store."""
    name = new_schema()
    async with PostgresStore(store_url(name), timeout=BUSY_SECONDS):
        yield name


async def test_a_call_that_ends_is_found_by_its_stream_and_not_among_all_that_run(schema: str) -> None:
    """A plan is kept for as long as its connection, so one that was made for an empty table has to be good for all."""
    with connection(store_url(schema)) as run:
        run("SET plan_cache_mode = force_generic_plan")
        statements = changes_of_calls(schema)
        assert len(statements) == 2
        for statement in statements:
            run(f"PREPARE change (text, bigint, float8, bigint) AS {statement}")
            plan = " ".join(row[0] for row in run("EXPLAIN EXECUTE change ('', 0, 0, 0)"))
            run("DEALLOCATE change")
            assert "call_pkey" in plan
            assert "call_open" not in plan


async def test_the_open_calls_of_a_session_are_counted_in_the_index_of_open_calls(schema: str) -> None:
    with connection(store_url(schema)) as run:
        run("SET plan_cache_mode = force_generic_plan")
        run("SET enable_seqscan = off")
        counted = f"SELECT count(*) FROM {schema}.call WHERE session = $1 AND state IN ('running', 'waiting')"
        run(f"PREPARE counted (text) AS {counted}")
        plan = " ".join(row[0] for row in run("EXPLAIN EXECUTE counted ('')"))
        assert "call_open" in plan


async def test_what_was_not_used_for_long_is_found_by_its_time(schema: str) -> None:
    """A sweep that finds nothing does not read a million calls."""
    with connection(store_url(schema)) as run:
        run("SET enable_seqscan = off")
        stale = layout.queries(schema)["stale_sessions"]
        run(f"PREPARE stale (float8, float8, text, bigint) AS {stale}")
        plan = " ".join(row[0] for row in run("EXPLAIN EXECUTE stale (1, 1, '', 100)"))
        for condition in (
            "(kind = ANY ('{call,key}'::text[])) AND (active <",
            "(kind = 'session'::text) AND (active <",
        ):
            assert f"Index Cond: ({condition}" in plan, plan
        assert "Index Cond: (active <" in plan, plan  # of those that have ended


CALL = "INSERT INTO {schema}.call VALUES (1, {place}, 's', 1, '1', '{place}', 'm', '', '', 1, NULL, '{state}', '')"
STREAM = """
INSERT INTO {schema}.stream (id, session, kind, node, fence, opened, generation, last, sealed, listed)
VALUES ('{kind}', 's', '{kind}', 'n', 1, 0, 1, 0, false, false)
"""


async def test_what_every_call_writes_is_checked_by_domains_and_never_by_the_text_of_a_condition(schema: str) -> None:
    """The server parses a CHECK in every statement that writes to its table, and that of a domain once."""
    with connection(store_url(schema)) as run:
        checks = run(
            "SELECT conrelid::regclass::text FROM pg_constraint WHERE contype = 'c' AND conrelid = ANY (ARRAY["
            + ", ".join(f"'{schema}.{table}'::regclass" for table in ("stream", "event", "answer", "call"))
            + "])"
        )
        assert checks == []
        for place, state in enumerate(("running", "waiting", "answered", "cancelled", "settled")):
            run(CALL.format(schema=schema, place=place, state=state))
        with pytest.raises(asyncpg.CheckViolationError, match="call_state"):
            run(CALL.format(schema=schema, place=9, state="lost"))
        for kind in ("c", "s"):
            run(STREAM.format(schema=schema, kind=kind))
        with pytest.raises(asyncpg.CheckViolationError, match="stream_kind"):
            run(STREAM.format(schema=schema, kind="x"))
