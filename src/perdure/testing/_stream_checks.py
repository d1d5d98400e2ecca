"""Promises 1 to 6 and 16: what goes into a stream comes out of it, and one node at a time writes it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from perdure._core.ids import Generation, Kind, NodeId, StreamId
from perdure._core.states import CallState, SessionState
from perdure.errors import MailFull, NodeGone, SessionEnded
from perdure.store import base
from perdure.testing._case import Case, accepted, refused, same
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    STREAM,
    a_call,
    a_put_call,
    a_reader,
    a_session,
    a_sticky,
    a_stream,
    all_events,
    an_append,
    an_ask,
    an_end,
    messages,
    numbers,
    picture,
    some_events,
)


async def promise_1_what_one_commit_carries_is_seen_together(case: Case) -> None:
    await case.open_stream("left")
    await case.open_stream("right")
    store, last = case.store, 60

    async def write() -> None:
        for seq in range(1, last + 1):
            event = some_events(seq, seq)
            accepted(
                await store.commit(
                    [an_append(case.fence, event, stream="left"), an_append(case.fence, event, stream="right")]
                )
            )
            await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    while not writing.done():
        await asyncio.sleep(0)
        for one, other in (("left", "right"), ("right", "left")):
            earlier, later = len(await numbers(store, one)), len(await numbers(store, other))
            if later < earlier:
                raise AssertionError(f"{one} had {earlier} events while {other} had {later} of the same commits")
    await writing


async def promise_1_answer_seal_and_ends_of_calls_are_one_step(case: Case) -> None:
    await case.open_stream()
    ends = tuple(an_end(id_) for id_ in (1, "one"))
    await case.accept(an_append(case.fence, some_events(1, 2, final=True), ends=ends, seal=True))
    same("the stream", await case.record(), replace(a_stream(case.fence), last=2, sealed=True))
    calls = [(call.request_id, call.state) for call in await case.store.calls(SESSION)]
    same("the ledger", calls, [(1, CallState.ANSWERED), ("one", CallState.ANSWERED)])


async def promise_3_what_was_committed_is_there_after_reopening(case: Case) -> None:
    await case.open_stream()
    await case.open_stream("standalone", kind=Kind.STANDALONE)
    await case.put(an_append(case.fence, some_events(1, 3)), base.Trim(stream=STREAM, through=1))
    await case.put(base.OpenAsk(record=an_ask()), base.PutReader(record=a_reader(seq=2)))
    await case.claim("standalone")
    await case.put(base.SendMail(node=NODE, message=b"for later"))
    before = await picture(case.store)
    if await case.reopen():
        same("all that is there", await picture(case.store), before)
        same("mail", await messages(case.store), [b"for later"])


async def promise_3_closing_writes_what_waits(case: Case) -> None:
    await case.open_stream()
    waiting = [asyncio.create_task(case.store.commit([an_append(case.fence, some_events(n, n))])) for n in range(1, 51)]
    await asyncio.sleep(0)
    if await case.reopen():
        for refusals in await asyncio.gather(*waiting):
            accepted(refusals)
        same("events", await numbers(case.store), list(range(1, 51)))
    await asyncio.gather(*waiting)


async def promise_4_events_are_read_once_and_in_order(case: Case) -> None:
    await case.open_stream()
    for first in range(1, 300, 7):
        await case.accept(an_append(case.fence, some_events(first, first + 6)))
    wanted = list(some_events(1, 301))
    for page in (1, 2, 100, 301, 1_000):
        same(f"events by pages of {page}", await all_events(case.store, page=page), wanted)
    for after in (0, 1, 150, 300, 301, 10_000):
        same(f"events after {after}", await all_events(case.store, after=after), wanted[after:])
    same("events of a stream that is not there", list(await case.store.read(StreamId("no"), after=0, limit=9)), [])


async def promise_4_one_answer_is_bounded_in_bytes_and_the_rest_follows(case: Case) -> None:
    await case.open_stream()
    quarter = base.READ_BYTES // 4
    sizes = [quarter] * 4 + [quarter - 1] * 5 + [2 * base.READ_BYTES] * 2 + [1]
    events = [base.Event(seq, 0.0, b"x" * size) for seq, size in enumerate(sizes, 1)]
    accepted(await case.store.commit([an_append(case.fence, events)]))
    answers: list[int] = []
    while answer := await case.store.read(STREAM, after=sum(answers), limit=100):
        answers.append(len(answer))
    same("events in each answer", answers, [4, 5, 1, 1, 1])
    same("events", await all_events(case.store), events)


async def promise_4_commits_are_made_in_the_order_they_were_asked_for(case: Case) -> None:
    """Patient commits that are still under way, and commits at once between them: a wrong order would leave a hole."""
    await case.open_stream()
    waiting: list[asyncio.Task[base.Refusals]] = []
    for seq in range(1, 201):
        step = an_append(case.fence, some_events(seq, seq))
        done = case.store.commit_now([step]) if seq % 3 else None
        if done is None:
            waiting.append(asyncio.create_task(case.store.commit([step])))
            await asyncio.sleep(0)
        else:
            accepted(done)
    for refusals in await asyncio.gather(*waiting):
        accepted(refusals)
    same("events", await numbers(case.store), list(range(1, 201)))


async def promise_4_any_payload_and_any_id_comes_back_as_it_was(case: Case) -> None:
    payloads = [b"", b"\x00", b"a\r\nb\n\nc", bytes(range(256)), "ж\u2028😀".encode(), b"x" * (2 << 20)]
    ids: list[int | str] = [8, "9", -1, 0, 2**70, "", "\ud800", "a'b\"c\x00", "😀"]
    calls = tuple(a_call(id_) for id_ in ids)
    await case.put(base.PutSession(record=a_session()), base.OpenStream(record=a_stream(case.fence), calls=calls))
    events = [base.Event(seq, 0.25, payload) for seq, payload in enumerate(payloads, 1)]
    await case.accept(an_append(case.fence, events))
    same("payloads", [event.payload for event in await all_events(case.store)], payloads)
    same("request ids", [repr(call.request_id) for call in await case.store.calls(SESSION)], [repr(i) for i in ids])
    same("calls of the stream", list(await case.store.calls_on(STREAM)), list(calls))
    end = an_end("9", CallState.CANCELLED)
    await case.put(an_append(case.fence, (), ends=(end,)))
    ended = [call.request_id for call in await case.store.calls(SESSION) if call.state is CallState.CANCELLED]
    same("calls that were ended", ended, ["9"])


async def promise_5_committing_again_changes_nothing(case: Case) -> None:
    end = an_end()
    history: list[base.Step] = [
        base.PutSession(record=a_session()),
        base.OpenStream(record=a_stream(case.fence), calls=(a_call(1),)),
        base.OpenStream(record=a_stream(case.fence, "other"), calls=(a_call(2, stream="other"),)),
        an_append(case.fence, some_events(1, 3)),
        base.Trim(stream=STREAM, through=2),
        base.OpenAsk(record=an_ask("open")),
        base.OpenAsk(record=an_ask("closed")),
        base.CloseAsk(session=SESSION, id="closed"),
        base.PutReader(record=a_reader("first")),
        base.PutReader(record=a_reader("second", seq=2)),
        base.LeaveReader(stream=STREAM, reader="first"),
        base.Reached(stream=STREAM, generation=1, through=2, unread=True),
        base.Reached(stream=STREAM, generation=1, through=3),
        an_append(case.fence, some_events(4, 6, final=True), ends=(end,), seal=True),
    ]
    for step in history:
        await case.accept(step)
    before = await picture(case.store)
    for start in range(len(history)):
        await case.accept(*history[start:])
        same(f"all that is there, after repeating from step {start}", await picture(case.store), before)
    await case.accept(history[1])
    same("all that is there, after opening again a stream that is open", await picture(case.store), before)


async def promise_5_repeated_changes_to_sessions_calls_and_writers_change_nothing(case: Case) -> None:
    """Some are refused the second time, because their stream is not theirs any more; that changes nothing either."""
    put_call = a_put_call(case.fence)
    history: list[base.Step] = [
        base.PutSession(record=a_session(state=SessionState.OPENING)),
        base.ChangeSession(session=SESSION, state=SessionState.ACTIVE, version="2025-06-18", result=b"{}", active=2.0),
        base.Stick(session=SESSION, request=a_sticky("resources/subscribe", uri="a://1")),
        base.Stick(session=SESSION, request=a_sticky("logging/setLevel", level="debug")),
        base.OpenStream(record=a_stream(case.fence), calls=(a_call(1),)),
        put_call,
        replace(put_call, state=CallState.RUNNING, attempt=2, progress=3.0),
        base.ChangeSession(session=SESSION, state=SessionState.DORMANT, active=1.0),
        base.Release(stream=STREAM, fence=case.fence),
        base.MailReceived(node=NODE, through=1_000),
    ]
    for step in history:
        await case.accept(step)
    before = await picture(case.store)
    for start in range(len(history)):
        await case.put(*history[start:])
        same(f"all that is there, after repeating from step {start}", await picture(case.store), before)


async def promise_5_of_a_commit_that_is_partly_known_the_rest_is_added(case: Case) -> None:
    await case.open_stream()
    await case.put(an_append(case.fence, some_events(1, 3)))
    await case.put(base.Trim(stream=STREAM, through=2))
    await case.accept(an_append(case.fence, some_events(1, 5)))
    same("events", await numbers(case.store), [3, 4, 5])


async def promise_5_a_call_keeps_its_first_end(case: Case) -> None:
    await case.open_stream()
    for state in (CallState.CANCELLED, CallState.ANSWERED):
        end = an_end(1, state)
        unknown = base.CallEnd(incarnation=7, request_id=1, state=state)
        await case.accept(an_append(case.fence, (), ends=(end, unknown)))
    states = [call.state for call in await case.store.calls(SESSION)]
    same("states", states, [CallState.CANCELLED, CallState.RUNNING])


async def promise_2_a_stale_fence_is_refused_and_its_neighbours_are_not(case: Case) -> None:
    await case.open_stream("taken")
    await case.open_stream("ours")
    await case.put(an_append(case.fence, some_events(1, 1), stream="taken"))
    claimed = await case.claim("taken")
    refusals = await case.put(
        an_append(case.fence, some_events(2, 2), stream="taken"),
        an_append(case.fence, some_events(1, 2), stream="ours"),
    )
    refused(refusals, 0)
    same("events of the stream that was taken", await numbers(case.store, "taken"), [1])
    same("events of its neighbour", await numbers(case.store, "ours"), [1, 2])
    await case.accept(an_append(claimed.fence, some_events(2, 3), stream="taken"))
    same("events of the new writer", await numbers(case.store, "taken"), [1, 2, 3])


async def promise_2_a_stale_fence_neither_seals_nor_ends_calls(case: Case) -> None:
    await case.open_stream()
    await case.claim()
    end = an_end()
    refused(await case.put(an_append(case.fence, (), ends=(end,), seal=True)), 0)
    same("sealed", (await case.record()).sealed, False)
    same("the ledger", {call.state for call in await case.store.calls(SESSION)}, {CallState.RUNNING})


async def promise_2_a_stream_that_is_gone_sealed_or_elsewhere_is_not_appended_to(case: Case) -> None:
    refused(await case.put(an_append(case.fence, some_events(1, 1), stream="never opened")), 0)
    await case.open_stream()
    refused(await case.put(an_append(case.fence, some_events(2, 2))), 0)
    refused(await case.put(an_append(case.fence, [*some_events(1, 1), *some_events(3, 3)])), 0)
    same("events", await numbers(case.store), [])
    await case.accept(an_append(case.fence, some_events(1, 1, final=True), seal=True))
    refused(await case.put(an_append(case.fence, some_events(2, 2))), 0)
    await case.put(base.DropStream(stream=STREAM))
    refused(await case.put(an_append(case.fence, some_events(2, 2))), 0)


async def promise_2_a_call_is_changed_by_its_writer_alone(case: Case) -> None:
    await case.open_stream()
    again = a_put_call(case.fence, attempt=2, progress=0.5)
    await case.accept(again, replace(again, request_id="unknown"))
    changed = replace(a_call(1), state=CallState.WAITING, attempt=2, progress=0.5)
    same("the ledger", list(await case.store.calls_on(STREAM)), [changed, a_call("one")])
    claimed = await case.claim()
    stale = replace(again, state=CallState.RUNNING, attempt=3)
    refused(await case.put(stale, replace(stale, stream=StreamId("no"), fence=claimed.fence)), 0, 1)
    same("the ledger", list(await case.store.calls_on(STREAM)), [changed, a_call("one")])
    end = an_end(1, CallState.SETTLED)
    await case.put(an_append(claimed.fence, (), ends=(end,)), replace(again, fence=claimed.fence))
    same("a call that has ended", (await case.store.calls_on(STREAM))[0].state, CallState.SETTLED)
    await case.put(an_append(claimed.fence, some_events(1, 1, final=True), seal=True))
    refused(await case.put(replace(again, fence=claimed.fence, request_id="one")), 0)


async def promise_2_a_stream_is_let_go_of_by_its_writer_alone(case: Case) -> None:
    await case.open_stream()
    claimed = await case.claim()
    release = base.Release(stream=STREAM, fence=case.fence)
    refused(await case.put(release, replace(release, stream=StreamId("no"))), 0, 1)
    same("the writer", (await case.record()).node, NODE)
    await case.accept(replace(release, fence=claimed.fence))
    same("the writer", (await case.record()).node, "")
    same("streams written", list(await case.store.written_by(NODE)), [])
    refused(await case.put(an_append(claimed.fence, some_events(1, 1))), 0)
    again = await case.claim()
    same("the writer", again.node, NODE)
    await case.accept(an_append(again.fence, some_events(1, 1, final=True), seal=True))
    refused(await case.put(replace(release, fence=again.fence)), 0)


async def promise_6_a_claim_begins_a_generation_and_records_the_end_of_the_last_one(case: Case) -> None:
    await case.open_stream()
    await case.put(an_append(case.fence, some_events(1, 4)))
    first = await case.store.claim(STREAM, node=OTHER, held=case.fence)
    assert first is not None, "a stream that is there can be claimed"
    same("the claimed stream", first, replace(a_stream(first.fence, node=OTHER), generation=2, last=4))
    same("the stream in the store", await case.record(), first)
    await case.accept(an_append(first.fence, some_events(5, 6)))
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


async def promise_6_of_several_claims_one_succeeds(case: Case) -> None:
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


async def promise_6_a_claim_with_another_fence_takes_nothing(case: Case) -> None:
    await case.open_stream()
    claimed = await case.claim()
    same("a claim with a fence that is gone", await case.store.claim(STREAM, node=OTHER, held=case.fence), None)
    same("the stream", await case.record(), claimed)
    same("the ended generations", list(await case.store.generations(STREAM)), [Generation(generation=1, end=0)])


async def promise_6_what_is_sealed_or_gone_is_not_claimed(case: Case) -> None:
    await case.open_stream()
    await case.accept(an_append(case.fence, some_events(1, 1, final=True), seal=True))
    same("claiming what is sealed", await case.store.claim(STREAM, node=OTHER, held=case.fence), None)
    same("the writer", (await case.record()).node, NODE)
    await case.put(base.DropStream(stream=STREAM))
    same("claiming what is gone", await case.store.claim(STREAM, node=OTHER, held=case.fence), None)


async def streams_are_found_by_who_writes_them(case: Case) -> None:
    """The node that settles a dead node's streams sees all of them and no others."""
    for name in ("z", "sealed", "a", "taken", "released"):
        await case.open_stream(name)
    await case.put(an_append(case.fence, some_events(1, 1, final=True), stream="sealed", seal=True))
    taken = await case.store.claim(StreamId("taken"), node=OTHER, held=case.fence)
    await case.put(base.Release(stream=StreamId("released"), fence=case.fence))
    same("streams written", [stream.id for stream in await case.store.written_by(NODE)], ["z", "a"])
    same("streams of the other", list(await case.store.written_by(OTHER)), [taken])
    same("streams of an unknown node", list(await case.store.written_by(NodeId("unknown"))), [])


