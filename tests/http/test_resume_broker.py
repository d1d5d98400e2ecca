"""The resume broker over HTTP: every row of its table, what a thief gets, and what is refused (T5, T10, T12)."""

from __future__ import annotations

import asyncio
import logging
import re
import string
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx2
import pytest
from fastmcp import FastMCP
from starlette.applications import Starlette
from starlette.routing import Mount

import perdure
from perdure._core.ids import SessionId
from perdure._core.states import SessionState
from perdure.http import resume_tokens
from perdure.store import MemoryStore, notes
from perdure.store.interface import Store
from perdure.store.records import SessionRecord
from tests.runtime.test_own_auth import GUARDED
from tests.support.clients.token_holder import REJECTED, Holder, joined
from tests.support.clients.wire_client import Peer, Web
from tests.support.servers.in_process import Site, serve, under_uvicorn, until
from tests.support.servers.tool_server import Guests, ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.shared_store import SHORT_GRACE, SharedStore

pytestmark = pytest.mark.anyio

REVOKED = {
    "jsonrpc": "2.0",
    "method": "notifications/perdure/resume_revoked",
    "params": {"reason": "a retired token was used"},
}


@pytest.fixture(params=["sqlite", pytest.param("memory", marks=pytest.mark.long)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else SharedStore(tmp_path / "log.db")


@pytest.fixture
async def both(shop: ToolServer, store: Store) -> AsyncIterator[Site]:
    """The tool server, on either store."""
    async with serve(shop.server, store=store) as site:
        yield site


# Resume and confirm


async def test_a_token_leads_back_to_its_session_and_is_renewed_each_time(both: Site) -> None:
    """T5, T12: 256 random bits beside the chain's name, a new token each time, and the session goes on."""
    peer, holder, token = await joined(both)
    tokens = [token]
    for _ in range(3):
        session, token = await holder.resume(token)
        assert session == peer.session
        await holder.confirm(token)
        await holder.confirm(token)  # twice is harmless
        tokens.append(token)
    assert len({token[22:] for token in tokens}) == 4
    assert all(len(token) == 64 and set(token) <= set(string.ascii_letters + string.digits + "-_") for token in tokens)
    assert await (await peer.reattach()).result("count", n=1) == "counted to 1"
    assert both.app.counters.resume_tokens_accepted == 3
    assert both.app.counters.resume_tokens_rejected == 0


async def test_the_old_token_is_good_until_the_new_one_is_confirmed(both: Site) -> None:
    """T10: the holder died before it wrote the new one down, several times."""
    peer, holder, token = await joined(both)
    lost = [(await holder.resume(token))[1] for _ in range(3)]
    session, new = await holder.resume(token)
    assert session == peer.session
    assert new not in lost
    await holder.confirm(new)
    assert (await holder.resume(new))[0] == peer.session


async def test_a_new_token_that_was_never_confirmed_is_good_as_well(both: Site) -> None:
    """T10: the holder died after it wrote the new one down; the one before is retired by its use."""
    peer, holder, first = await joined(both)
    _, second = await holder.resume(first)
    session, third = await holder.resume(second)
    assert session == peer.session
    await holder.confirm(third)
    assert (await holder.resume(third))[0] == peer.session
    assert await holder.is_rejected("resume", first)
    assert both.app.counters.resume_chains_revoked == 1


@pytest.mark.parametrize("action", ["resume", "confirm", "revoke"])
@pytest.mark.parametrize("which", ["voided", "retired"])
async def test_a_token_that_is_used_after_its_time_revokes_the_chain(
    both: Site, action: str, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    """T10: used twice by two holders. Whoever is attached keeps the session, hears of it and gets a new chain."""
    caplog.set_level(logging.DEBUG, "perdure")
    peer, holder, first = await joined(both)
    standalone = await peer.get()
    await standalone.event()
    _, second = await holder.resume(first)
    _, third = await holder.resume(first)
    if which == "retired":
        await holder.confirm(third)
    response = await holder.use(action, second if which == "voided" else first)
    assert (response.status_code, response.json()) == ((200, {}) if action == "revoke" else REJECTED)
    for token in (first, second, third):
        assert await holder.is_rejected("resume", token)
    assert await standalone.message() == REVOKED
    assert await peer.result("count", n=1) == "counted to 1"
    fresh = await holder.open(peer.session)
    assert (await holder.resume(fresh))[0] == peer.session
    [event] = [record for record in caplog.records if getattr(record, "action", "") == "resume.revoked"]
    assert (event.levelno, getattr(event, "session", "")) == (logging.WARNING, peer.session[:8])
    secrets = {first, second, third, fresh, holder.id}
    assert not [secret for secret in secrets if secret in caplog.text]
    assert not re.search("[0-9a-f]{64}", caplog.text)
    assert both.app.counters.resume_chains_revoked == 1


async def test_a_client_that_attaches_later_learns_of_a_revoked_chain(both: Site) -> None:
    """It stands in the log of the standalone stream, as any other message."""
    peer, holder, first = await joined(both)
    standalone = await peer.get()
    position = (await standalone.event()).id
    await standalone.drop()
    await holder.rotate(first)
    assert await holder.is_rejected("confirm", first)
    assert await (await peer.get(position)).message() == REVOKED


async def test_its_holder_may_revoke_a_chain_and_says_so_twice(both: Site) -> None:
    """By either token; the session goes on, and nobody is told."""
    peer, holder, first = await joined(both)
    for token in (first, (await holder.resume(first))[1]):
        await holder.revoke(token)
        await holder.revoke(token)
        assert await holder.is_rejected("resume", token)
        first = await holder.open(peer.session)
    assert both.app.counters.resume_chains_revoked == 0
    assert await peer.result("count", n=1) == "counted to 1"


async def test_a_session_has_one_chain(both: Site) -> None:
    """A new one takes the place of the one before, in silence."""
    peer, holder, first = await joined(both)
    second = await holder.open(peer.session)
    assert await holder.is_rejected("resume", first)
    assert (await holder.resume(second))[0] == peer.session
    assert both.app.counters.resume_chains_revoked == 0


async def test_of_two_who_resume_at_once_one_goes_on(both: Site) -> None:
    """T10: two holders of one token. The chain is revoked as soon as the other one says a word."""
    peer, holder, first = await joined(both)
    pairs = await asyncio.gather(*(holder.resume(first) for _ in range(8)))
    assert {session for session, _ in pairs} == {peer.session}
    statuses = [(await holder.use("confirm", token)).status_code for _, token in pairs]
    assert set(statuses) <= {200, 403}
    assert statuses.count(200) <= 1
    assert await holder.is_rejected("resume", first)
    assert both.app.counters.resume_chains_revoked == 1


# Who is rejected, and what it learns


async def test_every_rejection_is_the_same_to_the_byte(shop: ToolServer, store: Store) -> None:
    """T7, T12, promise 5: unknown, malformed, revoked, another holder's or principal's, of a session that ended."""
    async with serve(shop.server, store=store, auth=Guests()) as site:
        ann, holder, token = await joined(site, token="ann-1")
        gone, ended_holder, ended = await joined(site, token="ann-1")
        await gone.delete()
        _, revoker, revoked = await joined(site, token="ann-1")
        await revoker.revoke(revoked)
        bob, thief = Holder(site, bearer="bob-1"), Holder(site, "other host", bearer="ann-1")
        seen = []
        for action in ("resume", "confirm"):
            unknown = "A" * 64
            for text in (unknown, "%" * 64, "é" * 64, "A" * 63 + "="):
                seen.append(await holder.use(action, text))
            other_name = token[:20] + ("B" if token[20] == "A" else "A")  # the chain's own but for its last byte
            seen.append(await holder.use(action, other_name + "A" * 43))
            for who, text in ((bob, token), (thief, token), (ended_holder, ended), (revoker, revoked)):
                seen.append(await who.use(action, text))
        for who, session in ((bob, ann.session), (holder, "x" * 43), (holder, "?"), (holder, gone.session)):
            seen.append(await who.send("open", {"holder": who.id}, mcp_session_id=session))
        assert {bytes_of(response) for response in seen} == {bytes_of(seen[0])}
        assert (seen[0].status_code, seen[0].json()) == REJECTED
        assert site.app.counters.resume_tokens_rejected == len(seen)
        assert (await holder.resume(token))[0] == ann.session, "a stranger's attempts do not touch the chain"
        assert site.app.counters.resume_chains_revoked == 0


def bytes_of(response: httpx2.Response) -> tuple[int, tuple[tuple[bytes, bytes], ...], bytes]:
    """All of an answer but its date."""
    headers = tuple((name, value) for name, value in response.headers.raw if name.lower() != b"date")
    return response.status_code, headers, response.content


async def test_revoking_has_one_answer_whatever_the_token(shop: ToolServer) -> None:
    async with serve(shop.server, auth=Guests()) as site:
        _, holder, token = await joined(site, token="ann-1")
        bob = Holder(site, bearer="bob-1")
        seen = [await who.use("revoke", text) for who, text in ((bob, token), (holder, "A" * 64), (holder, token))]
        assert {bytes_of(response) for response in seen} == {bytes_of(seen[0])}
        assert await holder.is_rejected("resume", token)


async def test_a_renewed_credential_of_the_same_principal_is_as_good(shop: ToolServer) -> None:
    """T12: bound to the principal, not to its bearer token; without one nobody gets to the broker at all."""
    async with serve(shop.server, auth=Guests()) as site:
        peer, holder, token = await joined(site, token="ann-1")
        holder.bearer = "ann-2"
        assert (await holder.resume(token))[0] == peer.session
        for bearer in (None, "eve-1"):
            holder.bearer = bearer
            assert (await holder.use("resume", token)).status_code == 401
        assert (await holder.send("open", b"", method="GET")).status_code == 401


# The session's life


async def test_a_dormant_session_is_resumed_and_its_time_begins_again(shop: ToolServer, store: Store) -> None:
    async with serve(shop.server, store=store, session_grace=SHORT_GRACE) as site:
        peer, holder, token = await joined(site)
        await until(lambda: site.app.session_info(peer.session) is None)
        before = await record_of(site, peer)
        assert before.state is SessionState.DORMANT
        assert (await holder.resume(token))[0] == peer.session
        assert (await record_of(site, peer)).active > before.active


async def test_a_chain_expires_with_its_session(shop: ToolServer, store: Store) -> None:
    """T12: nobody had to sweep for that."""
    window = 3 * SHORT_GRACE
    serving = serve(shop.server, store=store, session_grace=SHORT_GRACE, replay_window=window, cleanup_interval=3600)
    async with serving as site:
        peer, holder, token = await joined(site)
        await until(lambda: site.app.session_info(peer.session) is None)
        await asyncio.sleep(window)  # the window is a time
        assert await holder.is_rejected("resume", token)
        assert await notes.chain_of(site.store, SessionId(peer.session)) is None


async def record_of(site: Site, peer: Peer) -> SessionRecord:
    record = await site.store.session(SessionId(peer.session))
    assert record is not None
    return record


# What cannot be read


async def test_a_body_that_is_wrong_is_told_with_the_field(site: Site) -> None:
    _, holder, token = await joined(site)
    good = {"token": token, "holder": holder.id}
    table: list[tuple[str, Any, str]] = [
        ("resume", b"", "body"),
        ("resume", b"{", "body"),
        ("resume", b'{"token": "\xff"}', "body"),
        ("resume", b"[" * 100_000, "body"),
        ("resume", [good], "body"),
        ("confirm", {**good, "token": token[:-1]}, "token"),
        ("revoke", {**good, "token": 7}, "token"),
        ("resume", {"holder": holder.id}, "token"),
        ("resume", {"token": token}, "holder"),
        ("confirm", {**good, "holder": ""}, "holder"),
        ("resume", {**good, "holder": holder.id.upper()}, "holder"),
        ("open", {"holder": None}, "holder"),
        ("open", {"holder": holder.id}, "Mcp-Session-Id"),
    ]
    for action, body, field in table:
        response = await holder.send(action, body)
        error = response.json()["error"]
        assert (response.status_code, error["data"]) == (400, {"field": field}), (action, body)
        assert error["message"].startswith(f"{field}: ")
        assert token not in response.text
    assert site.app.counters.resume_tokens_rejected == 0
    await holder.confirm(token)


async def test_only_json_by_post_from_where_the_endpoint_lets_in(shop: ToolServer) -> None:
    async with serve(shop.server, max_body=2048) as site:
        await check_the_door(site)


async def check_the_door(site: Site) -> None:
    _, holder, token = await joined(site)
    body = {"token": token, "holder": holder.id}
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        refused = await holder.send("resume", body, method=method)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST, OPTIONS")
    assert (await holder.send("resume", body, method="OPTIONS")).status_code == 204
    assert (await holder.send("resume", body, content_type="text/plain")).status_code == 415
    assert (await holder.send("resume", body, origin="http://evil.example")).status_code == 403
    assert (await holder.send("resume", body, host="evil.example")).status_code == 421
    assert (await holder.send("resume", b" " * 2049)).status_code == 413
    assert (await holder.send("other", body)).status_code == 404
    await holder.confirm(token)


async def test_switched_off_it_is_not_there(shop: ToolServer) -> None:
    async with serve(shop.server, broker=False) as site:
        assert (await Holder(site).use("resume", "A" * 64)).status_code == 404


async def test_it_stands_beside_the_endpoint_wherever_that_is(shop: ToolServer) -> None:
    """Deeper, at the root, mounted in another application, and with a server that brings an application of its own."""
    for path in ("/a/b/mcp", "/"):
        async with serve(shop.server, path=path) as site:
            peer, holder, token = await joined(site)
            assert (await holder.resume(token))[0] == peer.session
    app = perdure.asgi(FastMCP("fast"), store="memory:")
    outer = Starlette(routes=[Mount("/outer", app)], lifespan=app.lifespan)
    async with under_uvicorn(outer) as port:
        web = Web(f"http://127.0.0.1:{port}/outer/mcp")
        peer, holder, token = await joined(web)
        assert (await holder.resume(token))[0] == peer.session
        assert (await holder.send("resume", b"", method="PUT")).status_code == 405
        await web.aclose()
        app.begin_stop()


# Limits and failures


async def test_too_much_from_one_caller_is_refused_also_where_it_is_right(
    shop: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of the limit; another principal does not notice."""
    monkeypatch.setattr(resume_tokens, "REQUESTS", 50)
    async with serve(shop.server, auth=Guests()) as site:
        _, holder, token = await joined(site, token="ann-1")
        statuses = [(await holder.use("confirm", token)).status_code for _ in range(48)]
        assert set(statuses) == {200}
        refused = await until_refused(holder, token)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        _, other, others = await joined(site, token="bob-1")
        await other.confirm(others)
        await asyncio.sleep(1)  # what the answer said
        await holder.confirm(token)


async def until_refused(holder: Holder, token: str) -> httpx2.Response:
    """The bucket fills while it is emptied: ask faster than that."""
    while True:
        for response in await asyncio.gather(*(holder.use("confirm", token) for _ in range(50))):
            if response.status_code != 200:
                return response


@pytest.mark.parametrize("fault", [Fault.RAISES, Fault.HANGS, Fault.LATE])
async def test_while_the_store_fails_it_is_refused_and_nothing_is_lost(shop: ToolServer, fault: Fault) -> None:
    """Promise 7: 503 with a time to come back; the token in the holder's hands is as good as before."""
    store = FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, store_timeout=0.2, complaint="the store fails") as site:
        peer, holder, text = await joined(site)
        for _ in range(2):  # with a token that is confirmed, then with one that is not
            store.writes = fault
            for action in ("resume", "revoke") if fault is Fault.RAISES else ("resume",):
                refused = await holder.use(action, text)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            store.writes, store.reads = Fault.NONE, fault if fault is not Fault.LATE else Fault.RAISES
            assert (await holder.use("confirm", text)).status_code == 503
            store.works()
            await until(lambda: is_well(site))
            session, text = await holder.resume(text)
            assert session == peer.session
        assert site.app.counters.resume_chains_revoked == 0


async def is_well(site: Site) -> bool:
    return (await site.http.get(urljoin(site.url, "/healthz"))).text == '{"status": "ok"}'


async def test_a_server_that_drains_sends_holders_elsewhere(site: Site) -> None:
    _, holder, token = await joined(site)
    await site.app.drain()
    refused = await holder.use("resume", token)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("kind", GUARDED)
async def test_a_servers_own_auth_guards_the_broker_too(kind: str) -> None:
    """T12: by the endpoint's own door, whoever keeps it."""
    async with serve(GUARDED[kind]()) as site:
        peer, holder, token = await joined(site, token="ann-token")
        holder.bearer = "ann-new-token"
        assert (await holder.resume(token))[0] == peer.session
        holder.bearer = "bob-token"
        assert await holder.is_rejected("resume", token)
        holder.bearer = None
        assert (await holder.use("resume", token)).status_code == 401
