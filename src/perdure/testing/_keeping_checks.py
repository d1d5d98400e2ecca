"""Promises 7, 9 and 17 to 20: what is kept and forgotten, failures, clocks, time limits, how far readers have got."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import cast

from perdure._core.ids import Kind, NodeId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import SessionState
from perdure.errors import StoreError, StoreUnavailable
from perdure.store import base
from perdure.store.within_time import CALLS, within_time
from perdure.testing._case import Case, same
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
    an_end,
    an_ended_session,
    messages,
    numbers,
    picture,
    put,
    some_events,
)

_BURIED = NodeId("buried")
"""A node that is not there any more."""

_SHORT = 0.1
"""Seconds that a store has which does not keep its time by itself."""


async def promise_7_trimming_leaves_the_answers(case: Case) -> None:
    await case.open_stream()
    answers = some_events(1, 3, final=True) + some_events(4, 6, final=True)
    await case.put(an_append(case.fence, answers, seal=True))
    await case.put(base.Trim(stream=STREAM, through=5))
    same("events", await numbers(case.store), [3, 6])
    await case.put(base.Trim(stream=STREAM, through=1_000))
    same("events", await numbers(case.store), [3, 6])
    same("the highest number ever", (await case.record()).last, 6)


async def promise_7_dropping_and_ending_take_everything(case: Case) -> None:
    await case.open_stream("dropped")
    await case.open_stream()
    for stream in ("dropped", STREAM):
        await case.put(an_append(case.fence, some_events(1, 2, final=True), stream=stream))
        await case.put(
            base.OpenAsk(record=an_ask(stream, stream=stream)), base.PutReader(record=a_reader(stream=stream))
        )
    await case.put(base.DropStream(stream=StreamId("dropped")))
    same("streams", [stream.id for stream in await case.store.streams(SESSION)], [STREAM])
    same("asks", [ask.id for ask in await case.store.asks(SESSION)], [STREAM])
    same("calls", {call.stream for call in await case.store.calls(SESSION)}, {STREAM})
    same("events of the dropped stream", await numbers(case.store, "dropped"), [])
    await case.put(base.EndSession(session=SESSION, time=9.0, reason="why"))
    ended = an_ended_session(active=9.0, ended="why")
    nothing: dict[str, object] = {f"{SESSION}: {what}": [] for what in ("streams", "calls", "asks", "kept", "unread")}
    nothing[f"{SESSION}: chain"] = None
    same("all that is there", await picture(case.store), {"sessions": [ended]} | nothing)
    same("its reader", await case.store.reader(STREAM), None)


async def promise_7_sweeping_forgets_events_before_answers_and_sessions_last(case: Case) -> None:
    await case.open_stream()
    await case.put(base.ChangeSession(session=SESSION, active=30.0))
    await case.put(an_append(case.fence, some_events(1, 2, time=10.0)))
    await case.put(an_append(case.fence, some_events(3, 4, time=20.0, final=True), seal=True))
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
        record = a_stream(case.fence, name, session=name, node=_BURIED)
        call = a_call(stream=name, session=name)
        await case.put(
            base.PutSession(record=a_session(name, active=active)),
            base.OpenStream(record=record, calls=(call,)),
            base.OpenStream(
                record=a_stream(case.fence, f"{name}-standalone", session=name, kind=Kind.STANDALONE, node=_BURIED)
            ),
            an_append(case.fence, some_events(1, 5, time=active), stream=name),
            base.OpenAsk(record=an_ask(stream=name, session=name)),
        )
    young = await picture(case.store, sessions=["young"])
    await case.store.sweep(Cutoffs(events=5.0, answers=5.0))
    young["sessions"] = [a_session("young", active=9.0)]
    same("the neighbour", await picture(case.store, sessions=["young"]), young)
    same("streams of the expired session", len(await case.store.streams(a_session("old").id)), 0)
    same("asks of the expired session", len(await case.store.asks(a_session("old").id)), 0)


async def promise_17_no_time_ends_a_session_that_a_node_uses(case: Case) -> None:
    """Its home, a call that runs, a reader: each of them keeps it, however old its last activity is."""
    store, end = case.store, base.EndSession(session=SESSION, time=9.0, reason="why", unused_since=5.0)
    home = a_stream(case.fence, "home", kind=Kind.STANDALONE)
    await put(
        store, base.PutSession(record=a_session(active=5.0, state=SessionState.DORMANT)), base.OpenStream(record=home)
    )
    await _is_left_alone(case, end, "a session with a home")
    await put(store, base.Release(stream=home.id, fence=case.fence))
    await put(store, base.OpenStream(record=a_stream(case.fence), calls=(a_call(),)))
    await _is_left_alone(case, end, "a session with a running call")
    answered = an_end()
    await put(store, an_append(case.fence, some_events(1, 1, time=90.0, final=True), ends=(answered,), seal=True))
    await put(store, base.PutReader(record=a_reader(stream="home")))
    await _is_left_alone(case, end, "a session with a reader")
    await put(store, base.LeaveReader(stream=home.id, reader="reader-1"))
    same("of those that may go", await store.longest_dormant(), a_session(active=5.0, state=SessionState.DORMANT))
    await put(store, replace(end, unused_since=4.9))
    same("a session used since", len(await all_sessions(store)), 1)
    await put(store, end)
    same("its end", [session.ended for session in await all_sessions(store)], ["why"])


async def promise_17_what_is_not_used_may_be_swept(case: Case) -> None:
    """A node that is buried uses nothing, whatever it left behind."""
    node = NodeId("another")
    fence = await case.store.join(node)
    record = a_stream(fence, "home", kind=Kind.STANDALONE, node=node)
    await case.put(base.PutSession(record=a_session(active=5.0)), base.OpenStream(record=record))
    await case.store.sweep(Cutoffs(events=80.0, answers=80.0))
    same("sessions of a node that is there", len(await all_sessions(case.store)), 1)
    await case.store.bury(node, heir=NODE)
    await case.store.sweep(Cutoffs(events=80.0, answers=80.0))
    same("sessions of a node that is buried", await all_sessions(case.store), [])


async def _is_left_alone(case: Case, end: base.EndSession, what: str) -> None:
    await case.put(end)
    await case.store.sweep(Cutoffs(events=80.0, answers=80.0))
    same(f"{what}: its state", [session.ended for session in await all_sessions(case.store)], [""])
    same(f"{what}: the longest dormant of those that may go", await case.store.longest_dormant(), None)


async def promise_18_all_nodes_are_told_the_same_time(case: Case) -> None:
    before = case.store.clock()
    async with case.elsewhere() as elsewhere:
        await elsewhere.join(NodeId("another"))
        between = elsewhere.clock()
        after = case.store.clock()
    # The clock of processes, and of machines, may be a little off; what is kept is kept for minutes at least.
    assert before - 1 <= between <= after + 1, f"{before}, {between}, {after}"
    assert before <= after, f"the clock went back from {before} to {after}"


async def promise_9_a_closed_store_fails_by_name_or_not_at_all(case: Case) -> None:
    await case.open_stream()
    await case.store.aclose()
    await case.store.aclose()
    step = an_append(case.fence, some_events(1, 1))
    for attempt in (
        lambda: case.store.commit([step]),
        lambda: case.store.read(STREAM, after=0, limit=1),
        lambda: case.store.claim(STREAM, node=NODE, held=case.fence),
        lambda: case.store.sweep(Cutoffs(events=0.0, answers=0.0)),
    ):
        with contextlib.suppress(StoreError):
            await attempt()
    with contextlib.suppress(StoreError):
        case.store.commit_now([step])


class _Hanging:
    """A store that never answers, in front of one that would."""

    keeps_time = False

    def __init__(self, store: base.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return self._never if name in CALLS else getattr(self._store, name)

    async def _never(self, *_: object, **__: object) -> None:
        await asyncio.Event().wait()


async def promise_20_a_call_that_hangs_fails_by_name_within_its_time(case: Case) -> None:
    """A store that keeps its time does so while its backend hangs; any other one behind `within_time`."""
    await case.open_stream()
    hang = case.hang
    if hang is None and case.store.keeps_time:
        raise AssertionError("the store says that it keeps its time; give `check_store` a `hang` to show it with")
    store = within_time(case.store if hang else cast("base.Store", _Hanging(case.store)), _SHORT)
    step = an_append(case.fence, some_events(1, 1))
    with hang() if hang else contextlib.nullcontext():
        calls = (
            store.commit([step]),
            store.claim(StreamId("no"), node=NODE, held=case.fence),
            store.read(STREAM, after=0, limit=1),
        )
        try:
            async with asyncio.timeout(case.patience):
                answers = await asyncio.gather(*calls, return_exceptions=True)
        except TimeoutError:
            raise AssertionError(f"a call neither answered nor failed within {case.patience} seconds") from None
    same("what a commit raises while the store hangs", type(answers[0]), StoreUnavailable)
    failures = {type(answer) for answer in answers if isinstance(answer, BaseException)}
    same("failures of all calls while it hangs", failures, {StoreUnavailable})
    await case.accept(step)  # it may have been written when the store went on (5)
    same("events, when it goes on", await numbers(case.store), [1])


async def the_newest_reader_stays_when_an_older_one_leaves(case: Case) -> None:
    await case.open_stream()
    await case.put(base.PutReader(record=a_reader("old")), base.PutReader(record=a_reader("new", seq=3)))
    await case.put(base.MoveReader(stream=STREAM, reader="old", seq=9), base.LeaveReader(stream=STREAM, reader="old"))
    same("the reader", await case.store.reader(STREAM), a_reader("new", seq=3))
    await case.put(base.MoveReader(stream=STREAM, reader="new", seq=5))
    same("the reader that has got further", await case.store.reader(STREAM), a_reader("new", seq=5))
    await case.put(base.LeaveReader(stream=STREAM, reader="new"))
    same("the reader", await case.store.reader(STREAM), None)
    await case.put(base.PutReader(record=a_reader(stream="not there")), base.OpenAsk(record=an_ask(stream="not there")))
    same("the reader of no stream", await case.store.reader(StreamId("not there")), None)
    same("asks of no stream", list(await case.store.asks(SESSION)), [])


async def promise_19_how_far_readers_have_got_only_moves_forward(case: Case) -> None:
    """Whichever node tells it, and in whatever order: a reader from further back takes nothing away."""
    await case.open_stream()
    await case.put(an_append(case.fence, some_events(1, 5)))
    for through, reached in ((2, 2), (1, 2), (4, 4), (9, 5)):
        await case.put(base.Reached(stream=STREAM, generation=1, through=through))
        same(f"how far readers have got, told {through}", (await case.record()).delivered, reached)
    await case.put(base.Reached(stream=StreamId("not there"), generation=1, through=1))
    same("the stream that is not there", await base.stream_by_id(case.store, StreamId("not there")), None)


async def promise_19_an_event_in_the_place_of_a_lost_one_is_unread(case: Case) -> None:
    """A reader was shown 5, of which the store got 3; another writer has given the numbers 4 and 5 to other events."""
    await case.open_stream()
    await case.put(an_append(case.fence, some_events(1, 3)))
    claimed = await case.claim()
    await case.put(an_append(claimed.fence, some_events(4, 6)))
    await case.put(base.Reached(stream=STREAM, generation=1, through=5))
    same("how far readers have got, told of the lost ones", (await case.record()).delivered, 3)
    await case.put(base.Reached(stream=STREAM, generation=7, through=5))
    same("how far readers have got, told of a generation that never was", (await case.record()).delivered, 3)
    await case.put(base.Reached(stream=STREAM, generation=2, through=5))
    same("how far readers have got, told of the new ones", (await case.record()).delivered, 5)


async def calls_whose_reader_was_lost_are_known_until_they_are_read(case: Case) -> None:
    for name in ("z", "read", "a"):
        await case.open_stream(name)
        await case.put(an_append(case.fence, some_events(1, 3), stream=name))
        await case.put(base.Reached(stream=StreamId(name), generation=1, through=2, unread=True))
    await case.put(base.Reached(stream=StreamId("read"), generation=1, through=3))
    seen = [(stream.id, stream.delivered) for stream in await case.store.unread(SESSION)]
    same("the unread streams and how far they were read", seen, [("z", 2), ("a", 2)])
    await case.put(base.DropStream(stream=StreamId("z")), base.Reached(stream=StreamId("z"), generation=1, through=1))
    same("the unread streams", [stream.id for stream in await case.store.unread(SESSION)], ["a"])


async def what_is_retained_of_sealed_streams_is_known_in_numbers(case: Case) -> None:
    for name in ("z", "running", "a"):
        await case.open_stream(name)
        answers = some_events(1, 3, final=True) + some_events(4, 5, final=True)
        await case.put(an_append(case.fence, answers, stream=name, seal=name != "running"))
    await case.put(base.Trim(stream=StreamId("a"), through=2))
    wanted = [
        base.KeptRecord(stream=StreamId("z"), opened=0.0, events=3, answers=2, event_bytes=21, answer_bytes=14),
        base.KeptRecord(stream=StreamId("a"), opened=0.0, events=1, answers=2, event_bytes=7, answer_bytes=14),
    ]
    same("what is kept", list(await case.store.kept(SESSION)), wanted)


async def probing_leaves_nothing_behind(case: Case) -> None:
    await case.open_stream()
    before = await picture(case.store)
    for size in (0, 1, 100_000):
        await case.store.probe(size)
    same("all that is there", await picture(case.store), before)
    same("mail", await messages(case.store), [])
    same("rows to sweep", await case.store.sweep(Cutoffs(events=0.0, answers=0.0)), 0)
