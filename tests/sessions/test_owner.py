"""A session, its streams and its positions answer only the principal that opened it (promise 5).

To anybody else they do not exist: a foreign session, one that never was, one that was deleted and an id that cannot be
one give the same bytes, in every method.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from mcp.server.auth.provider import AccessToken, TokenVerifier

from perdure._core.ids import parse_position
from perdure.serve.token_file import FileTokens
from perdure.store import SqliteStore
from tests.support.clients.raw_http import Answer, SessionPeer, bearer, message, progress, text_of
from tests.support.servers.gated_server import Live, live, readers
from tests.support.servers.gated_tools import open_gate
from tests.support.servers.in_process import until
from tests.support.stores.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.anyio

UNKNOWN = "A" * 43
"""An id of the right form that nobody has."""


class Guests(TokenVerifier):
    """Two people with two tokens each, and one whose token ends."""

    def __init__(self) -> None:
        now = int(time.time())
        self._tokens = {
            "ann-1": self._token("ann-1", "app", "ann"),
            "ann-2": self._token("ann-2", "app", "ann"),
            "bob-1": self._token("bob-1", "app", "bob"),
            "bob-2": self._token("bob-2", "app", "bob"),
            # The same name at another client, or from another issuer, is somebody else.
            "ann-elsewhere": self._token("ann-elsewhere", "other-app", "ann"),
            "ann-late": self._token("ann-late", "app", "ann", expires_at=now - 1),
        }

    @staticmethod
    def _token(token: str, client: str, subject: str, expires_at: int | None = None) -> AccessToken:
        return AccessToken(token=token, client_id=client, subject=subject, scopes=[], expires_at=expires_at)

    async def verify_token(self, token: str) -> AccessToken | None:
        return self._tokens.get(token)


def as_seen(answer: Answer) -> tuple[int, list[tuple[str, str]], bytes]:
    """All that a client gets; the date is the moment's, not the session's."""
    return answer.status, [(name, value) for name, value in answer.headers if name != "date"], answer.body


@pytest.fixture
async def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(SqliteStore(str(tmp_path / "log.db")))


@pytest.fixture
async def served(store: FaultyStore) -> AsyncIterator[Live]:
    async with live(auth=Guests(), store=store) as running:
        yield running


@pytest.fixture
async def ann(served: Live) -> SessionPeer:
    return await served.session(**bearer("ann-1"))


@pytest.fixture
async def bob(served: Live) -> SessionPeer:
    return await served.session(**bearer("bob-1"))


def of(peer: SessionPeer, session_id: str) -> SessionPeer:
    """The same person, with another session id."""
    return SessionPeer(port=peer.port, headers={**peer.headers, "mcp-session-id": session_id}, id=session_id)


REQUESTS = {
    "a call": ("POST", message("tools/call", {"name": "count", "arguments": {"n": 1}}, id=1), ""),
    "a notification": ("POST", message("notifications/initialized"), ""),
    "a cancellation": ("POST", message("notifications/cancelled", {"requestId": 1}), ""),
    "an answer to an ask": ("POST", b'{"jsonrpc":"2.0","id":"ask-x-1","result":{}}', ""),
    "a batch": ("POST", b"[%b]" % message("ping", id=1), ""),
    "a read": ("GET", None, ""),
    "a resume": ("GET", None, "c" + "A" * 22 + ".000001.0000000001"),
    "a resume of the standalone stream": ("GET", None, "s" + "A" * 22 + ".000001.0000000001"),
    "a resume from nowhere": ("GET", None, "nowhere"),
    "a delete": ("DELETE", None, ""),
}


@pytest.mark.parametrize("request_name", list(REQUESTS))
async def test_a_foreign_session_and_none_give_the_same_bytes(
    served: Live, ann: SessionPeer, bob: SessionPeer, request_name: str
) -> None:
    method, body, position = REQUESTS[request_name]
    gone = await served.session(**bearer("ann-2"))
    assert (await gone.delete()).status == 200
    answers = []
    for session_id in (ann.id, UNKNOWN, gone.id, "short", "!" * 43, ann.id + "x", ann.id[:-1], "x" * 5_000):
        answer = await of(bob, session_id).ask(method, body, headers={"last-event-id": position})
        answers.append(as_seen(answer))
    assert answers[0][0] == 404
    assert [answer for answer in answers if answer != answers[0]] == []
    assert ann.id.encode() not in answers[0][2]
    # And the one that it belongs to has noticed nothing.
    assert progress((await ann.call("count", n=2)).messages) == [1, 2]


@pytest.mark.parametrize("degraded", [False, True])
async def test_a_foreign_session_gives_the_same_bytes_also_while_the_store_fails(
    served: Live, store: FaultyStore, ann: SessionPeer, bob: SessionPeer, degraded: bool
) -> None:
    over = await ann.call("count", n=1)
    store.reads = Fault.RAISES if degraded else Fault.NONE
    for position in (over.events[0].id, ""):
        foreign = await of(bob, ann.id).ask("GET", headers={"last-event-id": position})
        unknown = await of(bob, UNKNOWN).ask("GET", headers={"last-event-id": position})
        assert as_seen(foreign) == as_seen(unknown)
        assert foreign.status == (503 if degraded else 404)  # another node may have it: nobody can tell now


async def test_a_foreign_call_cannot_be_read_cancelled_or_ended(
    served: Live, ann: SessionPeer, bob: SessionPeer
) -> None:
    async with await ann.begin_call("count", id=7, n=5, gate="foreign", first=2) as call:
        await call.until_messages(2)
        attacker = of(bob, ann.id)
        assert (await attacker.ask("GET", headers={"last-event-id": call.position})).status == 404
        assert (await attacker.ask("POST", message("notifications/cancelled", {"requestId": 7}))).status == 404
        assert (await attacker.delete()).status == 404
        # With a session of one's own it is no better: there is no such request, and no such stream.
        assert (await bob.ask("POST", message("notifications/cancelled", {"requestId": 7}))).status == 202
        assert (await bob.ask("GET", headers={"last-event-id": call.position})).status == 400
        open_gate("foreign")
        assert text_of((await call.answer()).messages[-1]) == "counted to 5"


async def test_a_position_of_another_session_is_as_unknown_as_one_that_never_was(
    ann: SessionPeer, bob: SessionPeer
) -> None:
    over = await ann.call("count", n=3)
    never = "c" + "A" * 22 + over.events[0].id[23:]
    foreign = await bob.ask("GET", headers={"last-event-id": over.events[0].id})
    unknown = await bob.ask("GET", headers={"last-event-id": never})
    assert as_seen(foreign) == as_seen(unknown)
    assert (foreign.status, foreign.error["code"]) == (400, -31002)


async def test_a_standalone_position_of_another_session_is_as_unknown_as_one_that_never_was(
    ann: SessionPeer, bob: SessionPeer
) -> None:
    await ann.call("announce", n=3)
    async with AsyncExitStack() as stack:
        hers = await stack.enter_async_context(await ann.resume(""))
        await hers.until_messages(3)
        seen = []
        for position in (hers.position, "s" + "A" * 22 + hers.position[23:]):
            his = await stack.enter_async_context(await bob.resume(position))
            seen.append(await his.until_messages(1))
            assert parse_position(his.position) is not None
        # Both are told of a gap in bob's own stream, and nothing of ann's.
        assert seen[0] == seen[1]
        assert seen[0][0]["method"] == "notifications/perdure/gap"
        assert hers.position[1:23] not in str(seen)


async def test_positions_of_one_session_do_not_open_another_of_the_same_person(served: Live, ann: SessionPeer) -> None:
    second = await served.session(**bearer("ann-1"))
    over = await ann.call("count", n=3)
    assert (await second.ask("GET", headers={"last-event-id": over.events[0].id})).status == 400


async def test_a_new_token_of_the_same_person_goes_on(served: Live, ann: SessionPeer) -> None:
    """The token's bytes may change; the principal may not (R9)."""
    call = await ann.begin_call("count", n=4, gate="new token", first=2)
    await call.until_messages(2)
    renewed = SessionPeer(port=ann.port, headers={**ann.headers, **bearer("ann-2")}, id=ann.id)
    async with await renewed.resume(call.position) as again:
        assert await again.head() == 200
        open_gate("new token")
        assert progress((await again.answer()).messages) == [3, 4]
    assert (await renewed.call("count", n=1)).status == 200
    assert (await ann.call("count", n=1)).status == 200
    assert (await renewed.delete()).status == 200
    assert (await ann.call("count", n=1)).status == 404
    await call.aclose()


