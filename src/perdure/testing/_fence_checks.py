"""Promises 2 and 6: who may write a stream, and how another becomes its writer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from perdure._core.ids import Generation, NodeId, StreamId
from perdure._core.states import CallState
from perdure.store.base import CallEnd, DropStream, PutCall, Release
from perdure.testing._case import Case, accepted, refused, same
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    STREAM,
    a_call,
    a_stream,
    an_append,
    numbers,
    put,
    some_events,
)


async def promise_2_a_stale_fence_is_refused_and_its_neighbours_are_not(case: Case) -> None:
    await case.open_stream("taken")
    await case.open_stream("ours")
    await put(case.store, an_append(case.fence, some_events(1, 1), stream="taken"))
    claimed = await case.claim("taken")
    refusals = await put(
        case.store,
        an_append(case.fence, some_events(2, 2), stream="taken"),
        an_append(case.fence, some_events(1, 2), stream="ours"),
    )
    refused(refusals, 0)
    same("events of the stream that was taken", await numbers(case.store, "taken"), [1])
    same("events of its neighbour", await numbers(case.store, "ours"), [1, 2])
    accepted(await put(case.store, an_append(claimed.fence, some_events(2, 3), stream="taken")))
    same("events of the new writer", await numbers(case.store, "taken"), [1, 2, 3])


async def promise_2_a_stale_fence_neither_seals_nor_ends_calls(case: Case) -> None:
    await case.open_stream()
    await case.claim()
    end = CallEnd(incarnation=1, request_id=1, state=CallState.ANSWERED)
    refused(await put(case.store, an_append(case.fence, (), ends=(end,), seal=True)), 0)
    same("sealed", (await case.record()).sealed, False)
    same("the ledger", {call.state for call in await case.store.calls(SESSION)}, {CallState.RUNNING})


async def promise_2_a_stream_that_is_gone_sealed_or_elsewhere_is_not_appended_to(case: Case) -> None:
    refused(await put(case.store, an_append(case.fence, some_events(1, 1), stream="never opened")), 0)
    await case.open_stream()
    refused(await put(case.store, an_append(case.fence, some_events(2, 2))), 0)
    refused(await put(case.store, an_append(case.fence, [*some_events(1, 1), *some_events(3, 3)])), 0)
    same("events", await numbers(case.store), [])
    accepted(await put(case.store, an_append(case.fence, some_events(1, 1, final=True), seal=True)))
    refused(await put(case.store, an_append(case.fence, some_events(2, 2))), 0)
    await put(case.store, DropStream(stream=STREAM))
    refused(await put(case.store, an_append(case.fence, some_events(2, 2))), 0)


async def promise_2_a_call_is_changed_by_its_writer_and_by_nobody_else(case: Case) -> None:
    await case.open_stream()
    again = PutCall(
        stream=STREAM,
        fence=case.fence,
        incarnation=1,
        request_id=1,
        state=CallState.WAITING,
        attempt=2,
        progress=0.5,
    )
    accepted(await put(case.store, again, replace(again, request_id="unknown")))
    changed = replace(a_call(1), state=CallState.WAITING, attempt=2, progress=0.5)
    same("the ledger", list(await case.store.calls_on(STREAM)), [changed, a_call("one")])
    claimed = await case.claim()
    stale = replace(again, state=CallState.RUNNING, attempt=3)
    refused(await put(case.store, stale, replace(stale, stream=StreamId("no"), fence=claimed.fence)), 0, 1)
    same("the ledger", list(await case.store.calls_on(STREAM)), [changed, a_call("one")])
    end = CallEnd(incarnation=1, request_id=1, state=CallState.SETTLED)
    await put(case.store, an_append(claimed.fence, (), ends=(end,)), replace(again, fence=claimed.fence))
    same("a call that has ended", (await case.store.calls_on(STREAM))[0].state, CallState.SETTLED)
    await put(case.store, an_append(claimed.fence, some_events(1, 1, final=True), seal=True))
    refused(await put(case.store, replace(again, fence=claimed.fence, request_id="one")), 0)


async def promise_2_a_stream_is_let_go_of_by_its_writer_and_by_nobody_else(case: Case) -> None:
    await case.open_stream()
    claimed = await case.claim()
    release = Release(stream=STREAM, fence=case.fence)
    refused(await put(case.store, release, replace(release, stream=StreamId("no"))), 0, 1)
    same("the writer", (await case.record()).node, NODE)
    accepted(await put(case.store, replace(release, fence=claimed.fence)))
    same("the writer", (await case.record()).node, "")
    same("streams written", list(await case.store.written_by(NODE)), [])
    refused(await put(case.store, an_append(claimed.fence, some_events(1, 1))), 0)
    again = await case.claim()
    same("the writer", again.node, NODE)
    accepted(await put(case.store, an_append(again.fence, some_events(1, 1, final=True), seal=True)))
    refused(await put(case.store, replace(release, fence=again.fence)), 0)


async def promise_6_a_claim_begins_a_generation_and_records_the_end_of_the_one_before(case: Case) -> None:
    await case.open_stream()
    await put(case.store, an_append(case.fence, some_events(1, 4)))
    first = await case.store.claim(STREAM, node=OTHER, held=case.fence)
    assert first is not None, "a stream that is there can be claimed"
    same("the claimed stream", first, replace(a_stream(first.fence, node=OTHER), generation=2, last=4))
    same("the stream in the store", await case.record(), first)
    accepted(await put(case.store, an_append(first.fence, some_events(5, 6))))
    await case.reopen()
    second = await case.claim()
    same("the generation", second.generation, 3)
    wanted = [Generation(generation=1, end=4), Generation(generation=2, end=6)]
    same("the ended generations", list(await case.store.generations(STREAM)), wanted)


async def promise_6_no_fence_is_given_twice(case: Case) -> None:
    await case.open_stream()
    fences = [case.fence]
    for number in range(3):
        fences.append(await case.store.join(NodeId(f"node-{number}")))
        fences.append((await case.claim()).fence)
        await case.reopen()
    same("different fences", len(set(fences)), len(fences))


async def promise_6_of_several_who_claim_one_succeeds(case: Case) -> None:
    await case.open_stream()
    async with case.elsewhere() as elsewhere:
        for _ in range(10):
            held = (await case.record()).fence
            claims = [
                store.claim(STREAM, node=node, held=held)
                for store, node in ((case.store, NODE), (elsewhere, OTHER), (case.store, NODE), (elsewhere, OTHER))
            ]
            claimed = [record for record in await asyncio.gather(*claims) if record is not None]
            same("the one that has it, in the end", [await case.record()], claimed)


async def promise_6_who_has_seen_another_fence_claims_nothing(case: Case) -> None:
    await case.open_stream()
    claimed = await case.claim()
    same("a claim with a fence that is gone", await case.store.claim(STREAM, node=OTHER, held=case.fence), None)
    same("the stream", await case.record(), claimed)
    same("the ended generations", list(await case.store.generations(STREAM)), [Generation(generation=1, end=0)])


async def promise_6_what_is_sealed_or_gone_is_not_claimed(case: Case) -> None:
    await case.open_stream()
    accepted(await put(case.store, an_append(case.fence, some_events(1, 1, final=True), seal=True)))
    same("claiming what is sealed", await case.store.claim(STREAM, node=OTHER, held=case.fence), None)
    same("the writer", (await case.record()).node, NODE)
    await put(case.store, DropStream(stream=STREAM))
    same("claiming what is gone", await case.store.claim(STREAM, node=OTHER, held=case.fence), None)


async def streams_are_found_by_who_writes_them(case: Case) -> None:
    """Whoever settles a dead node's streams sees all of them and no others."""
    for name in ("z", "sealed", "a", "taken", "released"):
        await case.open_stream(name)
    await put(case.store, an_append(case.fence, some_events(1, 1, final=True), stream="sealed", seal=True))
    taken = await case.store.claim(StreamId("taken"), node=OTHER, held=case.fence)
    await put(case.store, Release(stream=StreamId("released"), fence=case.fence))
    same("streams written", [stream.id for stream in await case.store.written_by(NODE)], ["z", "a"])
    same("streams of the other", list(await case.store.written_by(OTHER)), [taken])
    same("streams of nobody known", list(await case.store.written_by(NodeId("nobody"))), [])


async def streams_are_found_by_their_ids_as_far_as_they_have_grown(case: Case) -> None:
    await case.open_stream("a")
    await case.open_stream("b")
    await put(case.store, an_append(case.fence, some_events(1, 7), stream="b"))
    found = await case.store.streams_by_id([StreamId(name) for name in ("b", "no", "a")])
    same("streams", dict(found), {StreamId(name): await case.record(name) for name in ("a", "b")})
    same("streams of no names", dict(await case.store.streams_by_id([])), {})
