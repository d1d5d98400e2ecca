"""Keeps the processes of one upstream: starts them within its limits, slows a crash loop, and ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import IO

from perdure._core.backoff import Backoff, Pauses
from perdure._core.lines import EDGE_BYTES
from perdure._core.text import format_size
from perdure.errors import Misuse
from perdure.gateway import reaper
from perdure.gateway.child import Child, ChildProgram
from perdure.gateway.lane import Reason, UpstreamUnavailable
from perdure.gateway.memory import memory_of
from perdure.gateway.upstream import Upstream
from perdure.telemetry.counters import UpstreamNumbers
from perdure.telemetry.log_records import PeerLog, log_event

#: A process that ends sooner after its start has hardly served; one that serves for as long after its handshake works.
QUICK_SECONDS = 10.0
#: A server that needs a moment (its database starts) is tried again soon, a broken one costs two starts in a minute.
PAUSES = Pauses(first=0.1, longest=30.0)
#: Seconds between two looks at the memory of processes: a look takes some milliseconds, and a process that fills the
#: machine takes seconds.
MEMORY_SECONDS = 1.0
#: Characters of a line that is no message, in the log.
MAX_SHOWN = 200
#: Characters of a program's own words in an answer.
MAX_QUOTED = 500
#: What the system lacks for the moment; every other error at a start is the program's, or the configuration's.
_SCARCE = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
#: Seconds for the reaper to end what is left: its own time of grace, and a moment to start on a busy machine.
_REAPER_SECONDS = reaper.GRACE + 5.0


def program_of(upstream: Upstream) -> ChildProgram:
    return ChildProgram(upstream=upstream, env={} if upstream.needs_caller else upstream.values_for({}, ""))


class Reaper:
    """The process that ends this process's children after its death (`reaper.py`): started with the first of them, and
    again if it was killed itself."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: dict[int, str] = {}

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def add(self, group: int) -> None:
        self._groups[group] = started = reaper.start_time(group)
        self._write(f"+{group} {started}\n")

    def remove(self, group: int) -> None:
        if self._groups.pop(group, None) is not None:
            self._write(f"-{group}\n")

    async def aclose(self) -> None:
        """End it, and with it the groups that were not removed."""
        if self._process is not None:
            self._pipe.close()
            process, self._process = self._process, None
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _REAPER_SECONDS)

    def _write(self, line: str) -> None:
        if self._process is not None:
            try:
                self._pipe.write(line.encode())
                return
            except BrokenPipeError:  # it was killed
                self._pipe.close()
                self._process.wait()
        if not self._groups:
            return
        try:
            # A group of its own: Ctrl-C is not for it. No output: a reader of the gateway's would wait for its end.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            sentence = f"the reaper did not start, so children outlive a gateway that is killed: {error}"
            log_event(logging.WARNING, "reaper.failed", sentence)
            self._process = None
            return
        os.set_blocking(self._pipe.fileno(), False)  # should it be stopped, the gateway goes on
        self._pipe.write("".join(f"+{group} {started}\n" for group, started in self._groups.items()).encode())

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin


_shared: list[Reaper] = []
"""The reaper of this process, once for each of its users."""


@asynccontextmanager
async def shared_reaper() -> AsyncIterator[Reaper]:
    """Use the one reaper of this process during a block, beside other upstreams. It ends with the last of them."""
    reaper = _shared[0] if _shared else Reaper()
    _shared.append(reaper)
    try:
        yield reaper
    finally:
        _shared.pop()
        if not _shared:
            await reaper.aclose()


