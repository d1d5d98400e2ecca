"""A request that the ASGI server gives up, because it stops, is answered with the reason."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.settings import Settings
from perdure.store import SqliteStore
from tests.support.clients.modern_requests import TASKS, modern
from tests.support.clients.raw_http import message
from tests.support.servers.basic_tools import server
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio

HEADERS = {
    "host": "127.0.0.1",
    "accept": "application/json, text/event-stream",
    "content-type": "application/json",
}

#: A message of a session, and a poll of a client without one.
REQUESTS = {
    "session": (message("notifications/cancelled", {"requestId": 1}), {"mcp-session-id": "A" * 43}),
    "2026-07-28": modern("tasks/get", {"taskId": "A" * 43}, capabilities={"extensions": {TASKS: {}}}),
}


class AskedStore(FaultyStore):
    """Says when it is asked for something that it does not answer."""

    def __init__(self, path: Path) -> None:
        super().__init__(SqliteStore(str(path)), timeout=60.0)
        self.is_asked = asyncio.Event()

    async def look(self, *arguments: Any, **named: Any) -> Any:
        if self.reads is Fault.HANGS:
            self.is_asked.set()
        return await super().look(*arguments, **named)


@pytest.mark.parametrize("era", REQUESTS)
async def test_a_request_that_waits_for_a_store_when_the_server_stops_gets_503(era: str, tmp_path: Path) -> None:
    """uvicorn would answer 500 in its place, and its client could not know that another process may answer."""
    body, named = REQUESTS[era]
    headers = {**HEADERS, **named, "content-length": str(len(body))}
    store = AskedStore(tmp_path / "log.db")
    app = perdure.asgi(server, store=store, settings=Settings(drain_timeout=0.0, store_timeout=60.0))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "raw_path": b"/mcp",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async with app.lifespan():
        store.reads = Fault.HANGS
        reads = asyncio.create_task(app(scope, receive, send))
        await store.is_asked.wait()
        app.begin_stop()
        await asyncio.sleep(0)  # callbacks run in their order: the stop has begun
        reads.cancel()
        await reads
        store.works()
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == -31006