async def streams_are_found_by_their_ids_as_far_as_they_have_grown(case: Case) -> None:
    await case.open_stream("a")
    await case.open_stream("b")
    await case.put(an_append(case.fence, some_events(1, 7), stream="b"))
    found = await case.store.streams_by_id([StreamId(name) for name in ("b", "no", "a")])
    same("streams", dict(found), {StreamId(name): await case.record(name) for name in ("a", "b")})
    same("streams of no names", dict(await case.store.streams_by_id([])), {})


def a_forward(
    *payloads: bytes, first: int = 1, stream: str = STREAM, node: NodeId = OTHER, sender: str = "sender"
) -> base.Forward:
    return base.Forward(stream=StreamId(stream), node=node, sender=sender, first=first, payloads=payloads)


async def _waiting(store: base.Store, stream: str = STREAM) -> list[bytes]:
    """What waits for a stream, page by page."""
    found: list[bytes] = []
    after = 0
    while page := await store.forwarded(StreamId(stream), after=after):
        same("messages of a page at most", len(page) <= base.FORWARDED_AT_ONCE, True)
        found += [message.payload for message in page]
        after = page[-1].key
    return found


async def promise_16_messages_wait_in_the_order_of_their_commits(case: Case) -> None:
    await case.open_stream()
    await case.open_stream("another")
    await case.accept(a_forward(b"1", b"2"), a_forward(b"one", node=NODE, sender="ours"))
    await case.accept(a_forward(b"3", first=3), a_forward(b"theirs", stream="another"))
    await case.reopen()
    claimed = await case.store.claim(STREAM, node=OTHER, held=(await case.record()).fence)
    same("what waits", await _waiting(case.store), [b"1", b"2", b"one", b"3"])
    same("what waits for the other stream", await _waiting(case.store, "another"), [b"theirs"])
    same("whether it was claimed", claimed is not None, True)
    same("what waits for no stream", await _waiting(case.store, "none"), [])


