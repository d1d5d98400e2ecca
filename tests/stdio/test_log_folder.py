"""The folder of a target's log: shared by its bridges, and removed when none has used it for long."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from perdure.stdio.log_folder import log_folder
from perdure.stdio.resume_slot import FORGOTTEN, Target

NOW = 2_000_000_000.0


def target(name: str) -> Target:
    return Target(url="", arguments=[name])


def test_bridges_of_a_target_share_a_folder(tmp_path: Path) -> None:
    with log_folder(tmp_path / "state", target("a")) as one, log_folder(tmp_path / "state", target("a")) as same:
        assert one == same
        assert one is not None
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
        with log_folder(tmp_path / "state", target("b")) as other:
            assert other != one


def test_a_folder_goes_that_no_bridge_has_used_for_long(tmp_path: Path) -> None:
    folders: list[Path] = []
    for name in "ab":
        with log_folder(tmp_path, target(name)) as folder:
            assert folder is not None
            (folder / "log.db").touch()
            folders.append(folder)
    (tmp_path / "log-of-mine").mkdir()
    with log_folder(tmp_path, target("a")) as used:
        for folder in (*folders, tmp_path / "log-of-mine"):
            os.utime(folder, (NOW - FORGOTTEN - 1,) * 2)
        with log_folder(tmp_path, target("c"), now=NOW) as third:
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
                path.name for path in (folders[0], third, tmp_path / "log-of-mine") if path is not None
            )
        assert used == folders[0]


@pytest.mark.parametrize("how", ["unknown", "open to others", "a file"])
def test_without_a_folder_the_log_is_in_memory(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    directory: Path | None = tmp_path / "state"
    if how == "unknown":
        directory = None
    elif how == "a file":
        (tmp_path / "state").touch()
    else:
        (tmp_path / "state").mkdir()
        (tmp_path / "state").chmod(0o755)
    with log_folder(directory, target("a")) as folder:
        assert folder is None
    assert "the log is kept in memory, and ends with this process" in caplog.text
