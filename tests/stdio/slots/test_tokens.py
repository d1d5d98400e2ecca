"""Where a bridge keeps its token between its lives: T1 to T6, and what is taken for none."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from perdure._files.private import Folder
from perdure.stdio.resume_slot import SlotName, default_directory, open_slot, read_label, this_machine
from tests.support.processes.fake_hosts import kept, opened, said, target, token

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
    second.on_resumed()
    assert said(caplog) == ["Session resumed successfully"]
    assert (folder / "token-7-70").read_bytes() == token(2).encode()
    assert second.holder == first.holder


def test_a_rejected_token_is_deleted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T3."""
    kept(folder)
    slot = opened(folder)
    assert slot.positions is not None
    slot.positions.write_text("of the session that is gone")
    slot.on_rejected()
    assert said(caplog) == ["Broker rejected resume token, starting fresh session"]
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
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)] == [0o700, 0o700]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "token-7-70": 0o600,
        "target-7-70": 0o600,
        "lock-7-70": 0o600,
        "lock": 0o600,
    }


def test_without_an_identity_nothing_is_read_or_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T2, T6: the driver of the session sees no difference."""
    slot = asyncio.run(open_slot(folder, None, target()))
    assert (slot.token(), slot.keep(token()), slot.holder, slot.positions) == (None, False, "", None)
    slot.on_resumed()
    slot.on_rejected()
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
    old.on_rejected()
    old.on_resumed()
    old.release()
    assert old.token() is None
    assert said(caplog) == []
    assert new.token() == token(1)


# Small things


@pytest.mark.parametrize("data", [None, b"", b"[]", b"{}", b"1", b'{"machine": "m"}', b"[" * 1_000, b"[" * 5_000])
def test_what_is_no_label(folder: Path, data: bytes | None) -> None:
    place, name = Folder(folder), SlotName(pid=7, start=70)
    if data is not None:
        place.write("target-7-70", data)
    assert read_label(place, name) is None


def test_a_machine_is_known_without_a_machine_id(tmp_path: Path) -> None:
    assert this_machine(tmp_path / "missing") == this_machine(tmp_path / "missing")
    (tmp_path / "id").write_text("abc\n")
    assert this_machine(tmp_path / "id") != this_machine(tmp_path / "missing")


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
