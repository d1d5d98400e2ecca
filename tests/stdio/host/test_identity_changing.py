"""A way up to the host that changes while we look at it is not believed (T2, T7): through the identity's interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from perdure.stdio import identity as parent
from perdure.stdio.identity import Identity, Processes, ProcessInfo, ProcFs, Psutil, identify


@dataclass(kw_only=True)
class Changing(Processes):
    """Processes of which each look may show others."""

    looks: Iterator[dict[int, ProcessInfo]]
    boot: str = "boot"
    space: str = "space"
    count: int = field(default=0)

    def look(self, pid: int, /) -> ProcessInfo | None:
        self.count += 1
        return next(self.looks).get(pid)

    def is_gone(self, pid: int, start: int, /) -> bool:
        raise NotImplementedError


def tree(*processes: tuple[int, int, int, str]) -> dict[int, ProcessInfo]:
    return {
        pid: ProcessInfo(pid=pid, parent=above, start=start, name="x", words=tuple(line.split()))
        for pid, above, start, line in processes
    }


def after(count: int, first: dict[int, ProcessInfo], then: dict[int, ProcessInfo]) -> Iterator[dict[int, ProcessInfo]]:
    yield from [first] * count
    while True:
        yield then


@pytest.mark.parametrize("count", range(5))
def test_a_pid_that_is_used_again_while_we_look_is_not_believed(count: int) -> None:
    """T7: the launcher dies before its second look is over, and its pid becomes that of another host's launcher."""
    before = tree((9, 8, 90, "perdure stdio"), (8, 7, 80, "uvx perdure"), (7, 1, 70, "host"))
    afterwards = tree((9, 1, 90, "perdure stdio"), (8, 6, 95, "uvx other"), (6, 1, 60, "other"), (7, 1, 70, "host"))
    assert identify(Changing(looks=after(count, before, afterwards)), pid=9) is None


def test_what_was_seen_twice_the_same_is_believed() -> None:
    whole = tree((9, 8, 90, "perdure stdio"), (8, 7, 80, "uvx perdure"), (7, 1, 70, "host"))
    changing = Changing(looks=after(6, whole, {}))
    assert identify(changing, pid=9) == Identity(pid=7, start=70, boot="boot", space="space")
    assert changing.count == 6


def test_a_process_without_a_command_line_is_looked_at_again() -> None:
    """T7: a launcher that is ending must not be taken for a host, nor a host that has just begun be missed."""
    ending = tree((9, 8, 90, "perdure stdio"), (8, 7, 80, ""), (7, 1, 70, "host"))
    whole = tree((9, 8, 90, "perdure stdio"), (8, 7, 80, "uvx perdure"), (7, 1, 70, "host"))
    orphan = tree((9, 1, 90, "perdure stdio"))
    found = Identity(pid=7, start=70, boot="boot", space="space")
    assert identify(Changing(looks=after(4, ending, whole)), pid=9) == found
    assert identify(Changing(looks=after(4, ending, orphan)), pid=9) is None
    assert identify(Changing(looks=after(0, {}, ending)), pid=9) is None


def test_a_tree_that_never_rests_has_no_identity() -> None:
    def looks() -> Iterator[dict[int, ProcessInfo]]:
        start = 0
        while True:
            start += 1
            yield tree((9, 8, 90, "perdure stdio"), (8, 7, start, "host"))

    assert identify(Changing(looks=looks()), pid=9) is None


@pytest.mark.parametrize(("launchers", "found"), [(parent.MAX_LAUNCHERS, 100), (parent.MAX_LAUNCHERS + 1, None)])
def test_there_is_an_end_to_launchers(launchers: int, found: int | None) -> None:
    own = 100 + launchers + 1
    line = [(pid, pid - 1, pid, "uvx perdure") for pid in range(101, own)]
    whole = tree((own, own - 1, own, "perdure stdio"), *line, (100, 1, 100, "host"))
    assert _pid_of(identify(Changing(looks=after(0, {}, whole)), pid=own)) == found


@pytest.mark.parametrize("top", [0, 1])
def test_pid_1_and_what_is_outside_the_container_are_no_identity(top: int) -> None:
    """T2."""
    whole = tree((9, top, 90, "perdure stdio"), (1, 0, 1, "host"), (0, 0, 0, "host"))
    assert identify(Changing(looks=after(0, {}, whole)), pid=9) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_who_cannot_be_seen_is_not_taken_for_dead() -> None:
    assert not ProcFs().is_gone(os.getpid(), ProcFs().look(os.getpid()).start)  # type: ignore[union-attr]
    assert ProcFs().is_gone(os.getpid(), 1)
    assert not ProcFs().is_gone(10**30, 1)
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    for table in (ProcFs(), Psutil()):  # it has ended, and its parent has not waited for it
        seen = table.look(child.pid)
        assert seen is not None
        assert seen.words == ()
        assert not table.is_gone(child.pid, seen.start)
    child.wait()
    assert ProcFs().is_gone(child.pid, 1)
    assert Psutil().is_gone(child.pid, 1)


def _pid_of(identity: Identity | None) -> int | None:
    return None if identity is None else identity.pid
