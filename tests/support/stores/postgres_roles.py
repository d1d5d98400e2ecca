"""Makes roles with settings of a test's choice, and has the connection of an operator."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import asyncpg
import pytest

from tests.support.stores.postgres import server_url, store_url

Operator: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    """A connection beside those of stores."""
    connection = await asyncpg.connect(server_url().partition("?")[0])
    yield connection
    await connection.close()


@asynccontextmanager
async def role_with(operator: Operator, **settings: str) -> AsyncIterator[str]:
    """The address of a new store, for a role of its own that has these settings."""
    role = f"role_{secrets.token_hex(6)}"
    await operator.execute(f"CREATE ROLE {role} LOGIN")
    try:
        database = await operator.fetchval("SELECT current_database()")
        await operator.execute(f"GRANT CREATE ON DATABASE {database} TO {role}")
        for name, value in settings.items():
            await operator.execute(f"ALTER ROLE {role} SET {name} = '{value}'")
        yield f"postgresql://{role}@{store_url().partition('@')[2]}"
    finally:
        await operator.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
