"""The contract, one small story for each thing promised. Their names carry the promise's number."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from perdure._core.ids import Fence, Kind, NodeId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.errors import StaleFence, StoreError
from perdure.store.base import (
    CallEnd,
    CloseAsk,
    DropStream,
    EndSession,
    Event,
    Generation,
    LeaveReader,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
    Refusals,
    Store,
    Trim,
)
from perdure.testing._values import (
    NODE,
    SESSION,
    STREAM,
    Make,
    a_call,
    a_reader,
    a_session,
    a_stream,
    all_events,
    all_sessions,
    an_append,
    an_ask,
    numbers,
    picture,
    put,
    some_events,
)


@dataclass(kw_only=True)
class Case:
    """A fresh store that is open and has been joined, and the way to close and open it again."""

    store: Store
    fence: Fence
    again: Callable[[], Store] | None

    async def reopen(self) -> bool:
        """Close and open again; `False` where nothing outlives the object."""
        if self.again is None:
            return False
        await self.store.aclose()
        self.store = self.again()
        await self.store.open()
        return True

    async def open_stream(self, name: str = STREAM, *, kind: Kind = Kind.CALL) -> None:
        record = a_stream(self.fence, name, kind=kind)
        calls = (a_call(1, stream=name), a_call("1", stream=name)) if kind is Kind.CALL else ()
        await put(self.store, PutSession(record=a_session()), OpenStream(record=record, calls=calls))


Check = Callable[[Case], Awaitable[None]]


async def check_store(make: Make, *, durable: bool = True) -> None:
    """Check every promise, on a fresh store each.

    `make(name)` gives a store that is not open yet; with the same name again, one on the same data. `durable=False` says
    that nothing outlives the object, and leaves out what closes and opens again.
    """
    for check in CHECKS:
        name = check.__name__
        store = make(name)
        await store.open()
        case = Case(store=store, fence=await store.join(NODE), again=(lambda name=name: make(name)) if durable else None)
        try:
            await check(case)
        except AssertionError as error:
            raise AssertionError(f"{name.replace('_', ' ')}: {error}") from error
        finally:
            await case.store.aclose()


def _same(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise AssertionError(f"{what}: {seen!r}, where {wanted!r} was promised")


def _accepted(refusals: Refusals) -> None:
    _same("refusals", list(refusals), [None] * len(refusals))


def _refused(refusals: Refusals, *places: int) -> None:
    refused = [place for place, refusal in enumerate(refusals) if isinstance(refusal, StaleFence)]
    _same("refused steps", refused, list(places))


async def promise_1_what_one_commit_carries_is_seen_together(case: Case) -> None:
    await case.open_stream("left")
    await case.open_stream("right")
    store, last = case.store, 60

    async def write() -> None:
        for seq in range(1, last + 1):
            event = some_events(seq, seq)
            _accepted(
                await store.commit(
                    [an_append(case.fence, event, stream="left"), an_append(case.fence, event, stream="right")]
                )
            )

    writing = asyncio.create_task(write())
    seen = 0
    while seen < last:
        for one, other in (("left", "right"), ("right", "left")):
            earlier, later = len(await numbers(store, one)), len(await numbers(store, other))
            if later < earlier:
                raise AssertionError(f"{one} had {earlier} events while {other} had {later} of the same commits")
            seen = min(earlier, later)
    await writing


async def promise_1_answer_seal_and_ends_of_calls_are_one_step(case: Case) -> None:
    await case.open_stream()
    ends = tuple(CallEnd(incarnation=1, request_id=id_, state=CallState.ANSWERED) for id_ in (1, "1"))
    _accepted(await put(case.store, an_append(case.fence, some_events(1, 2, final=True), ends=ends, seal=True)))
    record = await case.store.stream(StreamId(STREAM))
    _same("the stream", record, replace(a_stream(case.fence), last=2, sealed=True))
    calls = [(call.request_id, call.state) for call in await case.store.calls(SESSION)]
    _same("the ledger", calls, [(1, CallState.ANSWERED), ("1", CallState.ANSWERED)])


async def promise_2_a_stale_fence_is_refused_and_its_neighbours_are_not(case: Case) -> None:
    await case.open_stream("taken")
    await case.open_stream("ours")
    await put(case.store, an_append(case.fence, some_events(1, 1), stream="taken"))
    claimed = await case.store.claim(StreamId("taken"))
    assert claimed is not None, "a stream that is there can be claimed"
    refusals = await put(
        case.store,
        an_append(case.fence, some_events(2, 2), stream="taken"),
        an_append(case.fence, some_events(1, 2), stream="ours"),
    )
    _refused(refusals, 0)
    _same("events of the stream that was taken", await numbers(case.store, "taken"), [1])
    _same("events of its neighbour", await numbers(case.store, "ours"), [1, 2])
    _accepted(await put(case.store, an_append(claimed.fence, some_events(2, 3), stream="taken")))
    _same("events of the new writer", await numbers(case.store, "taken"), [1, 2, 3])


async def promise_2_a_stale_fence_neither_seals_nor_ends_calls(case: Case) -> None:
    await case.open_stream()
    await case.store.claim(StreamId(STREAM))
    end = CallEnd(incarnation=1, request_id=1, state=CallState.ANSWERED)
    _refused(await put(case.store, an_append(case.fence, (), ends=(end,), seal=True)), 0)
    record = await case.store.stream(StreamId(STREAM))
    _same("sealed", record is not None and record.sealed, False)
    _same("the ledger", {call.state for call in await case.store.calls(SESSION)}, {CallState.RUNNING})


async def promise_2_a_stream_that_is_gone_sealed_or_elsewhere_is_not_appended_to(case: Case) -> None:
    _refused(await put(case.store, an_append(case.fence, some_events(1, 1), stream="never opened")), 0)
    await case.open_stream()
    _refused(await put(case.store, an_append(case.fence, some_events(2, 2))), 0)
    _refused(await put(case.store, an_append(case.fence, [*some_events(1, 1), *some_events(3, 3)])), 0)
    _same("events", await numbers(case.store), [])
    _accepted(await put(case.store, an_append(case.fence, some_events(1, 1, final=True), seal=True)))
    _refused(await put(case.store, an_append(case.fence, some_events(2, 2))), 0)
    await put(case.store, DropStream(stream=StreamId(STREAM)))
    _refused(await put(case.store, an_append(case.fence, some_events(2, 2))), 0)
    _same("claiming what is not there", await case.store.claim(StreamId(STREAM)), None)


async def promise_3_what_was_committed_is_there_after_reopening(case: Case) -> None:
    await case.open_stream()
    await case.open_stream("standalone", kind=Kind.STANDALONE)
    await put(case.store, an_append(case.fence, some_events(1, 3)), Trim(stream=StreamId(STREAM), through=1))
    await put(case.store, OpenAsk(record=an_ask()), PutReader(record=a_reader(seq=2)))
    await case.store.claim(StreamId("standalone"))
    await case.store.post(NODE, b"for later")
    before = await picture(case.store)
    if await case.reopen():
        _same("all that is there", await picture(case.store), before)
        _same("mail", list(await case.store.collect(NODE)), [b"for later"])


async def promise_3_closing_writes_what_waits(case: Case) -> None:
    await case.open_stream()
    waiting = [asyncio.create_task(case.store.commit([an_append(case.fence, some_events(n, n))])) for n in range(1, 51)]
    await asyncio.sleep(0)
    if await case.reopen():
        for refusals in await asyncio.gather(*waiting):
            _accepted(refusals)
        _same("events", await numbers(case.store), list(range(1, 51)))
    await asyncio.gather(*waiting)


async def promise_4_events_are_read_once_and_in_order(case: Case) -> None:
    await case.open_stream()
    for first in range(1, 300, 7):
        _accepted(await put(case.store, an_append(case.fence, some_events(first, first + 6))))
    wanted = list(some_events(1, 301))
    for page in (1, 2, 100, 301, 1_000):
        _same(f"events by pages of {page}", await all_events(case.store, page=page), wanted)
    for after in (0, 1, 150, 300, 301, 10_000):
        _same(f"events after {after}", await all_events(case.store, after=after), wanted[after:])
    _same("events of a stream that is not there", list(await case.store.read(StreamId("no"), after=0, limit=9)), [])


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
            _accepted(done)
    for refusals in await asyncio.gather(*waiting):
        _accepted(refusals)
    _same("events", await numbers(case.store), list(range(1, 201)))


async def promise_4_any_payload_and_any_id_comes_back_as_it_was(case: Case) -> None:
    payloads = [b"", b"\x00", b"a\r\nb\n\nc", bytes(range(256)), "ж\u2028😀".encode(), b"x" * (2 << 20)]
    ids: list[int | str] = [8, "8", -1, 0, 2**70, "", "\ud800", "a'b\"c\x00", "😀"]
    calls = tuple(a_call(id_) for id_ in ids)
    await put(case.store, PutSession(record=a_session()), OpenStream(record=a_stream(case.fence), calls=calls))
    events = [Event(seq, 0.25, payload) for seq, payload in enumerate(payloads, 1)]
    _accepted(await put(case.store, an_append(case.fence, events)))
    _same("payloads", [event.payload for event in await all_events(case.store)], payloads)
    _same("request ids", [repr(call.request_id) for call in await case.store.calls(SESSION)], [repr(i) for i in ids])
    end = CallEnd(incarnation=1, request_id="8", state=CallState.CANCELLED)
    await put(case.store, an_append(case.fence, (), ends=(end,)))
    ended = [call.request_id for call in await case.store.calls(SESSION) if call.state is CallState.CANCELLED]
    _same("calls that were ended", ended, ["8"])


async def promise_5_committing_again_changes_nothing(case: Case) -> None:
    end = CallEnd(incarnation=1, request_id=1, state=CallState.ANSWERED)
    history = [
        PutSession(record=a_session()),
        OpenStream(record=a_stream(case.fence), calls=(a_call(1),)),
        OpenStream(record=a_stream(case.fence, "other"), calls=(a_call(2, stream="other"),)),
        an_append(case.fence, some_events(1, 3)),
        Trim(stream=StreamId(STREAM), through=2),
        OpenAsk(record=an_ask("open")),
        OpenAsk(record=an_ask("closed")),
        CloseAsk(session=SESSION, id="closed"),
        PutReader(record=a_reader("first")),
        PutReader(record=a_reader("second", seq=2)),
        LeaveReader(stream=StreamId(STREAM), reader="first"),
        an_append(case.fence, some_events(4, 6, final=True), ends=(end,), seal=True),
    ]
    for step in history:
        _accepted(await put(case.store, step))
    before = await picture(case.store)
    for start in range(len(history)):
        _accepted(await put(case.store, *history[start:]))
        _same(f"all that is there, after repeating from step {start}", await picture(case.store), before)


async def promise_5_of_a_commit_that_is_partly_known_the_rest_is_added(case: Case) -> None:
    await case.open_stream()
    await put(case.store, an_append(case.fence, some_events(1, 3)))
    await put(case.store, Trim(stream=StreamId(STREAM), through=2))
    _accepted(await put(case.store, an_append(case.fence, some_events(1, 5))))
    _same("events", await numbers(case.store), [3, 4, 5])


async def promise_5_a_call_keeps_its_first_end(case: Case) -> None:
    await case.open_stream()
    for state in (CallState.CANCELLED, CallState.ANSWERED):
        end = CallEnd(incarnation=1, request_id=1, state=state)
        unknown = CallEnd(incarnation=7, request_id=1, state=state)
        _accepted(await put(case.store, an_append(case.fence, (), ends=(end, unknown))))
    states = [call.state for call in await case.store.calls(SESSION)]
    _same("states", states, [CallState.CANCELLED, CallState.RUNNING])


async def promise_6_a_claim_begins_a_generation_and_records_the_end_of_the_one_before(case: Case) -> None:
    await case.open_stream()
    await put(case.store, an_append(case.fence, some_events(1, 4)))
    first = await case.store.claim(StreamId(STREAM))
    assert first is not None, "a stream that is there can be claimed"
    _same("the claimed stream", first, replace(a_stream(first.fence), generation=2, last=4))
    _accepted(await put(case.store, an_append(first.fence, some_events(5, 6))))
    await case.reopen()
    second = await case.store.claim(StreamId(STREAM))
    assert second is not None, "a stream that is there can be claimed"
    _same("the generation", second.generation, 3)
    wanted = [Generation(generation=1, end=4), Generation(generation=2, end=6)]
    _same("the ended generations", list(await case.store.generations(StreamId(STREAM))), wanted)


async def promise_6_no_fence_is_given_twice(case: Case) -> None:
    await case.open_stream()
    fences = [case.fence]
    for number in range(3):
        fences.append(await case.store.join(NodeId(f"node-{number}")))
        claimed = await case.store.claim(StreamId(STREAM))
        fences.append(claimed.fence if claimed else case.fence)
        await case.reopen()
    _same("different fences", len(set(fences)), len(fences))


async def promise_7_trimming_leaves_the_answers(case: Case) -> None:
    await case.open_stream()
    answers = some_events(1, 3, final=True) + some_events(4, 6, final=True)
    await put(case.store, an_append(case.fence, answers, seal=True))
    await put(case.store, Trim(stream=StreamId(STREAM), through=5))
    _same("events", await numbers(case.store), [3, 6])
    await put(case.store, Trim(stream=StreamId(STREAM), through=1_000))
    _same("events", await numbers(case.store), [3, 6])
    record = await case.store.stream(StreamId(STREAM))
    _same("the highest number ever", record and record.last, 6)


async def promise_7_dropping_and_ending_take_everything(case: Case) -> None:
    await case.open_stream("dropped")
    await case.open_stream()
    for stream in ("dropped", STREAM):
        await put(case.store, an_append(case.fence, some_events(1, 2, final=True), stream=stream))
        await put(case.store, OpenAsk(record=an_ask(stream, stream=stream)), PutReader(record=a_reader(stream=stream)))
    await put(case.store, DropStream(stream=StreamId("dropped")))
    _same("streams", [stream.id for stream in await case.store.streams(SESSION)], [STREAM])
    _same("asks", [ask.id for ask in await case.store.asks(SESSION)], [STREAM])
    _same("calls", {call.stream for call in await case.store.calls(SESSION)}, {STREAM})
    _same("events of the dropped stream", await numbers(case.store, "dropped"), [])
    await put(case.store, EndSession(session=SESSION, time=9.0))
    ended = a_session(active=9.0, state=SessionState.ENDED)
    wanted = {"sessions": [ended], f"{SESSION}: streams": [], f"{SESSION}: calls": [], f"{SESSION}: asks": []}
    _same("all that is there", await picture(case.store), wanted)
    _same("its reader", await case.store.reader(StreamId(STREAM)), None)


async def promise_7_sweeping_forgets_events_before_answers_and_sessions_last(case: Case) -> None:
    await case.open_stream()
    await put(case.store, PutSession(record=a_session(active=30.0)))
    await put(case.store, an_append(case.fence, some_events(1, 2, time=10.0)))
    await put(case.store, an_append(case.fence, some_events(3, 4, time=20.0, final=True), seal=True))
    _same("rows swept too early", await case.store.sweep(Cutoffs(events=10.0, answers=0.0)), 0)
    assert await case.store.sweep(Cutoffs(events=20.0, answers=10.0)), "events have expired"
    _same("events", await numbers(case.store), [3, 4])
    assert await case.store.sweep(Cutoffs(events=25.0, answers=20.0)), "an event has expired"
    _same("events", await numbers(case.store), [4])
    assert await case.store.sweep(Cutoffs(events=25.0, answers=25.0)), "the answer has expired"
    _same("streams", list(await case.store.streams(SESSION)), [])
    _same("sessions", [session.id for session in await all_sessions(case.store)], [SESSION])
    assert await case.store.sweep(Cutoffs(events=40.0, answers=40.0)), "the session has expired"
    _same("sessions", await all_sessions(case.store), [])


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
    _same("the neighbour", await picture(case.store, sessions=["young"]), young)
    _same("streams of the expired session", len(await case.store.streams(a_session("old").id)), 0)
    _same("asks of the expired session", len(await case.store.asks(a_session("old").id)), 0)


async def promise_8_reading_tells_the_truth_whether_or_not_somebody_listens(case: Case) -> None:
    await case.open_stream()
    told: list[StreamId] = []
    stop = case.store.subscribe(told.append)
    await put(case.store, an_append(case.fence, some_events(1, 1)))
    _same("events while listening", await numbers(case.store), [1])
    stop()
    stop()
    await put(case.store, an_append(case.fence, some_events(2, 2)))
    _same("events without", await numbers(case.store), [1, 2])
    _same("streams told of that did not grow", set(told) - {STREAM}, set())


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
    _same("mail", list(await case.store.collect(NODE)), [b"0", b"1", b"2", b"3", b"4"])
    _same("mail collected before", list(await case.store.collect(NODE)), [])
    _same("the other's mail", list(await case.store.collect(other)), [b"theirs"])


async def sessions_are_listed_by_id_a_page_at_a_time(case: Case) -> None:
    ids = [f"s{number:02d}" for number in range(25)]
    await put(case.store, *(PutSession(record=a_session(id_)) for id_ in reversed(ids)))
    _same("a page", [session.id for session in await case.store.sessions(after=None, limit=3)], ids[:3])
    _same("all pages", [session.id for session in await all_sessions(case.store, page=4)], ids)
    changed = replace(a_session("s07"), incarnation=5, sticky=(), owner="\ud83d somebody else", active=3.5)
    await put(case.store, PutSession(record=changed))
    _same("a record that was written over", await case.store.session(changed.id), changed)


async def the_newest_reader_stays_when_an_older_one_leaves(case: Case) -> None:
    await case.open_stream()
    await put(case.store, PutReader(record=a_reader("old")), PutReader(record=a_reader("new", seq=3)))
    await put(case.store, LeaveReader(stream=StreamId(STREAM), reader="old"))
    _same("the reader", await case.store.reader(StreamId(STREAM)), a_reader("new", seq=3))
    await put(case.store, LeaveReader(stream=StreamId(STREAM), reader="new"))
    _same("the reader", await case.store.reader(StreamId(STREAM)), None)
    await put(case.store, PutReader(record=a_reader(stream="not there")), OpenAsk(record=an_ask(stream="not there")))
    _same("the reader of no stream", await case.store.reader(StreamId("not there")), None)
    _same("asks of no stream", list(await case.store.asks(SESSION)), [])


CHECKS: tuple[Check, ...] = (
    promise_1_what_one_commit_carries_is_seen_together,
    promise_1_answer_seal_and_ends_of_calls_are_one_step,
    promise_2_a_stale_fence_is_refused_and_its_neighbours_are_not,
    promise_2_a_stale_fence_neither_seals_nor_ends_calls,
    promise_2_a_stream_that_is_gone_sealed_or_elsewhere_is_not_appended_to,
    promise_3_what_was_committed_is_there_after_reopening,
    promise_3_closing_writes_what_waits,
    promise_4_events_are_read_once_and_in_order,
    promise_4_commits_are_made_in_the_order_they_were_asked_for,
    promise_4_any_payload_and_any_id_comes_back_as_it_was,
    promise_5_committing_again_changes_nothing,
    promise_5_of_a_commit_that_is_partly_known_the_rest_is_added,
    promise_5_a_call_keeps_its_first_end,
    promise_6_a_claim_begins_a_generation_and_records_the_end_of_the_one_before,
    promise_6_no_fence_is_given_twice,
    promise_7_trimming_leaves_the_answers,
    promise_7_dropping_and_ending_take_everything,
    promise_7_sweeping_forgets_events_before_answers_and_sessions_last,
    promise_7_sweeping_a_session_takes_all_of_it_and_nothing_of_its_neighbour,
    promise_8_reading_tells_the_truth_whether_or_not_somebody_listens,
    promise_9_a_closed_store_fails_by_name_or_not_at_all,
    mail_is_collected_once_and_in_order,
    sessions_are_listed_by_id_a_page_at_a_time,
    the_newest_reader_stays_when_an_older_one_leaves,
)
