"""The bridge's notes: what is not this user's own, or not notes at all, is not believed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from perdure.remote.state_file import encode
from perdure.stdio.state_files import MAX_BYTES, Positions, PositionsFile, RunningCall, decode, digest

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
    "without end": b"[" * 900_000,
    "a position of another kind": good(position=7),
    "a position that no header can carry": good(position="a\n"),
    "a call whose id is no JSON": good(calls={"x": {"id": "}", "method": "m", "name": "", "position": None}}),
    "too much": good(session="x" * MAX_BYTES),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_bad_content_is_not_used(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "notes"
    path.touch(0o600)
    path.write_bytes(BAD_CONTENT[name])
    _is_not_used(path, caplog)


def test_a_file_that_is_not_this_users_alone_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T8, for the notes as for the token."""
    path = tmp_path / "notes"
    path.touch(0o644)
    path.write_bytes(good())
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
