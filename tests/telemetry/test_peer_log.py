"""What a peer can make us log is limited: a few records of each action, then how many more there were (promise 6)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from perdure.http import recovery
from perdure.telemetry import log_records as observe
from tests.support.clients.raw_http import Peer, SessionPeer, message
from tests.support.servers.gated_server import live
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[tuple[str, str]]]:
    """Action and sentence of each warning, as they come."""
    seen: list[tuple[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                seen.append((vars(record).get("action", ""), record.getMessage()))

    handler = Keep()
    logging.getLogger("perdure").addHandler(handler)
    yield seen
    logging.getLogger("perdure").removeHandler(handler)


async def resume(peer: SessionPeer, position: str) -> None:
    async with await peer.resume(position) as exchange:
        await exchange.head()


async def test_bad_positions_are_logged_a_few_times_and_then_summed_up(
    told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "PEER_SECONDS", 3.0)
    async with live() as served:
        peer = await served.session()
        for _ in range(observe.PEER_RECORDS + 7):
            await resume(peer, "no position")
        lines = [sentence for action, sentence in told if action == "position.unreadable"]
        assert lines[: observe.PEER_RECORDS] == ["a Last-Event-ID is not a position"] * observe.PEER_RECORDS
        assert served.app.counters.positions_lost == observe.PEER_RECORDS + 7
        await until(lambda: any("more records" in sentence for _, sentence in told))
        lines = [sentence for action, sentence in told if action == "position.unreadable"]
        assert lines[observe.PEER_RECORDS :] == ["7 more records of position.unreadable within 3 s were not written"]


async def test_each_action_has_records_of_its_own_and_gets_them_again(
    told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "PEER_SECONDS", 0.2)
    log = observe.PeerLog()
    for _ in range(observe.PEER_RECORDS):
        log.log_event(logging.WARNING, "position.unknown", "one")
        log.log_event(logging.WARNING, "position.unreadable", "other")
    assert len(told) == 2 * observe.PEER_RECORDS
    log.log_event(logging.WARNING, "position.unknown", "one too many")
    assert len(told) == 2 * observe.PEER_RECORDS
    await until(
        lambda: told[-1] == ("position.unknown", "1 more records of position.unknown within 0.2 s were not written")
    )
    log.log_event(logging.WARNING, "position.unknown", "again")
    assert told[-1] == ("position.unknown", "again")


async def test_a_caller_in_a_loop_writes_no_line_for_each_round(
    told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "REISSUES", 30)
    async with live(recover="reissue") as served:
        for number in range(50):
            gone = {"mcp-session-id": f"{number:043}"}
            await Peer(port=served.port).ask("POST", message("ping", id=1), headers=gone)
        loops = [sentence for action, sentence in told if action == "session.loop"]
        assert len(loops) == observe.PEER_RECORDS
        # On a slow machine the caller is given a few more meanwhile.
        assert 10 <= served.app.counters.recoveries_refused <= 20
