"""Makes roles with settings of a test's choice, and has the connection of an operator."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import asyncpg
import pytest

from tests.support.stores.postgres import new_schema, server_url, store_url

Operator: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    """A connection beside those of stores."""
    connection = await asyncpg.connect(server_url().partition("?")[0])
    yield connection
    await connection.close()


@asynccontextmanager
async def role_with(operator: Operator, **settings: str) -> AsyncIterator[str]:
    """The address of a new store, for a role of its own that has these settings.

    The store's schema is made for it: a right to make schemas would be written to the database's one row, which several
    tests cannot change at once.
    """
    role, schema = f"role_{secrets.token_hex(6)}", new_schema()
    await operator.execute(f"CREATE ROLE {role} LOGIN")
    try:
        await operator.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {role}")
        for name, value in settings.items():
            await operator.execute(f"ALTER ROLE {role} SET {name} = '{value}'")
        yield f"postgresql://{role}@{store_url(schema).partition('@')[2]}"
    finally:
        await operator.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
