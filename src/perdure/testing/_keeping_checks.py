"""Promises 6 to 9: generations, what is kept and what is forgotten, wake-ups, failures; and the rest of the store."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from perdure._core.ids import Kind, NodeId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import SessionState
from perdure.errors import StoreError
from perdure.store.base import (
    DropStream,
    EndSession,
    Generation,
    LeaveReader,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
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
    a_stream,
    all_sessions,
    an_append,
    an_ask,
    numbers,
    picture,
    put,
    some_events,
)


async def promise_6_a_claim_begins_a_generation_and_records_the_end_of_the_one_before(case: Case) -> None:
    await case.open_stream()
    await put(case.store, an_append(case.fence, some_events(1, 4)))
    first = await case.store.claim(StreamId(STREAM))
    assert first is not None, "a stream that is there can be claimed"
    same("the claimed stream", first, replace(a_stream(first.fence), generation=2, last=4))
    accepted(await put(case.store, an_append(first.fence, some_events(5, 6))))
    await case.reopen()
    second = await case.store.claim(StreamId(STREAM))
    assert second is not None, "a stream that is there can be claimed"
    same("the generation", second.generation, 3)
    wanted = [Generation(generation=1, end=4), Generation(generation=2, end=6)]
    same("the ended generations", list(await case.store.generations(StreamId(STREAM))), wanted)


async def promise_6_no_fence_is_given_twice(case: Case) -> None:
    await case.open_stream()
    fences = [case.fence]
    for number in range(3):
        fences.append(await case.store.join(NodeId(f"node-{number}")))
        claimed = await case.store.claim(StreamId(STREAM))
        fences.append(claimed.fence if claimed else case.fence)
        await case.reopen()
    same("different fences", len(set(fences)), len(fences))


async def promise_7_trimming_leaves_the_answers(case: Case) -> None:
    await case.open_stream()
    answers = some_events(1, 3, final=True) + some_events(4, 6, final=True)
    await put(case.store, an_append(case.fence, answers, seal=True))
    await put(case.store, Trim(stream=StreamId(STREAM), through=5))
    same("events", await numbers(case.store), [3, 6])
    await put(case.store, Trim(stream=StreamId(STREAM), through=1_000))
    same("events", await numbers(case.store), [3, 6])
    record = await case.store.stream(StreamId(STREAM))
    same("the highest number ever", record and record.last, 6)


async def promise_7_dropping_and_ending_take_everything(case: Case) -> None:
    await case.open_stream("dropped")
    await case.open_stream()
    for stream in ("dropped", STREAM):
        await put(case.store, an_append(case.fence, some_events(1, 2, final=True), stream=stream))
        await put(case.store, OpenAsk(record=an_ask(stream, stream=stream)), PutReader(record=a_reader(stream=stream)))
    await put(case.store, DropStream(stream=StreamId("dropped")))
    same("streams", [stream.id for stream in await case.store.streams(SESSION)], [STREAM])
    same("asks", [ask.id for ask in await case.store.asks(SESSION)], [STREAM])
    same("calls", {call.stream for call in await case.store.calls(SESSION)}, {STREAM})
    same("events of the dropped stream", await numbers(case.store, "dropped"), [])
    await put(case.store, EndSession(session=SESSION, time=9.0))
    ended = a_session(active=9.0, state=SessionState.ENDED)
    wanted = {"sessions": [ended], f"{SESSION}: streams": [], f"{SESSION}: calls": [], f"{SESSION}: asks": []}
    same("all that is there", await picture(case.store), wanted)
    same("its reader", await case.store.reader(StreamId(STREAM)), None)


async def promise_7_sweeping_forgets_events_before_answers_and_sessions_last(case: Case) -> None:
    await case.open_stream()
    await put(case.store, PutSession(record=a_session(active=30.0)))
    await put(case.store, an_append(case.fence, some_events(1, 2, time=10.0)))
    await put(case.store, an_append(case.fence, some_events(3, 4, time=20.0, final=True), seal=True))
    same("rows swept too early", await case.store.sweep(Cutoffs(events=10.0, answers=0.0)), 0)
    assert await case.store.sweep(Cutoffs(events=20.0, answers=10.0)), "events have expired"
    same("events", await numbers(case.store), [3, 4])
    assert await case.store.sweep(Cutoffs(events=25.0, answers=20.0)), "an event has expired"
    same("events", await numbers(case.store), [4])
    assert await case.store.sweep(Cutoffs(events=25.0, answers=25.0)), "the answer has expired"
    same("streams", list(await case.store.streams(SESSION)), [])
    same("sessions", [session.id for session in await all_sessions(case.store)], [SESSION])
    assert await case.store.sweep(Cutoffs(events=40.0, answers=40.0)), "the session has expired"
    same("sessions", await all_sessions(case.store), [])


async def promise_7_sweeping_a_session_takes_all_of_it_and_nothing_of_its_neighbour(case: Case) -> None:
    for name, active in (("old", 1.0), ("young", 9.0)):
        record, call = a_stream(case.fence, name, session=name), a_call(stream=name, session=name)
        await put(
            case.store,
            PutSession(record=a_session(name, active=active)),
            OpenStream(record=record, calls=(call,)),
            OpenStream(record=a_stream(case.fence, f"{name}-standalone", session=name, kind=Kind.STANDALONE)),
            an_append(case.fence, some_events(1, 5, time=active), stream=name),
            OpenAsk(record=an_ask(stream=name, session=name)),
        )
    young = await picture(case.store, sessions=["young"])
    await case.store.sweep(Cutoffs(events=5.0, answers=5.0))
    young["sessions"] = [a_session("young", active=9.0)]
    same("the neighbour", await picture(case.store, sessions=["young"]), young)
    same("streams of the expired session", len(await case.store.streams(a_session("old").id)), 0)
    same("asks of the expired session", len(await case.store.asks(a_session("old").id)), 0)


async def promise_8_reading_tells_the_truth_whether_or_not_somebody_listens(case: Case) -> None:
    await case.open_stream()
    told: list[StreamId] = []
    stop = case.store.subscribe(told.append)
    await put(case.store, an_append(case.fence, some_events(1, 1)))
    same("events while listening", await numbers(case.store), [1])
    stop()
    stop()
    await put(case.store, an_append(case.fence, some_events(2, 2)))
    same("events without", await numbers(case.store), [1, 2])
    same("streams told of that did not grow", set(told) - {STREAM}, set())


async def promise_9_a_closed_store_fails_by_name_or_not_at_all(case: Case) -> None:
    await case.open_stream()
    await case.store.aclose()
    await case.store.aclose()
    step = an_append(case.fence, some_events(1, 1))
    for attempt in (
        lambda: case.store.commit([step]),
        lambda: case.store.read(StreamId(STREAM), after=0, limit=1),
        lambda: case.store.claim(StreamId(STREAM)),
        lambda: case.store.sweep(Cutoffs(events=0.0, answers=0.0)),
    ):
        with contextlib.suppress(StoreError):
            await attempt()
    with contextlib.suppress(StoreError):
        case.store.commit_now([step])


async def mail_is_collected_once_and_in_order(case: Case) -> None:
    other = NodeId("other")
    await case.store.join(other)
    for number in range(5):
        await case.store.post(NODE, b"%d" % number)
    await case.store.post(other, b"theirs")
    same("mail", list(await case.store.collect(NODE)), [b"0", b"1", b"2", b"3", b"4"])
    same("mail collected before", list(await case.store.collect(NODE)), [])
    same("the other's mail", list(await case.store.collect(other)), [b"theirs"])


async def sessions_are_listed_by_id_a_page_at_a_time(case: Case) -> None:
    ids = [f"s{number:02d}" for number in range(25)]
    await put(case.store, *(PutSession(record=a_session(id_)) for id_ in reversed(ids)))
    same("a page", [session.id for session in await case.store.sessions(after=None, limit=3)], ids[:3])
    same("all pages", [session.id for session in await all_sessions(case.store, page=4)], ids)
    changed = replace(a_session("s07"), incarnation=5, sticky=(), owner="\ud83d somebody else", active=3.5)
    await put(case.store, PutSession(record=changed))
    same("a record that was written over", await case.store.session(changed.id), changed)


async def the_newest_reader_stays_when_an_older_one_leaves(case: Case) -> None:
    await case.open_stream()
    await put(case.store, PutReader(record=a_reader("old")), PutReader(record=a_reader("new", seq=3)))
    await put(case.store, LeaveReader(stream=StreamId(STREAM), reader="old"))
    same("the reader", await case.store.reader(StreamId(STREAM)), a_reader("new", seq=3))
    await put(case.store, LeaveReader(stream=StreamId(STREAM), reader="new"))
    same("the reader", await case.store.reader(StreamId(STREAM)), None)
    await put(case.store, PutReader(record=a_reader(stream="not there")), OpenAsk(record=an_ask(stream="not there")))
    same("the reader of no stream", await case.store.reader(StreamId("not there")), None)
    same("asks of no stream", list(await case.store.asks(SESSION)), [])
