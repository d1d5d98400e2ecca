"""Runs several worker processes on one listening socket.

The parent does not serve and does not import the target. It holds the socket, starts workers, starts those again that
die, and replaces all of them one by one at SIGHUP. The first worker starts alone, so that a fault of the target or of
the store is shown once.

In `perdure dev` a change of the code replaces the workers as well; code that fails is waited for until its next change.
A worker that was replaced keeps its running calls, and sends each connection, once it is idle (`connection.py`),
through a pair of sockets that all workers inherit. The others take it, so every later request reaches the new code.

Each worker has a channel to the parent. The worker reports on it that it is ready, or why it does not start; the parent
sends on it how the worker is to end. At SIGHUP it also has all workers read the token file again, because one that is
replaced may go on for hours. A channel that closes tells the worker that the parent is gone, however it ended. The
parent sends words and not signals, because a terminal or systemd often sends a signal to all processes: a worker would
learn of one stop twice, and the second time means *at once*.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence, Set
from functools import partial
from typing import Any

from perdure._core.backoff import Pauses
from perdure.errors import Misuse
from perdure.gateway.child import format_status
from perdure.telemetry.log_records import log_event

VARIABLE = "PERDURE_WORKER_FDS"
"""The environment variable that makes a process a worker: the numbers of the sockets that it inherits."""

READY = "ready"
HANDING_OVER = b"w"
"""The worker has received `RELOAD`: from now on it answers no request that comes over an idle connection."""


class Fault(enum.StrEnum):
    """What is wrong if a worker does not start."""

    TARGET = "target"
    STORE = "store"
    """The store fails; another start may go well."""
    CODE = "code"
    """The target's own code failed; another start may go well once it is changed."""


# What the parent sends; each word is one byte, so that words cannot run together.
DRAIN = b"d"
"""The server stops: drain, and keep listening to answer clients."""
LEAVE = b"l"
"""Other workers continue: leave the port to them, and end once no client uses a connection any more."""
RELOAD = b"r"
"""As `LEAVE`, for new code: idle connections go to other workers, and running calls may take `RELOAD_SECONDS`."""
TOKENS = b"t"
"""Not an end: read the token file again."""
AT_ONCE = b"n"
KILL = b"k"
"""Never sent: the process is killed, as one that does not listen needs it."""
GONE = b"g"
"""Never sent: the channel is closed, because there is no parent any more."""

MAX_REASON = 4096
"""Bytes of a reason: the target's message may be of any length."""

#: A worker that ends sooner than this has hardly served. After the second such end in a row there is a pause.
QUICK_SECONDS = 10.0
#: Between quick deaths in a row, in seconds.
PAUSES = Pauses(first=0.25, longest=10.0, free=1)
#: After so many failed starts in a row, while no worker serves, the parent gives up.
TRIES = 5
#: A worker that is not ready after this long hangs: it is ended, and another one is started. A target that loads a
#: large model takes minutes. A worker that starts slowly is reported earlier.
START_SECONDS = 300.0
SLOW_SECONDS = 30.0
#: After a second signal workers end by themselves within two seconds; one whose event loop is blocked is killed.
KILL_SECONDS = 2.0
#: A worker that was replaced has its drain time and this: the time of an idle connection (65 s), and a minute for the
#: target's own shutdown.
RETIRE_SECONDS = 125.0
#: How long the parent waits for a worker to begin its hand-over: a tool may block the worker's event loop.
HAND_OVER_SECONDS = 5.0
#: How long the calls of old code may go on after a reload. The developer decides how long a call takes and can stop it;
#: the bound is for one that hangs, whose process would stay as long as the others serve.
RELOAD_SECONDS = 3600.0

Watch = Callable[[Callable[[str], None]], Coroutine[None, None, None]]
"""Watches the code, and reports each change of it with the words that say what has changed."""


