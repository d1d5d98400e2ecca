"""`kill -9` at any moment: what was acknowledged exists, nothing exists by half, the file is sound (promises 1, 3)."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from perdure._core.states import CallState
from perdure.store.sqlite import SqliteStore
from perdure.testing._values import SESSION, all_events

pytestmark = pytest.mark.anyio

KILLS = 10


@dataclass
class Appender:
    """The process of `appender.py`; see there."""

    input: IO[str]
    output: IO[str]

    def run_and_kill(self, mode: str, path: Path, *, after: int) -> dict[str, tuple[int, bool]]:
        """Let it append, kill it after so many acknowledgements; returns the last one of each stream."""
        self.input.write(f"{mode} {path}\n")
        self.input.flush()
        acknowledged: dict[str, tuple[int, bool]] = {}
        pid, seen = 0, 0
        for line in self.output:
            kind, *rest = line.split()
            if kind == "pid":
                pid = int(rest[0])
            elif kind == "ack":
                acknowledged[rest[0]] = (int(rest[1]), rest[2] == "1")
                seen += 1
            else:
                return acknowledged
            if pid and seen >= after:
                os.kill(pid, signal.SIGKILL)
                pid = 0
        raise AssertionError("the appender ended by itself")


@pytest.fixture(scope="module")
def appender() -> Iterator[Appender]:
    command = [sys.executable, str(Path(__file__).with_name("appender.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Appender(process.stdin, process.stdout)
        process.stdin.close()


def assert_sound(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        for table in ("event", "generation", "call", "ask", "reader"):
            orphans = f"SELECT count(*) FROM {table} WHERE stream NOT IN (SELECT key FROM stream)"
            assert connection.execute(orphans).fetchone() == (0,)


async def assert_nothing_is_half_there(store: SqliteStore) -> dict[str, tuple[int, bool]]:
    """No gap; and the seal, the final answer and the call's end exist together or not at all."""
    ended = {call.stream: call.state is CallState.ANSWERED for call in await store.calls(SESSION)}
    found: dict[str, tuple[int, bool]] = {}
    for stream in await store.streams(SESSION):
        events = await all_events(store, stream.id)
        assert [event.seq for event in events] == list(range(1, stream.last + 1))
        assert [event.final for event in events if event.final] == [True] * stream.sealed
        assert ended[stream.id] == stream.sealed
        found[stream.id] = (stream.last, stream.sealed)
    return found


@pytest.mark.parametrize("mode", ["inline", "threaded"])
async def test_what_was_acknowledged_survives_kill_9(appender: Appender, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "log.db"
    moments = random.Random(mode)
    kept: dict[str, tuple[int, bool]] = {}
    for _ in range(KILLS):
        acknowledged = appender.run_and_kill(mode, path, after=moments.choice([0, 1, 5, 40, 150]))
        async with SqliteStore(str(path)) as store:
            found = await assert_nothing_is_half_there(store)
        assert_sound(path)
        for stream, (last, sealed) in acknowledged.items():
            assert found[stream] >= (last, sealed)
        assert {stream: found[stream] for stream in kept} == kept, "what an earlier process wrote does not change"
        kept = found
    assert kept, "something was written at all"
