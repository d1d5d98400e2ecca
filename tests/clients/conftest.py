"""The packages of the stock clients in JavaScript."""

from __future__ import annotations

import pytest

from tests.clients.node_clients import HERE
from tests.support.processes.node_programs import node_modules


@pytest.fixture(scope="session")
def packages() -> None:
    node_modules(HERE)
