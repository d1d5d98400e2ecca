"""The process dies between a POST and the handle of its task, at each step on the way.

Two requests are on their way when it dies: one with a key, one without, each calling a tool that says nothing of
itself. The tool never runs twice for one request; the key always gets an answer; and a handle that was given resolves.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.clients.recording_client import assert_answered_once, assert_sound, settled
from tests.support.clients.task_client import OUTCOME_UNKNOWN, Balancer, Broken, Message, TaskClient, call_params, said
from tests.support.processes.cluster import GATE_FILE_TOOLS
from tests.support.processes.crash_points import POSTGRES_WRITER, STEPS, Point, at
from tests.support.processes.serving import serving
from tests.support.servers.gate_file_tools import diary
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import ON_POSTGRES, shared_address

pytestmark = pytest.mark.anyio

SQLITE = "perdure.store.sqlite.store"

#: Where the process dies, whatever the store.
POINTS = {
    "before the row": at("perdure.sessions.session", "Intake.accept", "enter"),
    "before the second row": at("perdure.sessions.session", "Intake.accept", "enter", 2),
    "between the row and the tool": at("perdure.sessions.runtime_link", "RuntimeLink.start", "enter"),
    "between the second row and the tool": at("perdure.sessions.runtime_link", "RuntimeLink.start", "enter", 2),
    "before the tool says anything": at("perdure.log.stream", "Stream.append", "enter"),
    "before a handle is written": at("perdure.http.event_stream", "EventStream.result", "enter"),
    "before it is noted that there is a handle": at("perdure.sessions.session", "Session.show_to_client", "enter"),
    "when that is noted and the process does not know": at(
        "perdure.sessions.durable_calls", "DurableCalls.facts", "enter"
    ),
}
SQLITE_POINTS = {
    "in the transaction of the row": at(STEPS, "StreamSteps.open_stream", "leave"),
    "when the first commit is made and the process does not know": at(SQLITE, "SqliteStore._announce", "enter"),
    "when a later commit is made and the process does not know": at(SQLITE, "SqliteStore._announce", "enter", 3),
}
POSTGRES_POINTS = {
    "when the first commit is on its way": at(POSTGRES_WRITER, "Committer._commit", "leave", 2),
    "when the first commit is made and the process does not know": at(POSTGRES_WRITER, "_refusals", "enter"),
    "when a later commit is made and the process does not know": at(POSTGRES_WRITER, "_refusals", "enter", 2),
}
#: Points between two others, or the second time of one: `make test-all` meets them.
LONG = {
    "before the second row",
    "between the second row and the tool",
    "before the tool says anything",
    "before a handle is written",
    "when a later commit is made and the process does not know",
}
ALL = {**POINTS, **(POSTGRES_POINTS if ON_POSTGRES else SQLITE_POINTS)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in ALL])
async def test_a_process_that_dies_before_the_handle_is_out(tmp_path: Path, name: str) -> None:
    await die_before_the_handle(shared_address(tmp_path / "log.db"), tmp_path, ALL[name])


@pytest.mark.long
@pytest.mark.skipif(ON_POSTGRES, reason="all points are met on PostgreSQL anyway")
@pytest.mark.parametrize("name", ["when the first commit is made and the process does not know"])
async def test_a_process_that_dies_before_the_handle_is_out_on_postgres(tmp_path: Path, name: str) -> None:
    await die_before_the_handle(store_url(), tmp_path, POSTGRES_POINTS[name])


async def die_before_the_handle(address: str, tmp_path: Path, point: Point) -> None:
    log = tmp_path / "diary"
    options = ("--store", address, "--task-after", "0s")
    async with serving(GATE_FILE_TOOLS, *options, point=point) as doomed, serving(GATE_FILE_TOOLS, *options) as other:
        there = TaskClient(balancer=Balancer(ports=[doomed.port]))
        # The tool list is read before the point counts.
        assert said(await there.resolved(await there.call("pay", n=1))) == "counted to 1"
        await doomed.arm()
        calls = {
            "keyed": call_params("pay", "mine", n=3, log=str(log), key="keyed", interval=0.005),
            "plain": call_params("pay", n=3, log=str(log), key="plain", interval=0.005),
        }
        met = dict(zip(calls, await asyncio.gather(*(once(there, params) for params in calls.values())), strict=True))
        assert await doomed.has_died(), "the point was not reached"

        client = TaskClient(balancer=Balancer(ports=[doomed.port, other.port]))
        outcome = await client.resolved(await client.insist("tools/call", calls["keyed"]))
        assert said(outcome) in ("counted to 3", OUTCOME_UNKNOWN)
        for answer in filter(None, met.values()):
            assert said(await client.resolved(answer)) in ("counted to 3", OUTCOME_UNKNOWN)
        # The same again, and for ever.
        assert said(await client.resolved(await client.insist("tools/call", calls["keyed"]))) == said(outcome)
        noted = [key for key, _ in diary(log)]
        assert noted.count("plain") <= 1
        assert noted.count("keyed") == (1 if said(outcome) == "counted to 3" else noted.count("keyed")) <= 1
        await settled(address)
    assert_answered_once(address)
    assert_sound(address)


async def once(client: TaskClient, params: Message) -> Message | None:
    """One request, to a process that may die meanwhile."""
    try:
        return await client.ask("tools/call", params)
    except (Broken, ConnectionError):
        return None
