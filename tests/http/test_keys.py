"""Keys of calls: what they look like, whose they are, and what stands behind them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure._core.extension import KEY
from tests.http.test_bounds import LIMIT, Names, bearer
from tests.support.call_peer import CallPeer, result_of, said
from tests.support.crashbox import diary, open_gate, server
from tests.support.live import live
from tests.support.outages import Locked
from tests.support.raw import Answer
from tests.support.site import until

pytestmark = pytest.mark.anyio


async def test_a_malformed_key_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = {"n": 1, "log": str(log)}
    async with live(server=server) as served:
        peer = CallPeer(port=served.port)
        for key in ("", "k" * 256, 7, None, True, ["k"], {"k": 1}, "a\x00b", "a\nb", "\x7f"):
            answer = await peer.call("pay", arguments, params={"_meta": {KEY: key}})
            refused(answer, "must be a string of 1 to 255 characters, none of them a control character")
        for key in ("k" * 256,):
            answer = await peer.call("pay", arguments, headers={"idempotency-key": key})
            refused(answer, "Idempotency-Key must be a string of 1 to 255 characters")
        assert not diary(log)
        for key in ("k" * 255, " ", "\u043a\u043b\u044e\u0447", '"quoted"', "\U0001f511", "\ud800"):
            assert said(result_of(await peer.call("pay", arguments, key=key))) == "counted to 1"
        assert len(diary(log)) == 6


def refused(answer: Answer, words: str) -> None:
    assert (answer.status, answer.error["code"]) == (400, -32602), answer
    assert words in answer.error["message"], answer


async def test_the_header_and_the_member_name_the_same_key(tmp_path: Path) -> None:
    arguments = {"n": 1, "log": str(tmp_path / "log")}
    by_header = {"idempotency-key": "order-7"}
    async with live(server=server) as served:
        peer = CallPeer(port=served.port)
        answers = [
            await peer.call("pay", arguments, headers=by_header),
            await peer.call("pay", arguments, key="order-7"),
            await peer.call("pay", arguments, key="order-7", headers=by_header),
        ]
        assert {said(result_of(answer)) for answer in answers} == {"counted to 1"}
        refused(await peer.call("pay", arguments, key="order-8", headers=by_header), "name different keys")
    assert len(diary(tmp_path / "log")) == 1


async def test_two_headers_with_a_key_are_refused() -> None:
    """Whichever of them counted, another process or a gateway might take the other one."""
    async with live(server=server) as served:
        twice = {"idempotency-key": "order-7", "Idempotency-Key": "order-7"}
        answer = await CallPeer(port=served.port).call("pay", {"n": 1}, headers=twice)
        assert (answer.status, answer.error["code"]) == (400, -32600), answer
        assert answer.error["message"] == "This request has 2 Idempotency-Key headers; it may have one"


async def test_arguments_that_are_written_otherwise_are_the_same(tmp_path: Path) -> None:
    """The order of their names says nothing; what they are does."""
    log = str(tmp_path / "log")
    async with live(server=server) as served:
        peer = CallPeer(port=served.port)
        for arguments in ({"n": 1, "key": "br\u00f6d", "log": log}, {"log": log, "key": "br\u00f6d", "n": 1}):
            assert said(result_of(await peer.call("pay", arguments, key="order-7"))) == "counted to 1"
        other = await peer.call("pay", {"n": 1, "key": "brod", "log": log}, key="order-7")
        assert (other.status, other.error["code"]) == (400, -31009)
    assert len(diary(tmp_path / "log")) == 1


async def test_two_principals_with_one_key_are_two_calls(tmp_path: Path) -> None:
    arguments = {"n": 1, "log": str(tmp_path / "log")}
    async with live(server=server, auth=Names()) as served:
        for name in ("alice", "bob", "alice", "bob"):
            peer = CallPeer(port=served.port, headers=bearer(name))
            assert said(result_of(await peer.call("pay", arguments, key="order-7"))) == "counted to 1"
    assert len(diary(tmp_path / "log")) == 2


async def test_a_request_that_is_refused_leaves_its_key_free(tmp_path: Path) -> None:
    """Also for those that came at the same moment: they are told the same, and not that the log fails."""
    log, gate = tmp_path / "log", tmp_path / "gate"
    async with live(server=server, store=f"sqlite:{tmp_path / 'log.db'}", max_principal_tasks=1) as served:
        peer = CallPeer(port=served.port)
        running = {"n": 2, "gate": str(gate), "pauses": [1], "log": str(log)}
        async with await peer.begin_call("pay", running, key="order-7") as first:
            await until(lambda: diary(log))
            async with Locked(tmp_path / "log.db").begins():
                late = [await peer.begin_call("pay", {"n": 1}, key="order-8") for _ in range(9)]
                await asyncio.sleep(0.1)  # so that they meet; whether they do decides nothing
            for exchange in late:
                answer = await exchange.answer()
                await exchange.aclose()
                assert (answer.status, answer.error["code"]) == (429, LIMIT), answer
            open_gate(f"{gate}.1")
            assert said(result_of(await first.answer())) == "counted to 2"
        assert said(result_of(await peer.call("pay", {"n": 1}, key="order-8"))) == "counted to 1"