class WorkerChannel:
    """The worker's end of the channel, and the sockets that it shares with other workers."""

    def __init__(self, parent: socket.socket, listener: socket.socket, *idle: socket.socket) -> None:
        """`idle`: where idle connections are given away, and taken from."""
        self.listener = listener
        self.idle = idle
        self._parent = parent
        for inherited in (parent, listener, *idle):
            inherited.set_inheritable(False)
            inherited.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> WorkerChannel | None:
        """Return the channel of this process, if it is a worker. Programs that a worker starts are not workers."""
        numbers = environment.pop(VARIABLE, None)
        return None if numbers is None else cls(*(socket.socket(fileno=int(number)) for number in numbers.split(",")))

    def fileno(self) -> int:
        return self._parent.fileno()

    def send_ready(self) -> None:
        self.send(f"{READY}\n".encode())

    def send_failed(self, reason: str, fault: Fault = Fault.TARGET) -> None:
        line = " ".join(reason.split()).encode(errors="replace")
        self.send(f"{fault} ".encode() + line[:MAX_REASON] + b"\n")

    def send(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # `receive` notices that the parent has ended
            self._parent.sendall(word)

    def receive(self) -> bytes:
        """Return the words that the parent has sent since."""
        try:
            return self._parent.recv(64) or GONE
        except BlockingIOError:
            return b""
        except OSError:
            return GONE


class NotReady(Exception):
    """A worker ended, or reported why it cannot serve, before it was ready."""

    def __init__(self, reason: str, fault: Fault | None = None) -> None:
        """`fault`: the reason, if the worker reported one."""
        super().__init__(reason)
        self.fault = fault


class Worker:
    """A process that serves on the shared socket, as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self.pid = process.pid
        self.is_ready = False
        self.ended = asyncio.create_task(process.wait())
        """Its exit status."""
        self.began = time.monotonic()
        self._process = process
        self._channel = channel
        self.ended.add_done_callback(lambda _: channel.close())

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], shared: Sequence[socket.socket]
    ) -> Worker:
        """Start a new interpreter, which has nothing of the parent's state but the sockets."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            files = [one.fileno() for one in (theirs, *shared)]
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    env={**environment, VARIABLE: ",".join(map(str, files))},
                    pass_fds=files,
                    stdin=asyncio.subprocess.DEVNULL,
                    # Ctrl-C goes to the whole group of a terminal; while a worker starts it would end with a traceback.
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, ours)

    async def get_ready(self) -> None:
        """Wait until it serves, for `START_SECONDS` at most. Raises `NotReady`."""
        loop = asyncio.get_running_loop()

        async def read_line() -> str:
            line = b""
            with contextlib.suppress(OSError):
                while not line.endswith(b"\n") and (data := await loop.sock_recv(self._channel, MAX_REASON)):
                    line += data
            return line.decode(errors="replace")

        def log_slow() -> None:
            slow = f"worker {self.pid} is still starting after {SLOW_SECONDS:g} s"
            log_event(logging.WARNING, "worker.slow", f"{slow}; it is ended after {START_SECONDS:g} s")

        slow = loop.call_later(SLOW_SECONDS, log_slow)
        reading = asyncio.create_task(read_line())
        try:
            # Both: a program that the worker started may hold its end of the channel open.
            done = await _first({reading, self.ended}, START_SECONDS)
            word, _, reason = (reading.result() if reading.done() else "").strip().partition(" ")
        finally:
            slow.cancel()
            reading.cancel()
        if not done:
            self.end(AT_ONCE)
            raise NotReady(f"it was not ready after {START_SECONDS:g} s")
        if word in list(Fault):
            raise NotReady(reason, Fault(word))
        if word != READY:
            raise NotReady(f"it ended with {format_status(await asyncio.shield(self.ended))}")
        self.is_ready = True

    async def hand_over(self) -> None:
        """Have it leave and hand over its connections; wait until it has begun with that."""
        self.end(RELOAD)
        answer = asyncio.create_task(asyncio.get_running_loop().sock_recv(self._channel, len(HANDING_OVER)))
        await _first({answer, self.ended}, HAND_OVER_SECONDS)
        answer.cancel()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await answer

    def end(self, word: bytes) -> None:
        """Send it the word for its end. Before it is ready it reads no words, has nothing to lose, and may hang."""
        with contextlib.suppress(OSError):
            if word == KILL:
                self._process.kill()
            elif self.is_ready:
                self._channel.send(word)
            else:
                asyncio.get_running_loop().call_later(KILL_SECONDS, self.end, KILL)
                self._process.terminate()

    def tell(self, word: bytes) -> None:
        """Send it a word that it may read at any time. One that is still starting reads it once it is ready."""
        with contextlib.suppress(OSError):
            self._channel.send(word)


