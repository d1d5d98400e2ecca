"""Two processes that change one session at once: one waits for the other, and none undoes what the other did."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest

from perdure._core.ids import Fence
from perdure._core.retention import Cutoffs
from perdure._core.states import SessionState
from perdure.store.postgres.address import parse_address
from perdure.store.postgres.store import PostgresStore
from perdure.store.steps import ChangeSession, EndSession, OpenStream, PutSession, SendMail
from perdure.testing._values import NODE, OTHER, SESSION, a_call, a_session, a_sticky, a_stream
from tests.support.servers.in_process import until
from tests.support.stores.postgres import server_url
from tests.support.stores.postgres_roles import Operator, role_with

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, kw_only=True)
class Two:
    """Two processes on one store, which has a session, and an operator who can hold a row that they want."""

    here: PostgresStore
    there: PostgresStore
    fence: Fence
    schema: str
    role: str
    operator: Operator
    looker: Operator

    @asynccontextmanager
    async def holding(self, row: str) -> AsyncIterator[None]:
        async with self.operator.transaction():
            await self.operator.execute(f"SELECT 1 FROM {self.schema}.{row} FOR UPDATE")
            yield

    async def waiting(self) -> int:
        """How many statements of the two wait for a lock."""
        found = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1 AND wait_event_type = 'Lock'"
        return int(await self.looker.fetchval(found, self.role))


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    operator, looker = [await asyncpg.connect(server_url().partition("?")[0]) for _ in range(2)]
    async with role_with(operator) as url:
        schema = parse_address(url).schema
        async with PostgresStore(url, timeout=20.0) as here, PostgresStore(url, timeout=20.0) as there:
            fence = await here.join(NODE)
            await there.join(OTHER)
            await here.commit([PutSession(record=a_session())])
            role = url.partition("//")[2].partition("@")[0]
            yield Two(here=here, there=there, fence=fence, schema=schema, role=role, operator=operator, looker=looker)
        await operator.execute(f"DROP SCHEMA {schema} CASCADE")
    await operator.close()
    await looker.close()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda two: two.there.commit([EndSession(session=SESSION, time=1.0, reason="over")]), id="ends"),
        pytest.param(lambda two: two.there.sweep(Cutoffs(events=math.inf, answers=math.inf)), id="is swept"),
    ],
)
async def test_no_call_is_accepted_into_a_session_that_ends(
    two: Two, end: Callable[[Two], Coroutine[Any, Any, Any]]
) -> None:
    """The stream is written and not committed when the session ends at another process: either there is a session with
    a stream, or there is neither."""
    opening = OpenStream(record=a_stream(two.fence), calls=(a_call(),))
    async with two.holding(f"mailbox WHERE node = '{OTHER}'"):
        accepting = asyncio.create_task(two.here.commit([opening, SendMail(node=OTHER, message=b"{}")]))
        await until(two.waiting)
        ending = asyncio.create_task(end(two))

        async def has_met_it() -> bool:
            return ending.done() or await two.waiting() == 2

        await until(has_met_it)
    assert list(await accepting) == [None, None]
    await ending
    record = await two.here.session(SESSION)
    lives = record is not None and record.state is not SessionState.ENDED
    assert lives == bool(await two.here.streams(SESSION)) == bool(await two.here.calls(SESSION))


async def test_sticky_requests_of_two_processes_at_once_are_both_kept(two: Two) -> None:
    """Each has read what is repeated before the other has written: the second reads again."""
    requests = [a_sticky("resources/subscribe", uri=f"a://{number}") for number in (1, 2)]
    async with two.holding(f"session WHERE id = '{SESSION}'"):
        sticking = [
            asyncio.create_task(store.commit([ChangeSession(session=SESSION, stick=request)]))
            for store, request in zip((two.here, two.there), requests, strict=True)
        ]

        async def both_wait() -> bool:
            return await two.waiting() == 2

        await until(both_wait)
    await asyncio.gather(*sticking)
    record = await two.here.session(SESSION)
    assert record is not None
    assert set(requests) <= set(record.sticky)
    assert len(record.sticky) == len(a_session().sticky) + 2
