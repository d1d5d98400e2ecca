"""Processes on the same machine, looked up by their names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from perdure.store.postgres.nodes import is_running, process_name

NAME = (
    "import sys; from perdure.store.postgres.nodes import process_name;"
    " print(process_name(), flush=True); sys.stdin.read()"
)


@pytest.mark.skipif(process_name() is None, reason="the system names no processes")
def test_a_process_is_there_until_it_has_ended() -> None:
    """Also while its parent has not asked for its exit status."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", NAME], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert is_running(name, process_name()) is True
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_running(name, process_name()) is False
        process.wait()
        assert is_running(name, process_name()) is False


def test_a_process_that_began_at_another_time_is_another_one() -> None:
    """Ids are used again."""
    name = f"boot 1 {os.getpid()} 1"
    assert is_running(name, "boot 1 2 3") is False


@pytest.mark.parametrize(
    "name", [None, "another 1 1 1", "boot 2 1 1", "boot 1", "boot 1 x 1", f"boot 1 {10**30} 1", ""]
)
def test_a_process_of_another_machine_or_container_cannot_be_looked_up(name: str | None) -> None:
    assert is_running(name, "boot 1 2 3") is None
    assert is_running("boot 1 2 3", None) is None