class Children:
    """The processes of one upstream, for all its sessions."""

    def __init__(
        self,
        program: ChildProgram,
        *,
        reaper: Reaper,
        pauses: Pauses = PAUSES,
        lanes_wait: bool = True,
        shows_errors: bool = False,
        numbers: UpstreamNumbers | None = None,
    ) -> None:
        """`lanes_wait`: a lane that is closed waits until its process is gone. Otherwise `aclose` alone waits.
        `shows_errors`: the client is the program's own user, and an error shows the last line on stderr."""
        if os.name != "posix":
            raise Misuse("Servers over stdio need a POSIX system; on Windows, use WSL or a server over HTTP")
        self.program = program
        self.noise = 0
        """Lines on stdout that were no messages."""
        self.log = PeerLog()
        """For records that the program causes."""
        self.numbers = numbers or UpstreamNumbers()
        self.lanes_wait = lanes_wait
        self.shows_errors = shows_errors
        self.on_restart: list[Callable[[], None]] = []
        """Called before the processes are ended by `restart`."""
        self._reaper = reaper
        self._no_deaths = Backoff(pauses=pauses, quick=QUICK_SECONDS)
        self._backoff = self._no_deaths
        self._living: set[Child] = set()
        self._spares: deque[Child] = deque()
        self._filling: asyncio.TimerHandle | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._is_closed = False
        self._is_missing = False
        """The program was not found the last time."""
        self._last_end = ""
        """How the last process ended that was not told to."""

    @property
    def count(self) -> int:
        """Process groups that are not gone, spares included."""
        return len(self._living)

    @property
    def room(self) -> int:
        """Processes that may still be started, or are started and not used."""
        return self.program.settings.max_processes - self._running + len(self._spares)

    @property
    def _running(self) -> int:
        """Processes that have not ended. One that has is not counted while the rest of its group is ended: another one
        takes its place at once."""
        return sum(child.status is None for child in self._living)

    @property
    def pause(self) -> float:
        """Seconds until the next start may be, after deaths soon after a start."""
        return self._backoff.wait(time.monotonic())

    @property
    def longest_end(self) -> float:
        """Seconds from `end` until a process is gone, unless the kernel keeps it."""
        return 3 * self.program.grace + 1.0

    def start(self, program: ChildProgram | None = None, *, is_probe: bool = False) -> Child:
        """A process that was not greeted yet: a spare, or a new one. `program`: with the variables of one caller.
        `is_probe`: neither its start nor its end before it is greeted says how the program does. Raises
        `UpstreamUnavailable`."""
        if program is not None:
            return self._start(program, is_probe=is_probe)
        if self._spares:
            child = self._spares.popleft()
            child.is_probe = is_probe
        else:
            child = self._start(is_probe=is_probe)
        self._fill_soon()
        return child

    def start_ahead(self) -> None:
        """Start a process for the next caller of `start`, which is not ready yet."""
        with contextlib.suppress(UpstreamUnavailable):  # that caller gets the reason
            self._spares.append(self._start())

    def restart(self) -> None:
        """Have the next processes run new code. Those of now end when their requests are answered, or soon."""
        self._backoff = self._no_deaths  # of the earlier code
        for report in self.on_restart:
            report()
        self._spares.clear()
        for child in list(self._living):
            child.retire()

    def warm_up(self) -> None:
        """Start the spares, as far as the limits allow."""
        self._filling = None
        with contextlib.suppress(UpstreamUnavailable):
            while len(self._spares) < self.program.settings.warm and not self._is_closed:
                self._spares.append(self._start())

    def explain_end(self, child: Child) -> str:
        """Say how a process ended, as the end of a sentence; with its last words where the client may have them."""
        words = f" It wrote: {child.last_errors[-1]:.{MAX_QUOTED}}." if self.shows_errors and child.last_errors else ""
        return f"{child.how}.{words}"

    def on_greeted(self, child: Child) -> None:
        child.is_probe = False
        self._backoff = self._backoff.greeted()
        if self._backoff.deaths:
            asyncio.get_running_loop().call_later(QUICK_SECONDS, self._on_held, child)

    def on_served(self) -> None:
        """Note that a process has answered a call: its death after that is not a failed start."""
        self._backoff = self._backoff.held()

    def on_noise(self, line: bytes, mask: Callable[[str], str]) -> None:
        """Count a line on stdout that is not a JSON-RPC message, and log a few of them. `mask`: of its process."""
        self.noise += 1
        level = logging.WARNING if self.noise == 1 else logging.INFO
        shown = mask(line[:EDGE_BYTES].decode(errors="replace"))[:MAX_SHOWN]
        sentence = f"{self.program.name} writes something to stdout that is not a message: {shown}"
        self.log.log_event(level, "upstream.noise", sentence, upstream=self.program.name)

    async def aclose(self) -> None:
        self._is_closed = True
        if self._filling is not None:
            self._filling.cancel()
        if self._measuring is not None:
            self._measuring.cancel()
        if ending := [child.end() for child in self._living]:
            await asyncio.wait(ending, timeout=self.longest_end)

    def _on_held(self, child: Child) -> None:
        if child.status is None:
            self._backoff = self._backoff.held()

    def _fill_soon(self) -> None:
        """Start missing spares later: a request waits now."""
        if self.program.settings.warm and self._filling is None and not self._is_closed:
            self._filling = asyncio.get_running_loop().call_later(self.pause, self.warm_up)

    def _start(self, program: ChildProgram | None = None, *, is_probe: bool = False) -> Child:
        program, settings, name = program or self.program, self.program.settings, self.program.name
        if self._is_closed:
            raise UpstreamUnavailable(Reason.LIMIT, f"The gateway is stopping, and does not start {name}.")
        if pause := self.pause:
            sentence = f"The server {name} ended soon after its start {self._backoff.deaths} times in a row."
            sentence += f" The last time, {self._last_end} It is started again in {pause:.1f} s."
            raise UpstreamUnavailable(Reason.BACKING_OFF, sentence, retry_after=pause)
        if (running := self._running) >= settings.max_processes:
            sentence = f"The server {name} has {running} processes, as many as max_processes allows."
            raise UpstreamUnavailable(Reason.LIMIT, f"{sentence} There is room when a session ends.")
        try:
            child = Child(program, on_exit=self._on_exit, on_gone=self._on_gone)
        except OSError as error:
            raise self._refusal(error) from error
        self._reaper.add(child.pid)
        self._is_missing = False
        child.is_probe = is_probe
        if not is_probe:
            self._backoff = self._backoff.started(child.started)
        self._living.add(child)
        if settings.max_memory is not None and self._measuring is None:
            self._measuring = asyncio.create_task(self._measure(settings.max_memory), name="perdure-memory")
        self.numbers.upstream_starts += 1
        self.numbers.upstream_children = self._running
        log_event(logging.INFO, "upstream.started", f"{name} was started as process {child.pid}", upstream=name)
        return child

    async def _measure(self, most: int) -> None:
        """End processes that take too much memory, as long as there are processes."""
        while self._living:
            await asyncio.sleep(MEMORY_SECONDS)
            try:
                used = await asyncio.to_thread(memory_of, [child.pid for child in self._living])
            except Exception as error:  # such as too many open files; the next measurement counts
                sentence = f"the memory of {self.program.name} could not be measured: {type(error).__name__}: {error}"
                self.log.log_event(logging.WARNING, "upstream.unmeasured", sentence, upstream=self.program.name)
                continue
            for child in list(self._living):
                if child.status is None and (taken := used.get(child.pid, 0)) > most:
                    seen = f"it took {taken >> 20} MiB of memory; its max_memory is {format_size(most)}"
                    child.kill(fault=f"it was ended, because {seen}")
        self._measuring = None

    def _refusal(self, error: OSError) -> UpstreamUnavailable:
        settings, name = self.program.settings, self.program.name
        why = error.strerror or str(error)
        if error.errno in _SCARCE:
            return UpstreamUnavailable(Reason.LIMIT, f"The system starts no process for the server {name}: {why}.")
        if settings.cwd.is_dir():
            what = f"the program {settings.argv[0]!r} cannot be run: {why}"
        else:
            what = f"its folder {str(settings.cwd)!r} is not there"
        sentence = f"The server {name} cannot be started, because {self.program.upstream.mask(what)}."
        if not self._is_missing:
            self._is_missing = True
            log_event(logging.ERROR, "upstream.no_program", sentence, upstream=name)
        return UpstreamUnavailable(Reason.NO_PROGRAM, sentence)

    def _on_exit(self, child: Child) -> None:
        self.numbers.upstream_children = self._running
        if child in self._spares:
            self._spares.remove(child)
        name = self.program.name
        if child.is_probe and not child.is_told_to_end:
            log_event(logging.INFO, "upstream.probed", f"{name}: {child.how} at a probe", upstream=name)
        elif not child.is_told_to_end:
            self.numbers.upstream_restarts += 1
            self._last_end = self.explain_end(child)
            self._backoff = self._backoff.died(started=child.started, now=time.monotonic())
            lines = child.last_errors
            sentence = f"{name}: {child.how}" + (f"; its last words: {lines[-1]}" if lines else "")
            log_event(logging.WARNING, "upstream.died", sentence, upstream=name, stderr="\n".join(lines))
        self._fill_soon()

    def _on_gone(self, child: Child) -> None:
        self._living.discard(child)
        self._reaper.remove(child.pid)
