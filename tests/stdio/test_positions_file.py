"""The bridge's notes: what is not this user's own, or not notes at all, is not believed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.remote.state_file import encode
from perdure.stdio.positions_file import MAX_BYTES, Positions, PositionsFile, RunningCall, decode, digest

SESSION = "a-session"
CALL = RunningCall(id="7", method="tools/call", name="bake", position="c.1.2")
WRITTEN = Positions(session=digest(SESSION), position="s.1.2", calls={"x.1": CALL}, sticky=['{"a":1}'])


def good(**changes: object) -> bytes:
    return json.dumps(json.loads(encode(WRITTEN)) | changes).encode()


def test_what_is_noted_is_recalled_for_the_same_session_alone(tmp_path: Path) -> None:
    notes = PositionsFile(tmp_path / "notes")
    notes.begin(SESSION)
    notes.positions = WRITTEN
    notes.changed()
    assert ((tmp_path / "notes").stat().st_mode & 0o777, SESSION in (tmp_path / "notes").read_text()) == (0o600, False)
    again, other = PositionsFile(tmp_path / "notes"), PositionsFile(tmp_path / "notes")
    again.recall(SESSION)
    other.recall("another")
    assert again.positions == WRITTEN
    assert other.positions == Positions(session=digest("another"))
    again.close()
    again.positions.position = "s.1.3"
    again.changed()
    assert decode((tmp_path / "notes").read_bytes()) == WRITTEN  # the slot is another's by then


BAD_CONTENT = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "another form": good(perdure=2),
    "a member too many": good(more=1),
    "a member too few": json.dumps({"perdure": 1}).encode(),
    "a position of another kind": good(position=7),
    "requests of another kind": good(sticky=[1]),
    "a call of another kind": good(calls={"x": {"id": 7, "method": "m", "name": "", "position": None}}),
    "a call whose id is no JSON": good(calls={"x": {"id": "}", "method": "m", "name": "", "position": None}}),
    "too much": good(session="x" * MAX_BYTES),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_bad_content_is_not_used(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "notes"
    path.touch(0o600)
    path.write_bytes(BAD_CONTENT[name])
    _is_not_used(path, caplog)


def _link(path: Path) -> None:
    real = path.with_name("real")
    path.rename(real)
    path.symlink_to(real)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD_FILES: dict[str, Callable[[Path], object]] = {
    "others may read it": lambda path: path.chmod(0o644),
    "others may write it": lambda path: path.chmod(0o620),
    "a link": _link,
    "a folder": _folder,
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_this_users_alone_is_not_used(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T8, for the notes as for the token."""
    path = tmp_path / "notes"
    path.touch(0o600)
    path.write_bytes(good())
    BAD_FILES[name](path)
    _is_not_used(path, caplog)


def _is_not_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes = PositionsFile(path)
    with caplog.at_level(logging.WARNING, logger="perdure"):
        notes.recall(SESSION)
    assert notes.positions == Positions(session=digest(SESSION))
    assert [vars(record)["action"] for record in caplog.records] == ["stdio.positions_unreadable"]


def test_notes_that_cannot_be_written_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notes = PositionsFile(tmp_path / "missing" / "notes")
    with caplog.at_level(logging.WARNING, logger="perdure"):
        notes.begin(SESSION)
        notes.changed()
        (tmp_path / "missing").mkdir()
        notes.changed()
    assert [vars(record)["action"] for record in caplog.records] == ["stdio.positions_unwritten"]
    assert (tmp_path / "missing" / "notes").exists()
