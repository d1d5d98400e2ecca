"""What works on a system without `fcntl`, and what is refused there by name. Real processes in which it is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.clients.raw_http import Peer, SessionPeer, text_of
from tests.support.processes.serving import Served, serving
from tests.support.processes.starting import environment
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

WITHOUT = (sys.executable, "-m", "tests.store.without_fcntl")
STUBBORN = "tests.support.servers.slow_tools:server"
REASON = "this system has no locks that tell which processes live (Python's fcntl)"
SECONDS = 60


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STUBBORN_FOLDER", str(tmp_path))
    return tmp_path


def told(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*WITHOUT, "perdure", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment(), check=False)


@asynccontextmanager
async def served_alone(folder: Path) -> AsyncIterator[tuple[Served, Peer]]:
    argv = (*WITHOUT, "perdure", "serve")
    async with serving(STUBBORN, "--store", f"sqlite:{folder}/log.db", argv=argv) as served:
        yield served, Peer(port=served.port)


@pytest.mark.parametrize("arguments", [("--version",), ("serve", "--help")])
def test_the_command_tells_what_it_is(arguments: tuple[str, ...]) -> None:
    answer = told(*arguments)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.lower().startswith(("perdure ", "usage: perdure"))


def test_workers_are_refused_by_name(folder: Path) -> None:
    answer = told("serve", STUBBORN, "--workers", "2", "--port", "0", "--store", f"sqlite:{folder}/log.db")
    said = f"perdure: --workers 2 cannot work here: {REASON}; serve with one process\n"
    assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", said)


async def test_one_process_serves_a_file_and_the_next_one_goes_on_after_a_kill(folder: Path) -> None:
    """Until then a second process on the same file is refused by name."""
    async with served_alone(folder) as (first, peer):
        answer = told("serve", STUBBORN, "--port", "0", "--store", f"sqlite:{folder}/log.db")
        said = f"perdure: another process serves this log, and {REASON}: one at a time may\n"
        assert (answer.returncode, answer.stderr) == (2, said)
        session = await peer.session()
        async with await session.begin_call("look_for", name="bread") as call:
            await call.until_messages(1)
            await first.kill()
    (folder / "bread").touch()
    async with served_alone(folder) as (second, peer):
        next_life = SessionPeer(port=second.port, headers=session.headers, id=session.id)
        async with await next_life.resume(call.position) as resumed:
            [*_, last] = (await resumed.answer()).messages
    assert text_of(last) == "bread is there"


@pytest.mark.long
async def test_a_client_keeps_its_session_and_shares_its_state_with_no_other(folder: Path) -> None:
    state = str(folder / "agent.json")
    async with serving(STUBBORN, "--store", "memory:") as served:
        with keeping(served.url, state) as first:
            known = line_of(first)
            assert len(known) > 20
            await until(lambda: known in Path(state).read_text())
            with keeping(served.url, state) as second:
                assert line_of(second) == f"another client uses the state {state}"
            first.kill()
        with keeping(served.url, state) as third:
            assert line_of(third) == known


def keeping(url: str, state: str) -> subprocess.Popen[str]:
    command = [*WITHOUT, "tests.store.client_with_state_file", url, state]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), bufsize=1
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
