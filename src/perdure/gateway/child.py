"""Runs one process group of an upstream's program: starts it, writes to its input, reads its output, and ends it.

The pipes are read and written in the event loop without another task or thread, because each line of a flood would pay
for it. The writing side never waits: lines that the program does not take are kept here, up to `MAX_UNWRITTEN`.

A program may be a launcher (`npx`, a shell script) with a tree of processes below it, so signals go to the group. The
group is a session of its own: Ctrl-C at the gateway's terminal does not reach it. POSIX only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO

from perdure._core.lines import Cutter, Line, TooLong
from perdure._files.locks import HAS_FLOCK
from perdure.gateway.reaper import signal_group
from perdure.gateway.upstream import Program, Upstream
from perdure.runtime.base import Flow
from perdure.telemetry.log_records import log_event

if HAS_FLOCK:
    import fcntl
    import termios

#: Bytes of one turn of the event loop: what a pipe holds, and some hundred messages.
CHUNK = 1 << 16
#: Bytes that wait until the program reads its input. One that leaves a largest line unread hangs.
MAX_UNWRITTEN = 64 * 1024 * 1024
#: Seconds from the end of a program's output to its exit status, which the system knows a moment later.
STATUS_SECONDS = 0.1
#: Bytes of stderr in a second that are logged: a stack trace or a banner at once, and no flood for hours.
STDERR_BYTES = 64 * 1024
#: Bytes of a line of stderr; of a longer one the beginning is logged.
STDERR_LINE_BYTES = 8 * 1024
#: Lines of stderr that the report of a failed start shows: a traceback of Python or Node.
STDERR_LINES = 20
_POLL = 0.02

#: What a program finds of the gateway's environment: the list of the official SDKs, the place of temporary files, and
#: the certificates, without which `npx` and `uvx` wait in silence behind a proxy that has its own.
#: A gateway's secrets are none of its programs' business.
SHORT_LIST = frozenset(("PATH", "HOME", "LANG", "TZ", "TERM", "USER", "LOGNAME", "SHELL", "TMPDIR"))
CERTIFICATES = frozenset(("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"))
PROXIES = frozenset(("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"))
OWN_PREFIX = "PERDURE_"


@dataclass(frozen=True, kw_only=True)
class ChildProgram:
    """The program of an upstream, with the variables that its processes get. `upstream` masks their values."""

    upstream: Upstream
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the configuration adds to the environment."""
    grace: float = 2.0
    """Seconds between the end of the input, SIGTERM and SIGKILL. Hosts wait for as long."""

    @property
    def name(self) -> str:
        return self.upstream.name

    @property
    def settings(self) -> Program:
        assert self.upstream.program is not None
        return self.upstream.program

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process, made of the gateway's own."""

        def passes(name: str, value: str) -> bool:
            if name.startswith(OWN_PREFIX):
                return False
            if self.settings.inherit_env or name in SHORT_LIST | CERTIFICATES or name.startswith("LC_"):
                return True
            return name in PROXIES and "@" not in value  # after a password

        return {name: value for name, value in inherited.items() if passes(name, value)} | dict(self.env)


