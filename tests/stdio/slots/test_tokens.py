"""Where a bridge keeps its token between its lives: T1 to T6, and what is taken for none."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from perdure._files.private import Folder
from perdure.stdio.resume_slot import default_directory, open_slot
from tests.stdio.fake_hosts import kept, opened, place, said, target, token

NOT_FOUND = "Token file not found (first run or clean slate)"


def test_a_bridge_that_is_started_again_finds_its_token(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T1, T3, T5, T6."""
    first = opened(folder)
    assert first.token() is None
    assert said(caplog) == [NOT_FOUND]
    assert first.keep(token(1))
    assert first.keep(token(2))
    first.release()
    second = opened(folder)
    assert second.token() == token(2)
    assert said(caplog) == []
    assert (place(folder) / "token-7-70").read_bytes() == token(2).encode()
    assert second.holder == first.holder


def test_a_token_is_deleted_with_the_positions_of_its_session(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T3."""
    kept(folder)
    slot = opened(folder)
    assert slot.positions is not None
    slot.positions.write_text("of the session that is gone")
    slot.forget()
    assert not slot.positions.exists()
    assert slot.token() is None
    assert said(caplog) == [NOT_FOUND]
    assert slot.keep(token(2))
    assert slot.token() == token(2)


def test_files_and_folder_are_this_users_alone(folder: Path) -> None:
    """T8: whatever the umask."""
    before = os.umask(0)
    try:
        slot = opened(folder)
        assert slot.keep(token())
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, place(folder))] == [0o700] * 3
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in place(folder).iterdir()} == {
        "token-7-70": 0o600,
        "lock-7-70": 0o600,
        "lock": 0o600,
    }


def test_without_an_identity_nothing_is_read_or_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T2, T6: the driver of the session sees no difference."""
    slot = asyncio.run(open_slot(folder, None, target()))
    assert (slot.token(), slot.keep(token()), slot.holder, slot.positions) == (None, False, "", None)
    slot.forget()
    slot.release()
    assert not folder.parent.exists()
    assert said(caplog) == []


def test_a_slot_that_was_released_touches_nothing_more(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T9: the next bridge may have it."""
    old = opened(folder)
    assert old.keep(token(1))
    old.release()
    new = opened(folder)
    assert not old.keep(token(2))
    old.forget()
    old.release()
    assert old.token() is None
    assert said(caplog) == []
    assert new.token() == token(1)


# Small things


def test_where_tokens_are_kept() -> None:
    home = Path("/home/u")
    state = {"XDG_STATE_HOME": "/state"}
    assert default_directory({}, platform="linux", home=home) == home / ".local/state/perdure/stdio"
    assert default_directory(state, platform="linux", home=home) == Path("/state/perdure/stdio")
    assert (
        default_directory({"XDG_STATE_HOME": "state"}, platform="linux", home=home)
        == home / ".local/state/perdure/stdio"
    )
    assert default_directory(state, platform="darwin", home=home) == home / "Library/Application Support/perdure/stdio"
    assert default_directory({}, platform="linux", home=None) is None
    assert default_directory({}, platform="darwin", home=None) is None
    assert default_directory(state, platform="linux", home=None) == Path("/state/perdure/stdio")


def test_a_home_with_a_tilde_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Folder("~/tokens")
    assert folder.path == tmp_path / "tokens"
    folder.close()
