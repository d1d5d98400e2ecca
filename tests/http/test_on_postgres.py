"""A node on a PostgreSQL server: some stories of other files. PERDURE_TEST_STORE=postgres tells them all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from perdure.store.postgres.store import PostgresStore
from tests.http.test_asks import test_an_ask_is_replayed_to_a_client_that_comes_back
from tests.http.test_early_answers import (
    RULE,
    test_a_question_that_is_open_is_asked_again_by_the_next_wait,
    test_a_result_that_its_client_did_not_get_stays_in_the_list,
)
from tests.http.test_resume import test_three_seen_three_while_away_one_live
from tests.http.test_session_tasks import (
    RULES,
    test_a_call_with_a_task_is_answered_at_once_and_its_result_is_fetched,
    test_a_cancelled_task_is_cancelled_before_the_answer,
    test_what_a_task_sends_names_it_and_comes_on_the_standalone_stream,
)
from tests.http.test_sessions import test_delete_ends_readers_and_answers_running_calls
from tests.support.servers.in_process import Site, serve
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import BUSY_SECONDS, ON_POSTGRES

__all__ = [
    "test_a_call_with_a_task_is_answered_at_once_and_its_result_is_fetched",
    "test_a_cancelled_task_is_cancelled_before_the_answer",
    "test_a_question_that_is_open_is_asked_again_by_the_next_wait",
    "test_a_result_that_its_client_did_not_get_stays_in_the_list",
    "test_an_ask_is_replayed_to_a_client_that_comes_back",
    "test_delete_ends_readers_and_answers_running_calls",
    "test_three_seen_three_while_away_one_live",
    "test_what_a_task_sends_names_it_and_comes_on_the_standalone_stream",
]

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(ON_POSTGRES, reason="all stories are told on PostgreSQL anyway")]


def on_postgres(shop: ToolServer, **settings: Any) -> AbstractAsyncContextManager[Site]:
    return serve(shop.server, store=PostgresStore(store_url(), timeout=BUSY_SECONDS), **settings)


@pytest.fixture
async def site(shop: ToolServer) -> AsyncIterator[Site]:
    async with on_postgres(shop) as site:
        yield site


@pytest.fixture
async def early(shop: ToolServer) -> AsyncIterator[Site]:
    async with on_postgres(shop, answer_within=RULE) as site:
        yield site


@pytest.fixture
async def tasked(shop: ToolServer) -> AsyncIterator[Site]:
    async with on_postgres(shop, tasks=RULES) as site:
        yield site
