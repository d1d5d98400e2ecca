"""Promise 14: limits that hold however many processes commit at once, and small records of what has ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from perdure._core.ids import SessionId
from perdure._core.retention import MAX_ENDED_OF_CALLER, MAX_ENDED_PARAMS
from perdure._core.states import CallState, SessionState, SessionStep
from perdure.errors import IdTaken, SessionEnded, TooManyCalls, TooManySessions
from perdure.store.base import CallEnd, EndSession, OpenStream, PutSession, SessionLimits, SessionRecord
from perdure.testing._case import Case, accepted, refused, same
from perdure.testing._values import (
    SESSION,
    a_call,
    a_session,
    a_stream,
    all_sessions,
    an_append,
    count_open,
    put,
    some_events,
)

_EXPIRED = SessionStep.WINDOW_PASSED.value


def _unowned(name: str, address: str) -> SessionRecord:
    return replace(a_session(name, owner=""), address=address)


async def promise_14_a_session_beyond_the_limit_for_all_is_refused(case: Case) -> None:
    limits = SessionLimits(total=2, caller=9)
    first, second = (PutSession(record=a_session(name, owner=name), limits=limits) for name in ("a", "b"))
    third = PutSession(record=a_session("c", owner="c"), limits=limits)
    accepted(await put(case.store, first, second))
    opened = OpenStream(record=a_stream(case.fence, "stream of c", session="c"))
    [full, gone] = await put(case.store, third, opened)
    same("why", (type(full), getattr(full, "of_caller", None)), (TooManySessions, False))
    same("why its stream is refused", type(gone), SessionEnded)
    same("sessions", [session.id for session in await all_sessions(case.store)], ["a", "b"])
    accepted(await put(case.store, first))  # it is there already (5)
    accepted(await put(case.store, EndSession(session=SessionId("a"), time=1.0, reason="why"), third))
    same("open sessions", await count_open(case.store), 2)


async def promise_14_a_caller_beyond_its_own_limit_is_refused_first(case: Case) -> None:
    """By its name or, where it has none, by its address; callers with neither share the limit for all."""
    limits = SessionLimits(total=3, caller=1)
    for mine, more, other in (
        (a_session("a", owner="alice"), a_session("b", owner="alice"), a_session("c", owner="bob")),
        (_unowned("d", "192.0.2.1"), _unowned("e", "192.0.2.1"), _unowned("f", "192.0.2.2")),
    ):
        accepted(await put(case.store, PutSession(record=mine, limits=limits)))
        [full] = await put(case.store, PutSession(record=more, limits=limits))
        same("why", (type(full), getattr(full, "of_caller", None)), (TooManySessions, True))
        accepted(await put(case.store, PutSession(record=other, limits=limits)))
        for record in (mine, other):
            await put(case.store, EndSession(session=record.id, time=1.0, reason="why"))
    unknown = [PutSession(record=_unowned(name, ""), limits=limits) for name in "ghij"]
    [*within, full] = await put(case.store, *unknown)
    accepted(within)
    same("why", (type(full), getattr(full, "of_caller", None)), (TooManySessions, False))


async def promise_14_of_many_that_come_at_once_so_many_get_in(case: Case) -> None:
    limits = SessionLimits(total=3, caller=3)
    async with case.elsewhere() as other:
        records = [a_session(f"s{number:02d}") for number in range(20)]
        stores = (case.store, other)
        commits = [
            stores[place % 2].commit([PutSession(record=record, limits=limits)]) for place, record in enumerate(records)
        ]
        refusals = [refusal for [refusal] in await asyncio.gather(*commits)]
    same("refused", sum(isinstance(refusal, TooManySessions) for refusal in refusals), 17)
    same("open sessions", await count_open(case.store), 3)
    same("of their owner", [session.owner for session in await all_sessions(case.store)], ["somebody"] * 3)


async def promise_14_calls_beyond_the_limit_of_their_session_are_refused(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()), PutSession(record=a_session("neighbour")))

    def opening(name: str, *ids: int, session: str = SESSION) -> OpenStream:
        calls = tuple(a_call(id_, stream=name, session=session) for id_ in ids)
        return OpenStream(record=a_stream(case.fence, name, session=session), calls=calls, most_calls=2)

    accepted(await put(case.store, opening("a", 1)))
    refused(await put(case.store, opening("b", 2, 3)), 0, why=TooManyCalls)
    refused(await put(case.store, opening("b", 1, 2)), 0, why=IdTaken)
    accepted(await put(case.store, opening("c", 2), opening("of another", 1, 2, session="neighbour")))
    refused(await put(case.store, opening("b", 3)), 0, why=TooManyCalls)
    same("its calls", [call.request_id for call in await case.store.calls(SESSION)], [1, 2])
    end = CallEnd(incarnation=1, request_id=1, state=CallState.ANSWERED)
    await put(case.store, an_append(case.fence, some_events(1, 1, final=True), stream="a", ends=(end,), seal=True))
    accepted(await put(case.store, opening("b", 3)))


async def promise_14_an_ended_session_keeps_little_more_than_why(case: Case) -> None:
    long = b'{"x":"%b"}' % (b"x" * MAX_ENDED_PARAMS)
    for name, params, reason, kept in (
        ("deleted", b"{}", SessionStep.CLIENT_DELETED.value, b""),
        ("expired", b"{}", _EXPIRED, b"{}"),
        ("expired, and large", long, _EXPIRED, b""),
    ):
        record = replace(a_session(name), client_params=params)
        await put(case.store, PutSession(record=record), EndSession(session=record.id, time=4.0, reason=reason))
        wanted = replace(
            record, state=SessionState.ENDED, active=4.0, ended=reason, client_params=kept, result=b"", sticky=()
        )
        same("the record", await case.store.session(record.id), wanted)


async def promise_14_of_a_callers_ended_sessions_the_newest_are_kept(case: Case) -> None:
    await put(case.store, PutSession(record=a_session("another's", owner="another")))
    await put(case.store, EndSession(session=SessionId("another's"), time=0.0, reason="why"))
    names = [f"s{number:04d}" for number in range(MAX_ENDED_OF_CALLER + 1)]
    for start in range(0, len(names), 100):
        some = names[start : start + 100]
        await put(case.store, *(PutSession(record=a_session(name)) for name in some))
        ends = [EndSession(session=SessionId(name), time=float(names.index(name)), reason="why") for name in some]
        await case.store.commit(ends)
    kept = [session.id for session in await all_sessions(case.store, page=500)]
    same("kept records", kept, sorted(["another's", *names[1:]]))


async def the_longest_dormant_session_of_one_caller_is_its_own(case: Case) -> None:
    dormant = SessionState.DORMANT
    records = [
        a_session("of alice", owner="alice", state=dormant, active=2.0),
        a_session("of bob", owner="bob", state=dormant, active=1.0),
        replace(_unowned("of here", "192.0.2.1"), state=dormant, active=3.0),
        replace(_unowned("of there", "192.0.2.2"), state=dormant, active=4.0),
    ]
    await put(case.store, *(PutSession(record=record) for record in records))
    callers = (("alice", ""), ("bob", ""), ("", "192.0.2.1"), ("", "192.0.2.2"))
    same("each caller's", [await case.store.longest_dormant(*caller) for caller in callers], records)
    same("of all", await case.store.longest_dormant(), records[1])
    same("of a stranger", await case.store.longest_dormant("carol"), None)
