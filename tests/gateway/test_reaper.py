"""A gateway that is killed leaves no process: the reaper ends its children, with the trees below them, and itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from perdure.errors import Misuse
from perdure.gateway import reaper
from perdure.gateway.children import Children, Reaper
from tests.gateway.gateways import gateway
from tests.gateway.pipe_lanes import children_of, lane_to, scripted
from tests.support.processes.marked_processes import MARK
from tests.support.servers.in_process import until

pytestmark = [
    pytest.mark.usefixtures("no_process_left"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def owning(*settings: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process with an open lane, and the pids of the reaper, the launcher, the server and a process below it."""
    command = [sys.executable, "-m", "tests.gateway.lane_owner", *settings]
    env = {**os.environ, MARK: str(os.getpid())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 4
        assert all(map(lives, pids))
        try:
            yield owner, pids
        finally:
            owner.kill()


@pytest.mark.anyio
@pytest.mark.parametrize("settings", [(), ("eof=ignore",), ("eof=ignore", "term=ignore")])
async def test_a_killed_gateway_leaves_no_child_and_nothing_below_it(settings: tuple[str, ...]) -> None:
    """G30."""
    with owning(*settings) as (owner, pids):
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        await until(lambda: not any(map(lives, pids)))


@pytest.mark.anyio
async def test_all_upstreams_of_a_process_have_one_reaper(tmp_path: Path) -> None:
    def reapers() -> list[int]:
        found = psutil.Process().children()
        return [process.pid for process in found if reaper.__file__ in process.cmdline()]

    async with AsyncExitStack() as both:
        for _ in range(2):
            served = await both.enter_async_context(gateway(tmp_path))
            await served.join()
        [one] = reapers()
        async with gateway(tmp_path) as third:
            await third.join()
            assert reapers() == [one]
        assert lives(one)
    assert reapers() == []


@pytest.mark.anyio
async def test_signals_of_a_terminal_or_a_service_manager_leave_the_reaper_at_work() -> None:
    with owning("eof=ignore") as (owner, pids):
        assert os.getpgid(pids[0]) not in (os.getpgid(owner.pid), os.getpgid(pids[1]))
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pids[0], sign)
        assert lives(pids[0])
        os.killpg(owner.pid, signal.SIGINT)  # Ctrl-C ends the owner, without a word to its children
        await until(lambda: not any(map(lives, pids)))


@pytest.mark.anyio
async def test_a_reaper_that_was_killed_is_started_again_with_all_groups() -> None:
    async with children_of(scripted()) as children:
        first = children.start()
        other = Reaper()
        killed = Reaper()
        killed.add(first.pid)
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        before = killed.pid
        await until(lambda: not lives(before))
        second = children.start()
        killed.add(second.pid)
        assert killed.pid not in (None, before)
        assert all(map(lives, (first.pid, second.pid)))
        await killed.aclose()  # ends what was not removed
        await until(lambda: not lives(first.pid) and not lives(second.pid))
        await other.aclose()  # one that was never needed


@pytest.mark.anyio
async def test_a_reaper_leaves_what_was_removed() -> None:
    async with children_of(scripted()) as children:
        child, own = children.start(), Reaper()
        own.add(child.pid)
        own.remove(child.pid)
        await own.aclose()
        assert own.pid is None
        assert lives(child.pid)


@pytest.mark.parametrize(("started", "survives"), [("right", False), ("", False), ("12345", True)])
def test_a_number_that_names_another_process_by_now_is_left_alone(started: str, survives: bool) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        told = reaper.start_time(process.pid) if started == "right" else started
        command = [sys.executable, "-I", "-S", reaper.__file__]
        subprocess.run(command, input=f"+{process.pid} {told}\n+12".encode(), check=True, timeout=60)
        if survives:
            assert process.poll() is None
            process.kill()
        assert process.wait(60) == -signal.SIGKILL if survives else -signal.SIGTERM


def test_the_reaper_is_small_and_knows_nothing_of_the_package() -> None:
    code = f"import sys; exec(open({reaper.__file__!r}).read(), {{'__name__': 'reaper'}}); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert loaded - sys.stdlib_module_names == {"__main__"}
    assert not {"subprocess", "asyncio", "typing"} & loaded


@pytest.mark.anyio
async def test_a_gateway_that_ends_its_children_ends_its_reaper() -> None:
    async with lane_to(scripted()) as lane:
        assert await lane.call({"say": "fine"}) == "fine"
    # `no_process_left` sees the rest.


@pytest.mark.anyio
async def test_windows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    program = scripted()
    monkeypatch.setattr("perdure.gateway.children.os.name", "nt")
    with pytest.raises(Misuse, match="POSIX system; on Windows"):
        Children(program, reaper=Reaper())
