"""A process that takes too much memory is ended, and its calls are settled."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from perdure.gateway.memory import memory_of
from tests.gateway.gateways import OUTCOME_UNKNOWN, begin, error_of, gateway, text_of_call
from tests.support.clients.wire_client import text_of
from tests.support.servers.in_process import until

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

MOST = 64 << 20
MUCH = 80 << 20
GONE = 1 << 30
"""No process: Linux counts to 4,194,304."""


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.gateway.children.MEMORY_SECONDS", 0.1)


@pytest.mark.parametrize("steps", [[{"memory": MUCH}], [{"spawn": 600, "memory": MUCH}]], ids=["itself", "its tree"])
async def test_a_process_beyond_its_memory_is_ended_with_that_reason(
    tmp_path: Path, steps: list[dict[str, int]]
) -> None:
    async with gateway(tmp_path, max_memory=MOST) as served:
        peer = await served.join()
        wire = await begin(peer, "plain", *steps, {"hang": True})
        error = error_of((await wire.rest())[-1])
        assert error["code"] == OUTCOME_UNKNOWN
        assert re.fullmatch(
            r"it was ended, because it took \d\d MiB of memory; its max_memory is 64 MiB", error["data"]["reason"]
        )
        assert await text_of_call(peer, {"say": "next"}) == "next"


async def test_a_look_that_fails_is_followed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the failure is: a process is not left alone for ever after one."""
    looks = 0

    def fails_at_first(sessions: Collection[int]) -> dict[int, int]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("a line of /proc that was never seen")
        return memory_of(sessions)

    monkeypatch.setattr("perdure.gateway.children.memory_of", fails_at_first)
    async with gateway(tmp_path, max_memory=MOST) as served:
        peer = await served.join()
        await until(lambda: looks > 1)
        wire = await begin(peer, "plain", {"memory": MUCH}, {"hang": True})
        assert error_of((await wire.rest())[-1])["code"] == OUTCOME_UNKNOWN


async def test_a_call_that_may_run_again_does_so_in_the_next_process(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with gateway(tmp_path, max_memory=MOST) as served:
        peer = await served.join()
        wire = await begin(peer, "idempotent", {"wait": str(go)}, {"say": "whole"})
        await served.has_run()
        hungry = await begin(peer, "plain", {"memory": MUCH}, {"hang": True})
        await hungry.rest()
        await until(lambda: len(served.pids) == 2)
        go.touch()
        assert text_of((await wire.rest())[-1]) == "whole"


async def test_a_process_within_its_memory_is_left_alone(tmp_path: Path) -> None:
    async with gateway(tmp_path, max_memory=4 * MUCH) as served:
        peer = await served.join()
        await text_of_call(peer, {"memory": MUCH}, {"sleep": 0.5})
        assert len(served.pids) == 1


def test_the_memory_of_a_tree_has_orphans_of_its_session_and_children_in_sessions_of_their_own() -> None:
    take = f"import os, time; taken = b'x' * {MUCH}; print(os.getpid(), flush=True); time.sleep(600)"
    hungry = f'"{sys.executable}" -I -S -c "{take}"'
    script = f"({hungry} &); setsid {hungry} & wait"
    with subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as root:
        assert root.stdout is not None
        pids = [int(root.stdout.readline()) for _ in range(2)]
        try:
            assert 2 * MUCH < memory_of([root.pid])[root.pid] < 3 * MUCH
            assert memory_of([GONE]) == {GONE: 0}
        finally:
            for pid in [*pids, root.pid]:
                os.kill(pid, signal.SIGKILL)