async def promise_16_a_message_is_appended_and_taken_away_in_one_step(case: Case) -> None:
    await case.open_stream()
    await case.accept(a_forward(b"1", b"2", b"3"))
    keys = [message.key for message in await case.store.forwarded(STREAM)]
    same("keys in order", keys, sorted(set(keys)))
    stale = an_append(type(case.fence)(case.fence + 1_000), some_events(1, 3), taken=keys[2])
    refused(await case.put(stale), 0)
    same("what waits after a refusal", await _waiting(case.store), [b"1", b"2", b"3"])
    for _ in range(2):
        await case.accept(an_append(case.fence, some_events(1, 2), taken=keys[1]))
        same("what waits", await _waiting(case.store), [b"3"])
        same("events", await numbers(case.store), [1, 2])
    await case.accept(an_append(case.fence, some_events(3, 3), taken=keys[2]), a_forward(b"4", first=4))
    await case.accept(an_append(case.fence, some_events(3, 3), taken=keys[2]))
    same("what came after the last that was taken", await _waiting(case.store), [b"4"])


async def promise_16_a_number_is_taken_once_also_when_its_message_is_gone(case: Case) -> None:
    await case.open_stream()
    await case.accept(a_forward(b"1", b"2"))
    await case.reopen()
    await case.accept(a_forward(b"1", b"2"), a_forward(b"2", b"3", first=2))
    same("what waits", await _waiting(case.store), [b"1", b"2", b"3"])
    last = (await case.store.forwarded(STREAM))[-1].key
    await case.accept(an_append(case.fence, some_events(1, 3), taken=last))
    await case.accept(a_forward(b"1", b"2", b"3"))
    same("what waits once it was appended", await _waiting(case.store), [])
    await case.accept(a_forward(b"again", sender="the next one"))
    same("what another sender of the node says", await _waiting(case.store), [b"again"])


