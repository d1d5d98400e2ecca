"""Promises 1 and 3 to 5: what goes into the log comes out of it, whole, once and in order."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from perdure._core.ids import Kind, StreamId
from perdure._core.states import CallState, SessionState
from perdure.store.base import (
    READ_BYTES,
    CallEnd,
    ChangeSession,
    CloseAsk,
    Event,
    LeaveReader,
    MailReceived,
    OpenAsk,
    OpenStream,
    PutCall,
    PutReader,
    PutSession,
    Reached,
    Refusals,
    Release,
    SendMail,
    Step,
    Stick,
    Trim,
)
from perdure.testing._case import Case, accepted, same
from perdure.testing._values import (
    NODE,
    SESSION,
    STREAM,
    a_call,
    a_reader,
    a_session,
    a_sticky,
    a_stream,
    all_events,
    an_append,
    an_ask,
    messages,
    numbers,
    picture,
    put,
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
    ends = tuple(CallEnd(incarnation=1, request_id=id_, state=CallState.ANSWERED) for id_ in (1, "one"))
    accepted(await put(case.store, an_append(case.fence, some_events(1, 2, final=True), ends=ends, seal=True)))
    same("the stream", await case.record(), replace(a_stream(case.fence), last=2, sealed=True))
    calls = [(call.request_id, call.state) for call in await case.store.calls(SESSION)]
    same("the ledger", calls, [(1, CallState.ANSWERED), ("one", CallState.ANSWERED)])


async def promise_3_what_was_committed_is_there_after_reopening(case: Case) -> None:
    await case.open_stream()
    await case.open_stream("standalone", kind=Kind.STANDALONE)
    await put(case.store, an_append(case.fence, some_events(1, 3)), Trim(stream=STREAM, through=1))
    await put(case.store, OpenAsk(record=an_ask()), PutReader(record=a_reader(seq=2)))
    await case.claim("standalone")
    await put(case.store, SendMail(node=NODE, message=b"for later"))
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
        accepted(await put(case.store, an_append(case.fence, some_events(first, first + 6))))
    wanted = list(some_events(1, 301))
    for page in (1, 2, 100, 301, 1_000):
        same(f"events by pages of {page}", await all_events(case.store, page=page), wanted)
    for after in (0, 1, 150, 300, 301, 10_000):
        same(f"events after {after}", await all_events(case.store, after=after), wanted[after:])
    same("events of a stream that is not there", list(await case.store.read(StreamId("no"), after=0, limit=9)), [])


async def promise_4_one_answer_is_bounded_in_bytes_and_the_rest_follows(case: Case) -> None:
    await case.open_stream()
    quarter = READ_BYTES // 4
    sizes = [quarter] * 4 + [quarter - 1] * 5 + [2 * READ_BYTES] * 2 + [1]
    events = [Event(seq, 0.0, b"x" * size) for seq, size in enumerate(sizes, 1)]
    accepted(await case.store.commit([an_append(case.fence, events)]))
    answers: list[int] = []
    while answer := await case.store.read(STREAM, after=sum(answers), limit=100):
        answers.append(len(answer))
    same("events in each answer", answers, [4, 5, 1, 1, 1])
    same("events", await all_events(case.store), events)


async def promise_4_commits_are_made_in_the_order_they_were_asked_for(case: Case) -> None:
    """Patient commits that are still under way, and commits at once between them: a wrong order would leave a hole."""
    await case.open_stream()
    waiting: list[asyncio.Task[Refusals]] = []
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
    await put(case.store, PutSession(record=a_session()), OpenStream(record=a_stream(case.fence), calls=calls))
    events = [Event(seq, 0.25, payload) for seq, payload in enumerate(payloads, 1)]
    accepted(await put(case.store, an_append(case.fence, events)))
    same("payloads", [event.payload for event in await all_events(case.store)], payloads)
    same("request ids", [repr(call.request_id) for call in await case.store.calls(SESSION)], [repr(i) for i in ids])
    same("calls of the stream", list(await case.store.calls_on(STREAM)), list(calls))
    end = CallEnd(incarnation=1, request_id="9", state=CallState.CANCELLED)
    await put(case.store, an_append(case.fence, (), ends=(end,)))
    ended = [call.request_id for call in await case.store.calls(SESSION) if call.state is CallState.CANCELLED]
    same("calls that were ended", ended, ["9"])


async def promise_5_committing_again_changes_nothing(case: Case) -> None:
    end = CallEnd(incarnation=1, request_id=1, state=CallState.ANSWERED)
    history: list[Step] = [
        PutSession(record=a_session()),
        OpenStream(record=a_stream(case.fence), calls=(a_call(1),)),
        OpenStream(record=a_stream(case.fence, "other"), calls=(a_call(2, stream="other"),)),
        an_append(case.fence, some_events(1, 3)),
        Trim(stream=STREAM, through=2),
        OpenAsk(record=an_ask("open")),
        OpenAsk(record=an_ask("closed")),
        CloseAsk(session=SESSION, id="closed"),
        PutReader(record=a_reader("first")),
        PutReader(record=a_reader("second", seq=2)),
        LeaveReader(stream=STREAM, reader="first"),
        Reached(stream=STREAM, generation=1, through=2, unread=True),
        Reached(stream=STREAM, generation=1, through=3),
        an_append(case.fence, some_events(4, 6, final=True), ends=(end,), seal=True),
    ]
    for step in history:
        accepted(await put(case.store, step))
    before = await picture(case.store)
    for start in range(len(history)):
        accepted(await put(case.store, *history[start:]))
        same(f"all that is there, after repeating from step {start}", await picture(case.store), before)
    accepted(await put(case.store, history[1]))
    same("all that is there, after opening again a stream that is open", await picture(case.store), before)


async def promise_5_repeated_changes_to_sessions_calls_and_writers_change_nothing(case: Case) -> None:
    """Some are refused the second time, because their stream is not theirs any more; that changes nothing either."""
    put_call = PutCall(
        stream=STREAM, fence=case.fence, incarnation=1, request_id=1, state=CallState.WAITING, attempt=1, progress=None
    )
    history: list[Step] = [
        PutSession(record=a_session(state=SessionState.OPENING)),
        ChangeSession(session=SESSION, state=SessionState.ACTIVE, version="2025-06-18", result=b"{}", active=2.0),
        Stick(session=SESSION, request=a_sticky("resources/subscribe", uri="a://1")),
        Stick(session=SESSION, request=a_sticky("logging/setLevel", level="debug")),
        OpenStream(record=a_stream(case.fence), calls=(a_call(1),)),
        put_call,
        replace(put_call, state=CallState.RUNNING, attempt=2, progress=3.0),
        ChangeSession(session=SESSION, state=SessionState.DORMANT, active=1.0),
        Release(stream=STREAM, fence=case.fence),
        MailReceived(node=NODE, through=1_000),
    ]
    for step in history:
        accepted(await put(case.store, step))
    before = await picture(case.store)
    for start in range(len(history)):
        await put(case.store, *history[start:])
        same(f"all that is there, after repeating from step {start}", await picture(case.store), before)


async def promise_5_of_a_commit_that_is_partly_known_the_rest_is_added(case: Case) -> None:
    await case.open_stream()
    await put(case.store, an_append(case.fence, some_events(1, 3)))
    await put(case.store, Trim(stream=STREAM, through=2))
    accepted(await put(case.store, an_append(case.fence, some_events(1, 5))))
    same("events", await numbers(case.store), [3, 4, 5])


async def promise_5_a_call_keeps_its_first_end(case: Case) -> None:
    await case.open_stream()
    for state in (CallState.CANCELLED, CallState.ANSWERED):
        end = CallEnd(incarnation=1, request_id=1, state=state)
        unknown = CallEnd(incarnation=7, request_id=1, state=state)
        accepted(await put(case.store, an_append(case.fence, (), ends=(end, unknown))))
    states = [call.state for call in await case.store.calls(SESSION)]
    same("states", states, [CallState.CANCELLED, CallState.RUNNING])
