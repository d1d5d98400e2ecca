"""`perdure stdio --explain` says which process is the host, which session goes on, and why; and the bridge does so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.stdio.program import outcome
from perdure.stdio.resume_slot import survey
from tests.stdio.fake_hosts import host, opened, target, token
from tests.support.processes.serving import python_path

URL = "http://127.0.0.1:9/mcp"


@pytest.mark.parametrize(
    ("waiting", "held", "expected", "resumes"),
    [
        (0, 0, "a fresh one: none of this host waits", False),
        (1, 0, "the one of slot 7-70: it is the only one that waits", True),
        (1, 2, "the one of slot 7-70: it is the only one that waits", True),
        (2, 0, "a fresh one: 2 wait and cannot be told apart", False),
        (2, 1, "a fresh one: 2 wait and cannot be told apart", False),
        (0, 1, "a fresh one, unless slot 7-70 becomes free within a second", False),
    ],
)
def test_what_is_explained_is_what_happens(folder: Path, waiting: int, held: int, expected: str, resumes: bool) -> None:
    slots = [opened(folder) for _ in range(waiting + held)]
    assert all(slot.keep(token(number)) for number, slot in enumerate(slots))
    for slot in slots[:waiting]:
        slot.release()
    before = sorted(folder.rglob("*"))
    assert outcome(survey(folder, host(), target())).startswith(expected)
    assert sorted(folder.rglob("*")) == before
    assert outcome(survey(folder, host(), target("another"))).startswith("a fresh one: none of this host waits")
    assert (opened(folder).token() is not None) is resumes


def explained(*command: str, folder: Path) -> list[str]:
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(), "PERDURE_TOKEN_DIR": str(folder / "tokens")},
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    return ended.stdout.splitlines()


def test_a_script_without_exec_is_named_as_the_host_and_one_with_it_is_not(folder: Path) -> None:
    """T11: a script may start anything, so it is not taken for a launcher."""
    script = folder / "wrap.sh"
    call = f"{sys.executable} -m perdure stdio {URL} --explain"
    script.write_text(f"#!/bin/sh\n{call}\nexit $?\n")
    said = explained("sh", str(script), folder=folder)
    assert [line.split(": ")[1] for line in said[:2]] == ["this bridge", "the host"]
    assert said[2].startswith("host      process ")
    assert "(sh): its bridges continue their sessions" in said[2]
    assert "let the script start the bridge with `exec`" in said[3]
    assert said[-3:] == [
        f"address   {URL}",
        f"files     {folder / 'tokens'}",
        "session   a fresh one: none of this host waits for this address, these options and this directory",
    ]
    script.write_text(f"#!/bin/sh\nexec {call}\n")
    said = explained("sh", str(script), folder=folder)
    assert f"process {os.getpid()} (" in said[2]
    assert not any("(sh)" in line for line in said)
    assert not (folder / "tokens").exists()
