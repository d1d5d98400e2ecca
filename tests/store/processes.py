"""Starts `other.py` and talks to it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from perdure._core.ids import NodeId
from tests.support.processes.starting_sync import Program, start


class Process:
    """Another process with the file open, which has joined."""

    def __init__(self, process: Program, node: NodeId) -> None:
        self._process = process
        self.node = node
        self.fence = 0

    def begin(self, verb: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other process ended"
        return json.loads(line)

    def does(self, verb: str, *arguments: Any) -> Any:
        self.begin(verb, *arguments)
        return self.result()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stands still meanwhile, as in a debugger or on a machine that sleeps."""
        os.kill(self._process.pid, signal.SIGSTOP)
        while psutil.Process(self._process.pid).status() != psutil.STATUS_STOPPED:
            pass
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


@contextmanager
def process(path: Path, node: str) -> Iterator[Process]:
    with start("tests.store.other_process", str(path), node, errors=None) as started:
        other = Process(started, NodeId(node))
        try:
            other.fence = other.does("join")
            yield other
        finally:
            if started.stdin is not None:
                started.stdin.close()