async def promise_16_no_message_is_taken_before_its_predecessor(case: Case) -> None:
    await case.open_stream()
    await case.accept(a_forward(b"1"))
    refused(await case.put(a_forward(b"3", first=3)), 0, why=MailFull)
    refused(await case.put(a_forward(b"2", first=2, sender="another")), 0, why=MailFull)
    await case.accept(a_forward(b"2", b"3", first=2))
    same("what waits", await _waiting(case.store), [b"1", b"2", b"3"])


async def promise_16_what_waits_for_a_stream_has_a_limit_in_messages(case: Case) -> None:
    await case.open_stream()
    await case.open_stream("another")
    await case.accept(a_forward(*[b"x"] * (base.MAX_FORWARDED - 1)))
    await case.accept(a_forward(b"last", node=NODE, sender="ours"))
    refused(await case.put(a_forward(b"too much", first=base.MAX_FORWARDED)), 0, why=MailFull)
    same("messages that wait", len(await _waiting(case.store)), base.MAX_FORWARDED)
    await case.accept(a_forward(b"theirs", stream="another"))
    first = (await case.store.forwarded(STREAM))[0].key
    await case.accept(an_append(case.fence, some_events(1, 1), taken=first))
    await case.accept(a_forward(b"room again", first=base.MAX_FORWARDED))


