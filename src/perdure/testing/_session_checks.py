"""Promise 12, and the rest that is promised of sessions and their calls."""

from __future__ import annotations

from dataclasses import replace

from perdure._core import sticky
from perdure._core.ids import SessionId
from perdure._core.states import CallState, SessionState
from perdure.errors import IdTaken, SessionEnded
from perdure.store.base import CallEnd, ChangeSession, EndSession, OpenStream, PutCall, PutSession, Stick
from perdure.testing._case import Case, accepted, refused, same
from perdure.testing._values import (
    SESSION,
    STREAM,
    a_call,
    a_session,
    a_sticky,
    a_stream,
    all_sessions,
    an_append,
    an_ended_session,
    picture,
    put,
    some_events,
)


def _opening(case: Case, name: str, *ids: int | str, incarnation: int = 1, session: str = SESSION) -> OpenStream:
    calls = tuple(a_call(id_, stream=name, session=session, incarnation=incarnation) for id_ in ids)
    return OpenStream(record=a_stream(case.fence, name, session=session), calls=calls)


async def promise_12_no_two_calls_run_under_one_id(case: Case) -> None:
    """8 and "8" are one id, as for the SDK."""
    await put(case.store, PutSession(record=a_session()))
    accepted(await put(case.store, _opening(case, "first", 8, "x")))
    before = await picture(case.store)
    async with case.elsewhere() as elsewhere:
        for ids in ((8,), ("8",), ("x",), (9, "x"), (10, "10")):
            refused(await put(elsewhere, _opening(case, "second", *ids)), 0, why=IdTaken)
    same("all that is there", await picture(case.store), before)
    refused(
        await put(case.store, _opening(case, "second", "8"), _opening(case, "third", 9)),
        0,
        why=IdTaken,
    )
    same("streams", [stream.id for stream in await case.store.streams(SESSION)], ["first", "third"])
    accepted(await put(case.store, _opening(case, "first", 8, "x")))


async def promise_12_another_session_or_incarnation_has_ids_of_its_own(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()), PutSession(record=a_session("neighbour")))
    accepted(await put(case.store, _opening(case, "first", 8)))
    accepted(await put(case.store, _opening(case, "second", 8, incarnation=2)))
    accepted(await put(case.store, _opening(case, "third", "8", session="neighbour")))


async def promise_12_an_id_is_free_again_once_its_call_has_ended_and_not_while_it_waits(case: Case) -> None:
    await case.open_stream()
    waits = PutCall(
        stream=STREAM, fence=case.fence, incarnation=1, request_id=1, state=CallState.WAITING, attempt=1, progress=None
    )
    accepted(await put(case.store, waits))
    refused(await put(case.store, _opening(case, "second", "1")), 0, why=IdTaken)
    found = await case.store.open_call(SESSION, incarnation=1, request_id="1")
    same("the call that waits", found, replace(a_call(1), state=CallState.WAITING))
    end = CallEnd(incarnation=1, request_id=1, state=CallState.ANSWERED)
    accepted(await put(case.store, an_append(case.fence, some_events(1, 1, final=True), ends=(end,))))
    same("a call that has ended", await case.store.open_call(SESSION, incarnation=1, request_id=1), None)
    accepted(await put(case.store, _opening(case, "second", "1")))
    found = await case.store.open_call(SESSION, incarnation=1, request_id=1)
    same("the call that runs", found, a_call("1", stream="second"))
    same("a call of another incarnation", await case.store.open_call(SESSION, incarnation=2, request_id=1), None)
    rows = [(call.request_id, call.request) for call in await case.store.calls_on(STREAM)]
    same("an ended call's request", rows, [(1, b""), ("one", a_call().request)])


async def promise_12_a_session_that_has_ended_opens_no_stream(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()), PutSession(record=a_session("neighbour")))
    await put(case.store, EndSession(session=SESSION, time=1.0, reason="why"))
    late, unknown = _opening(case, "late", 1), _opening(case, "unknown", 1, session="unknown")
    refused(await put(case.store, late, _opening(case, "fine", 1, session="neighbour")), 0, why=SessionEnded)
    refused(await put(case.store, unknown), 0, why=SessionEnded)
    same("streams", list(await case.store.streams(SESSION)), [])
    same("calls", list(await case.store.calls(SESSION)), [])
    same("its neighbour's", [stream.id for stream in await case.store.streams(SessionId("neighbour"))], ["fine"])


