"""Promises 7, 9 and 17 to 20: what is kept and forgotten, failures, clocks, time limits, how far readers have got."""

import asyncio
import contextlib
from dataclasses import replace
from typing import cast

from perdure._core.ids import Kind, NodeId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import SessionState
from perdure.errors import StoreError, StoreUnavailable
from perdure.store import base
from perdure.store.time_limit import CALLS, within_time
from perdure.testing._case import Case, StreamCase, same
from perdure.testing._values import (
    NODE,
    SESSION,
    STREAM,
    a_call,
    a_reader,
    a_session,
    a_stream,
    an_append,
    an_ask,
    an_end,
    an_ended_session,
    some_events,
)

_SHORT = 0.1
"""Seconds that a store has which does not keep its time by itself."""


class ForgettingChecks(StreamCase):
    """Promise 7, and what is known of streams that are over or unread."""

    async def promise_7_trimming_leaves_the_answers(self) -> None:
        answers = some_events(1, 3, final=True) + some_events(4, 6, final=True)
        await self.put(an_append(self.fence, answers, seal=True))
        for through in (5, 1_000):
            await self.put(base.Trim(stream=STREAM, through=through))
            same("events", await self.numbers(), [3, 6])
        same("the highest number ever", (await self.record()).last, 6)

    async def promise_7_dropping_and_ending_take_everything(self) -> None:
        await self.open_stream("dropped")
        for stream in ("dropped", STREAM):
            await self.put(self.append(1, 2, final=True, stream=stream))
            await self.put(base.OpenAsk(record=an_ask(stream, stream=stream)))
            await self.put(base.PutReader(record=a_reader(stream=stream)))
        await self.put(base.DropStream(stream=StreamId("dropped")))
        same("streams", [stream.id for stream in await self.store.streams(SESSION)], [STREAM])
        same("asks", [ask.id for ask in await self.store.asks(SESSION)], [STREAM])
        same("calls", {call.stream for call in await self.store.calls(SESSION)}, {STREAM})
        same("events of the dropped stream", await self.numbers("dropped"), [])
        await self.put(base.EndSession(session=SESSION, time=9.0, reason="why"))
        ended = an_ended_session(active=9.0, ended="why")
        lists = ("streams", "calls", "asks", "kept", "unread")
        nothing: dict[str, object] = {f"{SESSION}: {what}": [] for what in lists}
        nothing[f"{SESSION}: chain"] = None
        same("all that is there", await self.picture(), {"sessions": [ended]} | nothing)
        same("its reader", await self.store.reader(STREAM), None)

    async def promise_7_sweeping_forgets_events_before_answers_and_sessions_last(self) -> None:
        await self.put(base.ChangeSession(session=SESSION, active=30.0))
        await self.put(self.append(1, 2, time=10.0))
        await self.put(self.append(3, 4, time=20.0, final=True, seal=True))
        same("rows swept too early", await self.store.sweep(Cutoffs(events=10.0, answers=0.0)), 0)
        assert await self.store.sweep(Cutoffs(events=20.0, answers=10.0)), "events have expired"
        same("events", await self.numbers(), [3, 4])
        assert await self.store.sweep(Cutoffs(events=25.0, answers=20.0)), "an event has expired"
        same("events", await self.numbers(), [4])
        assert await self.store.sweep(Cutoffs(events=25.0, answers=25.0)), "the answer has expired"
        same("streams", list(await self.store.streams(SESSION)), [])
        same("sessions", [session.id for session in await self.sessions()], [SESSION])
        assert await self.store.sweep(Cutoffs(events=40.0, answers=40.0)), "the session has expired"
        same("sessions", await self.sessions(), [])

    async def calls_whose_reader_was_lost_are_known_until_they_are_read(self) -> None:
        for name in ("z", "read", "a"):
            await self.open_stream(name)
            await self.put(self.append(1, 3, stream=name))
            await self.put(base.Reached(stream=StreamId(name), generation=1, through=2, unread=True))
        await self.put(base.Reached(stream=StreamId("read"), generation=1, through=3))
        seen = [(stream.id, stream.delivered) for stream in await self.store.unread(SESSION)]
        same("the unread streams and how far they were read", seen, [("z", 2), ("a", 2)])
        z = StreamId("z")
        await self.put(base.DropStream(stream=z), base.Reached(stream=z, generation=1, through=1))
        same("the unread streams", [stream.id for stream in await self.store.unread(SESSION)], ["a"])

    async def what_is_retained_of_sealed_streams_is_known_in_numbers(self) -> None:
        for name in ("z", "running", "a"):
            await self.open_stream(name)
            answers = some_events(1, 3, final=True) + some_events(4, 5, final=True)
            await self.put(an_append(self.fence, answers, stream=name, seal=name != "running"))
        await self.put(base.Trim(stream=StreamId("a"), through=2))
        wanted = [
            base.KeptRecord(stream=StreamId("z"), opened=0.0, events=3, answers=2, event_bytes=21, answer_bytes=14),
            base.KeptRecord(stream=StreamId("a"), opened=0.0, events=1, answers=2, event_bytes=7, answer_bytes=14),
        ]
        same("what is kept", list(await self.store.kept(SESSION)), wanted)

    async def probing_leaves_nothing_behind(self) -> None:
        before = await self.picture()
        for size in (0, 1, 100_000):
            await self.store.probe(size)
        same("all that is there", await self.picture(), before)
        same("mail", await self.messages(), [])
        same("rows to sweep", await self.store.sweep(Cutoffs(events=0.0, answers=0.0)), 0)


