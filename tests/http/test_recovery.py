"""A session that is gone: 404 everywhere, what to do about it, and a new one where that is wanted (H2, H3, H6)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
from mcp.server.lowlevel.server import Server

from perdure._core.limits import Caller
from tests.support.clients.wire_client import Peer, text_of
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

UNKNOWN = "x" * 43

REISSUES = 20
"""In place of the usual limit, for a shorter test."""


async def ask_all(peer: Peer) -> list[Any]:
    post = await peer.send(peer.request("ping"))
    return [post, await peer.try_get(), await peer.delete()]


async def test_the_404_to_a_request_names_the_request(shop: ToolServer) -> None:
    """JSON-RPC: a client with several requests under way must know which of them has failed."""
    async with serve(shop.server, recover="strict") as site:
        peer = await site.join()
        peer.session = UNKNOWN
        named = await peer.send(peer.request("ping") | {"id": "p-1"})
        notified = await peer.send({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"})
        listened = await peer.try_get()
        assert [response.json()["id"] for response in (named, notified, listened)] == ["p-1", None, None]


async def test_only_its_owner_learns_why(shop: ToolServer) -> None:
    async with serve(shop.server) as site:
        peer = await site.join()
        await peer.delete()
        for response in await ask_all(peer):
            assert (response.status_code, response.json()["error"]["data"]["reason"]) == (404, "client deleted")


@pytest.mark.parametrize("options", [{"recover": "reissue"}, {}])
async def test_a_reissued_session_can_be_used_at_once(shop: ToolServer, options: dict[str, Any]) -> None:
    """H3: the new session's runtime is started before the 404 with its id leaves. It is the default of a store in
    memory, where each restart loses all sessions."""
    async with serve(shop.server, **options) as site:
        peer = Peer(site)
        peer.session = UNKNOWN
        response = await peer.send(peer.request("ping"))
        assert response.status_code == 404
        assert response.json()["error"]["data"]["recovery"]["action"] == "continue"
        peer.session = response.headers["mcp-session-id"]
        assert await peer.result("count", n=2) == "counted to 2"
        assert (site.app.counters.recoveries_tried, site.app.counters.recoveries_succeeded) == (1, 1)


async def test_a_session_that_expired_unseen_leaves_its_reason_and_its_clients_capabilities(
    shop: ToolServer, caplog: pytest.LogCaptureFixture
) -> None:
    """H3: a sweep has come by many times; the operator sees it in the log and among the counters."""
    times: dict[str, Any] = {"session_grace": 0.2, "replay_window": 1.5, "cleanup_interval": 0.05}
    with caplog.at_level(logging.INFO, "perdure"):
        async with serve(shop.server, recover="reissue", **times) as site:
            peer = await site.join()
            await until(lambda: site.app.counters.sessions_ended)
            assert "session.ended" in {getattr(record, "action", "") for record in caplog.records}
            await asyncio.sleep(0.3)  # sweeps that would have removed the record
            await goes_on_after_expiry(peer)


async def goes_on_after_expiry(peer: Peer) -> None:
    """The 404 has the reason and another session, which has the capabilities of the first handshake: it is asked."""
    response = await peer.send(peer.request("ping"))
    assert (response.status_code, response.json()["error"]["data"]["reason"]) == (404, "replay window passed")
    peer.session = response.headers["mcp-session-id"]
    wire = await peer.call("ask", question="?")
    await peer.answer(await wire.message(), {"action": "accept", "content": {"answer": "yes"}})
    assert text_of((await wire.rest())[-1]) == "yes"


async def test_a_session_that_expired_after_its_process_had_stopped_leaves_the_same(
    shop: ToolServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was in use when its process stopped, and nobody came back to it."""
    async with serve(shop.server, store=SharedStore(tmp_path / "log.db")) as site:
        peer = await site.join()
    times: dict[str, Any] = {"session_grace": 0.2, "replay_window": 1.0, "cleanup_interval": 0.05}
    with caplog.at_level(logging.INFO, "perdure"):
        async with serve(shop.server, store=SharedStore(tmp_path / "log.db"), recover="reissue", **times) as site:
            await until(lambda: site.app.counters.sessions_ended)
            assert "session.ended" in {getattr(record, "action", "") for record in caplog.records}
            await goes_on_after_expiry(peer.through(site))


async def test_a_session_that_its_own_client_deleted_is_not_replaced(shop: ToolServer) -> None:
    async with serve(shop.server, recover="reissue") as site:
        peer = await site.join()
        await peer.delete()
        response = await peer.send(peer.request("ping"))
        assert response.json()["error"]["data"]["recovery"]["action"] == "initialize"
        assert site.app.session_ids() == []


async def test_only_a_post_is_answered_with_a_new_session(shop: ToolServer) -> None:
    """The clients that take a new id take it from there; one that listens as well comes with both, in any order."""
    async with serve(shop.server, recover="reissue") as site:
        peer = Peer(site)
        peer.session = UNKNOWN
        assert (await peer.delete()).headers.get("mcp-session-id") is None
        assert (await peer.try_get()).headers.get("mcp-session-id") is None
        assert site.app.session_ids() == []
        assert (await peer.send(peer.request("ping"))).headers.get("mcp-session-id") is not None


