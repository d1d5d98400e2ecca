"""Processes die at points of the PostgreSQL store (promises 1-4); PERDURE_TEST_STORE=postgres meets all points."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.end_to_end.test_crash_points import anyio_backend, cradle, live_and_die, settle_and_die
from tests.support.processes.crash_points import POSTGRES_POINTS, POSTGRES_SECOND_POINTS
from tests.support.processes.crashing_servers import CrashingServers
from tests.support.servers.changing_servers import ChangingServers
from tests.support.stores.postgres import store_url
from tests.support.stores.shared import ON_POSTGRES

__all__ = ["anyio_backend", "cradle"]

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(ON_POSTGRES, reason="all points are met on PostgreSQL anyway")]

#: Where the server has done what the process asked for, and the process does not know, or cannot.
FIRST = ("when a later commit is on its way", "when a later commit is made and the process does not know")
SECOND = (
    "when a stream is claimed and the process does not know",
    "when the dead are buried and the process does not know",
)


@pytest.fixture
async def world(tmp_path: Path, cradle: CrashingServers) -> AsyncIterator[ChangingServers]:
    yield ChangingServers(tmp_path, cradle, store_url())
    await cradle.clear()


@pytest.mark.parametrize("name", FIRST)
async def test_a_server_that_dies(world: ChangingServers, name: str) -> None:
    """Promises 1, 2, 3 and 4."""
    await live_and_die(world, POSTGRES_POINTS[name])


@pytest.mark.parametrize("name", SECOND)
async def test_a_server_that_dies_while_it_settles_what_another_left(world: ChangingServers, name: str) -> None:
    """Promise 3."""
    await settle_and_die(world, POSTGRES_SECOND_POINTS[name])
