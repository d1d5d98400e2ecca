"""Promises 1 to 7, 9 and 16 to 20: what goes into a stream comes out of it, one node at a time writes it, what is kept
and forgotten, failures, clocks, time limits, and how far readers have got."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace

from perdure._core.ids import Generation, Kind, NodeId, StreamId
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.errors import MailFull, NodeGone, SessionEnded, StoreError, StoreUnavailable
from perdure.store.interface import stream_by_id
from perdure.store.notes import probe
from perdure.store.records import FORWARDED_AT_ONCE, MAX_FORWARDED, MAX_FORWARDED_BYTES, READ_BYTES, Event, UsageRecord
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
    Reached,
    Refusals,
    Release,
    SendMail,
    Step,
    Trim,
)
from perdure.testing._case import Case, StreamCase, accepted, behind, refused, same
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
    an_append,
    an_ask,
    an_end,
    an_ended_session,
    some_events,
)


class LogChecks(StreamCase):
    """Promises 1 and 3 to 5: what goes into a stream comes out of it."""

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
                earlier, later = len(await self.numbers(one)), len(await self.numbers(other))
                assert later >= earlier, f"{one} had {earlier} events while {other} had {later} of the same commits"
        await writing

    async def promise_1_answer_seal_and_ends_of_calls_are_one_step(self) -> None:
        ends = tuple(an_end(id_) for id_ in (1, "one"))
        await self.accept(self.append(1, 2, final=True, ends=ends, seal=True))
        same("the stream", await self.record(), replace(a_stream(self.fence), last=2, sealed=True))
        calls = [(call.request_id, call.state) for call in await self.store.calls(SESSION)]
        same("the ledger", calls, [(1, CallState.ANSWERED), ("one", CallState.ANSWERED)])

    async def promise_3_what_was_committed_is_there_after_reopening(self) -> None:
        await self.open_stream("standalone", kind=Kind.STANDALONE)
        await self.put(self.append(1, 3), Trim(stream=STREAM, through=1))
        await self.put(OpenAsk(record=an_ask()), PutReader(record=a_reader(seq=2)))
        await self.claim("standalone")
        await self.put(SendMail(node=NODE, message=b"for later"))
        before = await self.picture()
        if await self.reopen():
            same("all that is there", await self.picture(), before)
            same("mail", await self.messages(), [b"for later"])

    async def promise_3_closing_writes_what_waits(self) -> None:
        waiting = [asyncio.create_task(self.store.commit([self.append(n)])) for n in range(1, 51)]
        await asyncio.sleep(0)
        if await self.reopen():
            for refusals in await asyncio.gather(*waiting):
                accepted(refusals)
            same("events", await self.numbers(), list(range(1, 51)))
        await asyncio.gather(*waiting)

    async def promise_4_events_are_read_once_and_in_order(self) -> None:
        for first in range(1, 300, 7):
            await self.accept(self.append(first, first + 6))
        wanted = list(some_events(1, 301))
        for page in (1, 2, 100, 301, 1_000):
            same(f"events by pages of {page}", await self.events(page=page), wanted)
        for after in (0, 1, 150, 300, 301, 10_000):
            same(f"events after {after}", await self.events(after=after), wanted[after:])
        same("events of a stream that is not there", list(await self.store.read(StreamId("no"), after=0, limit=9)), [])

    async def promise_4_streams_that_are_followed_show_what_reading_them_shows(self) -> None:
        """Their events and the revision of their session may be left out; what is given is as `read` gives it."""
        await self.open_stream("a", "b", "quiet")
        await self.accept(self.append(1, 9, stream="a"), self.append(1, 4, stream="b"))
        await self.accept(Trim(stream=StreamId("a"), through=2))
        await self.accept(self.append(5, 5, stream="b", final=True, seal=True))
        after = {StreamId("a"): 0, StreamId("b"): 3, StreamId("quiet"): 0, StreamId("not there"): 0}
        followed = await self.store.follow(after, limit=5)
        same(
            "the streams",
            {name: seen.record for name, seen in followed.items()},
            dict(await self.store.streams_by_id(list(after))),
        )
        record = await self.store.session(SESSION)
        for name, seen in followed.items():
            read = list(await self.store.read(name, after=after[name], limit=5))
            same(
                f"the events of {name}",
                None if seen.events is None else list(seen.events),
                None if seen.events is None else read,
            )
            same(f"the revision beside {name}", seen.revision in (None, record and record.revision), True)
        same("streams of no names", dict(await self.store.follow({}, limit=5)), {})

    async def promise_4_one_answer_is_bounded_in_bytes_and_the_rest_follows(self) -> None:
        quarter = READ_BYTES // 4
        sizes = [quarter] * 4 + [quarter - 1] * 5 + [2 * READ_BYTES] * 2 + [1]
        events = [Event(seq, 0.0, b"x" * size) for seq, size in enumerate(sizes, 1)]
        accepted(await self.store.commit([an_append(self.fence, events)]))
        answers: list[int] = []
        while answer := await self.store.read(STREAM, after=sum(answers), limit=100):
            answers.append(len(answer))
        same("events in each answer", answers, [4, 5, 1, 1, 1])
        same("events", await self.events(), events)

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
        same("events", await self.numbers(), list(range(1, 201)))

    async def promise_5_of_a_commit_that_is_partly_known_the_rest_is_added(self) -> None:
        await self.put(self.append(1, 3))
        await self.put(Trim(stream=STREAM, through=2))
        await self.accept(self.append(1, 5))
        same("events", await self.numbers(), [3, 4, 5])

    async def promise_5_a_call_keeps_its_first_end(self) -> None:
        for state in (CallState.CANCELLED, CallState.ANSWERED):
            unknown = CallEnd(incarnation=7, request_id=1, state=state)
            await self.accept(self.append(ends=(an_end(1, state), unknown)))
        states = [call.state for call in await self.store.calls(SESSION)]
        same("states", states, [CallState.CANCELLED, CallState.RUNNING])

    async def streams_are_found_by_their_ids_as_far_as_they_have_grown(self) -> None:
        await self.open_stream("a", "b")
        await self.put(self.append(1, 7, stream="b"))
        found = await self.store.streams_by_id([StreamId(name) for name in ("b", "no", "a")])
        same("streams", dict(found), {StreamId(name): await self.record(name) for name in ("a", "b")})
        same("streams of no names", dict(await self.store.streams_by_id([])), {})


class HistoryChecks(Case):
    """Promises 4 and 5 for a session from its beginning."""

    async def promise_4_any_payload_and_any_id_comes_back_as_it_was(self) -> None:
        payloads = [b"", b"\x00", b"a\r\nb\n\nc", bytes(range(256)), "ж\u2028😀".encode(), b"x" * (2 << 20)]
        ids: list[int | str] = [8, "9", -1, 0, 2**70, "", "\ud800", "a'b\"c\x00", "😀"]
        calls = tuple(a_call(id_) for id_ in ids)
        await self.put(PutSession(record=a_session()), OpenStream(record=a_stream(self.fence), calls=calls))
        events = [Event(seq, 0.25, payload) for seq, payload in enumerate(payloads, 1)]
        await self.accept(an_append(self.fence, events))
        same("payloads", [event.payload for event in await self.events()], payloads)
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
            self.append(4, 6, final=True, ends=(an_end(),), seal=True),
        ]
        await self._repeat(history, self.accept)
        before = await self.picture()
        await self.accept(history[1])
        same("all that is there, after opening again a stream that is open", await self.picture(), before)

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
            same(f"all that is there, after repeating from step {start}", await self.picture(), before)


class WriterChecks(StreamCase):
    """Promises 2 and 6: one node at a time writes a stream."""

    async def promise_2_a_stale_fence_is_refused_and_its_neighbours_are_not(self) -> None:
        await self.open_stream("taken", "ours")
        await self.put(self.append(1, stream="taken"))
        claimed = await self.claim("taken")
        refused(await self.put(self.append(2, stream="taken"), self.append(1, 2, stream="ours")), 0)
        same("events of the stream that was taken", await self.numbers("taken"), [1])
        same("events of its neighbour", await self.numbers("ours"), [1, 2])
        await self.accept(self.append(2, 3, fence=claimed.fence, stream="taken"))
        same("events of the new writer", await self.numbers("taken"), [1, 2, 3])

    async def promise_2_a_stale_fence_neither_seals_nor_ends_calls(self) -> None:
        await self.claim()
        refused(await self.put(self.append(ends=(an_end(),), seal=True)), 0)
        same("sealed", (await self.record()).sealed, False)
        same("the ledger", {call.state for call in await self.store.calls(SESSION)}, {CallState.RUNNING})

    async def promise_2_a_stream_that_is_gone_sealed_or_elsewhere_is_not_appended_to(self) -> None:
        behind(await self.put(self.append(1, stream="never opened")), 0)
        await self.accept(self.append(1, final=True, seal=True))
        for lost in (False, True):
            for events in ((2, 2), (4, 4)):
                refused(await self.put(self.append(*events, lost=lost)), 0)
        same("events", await self.numbers(), [1])
        await self.put(DropStream(stream=STREAM))
        for lost in (False, True):
            behind(await self.put(self.append(2, lost=lost)), 0)

    async def promise_2_an_append_that_leaves_a_hole_is_refused_and_learns_how_far_the_store_is(self) -> None:
        behind(await self.put(self.append(2)), 0)
        behind(await self.put(an_append(self.fence, [*some_events(1, 1), *some_events(3, 3)])), 0)
        await self.accept(self.append(1, 3))
        await self.put(Trim(stream=STREAM, through=2))
        behind(await self.put(self.append(9, 12, final=True, ends=(an_end(),), seal=True)), 3)
        same("events", await self.numbers(), [3])
        same("the stream", await self.record(), replace(a_stream(self.fence), last=3))
        same("the ledger", {call.state for call in await self.store.calls(SESSION)}, {CallState.RUNNING})
        await self.accept(self.append(4))

    async def promise_2_a_hole_does_not_hide_that_another_writer_is_there(self) -> None:
        """Nor does it help the writer that was there before to say that the store has lost something."""
        await self.put(self.append(1, 2))
        claimed = await self.claim()
        for lost in (False, True):
            refused(await self.put(self.append(9, lost=lost)), 0)
        await self.accept(Release(stream=STREAM, fence=claimed.fence))
        for lost in (False, True):
            refused(await self.put(self.append(9, fence=claimed.fence, lost=lost)), 0)
        same("events", await self.numbers(), [1, 2])

    async def promise_4_the_writer_of_a_store_that_lost_events_goes_on_with_a_hole(self) -> None:
        """No number names another event: what is below the end stays as it is, and so does the hole."""
        await self.put(self.append(1, 3))
        ends = tuple(an_end(id_) for id_ in (1, "one"))
        for _ in range(2):
            await self.accept(self.append(9, 11, lost=True))
            same("events", await self.numbers(), [1, 2, 3, 9, 10, 11])
        await self.accept(self.append(2, 10, time=5.0, lost=True))
        same("events", await self.events(), [*some_events(1, 3), *some_events(9, 11)])
        same("events behind the hole", await self.events(after=5), list(some_events(9, 11)))
        await self.reopen()
        same("the highest number", (await self.record()).last, 11)
        behind(await self.put(self.append(14)), 11)
        await self.accept(self.append(12))
        await self.accept(self.append(20, 21, final=True, ends=ends, seal=True, lost=True))
        same("events", await self.numbers(), [1, 2, 3, 9, 10, 11, 12, 20, 21])
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
            same("events", await self.numbers(), [8, 9])
            same("the stream", await self.record(), replace(a_stream(self.fence), last=9, sealed=True))
        calls = [(call.request_id, call.state) for call in await self.store.calls(SESSION)]
        same("the ledger", calls, [(1, CallState.ANSWERED), ("one", CallState.ANSWERED)])

    async def promise_2_a_call_is_changed_by_its_writer_alone(self) -> None:
        again = a_put_call(self.fence, attempt=2, progress=0.5)
        await self.accept(again, replace(again, request_id="unknown"))
        changed = replace(a_call(1), state=CallState.WAITING, attempt=2, progress=0.5)
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

    async def promise_2_a_stream_is_let_go_of_by_its_writer_alone(self) -> None:
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
        assert first is not None, "a stream that is there can be claimed"
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
        for number in range(30):
            node = NodeId(f"node-{number % 10}")
            async with self.elsewhere() as elsewhere:
                fences.append(await elsewhere.join(node))
                fences.append((await self.claim()).fence)
                await elsewhere.leave(node)
            if number % 10 == 0:
                await self.reopen()
        same("different fences", len(set(fences)), len(fences))
        same("fences that do not fit 63 bits", [fence for fence in fences if not 0 <= fence < 1 << 63], [])

    async def promise_6_fences_are_not_counted(self) -> None:
        """A counter gives the same again, once the store has lost what it gave out last."""
        fences: list[int] = []
        for number in range(20):
            name = StreamId(f"same story {number}")
            await self.open_stream(name)
            claimed = await self.store.claim(name, node=NODE, held=self.fence)
            assert claimed is not None, "a stream that is there can be claimed"
            same("the generation", claimed.generation, 2)
            fences.append(claimed.fence)
        ordered = [later - earlier for earlier, later in itertools.pairwise(fences)]
        assert len(set(ordered)) > 1, f"fences follow each other, so a store that lost some gives them again: {fences}"

    async def promise_6_of_several_claims_one_succeeds(self) -> None:
        async with self.elsewhere() as elsewhere:
            for _ in range(10):
                held = (await self.record()).fence
                claimers = [(self.store, NODE), (elsewhere, OTHER)] * 2
                claims = [store.claim(STREAM, node=node, held=held) for store, node in claimers]
                claimed = [record for record in await asyncio.gather(*claims) if record is not None]
                same("the one that has it, in the end", [await self.record()], claimed)

    async def promise_6_a_claim_with_another_fence_takes_nothing(self) -> None:
        claimed = await self.claim()
        same("a claim with a fence that is gone", await self.store.claim(STREAM, node=OTHER, held=self.fence), None)
        same("the stream", await self.record(), claimed)
        same("the ended generations", list(await self.store.generations(STREAM)), [Generation(generation=1, end=0)])

    async def promise_6_what_is_sealed_or_gone_is_not_claimed(self) -> None:
        await self.accept(self.append(1, final=True, seal=True))
        same("claiming what is sealed", await self.store.claim(STREAM, node=OTHER, held=self.fence), None)
        same("the writer", (await self.record()).node, NODE)
        await self.put(DropStream(stream=STREAM))
        same("claiming what is gone", await self.store.claim(STREAM, node=OTHER, held=self.fence), None)

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
            same("events", await self.numbers(), [1, 2])
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
        same("what another sender of the node says", await self._waiting(), [b"again"])

    async def promise_16_no_message_is_taken_before_its_predecessor(self) -> None:
        await self.accept(self._forward(b"1"))
        behind(await self.put(self._forward(b"3", first=3)), 1)
        behind(await self.put(self._forward(b"2", first=2, sender="another")), 0)
        await self.accept(self._forward(b"2", b"3", first=2))
        same("what waits", await self._waiting(), [b"1", b"2", b"3"])

    async def promise_16_what_waits_for_a_stream_has_a_limit_in_messages(self) -> None:
        await self.open_stream("another")
        await self.accept(self._forward(*[b"x"] * (MAX_FORWARDED - 1)))
        await self.accept(self._forward(b"last", node=NODE, sender="ours"))
        refused(await self.put(self._forward(b"too much", first=MAX_FORWARDED)), 0, why=MailFull)
        same("messages that wait", len(await self._waiting()), MAX_FORWARDED)
        await self.accept(self._forward(b"theirs", stream="another"))
        first = (await self.store.forwarded(STREAM))[0].key
        await self.accept(self.append(1, taken=first))
        await self.accept(self._forward(b"room again", first=MAX_FORWARDED))

    async def promise_16_what_waits_for_a_stream_has_a_limit_in_bytes(self) -> None:
        """One sender alone may say more at once: it would wait for ever otherwise."""
        half = b"x" * (MAX_FORWARDED_BYTES // 2)
        await self.accept(self._forward(half), self._forward(half, first=2))
        refused(await self.put(self._forward(b"x", first=3)), 0, why=MailFull)
        await self.open_stream("another")
        await self.accept(self._forward(half, half, b"x", stream="another"))
        refused(await self.put(self._forward(b"x", first=4, stream="another")), 0, why=MailFull)

    async def promise_16_a_message_for_a_stream_that_no_node_writes_is_refused(self) -> None:
        await self.accept(self._forward(b"1"))
        same("streams of the writer", [s.id for s in await self.store.forwarded_to(NODE)], [STREAM])
        same("streams of another node", [s.id for s in await self.store.forwarded_to(OTHER)], [])
        await self.accept(Release(stream=STREAM, fence=self.fence))
        refused(await self.put(self._forward(b"2", first=2)), 0, why=NodeGone)
        await self.accept(self._forward(b"1"))  # it is there already
        same("streams that no node writes", [s.id for s in await self.store.forwarded_to(OTHER)], [STREAM])
        await self.put(DropStream(stream=STREAM))
        refused(await self.put(self._forward(b"2", first=2)), 0, why=SessionEnded)
        same("what waits for a stream that is gone", await self._waiting(), [])
        same("streams for which messages wait", list(await self.store.forwarded_to(NODE)), [])

    async def promise_16_a_writer_that_was_buried_is_no_writer(self) -> None:
        await self.store.join(OTHER)
        await self.store.claim(STREAM, node=OTHER, held=(await self.record()).fence)
        await self.accept(self._forward(b"1", node=NODE))
        same("streams of the dead", [s.id for s in await self.store.forwarded_to(NODE)], [])
        await self.store.leave(OTHER)
        await self.store.bury(OTHER, heir=NODE)
        refused(await self.put(self._forward(b"2", first=2, node=NODE)), 0, why=NodeGone)
        same("streams without a writer", [s.id for s in await self.store.forwarded_to(NODE)], [STREAM])


"""Seconds that a store has which does not keep its time by itself."""


class ForgettingChecks(StreamCase):
    """Promise 7, and what is known of streams that are over or unread."""

    async def promise_7_trimming_leaves_the_answers(self) -> None:
        answers = some_events(1, 3, final=True) + some_events(4, 6, final=True)
        await self.put(an_append(self.fence, answers, seal=True))
        for through in (5, 1_000):
            await self.put(Trim(stream=STREAM, through=through))
            same("events", await self.numbers(), [3, 6])
        same("the highest number ever", (await self.record()).last, 6)

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
        same("events of the dropped stream", await self.numbers("dropped"), [])
        await self.put(EndSession(session=SESSION, time=9.0, reason="why"))
        ended = an_ended_session(active=9.0, ended="why")
        lists = ("streams", "calls", "asks", "kept", "unread")
        nothing: dict[str, object] = {f"{SESSION}: {what}": [] for what in lists}
        nothing["notes"] = {}
        same("all that is there", await self.picture(), {"sessions": [ended]} | nothing)
        same("its reader", await self.store.reader(STREAM), None)

    async def promise_7_sweeping_forgets_events_before_answers_and_sessions_last(self) -> None:
        await self.put(ChangeSession(session=SESSION, active=30.0))
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
        same("all that is there", await self.picture(), before)
        same("mail", await self.messages(), [])
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
        same("a session used since", len(await self.sessions()), 1)
        await self.put(end)
        same("its end", [session.ended for session in await self.sessions()], ["why"])

    async def promise_17_what_is_not_used_may_be_swept(self) -> None:
        """A node that is buried uses nothing, whatever it left behind."""
        node = NodeId("another")
        fence = await self.store.join(node)
        record = a_stream(fence, "home", kind=Kind.STANDALONE, node=node)
        await self.put(PutSession(record=a_session(active=5.0)), OpenStream(record=record))
        await self.store.sweep(Cutoffs(events=80.0, answers=80.0))
        same("sessions of a node that is there", len(await self.sessions()), 1)
        await self.store.bury(node, heir=NODE)
        await self.store.sweep(Cutoffs(events=80.0, answers=80.0))
        same("sessions of a node that is buried", await self.sessions(), [])

    async def _is_left_alone(self, end: EndSession, what: str) -> None:
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
        same("events, when it goes on", await self.numbers(), [1])

    async def the_newest_reader_stays_when_an_older_one_leaves(self) -> None:
        await self.put(PutReader(record=a_reader("old")), PutReader(record=a_reader("new", seq=3)))
        await self.put(PutReader(record=a_reader("old", seq=9), attaches=False))
        await self.put(LeaveReader(stream=STREAM, reader="old"))
        same("the reader", await self.store.reader(STREAM), a_reader("new", seq=3))
        await self.put(PutReader(record=a_reader("new", seq=5), attaches=False))
        same("the reader that has got further", await self.store.reader(STREAM), a_reader("new", seq=5))
        await self.put(LeaveReader(stream=STREAM, reader="new"))
        same("the reader", await self.store.reader(STREAM), None)
        await self.put(PutReader(record=a_reader(stream="not there")))
        await self.put(OpenAsk(record=an_ask(stream="not there")))
        same("the reader of no stream", await self.store.reader(StreamId("not there")), None)
        same("asks of no stream", list(await self.store.asks(SESSION)), [])

    async def promise_19_how_far_readers_have_got_only_moves_forward(self) -> None:
        """Whichever node tells it, and in whatever order: a reader from further back takes nothing away."""
        await self.put(self.append(1, 5))
        for through, reached in ((2, 2), (1, 2), (4, 4), (9, 5)):
            await self.put(Reached(stream=STREAM, generation=1, through=through))
            same(f"how far readers have got, told {through}", (await self.record()).delivered, reached)
        await self.put(Reached(stream=StreamId("not there"), generation=1, through=1))
        same("the stream that is not there", await stream_by_id(self.store, StreamId("not there")), None)

    async def promise_19_an_event_in_the_place_of_a_lost_one_is_unread(self) -> None:
        """A reader was shown 5, of which the store got 3; another writer gave the numbers 4 and 5 to other events."""
        await self.put(self.append(1, 3))
        claimed = await self.claim()
        await self.put(self.append(4, 6, fence=claimed.fence))
        for what, generation, reached in (("the lost ones", 1, 3), ("what never was", 7, 3), ("the new ones", 2, 5)):
            await self.put(Reached(stream=STREAM, generation=generation, through=5))
            same(f"how far readers have got, told of {what}", (await self.record()).delivered, reached)
