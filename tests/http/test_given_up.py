"""A request that the ASGI server gives up, because it stops, is answered with the reason."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.settings import Settings
from perdure.store import SqliteStore
from tests.support.servers.basic_tools import server
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio

BODY = b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}'
HEADERS = {
    b"host": b"127.0.0.1",
    b"accept": b"application/json, text/event-stream",
    b"content-type": b"application/json",
    b"content-length": str(len(BODY)).encode(),
    b"mcp-session-id": b"A" * 43,
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


async def test_a_request_that_waits_for_a_store_when_the_server_stops_gets_503(tmp_path: Path) -> None:
    """uvicorn would answer 500 in its place, and its client could not know that another process may answer."""
    store = AskedStore(tmp_path / "log.db")
    app = perdure.asgi(server, store=store, settings=Settings(drain_timeout=0.0, store_timeout=60.0))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "raw_path": b"/mcp",
        "query_string": b"",
        "headers": list(HEADERS.items()),
        "client": ("127.0.0.1", 1),
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": BODY, "more_body": False}

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