async def test_what_is_no_id_is_not_replaced(site: Site) -> None:
    """Promise 6: what is replaced is remembered, so it has the length of an id. Also by default, in memory."""
    for never_an_id in ("A" * 42, "x", "a b", "%00", "1" * 5000):
        peer = Peer(site)
        peer.session = never_an_id
        response = await peer.send(peer.request("ping"))
        assert (response.status_code, response.headers.get("mcp-session-id")) == (404, None)
        assert response.json()["error"]["data"]["recovery"]["action"] == "initialize"


async def test_a_lost_session_is_replaced_once(shop: ToolServer) -> None:
    """A second caller that knows the lost id gets no share in the new session, and a client that goes on with the lost
    id, as most do, makes no more of them."""
    async with serve(shop.server, recover="reissue") as site:
        peer = Peer(site)
        peer.session = UNKNOWN
        at_once = await asyncio.gather(*(peer.send(peer.request("ping")) for _ in range(5)))
        later = [await peer.send(peer.request("ping")) for _ in range(5)]
        assert sum("mcp-session-id" in answer.headers for answer in (*at_once, *later)) == 1
        assert {answer.status_code for answer in (*at_once, *later)} == {404}
        assert len(site.app.session_ids()) == 1


async def test_a_caller_that_never_uses_the_new_session_gets_no_other(
    shop: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client of that program would leave an unused session behind, loss after loss."""
    monkeypatch.setattr("perdure.http.recovery.ADOPTION_SECONDS", 0.0)
    async with serve(shop.server, recover="reissue") as site:
        peer = Peer(site)
        assert await lose(peer, "a") is not None
        assert await lose(peer, "b") is None
        other = await lose(peer, "c", user_agent="another program")
        assert other is not None
        peer.session = other
        assert await peer.result("count", n=2) == "counted to 2"
        assert await lose(peer, "d", user_agent="another program") is not None
        assert len(site.app.session_ids()) == 3


async def test_a_lost_session_is_replaced_once_by_a_program_that_used_an_earlier_one(
    shop: ToolServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked up whether the earlier one was used; several requests may come meanwhile."""
    monkeypatch.setattr("perdure.http.recovery.ADOPTION_SECONDS", 0.0)
    async with serve(shop.server, store=SharedStore(tmp_path / "log.db"), recover="reissue") as site:
        peer = Peer(site)
        first = await lose(peer, "a")
        assert first is not None
        peer.session = first
        assert await peer.result("count", n=2) == "counted to 2"
        at_once = await asyncio.gather(*(lose(peer, "b") for _ in range(5)))
        assert sum(new is not None for new in at_once) == 1
        assert len(site.app.session_ids()) == 2


async def lose(peer: Peer, letter: str, **headers: str) -> str | None:
    """Ask for a session that is not there; gives the new one, if there is one."""
    response = await peer.send(peer.request("ping"), mcp_session_id=letter * 43, **headers)
    assert response.status_code == 404
    new: str | None = response.headers.get("mcp-session-id")
    return new


async def test_a_store_that_lasts_loses_no_sessions_and_gives_none(shop: ToolServer, tmp_path: Path) -> None:
    async with serve(shop.server, store=SharedStore(str(tmp_path / "log.db"))) as site:
        assert await lose(Peer(site), "a") is None


async def test_a_loop_is_limited(shop: ToolServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """H6: both sides of the limit; callers without a name from one address together."""
    monkeypatch.setattr("perdure.http.recovery.REISSUES", REISSUES)
    async with serve(shop.server, recover="reissue") as site:
        numbers = itertools.count()

        async def ask() -> str:
            peer = Peer(site)
            peer.session = f"{next(numbers):043}"
            response = await peer.send(peer.request("ping"))
            action: str = response.json()["error"]["data"]["recovery"]["action"]
            return action

        actions = [await ask() for _ in range(REISSUES)]
        assert set(actions) == {"continue"}
        while actions[-1] != "initialize":  # the bucket fills while it is emptied: ask faster than that
            actions += sorted(await asyncio.gather(*(ask() for _ in range(5))))
        assert len(site.app.session_ids()) == actions.count("continue")
        assert site.app.counters.recoveries_refused == actions.count("initialize")


async def test_callers_of_one_address_leave_those_of_another_theirs(
    shop: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H6: each address has a limit of its own."""
    monkeypatch.setattr("perdure.http.recovery.REISSUES", 1)
    addresses = iter(["192.0.2.1", "192.0.2.1", "192.0.2.2"])
    monkeypatch.setattr("perdure.http.recovery.caller_of", lambda owner, scope: Caller(owner, next(addresses)))
    async with serve(shop.server, recover="reissue") as site:
        given = [await lose(Peer(site), name) is not None for name in "abc"]
        assert given == [True, False, True]


async def test_a_start_that_fails_is_told_and_leaves_nothing() -> None:
    """H3: 500 with a JSON-RPC error, and the half-made session is gone."""
    server: Server[Any] = Server("broken")

    async def refuse(ctx: Any, call_next: Any) -> Any:
        raise RuntimeError("no")

    server.middleware.append(refuse)
    async with serve(server, recover="reissue", complaint="no") as site:
        peer = Peer(site)
        peer.session = UNKNOWN
        response = await peer.send(peer.request("ping"))
        assert (response.status_code, response.json()["error"]["code"]) == (500, -31008)
        assert site.app.session_ids() == []
        assert site.app.counters.recoveries_failed == 1