async def promise_16_what_waits_for_a_stream_has_a_limit_in_bytes(case: Case) -> None:
    """One sender alone may say more at once: it would wait for ever otherwise."""
    await case.open_stream()
    half = b"x" * (base.MAX_FORWARDED_BYTES // 2)
    await case.accept(a_forward(half), a_forward(half, first=2))
    refused(await case.put(a_forward(b"x", first=3)), 0, why=MailFull)
    await case.open_stream("another")
    await case.accept(a_forward(half, half, b"x", stream="another"))
    refused(await case.put(a_forward(b"x", first=4, stream="another")), 0, why=MailFull)


async def promise_16_a_message_for_a_stream_that_no_node_writes_is_refused(case: Case) -> None:
    await case.open_stream()
    await case.accept(a_forward(b"1"))
    same("streams of the writer", [s.id for s in await case.store.forwarded_to(NODE)], [STREAM])
    same("streams of another node", [s.id for s in await case.store.forwarded_to(OTHER)], [])
    await case.accept(base.Release(stream=STREAM, fence=case.fence))
    refused(await case.put(a_forward(b"2", first=2)), 0, why=NodeGone)
    await case.accept(a_forward(b"1"))  # it is there already
    same("streams that no node writes", [s.id for s in await case.store.forwarded_to(OTHER)], [STREAM])
    await case.put(base.DropStream(stream=STREAM))
    refused(await case.put(a_forward(b"2", first=2)), 0, why=SessionEnded)
    same("what waits for a stream that is gone", await _waiting(case.store), [])
    same("streams for which messages wait", list(await case.store.forwarded_to(NODE)), [])


async def promise_16_a_writer_that_was_buried_is_no_writer(case: Case) -> None:
    await case.open_stream()
    await case.store.join(OTHER)
    await case.store.claim(STREAM, node=OTHER, held=(await case.record()).fence)
    await case.accept(a_forward(b"1", node=NODE))
    same("streams of the dead", [s.id for s in await case.store.forwarded_to(NODE)], [])
    await case.store.leave(OTHER)
    await case.store.bury(OTHER, heir=NODE)
    refused(await case.put(a_forward(b"2", first=2, node=NODE)), 0, why=NodeGone)
    same("streams without a writer", [s.id for s in await case.store.forwarded_to(NODE)], [STREAM])
