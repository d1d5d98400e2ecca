"""The contract: one small story for each thing promised. The names of the stories have the number of the promise."""

import asyncio
import contextlib
import itertools
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

from perdure._core import sticky
from perdure._core.ids import Generation, Kind, NodeId, RecordKind, SessionId, StreamId
from perdure._core.limits import Caller
from perdure._core.retention import MAX_ENDED_OF_CALLER, MAX_ENDED_PARAMS, Cutoffs
from perdure._core.states import CallState, ClaimState, SessionState, SessionStep, ToolStepState
from perdure._core.tool_steps import ToolStepKind
from perdure.errors import (
    Behind,
    IdTaken,
    MailFull,
    NodeGone,
    SessionEnded,
    StaleRecord,
    StoreError,
    StoreUnavailable,
    TooManyCalls,
    TooManySessions,
)
from perdure.store.interface import Inspect, Liveness, Store, open_call, reader_of, stream_by_id, streams_by_id
from perdure.store.notes import probe
from perdure.store.records import (
    FORWARDED_AT_ONCE,
    MAIL_AT_ONCE,
    MAX_FORWARDED,
    MAX_FORWARDED_BYTES,
    MAX_MAIL,
    READ_BYTES,
    AnsweredPage,
    CallSnapshot,
    Event,
    Loaded,
    Mail,
    OpenCall,
    Outline,
    SessionRecord,
    ToolStepRecord,
    UsageRecord,
)
from perdure.store.steps import (
    CallEnd,
    ChangeSession,
    CloseAsk,
    DropStream,
    EndSession,
    Forward,
    LeaveReader,
    MailReceived,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
    PutToolStep,
    Reached,
    Refusals,
    Release,
    SendMail,
    SessionLimits,
    Step,
    StepRejected,
    Trim,
)
from perdure.testing._case import Case, SessionCase, StreamCase, accepted, behind, refused, same, too_many
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    STREAM,
    a_call,
    a_durable_call,
    a_put_call,
    a_put_tool_step,
    a_reader,
    a_session,
    a_sticky,
    a_stream,
    a_tool_step,
    all_events,
    an_append,
    an_ask,
    an_end,
    an_ended_session,
    count_open,
    dead_nodes,
    existing,
    messages,
    numbers,
    put,
    some_events,
)


class ToolStepChecks(StreamCase):
    """Promise 23: the steps of tools."""

    async def _steps(self, stream: str = STREAM) -> list[ToolStepRecord]:
        return list(await self.store.tool_steps(StreamId(stream)))

    async def promise_23_steps_come_back_as_they_were_put_in_their_order(self) -> None:
        sleep = a_tool_step(3, kind=ToolStepKind.SLEEP, again=True, own=False, value=b"", attempt=7, ended=2.25)
        failed = replace(a_tool_step(2, name="odd \ud800\x00 name", value=b"x" * (1 << 20)), state=ToolStepState.FAILED)
        of_other = a_tool_step(1, request_id="one", kind=ToolStepKind.ASK, value=b"{}")
        wanted = [of_other, a_tool_step(1), failed, sleep]
        for record in (sleep, wanted[1], failed, of_other):
            await self.accept(PutToolStep(fence=self.fence, record=record))
        same("tool steps", await self._steps(), wanted)
        without = [replace(record, value=b"") for record in wanted]
        same("without their values", list(await self.store.tool_steps(STREAM, values=False)), without)
        same("those of a stream that does not exist", await self._steps("no"), [])
        if await self.reopen():
            same("after reopening", await self._steps(), wanted)

    async def promise_23_a_writer_that_lost_its_claim_puts_no_step(self) -> None:
        await self.accept(a_put_tool_step(self.fence))
        claimed = await self.claim()
        refused(await self.put(a_put_tool_step(self.fence, 2), a_put_tool_step(self.fence, value=b"1")), 0, 1)
        same("tool steps", await self._steps(), [a_tool_step()])
        await self.accept(a_put_tool_step(claimed.fence, value=b"2", attempt=2))
        await self.accept(Release(stream=STREAM, fence=claimed.fence))
        refused(await self.put(a_put_tool_step(claimed.fence, 2)), 0)
        refused(await self.put(a_put_tool_step(self.fence, stream=StreamId("no"))), 0)
        same("tool steps", await self._steps(), [a_tool_step(value=b"2", attempt=2)])

    async def promise_23_an_ended_step_keeps_its_first_end(self) -> None:
        open_, ended = a_put_tool_step(self.fence), a_put_tool_step(self.fence, value=b'"first"')
        for steps in ((open_,), (ended,), (ended,), (open_,), (open_, ended)):
            await self.accept(*steps)
        await self.accept(a_put_tool_step(self.fence, value=b'"second"', attempt=2))
        failed = replace(ended.record, state=ToolStepState.FAILED, value=b"{}")
        await self.accept(replace(ended, record=failed))
        same("tool steps", await self._steps(), [ended.record])

    async def promise_23_a_step_is_refused_if_the_one_before_it_was_lost(self) -> None:
        """A commit may be repeated after the end of the step that it names."""
        begun, ended = a_put_tool_step(self.fence), a_put_tool_step(self.fence, after=1, value=b"1")
        behind = [
            a_put_tool_step(self.fence, 2, after=1, after_ended=True),
            a_put_tool_step(self.fence, 2, after=2),
            a_put_tool_step(self.fence, 2, after=1, request_id="one"),
        ]
        await self.accept(begun)
        for step in behind:
            refused(await self.put(step), 0, why=Behind)
        same("tool steps", await self._steps(), [a_tool_step()])
        await self.accept(ended, ended, begun)
        await self.accept(ended, a_put_tool_step(self.fence, 2, after=1, after_ended=True))
        same("tool steps", await self._steps(), [ended.record, a_tool_step(2)])
        await self.accept(self.append(1, final=True, ends=(an_end(),)))
        await self.accept(a_put_tool_step(self.fence, 3, after=2))
        await self.accept(self.append(2, final=True, ends=(an_end("one"),), seal=True))
        refused(await self.put(a_put_tool_step(self.fence, 3, after=9)), 0)

    async def promise_23_the_end_of_a_call_empties_the_values_of_its_own_steps(self) -> None:
        """And none is put afterwards."""
        other = a_tool_step(request_id="one", value=b"[2]")
        await self.accept(a_put_tool_step(self.fence, value=b"[1]"), a_put_tool_step(self.fence, 2))
        await self.accept(PutToolStep(fence=self.fence, record=other))
        answer = self.append(1, final=True, ends=(replace(an_end(), stepped=True),))
        await self.accept(answer)
        await self.accept(answer, a_put_tool_step(self.fence, 2, value=b"late"), a_put_tool_step(self.fence, 3))
        same("tool steps", await self._steps(), [other, a_tool_step(value=b""), a_tool_step(2)])
        await self.accept(self.append(2, final=True, ends=(an_end("one"),), seal=True))
        same("those of a call that ended otherwise", (await self._steps())[0], other)
        refused(await self.put(a_put_tool_step(self.fence, 4)), 0)

    async def promise_23_steps_are_deleted_with_their_stream(self) -> None:
        await self.open_stream("other")
        theirs = a_put_tool_step(self.fence, stream=StreamId("other"), request_id="other 1", value=b"1")
        await self.accept(a_put_tool_step(self.fence, value=b"1"), theirs)
        await self.accept(DropStream(stream=STREAM))
        same("tool steps", ([], 1), (await self._steps(), len(await self._steps("other"))))
        await self.accept(EndSession(session=SESSION, time=1.0, reason="deleted"))
        same("tool steps of an ended session", await self._steps("other"), [])
        await self.accept(PutSession(record=a_session("next")))
        await self.accept(OpenStream(record=a_stream(self.fence, session="next"), calls=(a_call(session="next"),)))
        same("those of a new stream of that name", await self._steps(), [])

    async def promise_23_a_group_is_large_and_whole(self) -> None:
        """A call may do a thousand steps, and their values may be too many to be emptied at once."""
        steps = [a_put_tool_step(self.fence, number, value=b"x" * 3_000) for number in range(1, 1_001)]
        accepted(await self.store.commit(steps))
        same("tool steps", [record.number for record in await self._steps()], list(range(1, 1_001)))
        await self.accept(self.append(1, final=True, ends=(replace(an_end(), stepped=True),)))
        same("their values", {record.value for record in await self._steps()}, {b""})


class LogChecks(StreamCase):
    """Promises 1 and 3 to 5: a stream returns what was appended to it."""

    async def promise_1_what_one_commit_carries_is_seen_together(self) -> None:
        await self.open_stream("left", "right")

        async def write() -> None:
            for seq in range(1, 61):
                accepted(await self.store.commit([self.append(seq, stream=name) for name in ("left", "right")]))
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        while not writing.done():
            await asyncio.sleep(0)
            for one, other in (("left", "right"), ("right", "left")):
                earlier, later = len(await numbers(self.store, one)), len(await numbers(self.store, other))
                assert later >= earlier, f"{one} had {earlier} events while {other} had {later} of the same commits"
        await writing

    async def promise_1_answer_seal_and_ends_of_calls_are_one_step(self) -> None:
        ends = tuple(an_end(id_) for id_ in (1, "one"))
        await self.accept(self.append(1, 2, final=True, ends=ends, seal=True))
        same("the stream", await self.record(), replace(a_stream(self.fence), last=2, sealed=True))
        calls = [(call.request_id, call.state) for call in await self.store.calls(SESSION)]
        same("the ledger", calls, [(1, CallState.ANSWERED), ("one", CallState.ANSWERED)])

    async def promise_3_what_was_committed_exists_after_reopening(self) -> None:
        await self.open_stream("standalone", kind=Kind.STANDALONE)
        await self.put(self.append(1, 3), Trim(stream=STREAM, through=1))
        await self.put(OpenAsk(record=an_ask()), PutReader(record=a_reader(seq=2)))
        await self.claim("standalone")
        await self.put(SendMail(node=NODE, message=b"for later"))
        before = await self.picture()
        if await self.reopen():
            same("the whole store", await self.picture(), before)
            same("mail", await messages(self.store), [b"for later"])

    async def promise_3_closing_writes_what_waits(self) -> None:
        waiting = [asyncio.create_task(self.store.commit([self.append(n)])) for n in range(1, 51)]
        await asyncio.sleep(0)
        if await self.reopen():
            for refusals in await asyncio.gather(*waiting):
                accepted(refusals)
            same("events", await numbers(self.store), list(range(1, 51)))
        await asyncio.gather(*waiting)

    async def promise_4_events_are_read_once_and_in_order(self) -> None:
        for first in range(1, 100, 7):
            await self.accept(self.append(first, first + 6))
        wanted = list(some_events(1, 105))
        for page in (1, 2, 50, 105, 1_000):
            same(f"events by pages of {page}", await all_events(self.store, page=page), wanted)
        for after in (0, 1, 50, 104, 105, 10_000):
            same(f"events after {after}", await all_events(self.store, after=after), wanted[after:])
        same("events of no stream", list(await self.store.read(StreamId("no"), after=0, limit=9)), [])

    async def promise_4_streams_that_are_followed_show_what_reading_them_shows(self) -> None:
        """Their events and the revision of their session may be left out. The others are as `read` returns them."""
        await self.open_stream("a", "b", "quiet")
        await self.accept(self.append(1, 9, stream="a"), self.append(1, 4, stream="b"))
        await self.accept(Trim(stream=StreamId("a"), through=2))
        await self.accept(self.append(5, 5, stream="b", final=True, seal=True))
        after = {StreamId("a"): 0, StreamId("b"): 3, StreamId("quiet"): 0, StreamId("not there"): 0}
        followed = await self.store.follow(after, limit=5)
        grown = {StreamId(name): await self.record(name) for name in ("a", "b", "quiet")}
        same("the streams", {name: seen.record for name, seen in followed.items()}, grown)
        same("the same without their events", await streams_by_id(self.store, after), grown)
        record = await self.store.session(SESSION)
        for name, seen in followed.items():
            read = list(await self.store.read(name, after=after[name], limit=5))
            if seen.events is not None:
                same(f"the events of {name}", list(seen.events), read)
            same(f"the revision beside {name}", seen.revision in (None, record and record.revision), True)
        for limit in (0, 5):
            same("streams of no names", dict(await self.store.follow({}, limit=limit)), {})

    async def promise_4_one_answer_is_bounded_in_bytes_and_the_rest_follows(self) -> None:
        quarter = READ_BYTES // 4
        sizes = [quarter] * 4 + [quarter - 1] * 5 + [2 * READ_BYTES] * 2 + [1]
        events = [Event(seq, 0.0, b"x" * size) for seq, size in enumerate(sizes, 1)]
        accepted(await self.store.commit([an_append(self.fence, events)]))
        answers: list[int] = []
        while answer := await self.store.read(STREAM, after=sum(answers), limit=100):
            answers.append(len(answer))
        same("events in each answer", answers, [4, 5, 1, 1, 1])
        same("events", await all_events(self.store), events)

    async def promise_4_commits_are_made_in_the_order_they_were_asked_for(self) -> None:
        """Patient commits that are under way, and commits at once between them: a wrong order would leave a hole."""
        waiting: list[asyncio.Task[Refusals]] = []
        for seq in range(1, 201):
            step = self.append(seq)
            done = self.store.commit_now([step]) if seq % 3 else None
            if done is None:
                waiting.append(asyncio.create_task(self.store.commit([step])))
                await asyncio.sleep(0)
            else:
                accepted(done)
        for refusals in await asyncio.gather(*waiting):
            accepted(refusals)
        same("events", await numbers(self.store), list(range(1, 201)))

    async def promise_5_of_a_commit_that_is_partly_known_the_rest_is_added(self) -> None:
        await self.put(self.append(1, 3))
        await self.put(Trim(stream=STREAM, through=2))
        await self.accept(self.append(1, 5))
        same("events", await numbers(self.store), [3, 4, 5])

    async def promise_5_a_call_keeps_its_first_end(self) -> None:
        for state in (CallState.CANCELLED, CallState.ANSWERED):
            unknown = CallEnd(incarnation=7, request_id=1, state=state)
            await self.accept(self.append(ends=(an_end(1, state), unknown)))
        states = [call.state for call in await self.store.calls(SESSION)]
        same("states", states, [CallState.CANCELLED, CallState.RUNNING])


