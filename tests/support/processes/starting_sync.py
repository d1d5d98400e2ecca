"""The same as `starting` for tests without an event loop."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE
from typing import IO, Self

from tests.support.processes.starting import can_fork, environment, fork

Env = Mapping[str, str] | None


class Forked:
    """A child of the fork server, with the part of `subprocess.Popen[str]` that tests need."""

    def __init__(self, module: str, *arguments: str, cwd: Path | None, env: Env, errors: int | None) -> None:
        its_input, our_input = os.pipe()
        our_output, its_output = os.pipe()
        if errors == PIPE:
            our_errors, its_errors = os.pipe()
        else:
            our_errors, its_errors = os.open(os.devnull, os.O_RDONLY), os.dup(2 if errors is None else its_output)
        told = fork(module, arguments, (its_input, its_output, its_errors), cwd=cwd, env=env)
        self.stdin: IO[str] | None = os.fdopen(our_input, "w")
        self.stdout: IO[str] | None = os.fdopen(our_output)
        self.stderr = os.fdopen(our_errors)
        self._status = os.fdopen(told)
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def send_signal(self, sig: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._status.readline())
        return self.returncode

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[str, str]:  # noqa: A002
        assert self.stdin is not None
        assert self.stdout is not None
        if self.stdout.closed:  # this is not the first time
            return "", ""
        self.stdin.close()
        errors: list[str] = []
        reading = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reading.start()
        said = self.stdout.read()
        reading.join()
        self.wait(timeout)
        self._close()
        return said, errors[0]

    def _close(self) -> None:
        for file in (self.stdin, self.stdout, self.stderr, self._status):
            if file is not None:
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdin is not None:
            self.stdin.close()
        self.wait()
        self._close()


Program = subprocess.Popen[str] | Forked


def start(module: str, *arguments: str, cwd: Path | None = None, env: Env = None, errors: int | None = PIPE) -> Program:
    """`python -m MODULE ARGUMENTS`, with pipes. Its errors are read apart, with the output (STDOUT), or not at all
    (None: they are this process's)."""
    if can_fork():
        return Forked(module, *arguments, cwd=cwd, env=env, errors=errors)
    return start_interpreter(module, *arguments, cwd=cwd, env=env, errors=errors)


def start_interpreter(
    module: str, *arguments: str, cwd: Path | None = None, env: Env = None, errors: int | None = PIPE
) -> subprocess.Popen[str]:
    """The same as a user does it, for tests of just that."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env=environment(env),
        stdin=PIPE,
        stdout=PIPE,
        stderr=errors,
        text=True,
    )
