"""The keys of calls on disk: left by a bridge that ended, found by the next one, each once and for a while."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from perdure.remote.state_file import decode
from perdure.stdio.resume_slot import Target
from perdure.stdio.state_files import MAX_LEFT, REJOIN_SECONDS, Keys, KeysFile, digest_of

TARGET = Target(url="http://127.0.0.1:1/mcp")


@pytest.fixture
def place(folder: Path) -> Path:
    return folder / "tokens"


def left(place: Path, *digests: str) -> list[str]:
    """A bridge that ended while these calls ran; their keys."""
    ledger = KeysFile(place, TARGET)
    keys = [ledger.begin(digest).key for digest in digests]
    ledger.close()
    return keys


def test_a_call_is_joined_once(place: Path) -> None:
    keys = left(place, "a", "a", "b")
    ledger = KeysFile(place, TARGET)
    found = [ledger.begin("a").key for _ in range(3)]
    assert found[:2] == keys[:2]
    assert found[2] not in keys


def test_a_handle_is_left_too_and_what_ended_is_not(place: Path) -> None:
    ledger = KeysFile(place, TARGET)
    kept, ended = ledger.begin("a"), ledger.begin("b")
    ledger.note_task(kept, "handle")
    ledger.end(ended)
    ledger.close()
    after = KeysFile(place, TARGET)
    assert (after.begin("a").task, after.begin("b").key == ended.key) == ("handle", False)


def test_a_bridge_that_began_before_the_earlier_one_ended_finds_its_calls(place: Path) -> None:
    earlier, later = KeysFile(place, TARGET), KeysFile(place, TARGET)
    key = earlier.begin("a").key
    assert later.begin("a").key != key
    earlier.close()
    assert later.begin("a").key == key


def test_the_ledger_of_a_bridge_that_lives_or_of_another_target_is_not_taken(place: Path) -> None:
    living = KeysFile(place, TARGET)
    key = living.begin("a").key
    assert KeysFile(place, TARGET).begin("a").key != key
    living.close()
    assert KeysFile(place, Target(url="http://127.0.0.1:2/mcp")).begin("a").key != key
    assert KeysFile(place, TARGET).begin("a").key == key


@pytest.mark.parametrize(("age", "is_joined"), [(REJOIN_SECONDS - 60, True), (REJOIN_SECONDS + 60, False)])
def test_a_bridge_that_was_killed_long_ago(place: Path, age: float, is_joined: bool) -> None:
    """It could not say when: its last sign of life does."""
    ledger = KeysFile(place, TARGET)
    key = ledger.begin("a").key
    [file] = place.glob("calls-*")
    data = file.read_bytes()
    ledger.close()
    file.write_bytes(data)  # as it was before the end
    os.utime(file, (time.time() - age, time.time() - age))
    assert (KeysFile(place, TARGET).begin("a").key == key) is is_joined


def test_calls_that_no_retry_comes_for_are_given_up(place: Path) -> None:
    left(place, "a")
    [file] = place.glob("calls-*")
    entry = {"key": "k", "task": "", "left": time.time()}
    many = [{"digest": str(number), **entry} for number in range(MAX_LEFT + 1)]
    file.write_text(json.dumps({"perdure": 1, "calls": many}))
    ledger = KeysFile(place, TARGET)
    assert [len(decode(Keys, path.read_bytes()).calls) for path in place.glob("calls-*")] == [MAX_LEFT]
    ledger.close()


def test_nothing_stays_behind_when_nothing_runs(place: Path) -> None:
    ledger = KeysFile(place, TARGET)
    ledger.end(ledger.begin("a"))
    ledger.close()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b'{"perdure":1,"calls":[{"x":1}]}'])
def test_a_damaged_ledger_is_said_and_left_behind(place: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    left(place, "a")
    [file] = place.glob("calls-*")
    file.write_bytes(damage)
    ledger = KeysFile(place, TARGET)
    assert not file.exists()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "calls of an earlier process are lost"
    ]
    ledger.close()


def test_a_folder_that_cannot_be_used_is_said_and_calls_go_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "file").write_text("")
    ledger = KeysFile(folder / "file", TARGET)
    assert ledger.begin("a").key
    ledger.close()
    assert len(caplog.records) == 1


def test_without_a_folder_it_is_in_memory() -> None:
    ledger = KeysFile()
    entry = ledger.begin("a")
    ledger.end(entry)
    ledger.beat()
    ledger.close()


def test_what_makes_a_call_the_same() -> None:
    meta = {"_meta": {"io.modelcontextprotocol/clientInfo": {"name": "host", "version": "1"}}}
    one = digest_of({"name": "bake", "arguments": {"a": 1, "b": 2}, **meta})
    assert one == digest_of(
        {"arguments": {"b": 2, "a": 1}, "name": "bake", "_meta": {**meta["_meta"], "progressToken": 3}}
    )
    for other in (
        {"name": "bake", "arguments": {"a": 1}, **meta},
        {"name": "buy", "arguments": {"a": 1, "b": 2}, **meta},
        {"name": "bake", "arguments": {"a": 1, "b": 2}},
    ):
        assert digest_of(other) != one
    assert digest_of({"name": "x"}) == digest_of({"name": "x", "arguments": None, "_meta": None})
