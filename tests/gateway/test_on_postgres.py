"""Gateways on one PostgreSQL server: some stories of other files. PERDURE_TEST_STORE=postgres tells them all."""

# ruff: noqa: F401

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.store.interface import Store
from perdure.store.postgres.store import PostgresStore
from tests.gateway.test_gateway_deaths import running, test_gateway_killed_in_a_stdio_call
from tests.gateway.test_handed_over import (
    nodes,
    test_a_node_becomes_the_home_when_the_first_has_left,
    test_a_question_is_answered_and_a_call_cancelled_through_either_node,
)
from tests.support.stores.postgres import new_schema, store_url
from tests.support.stores.shared_store import BUSY_SECONDS, ON_POSTGRES

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(ON_POSTGRES, reason="all stories are told on PostgreSQL anyway")]


@pytest.fixture
def address() -> str:
    return store_url()


@pytest.fixture
def new_store() -> Callable[[], Store]:
    schema = new_schema()
    return lambda: PostgresStore(store_url(schema), timeout=BUSY_SECONDS, process=lambda: None)