async def _first(tasks: Set[asyncio.Task[Any]], seconds: float | None = None) -> bool:
    """Wait until one of the tasks is done. Returns whether one is, after so many seconds."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


class _GaveUp(Exception):
    """Too many workers in a row did not start."""


def run_workers(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    listener: socket.socket,
    count: int,
    longest_drain: float,
    on_ready: Callable[[], None],
    watch: Watch | None = None,
) -> int:
    """Serve with so many workers until a signal; returns the exit status. Raises `Misuse` if they do not start.

    With `watch` the workers are replaced at each change of the code.
    """
    # The longest a worker takes that leaves.
    patience = max(longest_drain, RELOAD_SECONDS if watch else 0.0) + RETIRE_SECONDS
    with contextlib.ExitStack() as stack:
        idle = () if watch is None else socket.socketpair()
        shared = [listener, *map(stack.enter_context, idle)]
        start = partial(Worker.start, command, environment, shared)
        return asyncio.run(WorkerPool(start, count=count, patience=patience, watch=watch).run(listener, on_ready))


class WorkerPool:
    """The workers of one listening socket, each at its place."""

    def __init__(
        self, start: Callable[[], Awaitable[Worker]], *, count: int, patience: float, watch: Watch | None
    ) -> None:
        self._start_process = start
        self._patience = patience
        self._watch = watch
        self._serving: list[Worker] = []
        self._alive: set[Worker] = set()
        """Also workers that are starting, and replaced ones that have not ended yet."""
        self._places = [asyncio.Lock() for _ in range(count)]
        """Held while the worker at a place changes: while one that died is started again, and when one that SIGHUP asks
        for has started."""
        self._quick_deaths = [0] * count
        """Workers in a row at a place that ended soon after their start."""
        self._hangup = asyncio.Event()
        self._asked = 0.0
        """When the workers were last to be replaced; those that were started since need not be."""
        self._change = asyncio.Event()
        """Set at the next change of the code, and then replaced by another one."""
        self._ending = asyncio.Event()
        self._begun = False
        self._ended_badly = False

    async def run(self, listener: socket.socket, on_ready: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._on_signal, sig)
        if self._watch is None:
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a developer's terminal was closed
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)
        work = asyncio.create_task(self._work(on_ready))
        ending = asyncio.create_task(self._ending.wait())
        await _first({work, ending})
        ending.cancel()
        work.cancel()
        failure: BaseException | None = (await asyncio.gather(work, return_exceptions=True))[0]
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        # No worker is started any more; wait until all have ended.
        listener.close()
        if not self._ending.is_set():
            self._end_all(DRAIN)
        while self._alive:
            await asyncio.wait({worker.ended for worker in self._alive})
        if isinstance(failure, NotReady):
            raise Misuse(str(failure))
        if isinstance(failure, _GaveUp):
            log_event(logging.ERROR, "workers.gave_up", str(failure))
            return 1
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure
        return 1 if self._ended_badly else 0

    async def _work(self, on_ready: Callable[[], None]) -> None:
        async with asyncio.TaskGroup() as group:
            if self._watch is not None:
                group.create_task(self._watch(self._on_change))
            self._serving = [await self._start_with_retries()]
            async with asyncio.TaskGroup() as starting:
                others = [starting.create_task(self._start_with_retries()) for _ in self._places[1:]]
            self._serving += [other.result() for other in others]
            self._begun = True
            on_ready()
            for place, worker in enumerate(self._serving):
                group.create_task(self._keep(group, place, worker))
            await self._replace_at_hangups(group)

    # Starting and restarting

    async def _start(self) -> Worker:
        """Start a worker and wait until it is ready. If the code changes meanwhile, its newest state is started: what
        was begun may hang, or fail for a reason that no longer exists."""
        while True:
            change = asyncio.create_task(self._change.wait())
            try:
                worker = await self._start_process()
            except OSError as error:  # too many processes, or too little memory, at the moment
                change.cancel()
                raise NotReady(f"it could not be started: {error}") from error
            self._alive.add(worker)
            worker.ended.add_done_callback(partial(self._on_ended, worker))
            if self._ending.is_set():  # it did not exist yet when the others were asked to end
                worker.end(DRAIN)
            ready = asyncio.create_task(worker.get_ready())
            try:
                await _first({ready, change})
                if ready.done():
                    ready.result()
                    return worker
                worker.end(AT_ONCE)
            finally:
                change.cancel()
                ready.cancel()

    def _on_ended(self, worker: Worker, ended: asyncio.Task[int]) -> None:
        self._alive.discard(worker)
        if self._ending.is_set() and worker.is_ready and ended.result():
            self._ended_badly = True

    async def _start_with_retries(self) -> Worker:
        """Start a worker, after failed tries if need be, and wait until it is ready.

        The reason that the first worker reports is final (`NotReady`): the target or the store is wrong. Later on a
        start that fails is tried again, with pauses, for as long as another worker serves or the store fails, which
        passes.
        """
        broken = deaths = 0
        while True:
            await asyncio.sleep(PAUSES.after(deaths))
            try:
                return await self._start()
            except NotReady as failure:
                is_transient = failure.fault is Fault.STORE
                if failure.fault is Fault.CODE and self._watch is not None:
                    log_event(logging.ERROR, "code.broken", f"the next change of the code is waited for: {failure}")
                    await self._change.wait()
                    continue
                is_serving = any(worker.is_ready for worker in self._alive)
                if failure.fault is not None and not (self._begun or (is_transient and is_serving)):
                    raise
                broken = 0 if is_transient or (self._begun and is_serving) else broken + 1
                if broken == TRIES:
                    raise _GaveUp(f"{TRIES} workers in a row did not start; the last one: {failure}") from None
                deaths += 1
                again = f"the next try is in {PAUSES.after(deaths):g} s"
                log_event(logging.WARNING, "worker.failed", f"a worker did not start, {again}: {failure}")

    async def _keep(self, group: asyncio.TaskGroup, place: int, worker: Worker) -> None:
        """When a worker ends, start another one at its place, unless that is taken by the one that replaced it."""
        await asyncio.wait({worker.ended})
        async with self._places[place]:
            if self._serving[place] is not worker:
                return
            how = format_status(worker.ended.result())
            sentence = f"worker {worker.pid} ended with {how}; another one takes its place"
            log_event(logging.WARNING, "worker.ended", sentence)
            was_quick = time.monotonic() - worker.began < QUICK_SECONDS
            self._quick_deaths[place] = self._quick_deaths[place] + 1 if was_quick else 0
            await asyncio.sleep(PAUSES.after(self._quick_deaths[place]))
            self._serving[place] = await self._start_with_retries()
            group.create_task(self._keep(group, place, self._serving[place]))

    # Being replaced

    def _on_change(self, what: str) -> None:
        log_event(logging.INFO, "code.changed", f"{what} changed; loading the new code")
        self._ask_replacement()
        self._change.set()
        self._change = asyncio.Event()

    def _on_hangup(self) -> None:
        for worker in self._alive:
            worker.tell(TOKENS)
        self._ask_replacement()

    def _ask_replacement(self) -> None:
        self._asked = time.monotonic()
        self._hangup.set()

    async def _replace_at_hangups(self, group: asyncio.TaskGroup) -> None:
        """At SIGHUP or a change: replace the workers one by one, each by one that is ready before the old leaves."""
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            asked, began = self._asked, time.monotonic()
            try:
                replaced = [await self._replace(group, place, asked) for place in range(len(self._places))]
            except NotReady as failure:
                if self._watch is None:
                    sentence = f"the workers were not replaced, the old ones stay: {failure}"
                    log_event(logging.ERROR, "workers.kept", sentence)
                else:
                    log_event(logging.ERROR, "code.kept", f"the old code continues to serve: {failure}")
                continue
            took = f"{time.monotonic() - began:.1f} s"
            if self._watch is None:  # a warning, so that the sender of the signal sees it at the default level
                sentence = f"{sum(replaced)} workers were replaced, after {took}; code and tokens were read again"
                log_event(logging.WARNING, "workers.replaced", sentence)
            elif any(replaced):
                sentence = f"the new code serves, after {took}; running calls finish with the code they began with"
                log_event(logging.INFO, "code.loaded", sentence)

    async def _replace(self, group: asyncio.TaskGroup, place: int, asked: float) -> bool:
        """Replace the worker of a place, unless another one was started there since that was asked for."""
        if self._serving[place].began > asked:
            return False
        # Not under the place's lock: this start may hang, and the worker at the place may die meanwhile.
        fresh = await self._start()
        async with self._places[place]:
            old, self._serving[place] = self._serving[place], fresh
            group.create_task(self._keep(group, place, fresh))
            if self._watch is None:
                old.end(LEAVE)
            else:
                await old.hand_over()
            asyncio.get_running_loop().call_later(self._patience, old.end, KILL)
            return True

    # Ending

    def _on_signal(self, sig: signal.Signals) -> None:
        """The first signal lets the workers drain, the second one ends them at once."""
        if not self._ending.is_set():
            self._end_all(DRAIN)  # each worker logs the reason of its wait
            return
        self._ended_badly = self._ended_badly or sig is signal.SIGINT
        self._end_all(AT_ONCE)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self._end_all, KILL)

    def _end_all(self, word: bytes) -> None:
        self._ending.set()
        for worker in self._alive:
            worker.end(word)