class HistoryChecks(Case):
    """Promises 4 and 5 for a session from its beginning."""

    async def promise_4_any_payload_and_any_id_comes_back_as_it_was(self) -> None:
        payloads = [b"", b"\x00", b"a\r\nb\n\nc", bytes(range(256)), "ж\u2028😀".encode(), b"x" * (2 << 20)]
        ids: list[int | str] = [8, "9", -1, 0, 2**70, "", "\ud800", "a'b\"c\x00", "😀"]
        calls = tuple(a_call(id_) for id_ in ids)
        await self.put(PutSession(record=a_session()), OpenStream(record=a_stream(self.fence), calls=calls))
        events = [Event(seq, 0.25, payload) for seq, payload in enumerate(payloads, 1)]
        await self.accept(an_append(self.fence, events))
        same("payloads", [event.payload for event in await all_events(self.store)], payloads)
        same("request ids", [repr(call.request_id) for call in await self.store.calls(SESSION)], [repr(i) for i in ids])
        same("calls of the stream", list(await self.store.calls(SESSION, stream=STREAM)), list(calls))
        await self.put(self.append(ends=(an_end("9", CallState.CANCELLED),)))
        ended = [call.request_id for call in await self.store.calls(SESSION) if call.state is CallState.CANCELLED]
        same("calls that were ended", ended, ["9"])

    async def promise_5_committing_again_changes_nothing(self) -> None:
        history: list[Step] = [
            PutSession(record=a_session()),
            OpenStream(record=a_stream(self.fence), calls=(a_call(1),)),
            OpenStream(record=a_stream(self.fence, "other"), calls=(a_call(2, stream="other"),)),
            self.append(1, 3),
            Trim(stream=STREAM, through=2),
            OpenAsk(record=an_ask("open")),
            OpenAsk(record=an_ask("closed")),
            CloseAsk(session=SESSION, id="closed"),
            PutReader(record=a_reader("first")),
            PutReader(record=a_reader("second", seq=2)),
            LeaveReader(stream=STREAM, reader="first"),
            Reached(stream=STREAM, generation=1, through=2, unread=True),
            Reached(stream=STREAM, generation=1, through=3),
            replace(self.append(4, 4, final=True), answered=4),
            self.append(5, 6, final=True, ends=(an_end(),), seal=True),
        ]
        await self._repeat(history, self.accept)
        before = await self.picture()
        await self.accept(history[1])
        same("the whole store, after opening again a stream that is open", await self.picture(), before)

    async def promise_5_repeated_changes_to_sessions_calls_and_writers_change_nothing(self) -> None:
        """Some are refused the second time, because the stream is not theirs any more; that changes nothing either."""
        put_call = a_put_call(self.fence)
        history: list[Step] = [
            PutSession(record=a_session(state=SessionState.OPENING)),
            ChangeSession(session=SESSION, state=SessionState.ACTIVE, version="2025-06-18", active=2.0),
            ChangeSession(session=SESSION, result=b"{}"),
            ChangeSession(session=SESSION, stick=a_sticky("resources/subscribe", uri="a://1")),
            ChangeSession(session=SESSION, stick=a_sticky("logging/setLevel", level="debug")),
            OpenStream(record=a_stream(self.fence), calls=(a_call(1),)),
            put_call,
            replace(put_call, state=CallState.RUNNING, attempt=2, progress=3.0),
            ChangeSession(session=SESSION, state=SessionState.DORMANT, active=1.0),
            Release(stream=STREAM, fence=self.fence),
            MailReceived(node=NODE, through=1_000),
        ]
        await self._repeat(history, self.put)

    async def _repeat(self, history: list[Step], commit: Callable[..., Awaitable[object]]) -> None:
        for step in history:
            await self.accept(step)
        before = await self.picture()
        for start in range(len(history)):
            await commit(*history[start:])
            same(f"the whole store, after repeating from step {start}", await self.picture(), before)


class WriterChecks(StreamCase):
    """Promises 2 and 6: one node at a time writes a stream."""

    async def promise_2_a_stale_fence_is_refused_and_its_neighbours_are_not(self) -> None:
        await self.open_stream("taken", "ours")
        await self.put(self.append(1, stream="taken"))
        claimed = await self.claim("taken")
        refused(await self.put(self.append(2, stream="taken"), self.append(1, 2, stream="ours")), 0)
        refused(await self.put(self.append(stream="taken", ends=(an_end("taken 1"),), seal=True)), 0)
        same("whether the stream that was taken is sealed", (await self.record("taken")).sealed, False)
        same("its events", await numbers(self.store, "taken"), [1])
        same("the ledger", {call.state for call in await self.store.calls(SESSION)}, {CallState.RUNNING})
        same("events of its neighbour", await numbers(self.store, "ours"), [1, 2])
        await self.accept(self.append(2, 3, fence=claimed.fence, stream="taken"))
        same("events of the new writer", await numbers(self.store, "taken"), [1, 2, 3])

    async def promise_2_a_stream_that_is_gone_sealed_or_elsewhere_is_not_appended_to(self) -> None:
        behind(await self.put(self.append(1, stream="never opened")), 0)
        await self.accept(self.append(1, final=True, seal=True))
        for lost in (False, True):
            for events in ((2, 2), (4, 4)):
                refused(await self.put(self.append(*events, lost=lost)), 0)
        same("events", await numbers(self.store), [1])
        await self.put(DropStream(stream=STREAM))
        for lost in (False, True):
            behind(await self.put(self.append(2, lost=lost)), 0)

    async def promise_2_an_append_that_leaves_a_hole_is_refused_and_learns_how_far_the_store_is(self) -> None:
        behind(await self.put(self.append(2)), 0)
        behind(await self.put(an_append(self.fence, [*some_events(1, 1), *some_events(3, 3)])), 0)
        await self.accept(self.append(1, 3))
        await self.put(Trim(stream=STREAM, through=2))
        behind(await self.put(self.append(9, 12, final=True, ends=(an_end(),), seal=True)), 3)
        same("events", await numbers(self.store), [3])
        same("the stream", await self.record(), replace(a_stream(self.fence), last=3))
        same("the ledger", {call.state for call in await self.store.calls(SESSION)}, {CallState.RUNNING})
        await self.accept(self.append(4))

    async def promise_2_a_hole_does_not_hide_that_another_writer_exists(self) -> None:
        """Nor does it help the previous writer to declare that the store has lost something."""
        await self.put(self.append(1, 2))
        claimed = await self.claim()
        for lost in (False, True):
            refused(await self.put(self.append(9, lost=lost)), 0)
        await self.accept(Release(stream=STREAM, fence=claimed.fence))
        for lost in (False, True):
            refused(await self.put(self.append(9, fence=claimed.fence, lost=lost)), 0)
        same("events", await numbers(self.store), [1, 2])

    async def promise_4_the_writer_of_a_store_that_lost_events_goes_on_with_a_hole(self) -> None:
        """No number names another event: what is below the end stays as it is, and so does the hole."""
        await self.put(self.append(1, 3))
        ends = tuple(an_end(id_) for id_ in (1, "one"))
        for _ in range(2):
            await self.accept(self.append(9, 11, lost=True))
            same("events", await numbers(self.store), [1, 2, 3, 9, 10, 11])
        await self.accept(self.append(2, 10, time=5.0, lost=True))
        same("events", await all_events(self.store), [*some_events(1, 3), *some_events(9, 11)])
        same("events after the hole", await all_events(self.store, after=5), list(some_events(9, 11)))
        await self.reopen()
        same("the highest number", (await self.record()).last, 11)
        behind(await self.put(self.append(14)), 11)
        await self.accept(self.append(12))
        await self.accept(self.append(20, 21, final=True, ends=ends, seal=True, lost=True))
        same("events", await numbers(self.store), [1, 2, 3, 9, 10, 11, 12, 20, 21])
        same("the stream", await self.record(), replace(a_stream(self.fence), last=21, sealed=True))
        same("the ledger", {call.state for call in await self.store.calls(SESSION)}, {CallState.ANSWERED})

    async def promise_4_a_stream_that_was_lost_is_opened_again_by_its_writer(self) -> None:
        """With its calls, whose ends are written although their rows were gone."""
        await self.put(DropStream(stream=STREAM))
        opening = OpenStream(record=a_stream(self.fence), calls=(a_call(1), a_call("one")))
        ends = tuple(an_end(id_) for id_ in (1, "one"))
        answer = self.append(8, 9, final=True, ends=ends, seal=True, lost=True)
        for _ in range(2):
            await self.accept(opening, answer)
            same("events", await numbers(self.store), [8, 9])
            same("the stream", await self.record(), replace(a_stream(self.fence), last=9, sealed=True))
        calls = [(call.request_id, call.state) for call in await self.store.calls(SESSION)]
        same("the ledger", calls, [(1, CallState.ANSWERED), ("one", CallState.ANSWERED)])

    async def promise_2_a_call_is_changed_by_its_writer_alone(self) -> None:
        again = a_put_call(self.fence, attempt=2, progress=0.5)
        await self.accept(replace(again, upstream=b"there"), again, replace(again, request_id="unknown"))
        changed = replace(a_call(1), state=CallState.WAITING, attempt=2, progress=0.5, upstream=b"there")
        same("the ledger", list(await self.store.calls(SESSION, stream=STREAM)), [changed, a_call("one")])
        claimed = await self.claim()
        stale = replace(again, state=CallState.RUNNING, attempt=3)
        refused(await self.put(stale, replace(stale, stream=StreamId("no"), fence=claimed.fence)), 0, 1)
        same("the ledger", list(await self.store.calls(SESSION, stream=STREAM)), [changed, a_call("one")])
        ends = (an_end(1, CallState.SETTLED),)
        await self.put(self.append(fence=claimed.fence, ends=ends), replace(again, fence=claimed.fence))
        same("a call that has ended", (await self.store.calls(SESSION, stream=STREAM))[0].state, CallState.SETTLED)
        await self.put(self.append(1, final=True, fence=claimed.fence, seal=True))
        refused(await self.put(replace(again, fence=claimed.fence, request_id="one")), 0)

    async def promise_2_a_stream_is_released_by_its_writer_alone(self) -> None:
        claimed = await self.claim()
        release = Release(stream=STREAM, fence=self.fence)
        refused(await self.put(release, replace(release, stream=StreamId("no"))), 0, 1)
        same("the writer", (await self.record()).node, NODE)
        await self.accept(replace(release, fence=claimed.fence))
        same("the writer", (await self.record()).node, "")
        same("streams written", list(await self.store.written_by(NODE)), [])
        refused(await self.put(self.append(1, fence=claimed.fence)), 0)
        again = await self.claim()
        same("the writer", again.node, NODE)
        await self.accept(self.append(1, final=True, fence=again.fence, seal=True))
        refused(await self.put(replace(release, fence=again.fence)), 0)

    async def promise_6_a_claim_begins_a_generation_and_records_the_end_of_the_last_one(self) -> None:
        await self.put(self.append(1, 4))
        first = await self.store.claim(STREAM, node=OTHER, held=self.fence)
        assert first is not None, "a stream that exists can be claimed"
        same("the claimed stream", first, replace(a_stream(first.fence, node=OTHER), generation=2, last=4))
        same("the stream in the store", await self.record(), first)
        await self.accept(self.append(5, 6, fence=first.fence))
        await self.reopen()
        second = await self.claim()
        same("the generation", second.generation, 3)
        wanted = [Generation(generation=1, end=4), Generation(generation=2, end=6)]
        same("the ended generations", list(await self.store.generations(STREAM)), wanted)

    async def promise_6_a_generation_that_was_lost_does_not_come_again(self) -> None:
        await self.put(self.append(1, 4))
        for known, generation in ((0, 2), (1, 3), (7, 8), (8, 9)):
            held = (await self.record()).fence
            claimed = await self.store.claim(STREAM, node=NODE, held=held, known=known)
            same(f"the generation above {known}", claimed and claimed.generation, generation)
            same("the stream in the store", await self.record(), claimed)
        wanted = [Generation(generation=generation, end=4) for generation in (1, 2, 3, 8)]
        same("the ended generations", list(await self.store.generations(STREAM)), wanted)

    async def promise_6_no_fence_is_given_twice(self) -> None:
        """Also not to a node that joins again, and in whatever process."""
        fences = [self.fence]
        for _ in range(3):
            async with self.elsewhere() as elsewhere:
                for node in (NodeId(f"node-{number}") for number in range(10)):
                    fences.append(await elsewhere.join(node))
                    fences.append((await self.claim()).fence)
                    await elsewhere.leave(node)
            await self.reopen()
        same("different fences", len(set(fences)), len(fences))
        same("fences that do not fit 63 bits", [fence for fence in fences if not 0 <= fence < 1 << 63], [])

    async def promise_6_fences_are_not_counted(self) -> None:
        """A counter repeats its last fences, once the store has lost them."""
        fences: list[int] = []
        for number in range(20):
            name = StreamId(f"same story {number}")
            await self.open_stream(name)
            claimed = await self.store.claim(name, node=NODE, held=self.fence)
            assert claimed is not None, "a stream that exists can be claimed"
            same("the generation", claimed.generation, 2)
            fences.append(claimed.fence)
        ordered = [later - earlier for earlier, later in itertools.pairwise(fences)]
        assert len(set(ordered)) > 1, f"fences follow each other, so a store that lost some repeats them: {fences}"

    async def promise_6_of_several_claims_one_succeeds(self) -> None:
        async with self.elsewhere() as elsewhere:
            for _ in range(10):
                held = (await self.record()).fence
                claimers = [(self.store, NODE), (elsewhere, OTHER)] * 2
                claims = [store.claim(STREAM, node=node, held=held) for store, node in claimers]
                claimed = [record for record in await asyncio.gather(*claims) if record is not None]
                same("the one that has it, in the end", [await self.record()], claimed)

    async def promise_6_what_is_sealed_or_gone_or_held_otherwise_is_not_claimed(self) -> None:
        claimed = await self.claim()
        same("a claim with a stale fence", await self.store.claim(STREAM, node=OTHER, held=self.fence), None)
        same("the stream", await self.record(), claimed)
        same("the ended generations", list(await self.store.generations(STREAM)), [Generation(generation=1, end=0)])
        for step in (self.append(1, final=True, seal=True, fence=claimed.fence), DropStream(stream=STREAM)):
            await self.accept(step)
            same("a claim", await self.store.claim(STREAM, node=OTHER, held=claimed.fence), None)

    async def streams_are_found_by_who_writes_them(self) -> None:
        """The node that settles a dead node's streams sees all of them and no others."""
        await self.open_stream("z", "sealed", "a", "taken", "released")
        await self.put(self.append(1, final=True, stream="sealed", seal=True))
        taken = await self.store.claim(StreamId("taken"), node=OTHER, held=self.fence)
        await self.put(Release(stream=StreamId("released"), fence=self.fence))
        same("streams written", [stream.id for stream in await self.store.written_by(NODE)], [STREAM, "z", "a"])
        same("streams of the other", list(await self.store.written_by(OTHER)), [taken])
        same("streams of an unknown node", list(await self.store.written_by(NodeId("unknown"))), [])


