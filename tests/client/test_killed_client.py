"""The client's own process is killed in the middle of a call and started again with the same state (R12, H8, B8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.client_process import client_process
from tests.support.processes.cluster import GATE_FILE_TOOLS, cluster
from tests.support.processes.serving import serving
from tests.support.servers.gate_file_tools import diary, open_gate

pytestmark = pytest.mark.anyio

OPTIONS = ("--retry", "0.05")


def is_end_of_count(progress: list[float], n: int, seen: int) -> bool:
    """Whether these are the last numbers up to n, none missing: a few that were seen already may come again."""
    return progress == list(range(int(progress[0]), n + 1)) and progress[0] <= seen + 1


async def test_the_next_process_gets_the_rest_of_the_call_and_its_result(tmp_path: Path) -> None:
    gate, log, state = tmp_path / "gate", tmp_path / "diary", tmp_path / "agent.json"
    arguments = {"n": 8, "gate": str(gate), "pauses": [4], "log": str(log)}
    async with serving(GATE_FILE_TOOLS, *OPTIONS, "--store", "memory:") as served:
        async with client_process(served.url, state, "pay", **arguments) as first:
            await first.until(progress=4.0)
            await first.kill()
        open_gate(f"{gate}.4")
        async with client_process(served.url, state) as second:
            said = await second.rest()
        assert said[0] == {"session": first.said[0]["session"], "pending": [["pay", arguments]]}
        assert is_end_of_count(second.told("progress"), 8, seen=4)
        assert second.told("result") == ["counted to 8"]
        assert len(diary(log)) == 1
        async with client_process(served.url, state) as third:
            assert await third.rest() == [{"session": first.said[0]["session"], "pending": []}]


async def test_killed_again_and_again_nothing_is_lost(tmp_path: Path) -> None:
    """Each process sees a part of the count; together they see all of it."""
    gate, state = tmp_path / "gate", tmp_path / "agent.json"
    arguments = {"n": 12, "gate": str(gate), "pauses": [3, 6, 9]}
    seen: set[float] = set()
    async with serving(GATE_FILE_TOOLS, *OPTIONS, "--store", "memory:") as served:
        async with client_process(served.url, state, "pay", **arguments) as first:
            await first.until(progress=3.0)
            await first.kill()
        seen.update(first.told("progress"))
        for pause in (3, 6):
            open_gate(f"{gate}.{pause}")
            async with client_process(served.url, state) as next_one:
                await next_one.until(progress=pause + 3.0)
                await next_one.kill()
            seen.update(next_one.told("progress"))
        open_gate(f"{gate}.9")
        async with client_process(served.url, state) as last:
            await last.rest()
        seen.update(last.told("progress"))
    assert seen == set(range(1, 13))
    assert last.told("result") == ["counted to 12"]


async def test_a_question_that_the_killed_client_had_not_answered_is_asked_again(tmp_path: Path) -> None:
    """P6: the position is after the question already, so the state remembers it."""
    state = tmp_path / "agent.json"
    async with serving(GATE_FILE_TOOLS, *OPTIONS, "--store", "memory:") as served:
        async with client_process(served.url, state, "ask", question="hang on?") as first:
            await first.until(asked="hang on?")
            await first.kill()
        async with client_process(served.url, state, "-", "answers") as second:
            await second.rest()
        assert second.told("asked") == ["hang on?"]
        assert second.told("result") == ["at last"]


async def test_client_and_server_are_killed_together(tmp_path: Path) -> None:
    """The server settles the call, the next client gets: outcome unknown, with tool and arguments; it ran once."""
    gate, log, state = tmp_path / "gate", tmp_path / "diary", tmp_path / "agent.json"
    arguments = {"n": 8, "gate": str(gate), "pauses": [4], "log": str(log)}
    async with cluster(tmp_path / "log.db", *OPTIONS) as site:
        async with client_process(site.proxy.url, state, "pay", **arguments) as first:
            await first.until(progress=4.0)
            await first.kill()
        await site.crash()
        open_gate(f"{gate}.4")
        async with client_process(site.proxy.url, state) as second:
            said = await second.rest()
        assert (said[-1]["unknown"], said[-1]["arguments"]) == ("pay", arguments)
        assert len(diary(log)) == 1
