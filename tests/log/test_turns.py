"""Calls that send without a pause share each turn of the event loop, and what is queued to be written (promise 6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from mcp.server.mcpserver import Context, MCPServer

from perdure.log.journal import QUEUED_BYTES, SHARED_TURN, SOLE_TURN, Turns
from tests.support.clients.raw_http import progress, text_of
from tests.support.servers.gated_server import Live, live
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

FLOODS = 12


async def send(turns: Turns, count: int, sent: list[object], name: object, *, size: int = 1) -> None:
    """As a call does that sends without a pause."""
    for _ in range(count):
        turns.sent += 1
        turns.queued += size
        sent.append(name)
        if turns.is_over:
            await turns.wait()


async def test_one_alone_sends_as_much_in_a_turn_as_it_may_run_ahead() -> None:
    turns, sent = Turns(), list[object]()
    call = asyncio.create_task(send(turns, 10 * SOLE_TURN, sent, "a"))
    await asyncio.sleep(0)
    assert len(sent) == SOLE_TURN
    turns.on_taken()
    await call


async def test_many_send_a_share_each_turn_and_each_has_its_turn() -> None:
    turns, sent, most = Turns(), list[object](), 0
    calls = [asyncio.create_task(send(turns, 3 * SHARED_TURN, sent, number)) for number in range(20)]
    await asyncio.sleep(0)
    begun = len(sent)
    assert SOLE_TURN < begun < SOLE_TURN + 20  # the first did not know of the others, each of which has sent one
    while not all(call.done() for call in calls):
        before = len(sent)
        await asyncio.sleep(0)
        most = max(most, len(sent) - before)
    assert most <= SHARED_TURN
    later = list(dict.fromkeys(sent[begun : begun + 20 * SHARED_TURN]))
    assert set(later) >= set(range(1, 20)), "each goes on once before one goes on again"


async def test_nobody_sends_while_too_much_is_queued() -> None:
    turns, sent = Turns(), list[object]()
    call = asyncio.create_task(send(turns, 4, sent, "a", size=QUEUED_BYTES))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(sent) == 1
    turns.on_taken()
    await until(lambda: len(sent) == 2)
    call.cancel()


async def test_one_that_is_cancelled_in_the_line_does_not_hold_up_the_next() -> None:
    turns, sent = Turns(), list[object]()
    calls = [asyncio.create_task(send(turns, 2 * SOLE_TURN, sent, number)) for number in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()
    calls[1].cancel()
    await calls[2]
    assert sent.count(2) == 2 * SOLE_TURN


@asynccontextmanager
async def about_to_flood(begin: asyncio.Event) -> AsyncIterator[Live]:
    """A server on which many calls, none of which is read, send without a pause once they may."""
    server = MCPServer("flooding", log_level="WARNING")

    @server.tool()
    async def flood(ctx: Context) -> str:
        await begin.wait()
        for number in range(1, 4 * SOLE_TURN):
            await ctx.report_progress(number, message="x" * 1_000)
        return "done"

    @server.tool()
    async def few(ctx: Context) -> str:
        for number in range(1, 4):
            await ctx.report_progress(number)
        return "few"

    async with live(server=server) as served, AsyncExitStack() as stack:
        for _ in range(FLOODS):
            peer = await served.session()
            call = await stack.enter_async_context(await peer.begin_call("flood"))
            stack.callback(call.cut)
            assert await call.head() == 200
            call.stop_reading()
        yield served


async def test_a_quick_call_waits_for_a_few_turns_of_calls_that_flood() -> None:
    """What is written between its request and its answer is counted, which is the same on any machine. Each flood may
    be 256 events ahead, and before there were turns a quick call waited for all of that, several times."""
    begin = asyncio.Event()
    async with about_to_flood(begin) as served:
        quick, counters = await served.session(), served.app.counters
        before = counters.events_appended
        begin.set()
        answer = await quick.call("few")
        between = counters.events_appended - before
    assert progress(answer.messages) == [1, 2, 3]
    assert text_of(answer.messages[-1]) == "few"
    assert between < FLOODS * SOLE_TURN / 2, between
