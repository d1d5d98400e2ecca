"""Bridges of real hosts that are killed and started again (T7, T9): the system frees their slots."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Host:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process

    def start(self, count: int, *, target: str = "server") -> list[dict[str, Any]]:
        bridges = self._ask({"start": count, "target": target})
        assert [bridge["host"] for bridge in bridges] == [self.pid] * count
        assert None not in [bridge["kept"] for bridge in bridges]
        return bridges

    def kill(self, bridges: list[dict[str, Any]]) -> None:
        self._ask({"kill": [bridge["pid"] for bridge in bridges]})

    def _ask(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return answer


@contextlib.contextmanager
def running_host(folder: Path) -> Iterator[Host]:
    command = [sys.executable, "-m", "tests.stdio.slots.token_host", str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ}) as process:
        yield Host(process)
        assert process.stdin is not None
        process.stdin.close()


def tokens(bridges: list[dict[str, Any]], which: str) -> list[str]:
    return sorted(bridge[which] for bridge in bridges)


def test_a_bridge_killed_beside_others_gets_its_own_token_back(tmp_path: Path) -> None:
    """T9: with two hosts at once, and another target between them (T7)."""
    folder = tmp_path / "tokens"
    with running_host(folder) as editor, running_host(folder) as desktop:
        stranger = desktop.start(1)
        other = editor.start(1, target="another")
        bridges = editor.start(4)
        assert {bridge["offered"] for bridge in [*stranger, *other, *bridges]} == {None}
        some = random.Random(5)
        for _ in range(8):
            one = some.choice(bridges)
            editor.kill([one])
            (again,) = editor.start(1)
            assert again["offered"] == one["kept"]
            bridges = [bridge for bridge in bridges if bridge is not one] + [again]
        assert sorted(path.name for path in folder.glob("*/token-*")) == sorted(
            [f"token-{name_of(folder, desktop.pid)}"]
            + [f"token-{name_of(folder, editor.pid)}{suffix}" for suffix in ("", "", ".2", ".3", ".4")]
        )
        editor.kill(other)
        desktop.kill(stranger)
        assert tokens(editor.start(1, target="another"), "offered") == tokens(other, "kept")
        assert tokens(desktop.start(1), "offered") == tokens(stranger, "kept")


def test_bridges_killed_together_never_get_each_others_tokens(tmp_path: Path) -> None:
    """T7: they are started again at once and read the slots at the same time, and do not differ."""
    folder = tmp_path / "tokens"
    with running_host(folder) as editor:
        bridges = editor.start(4)
        for count in (4, 2, 3):
            editor.kill(bridges[:count])
            again = editor.start(count)
            assert {bridge["offered"] for bridge in again} == {None}
            bridges = again + bridges[count:]
            editor.kill(bridges[:1])
            (one,) = editor.start(1)
            assert one["offered"] == bridges[0]["kept"]
            bridges[0] = one
        assert len(list(folder.glob("*/token-*"))) == 4


def name_of(folder: Path, pid: int) -> str:
    """A host's pid and start, as the first slot has it."""
    first = next(path.name for path in folder.glob(f"*/lock-{pid}-*") if "." not in path.name)
    return first.removeprefix("lock-")
