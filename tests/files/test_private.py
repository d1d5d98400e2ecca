"""Files that are one user's alone: what is read, what is refused, and who holds a lock (T8)."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from perdure._files.private import Untrusted, read, replace
from perdure.client.memory import StateFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    replace(path, b"12345")
    return path


def test_what_was_written_is_read_and_no_other_user_can_use_it(path: Path) -> None:
    assert read(path, limit=5) == b"12345"
    assert read(path, limit=None) == b"12345"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["file"]


def test_a_file_beyond_the_limit_is_refused(path: Path) -> None:
    with pytest.raises(Untrusted, match="more than 4 bytes"):
        read(path, limit=4)


def test_a_file_that_is_missing_is_none(path: Path) -> None:
    assert read(path.with_name("other"), limit=5) is None


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_others_may_read_only_what_may_be_shared(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert read(path, limit=5, may_be_shared=True) == b"12345"
    with pytest.raises(Untrusted, match="others may use it"):
        read(path, limit=5)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_others_may_never_write(path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(Untrusted, match="others may write it"):
        read(path, limit=5, may_be_shared=True)


def test_a_second_name_is_refused_unless_the_file_may_be_shared(path: Path) -> None:
    path.with_name("second").hardlink_to(path)
    assert read(path, limit=5, may_be_shared=True) == b"12345"
    with pytest.raises(Untrusted, match="second name"):
        read(path, limit=5)


def test_a_link_is_not_followed(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(Untrusted, match="it is a link"):
        read(link, limit=5, may_be_shared=True)


def test_a_link_that_waits_for_the_new_file_is_replaced(path: Path) -> None:
    """T8: the old contents of the name `.new` are not written through."""
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_text("kept")
    path.with_name("file.new").symlink_to(elsewhere)
    replace(path, b"new")
    assert (read(path, limit=5), elsewhere.read_text()) == (b"new", "kept")


_HOLDER = """
import os, sys
from perdure.client.memory import StateFile
state = StateFile(sys.argv[1])
state.open()
if os.fork() == 0:
    print("forked", flush=True)
    os.read(int(sys.argv[2]), 1)
    os._exit(0)
os.read(int(sys.argv[2]), 1)
"""


def test_a_child_that_outlives_a_killed_client_does_not_hold_its_state(tmp_path: Path) -> None:
    state, (reading, writing) = tmp_path / "state", os.pipe()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(state), str(reading)], pass_fds=[reading], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"forked\n"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        again = StateFile(state)
        again.open()
        again.close()
    finally:
        os.close(writing)  # the child ends
        os.close(reading)
        assert holder.stdout is not None
        holder.stdout.close()