async def test_the_same_name_at_another_client_is_another_principal(ann: SessionPeer) -> None:
    elsewhere = SessionPeer(port=ann.port, headers={**ann.headers, **bearer("ann-elsewhere")}, id=ann.id)
    assert (await elsewhere.call("count", n=1)).status == 404
    assert (await ann.call("count", n=1)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": ""},
        {"authorization": "Bearer nobody"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": "Basic YW5uOmFubg=="},
        {"authorization": "ann-1"},
        {"authorization": "Bearer ann-late"},
        {"authorization": "Bearer \xff\xfe"},
        {"authorization": "Bearer " + "x" * 5_000},
    ],
    ids=["none", "unknown", "empty", "bare", "basic", "no scheme", "expired", "odd bytes", "long"],
)
async def test_without_a_good_token_nothing_answers(ann: SessionPeer, headers: dict[str, str]) -> None:
    answers = []
    for session_id in (ann.id, UNKNOWN, ""):
        stranger = SessionPeer(port=ann.port, headers={**ann.headers, "mcp-session-id": session_id}, id=session_id)
        for method, body in (("POST", message("ping", id=1)), ("GET", None), ("DELETE", None)):
            answers.append(as_seen(await stranger.ask(method, body, headers=headers)))
    assert answers[0][0] == 401
    assert dict(answers[0][1])["www-authenticate"].startswith("Bearer ")
    assert [answer for answer in answers if answer != answers[0]] == []
    assert (await ann.call("count", n=1)).status == 200