def format_status(status: int) -> str:
    """Write an exit status, or the signal that ended a process, in words."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


class Child:
    """One started process and its group. Must be made in an event loop.

    Its output is read from `read` on, to its end. A process that has closed its output or its input is ended.
    """

    def __init__(
        self, program: ChildProgram, *, on_exit: Callable[[Child], None], on_gone: Callable[[Child], None]
    ) -> None:
        """Start it; `on_exit` is called when the process has ended, `on_gone` when its group has. Raises `OSError`."""
        self._program = program
        self._on_exit = on_exit
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._process = subprocess.Popen(
            program.settings.argv,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=program.settings.cwd,
            env=program.environment(os.environ),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.started = time.monotonic()
        self.status: int | None = None
        self.is_told_to_end = False
        """Whether it is not needed any more: its end is no accident."""
        self.is_probe = False
        """Whether it was started to find out what it answers: its end before that is one of the answers."""
        self.retire: Callable[[], object] = self.end
        """Ends it when its requests are answered: its lane knows of them."""
        self._fault = ""
        self._exited: asyncio.Future[None] = self._loop.create_future()
        """Shielded where it is waited for. (An `Event` takes 800 bytes, of each idle session.)"""
        self._ending: asyncio.Task[None] | None = None
        self._pidfd: int | None = None

        self.input = Input(_nonblocking(self._process.stdin), on_broken=self._begin_end)
        self._output: IO[bytes] | None = _nonblocking(self._process.stdout)
        self._cutter = Cutter()
        self._take: Callable[[Line], Flow | None] | None = None
        self._on_end: Callable[[], None] = _nothing
        self._pausing: asyncio.Task[None] | None = None
        self._errors: IO[bytes] | None = _nonblocking(self._process.stderr)
        self._error_log = _ErrorLog(program)
        self._loop.add_reader(self._errors, self._on_errors)
        self._watch_exit()

    # Its end

    @property
    def how(self) -> str:
        """How it ended, as part of a sentence."""
        if self._fault:
            return self._fault
        if self.status is None:
            return "the server closed its output"
        return f"the server's process ended ({format_status(self.status)})"

    def end(self, *, fault: str = "") -> asyncio.Task[None]:
        """Close its input, and send SIGTERM and then SIGKILL to its group while that has a process. Done when it is
        gone. `fault`: why it must not go on, as part of a sentence."""
        if self._ending is None:
            self._fault, self.is_told_to_end = fault, not fault
        return self._begin_end()

    def kill(self, *, fault: str) -> asyncio.Task[None]:
        """End it at once. `fault`: as for `end`."""
        ending = self.end(fault=fault)
        signal_group(self.pid, signal.SIGKILL)
        return ending

    def _begin_end(self) -> asyncio.Task[None]:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end())
        return self._ending

    async def _end(self) -> None:
        self.input.close()
        if not await self._is_gone():
            signal_group(self.pid, signal.SIGTERM)
            if not await self._is_gone():
                # No process withstands it, so the group is not waited for: a lazy init keeps its zombies for seconds.
                signal_group(self.pid, signal.SIGKILL)
                try:
                    await asyncio.wait_for(asyncio.shield(self._exited), self._program.grace)
                except TimeoutError:  # the kernel waits for a disk, or for another machine
                    sentence = f"process {self.pid} of upstream {self._program.name} does not end after SIGKILL"
                    log_event(logging.ERROR, "upstream.stuck", sentence, upstream=self._program.name)
                    await asyncio.shield(self._exited)
        if self._take is None:
            self._end_output()  # another one has a reader, who may not have read all of it yet
        self._end_errors()  # a program that left the group may hold them open
        self._on_gone(self)

    async def _is_gone(self) -> bool:
        """Whether the process and its group have ended after the time of grace."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._program.grace):
                await asyncio.shield(self._exited)
                while self._has_group():  # noqa: ASYNC110 - the system reports the end of our own child only
                    await asyncio.sleep(_POLL)
                return True
        return False

    def _has_group(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-self.pid, os.WNOHANG)  # a gateway that is a container's init inherits the child's children
        return signal_group(self.pid, 0)

    def _watch_exit(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):  # a kernel before 5.3
                self._pidfd = os.pidfd_open(self.pid)
                self._loop.add_reader(self._pidfd, self._on_exited)
                return

        def wait() -> None:
            self._process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_exited)

        threading.Thread(target=wait, name=f"perdure-child-{self.pid}", daemon=True).start()

    def _on_exited(self) -> None:
        if self.status is not None or (status := self._process.poll()) is None:
            return
        self.status = status
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._on_errors()
        self._exited.set_result(None)
        self._begin_end()
        self._on_exit(self)  # before the report, after which another one may be started
        if self._output is None:
            self._report_end()
        else:
            self._loop.call_soon(self._on_output)

    # Its output

    def read(self, take: Callable[[Line], Flow | None], on_end: Callable[[], None]) -> None:
        """Hand each line to `take`, and wait for the store where that returns a `Flow`. `on_end` is called when there
        will be no more: at the end of the output, or when the process has ended and all that it wrote was read. (A
        process that it has started may hold the pipe open.)"""
        self._take, self._on_end = take, on_end
        if self._output is not None:
            self._loop.add_reader(self._output, self._on_output)

    def ignore(self) -> None:
        """Throw away what it writes from now on. It is still read, so that the program can end in peace."""
        if self._pausing is not None:
            self._pausing.cancel()
            self._pausing = None
        self.read(_ignore_line, _nothing)
        self._loop.call_soon(self._on_output)

    def _on_output(self) -> None:
        if self._output is None or self._take is None or self._pausing is not None:
            return
        chunk = self._output.read(CHUNK)
        if chunk is None:  # nothing at the moment, and nothing ever of a process that has ended
            if self.status is None:
                return
            chunk = b""
        # What came after the last line end counts: a program may end without one.
        lines = iter(self._cutter.feed(chunk or b"\n"))
        for line in lines:
            if (flow := self._take(line)) is not None:
                self._loop.remove_reader(self._output)
                self._pausing = self._loop.create_task(self._pause(flow, lines, is_last=not chunk))
                return
        self._read_on(is_last=not chunk)

    async def _pause(self, flow: Flow, lines: Iterator[Line], *, is_last: bool) -> None:
        """Wait for the store, and take the other lines of the same chunk."""
        try:
            await flow.wait_for_room()
            for line in lines:
                if self._take is not None and (next_flow := self._take(line)) is not None:
                    await next_flow.wait_for_room()
        finally:
            self._pausing = None
            if self._output is not None:
                self._loop.add_reader(self._output, self._on_output)
                self._read_on(is_last=is_last)

    def _read_on(self, *, is_last: bool) -> None:
        if is_last:
            self._end_output()
        elif self.status is not None:
            self._loop.call_soon(self._on_output)  # until nothing is left: the pipe may stay open without a word

    def _end_output(self) -> None:
        if self._output is None:
            return
        self._loop.remove_reader(self._output)
        self._output.close()
        self._output = None
        if self.status is None:
            self._loop.call_later(STATUS_SECONDS, self._report_end)
        else:
            self._report_end()

    def _report_end(self) -> None:
        self._begin_end()
        on_end, self._on_end = self._on_end, _nothing
        on_end()

    # Its errors

    @property
    def last_errors(self) -> list[str]:
        """The last lines of its stderr, without secrets."""
        return [self._error_log.show(line) for line in self._error_log.last]

    def _on_errors(self) -> None:
        if self._errors is not None and (chunk := self._errors.read(CHUNK)) is not None:
            self._error_log.feed(chunk or b"\n", time.monotonic())
            if not chunk:
                self._end_errors()

    def _end_errors(self) -> None:
        if self._errors is not None:
            self._loop.remove_reader(self._errors)
            self._errors.close()
            self._errors = None
            self._error_log.report_left_out()