class ForwardChecks(StreamCase):
    """Promise 16: what other nodes forward to a stream."""

    def _forward(
        self, *payloads: bytes, first: int = 1, stream: str = STREAM, node: NodeId = OTHER, sender: str = "sender"
    ) -> Forward:
        return Forward(stream=StreamId(stream), node=node, sender=sender, first=first, payloads=payloads)

    async def _waiting(self, stream: str = STREAM) -> list[bytes]:
        """What waits for a stream, page by page."""
        found: list[bytes] = []
        after = 0
        while page := await self.store.forwarded(StreamId(stream), after=after):
            same("messages of a page at most", len(page) <= FORWARDED_AT_ONCE, True)
            found += [message.payload for message in page]
            after = page[-1].key
        return found

    async def promise_16_messages_wait_in_the_order_of_their_commits(self) -> None:
        await self.open_stream("another")
        await self.accept(self._forward(b"1", b"2"), self._forward(b"one", node=NODE, sender="ours"))
        await self.accept(self._forward(b"3", first=3), self._forward(b"theirs", stream="another"))
        await self.reopen()
        await self.claim()
        same("what waits", await self._waiting(), [b"1", b"2", b"one", b"3"])
        same("what waits for the other stream", await self._waiting("another"), [b"theirs"])
        same("what waits for no stream", await self._waiting("none"), [])

    async def promise_16_a_message_is_appended_and_taken_away_in_one_step(self) -> None:
        await self.accept(self._forward(b"1", b"2", b"3"))
        keys = [message.key for message in await self.store.forwarded(STREAM)]
        same("keys in order", keys, sorted(set(keys)))
        stale = self.append(1, 3, fence=type(self.fence)(self.fence + 1_000), taken=keys[2])
        refused(await self.put(stale), 0)
        same("what waits after a refusal", await self._waiting(), [b"1", b"2", b"3"])
        for _ in range(2):
            await self.accept(self.append(1, 2, taken=keys[1]))
            same("what waits", await self._waiting(), [b"3"])
            same("events", await numbers(self.store), [1, 2])
        await self.accept(self.append(3, taken=keys[2]), self._forward(b"4", first=4))
        await self.accept(self.append(3, taken=keys[2]))
        same("what came after the last that was taken", await self._waiting(), [b"4"])

    async def promise_16_a_number_is_taken_once_also_when_its_message_is_gone(self) -> None:
        await self.accept(self._forward(b"1", b"2"))
        await self.reopen()
        await self.accept(self._forward(b"1", b"2"), self._forward(b"2", b"3", first=2))
        same("what waits", await self._waiting(), [b"1", b"2", b"3"])
        last = (await self.store.forwarded(STREAM))[-1].key
        await self.accept(self.append(1, 3, taken=last))
        await self.accept(self._forward(b"1", b"2", b"3"))
        same("what waits once it was appended", await self._waiting(), [])
        await self.accept(self._forward(b"again", sender="the next one"))
        same("what another sender of the node forwards", await self._waiting(), [b"again"])

    async def promise_16_no_message_is_taken_before_its_predecessor(self) -> None:
        await self.accept(self._forward(b"1"))
        behind(await self.put(self._forward(b"3", first=3)), 1)
        behind(await self.put(self._forward(b"2", first=2, sender="another")), 0)
        await self.accept(self._forward(b"2", b"3", first=2))
        same("what waits", await self._waiting(), [b"1", b"2", b"3"])

    async def promise_16_what_waits_for_a_stream_has_a_limit_in_messages_and_in_bytes(self) -> None:
        """One sender alone may send more bytes at once: it would wait for ever otherwise."""
        await self.open_stream("another", "alone")
        await self.accept(self._forward(*[b"x"] * (MAX_FORWARDED - 1)))
        await self.accept(self._forward(b"last", node=NODE, sender="ours"))
        refused(await self.put(self._forward(b"too much", first=MAX_FORWARDED)), 0, why=MailFull)
        same("messages that wait", len(await self._waiting()), MAX_FORWARDED)
        first = (await self.store.forwarded(STREAM))[0].key
        await self.accept(self.append(1, taken=first))
        await self.accept(self._forward(b"room again", first=MAX_FORWARDED))
        half = b"x" * (MAX_FORWARDED_BYTES // 2)
        await self.accept(self._forward(half, stream="another"), self._forward(half, first=2, stream="another"))
        refused(await self.put(self._forward(b"x", first=3, stream="another")), 0, why=MailFull)
        await self.accept(self._forward(half, half, b"x", stream="alone"))
        refused(await self.put(self._forward(b"x", first=4, stream="alone")), 0, why=MailFull)

    async def promise_16_a_message_for_a_stream_that_no_node_writes_is_refused(self) -> None:
        await self.accept(self._forward(b"1"))
        same("streams of the writer", [s.id for s in await self.store.written_by(NODE, forwarded=True)], [STREAM])
        same("streams of another node", [s.id for s in await self.store.written_by(OTHER, forwarded=True)], [])
        await self.accept(Release(stream=STREAM, fence=self.fence))
        refused(await self.put(self._forward(b"2", first=2)), 0, why=NodeGone)
        await self.accept(self._forward(b"1"))  # it exists already
        same("streams without a writer", [s.id for s in await self.store.written_by(OTHER, forwarded=True)], [STREAM])
        await self.put(DropStream(stream=STREAM))
        refused(await self.put(self._forward(b"2", first=2)), 0, why=SessionEnded)
        same("what waits for a stream that is gone", await self._waiting(), [])
        same("streams for which messages wait", list(await self.store.written_by(NODE, forwarded=True)), [])

    async def promise_16_a_writer_that_was_buried_is_no_writer(self) -> None:
        await self.store.join(OTHER)
        await self.store.claim(STREAM, node=OTHER, held=(await self.record()).fence)
        await self.accept(self._forward(b"1", node=NODE))
        same("streams of the dead", [s.id for s in await self.store.written_by(NODE, forwarded=True)], [])
        await self.store.leave(OTHER)
        await self.store.bury(OTHER, heir=NODE)
        refused(await self.put(self._forward(b"2", first=2, node=NODE)), 0, why=NodeGone)
        same("streams without a writer", [s.id for s in await self.store.written_by(NODE, forwarded=True)], [STREAM])


class ForgettingChecks(StreamCase):
    """Promise 7, and what is known of streams that are over or unread."""

    async def promise_7_trimming_leaves_the_answers(self) -> None:
        answers = some_events(1, 3, final=True) + some_events(4, 6, final=True)
        await self.put(an_append(self.fence, answers, seal=True))
        for through in (5, 1_000):
            await self.put(Trim(stream=STREAM, through=through))
            same("events", await numbers(self.store), [3, 6])
        same("the highest number ever", (await self.record()).last, 6)

    async def promise_1_an_early_answer_is_known_with_its_event_and_ends_nothing(self) -> None:
        """A stream keeps its first; a claim, a new opening after a loss and the seal leave it."""
        early = replace(self.append(1, 2, final=True), answered=2)
        await self.accept(early)
        same("streams", list(await self.store.streams(SESSION)), [replace(a_stream(self.fence), last=2, answered=2)])
        same("calls", {call.state for call in await self.store.calls(SESSION, stream=STREAM)}, {CallState.RUNNING})
        await self.accept(Trim(stream=STREAM, through=2))
        same("events", await numbers(self.store), [2])
        claimed = await self.claim()
        same("the early answer after a claim", claimed.answered, 2)
        refused(await self.put(replace(self.append(3, 3, final=True), answered=3)), 0)
        again = replace(an_append(claimed.fence, some_events(3, 3, final=True), seal=True), answered=3)
        await self.accept(again)
        same("the early answer", ((record := await self.record()).answered, record.sealed), (2, True))
        await self.accept(DropStream(stream=STREAM), OpenStream(record=replace(claimed, last=0), calls=(a_call(1),)))
        same("the early answer of a stream that is opened again", (await self.record()).answered, 2)
        if await self.reopen():
            same("after reopening", (await self.record()).answered, 2)

    async def promise_1_the_early_answers_of_a_caller_are_listed_page_by_page(self) -> None:
        """Of its sessions that have not ended, by time and id; those of other callers, and plain calls, are not."""
        mine, other = Caller(owner=a_session().owner, address=""), Caller(owner="another", address="")
        await self.accept(PutSession(record=a_session("theirs", owner="another")))
        for name, session, opened in (
            ("b", SESSION, 2.0),
            ("a", SESSION, 2.0),
            ("c", SESSION, 1.5),
            ("d", "theirs", 1.0),
        ):
            record, call = a_stream(self.fence, name, session=session, opened=opened), a_call(name, stream=name)
            await self.accept(OpenStream(record=record, calls=(replace(call, session=SessionId(session)),)))
            if name != "c":
                await self.accept(replace(self.append(1, 1, final=True, stream=name), answered=1))

        async def listed(caller: Caller, after: tuple[float, str] = (0.0, ""), limit: int = 9) -> list[str]:
            return [record.id for record in await self.store.streams(AnsweredPage(caller, after=after, limit=limit))]

        same("all of one", await listed(mine), ["a", "b"])
        same("of another", await listed(other), ["d"])
        same("a page", await listed(mine, limit=1), ["a"])
        same("the next page", await listed(mine, (2.0, "a")), ["b"])
        same("after the last", await listed(mine, (2.0, "b")), [])
        await self.accept(EndSession(session=SESSION, time=3.0, reason="ended"))
        same("of a session that has ended", await listed(mine), [])

    async def promise_7_dropping_and_ending_take_everything(self) -> None:
        await self.open_stream("dropped")
        for stream in ("dropped", STREAM):
            await self.put(self.append(1, 2, final=True, stream=stream))
            await self.put(OpenAsk(record=an_ask(stream, stream=stream)))
            await self.put(PutReader(record=a_reader(stream=stream)))
        await self.put(DropStream(stream=StreamId("dropped")))
        same("streams", [stream.id for stream in await self.store.streams(SESSION)], [STREAM])
        same("asks", [ask.id for ask in await self.store.asks(SESSION)], [STREAM])
        same("calls", {call.stream for call in await self.store.calls(SESSION)}, {STREAM})
        same("events of the dropped stream", await numbers(self.store, "dropped"), [])
        await self.put(EndSession(session=SESSION, time=9.0, reason="why"))
        ended = an_ended_session(active=9.0, ended="why")
        lists = ("streams", "calls", "asks", "kept", "unread")
        nothing: dict[str, object] = {f"{SESSION}: {what}": [] for what in lists}
        nothing["notes"] = {}
        same("the whole store", await self.picture(), {"sessions": [ended]} | nothing)
        same("its reader", await reader_of(self.store, STREAM), None)

    async def promise_7_sweeping_forgets_events_before_answers_and_sessions_last(self) -> None:
        await self.put(ChangeSession(session=SESSION, active=30.0))
        await self.put(self.append(1, 2, time=10.0))
        await self.put(self.append(3, 4, time=20.0, final=True, seal=True))
        same("rows swept too early", await self.store.sweep(Cutoffs(events=10.0, answers=0.0)), 0)
        assert await self.store.sweep(Cutoffs(events=20.0, answers=10.0)), "events have expired"
        same("events", await numbers(self.store), [3, 4])
        assert await self.store.sweep(Cutoffs(events=25.0, answers=20.0)), "an event has expired"
        same("events", await numbers(self.store), [4])
        assert await self.store.sweep(Cutoffs(events=25.0, answers=25.0)), "the answer has expired"
        same("streams", list(await self.store.streams(SESSION)), [])
        same("sessions", await self.left(SESSION), [SESSION])
        assert await self.store.sweep(Cutoffs(events=40.0, answers=40.0)), "the session has expired"
        same("sessions", await self.left(SESSION), [])

    async def calls_whose_reader_was_lost_are_known_until_they_are_read(self) -> None:
        for name in ("z", "read", "a"):
            await self.open_stream(name)
            await self.put(self.append(1, 3, stream=name))
            await self.put(Reached(stream=StreamId(name), generation=1, through=2, unread=True))
        await self.put(Reached(stream=StreamId("read"), generation=1, through=3))
        seen = [(stream.id, stream.delivered) for stream in await self.store.streams(SESSION, only_unread=True)]
        same("the unread streams and how far they were read", seen, [("z", 2), ("a", 2)])
        z = StreamId("z")
        await self.put(DropStream(stream=z), Reached(stream=z, generation=1, through=1))
        same("the unread streams", [stream.id for stream in await self.store.streams(SESSION, only_unread=True)], ["a"])

    async def what_is_retained_of_sealed_streams_is_known_in_numbers(self) -> None:
        for name in ("z", "running", "a"):
            await self.open_stream(name)
            answers = some_events(1, 3, final=True) + some_events(4, 5, final=True)
            await self.put(an_append(self.fence, answers, stream=name, seal=name != "running"))
        await self.put(Trim(stream=StreamId("a"), through=2))
        wanted = [
            UsageRecord(stream=StreamId("z"), opened=0.0, events=3, answers=2, event_bytes=21, answer_bytes=14),
            UsageRecord(stream=StreamId("a"), opened=0.0, events=1, answers=2, event_bytes=7, answer_bytes=14),
        ]
        same("what is kept", list(await self.store.kept(SESSION)), wanted)

    async def probing_leaves_nothing_behind(self) -> None:
        before = await self.picture()
        for size in (0, 1, 100_000):
            await probe(self.store, size)
        same("the whole store", await self.picture(), before)
        same("mail", await messages(self.store), [])
        same("rows to sweep", await self.store.sweep(Cutoffs(events=0.0, answers=0.0)), 0)


class UseChecks(Case):
    """Promises 7, 17 and 18: sessions in use, and the clock by which the others expire."""

    async def promise_7_sweeping_a_session_takes_all_of_it_and_nothing_of_its_neighbour(self) -> None:
        for name, active in (("old", 1.0), ("young", 9.0)):
            record = a_stream(self.fence, name, session=name, node=NodeId("buried"))
            await self.put(
                PutSession(record=a_session(name, active=active)),
                OpenStream(record=record, calls=(a_call(stream=name, session=name),)),
                OpenStream(record=replace(record, id=StreamId(f"{name}-standalone"), kind=Kind.STANDALONE)),
                self.append(1, 5, time=active, stream=name),
                OpenAsk(record=an_ask(stream=name, session=name)),
            )
        young = await self.picture("young")
        await self.store.sweep(Cutoffs(events=5.0, answers=5.0))
        young["sessions"] = [a_session("young", active=9.0)]
        same("the neighbour", await self.picture("young"), young)
        same("streams of the expired session", len(await self.store.streams(a_session("old").id)), 0)
        same("asks of the expired session", len(await self.store.asks(a_session("old").id)), 0)

    async def promise_17_no_time_ends_a_session_that_a_node_uses(self) -> None:
        """Its home, a call that runs, a reader: each of them keeps it, however old its last activity is."""
        end = EndSession(session=SESSION, time=9.0, reason="why", unused_since=5.0)
        home = a_stream(self.fence, "home", kind=Kind.STANDALONE)
        dormant = a_session(active=5.0, state=SessionState.DORMANT)
        await self.put(PutSession(record=dormant), OpenStream(record=home))
        await self._is_left_alone(end, "a session with a home")
        await self.put(Release(stream=home.id, fence=self.fence))
        await self.put(OpenStream(record=a_stream(self.fence), calls=(a_call(),)))
        await self._is_left_alone(end, "a session with a running call")
        await self.put(self.append(1, time=90.0, final=True, ends=(an_end(),), seal=True))
        await self.put(PutReader(record=a_reader(stream="home")))
        await self._is_left_alone(end, "a session with a reader")
        await self.put(LeaveReader(stream=home.id, reader="reader-1"))
        same("of those that may go", await self.store.longest_dormant(), dormant)
        await self.put(replace(end, unused_since=4.9))
        same("a session used since", [session.ended for session in await existing(self.store, SESSION)], [""])
        await self.put(end)
        same("its end", [session.ended for session in await existing(self.store, SESSION)], ["why"])

    async def promise_17_what_is_not_used_may_be_swept(self) -> None:
        """A node that is buried uses nothing, whatever it has left."""
        node = NodeId("another")
        fence = await self.store.join(node)
        record = a_stream(fence, "home", kind=Kind.STANDALONE, node=node)
        await self.put(PutSession(record=a_session(active=5.0)), OpenStream(record=record))
        await self.store.sweep(Cutoffs(events=80.0, answers=80.0))
        same("sessions of a node that has joined", await self.left(SESSION), [SESSION])
        await self.store.bury(node, heir=NODE)
        await self.store.sweep(Cutoffs(events=80.0, answers=80.0))
        same("sessions of a node that is buried", await self.left(SESSION), [])

    async def _is_left_alone(self, end: EndSession, what: str) -> None:
        await self.put(end)
        await self.store.sweep(Cutoffs(events=80.0, answers=80.0))
        same(f"{what}: its state", [session.ended for session in await existing(self.store, SESSION)], [""])
        same(f"{what}: the longest dormant of those that may go", await self.store.longest_dormant(), None)

    async def promise_18_all_nodes_get_the_same_time(self) -> None:
        before = self.store.clock()
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(NodeId("another"))
            between = elsewhere.clock()
            after = self.store.clock()
        # The clock of processes, and of machines, may be a little off; what is kept is kept for minutes at least.
        assert before - 1 <= between <= after + 1, f"{before}, {between}, {after}"
        assert before <= after, f"the clock went back from {before} to {after}"


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
        if self.hang is None:
            return
        store, step = self.store, self.append(1)
        with self.hang():
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
        same("events, when it goes on", await numbers(self.store), [1])

    async def the_newest_reader_stays_when_an_older_one_leaves(self) -> None:
        await self.put(PutReader(record=a_reader("old")), PutReader(record=a_reader("new", seq=3)))
        await self.put(PutReader(record=a_reader("old", seq=9), attaches=False))
        await self.put(LeaveReader(stream=STREAM, reader="old"))
        same("the reader", await reader_of(self.store, STREAM), a_reader("new", seq=3))
        await self.put(PutReader(record=a_reader("new", seq=5), attaches=False))
        same("the reader that has got further", await reader_of(self.store, STREAM), a_reader("new", seq=5))
        await self.put(LeaveReader(stream=STREAM, reader="new"))
        same("the reader", await reader_of(self.store, STREAM), None)
        await self.put(PutReader(record=a_reader(stream="not there")))
        of_call = an_ask(call=StreamId("other"), incarnation=3, request_id="1 \ud800")
        await self.put(OpenAsk(record=of_call))
        same("an ask of a call", list(await self.store.asks(SESSION)), [of_call])
        await self.put(CloseAsk(session=SESSION, id=of_call.id), OpenAsk(record=an_ask(stream="not there")))
        same("the reader of no stream", await reader_of(self.store, StreamId("not there")), None)
        same("asks of no stream", list(await self.store.asks(SESSION)), [])

    async def promise_19_how_far_readers_have_got_only_moves_forward(self) -> None:
        """Whichever node reports it, and in whatever order: a reader from further back takes nothing away."""
        await self.put(self.append(1, 5))
        for through, reached in ((2, 2), (1, 2), (4, 4), (9, 5)):
            await self.put(Reached(stream=STREAM, generation=1, through=through))
            same(f"how far readers have got, reported {through}", (await self.record()).delivered, reached)
        await self.put(Reached(stream=StreamId("not there"), generation=1, through=1))
        same("the stream that does not exist", await stream_by_id(self.store, StreamId("not there")), None)

    async def promise_19_an_event_in_the_place_of_a_lost_one_is_unread(self) -> None:
        """A reader was shown 5, of which the store got 3; another writer gave the numbers 4 and 5 to other events."""
        await self.put(self.append(1, 3))
        claimed = await self.claim()
        await self.put(self.append(4, 6, fence=claimed.fence))
        for what, generation, reached in (("the lost ones", 1, 3), ("what never was", 7, 3), ("the new ones", 2, 5)):
            await self.put(Reached(stream=STREAM, generation=generation, through=5))
            same(f"how far readers have got, reported of {what}", (await self.record()).delivered, reached)


def _unowned(name: str, address: str) -> SessionRecord:
    return replace(a_session(name, owner=""), address=address)


class CallChecks(SessionCase):
    """Promises 12 and 21, and promise 14 for calls."""

    def _opening(
        self, name: str, *ids: int | str, incarnation: int = 1, session: str = SESSION, most_calls: int | None = None
    ) -> OpenStream:
        calls = tuple(a_call(id_, stream=name, session=session, incarnation=incarnation) for id_ in ids)
        return OpenStream(record=a_stream(self.fence, name, session=session), calls=calls, most_calls=most_calls)

    async def promise_12_no_two_calls_run_under_one_id(self) -> None:
        """8 and "8" are one id, as for the SDK."""
        await self.accept(self._opening("first", 8, "x"))
        before = await self.picture()
        async with self.elsewhere() as elsewhere:
            for ids in ((8,), ("8",), ("x",), (9, "x"), (10, "10")):
                refused(await elsewhere.commit([self._opening("second", *ids)]), 0, why=IdTaken)
        same("the whole store", await self.picture(), before)
        refused(await self.put(self._opening("second", "8"), self._opening("third", 9)), 0, why=IdTaken)
        same("streams", [stream.id for stream in await self.store.streams(SESSION)], ["first", "third"])
        await self.accept(self._opening("first", 8, "x"))

    async def promise_12_another_session_or_incarnation_has_ids_of_its_own(self) -> None:
        await self.accept(self._opening("first", 8))
        await self.accept(self._opening("second", 8, incarnation=2))
        await self.accept(self._opening("third", "8", session="neighbour"))

    async def promise_12_an_id_is_free_again_once_its_call_has_ended_and_not_while_it_waits(self) -> None:
        await self.open_stream()
        await self.accept(a_put_call(self.fence))
        refused(await self.put(self._opening("second", "1")), 0, why=IdTaken)
        found = await open_call(self.store, SESSION, incarnation=1, request_id="1")
        same("the call that waits", found, replace(a_call(1), state=CallState.WAITING))
        await self.accept(self.append(1, final=True, ends=(an_end(),)))
        same("a call that has ended", await open_call(self.store, SESSION, incarnation=1, request_id=1), None)
        await self.accept(self._opening("second", "1"))
        found = await open_call(self.store, SESSION, incarnation=1, request_id=1)
        same("the call that runs", found, a_call("1", stream="second"))
        same("a call of another incarnation", await open_call(self.store, SESSION, incarnation=2, request_id=1), None)
        rows = [(call.request_id, call.request) for call in await self.store.calls(SESSION, stream=STREAM)]
        same("an ended call's request", rows, [(1, b""), ("one", a_call().request)])

    async def promise_12_of_several_writers_one_opens_a_stream_of_a_shared_name(self) -> None:
        async with self.elsewhere() as elsewhere:
            ours = replace(self._opening("known", 1), unique=True)
            theirs = replace(ours, record=replace(ours.record, node=OTHER, fence=await elsewhere.join(OTHER)))
            stores = ((self.store, ours), (elsewhere, theirs)) * 2
            outcomes = await asyncio.gather(*(store.commit([step]) for store, step in stores))
            opened = {step.record.fence for (_, step), [why] in zip(stores, outcomes, strict=True) if why is None}
            same("the fences under which it was opened", opened, {(await self.record("known")).fence})
            store, step = next(tried for tried in stores if tried[1].record.fence in opened)
            accepted(await store.commit([step]))  # again, as after an answer that was lost
            sealing = an_append(step.record.fence, some_events(1, 1, final=True), stream="known", seal=True)
            accepted(await store.commit([sealing]))
            for store, step in stores:
                refused(await store.commit([step]), 0)

    async def promise_12_a_session_that_has_ended_opens_no_stream(self) -> None:
        await self.put(EndSession(session=SESSION, time=1.0, reason="why"))
        late, unknown = self._opening("late", 1), self._opening("unknown", 1, session="unknown")
        refused(await self.put(late, self._opening("fine", 1, session="neighbour")), 0, why=SessionEnded)
        refused(await self.put(unknown), 0, why=SessionEnded)
        same("streams", list(await self.store.streams(SESSION)), [])
        same("calls", list(await self.store.calls(SESSION)), [])
        same("its neighbour's", [stream.id for stream in await self.store.streams(SessionId("neighbour"))], ["fine"])

    async def promise_21_a_call_is_refused_that_has_seen_another_record(self) -> None:
        await self.accept(seen := replace(self._opening("first", 8), seen=await self._revision()))
        before = await self.picture()
        stale = replace(self._opening("second", 9), seen=await self._revision() + 1)
        async with self.elsewhere() as elsewhere:
            refused(await elsewhere.commit([stale]), 0, why=StaleRecord)
        same("the whole store", await self.picture(), before)
        await self.accept(ChangeSession(session=SESSION, state=SessionState.DORMANT))
        await self.accept(seen)  # it exists already
        refused(await self.put(replace(self._opening("second", 9), seen=seen.seen)), 0, why=StaleRecord)
        await self.accept(replace(self._opening("second", 9), seen=await self._revision()))

    async def promise_21_whatever_changes_a_record_raises_its_revision_and_its_use_does_not(self) -> None:
        seen = [await self._revision()]
        stick = ChangeSession(session=SESSION, stick=a_sticky("resources/subscribe", uri="a://revised"))
        for step in (ChangeSession(session=SESSION, initialized=True, state=SessionState.DORMANT), stick):
            await self.accept(step)
            seen.append(await self._revision())
        await self.store.reattach(SESSION)
        seen.append(await self._revision())
        same("a revision that rises with each change", seen, sorted(set(seen)))
        await self.accept(ChangeSession(session=SESSION, active=99.0))
        same("the revision of a session that was used", await self._revision(), seen[-1])

    async def promise_21_a_session_is_loaded_as_it_is_read(self) -> None:
        same("a session that does not exist", await self.store.load(SessionId("not there")), None)
        record = await self.store.session(SESSION)
        assert record is not None
        same("without its standalone stream", await self.store.load(SESSION), Loaded(record, None))
        standalone = a_stream(self.fence, record.standalone, kind=Kind.STANDALONE)
        await self.accept(OpenStream(record=standalone))
        await self.accept(ChangeSession(session=SESSION, initialized=True, result=b'{"changed":true}'))
        same(
            "with it",
            await self.store.load(SESSION),
            Loaded(replace(record, initialized=True, result=b'{"changed":true}'), standalone),
        )
        await self.accept(EndSession(session=SESSION, time=5.0, reason="deleted"))
        ended = await self.store.session(SESSION)
        same("once it has ended", await self.store.load(SESSION), None if ended is None else Loaded(ended, None))

    async def _revision(self) -> int:
        record = await self.store.session(SESSION)
        assert record is not None
        return record.revision

    async def promise_14_calls_beyond_the_limit_of_their_session_are_refused(self) -> None:
        opening = partial(self._opening, most_calls=2)
        await self.accept(opening("a", 1))
        refused(await self.put(opening("b", 2, 3)), 0, why=TooManyCalls)
        refused(await self.put(opening("b", 1, 2)), 0, why=IdTaken)
        await self.accept(opening("c", 2), opening("of another", 1, 2, session="neighbour"))
        refused(await self.put(opening("b", 3)), 0, why=TooManyCalls)
        same("its calls", [call.request_id for call in await self.store.calls(SESSION)], [1, 2])
        await self.put(self.append(1, final=True, stream="a", ends=(an_end(),), seal=True))
        await self.accept(opening("b", 3))


class SessionChecks(Case):
    """What is promised of the records of sessions."""

    async def a_session_is_changed_in_the_given_fields_and_no_others(self) -> None:
        record = replace(a_session(state=SessionState.OPENING), version="", result=b"", initialized=False, active=5.0)
        await self.put(PutSession(record=record), PutSession(record=a_session()))
        same("a session that was put twice", await self.store.session(SESSION), record)
        for change, changed in (
            (ChangeSession(session=SESSION), {}),
            (ChangeSession(session=SESSION, state=SessionState.ACTIVE), {"state": SessionState.ACTIVE}),
            (ChangeSession(session=SESSION, version="2025-06-18"), {"version": "2025-06-18"}),
            (ChangeSession(session=SESSION, result=b"{}"), {"result": b"{}"}),
            (ChangeSession(session=SESSION, initialized=True), {"initialized": True}),
            (ChangeSession(session=SESSION, is_task=True), {"is_task": True}),
            (ChangeSession(session=SESSION, upstream=b"there"), {"upstream": b"there"}),
            (ChangeSession(session=SESSION, active=7.5), {"active": 7.5}),
            (ChangeSession(session=SESSION, active=6.0), {}),
            (ChangeSession(session=SESSION, result=b"", initialized=False), {"result": b"", "initialized": False}),
        ):
            await self.accept(change, ChangeSession(session=SessionId("unknown"), active=9.0))
            record = replace(record, **changed)
            same("the session", await self.store.session(SESSION), record)
        same("a session that was never put", await self.left("unknown"), [])
        odd = replace(a_session("odd"), incarnation=5, sticky=(), owner="\ud83d another owner", active=3.5)
        await self.put(PutSession(record=odd))
        same("a record", await self.store.session(odd.id), odd)

    async def sessions_are_counted_by_their_states(self) -> None:
        for name, owner, state in (
            ("a", "alice", SessionState.ACTIVE),
            ("b", "alice", SessionState.DORMANT),
            ("c", "", SessionState.OPENING),
            ("d", "alice", SessionState.ACTIVE),
        ):
            await self.put(PutSession(record=a_session(name, owner=owner, state=state)))
        await self.put(EndSession(session=SessionId("d"), time=1.0, reason="why"))
        states = {state: count for state, count in (await self.store.count_states()).items() if count}
        same("sessions by state", states, dict.fromkeys(SessionState, 1))

    async def the_longest_dormant_session_is_the_one_without_activity_for_longest(self) -> None:
        """Of all, or of one caller's: by name or, where the caller has none, by address."""
        same("of none", await self.store.longest_dormant(), None)
        dormant = SessionState.DORMANT
        records = [
            a_session("of bob", owner="bob", state=dormant, active=1.0),
            a_session("of alice", owner="alice", state=dormant, active=2.0),
            replace(_unowned("of here", "192.0.2.1"), state=dormant, active=3.0),
            replace(_unowned("of there", "192.0.2.2"), state=dormant, active=4.0),
        ]
        younger, active = a_session("younger", owner="bob", state=dormant, active=9.0), a_session("active", owner="bob")
        await self.put(*(PutSession(record=record) for record in (*reversed(records), younger, active)))
        callers = (("bob", ""), ("alice", ""), ("", "192.0.2.1"), ("", "192.0.2.2"))
        same("each caller's", [await self.store.longest_dormant(Caller(*caller)) for caller in callers], records)
        same("of a stranger", await self.store.longest_dormant(Caller("carol")), None)
        for first, second in itertools.pairwise(records):
            same("the first", await self.store.longest_dormant(), first)
            await self.put(EndSession(session=first.id, time=0.0, reason="why"))
            same("the next", await self.store.longest_dormant(), second)


class NoteChecks(SessionCase):
    """Promise 13, and what becomes of one session."""

    async def promise_13_notes_are_found_by_the_beginning_of_their_names(self) -> None:
        for name in ("a/1", "a/2", "b"):
            same("a note", await self.store.change_note(name, seen=None, value=name.encode()), True)
        async with self.elsewhere() as elsewhere:
            for prefix, names in (("a/", ["a/1", "a/2"]), ("b", ["b"]), ("", ["a/1", "a/2", "b"]), ("c", [])):
                found = await elsewhere.notes(prefix)
                same(f"notes {prefix!r}", dict(found), {name: name.encode() for name in names})

    async def promise_13_a_note_changes_only_from_what_was_seen(self) -> None:
        async def change(name: str, *, seen: bytes | None, value: bytes | None) -> bool:
            return await self.store.change_note(name, seen=seen, value=value)

        async with self.elsewhere() as elsewhere:
            same("a change of none", await change("n", seen=b"0", value=b"1"), False)
            same("the first value", await elsewhere.change_note("n", seen=None, value=b"1"), True)
            same("another first value", await change("n", seen=None, value=b"2"), False)
            same("the second value", await change("n", seen=b"1", value=b"2"), True)
            same("a change from before that", await elsewhere.change_note("n", seen=b"1", value=b"3"), False)
            same("an end from before that", await elsewhere.change_note("n", seen=b"1", value=None), False)
            await self.reopen()
            same("the note", dict(await elsewhere.notes("n")), {"n": b"2"})
            same("an end", await elsewhere.change_note("n", seen=b"2", value=None), True)
        same("an end again", await change("n", seen=b"2", value=None), False)
        same("the note", dict(await self.store.notes("n")), {})

    async def promise_13_of_several_changes_at_once_one_succeeds(self) -> None:
        async with self.elsewhere() as elsewhere:
            for seen in (None, b"1"):
                if seen:
                    await self.store.change_note("n", seen=None, value=seen)
                stores = [self.store, elsewhere] * 5
                changes = [store.change_note("n", seen=seen, value=b"by %d" % n) for n, store in enumerate(stores)]
                done = await asyncio.gather(*changes)
                same("changes that succeeded", sum(done), 1)
                same("the note", dict(await self.store.notes("n")), {"n": b"by %d" % done.index(True)})
                await self.store.change_note("n", seen=b"by %d" % done.index(True), value=None)

    async def promise_13_a_note_of_a_session_ends_with_it(self) -> None:
        """However it ends; and one that has ended, or never was, gets none."""
        names = ("ended", "swept", "kept")
        await self.put(*(PutSession(record=a_session(name, active=5.0)) for name in names))
        await self.put(ChangeSession(session=SessionId("kept"), active=20.0, state=SessionState.DORMANT))
        for name in names:
            same("a note", await self.store.change_note(name, seen=None, value=b"1", session=name), True)
            same("its change", await self.store.change_note(name, seen=b"1", value=b"2", session=name), True)
        await self.put(EndSession(session=SessionId("ended"), time=30.0, reason="why"))
        same("the note of one that ended", await self.store.notes("ended"), {})
        same("a late change", await self.store.change_note("ended", seen=b"2", value=b"3"), False)
        for name in ("ended", "unknown"):
            late = await self.store.change_note("late", seen=None, value=b"1", session=name)
            same("a late note, or one of no session", late, False)
        same("a late note", await self.store.notes("late"), {})
        await self.store.sweep(Cutoffs(events=10.0, answers=10.0))
        same("the note of one that was swept", await self.store.notes("swept"), {})
        same("the note of one that goes on", dict(await self.store.notes("kept")), {"kept": b"2"})

    async def nothing_changes_after_the_end_of_a_session(self) -> None:
        await self.put(EndSession(session=SESSION, time=4.0, reason="first"))
        ended = an_ended_session(active=4.0, ended="first")
        for step in (
            EndSession(session=SESSION, time=9.0, reason="second"),
            ChangeSession(session=SESSION, active=9.0, state=SessionState.ACTIVE, initialized=False),
            ChangeSession(session=SESSION, stick=a_sticky("resources/subscribe", uri="late://1")),
            PutSession(record=a_session()),
        ):
            await self.accept(step)
            same("the session", await self.store.session(SESSION), ended)
        same("reattaching", await self.store.reattach(SESSION), None)
        same("the session", await self.store.session(SESSION), ended)

    async def reattaching_counts_up(self) -> None:
        for incarnation in (2, 3):
            wanted = replace(a_session(), incarnation=incarnation)
            same("the session", await self.store.reattach(SESSION), wanted)
            await self.reopen()
            same("the session in the store", await self.store.session(SESSION), wanted)
        same("reattaching a session that does not exist", await self.store.reattach(SessionId("unknown")), None)

    async def sticky_requests_are_kept_as_they_follow_each_other(self) -> None:
        wanted = a_session().sticky
        for request in (
            a_sticky("resources/subscribe", uri="a://1"),
            a_sticky("logging/setLevel", level="debug"),
            a_sticky("resources/subscribe", uri="a://2"),
            a_sticky("resources/unsubscribe", uri="a://1"),
            a_sticky("resources/unsubscribe", uri="never://subscribed"),
            a_sticky("resources/subscribe", uri="a://2"),
        ):
            await self.accept(ChangeSession(session=SESSION, stick=request))
            wanted = sticky.after(wanted, request)
            found = await self.store.session(SESSION)
            same("sticky requests", found and found.sticky, wanted)
        await self.accept(ChangeSession(session=SessionId("unknown"), stick=a_sticky("logging/setLevel")))


class LimitChecks(Case):
    """Promise 14."""

    async def promise_14_a_session_beyond_the_limit_for_all_is_refused(self) -> None:
        limits = SessionLimits(total=2, caller=9)
        first, second = (PutSession(record=a_session(name, owner=name), limits=limits) for name in ("a", "b"))
        third = PutSession(record=a_session("c", owner="c"), limits=limits)
        await self.accept(first, second)
        opened = OpenStream(record=a_stream(self.fence, "stream of c", session="c"))
        [full, gone] = await self.put(third, opened)
        too_many([full], of_caller=False)
        refused([gone], 0, why=SessionEnded)
        same("sessions", await self.left("a", "b", "c"), ["a", "b"])
        await self.accept(first)  # it exists already (5)
        await self.accept(EndSession(session=SessionId("a"), time=1.0, reason="why"), third)
        same("open sessions", await count_open(self.store), 2)

    async def promise_14_a_caller_beyond_its_own_limit_is_refused_first(self) -> None:
        """By its name or, where it has none, by its address; callers with neither share the limit for all."""
        limits = SessionLimits(total=3, caller=1)
        for mine, more, other in (
            (a_session("a", owner="alice"), a_session("b", owner="alice"), a_session("c", owner="bob")),
            (_unowned("d", "192.0.2.1"), _unowned("e", "192.0.2.1"), _unowned("f", "192.0.2.2")),
        ):
            await self.accept(PutSession(record=mine, limits=limits))
            too_many(await self.put(PutSession(record=more, limits=limits)), of_caller=True)
            await self.accept(PutSession(record=other, limits=limits))
            for record in (mine, other):
                await self.put(EndSession(session=record.id, time=1.0, reason="why"))
        [*within, full] = await self.put(*(PutSession(record=_unowned(name, ""), limits=limits) for name in "ghij"))
        accepted(within)
        too_many([full], of_caller=False)

    async def promise_14_of_many_sessions_at_once_as_many_as_the_limit_are_put(self) -> None:
        limits = SessionLimits(total=3, caller=3)
        async with self.elsewhere() as other:
            puts = [PutSession(record=a_session(f"s{number:02d}"), limits=limits) for number in range(20)]
            commits = [store.commit([put]) for store, put in zip([self.store, other] * 10, puts, strict=True)]
            refusals = [refusal for [refusal] in await asyncio.gather(*commits)]
        same("refused", sum(isinstance(refusal, TooManySessions) for refusal in refusals), 17)
        same("open sessions", await count_open(self.store), 3)
        same("records", len(await self.left(*(put.record.id for put in puts))), 3)

    async def promise_14_an_ended_session_keeps_little_more_than_why(self) -> None:
        long = b'{"x":"%b"}' % (b"x" * MAX_ENDED_PARAMS)
        for name, params, reason, kept in (
            ("deleted", b"{}", SessionStep.CLIENT_DELETED.value, b""),
            ("expired", b"{}", SessionStep.WINDOW_PASSED.value, b"{}"),
            ("expired, and large", long, SessionStep.WINDOW_PASSED.value, b""),
        ):
            record = replace(a_session(name), client_params=params)
            await self.put(PutSession(record=record), EndSession(session=record.id, time=4.0, reason=reason))
            wanted = replace(an_ended_session(name, active=4.0, ended=reason), client_params=kept)
            same("the record", await self.store.session(record.id), wanted)

    async def promise_14_of_a_callers_ended_sessions_the_newest_are_kept(self) -> None:
        await self.put(PutSession(record=a_session("another's", owner="another")))
        await self.put(EndSession(session=SessionId("another's"), time=0.0, reason="why"))
        names = [f"s{number:04d}" for number in range(MAX_ENDED_OF_CALLER + 1)]
        for start in range(0, len(names), 100):
            some = names[start : start + 100]
            await self.put(*(PutSession(record=a_session(name)) for name in some))
            times = enumerate(some, start)
            await self.store.commit([EndSession(session=SessionId(i), time=n, reason="why") for n, i in times])
        same("kept records", await self.left("another's", *names[:2], names[-1]), ["another's", names[1], names[-1]])
        same("how many", dict(await self.store.count_states()), {SessionState.ENDED: len(names)})


THIRD = NodeId("third")
LEASE = 15.0


class DurableCallChecks(Case):
    """Promise 22: requests that have no session of their own."""

    async def promise_22_durable_calls_and_sessions_are_counted_and_limited_apart(self) -> None:
        limits = SessionLimits(total=1, caller=1), SessionLimits(total=None, caller=1)
        for make, limit in zip((a_session, a_durable_call), limits, strict=True):
            record = make(f"first {make.__name__}", owner="alice")
            await self.accept(PutSession(record=record, limits=limit))
            same("the record", await self.store.session(record.id), record)
            second = PutSession(record=make(f"second {make.__name__}", owner="alice"), limits=limit)
            too_many(await self.put(second), of_caller=True)
        await self.accept(PutSession(record=a_durable_call("c3", owner="bob"), limits=limits[1]))
        too_many(await self.put(PutSession(record=a_session("s3", owner="bob"), limits=limits[0])), of_caller=False)
        for kind, count in ((RecordKind.SESSION, 1), (RecordKind.CALL, 2)):
            same(f"each {kind.value}", dict(await self.store.count_states(kind)), {SessionState.ACTIVE: count})

    async def promise_22_a_durable_call_that_ends_leaves_no_record(self) -> None:
        opened = await self.open_call(call := a_durable_call())
        end = EndSession(session=call.id, time=1.0, reason="why")
        await self.accept(end)
        await self.accept(end)
        same("the record", await self.store.session(call.id), None)
        same("its streams", list(await self.store.streams(call.id)), [])
        same("how many", dict(await self.store.count_states(RecordKind.CALL)), {})
        refused(await self.put(opened), 0, why=SessionEnded)

    async def promise_22_a_durable_call_is_given_up_and_swept_by_its_own_time(self) -> None:
        old, young = (
            a_durable_call(name, state=SessionState.DORMANT, active=at) for name, at in (("o", 5.0), ("y", 9.0))
        )
        session = a_session("s", state=SessionState.DORMANT, active=1.0)
        await self.accept(*(PutSession(record=record) for record in (old, young, session)))
        same("the call", await self.store.longest_dormant(kind=RecordKind.CALL), old)
        same("the caller's call", await self.store.longest_dormant(Caller("owner"), kind=RecordKind.CALL), old)
        same("the session", await self.store.longest_dormant(), session)
        await self.store.sweep(Cutoffs(events=0.0, answers=0.0, calls=7.0))
        same("what is left", await self.left("s", "o", "y"), ["s", "y"])
        await self.store.sweep(Cutoffs(events=3.0, answers=3.0, calls=7.0))
        same("what is left", await self.left("s", "o", "y"), ["y"])

    async def promise_22_records_that_are_no_sessions_are_counted_apart_and_leave_nothing(self) -> None:
        others = [replace(a_durable_call(name), kind=RecordKind.KEY) for name in ("k", "l")]
        await self.accept(*(PutSession(record=record) for record in (a_durable_call("c"), *others)))
        for record in others:
            same("the record", await self.store.session(record.id), record)
            same("how many", dict(await self.store.count_states(record.kind)), {record.state: 2})
            same("of the caller", dict(await self.store.count_states(record.kind, Caller("owner"))), {record.state: 2})
            same("of another", dict(await self.store.count_states(record.kind, Caller("owner", "elsewhere"))), {})
            same("as a call", (await self.store.durable_call(record.id, recent=1)), CallSnapshot(record, None))
        same("the calls", dict(await self.store.count_states(RecordKind.CALL)), {SessionState.ACTIVE: 1})
        await self.accept(EndSession(session=others[0].id, time=1.0, reason="why"))
        same("what is left", await self.left("c", "k", "l"), ["c", "l"])
        await self.store.sweep(Cutoffs(events=0.0, answers=0.0, calls=math.inf))
        same("what is left", await self.left("c", "k", "l"), [])

    async def promise_22_a_call_that_was_given_up_leaves_its_key(self) -> None:
        """In one commit; a request with the same key opens no stream after it (21)."""
        opened = await self.open_call(call := a_durable_call(state=SessionState.DORMANT), seen=0, unique=True)
        key = replace(call, kind=RecordKind.KEY, digest=b"digest", result=b"", client_params=b"", revision=1)
        end = EndSession(session=call.id, time=1.0, reason="why", unused_since=call.active)
        await self.accept(end, PutSession(record=key))
        same("a call in use", await self.store.session(call.id), call)
        await self.accept(self.answer())
        await self.accept(end, PutSession(record=key))
        found = await self.store.session(call.id)
        same("the key", (found, None if found is None else found.revision), (key, 1))
        refused(await self.put(PutSession(record=call), opened), 1, why=StaleRecord)
        same("its streams", list(await self.store.streams(call.id)), [])

    async def promise_22_the_calls_of_a_caller_that_were_delivered_are_found_first(self) -> None:
        for name, at in (("a", 1.0), ("b", 2.0)):
            await self.open_call(a_durable_call(name, state=SessionState.DORMANT, active=at), f"of {name}")
            await self.accept(self.answer(stream=f"of {name}"))
        longest = partial(self.store.longest_dormant, Caller("owner"), kind=RecordKind.CALL)
        unread = Reached(stream=StreamId("of a"), generation=1, through=0, unread=True)
        await self.accept(unread)
        for delivered, name in ((False, "a"), (True, "b")):
            found = await longest(delivered=delivered)
            same(f"delivered: {delivered}", None if found is None else found.id, name)
        await self.accept(replace(unread, stream=StreamId("of b")))
        same("none", await longest(delivered=True), None)
        kept = await self.store.bytes_of(Caller("owner"))
        await self.accept(EndSession(session=SessionId("a"), time=1.0, reason="why"))
        less = await self.store.bytes_of(Caller("owner"))
        same("bytes", 0 < less < kept, True)
        same("of another", await self.store.bytes_of(Caller("owner", "elsewhere")), 0)

    async def promise_22_the_newest_records_of_a_caller_are_those_that_it_can_ask_for(self) -> None:
        for number, name in enumerate("abcd"):
            record = replace(a_durable_call(name, active=float(number)), is_task=name != "b")
            await self.open_call(record, f"of {name}")
        await self.accept(EndSession(session=SessionId("d"), time=1.0, reason="why"))
        newest = partial(self.store.newest_of, Caller("owner"), kind=RecordKind.CALL)
        same("the newest", [record.id for record in await newest(limit=9)], ["c", "a"])
        same("the newest one", [record.id for record in await newest(limit=1)], ["c"])
        others = await self.store.newest_of(Caller("owner", "elsewhere"), kind=RecordKind.CALL, limit=9)
        same("of another", list(others), [])

    async def promise_22_a_durable_call_is_shown_as_its_pieces_show_it(self) -> None:
        """One read returns what several reads return piece by piece."""
        call = a_durable_call()
        row = a_call(session=call.id)

        async def shows(what: str, wanted: CallSnapshot | None, id_: SessionId = call.id) -> None:
            seen = await self.store.durable_call(id_, recent=3)
            same(what, seen and seen._replace(recent=tuple(seen.recent), asks=tuple(seen.asks)), wanted)

        await shows("a call that does not exist", None)
        await self.accept(PutSession(record=a_session()))
        await shows("a session", CallSnapshot(a_session(), None), SESSION)
        await self.open_call(call)
        await shows("a call that has said nothing", CallSnapshot(call, row, (), ()))
        said, ask = some_events(1, 5, time=1.0), an_ask(session=call.id, call=STREAM, incarnation=2, request_id=7)
        await self.accept(an_append(self.fence, said), OpenAsk(record=ask))
        await shows("a call that runs", CallSnapshot(call, row, said[2:], (ask,)))
        await self.accept(answer := self.answer(6, time=2.0))
        ended = replace(row, state=CallState.ANSWERED, request=b"")
        await shows("a call that has ended", CallSnapshot(call, ended, answer.events, ()))

    async def a_call_keeps_its_name_and_what_stands_for_its_request_when_it_has_ended(self) -> None:
        call = a_durable_call()
        row = replace(a_call(session=call.id), digest=bytes(range(32)), name="\ud800 bake", upstream=b"there")
        await self.accept(PutSession(record=call))
        await self.accept(OpenStream(record=a_stream(self.fence, session=call.id), calls=(row,)))
        await self.accept(ChangeSession(session=call.id, state=SessionState.DORMANT, active=3.0))
        await self.accept(self.answer())
        await self.reopen()
        ended = replace(row, state=CallState.ANSWERED, request=b"", upstream=b"")
        same("the row", list(await self.store.calls(call.id)), [ended])


class InspectChecks(Case):
    """The lists of a store for operators."""

    def _inspect(self) -> Inspect | None:
        return cast("Inspect", self.store) if hasattr(self.store, "newest") else None

    async def the_newest_records_are_outlined_and_found_by_their_ids(self) -> None:
        if (inspect := self._inspect()) is None:
            return
        task = a_durable_call("ab", owner="\ud83d bob", active=9.5)
        ended = a_durable_call("c", state=SessionState.DORMANT, active=8.5)
        over = an_ended_session("ac", active=7.5, ended="over")
        records = [task, ended, over, a_session("b", active=6.5), a_session("a", owner="alice", active=6.5)]
        records.append(a_session("d", state=SessionState.DORMANT, active=5.5))
        await self.accept(*(PutSession(record=record) for record in reversed(records)))
        for record in (task, ended):
            await self.open_call(record, f"of {record.id}")
        await self.accept(self.answer(stream="of c"))
        states = {task.id: CallState.RUNNING, ended.id: CallState.ANSWERED}
        records[3:5] = records[4:2:-1]  # of one moment, by their ids
        wanted = [Outline(r.id, r.owner, r.state, r.is_task, r.active, r.kind, states.get(r.id)) for r in records]
        same("all", list(await inspect.newest(limit=sys.maxsize)), wanted)
        same("some", list(await inspect.newest(limit=3)), wanted[:3])
        with_prefix = [one for one in wanted if one.id.startswith("a")]
        same("with a prefix", list(await inspect.newest(limit=9, prefix="a")), with_prefix)
        same("the newest of them", list(await inspect.newest(limit=1, prefix="a")), with_prefix[:1])
        same("with a whole id", list(await inspect.newest(limit=9, prefix="ab")), with_prefix[:1])
        same("with no id", list(await inspect.newest(limit=9, prefix="abc")), [])

    async def calls_that_have_not_ended_are_listed_by_their_sessions(self) -> None:
        if (inspect := self._inspect()) is None:
            return
        same("of none", list(await inspect.open_calls(limit=9)), [])
        for name in ("c", "b", "a"):
            await self.open_call(a_session(name), f"of {name}")
        await self.accept(self.answer(stream="of b"))
        await self.accept(replace(a_put_call(self.fence, attempt=2), stream=StreamId("of c")))
        running = OpenCall(SessionId("a"), StreamId("of a"), "tools/call", CallState.RUNNING, 1, NODE)
        waiting = OpenCall(SessionId("c"), StreamId("of c"), "tools/call", CallState.WAITING, 2, NODE)
        same("all", list(await inspect.open_calls(limit=9)), [running, waiting])
        same("some", list(await inspect.open_calls(limit=1)), [running])

    async def the_extent_counts_the_events_and_dates_the_oldest(self) -> None:
        if (inspect := self._inspect()) is None:
            return
        same("of nothing", (await inspect.extent())[1::2], (0, None))
        await self.open_call(a_session())
        await self.accept(self.append(1, 2, time=4.0), self.append(3, time=5.0, final=True))
        same("events, and the oldest", (await inspect.extent())[1::2], (3, 4.0))
        await self.accept(Trim(stream=STREAM, through=2))
        extent = await inspect.extent()
        same("events after a trim", extent.events, 1 if extent.is_exact else max(extent.events, 1))
        same("the oldest after a trim", extent.oldest, 5.0)


class MailChecks(StreamCase):
    """Promises 8 and 10: hints and mail."""

    async def promise_8_a_hint_reaches_the_node_that_it_is_for(self) -> None:
        """By name, or as the word that something was written: then all is looked at."""
        async with self.neighbour() as elsewhere:
            told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
            stop = elsewhere.subscribe(OTHER, told.put_nowait)
            self.store.hint(OTHER, [StreamId("grown"), STREAM])
            await self._told(told, "grown")
            await self.accept(SendMail(node=OTHER, message=b"look"))
            await self._told(told)
            stop()
            stop()
            self.store.hint(OTHER, [STREAM])
            self.store.hint(NodeId("unknown"), [STREAM])
            await self.accept(self.append(1))
            same("events, without a listener", await numbers(self.store), [1])
            [mail] = await elsewhere.mail(OTHER)
            same("mail", mail.message, b"look")
            accepted(await put(elsewhere, MailReceived(node=OTHER, through=mail.key)))

    async def _told(self, queue: asyncio.Queue[Sequence[StreamId]], name: str | None = None) -> None:
        """Wait for a hint at a stream, or at everything."""
        try:
            async with asyncio.timeout(self.patience):
                while (streams := await queue.get()) and name not in streams:
                    pass
        except TimeoutError:
            raise AssertionError(f"no hint at {name or 'the mail'} came within {self.patience} seconds") from None

    async def equal_stamps_mean_that_no_other_process_has_written(self) -> None:
        async with self.elsewhere() as elsewhere:
            for number in range(3):
                before = self.store.stamp()
                accepted(await put(elsewhere, ChangeSession(session=SESSION, active=float(number))))
                assert self.store.stamp() != before, f"the stamp {before!r} stayed, though another process has written"
                before = self.store.stamp()
                await elsewhere.reattach(SESSION)
                assert self.store.stamp() != before, f"the stamp {before!r} stayed at the begin of an incarnation"

    async def promise_10_mail_stays_until_it_was_received(self) -> None:
        await self.store.join(OTHER)
        await self.put(*(SendMail(node=NODE, message=b"%d" % number) for number in range(5)))
        await self.put(SendMail(node=OTHER, message=b"theirs"))
        await self.reopen()
        mail = list(await self.store.mail(NODE))
        same("mail", [message for _, message in mail], [b"0", b"1", b"2", b"3", b"4"])
        same("keys in order", [key for key, _ in mail], sorted({key for key, _ in mail}))
        same("mail read before", list(await self.store.mail(NODE)), mail)
        for _ in range(2):
            await self.put(MailReceived(node=NODE, through=mail[2].key))
            same("mail that was not received", list(await self.store.mail(NODE)), mail[3:])
        await self.put(SendMail(node=NODE, message=b"late"), MailReceived(node=NODE, through=mail[4].key))
        same("mail that came meanwhile", await messages(self.store), [b"late"])
        same("the other's mail", await messages(self.store, OTHER), [b"theirs"])
        same("mail of an unknown node", list(await self.store.mail(NodeId("unknown"))), [])

    async def promise_10_mail_is_read_a_page_at_a_time_and_has_a_limit(self) -> None:
        await self.store.join(OTHER)
        posts = [SendMail(node=NODE, message=b"%d" % number) for number in range(MAX_MAIL + 100)]
        # Many commits: one of so many steps may take a store longer than one operation may.
        refusals: list[StepRejected | None] = []
        for start in range(0, len(posts), 500):
            refusals += await self.put(*posts[start : start + 500])
        refused(refusals, *range(MAX_MAIL, MAX_MAIL + 100), why=MailFull)
        await self.accept(SendMail(node=OTHER, message=b"theirs"))
        page = list(await self.store.mail(NODE))
        wanted = [post.message for post in posts[:MAIL_AT_ONCE]]
        same("the first page", [message for _, message in page], wanted)
        (after, _), *_ = await self.store.mail(NODE, after=page[-1].key)
        same("the next page begins later", after > page[-1].key, True)
        await self.put(MailReceived(node=NODE, through=page[-1].key + MAX_MAIL * 2))
        await self.accept(*posts[:64])

    async def promise_10_mail_becomes_visible_in_the_order_of_its_keys(self) -> None:
        """Three nodes post at once to a fourth, which removes what it has read, and no unread message with it."""
        each = 60

        async def post(store: Store, sender: int) -> None:
            for number in range(each):
                mail = SendMail(node=NODE, message=b"%d %d" % (sender, number))
                accepted(await store.commit([mail]))
                for _ in range((number * 7 + sender) % 3):
                    await asyncio.sleep(0)

        seen: list[Mail] = []
        async with self.elsewhere() as second, self.elsewhere() as third:
            stores = enumerate((self.store, second, third))
            posting = [asyncio.create_task(post(store, sender)) for sender, store in stores]
            over = False
            while not over:
                over = all(task.done() for task in posting)  # what is read after that is the rest
                while page := await self.store.mail(NODE, after=seen[-1].key if seen else 0):
                    seen += page
                    await self.put(MailReceived(node=NODE, through=page[-1].key))
                await asyncio.sleep(0)
            await asyncio.gather(*posting)
        for sender in range(3):
            wanted = [b"%d %d" % (sender, number) for number in range(each)]
            of_sender = [message for _, message in seen if message.startswith(b"%d " % sender)]
            same(f"what was read of sender {sender}, of which the rest went unread", of_sender, wanted)
        same("keys in order", [key for key, _ in seen], sorted({key for key, _ in seen}))

    async def promise_10_mail_is_received_together_with_what_came_of_it_or_not_at_all(self) -> None:
        await self.put(SendMail(node=NODE, message=b"say it"))
        (mail,) = await self.store.mail(NODE)
        for _ in range(2):
            await self.accept(self.append(1), MailReceived(node=NODE, through=mail.key))
            same("mail and events", (await messages(self.store), await numbers(self.store)), ([], [1]))

    async def promise_10_a_message_for_an_unknown_node_is_refused_and_its_neighbours_are_not(self) -> None:
        lost, found = (SendMail(node=node, message=b"{}") for node in (NodeId("unknown"), NODE))
        refused(await self.put(self.append(1), lost, found), 1, why=NodeGone)
        same("mail and events", (await messages(self.store), await numbers(self.store)), ([b"{}"], [1]))

    async def promise_10_the_heir_gets_the_mail_of_the_node_it_buries(self) -> None:
        await self.store.join(OTHER)
        for number in range(3):
            await self.put(SendMail(node=OTHER, message=b"theirs %d" % number))
            await self.put(SendMail(node=NODE, message=b"ours %d" % number))
        ours = list(await self.store.mail(NODE))
        await self.store.leave(OTHER)
        await self.store.bury(OTHER, heir=NODE)
        inherited = [message for message in await messages(self.store) if message.startswith(b"theirs")]
        same("mail of the node that was buried", inherited, [b"theirs 0", b"theirs 1", b"theirs 2"])
        await self.put(MailReceived(node=NODE, through=ours[-1].key))
        same("mail that the heir had not seen", await messages(self.store), inherited)
        refused(await self.put(SendMail(node=OTHER, message=b"late")), 0, why=NodeGone)
        same("nodes", [node.id for node in await self.store.nodes()], [NODE])
        await self.store.bury(OTHER, heir=NODE)
        same("mail, after another burial", await messages(self.store), inherited)


class LivenessChecks(StreamCase):
    """Promises 11 and 15: which nodes are dead, and which hold what is not written."""

    now = 1_000.0
    """The time on a monotonic clock that stands still until a check sets it."""

    def _view(self, node: NodeId, store: Store | None = None) -> Liveness:
        return (store or self.store).liveness(node, lease=LEASE, monotonic=lambda: self.now)

    @asynccontextmanager
    async def _views(self) -> AsyncIterator[tuple[Store, Liveness, Liveness]]:
        """Another process, and how its node and this one see each other."""
        async with self.neighbour() as elsewhere:
            yield elsewhere, self._view(NODE), self._view(OTHER, elsewhere)

    async def promise_11_a_node_that_lives_is_never_dead(self) -> None:
        async with self._views() as (_, *views):
            for number in range(12):
                for view in views:
                    await view.beat(b'{"beat":%d}' % number)
                    same("dead nodes", await dead_nodes(view), [])
                    same("its own claim", view.node_claim.at(self.now), ClaimState.HOLDING)
                self.now += LEASE / 5
            facts = {node.id: node.facts for node in await self.store.nodes()}
            same("their facts", facts, dict.fromkeys((NODE, OTHER), b'{"beat":11}'))
            same("nodes of known age", set(views[0].ages()) >= {NODE}, True)

    async def promise_11_a_node_that_left_is_dead_until_it_is_buried(self) -> None:
        mine = self._view(NODE)
        await self.open_stream("read")
        async with self.elsewhere() as elsewhere:
            fence = await elsewhere.join(OTHER)
            await self.store.join(THIRD)
            theirs, third = self._view(OTHER, elsewhere), self._view(THIRD)
            left = a_stream(fence, "left behind", node=OTHER)
            reader = a_reader(stream="read", node=OTHER)
            accepted(await put(elsewhere, OpenStream(record=left), PutReader(record=reader)))
            for view in (mine, theirs, third):
                await view.beat(b"{}")
            same("dead nodes", await dead_nodes(mine), [])
            await elsewhere.leave(OTHER)
            same("dead nodes", await dead_nodes(mine), [OTHER])
            same("the claim of a node that left", theirs.node_claim.at(self.now), ClaimState.BURIED)
        same("what it wrote", list(await self.store.written_by(OTHER)), [left])
        claimed = await self.store.claim(left.id, node=NODE, held=left.fence)
        same("the stream that was claimed", claimed and replace(claimed, fence=fence, node=OTHER, generation=1), left)
        read = await self.store.bury(OTHER, heir=NODE)
        same("streams that it read", [stream.id for stream in read or ()], ["read"])
        same("their reader", await reader_of(self.store, StreamId("read")), None)
        same("dead nodes", await dead_nodes(mine), [])
        same("nodes", {node.id for node in await self.store.nodes()}, {NODE, THIRD})
        await self.store.leave(THIRD)

    async def promise_11_a_node_whose_claim_ran_out_goes_on_with_its_next_beat(self) -> None:
        """However long it was silent, as long as no node has buried it. The observer was silent as well, so it takes
        no node for dead."""
        async with self._views() as (_, *views):
            for leases in (1, 4, 100):
                self.now += leases * LEASE
                for view in views:
                    same(
                        "whether a node was buried in silence", view.node_claim.at(self.now) is ClaimState.BURIED, False
                    )
                for view in views:
                    await view.beat(b'{"leases":%d}' % leases)
                    same("its own claim, after a beat", view.node_claim.at(self.now), ClaimState.HOLDING)
                same("dead nodes", [await dead_nodes(view) for view in views], [[], []])

    async def promise_11_a_node_that_was_buried_knows_it_with_its_next_beat(self) -> None:
        """A store that finds a silent node dead by its lease buries it; one with locks never does, while its process
        lives."""
        async with self._views() as (_, mine, theirs):
            dead: list[NodeId] = []
            for number in range(7):
                await mine.beat(b'{"beat":%d}' % number)
                dead = await dead_nodes(mine)
                self.now += LEASE / 5
            for node in dead:
                await self.store.bury(node, heir=NODE)
            await theirs.beat(b'{"back":true}')
            claim = ClaimState.BURIED if dead else ClaimState.HOLDING
            same("the claim of the silent node", theirs.node_claim.at(self.now), claim)
            self.now += LEASE
            await theirs.beat(b'{"back":2}')
            same("its claim, later", theirs.node_claim.at(self.now), claim)
            same("nodes", {node.id for node in await self.store.nodes()}, {NODE} if dead else {NODE, OTHER})

    async def promise_11_a_node_that_has_beaten_since_is_not_buried(self) -> None:
        """It was found dead, and has come back before it could be buried."""
        await self.open_stream("read")
        async with self._views() as (elsewhere, _, theirs):
            await theirs.beat(b'{"beat":1}')
            seen = {node.id: node.beat for node in await self.store.nodes()}
            accepted(await put(elsewhere, PutReader(record=a_reader(stream="read", node=OTHER))))
            await self.accept(SendMail(node=OTHER, message=b"theirs"))
            await theirs.beat(b'{"beat":2}')
            same("streams it read", await self.store.bury(OTHER, heir=NODE, beat=seen[OTHER]), None)
            same("nodes", {node.id for node in await self.store.nodes()}, {NODE, OTHER})
            same("mail", (await messages(self.store, OTHER), await messages(self.store)), ([b"theirs"], []))
            reader = await reader_of(self.store, StreamId("read"))
            same("the node of the reader", reader and reader.node, OTHER)
            same("its own claim", theirs.node_claim.at(self.now), ClaimState.HOLDING)
        beats = {node.id: node.beat for node in await self.store.nodes()}
        read = await self.store.bury(OTHER, heir=NODE, beat=beats[OTHER])
        same("streams it read, once it is dead", [stream.id for stream in read or ()], ["read"])
        read = await self.store.bury(OTHER, heir=NODE, beat=beats[OTHER])
        same("streams it read, when it is buried again", list(read or ()), [])
        same("whether it was refused", read is None, False)

    async def promise_11_an_overview_shows_every_node_and_misses_nothing_that_waits(self) -> None:
        """It may say that something waits where nothing does, and never the reverse."""
        mine = self._view(NODE)
        await self.open_stream("theirs")
        async with self.elsewhere() as elsewhere:
            fence = await elsewhere.join(OTHER)
            theirs = self._view(OTHER, elsewhere)
            for view in (mine, theirs):
                await view.beat(b'{"told":true}')
            await self.accept(SendMail(node=NODE, message=b"one"), SendMail(node=NODE, message=b"two"))
            accepted(await put(elsewhere, OpenStream(record=a_stream(fence, "left behind", node=OTHER))))
            seen = await mine.overview(mail_after=0)
            same("nodes", list(seen.nodes), list(await self.store.nodes()))
            same("dead nodes", dict(seen.dead), {})
            same("whether mail waits", seen.has_mail, True)
            first, second = await self.store.mail(NODE)
            same("whether more mail waits", (await mine.overview(mail_after=first.key)).has_mail, True)
            await self.accept(MailReceived(node=NODE, through=second.key))
            forward = Forward(stream=StreamId("theirs"), node=OTHER, sender="s", first=1, payloads=(b"{}",))
            accepted(await put(elsewhere, forward))
            same("whether messages wait", (await mine.overview(mail_after=second.key)).has_forwarded, True)
            await elsewhere.leave(OTHER)
            seen = await mine.overview(mail_after=second.key)
        [beat] = [node.beat for node in seen.nodes if node.id == OTHER]
        same("dead nodes, each with its beat", dict(seen.dead), {OTHER: beat})

    async def promise_11_a_node_that_leaves_nothing_behind_is_gone(self) -> None:
        await self.store.join(OTHER)
        await self.store.leave(OTHER)
        same("nodes", [node.id for node in await self.store.nodes()], [NODE])
        same("dead nodes", await dead_nodes(self._view(NODE)), [])
        await self.store.leave(OTHER)

    async def promise_15_a_node_that_holds_is_named_until_it_holds_nothing_more(self) -> None:
        async with self._views() as (_, mine, theirs):
            same("holders, before any node is one", [list(await view.holders()) for view in (mine, theirs)], [[], []])
            for _ in range(2):
                theirs.hold(True)
                same("holders, as another node sees them", list(await mine.holders()), [OTHER])
                same("other holders, as the holder sees them", list(await theirs.holders()), [])
            mine.hold(True)
            same("two holders", [list(await mine.holders()), list(await theirs.holders())], [[OTHER], [NODE]])
            for view in (mine, theirs):
                view.hold(False)
                view.hold(False)
            try:  # another process may read the lock for a moment
                async with asyncio.timeout(self.patience):
                    while any([await view.holders() for view in (mine, theirs)]):
                        for view in (mine, theirs):
                            await dead_nodes(view)  # a round, as each node makes them
                        await asyncio.sleep(0.01)
            except TimeoutError:
                raise AssertionError("a node that holds nothing is still named") from None
            same("dead nodes", await dead_nodes(mine), [])

    async def promise_15_a_node_that_is_gone_holds_nothing(self) -> None:
        async with self._views() as (elsewhere, mine, theirs):
            theirs.hold(True)
            same("holders", list(await mine.holders()), [OTHER])
            await elsewhere.leave(OTHER)
            same("holders, when it has left", list(await mine.holders()), [])
            theirs.hold(True)
            same("holders, once a node that has left declares that it holds", list(await mine.holders()), [])
