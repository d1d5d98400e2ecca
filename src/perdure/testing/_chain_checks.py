"""Promise 13: chains of resume tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from perdure._core.ids import SessionId
from perdure._core.retention import Cutoffs
from perdure._core.states import SessionState
from perdure.store.base import ChangeSession, EndSession, PutSession
from perdure.testing._case import Case, same
from perdure.testing._values import SESSION, a_chain, a_session, put


async def promise_13_a_chain_is_found_by_its_name_and_by_its_session(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()), PutSession(record=a_session("neighbour")))
    chain, other = a_chain(), a_chain("other name", session="neighbour", next_="waiting")
    same("a chain put", [await case.store.put_chain(each) for each in (chain, other)], [True, True])
    async with case.elsewhere() as elsewhere:
        same("by name", [await elsewhere.chain(each.name) for each in (chain, other)], [chain, other])
        same("by session", [await elsewhere.chain_of(each.session) for each in (chain, other)], [chain, other])
        same("an unknown name", await elsewhere.chain("unknown"), None)
        same("an unknown session", await elsewhere.chain_of(SessionId("unknown")), None)


async def promise_13_a_session_has_one_chain(case: Case) -> None:
    """The new one takes the place of the one before."""
    await put(case.store, PutSession(record=a_session()))
    before, after = a_chain("before"), a_chain("after")
    await case.store.put_chain(before)
    await case.store.put_chain(after)
    same("the chain of before", await case.store.chain(before.name), None)
    same("the session's chain", await case.store.chain_of(SESSION), after)
    same("a change of the one before", await case.store.change_chain(before, None), False)
    same("the session's chain", await case.store.chain(after.name), after)


async def promise_13_a_chain_changes_only_from_what_was_seen(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()))
    chain = a_chain()
    await case.store.put_chain(chain)
    issued = replace(chain, next="next")
    moved = replace(chain, current="next")
    async with case.elsewhere() as elsewhere:
        same("the first change", await elsewhere.change_chain(chain, issued), True)
        same("a change from before that", await case.store.change_chain(chain, moved), False)
        same("an end from before that", await case.store.change_chain(chain, None), False)
        same("a change from a guess", await case.store.change_chain(replace(issued, current="?"), moved), False)
        same("the chain", await case.store.chain(chain.name), issued)
        same("the second change", await case.store.change_chain(issued, moved), True)
        same("an end", await elsewhere.change_chain(moved, None), True)
    same("an end again", await case.store.change_chain(moved, None), False)
    same("a change of what is gone", await case.store.change_chain(moved, chain), False)
    same("the chain", [await case.store.chain(chain.name), await case.store.chain_of(SESSION)], [None, None])


async def promise_13_of_several_changes_at_once_one_succeeds(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()))
    chain = a_chain()
    await case.store.put_chain(chain)
    wanted = [replace(chain, next=f"next {number}") for number in range(10)]
    async with case.elsewhere() as elsewhere:
        stores = [case.store, elsewhere] * 5
        changes = [store.change_chain(chain, new) for store, new in zip(stores, wanted, strict=True)]
        done = await asyncio.gather(*changes)
    same("changes that succeeded", sum(done), 1)
    same("the chain", await case.store.chain(chain.name), wanted[done.index(True)])


async def promise_13_a_chain_ends_with_its_session(case: Case) -> None:
    """However it ends; and one that has ended, or never was, gets none."""
    names = ("ended", "swept", "kept")
    await put(case.store, *(PutSession(record=a_session(name, active=5.0)) for name in names))
    await put(case.store, ChangeSession(session=SessionId("kept"), active=20.0, state=SessionState.DORMANT))
    for name in names:
        await case.store.put_chain(a_chain(name, session=name))
    await put(case.store, EndSession(session=SessionId("ended"), time=30.0, reason="why"))
    same("the chain of one that ended", await case.store.chain("ended"), None)
    same("a late change", await case.store.change_chain(a_chain("ended", session="ended"), None), False)
    same("a late chain", await case.store.put_chain(a_chain("late", session="ended")), False)
    same("a chain of nobody's", await case.store.put_chain(a_chain("late", session="unknown")), False)
    same("a late chain", await case.store.chain("late"), None)
    await case.store.sweep(Cutoffs(events=10.0, answers=10.0))
    same("the chain of one that was swept", await case.store.chain("swept"), None)
    same("the chain of one that goes on", await case.store.chain("kept"), a_chain("kept", session="kept"))


async def promise_13_a_change_survives_a_reopening(case: Case) -> None:
    await put(case.store, PutSession(record=a_session()))
    chain = a_chain()
    await case.store.put_chain(chain)
    await case.store.change_chain(chain, replace(chain, next="next"))
    if await case.reopen():
        same("the chain", await case.store.chain(chain.name), replace(chain, next="next"))
