"""Hosts that need not run: identities through their own interface, and processes that live as long as a test says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.stdio.identity import Identity, Processes, ProcessInfo
from perdure.stdio.resume_slot import Slot, Target, folder_name, open_slot


def host(*, pid: int = 7, start: int = 70, boot: str = "boot", space: str = "space") -> Identity:
    return Identity(pid=pid, start=start, boot=boot, space=space)


def target(name: str = "server") -> Target:
    return Target(url=f"https://example.com/{name}/mcp")


def place(folder: Path, who: Identity | None = None, what: Target | None = None) -> Path:
    """The folder of a target."""
    return folder / folder_name(who or host(), what or target())


def token(number: int = 0) -> str:
    return f"{number:064d}"


@dataclass(frozen=True)
class Living(Processes):
    """Processes by pid and start."""

    alive: set[tuple[int, int]]
    boot: str = "boot"
    space: str = "space"

    def look(self, pid: int, /) -> ProcessInfo | None:
        return None

    def is_gone(self, pid: int, start: int, /) -> bool:
        return (pid, start) not in self.alive


def opened(
    folder: Path | None,
    who: Identity | None = None,
    what: Target | None = None,
    *,
    processes: Processes | None = None,
    patience: float = 0,
    now: float | None = None,
) -> Slot:
    """The slot that a bridge gets which does not wait."""
    who = who or host()
    living = processes or Living({(who.pid, who.start)})
    return asyncio.run(open_slot(folder, who, what or target(), processes=living, patience=patience, now=now))


def killed(slot: Slot) -> None:
    """What the system does when a bridge is killed: close its files."""
    assert slot.holder
    slot.let_go()


def kept(folder: Path, text: str | None = None) -> Path:
    """The file of a token that was kept by a bridge which has ended."""
    slot = opened(folder)
    assert slot.keep(text or token())
    slot.release()
    return place(folder) / "token-7-70"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The sentences of the package since the last time, those for people who debug left out."""
    records = [record for record in caplog.records if record.name == "perdure" and record.levelname != "DEBUG"]
    sentences = [record.getMessage() for record in records]
    caplog.clear()
    return sentences