class UseChecks(Case):
    """Promises 7, 17 and 18: sessions in use, and the clock by which the others expire."""

    async def promise_7_sweeping_a_session_takes_all_of_it_and_nothing_of_its_neighbour(self) -> None:
        for name, active in (("old", 1.0), ("young", 9.0)):
            record = a_stream(self.fence, name, session=name, node=NodeId("buried"))
            await self.put(
                base.PutSession(record=a_session(name, active=active)),
                base.OpenStream(record=record, calls=(a_call(stream=name, session=name),)),
                base.OpenStream(record=replace(record, id=StreamId(f"{name}-standalone"), kind=Kind.STANDALONE)),
                self.append(1, 5, time=active, stream=name),
                base.OpenAsk(record=an_ask(stream=name, session=name)),
            )
        young = await self.picture("young")
        await self.store.sweep(Cutoffs(events=5.0, answers=5.0))
        young["sessions"] = [a_session("young", active=9.0)]
        same("the neighbour", await self.picture("young"), young)
        same("streams of the expired session", len(await self.store.streams(a_session("old").id)), 0)
        same("asks of the expired session", len(await self.store.asks(a_session("old").id)), 0)

    async def promise_17_no_time_ends_a_session_that_a_node_uses(self) -> None:
        """Its home, a call that runs, a reader: each of them keeps it, however old its last activity is."""
        end = base.EndSession(session=SESSION, time=9.0, reason="why", unused_since=5.0)
        home = a_stream(self.fence, "home", kind=Kind.STANDALONE)
        dormant = a_session(active=5.0, state=SessionState.DORMANT)
        await self.put(base.PutSession(record=dormant), base.OpenStream(record=home))
        await self._is_left_alone(end, "a session with a home")
        await self.put(base.Release(stream=home.id, fence=self.fence))
        await self.put(base.OpenStream(record=a_stream(self.fence), calls=(a_call(),)))
        await self._is_left_alone(end, "a session with a running call")
        await self.put(self.append(1, time=90.0, final=True, ends=(an_end(),), seal=True))
        await self.put(base.PutReader(record=a_reader(stream="home")))
        await self._is_left_alone(end, "a session with a reader")
        await self.put(base.LeaveReader(stream=home.id, reader="reader-1"))
        same("of those that may go", await self.store.longest_dormant(), dormant)
        await self.put(replace(end, unused_since=4.9))
        same("a session used since", len(await self.sessions()), 1)
        await self.put(end)
        same("its end", [session.ended for session in await self.sessions()], ["why"])

    async def promise_17_what_is_not_used_may_be_swept(self) -> None:
        """A node that is buried uses nothing, whatever it left behind."""
        node = NodeId("another")
        fence = await self.store.join(node)
        record = a_stream(fence, "home", kind=Kind.STANDALONE, node=node)
        await self.put(base.PutSession(record=a_session(active=5.0)), base.OpenStream(record=record))
        await self.store.sweep(Cutoffs(events=80.0, answers=80.0))
        same("sessions of a node that is there", len(await self.sessions()), 1)
        await self.store.bury(node, heir=NODE)
        await self.store.sweep(Cutoffs(events=80.0, answers=80.0))
        same("sessions of a node that is buried", await self.sessions(), [])

    async def _is_left_alone(self, end: base.EndSession, what: str) -> None:
        await self.put(end)
        await self.store.sweep(Cutoffs(events=80.0, answers=80.0))
        same(f"{what}: its state", [session.ended for session in await self.sessions()], [""])
        same(f"{what}: the longest dormant of those that may go", await self.store.longest_dormant(), None)

    async def promise_18_all_nodes_are_told_the_same_time(self) -> None:
        before = self.store.clock()
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(NodeId("another"))
            between = elsewhere.clock()
            after = self.store.clock()
        # The clock of processes, and of machines, may be a little off; what is kept is kept for minutes at least.
        assert before - 1 <= between <= after + 1, f"{before}, {between}, {after}"
        assert before <= after, f"the clock went back from {before} to {after}"