class Input:
    """Writes lines to a program, and keeps those that it does not take yet."""

    def __init__(self, pipe: IO[bytes], *, on_broken: Callable[[], object]) -> None:
        self._pipe = pipe
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[memoryview] | tuple[()] = ()
        """Mostly empty, and an empty deque takes 700 bytes, of each idle session."""
        self._unwritten = 0
        self._written = 0
        self.read = 0
        """Bytes that the program may have read. Known once the input is closed."""

    @property
    def is_open(self) -> bool:
        return not self._pipe.closed

    def write(self, line: bytes) -> int:
        """Hand over a line. Returns the number of bytes up to the end of its JSON, without which the program cannot run
        it; 0 if the line is not taken, because the input is closed or too much waits already."""
        if self._pipe.closed or (self._waiting and self._unwritten + len(line) > MAX_UNWRITTEN):
            return 0
        self._waiting = self._waiting or deque()
        self._waiting.append(memoryview(line + b"\n"))
        self._unwritten += len(line) + 1
        end = self._written + self._unwritten - 1
        if len(self._waiting) == 1:
            self._on_writable()
        return 0 if self._pipe.closed else end

    def close(self) -> None:
        if not self._pipe.closed:
            self.read = self._written - self._count_unread()
            self._loop.remove_writer(self._pipe)
            self._pipe.close()
            self._waiting = ()

    def _count_unread(self) -> int:
        """Bytes in the pipe that no process can read any more: the program has ended or closed its input, and nothing
        that it has started holds the pipe. 0 where the system does not say."""
        poll = select.poll()
        poll.register(self._pipe, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            with contextlib.suppress(OSError):
                return int.from_bytes(fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
        return 0

    def _on_writable(self) -> None:
        try:
            while self._waiting:
                part = self._waiting[0]
                if (sent := self._pipe.write(part)) is None:
                    self._loop.add_writer(self._pipe, self._on_writable)
                    return
                self._unwritten -= sent
                self._written += sent
                if sent < len(part):
                    self._waiting[0] = part[sent:]
                else:
                    self._waiting.popleft()
        except OSError:  # the program has closed its input
            self.close()
            self._on_broken()
        else:
            self._waiting = ()
            self._loop.remove_writer(self._pipe)


class _ErrorLog:
    """Logs a program's stderr by line, as much of it as `STDERR_BYTES` allow in a second."""

    def __init__(self, program: ChildProgram) -> None:
        self._program = program
        self._cutter = Cutter(STDERR_LINE_BYTES)
        self._since = 0.0
        self._bytes = 0
        self._left_out = 0
        self.last: tuple[Line, ...] = ()

    def feed(self, chunk: bytes, now: float) -> None:
        if now - self._since >= 1.0:
            self.report_left_out()
            self._since, self._bytes = now, 0
        name = self._program.name
        for line in self._cutter.feed(chunk):
            self.last = (*self.last, line)[-STDERR_LINES:]
            self._bytes += STDERR_LINE_BYTES if isinstance(line, TooLong) else len(line)
            if self._bytes > STDERR_BYTES:
                self._left_out += 1
            else:
                log_event(logging.INFO, "upstream.stderr", f"{name}: {self.show(line)}", upstream=name)

    def show(self, line: Line) -> str:
        text = line.head.decode(errors="replace") + "…" if isinstance(line, TooLong) else line.decode(errors="replace")
        return self._program.upstream.mask(text)

    def report_left_out(self) -> None:
        if self._left_out:
            sentence = f"{self._program.name}: {self._left_out} more lines on stderr were not logged"
            log_event(logging.INFO, "upstream.stderr", sentence, upstream=self._program.name)
            self._left_out = 0


def _nonblocking(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)  # of this end only
    return pipe


def _nothing() -> None:
    return


def _ignore_line(line: Line) -> None:
    return
