"""Several sessions on one process of an upstream: `process = "principal"` and `"shared"`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.gateway.gateways import (
    OUTCOME_UNKNOWN,
    Gateway,
    Names,
    begin,
    error_of,
    gateway,
    heard,
    methods_of,
    refused_handshake,
    text_of_call,
    until_method,
)
from tests.support.clients.wire_client import Message, Peer, answer_of, progress_of, text_of
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

PID = {"pid": True}


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path, process="shared", max_processes=1) as served:
        yield served


async def ask_for(peer: Peer, method: str, **params: object) -> Message:
    return answer_of(await peer.send(peer.request(method, params)))


# Who shares


async def test_sessions_of_one_principal_share_a_process_and_two_principals_do_not(tmp_path: Path) -> None:
    async with gateway(tmp_path, process="principal", max_caller_processes=1, serving={"auth": Names()}) as served:
        first, second, other = [await served.join(token=name) for name in ("ada", "ada", "bob")]
        assert await text_of_call(first, PID) == await text_of_call(second, PID)
        assert await text_of_call(other, PID) != await text_of_call(first, PID)
        assert len(served.pids) == 2


async def test_sessions_without_a_principal_have_processes_of_their_own(tmp_path: Path) -> None:
    async with gateway(tmp_path, process="principal") as served:
        first, second = await served.join(), await served.join()
        assert await text_of_call(first, PID) != await text_of_call(second, PID)


async def test_a_process_ends_with_the_last_of_its_sessions(shared: Gateway) -> None:
    first, second = await shared.join(), await shared.join()
    running = await begin(first, "plain", {"hang": True})
    await shared.has_run()
    await first.delete()
    await running.rest()
    cancelled = [message for message in await heard(second) if message.get("method") == "notifications/cancelled"]
    assert len(cancelled) == 1
    [pid] = shared.pids
    await second.delete()
    await until(lambda: not psutil.pid_exists(pid))
    assert await text_of_call(await shared.join(), {"say": "next"}) == "next"


async def test_sessions_that_open_at_once_need_room_for_one_process(tmp_path: Path) -> None:
    """The process is not ready while the others come."""
    go = tmp_path / "go"
    async with gateway(tmp_path, f"wait={go}", process="shared", max_processes=1) as served:
        joining = [asyncio.create_task(served.join()) for _ in range(3)]
        await until(lambda: served.pids)
        go.touch()
        assert [await text_of_call(await one, PID) for one in joining] == [str(served.pids[0])] * 3
        assert len(served.pids) == 1


async def test_sessions_that_wait_for_one_failing_process_all_learn_why(tmp_path: Path) -> None:
    async with gateway(tmp_path, "exit=3", process="shared", patience=0) as served:
        _, error = await refused_handshake(served)
        assert error["data"]["reason"] == "died"


# What they share, and what they do not


async def test_ids_progress_and_cancellations_never_cross_sessions(shared: Gateway, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first, second = await shared.join(), await shared.join()
    steps = ({"wait": str(go)}, {"progress": 3})
    wires = [
        await begin(peer, "plain", *steps, {"say": say}, token=7, id=5) for peer, say in ((first, "a"), (second, "b"))
    ]
    await shared.has_run(2)
    third = await begin(second, "plain", {"hang": True}, id=6)
    await shared.has_run(3)
    await first.cancel(6)  # of another session
    await second.cancel(6)
    await third.rest()
    go.touch()
    for wire, said in zip(wires, "ab", strict=True):
        messages = await wire.rest()
        assert progress_of(messages) == [1, 2, 3]
        assert {message["params"]["progressToken"] for message in messages[:-1]} == {7}
        assert (messages[-1]["id"], text_of(messages[-1])) == (5, said)
    cancelled = [message for message in await heard(first) if message.get("method") == "notifications/cancelled"]
    assert len(cancelled) == 1


async def test_a_shared_process_is_told_of_no_capability_and_asks_nobody(shared: Gateway) -> None:
    first, second = await shared.join(), await shared.join()
    answer = await text_of_call(second, {"ask": "elicitation/create", "params": {"message": "?"}})
    assert "-32601" in answer
    said = await heard(first)
    [handshake] = [message for message in said if message.get("method") == "initialize"]
    assert handshake["params"]["capabilities"] == {}
    assert methods_of(said).count("notifications/initialized") == 1


async def test_subscriptions_are_counted_and_updates_go_to_their_subscribers(shared: Gateway) -> None:
    first, second, third = [await shared.join() for _ in range(3)]
    readers = [await peer.get() for peer in (first, second, third)]
    for peer in (first, second):
        assert (await ask_for(peer, "resources/subscribe", uri="note://a"))["result"] == {}
    assert methods_of(await heard(third)).count("resources/subscribe") == 1
    await text_of_call(third, {"update": "note://a"}, {"tools": ["more"]})
    for reader, updates in zip(readers, (1, 1, 0), strict=True):
        found = [message["method"] for message in await reader.messages(updates + 1)]
        assert found == ["notifications/resources/updated"] * updates + ["notifications/tools/list_changed"]
    await ask_for(first, "resources/unsubscribe", uri="note://a")
    assert "resources/unsubscribe" not in methods_of(await heard(third))
    await second.delete()  # the last subscriber
    await until(lambda: _has_heard(third, "resources/unsubscribe"))


async def test_each_session_has_its_own_log_level(shared: Gateway, tmp_path: Path) -> None:
    go = tmp_path / "go"
    quiet, loud, reader = [await shared.join() for _ in range(3)]
    wires = [await peer.get() for peer in (quiet, loud)]
    await ask_for(quiet, "logging/setLevel", level="error")
    await ask_for(loud, "logging/setLevel", level="debug")
    await ask_for(reader, "logging/setLevel", level="warning")
    told = [
        message["params"]["level"] for message in await heard(reader) if message.get("method") == "logging/setLevel"
    ]
    assert told == ["info", "debug"]  # the third session has no level yet at first
    steps = [{"log": level, "level": level} for level in ("debug", "error")]
    # After its answer, so that it belongs to no session.
    await text_of_call(reader, {"answer": "now"}, {"wait": str(go)}, *steps)
    go.touch()
    assert (await until_method(wires[0], "notifications/message"))["params"]["level"] == "error"
    assert (await until_method(wires[1], "notifications/message"))["params"]["level"] == "debug"


async def _has_heard(peer: Peer, method: str) -> bool:
    return method in methods_of(await heard(peer))


async def test_log_messages_go_to_the_sessions_that_run_something(shared: Gateway) -> None:
    first, second = await shared.join(), await shared.join()
    reader = await second.get()
    wire = await begin(first, "plain", {"log": "of the first", "level": "error"})
    assert "notifications/message" in methods_of(await wire.rest())
    await text_of_call(first, {"tools": ["more"]})
    assert (await reader.message())["method"] == "notifications/tools/list_changed"


# The end of a process


async def test_the_death_of_a_shared_process_is_settled_for_each_call(shared: Gateway, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first, second, third = [await shared.join() for _ in range(3)]
    plain = await begin(first, "plain", {"hang": True})
    again = await begin(second, "idempotent", {"wait": str(go)}, {"say": "twice"})
    await shared.has_run(2)
    await shared.kill()
    assert error_of((await plain.rest())[-1])["code"] == OUTCOME_UNKNOWN
    await shared.has_run(3)
    go.touch()
    assert text_of((await again.rest())[-1]) == "twice"
    assert await text_of_call(third, PID) == await text_of_call(first, PID)
    assert len(shared.pids) == 2


async def test_an_idle_session_learns_of_no_restart_while_others_kept_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "perdure")
    async with gateway(tmp_path, process="shared", process_idle=0.2) as served:
        idle, busy = await served.join(), await served.join()
        reader = await idle.get()
        wire = await begin(busy, "plain", {"hang": True}, id=9)
        await until(lambda: any(vars(record).get("action") == "upstream.idle" for record in caplog.records))
        await text_of_call(idle, {"tools": ["more"]})
        found: list[str] = []
        while "notifications/tools/list_changed" not in found:
            found.append((await reader.message())["method"])
        assert "notifications/message" not in found
        await busy.cancel(9)
        await wire.rest()
        assert len(served.pids) == 1