async def test_a_token_that_ends_does_not_end_the_call(served: Live, ann: SessionPeer) -> None:
    """Its connection goes on, and the answer waits for whoever comes back with a token that is good."""
    call = await ann.begin_call("count", n=3, gate="token ends", first=1)
    await call.until_messages(1)
    position = call.position
    call.cut()
    await until(lambda: readers(served, ann) == 0)
    late = SessionPeer(port=ann.port, headers={**ann.headers, **bearer("ann-late")}, id=ann.id)
    assert (await late.ask("GET", headers={"last-event-id": position})).status == 401
    open_gate("token ends")
    async with await ann.resume(position) as again:
        assert progress((await again.answer()).messages) == [2, 3]
    await call.aclose()


async def test_a_duplicated_session_header_does_not_open_two_doors(ann: SessionPeer, bob: SessionPeer) -> None:
    for ids in ((ann.id, bob.id), (bob.id, ann.id)):
        head = bob.request("POST", message("ping", id=1)).replace(
            b"mcp-session-id: %b" % bob.id.encode(),
            b"mcp-session-id: %b\r\nmcp-session-id: %b" % (ids[0].encode(), ids[1].encode()),
        )
        async with await bob.open(head) as exchange:
            answer = await exchange.answer()
        assert answer.status in (200, 400, 404)
        if answer.status == 200:
            assert answer.header("mcp-session-id") == bob.id


async def test_sessions_without_names_are_found_by_their_secret_only() -> None:
    """Where nobody authenticates, the id is the key: it is long, random and never told to others (S11)."""
    async with live() as served:
        peers = [await served.session() for _ in range(20)]
        assert len({peer.id for peer in peers}) == 20
        assert {len(peer.id) for peer in peers} == {43}
        await asyncio.gather(*(peer.call("count", n=1) for peer in peers))
        assert (await of(peers[0], UNKNOWN).call("count", n=1)).status == 404


async def test_tokens_from_a_file_name_their_principals(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ann:first-token-of-ann\nann:second-token-of-ann\nbob:first-token-of-bob\n")
    tokens.chmod(0o600)
    async with live(auth=FileTokens(tokens)) as served:
        ann = await served.session(**bearer("first-token-of-ann"))
        renewed = SessionPeer(port=ann.port, headers={**ann.headers, **bearer("second-token-of-ann")}, id=ann.id)
        other = SessionPeer(port=ann.port, headers={**ann.headers, **bearer("first-token-of-bob")}, id=ann.id)
        assert [(await peer.call("count", n=1)).status for peer in (ann, renewed, other)] == [200, 200, 404]