async def a_session_is_changed_where_something_is_said_and_nowhere_else(case: Case) -> None:
    record = replace(a_session(state=SessionState.OPENING), version="", result=b"", initialized=False, active=5.0)
    await put(case.store, PutSession(record=record), PutSession(record=a_session()))
    same("a session that was put twice", await case.store.session(SESSION), record)
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
        accepted(await put(case.store, change, ChangeSession(session=SessionId("nobody's"), active=9.0)))
        record = replace(record, **changed)
        same("the session", await case.store.session(SESSION), record)
    same("sessions", [session.id for session in await all_sessions(case.store)], [SESSION])


async def nothing_changes_after_the_end_of_a_session(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()))
    await put(case.store, EndSession(session=SESSION, time=4.0, reason="first"))
    ended = an_ended_session(active=4.0, ended="first")
    for step in (
        EndSession(session=SESSION, time=9.0, reason="second"),
        ChangeSession(session=SESSION, active=9.0, state=SessionState.ACTIVE, initialized=False),
        Stick(session=SESSION, request=a_sticky("resources/subscribe", uri="late://1")),
        PutSession(record=a_session()),
    ):
        accepted(await put(case.store, step))
        same("the session", await case.store.session(SESSION), ended)
    same("reattaching", await case.store.reattach(SESSION), None)
    same("the session", await case.store.session(SESSION), ended)


async def reattaching_counts_up(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()))
    for incarnation in (2, 3):
        wanted = replace(a_session(), incarnation=incarnation)
        same("the session", await case.store.reattach(SESSION), wanted)
        await case.reopen()
        same("the session in the store", await case.store.session(SESSION), wanted)
    same("reattaching what is not there", await case.store.reattach(SessionId("nobody's")), None)


async def sticky_requests_are_kept_as_they_follow_each_other(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()))
    wanted = a_session().sticky
    for request in (
        a_sticky("resources/subscribe", uri="a://1"),
        a_sticky("logging/setLevel", level="debug"),
        a_sticky("resources/subscribe", uri="a://2"),
        a_sticky("resources/unsubscribe", uri="a://1"),
        a_sticky("resources/unsubscribe", uri="never://subscribed"),
        a_sticky("resources/subscribe", uri="a://2"),
    ):
        accepted(await put(case.store, Stick(session=SESSION, request=request)))
        wanted = sticky.after(wanted, request)
        found = await case.store.session(SESSION)
        same("sticky requests", found and found.sticky, wanted)
    accepted(await put(case.store, Stick(session=SessionId("nobody's"), request=a_sticky("logging/setLevel"))))


async def sessions_are_listed_by_id_a_page_at_a_time(case: Case) -> None:
    ids = [f"s{number:02d}" for number in range(25)]
    await put(case.store, *(PutSession(record=a_session(id_)) for id_ in reversed(ids)))
    same("a page", [session.id for session in await case.store.sessions(after=None, limit=3)], ids[:3])
    same("all pages", [session.id for session in await all_sessions(case.store, page=4)], ids)
    odd = replace(a_session("odd"), incarnation=5, sticky=(), owner="\ud83d somebody else", active=3.5)
    await put(case.store, PutSession(record=odd))
    same("a record", await case.store.session(odd.id), odd)


async def sessions_are_counted_by_their_states(case: Case) -> None:
    for name, owner, state in (
        ("a", "alice", SessionState.ACTIVE),
        ("b", "alice", SessionState.DORMANT),
        ("c", "", SessionState.OPENING),
        ("d", "alice", SessionState.ACTIVE),
    ):
        await put(case.store, PutSession(record=a_session(name, owner=owner, state=state)))
    await put(case.store, EndSession(session=SessionId("d"), time=1.0, reason="why"))
    states = {state: count for state, count in (await case.store.count_states()).items() if count}
    same("sessions by state", states, dict.fromkeys(SessionState, 1))


async def the_longest_dormant_session_is_the_one_without_activity_for_longest(case: Case) -> None:
    same("of none", await case.store.longest_dormant(), None)
    for name, state, active in (
        ("young", SessionState.DORMANT, 9.0),
        ("old", SessionState.DORMANT, 5.0),
        ("older, and active", SessionState.ACTIVE, 1.0),
    ):
        await put(case.store, PutSession(record=a_session(name, state=state, active=active)))
    same("the first", await case.store.longest_dormant(), a_session("old", state=SessionState.DORMANT, active=5.0))
    await put(case.store, EndSession(session=SessionId("old"), time=0.0, reason="why"))
    same("the next", await case.store.longest_dormant(), a_session("young", state=SessionState.DORMANT, active=9.0))
