"""Nodes on one PostgreSQL server: some stories of other files. PERDURE_TEST_STORE=postgres tells them all."""

# ruff: noqa: F401

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure.store.postgres.store import PostgresStore
from tests.cluster.conftest import Start
from tests.cluster.test_following import test_a_killed_process_is_settled_live_to_a_reader_at_the_other
from tests.cluster.test_order import test_a_home_that_moves_while_tools_speak_changes_nothing_in_their_order
from tests.cluster.test_reattach_elsewhere import (
    test_an_ask_of_one_node_is_asked_again_and_answered_through_the_other,
)
from tests.cluster.test_two_nodes import (
    test_a_call_is_resumed_live_through_the_other_node,
    test_a_cancellation_reaches_the_call_that_runs_elsewhere,
    test_the_newest_reader_wins_wherever_it_is,
)
from tests.support.stores.postgres import new_schema, store_url
from tests.support.stores.shared_store import BUSY_SECONDS, ON_POSTGRES

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(ON_POSTGRES, reason="all stories are told on PostgreSQL anyway")]


@pytest.fixture
def address() -> str:
    return store_url()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    schema = new_schema()
    async with AsyncExitStack() as stack:
        yield Start(stack, tmp_path, lambda _: PostgresStore(store_url(schema), timeout=BUSY_SECONDS))