class _Hanging:
    """A store that never answers, in front of one that would."""

    keeps_time = False

    def __init__(self, store: base.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return (lambda *_, **__: asyncio.Event().wait()) if name in CALLS else getattr(self._store, name)


class ReadingChecks(StreamCase):
    """Promises 9, 19 and 20: failures, time limits, readers."""

    async def promise_9_a_closed_store_fails_by_name_or_not_at_all(self) -> None:
        await self.store.aclose()
        await self.store.aclose()
        step = self.append(1)
        for attempt in (
            lambda: self.store.commit([step]),
            lambda: self.store.read(STREAM, after=0, limit=1),
            lambda: self.store.claim(STREAM, node=NODE, held=self.fence),
            lambda: self.store.sweep(Cutoffs(events=0.0, answers=0.0)),
        ):
            with contextlib.suppress(StoreError):
                await attempt()
        with contextlib.suppress(StoreError):
            self.store.commit_now([step])

    async def promise_20_a_call_that_hangs_fails_by_name_within_its_time(self) -> None:
        """A store that keeps its time does so while its backend hangs; any other one behind `within_time`."""
        hang = self.hang
        if hang is None and self.store.keeps_time:
            raise AssertionError("the store says that it keeps its time; give `check_store` a `hang` to show it with")
        store = within_time(self.store if hang else cast("base.Store", _Hanging(self.store)), _SHORT)
        step = self.append(1)
        with hang() if hang else contextlib.nullcontext():
            calls = (
                store.commit([step]),
                store.claim(StreamId("no"), node=NODE, held=self.fence),
                store.read(STREAM, after=0, limit=1),
            )
            try:
                async with asyncio.timeout(self.patience):
                    answers = await asyncio.gather(*calls, return_exceptions=True)
            except TimeoutError:
                raise AssertionError(f"a call neither answered nor failed within {self.patience} seconds") from None
        same("what a commit raises while the store hangs", type(answers[0]), StoreUnavailable)
        failures = {type(answer) for answer in answers if isinstance(answer, BaseException)}
        same("failures of all calls while it hangs", failures, {StoreUnavailable})
        await self.accept(step)  # it may have been written when the store went on (5)
        same("events, when it goes on", await self.numbers(), [1])

    async def the_newest_reader_stays_when_an_older_one_leaves(self) -> None:
        await self.put(base.PutReader(record=a_reader("old")), base.PutReader(record=a_reader("new", seq=3)))
        await self.put(base.MoveReader(stream=STREAM, reader="old", seq=9))
        await self.put(base.LeaveReader(stream=STREAM, reader="old"))
        same("the reader", await self.store.reader(STREAM), a_reader("new", seq=3))
        await self.put(base.MoveReader(stream=STREAM, reader="new", seq=5))
        same("the reader that has got further", await self.store.reader(STREAM), a_reader("new", seq=5))
        await self.put(base.LeaveReader(stream=STREAM, reader="new"))
        same("the reader", await self.store.reader(STREAM), None)
        await self.put(base.PutReader(record=a_reader(stream="not there")))
        await self.put(base.OpenAsk(record=an_ask(stream="not there")))
        same("the reader of no stream", await self.store.reader(StreamId("not there")), None)
        same("asks of no stream", list(await self.store.asks(SESSION)), [])

    async def promise_19_how_far_readers_have_got_only_moves_forward(self) -> None:
        """Whichever node tells it, and in whatever order: a reader from further back takes nothing away."""
        await self.put(self.append(1, 5))
        for through, reached in ((2, 2), (1, 2), (4, 4), (9, 5)):
            await self.put(base.Reached(stream=STREAM, generation=1, through=through))
            same(f"how far readers have got, told {through}", (await self.record()).delivered, reached)
        await self.put(base.Reached(stream=StreamId("not there"), generation=1, through=1))
        same("the stream that is not there", await base.stream_by_id(self.store, StreamId("not there")), None)

    async def promise_19_an_event_in_the_place_of_a_lost_one_is_unread(self) -> None:
        """A reader was shown 5, of which the store got 3; another writer gave the numbers 4 and 5 to other events."""
        await self.put(self.append(1, 3))
        claimed = await self.claim()
        await self.put(self.append(4, 6, fence=claimed.fence))
        for what, generation, reached in (("the lost ones", 1, 3), ("what never was", 7, 3), ("the new ones", 2, 5)):
            await self.put(base.Reached(stream=STREAM, generation=generation, through=5))
            same(f"how far readers have got, told of {what}", (await self.record()).delivered, reached)
