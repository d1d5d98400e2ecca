"""A session over HTTP whose requests no SDK server answers: all that it needs is what `perdure.runtime.base` says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from perdure.runtime.hosted import Hosted, Started
from perdure.store import MemoryStore
from perdure.store.interface import Store
from tests.support.clients.raw_http import message, progress, text_of
from tests.support.servers.fake_runtime import FakeRuntimes
from tests.support.servers.gated_server import Live, live
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def served(store: Store | None = None, **settings: Any) -> AsyncIterator[tuple[Live, FakeRuntimes]]:
    runtimes = FakeRuntimes()

    @asynccontextmanager
    async def start() -> AsyncIterator[Started]:
        yield Started(runtimes=runtimes, sessionless=None)

    fake = Hosted(web=None, start=start)
    async with live(server=fake, store=store or MemoryStore(), **settings) as site:
        yield site, runtimes


async def test_a_call_has_progress_and_an_answer() -> None:
    async with served() as (site, _):
        peer = await site.session()
        answer = await peer.call("count", n=3)
        assert progress(answer.messages) == [1, 2, 3]
        assert text_of(answer.messages[-1]) == "counted to 3"


async def test_a_cut_call_is_resumed_where_it_was() -> None:
    async with served() as (site, runtimes):
        peer = await site.session()
        exchange = await peer.begin_call("count", n=4, gate="cut", first=2)
        assert progress(await exchange.until_messages(2)) == [1, 2]
        exchange.cut()
        runtimes.gates["cut"].set()
        async with await peer.resume(exchange.position) as resumed:
            rest = (await resumed.answer()).messages
        assert (progress(rest), text_of(rest[-1])) == ([3, 4], "counted to 4")


async def test_the_client_answers_an_ask() -> None:
    async with served() as (site, _):
        peer = await site.session()
        async with await peer.begin_call("ask") as exchange:
            [ask] = await exchange.until_messages(1)
            assert ask["method"] == "roots/list"
            result = {"jsonrpc": "2.0", "id": ask["id"], "result": {"roots": [{"uri": "file:///a"}]}}
            assert (await peer.ask("POST", json.dumps(result).encode())).status == 202
            answer = (await exchange.answer()).messages[-1]
        assert text_of(answer) == "1 roots"


async def test_an_error_of_the_runtime_is_the_calls_answer() -> None:
    async with served() as (site, _):
        peer = await site.session()
        answer = await peer.ask("POST", message("no/such/method", id="mine"))
        [error] = answer.messages
        assert (error["id"], error["error"]["code"]) == ("mine", -32601)


async def test_a_cancelled_call_is_answered_and_its_id_is_free_again() -> None:
    async with served() as (site, _):
        peer = await site.session()
        async with await peer.begin_call("count", id=9, n=2, gate="never", first=1) as exchange:
            await exchange.until_messages(1)
            assert (await peer.ask("POST", message("notifications/cancelled", {"requestId": 9}))).status == 202
            assert (await exchange.answer()).messages[-1]["error"]["code"] == -32800
        assert text_of((await peer.call("count", id=9, n=0)).messages[-1]) == "counted to 0"


async def test_a_call_that_breaks_has_an_unknown_outcome_and_no_other() -> None:
    """Promise 3."""
    async with served() as (site, _):
        peer = await site.session()
        broken = await peer.call("break")
        assert broken.messages[-1]["error"]["data"]["reason"] == "its runtime failed"
        assert text_of((await peer.call("count", n=1)).messages[-1]) == "counted to 1"


async def test_an_idle_runtime_goes_and_the_next_message_loads_another() -> None:
    async with served(runtime_idle=0.1) as (site, _):
        peer = await site.session()
        await peer.call("count", n=1)
        await until(lambda: (info := site.app.session_info(peer.id)) is not None and not info.loaded)
        assert text_of((await peer.call("count", n=1)).messages[-1]) == "counted to 1"


async def test_the_next_process_goes_on_with_the_session() -> None:
    store = MemoryStore()
    async with served(store) as (site, _):
        peer = await site.session()
    async with served(store) as (site, _):
        peer.port = site.port
        assert text_of((await peer.call("count", n=2)).messages[-1]) == "counted to 2"


async def test_requests_without_a_session_are_refused_where_nothing_answers_them() -> None:
    async with served() as (site, _):
        body = message("tools/list", {}, id=1)
        answer = await site.ask("POST", body, headers={"mcp-protocol-version": "2026-07-28"})
        assert (answer.status, answer.error["data"]["requested"]) == (400, "2026-07-28")
