"""Streams, subscriptions and polls end in good order when the token has expired that opened them, and their client goes
on with a new one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from mcp.server.auth.provider import AccessToken, TokenVerifier

from perdure.http import credentials
from perdure.http.credentials import SHOWN, OpenRequests, ShownToken, ending_with_token, while_good
from tests.support.clients.listeners import listening, publish
from tests.support.clients.modern_peer import REPEATS, TAKES_TASKS, CallPeer, result_of
from tests.support.clients.raw_http import SessionPeer, bearer, text_of
from tests.support.servers.changing_server import new_server
from tests.support.servers.gated_server import Live, live, readers
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

LIFE = 1
"""Seconds; a token is good to the end of its last second. Nothing below waits for longer than a token lives."""


class Ann(TokenVerifier):
    """Knows one user. Her token `long` does not expire; every other does, a moment after it was first shown."""

    def __init__(self) -> None:
        self._ends: dict[str, int | None] = {"long": None}

    async def verify_token(self, token: str) -> AccessToken | None:
        ends = self._ends.setdefault(token, int(time.time()) + LIFE)
        return AccessToken(token=token, client_id="app", subject="ann", scopes=[], expires_at=ends)


def shown(expires_at: int) -> dict[str, ShownToken]:
    token = AccessToken(token="t", client_id="app", scopes=[], expires_at=expires_at)
    return {SHOWN: ShownToken(token, OpenRequests())}


def shows(peer: SessionPeer, token: str) -> SessionPeer:
    """The same client with another token."""
    return SessionPeer(port=peer.port, headers={**peer.headers, **bearer(token)}, id=peer.id, calls=peer.calls)


@pytest.fixture
async def served() -> AsyncIterator[Live]:
    async with live(auth=Ann(), task_after=0.0, task_hold=60.0) as running:
        yield running


async def test_a_calls_stream_ends_with_its_token_and_goes_on_with_a_new_one(
    served: Live, request: pytest.FixtureRequest
) -> None:
    """Also while other requests of the session show a better token: somebody else may have shown this one."""
    name = request.node.name
    ann = await served.session(**bearer("long"))
    async with await shows(ann, "brief").begin_call("count", n=4, gate=name, first=2) as call:
        await call.until_messages(2)
        assert (await ann.call("count", id="other", n=1)).status == 200
        ended = await call.answer()
        assert [message["params"]["progress"] for message in ended.messages] == [1, 2]
    assert (await shows(ann, "brief").ask("GET")).status == 401
    open_gate(name)
    async with await ann.resume(call.position) as again:
        *rest, answer = (await again.answer()).messages
    assert [message["params"]["progress"] for message in rest] == [3, 4]
    assert text_of(answer) == "counted to 4"


async def test_the_standalone_stream_ends_with_its_token_and_loses_nothing(served: Live) -> None:
    ann = await served.session(**bearer("long"))
    async with await shows(ann, "brief").begin("GET") as stream:
        await ann.call("announce", n=2)
        ended = await stream.answer()
    await until(lambda: readers(served, ann) == 0)
    await ann.call("announce", n=1)
    async with await ann.resume(stream.position) as again:
        [later] = await again.until_messages(1)
    told = [message["params"]["uri"] for message in (*ended.messages, later)]
    assert told == ["notice://1", "notice://2", "notice://1"]


async def test_a_token_that_does_not_expire_keeps_its_stream(served: Live, request: pytest.FixtureRequest) -> None:
    """Beside a stream whose token has expired."""
    name = request.node.name
    ann = await served.session(**bearer("long"))
    async with await ann.begin("GET") as lasting:
        async with await shows(ann, "brief").begin_call("wait", gate=name) as call:
            await call.answer()
        open_gate(name)
        await ann.call("announce", n=1)
        assert len(await lasting.until_messages(1)) == 1


async def test_a_listener_ends_with_its_token_and_goes_on_with_a_new_one() -> None:
    async with live(server=new_server(), auth=Ann()) as served:
        async with listening(served.port, "tools", headers=bearer("brief")) as listener:
            while await listener.read():
                pass
            assert listener.exchange is not None
            assert listener.exchange.messages[-1]["result"]["resultType"] == "complete"
        await publish(served.port, "tools", headers=bearer("long"))
        async with listening(served.port, "tools", headers=bearer("long")):
            pass  # it had the cue for what changed meanwhile


async def test_a_poll_is_held_no_longer_than_its_token_is_good(served: Live, request: pytest.FixtureRequest) -> None:
    ann = CallPeer(port=served.port, headers=bearer("long"), capabilities=REPEATS)
    task = result_of(await ann.call("wait", {"gate": request.node.name}))["taskId"]
    poll = CallPeer(port=served.port, headers=bearer("brief"), capabilities=REPEATS)
    assert (await poll.get(task))["status"] == "working"
    assert (await ann.cancel(task))["resultType"] == "complete"


async def test_a_call_of_a_client_with_tasks_becomes_a_handle_when_its_token_expires() -> None:
    async with live(auth=Ann(), task_after=600.0, task_hold=0.0) as served:
        brief = CallPeer(port=served.port, headers=bearer("brief"), capabilities=TAKES_TASKS)
        task = result_of(await brief.call("wait", {"gate": "after its token"}))["taskId"]
        open_gate("after its token")
        ann = CallPeer(port=served.port, headers=bearer("long"), capabilities=TAKES_TASKS)
        assert (await ann.until_over(task))["status"] == "completed"


async def test_a_clock_that_is_set_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: set back, the token is good again; set forward, it has expired."""
    monkeypatch.setattr(credentials, "_READ_AGAIN", 0.001)
    now, ended = 1000.0, asyncio.Event()
    monkeypatch.setattr(credentials, "_wall_clock", lambda: now)
    with ending_with_token(shown(1000), ended.set):
        now = 500.0
        await asyncio.sleep(0.01)
        assert not ended.is_set()
        now = 1000.99
        await asyncio.sleep(0.005)
        assert not ended.is_set()
        now = 1001.0
        await ended.wait()


@pytest.mark.parametrize(("now", "left"), [(999.0, 2.0), (1000.5, 0.5), (1001.0, 0.0), (2000.0, 0.0)])
def test_a_token_is_good_to_the_end_of_its_last_second(
    now: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the SDK's bearer check has it: `expires_at < int(time.time())` has expired."""
    monkeypatch.setattr(credentials, "_wall_clock", lambda: now)
    assert while_good(60.0, shown(1000)) == left
