"""Promises 8, 10 to 15 and 21: sessions, their calls, chains and limits; hints, mail, which nodes are dead, and which
hold what is not written."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from perdure._core import sticky
from perdure._core.ids import Kind, NodeId, RecordKind, SessionId, StreamId
from perdure._core.retention import MAX_ENDED_OF_CALLER, MAX_ENDED_PARAMS, Cutoffs
from perdure._core.states import CallState, ClaimState, SessionState, SessionStep
from perdure.errors import IdTaken, MailFull, NodeGone, SessionEnded, StaleRecord, TooManyCalls, TooManySessions
from perdure.store.interface import Inspect, Liveness, Store, open_call
from perdure.store.records import (
    MAIL_AT_ONCE,
    MAX_MAIL,
    CallSnapshot,
    Event,
    Loaded,
    Mail,
    OpenCall,
    Outline,
    SessionRecord,
)
from perdure.store.steps import (
    Append,
    ChangeSession,
    EndSession,
    Forward,
    MailReceived,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
    Reached,
    SendMail,
    SessionLimits,
    StepRejected,
    Trim,
)
from perdure.testing._case import Case, SessionCase, StreamCase, accepted, refused, same
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    STREAM,
    a_call,
    a_put_call,
    a_reader,
    a_session,
    a_single_call,
    a_sticky,
    a_stream,
    an_append,
    an_ask,
    an_end,
    an_ended_session,
    count_open,
    dead_nodes,
    messages,
    put,
    some_events,
)


def _listed(kept: CallSnapshot | None) -> CallSnapshot | None:
    return kept and kept._replace(recent=tuple(kept.recent), asks=tuple(kept.asks))


def _unowned(name: str, address: str) -> SessionRecord:
    return replace(a_session(name, owner=""), address=address)


class CallChecks(SessionCase):
    """Promises 12 and 21, and what 14 says of calls."""

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
        same("all that is there", await self.picture(), before)
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

    async def promise_12_of_several_writers_one_opens_a_stream_whose_name_they_all_know(self) -> None:
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
        same("all that is there", await self.picture(), before)
        await self.accept(ChangeSession(session=SESSION, state=SessionState.DORMANT))
        await self.accept(seen)  # it is there already
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
        same("a session that is not there", await self.store.load(SessionId("not there")), None)
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

    async def a_session_is_changed_where_something_is_said_and_nowhere_else(self) -> None:
        record = replace(a_session(state=SessionState.OPENING), version="", result=b"", initialized=False, active=5.0)
        await self.put(PutSession(record=record), PutSession(record=a_session()))
        same("a session that was put twice", await self.store.session(SESSION), record)
        for change, changed in (
            (ChangeSession(session=SESSION), {}),
            (ChangeSession(session=SESSION, state=SessionState.ACTIVE), {"state": SessionState.ACTIVE}),
            (ChangeSession(session=SESSION, version="2025-06-18"), {"version": "2025-06-18"}),
            (ChangeSession(session=SESSION, result=b"{}"), {"result": b"{}"}),
            (ChangeSession(session=SESSION, initialized=True), {"initialized": True}),
            (ChangeSession(session=SESSION, active=7.5), {"active": 7.5}),
            (ChangeSession(session=SESSION, active=6.0), {}),
            (ChangeSession(session=SESSION, result=b"", initialized=False), {"result": b"", "initialized": False}),
        ):
            await self.accept(change, ChangeSession(session=SessionId("unknown"), active=9.0))
            record = replace(record, **changed)
            same("the session", await self.store.session(SESSION), record)
        same("sessions", [session.id for session in await self.sessions()], [SESSION])

    async def sessions_are_listed_by_id_a_page_at_a_time(self) -> None:
        ids = [f"s{number:02d}" for number in range(25)]
        await self.put(*(PutSession(record=a_session(id_)) for id_ in reversed(ids)))
        same("a page", [session.id for session in await self.store.sessions(after=None, limit=3)], ids[:3])
        same("all pages", [session.id for session in await self.sessions(page=4)], ids)
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
        same("of none", await self.store.longest_dormant(), None)
        for name, state, active in (
            ("young", SessionState.DORMANT, 9.0),
            ("old", SessionState.DORMANT, 5.0),
            ("older, and active", SessionState.ACTIVE, 1.0),
        ):
            await self.put(PutSession(record=a_session(name, state=state, active=active)))
        same("the first", await self.store.longest_dormant(), a_session("old", state=SessionState.DORMANT, active=5.0))
        await self.put(EndSession(session=SessionId("old"), time=0.0, reason="why"))
        same("the next", await self.store.longest_dormant(), a_session("young", state=SessionState.DORMANT, active=9.0))

    async def the_longest_dormant_session_of_one_caller_is_its_own(self) -> None:
        dormant = SessionState.DORMANT
        records = [
            a_session("of alice", owner="alice", state=dormant, active=2.0),
            a_session("of bob", owner="bob", state=dormant, active=1.0),
            replace(_unowned("of here", "192.0.2.1"), state=dormant, active=3.0),
            replace(_unowned("of there", "192.0.2.2"), state=dormant, active=4.0),
        ]
        await self.put(*(PutSession(record=record) for record in records))
        callers = (("alice", ""), ("bob", ""), ("", "192.0.2.1"), ("", "192.0.2.2"))
        same("each caller's", [await self.store.longest_dormant(*caller) for caller in callers], records)
        same("of all", await self.store.longest_dormant(), records[1])
        same("of a stranger", await self.store.longest_dormant("carol"), None)


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
        change = self.store.change_note
        async with self.elsewhere() as elsewhere:
            same("a change of none", await change("n", seen=b"0", value=b"1"), False)
            same("the first value", await elsewhere.change_note("n", seen=None, value=b"1"), True)
            same("another first value", await change("n", seen=None, value=b"2"), False)
            same("the second value", await change("n", seen=b"1", value=b"2"), True)
            same("a change from before that", await elsewhere.change_note("n", seen=b"1", value=b"3"), False)
            same("an end from before that", await elsewhere.change_note("n", seen=b"1", value=None), False)
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

    async def promise_13_a_change_survives_a_reopening(self) -> None:
        await self.store.change_note("n", seen=None, value=b"1")
        await self.store.change_note("n", seen=b"1", value=b"2")
        if await self.reopen():
            same("the note", dict(await self.store.notes("n")), {"n": b"2"})

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
        same("reattaching what is not there", await self.store.reattach(SessionId("unknown")), None)

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
        same("why", (type(full), getattr(full, "of_caller", None)), (TooManySessions, False))
        same("why its stream is refused", type(gone), SessionEnded)
        same("sessions", [session.id for session in await self.sessions()], ["a", "b"])
        await self.accept(first)  # it is there already (5)
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
            [full] = await self.put(PutSession(record=more, limits=limits))
            same("why", (type(full), getattr(full, "of_caller", None)), (TooManySessions, True))
            await self.accept(PutSession(record=other, limits=limits))
            for record in (mine, other):
                await self.put(EndSession(session=record.id, time=1.0, reason="why"))
        [*within, full] = await self.put(*(PutSession(record=_unowned(name, ""), limits=limits) for name in "ghij"))
        accepted(within)
        same("why", (type(full), getattr(full, "of_caller", None)), (TooManySessions, False))

    async def promise_14_of_many_that_come_at_once_so_many_get_in(self) -> None:
        limits = SessionLimits(total=3, caller=3)
        async with self.elsewhere() as other:
            puts = [PutSession(record=a_session(f"s{number:02d}"), limits=limits) for number in range(20)]
            commits = [store.commit([put]) for store, put in zip([self.store, other] * 10, puts, strict=True)]
            refusals = [refusal for [refusal] in await asyncio.gather(*commits)]
        same("refused", sum(isinstance(refusal, TooManySessions) for refusal in refusals), 17)
        same("open sessions", await count_open(self.store), 3)
        same("of their owner", [session.owner for session in await self.sessions()], ["owner"] * 3)

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
        kept = [session.id for session in await self.sessions(page=500)]
        same("kept records", kept, sorted(["another's", *names[1:]]))


THIRD = NodeId("third")
LEASE = 15.0


class SingleCallChecks(Case):
    """What is promised of requests that have no session of their own."""

    async def promise_22_single_calls_and_sessions_are_counted_and_limited_apart(self) -> None:
        limits = SessionLimits(total=1, caller=1), SessionLimits(total=None, caller=1)
        records = a_session("s", owner="alice"), a_single_call("c", owner="alice")
        for record, limit in zip(records, limits, strict=True):
            await self.accept(PutSession(record=record, limits=limit))
        for more, limit in zip(
            (a_session("s2", owner="alice"), a_single_call("c2", owner="alice")), limits, strict=True
        ):
            [full] = await self.put(PutSession(record=more, limits=limit))
            same("why", (type(full), getattr(full, "of_caller", None)), (TooManySessions, True))
        await self.accept(PutSession(record=a_single_call("c3", owner="bob"), limits=limits[1]))
        [full] = await self.put(PutSession(record=a_session("s3", owner="bob"), limits=limits[0]))
        same("why", (type(full), getattr(full, "of_caller", None)), (TooManySessions, False))
        same("the record", await self.store.session(records[1].id), records[1])
        for kind, count in ((RecordKind.SESSION, 1), (RecordKind.CALL, 2)):
            same(f"each {kind.value}", dict(await self.store.count_states(kind)), {SessionState.ACTIVE: count})

    async def promise_22_a_single_call_that_ends_leaves_no_record(self) -> None:
        fence, call = await self.store.join(NODE), a_single_call()
        opened = OpenStream(record=a_stream(fence, session=call.id), calls=(a_call(session=call.id),))
        await self.accept(PutSession(record=call), opened)
        end = EndSession(session=call.id, time=1.0, reason="why")
        await self.accept(end)
        await self.accept(end)
        same("the record", await self.store.session(call.id), None)
        same("its streams", list(await self.store.streams(call.id)), [])
        same("how many", dict(await self.store.count_states(RecordKind.CALL)), {})
        refused(await self.put(opened), 0, why=SessionEnded)

    async def promise_22_a_single_call_is_given_up_and_swept_by_its_own_time(self) -> None:
        old, young = (
            a_single_call(name, state=SessionState.DORMANT, active=at) for name, at in (("o", 5.0), ("y", 9.0))
        )
        session = a_session("s", state=SessionState.DORMANT, active=1.0)
        await self.accept(*(PutSession(record=record) for record in (old, young, session)))
        same("the call", await self.store.longest_dormant(kind=RecordKind.CALL), old)
        same("the caller's call", await self.store.longest_dormant("owner", kind=RecordKind.CALL), old)
        same("the session", await self.store.longest_dormant(), session)
        await self.store.sweep(Cutoffs(events=0.0, answers=0.0, calls=7.0))
        same("what is left", [record.id for record in await self.sessions()], ["s", "y"])
        await self.store.sweep(Cutoffs(events=3.0, answers=3.0, calls=7.0))
        same("what is left", [record.id for record in await self.sessions()], ["y"])

    async def promise_22_records_that_are_no_sessions_are_counted_apart_and_leave_nothing(self) -> None:
        others = [replace(a_single_call(name), kind=RecordKind.KEY) for name in ("k", "l")]
        await self.accept(*(PutSession(record=record) for record in (a_single_call("c"), *others)))
        for record in others:
            same("the record", await self.store.session(record.id), record)
            same("how many", dict(await self.store.count_states(record.kind)), {record.state: 2})
            same("of the caller", await self.store.count_of("owner", "", kind=record.kind), 2)
            same("of another", await self.store.count_of("owner", "elsewhere", kind=record.kind), 0)
            same("as a call", (await self.store.single_call(record.id, recent=1)), CallSnapshot(record, None))
        same("the calls", dict(await self.store.count_states(RecordKind.CALL)), {SessionState.ACTIVE: 1})
        await self.accept(EndSession(session=others[0].id, time=1.0, reason="why"))
        same("what is left", [record.id for record in await self.sessions()], ["c", "l"])
        await self.store.sweep(Cutoffs(events=0.0, answers=0.0, calls=math.inf))
        same("what is left", [record.id for record in await self.sessions()], [])

    async def promise_22_a_call_that_was_given_up_leaves_its_key(self) -> None:
        """In one commit; a request with the same key opens no stream behind it (21)."""
        fence, call = await self.store.join(NODE), a_single_call(state=SessionState.DORMANT)
        opened = OpenStream(
            record=a_stream(fence, session=call.id), calls=(a_call(session=call.id),), seen=0, unique=True
        )
        await self.accept(PutSession(record=call), opened)
        key = replace(call, kind=RecordKind.KEY, digest=b"digest", result=b"", client_params=b"", revision=1)
        end = EndSession(session=call.id, time=1.0, reason="why", unused_since=call.active)
        await self.accept(end, PutSession(record=key))
        same("a call in use", await self.store.session(call.id), call)
        await self.accept(self.append(1, fence=fence, final=True, ends=(an_end(),), seal=True))
        await self.accept(end, PutSession(record=key))
        found = await self.store.session(call.id)
        same("the key", (found, None if found is None else found.revision), (key, 1))
        refused(await self.put(PutSession(record=call), opened), 1, why=StaleRecord)
        same("its streams", list(await self.store.streams(call.id)), [])

    async def promise_22_the_calls_of_a_caller_that_were_delivered_are_found_first(self) -> None:
        fence = await self.store.join(NODE)
        for name, at in (("a", 1.0), ("b", 2.0)):
            call = a_single_call(name, state=SessionState.DORMANT, active=at)
            stream = a_stream(fence, f"of {name}", session=call.id)
            opened = OpenStream(record=stream, calls=(a_call(session=call.id, stream=stream.id),))
            await self.accept(PutSession(record=call), opened)
            await self.accept(self.append(1, stream=stream.id, fence=fence, final=True, ends=(an_end(),), seal=True))
        longest = partial(self.store.longest_dormant, "owner", kind=RecordKind.CALL)
        unread = Reached(stream=StreamId("of a"), generation=1, through=0, unread=True)
        await self.accept(unread)
        for delivered, name in ((False, "a"), (True, "b")):
            found = await longest(delivered=delivered)
            same(f"delivered: {delivered}", None if found is None else found.id, name)
        await self.accept(replace(unread, stream=StreamId("of b")))
        same("none", await longest(delivered=True), None)
        kept = await self.store.bytes_of("owner", "")
        await self.accept(EndSession(session=SessionId("a"), time=1.0, reason="why"))
        less = await self.store.bytes_of("owner", "")
        same("bytes", 0 < less < kept, True)
        same("of another", await self.store.bytes_of("owner", "elsewhere"), 0)

    async def promise_22_a_single_call_is_shown_as_its_pieces_show_it(self) -> None:
        """What is read in one go is what other reads give piece by piece."""
        fence, call = await self.store.join(NODE), a_single_call()
        opened = OpenStream(record=a_stream(fence, session=call.id), calls=(a_call(session=call.id),))
        ask = an_ask(session=call.id)
        same("a call that is not there", await self.store.single_call(call.id, recent=3), None)
        await self.accept(PutSession(record=call), opened, PutSession(record=a_session()))
        seen = CallSnapshot(a_session(), None)
        same("a session", await self.store.single_call(SESSION, recent=3), seen)
        seen = CallSnapshot(call, opened.calls[0], (), ())
        same("a call that has said nothing", _listed(await self.store.single_call(call.id, recent=3)), seen)
        said = some_events(1, 5, time=1.0)
        await self.accept(an_append(fence, said), OpenAsk(record=ask))
        seen = CallSnapshot(call, opened.calls[0], said[2:], (ask,))
        same("a call that runs", _listed(await self.store.single_call(call.id, recent=3)), seen)
        final = Event(6, 2.0, b"answer", True)
        await self.accept(an_append(fence, (final,), ends=(an_end(),), seal=True))
        ended = replace(opened.calls[0], state=CallState.ANSWERED, request=b"")
        seen = CallSnapshot(call, ended, (final,), ())
        same("a call that has ended", _listed(await self.store.single_call(call.id, recent=3)), seen)

    async def a_call_keeps_its_name_and_what_stands_for_its_request_when_it_has_ended(self) -> None:
        fence, call = await self.store.join(NODE), a_single_call()
        row = replace(a_call(session=call.id), digest=bytes(range(32)), name="\ud800 bake")
        opened = OpenStream(record=a_stream(fence, session=call.id), calls=(row,))
        await self.accept(PutSession(record=call), opened)
        await self.accept(ChangeSession(session=call.id, state=SessionState.DORMANT, active=3.0))
        final = Event(1, 1.0, b"answer", True)
        await self.accept(Append(stream=STREAM, fence=fence, events=(final,), ends=(an_end(),), seal=True))
        await self.reopen()
        ended = replace(row, state=CallState.ANSWERED, request=b"")
        same("the row", list(await self.store.calls(call.id)), [ended])


class InspectChecks(SessionCase):
    """The lists of a store that operators can look at."""

    async def set_up(self) -> None:
        pass

    def _inspect(self) -> Inspect | None:
        return cast("Inspect", self.store) if hasattr(self.store, "newest") else None

    async def the_newest_records_are_outlined_and_found_by_their_ids(self) -> None:
        if (inspect := self._inspect()) is None:
            return
        fence, task = await self.store.join(NODE), replace(a_single_call("ab", owner="\ud83d bob"), active=9.5)
        ended = replace(a_single_call("c", state=SessionState.DORMANT), active=8.5)
        over = an_ended_session("ac", active=7.5, ended="over")
        records = [task, ended, over, a_session("b", active=6.5), a_session("a", owner="alice", active=6.5)]
        records.append(a_session("d", state=SessionState.DORMANT, active=5.5))
        await self.accept(*(PutSession(record=record) for record in reversed(records)))
        for record in (task, ended):
            name = f"of {record.id}"
            calls = (a_call(session=record.id, stream=name),)
            await self.accept(OpenStream(record=a_stream(fence, name, session=record.id), calls=calls))
        await self.accept(self.append(1, stream="of c", fence=fence, final=True, ends=(an_end(),), seal=True))
        states = {task.id: CallState.RUNNING, ended.id: CallState.ANSWERED}
        records[3:5] = records[4:2:-1]  # of one moment, by their ids
        wanted = [Outline(r.id, r.owner, r.state, r.initialized, r.active, r.kind, states.get(r.id)) for r in records]
        same("all", list(await inspect.newest(limit=9)), wanted)
        same("some", list(await inspect.newest(limit=3)), wanted[:3])
        with_prefix = [one for one in wanted if one.id.startswith("a")]
        same("with a prefix", list(await inspect.newest(limit=9, prefix="a")), with_prefix)
        same("the newest of them", list(await inspect.newest(limit=1, prefix="a")), with_prefix[:1])
        same("with a whole id", list(await inspect.newest(limit=9, prefix="ab")), with_prefix[:1])
        same("with no id", list(await inspect.newest(limit=9, prefix="abc")), [])

    async def calls_that_have_not_ended_are_listed_by_their_sessions(self) -> None:
        if (inspect := self._inspect()) is None:
            return
        fence = await self.store.join(NODE)
        same("of none", list(await inspect.open_calls(limit=9)), [])
        for name in ("c", "b", "a"):
            calls = (a_call(session=name, stream=f"of {name}"),)
            opened = OpenStream(record=a_stream(fence, f"of {name}", session=name), calls=calls)
            await self.accept(PutSession(record=a_session(name)), opened)
        await self.accept(self.append(1, stream="of b", fence=fence, final=True, ends=(an_end(),), seal=True))
        await self.accept(replace(a_put_call(fence, attempt=2), stream=StreamId("of c")))
        running = OpenCall(SessionId("a"), StreamId("of a"), "tools/call", CallState.RUNNING, 1, NODE)
        waiting = OpenCall(SessionId("c"), StreamId("of c"), "tools/call", CallState.WAITING, 2, NODE)
        same("all", list(await inspect.open_calls(limit=9)), [running, waiting])
        same("some", list(await inspect.open_calls(limit=1)), [running])

    async def the_extent_tells_how_many_events_there_are_and_since_when(self) -> None:
        if (inspect := self._inspect()) is None:
            return
        fence = await self.store.join(NODE)
        same("of nothing", (await inspect.extent())[1::2], (0, None))
        await self.accept(PutSession(record=a_session()), OpenStream(record=a_stream(fence), calls=(a_call(),)))
        await self.accept(self.append(1, 2, fence=fence, time=4.0), self.append(3, fence=fence, time=5.0, final=True))
        same("events, and the oldest", (await inspect.extent())[1::2], (3, 4.0))
        await self.accept(Trim(stream=STREAM, through=2))
        extent = await inspect.extent()
        same("events behind a trim", extent.events, 1 if extent.is_exact else max(extent.events, 1))
        same("the oldest behind a trim", extent.oldest, 5.0)


class MailChecks(StreamCase):
    """Promises 8 and 10: hints and mail."""

    async def promise_8_reading_tells_the_truth_with_and_without_a_listener(self) -> None:
        stop = self.store.subscribe(NODE, lambda streams: None)
        await self.put(self.append(1))
        same("events while listening", await self.numbers(), [1])
        stop()
        stop()
        await self.put(self.append(2))
        same("events without", await self.numbers(), [1, 2])

    async def promise_8_a_hint_reaches_the_node_that_it_is_for(self) -> None:
        """By name, or as the word that something was written: then all is looked at."""
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
            stop = elsewhere.subscribe(OTHER, told.put_nowait)
            self.store.hint(OTHER, [StreamId("grown"), STREAM])
            await self._told(told, "grown")
            await self.accept(SendMail(node=OTHER, message=b"look"))
            await self._told(told)
            stop()
            self.store.hint(OTHER, [STREAM])
            self.store.hint(NodeId("unknown"), [STREAM])
            same("mail", await messages(elsewhere, OTHER), [b"look"])

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
        same("mail that came meanwhile", await self.messages(), [b"late"])
        same("the other's mail", await self.messages(OTHER), [b"theirs"])
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
        """Three nodes post at once to a fourth, which takes away what it has read: nothing unread goes with that."""
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
        done = (self.append(1), MailReceived(node=NODE, through=mail.key))
        for _ in range(2):
            await self.accept(*done)
            same("mail", await self.messages(), [])
            same("events", await self.numbers(), [1])

    async def promise_10_a_message_for_an_unknown_node_is_refused_and_its_neighbours_are_not(self) -> None:
        refusals = await self.put(
            self.append(1),
            SendMail(node=NodeId("unknown"), message=b"lost"),
            SendMail(node=NODE, message=b"found"),
        )
        refused(refusals, 1, why=NodeGone)
        same("events", await self.numbers(), [1])
        same("mail", await self.messages(), [b"found"])

    async def promise_10_the_heir_gets_the_mail_of_the_node_it_buries(self) -> None:
        await self.store.join(OTHER)
        for number in range(3):
            await self.put(SendMail(node=OTHER, message=b"theirs %d" % number))
            await self.put(SendMail(node=NODE, message=b"ours %d" % number))
        ours = list(await self.store.mail(NODE))
        await self.store.leave(OTHER)
        await self.store.bury(OTHER, heir=NODE)
        inherited = [message for message in await self.messages() if message.startswith(b"theirs")]
        same("mail of the node that was buried", inherited, [b"theirs 0", b"theirs 1", b"theirs 2"])
        await self.put(MailReceived(node=NODE, through=ours[-1].key))
        same("mail that the heir had not seen", await self.messages(), inherited)
        refused(await self.put(SendMail(node=OTHER, message=b"late")), 0, why=NodeGone)
        same("nodes", [node.id for node in await self.store.nodes()], [NODE])
        await self.store.bury(OTHER, heir=NODE)
        same("mail, after another burial", await self.messages(), inherited)


class LivenessChecks(StreamCase):
    """Promises 11 and 15: which nodes are dead, and which hold what is not written."""

    now = 1_000.0
    """The time on a monotonic clock that stands still until a check sets it."""

    def _view(self, node: NodeId, store: Store | None = None) -> Liveness:
        return (store or self.store).liveness(node, lease=LEASE, monotonic=lambda: self.now)

    async def promise_11_a_node_that_lives_is_never_dead(self) -> None:
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            views = [self._view(NODE), self._view(OTHER, elsewhere)]
            for number in range(12):
                for view in views:
                    await view.beat(b'{"beat":%d}' % number)
                    same("dead nodes", await dead_nodes(view), [])
                    same("its own claim", view.own_claim, ClaimState.HOLDING)
                self.now += LEASE / 5
            facts = {node.id: node.facts for node in await self.store.nodes()}
            same("what they told of themselves", facts, dict.fromkeys((NODE, OTHER), b'{"beat":11}'))
            same("nodes of known age", set(views[0].ages()) >= {NODE}, True)
            await elsewhere.leave(OTHER)

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
            same("the claim of a node that left", theirs.own_claim, ClaimState.BURIED)
        same("what it wrote", list(await self.store.written_by(OTHER)), [left])
        claimed = await self.store.claim(left.id, node=NODE, held=left.fence)
        same("the stream that was claimed", claimed and replace(claimed, fence=fence, node=OTHER, generation=1), left)
        read = await self.store.bury(OTHER, heir=NODE)
        same("streams that it read", [stream.id for stream in read or ()], ["read"])
        same("their reader", await self.store.reader(StreamId("read")), None)
        same("dead nodes", await dead_nodes(mine), [])
        same("nodes", {node.id for node in await self.store.nodes()}, {NODE, THIRD})
        await self.store.leave(THIRD)

    async def promise_11_a_node_whose_claim_ran_out_goes_on_with_its_next_beat(self) -> None:
        """However long it was silent, as long as no node has buried it. The observer was silent as well, so it takes
        no node for dead."""
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            views = [self._view(NODE), self._view(OTHER, elsewhere)]
            for leases in (1, 4, 100):
                self.now += leases * LEASE
                for view in views:
                    same("whether a node was buried in silence", view.own_claim is ClaimState.BURIED, False)
                for view in views:
                    await view.beat(b'{"leases":%d}' % leases)
                    same("its own claim, after a beat", view.own_claim, ClaimState.HOLDING)
                same("dead nodes", [await dead_nodes(view) for view in views], [[], []])
            await elsewhere.leave(OTHER)

    async def promise_11_a_node_that_was_buried_knows_it_with_its_next_beat(self) -> None:
        """A store that finds a silent node dead by its lease buries it; one with locks never does, while its process
        lives."""
        mine = self._view(NODE)
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            theirs = self._view(OTHER, elsewhere)
            dead: list[NodeId] = []
            for number in range(7):
                await mine.beat(b'{"beat":%d}' % number)
                dead = await dead_nodes(mine)
                self.now += LEASE / 5
            for node in dead:
                await self.store.bury(node, heir=NODE)
            await theirs.beat(b'{"back":true}')
            claim = ClaimState.BURIED if dead else ClaimState.HOLDING
            same("the claim of the silent node", theirs.own_claim, claim)
            self.now += LEASE
            await theirs.beat(b'{"back":2}')
            same("its claim, later", theirs.own_claim, claim)
            same("nodes", {node.id for node in await self.store.nodes()}, {NODE} if dead else {NODE, OTHER})
            await elsewhere.leave(OTHER)

    async def promise_11_a_node_that_has_beaten_since_is_not_buried(self) -> None:
        """It was found dead, and has come back before it could be buried."""
        await self.open_stream("read")
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            theirs = self._view(OTHER, elsewhere)
            await theirs.beat(b'{"beat":1}')
            seen = {node.id: node.beat for node in await self.store.nodes()}
            accepted(await put(elsewhere, PutReader(record=a_reader(stream="read", node=OTHER))))
            await self.accept(SendMail(node=OTHER, message=b"theirs"))
            await theirs.beat(b'{"beat":2}')
            same("streams it read", await self.store.bury(OTHER, heir=NODE, beat=seen[OTHER]), None)
            same("nodes", {node.id for node in await self.store.nodes()}, {NODE, OTHER})
            same("mail", (await self.messages(OTHER), await self.messages()), ([b"theirs"], []))
            reader = await self.store.reader(StreamId("read"))
            same("the node of the reader", reader and reader.node, OTHER)
            same("its own claim", theirs.own_claim, ClaimState.HOLDING)
            await elsewhere.leave(OTHER)
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
        same(
            "dead nodes, each with its beat",
            dict(seen.dead),
            {node.id: node.beat for node in seen.nodes if node.id == OTHER},
        )
        same("how many are dead", len(seen.dead), 1)

    async def promise_11_a_node_that_leaves_nothing_behind_is_gone(self) -> None:
        await self.store.join(OTHER)
        await self.store.leave(OTHER)
        same("nodes", [node.id for node in await self.store.nodes()], [NODE])
        same("dead nodes", await dead_nodes(self._view(NODE)), [])
        await self.store.leave(OTHER)

    async def promise_15_a_node_that_holds_is_named_until_it_holds_nothing_more(self) -> None:
        mine = self._view(NODE)
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            theirs = self._view(OTHER, elsewhere)
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
            try:  # a look of another process may be in the way for a moment
                async with asyncio.timeout(self.patience):
                    while any([await view.holders() for view in (mine, theirs)]):
                        for view in (mine, theirs):
                            await dead_nodes(view)  # a round, as each node makes them
                        await asyncio.sleep(0.01)
            except TimeoutError:
                raise AssertionError("a node that holds nothing is still named") from None
            same("dead nodes", await dead_nodes(mine), [])
            await elsewhere.leave(OTHER)

    async def promise_15_a_node_that_is_gone_holds_nothing(self) -> None:
        mine = self._view(NODE)
        async with self.elsewhere() as elsewhere:
            await elsewhere.join(OTHER)
            theirs = self._view(OTHER, elsewhere)
            theirs.hold(True)
            same("holders", list(await mine.holders()), [OTHER])
            await elsewhere.leave(OTHER)
            same("holders, when it has left", list(await mine.holders()), [])
            theirs.hold(True)
            same("holders, whatever a node says that has left", list(await mine.holders()), [])
