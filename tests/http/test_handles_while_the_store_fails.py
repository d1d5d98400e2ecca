"""A handle that cannot be written is not given; a client that waits for the answer instead gets one in any case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anyio import wait_all_tasks_blocked

from tests.support.clients.task_client import OUTCOME_UNKNOWN, Balancer, TaskClient, call_params, response_in, said
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import Fault
from tests.support.stores.outages import FAILS, TIMEOUT, Switched

pytestmark = pytest.mark.anyio


async def test_a_client_with_neither_handle_nor_key_is_not_sent_elsewhere_when_the_server_stops(tmp_path: Path) -> None:
    """Its tool has run, and nothing would keep it from running again: the outcome is not known."""
    shop, outage = ToolServer(), Switched(tmp_path / "log.db", Fault.RAISES)
    settings: dict[str, Any] = {"task_after": 0.0, "store_timeout": TIMEOUT, "complaint": FAILS}
    async with serve(shop.server, store=outage.store, **settings) as site, outage.begins():
        client = TaskClient(balancer=Balancer(ports=[site.port]))
        async with await client.begin("tools/call", call_params("wait", gate="g")) as exchange:
            await until(lambda: shop.seen)
            await wait_all_tasks_blocked()  # the client waits for the answer
            site.app.begin_stop()
            assert said(response_in(exchange, await exchange.answer())) == OUTCOME_UNKNOWN
