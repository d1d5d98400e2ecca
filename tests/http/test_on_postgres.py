"""A node on a PostgreSQL server: some stories of other files. PERDURE_TEST_STORE=postgres tells them all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from perdure.store.postgres.store import PostgresStore
from tests.http.test_asks import test_an_ask_is_replayed_to_a_client_that_comes_back
from tests.http.test_resume import test_three_seen_three_while_away_one_live
from tests.http.test_sessions import test_delete_ends_readers_and_answers_running_calls
from tests.support.servers.in_process import Site, serve
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.postgres import store_url
from tests.support.stores.shared import BUSY_SECONDS, ON_POSTGRES

__all__ = [
    "test_an_ask_is_replayed_to_a_client_that_comes_back",
    "test_delete_ends_readers_and_answers_running_calls",
    "test_three_seen_three_while_away_one_live",
]

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(ON_POSTGRES, reason="all stories are told on PostgreSQL anyway")]


@pytest.fixture
async def site(shop: ToolServer) -> AsyncIterator[Site]:
    async with serve(shop.server, store=PostgresStore(store_url(), timeout=BUSY_SECONDS)) as site:
        yield site
