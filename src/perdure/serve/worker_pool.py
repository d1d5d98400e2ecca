"""Runs several worker processes on one listening socket.

The parent does not serve and does not import the target. It holds the socket, starts the workers, starts those again
that die, tells them when to stop, and replaces all of them one by one at SIGHUP. The first worker starts alone, so that
what is wrong with the target or the store is found, and shown, once.

Where the code is watched (`perdure dev`), a change of it replaces the workers as well. Code that fails is then waited
for: its next change may mend it. The worker that was replaced keeps its running calls, and hands each connection on to
the new one as soon as it is idle (`connection.py`), so that every later request reaches the new code and none is lost.

Each worker and the parent have a channel, a pair of sockets beside the listening socket. The worker says on it that it
is ready, or why it does not start, so that the parent shows one reason once. The parent says on it how the worker is to
end. When the channel closes, the worker knows that the parent is gone, however that happened: nothing has to run in the
parent for it.

The parent uses words and not signals because a terminal or systemd often sends a signal to all processes: a worker
would learn of one stop twice, and the second time means *at once*.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence

from perdure.errors import Misuse
from perdure.telemetry.log_records import log_event

VARIABLE = "PERDURE_WORKER_FDS"
"""The environment variable that makes a process a worker: the numbers of the two sockets that it inherits."""

READY = b"ready\n"
FAILED = b"failed "
WAITS = b"waits_ "
"""The store fails; another start may go well. As long as `FAILED`."""
BROKEN = b"broken "
"""The target's own code failed; another start may go well once it is changed. As long as `FAILED`."""
HANDING_OVER = b"w"
"""The worker has heard `RELOAD`: from now on it answers no request that comes over an idle connection."""

# What the parent says; each word is one byte, so that words cannot run together.
DRAIN = b"d"
"""The server stops: drain, and go on listening to answer clients."""
LEAVE = b"l"
"""Other workers go on: let them have the port, and end once no client uses a connection any more."""
RELOAD = b"r"
"""As `LEAVE`, for new code: idle connections go to the newest worker, over the socket that comes with this word, and
running calls may take `RELOAD_SECONDS`. It comes again with each newer worker."""
ADOPT = b"a"
"""Take the connections that come over the socket that comes with this word."""
AT_ONCE = b"n"
KILL = b"k"
"""Never sent: the process is killed, as one that does not listen needs it."""
GONE = b"g"
"""Never sent: the channel is closed, because there is no parent any more."""

MAX_REASON = 4096
"""Bytes of a reason: the target's message may be of any length."""

#: A worker that ends sooner than this has hardly served. After the second such end in a row there is a pause.
QUICK_SECONDS = 10.0
#: The first pause, doubled with each quick death in a row, and the longest one.
PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 10.0
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
    """The worker's end of the channel."""

    def __init__(self, listener: socket.socket, parent: socket.socket) -> None:
        self.listener = listener
        self._parent = parent
        parent.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> WorkerChannel | None:
        """Return the channel of this process, if it is a worker. Programs that a worker starts are not workers."""
        numbers = environment.pop(VARIABLE, None)
        if numbers is None:
            return None
        listener, parent = (socket.socket(fileno=int(number)) for number in numbers.split(","))
        for inherited in (listener, parent):
            inherited.set_inheritable(False)
        return cls(listener, parent)

    def fileno(self) -> int:
        return self._parent.fileno()

    def send_ready(self) -> None:
        self._send(READY)

    def send_handing_over(self) -> None:
        self._send(HANDING_OVER)

    def send_failed(self, reason: str, *, is_transient: bool = False, is_code: bool = False) -> None:
        """The worker does not start. `is_transient`: another start may go well, because the store fails. `is_code`: the
        target's own code failed."""
        line = " ".join(reason.split()).encode(errors="replace")
        self._send((WAITS if is_transient else BROKEN if is_code else FAILED) + line[:MAX_REASON] + b"\n")

    def _send(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # `receive` notices that the parent is gone
            self._parent.sendall(word)

    def receive(self) -> tuple[bytes, list[socket.socket]]:
        """Return the words that the parent has sent since, and the socket that came with one of them."""
        try:
            words, files, _, _ = socket.recv_fds(self._parent, 64, 1)
        except BlockingIOError:
            return b"", []
        except OSError:
            return GONE, []
        return words or GONE, [own_socket(file) for file in files]


def own_socket(file: int) -> socket.socket:
    """Return a socket that another process has sent. Programs that this process starts do not get it."""
    sent = socket.socket(fileno=file)
    sent.set_inheritable(False)
    sent.setblocking(False)
    return sent


class NotReady(Exception):
    """A worker ended, or reported why it cannot serve, before it was ready."""

    def __init__(self, reason: str, *, is_explained: bool, is_transient: bool = False, is_code: bool = False) -> None:
        super().__init__(reason)
        self.is_explained = is_explained
        """The worker reported the reason itself: the target or the store is wrong."""
        self.is_transient = is_transient
        """The store fails, so another start may go well. Otherwise the program is broken, or is killed."""
        self.is_code = is_code
        """The target's own code failed."""


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
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], listener: socket.socket) -> Worker:
        """Start a new interpreter, which has nothing of the parent's state but the two sockets."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            sockets = (listener.fileno(), theirs.fileno())
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    env={**environment, VARIABLE: ",".join(map(str, sockets))},
                    pass_fds=sockets,
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

        async def read_word() -> bytes:
            word = b""
            with contextlib.suppress(OSError):
                while not word.endswith(b"\n") and (data := await loop.sock_recv(self._channel, MAX_REASON)):
                    word += data
            return word

        loop = asyncio.get_running_loop()
        reading = asyncio.create_task(read_word())
        try:
            # Both: a program that the worker started may hold its end of the channel open.
            for seconds in (SLOW_SECONDS, START_SECONDS - SLOW_SECONDS):
                done, _ = await asyncio.wait(
                    {reading, self.ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    break
                if seconds == SLOW_SECONDS:
                    slow = f"worker {self.pid} is still starting after {SLOW_SECONDS:g} s"
                    log_event(logging.WARNING, "worker.slow", f"{slow}; it is ended after {START_SECONDS:g} s")
            else:
                self.end(AT_ONCE)
                raise NotReady(f"it was not ready after {START_SECONDS:g} s", is_explained=False)
            word = reading.result() if reading.done() else b""
        finally:
            reading.cancel()
        if word.startswith((FAILED, WAITS, BROKEN)):
            reason = word[len(FAILED) :].decode(errors="replace").strip()
            transient, code = word.startswith(WAITS), word.startswith(BROKEN)
            raise NotReady(reason, is_explained=True, is_transient=transient, is_code=code)
        if word != READY:
            raise NotReady(f"it ended with {format_status(await asyncio.shield(self.ended))}", is_explained=False)
        self.is_ready = True

    async def hand_over_to(self, newer: Worker) -> None:
        """Tell it to leave, and to give its connections to a newer worker; wait until it has begun with that."""
        giving, taking = socket.socketpair()
        with giving, taking, contextlib.suppress(OSError):
            socket.send_fds(newer._channel, [ADOPT], [taking.fileno()])
            socket.send_fds(self._channel, [RELOAD], [giving.fileno()])
        answer = asyncio.create_task(asyncio.get_running_loop().sock_recv(self._channel, len(HANDING_OVER)))
        await asyncio.wait({answer, self.ended}, timeout=HAND_OVER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        answer.cancel()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await answer

    def end(self, word: bytes) -> None:
        """Tell it how to end. Before it is ready it does not listen, and has nothing to lose; it may hang."""
        with contextlib.suppress(OSError):
            if word == KILL:
                self._process.kill()
            elif self.is_ready:
                self._channel.send(word)
            else:
                asyncio.get_running_loop().call_later(KILL_SECONDS, self.end, KILL)
                self._process.terminate()


def format_status(status: int) -> str:
    """Write an exit status in words."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


class _GaveUp(Exception):
    """Too many workers in a row did not start."""


def pause_after(deaths: int) -> float:
    """Seconds to wait after so many quick deaths in a row: none after the first."""
    return 0.0 if deaths < 2 else min(PAUSE_SECONDS * 2 ** (deaths - 2), MAX_PAUSE_SECONDS)


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
    pool = WorkerPool(lambda: Worker.start(command, environment, listener), count=count, patience=patience, watch=watch)
    return asyncio.run(pool.run(listener, on_ready))


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
        """Also those that are starting, and those that were replaced and have not ended yet."""
        self._places = [asyncio.Lock() for _ in range(count)]
        """Held while the worker at a place changes: while one that died is started again, and when one that SIGHUP asks
        for has started."""
        self._hangup = asyncio.Event()
        self._asked = 0.0
        """When the workers were last to be replaced; those that were started since need not be."""
        self._replaced = asyncio.Event()
        """Set when a worker was replaced, which may take long to end, and then replaced by another one."""
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
            loop.add_signal_handler(signal.SIGHUP, self._ask_replacement)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a developer's terminal was closed
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)
        work = asyncio.create_task(self._work(on_ready))
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
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
            group.create_task(self._replace_at_hangups())
            for place in range(len(self._places)):
                group.create_task(self._keep(place))

    # Starting and restarting

    async def _start(self) -> Worker:
        """Start a worker and wait until it is ready. If the code changes meanwhile, its newest state is started: what
        was begun may hang, or fail for a reason that is no longer there."""
        while True:
            change = asyncio.create_task(self._change.wait())
            worker = await self._start_one()
            ready = asyncio.create_task(worker.get_ready())
            try:
                await asyncio.wait({ready, change}, return_when=asyncio.FIRST_COMPLETED)
                if ready.done():
                    ready.result()
                    return worker
                worker.end(AT_ONCE)
            finally:
                change.cancel()
                ready.cancel()

    async def _start_one(self) -> Worker:
        try:
            worker = await self._start_process()
        except OSError as error:  # too many processes, or too little memory, at the moment
            raise NotReady(f"it could not be started: {error}", is_explained=False) from error

        def on_ended(ended: asyncio.Task[int]) -> None:
            self._alive.discard(worker)
            if self._ending.is_set() and worker.is_ready and ended.result():
                self._ended_badly = True

        self._alive.add(worker)
        worker.ended.add_done_callback(on_ended)
        if self._ending.is_set():  # it was not there yet when the others were told to end
            worker.end(DRAIN)
        return worker

    async def _start_with_retries(self) -> Worker:
        """Start a worker, after failed tries if need be, and wait until it is ready.

        The reason that the first worker reports is final (`NotReady`): the target or the store is wrong. Later on a
        start that fails is tried again, with pauses, for as long as another worker serves or the store fails, which
        passes.
        """
        broken = deaths = 0
        while True:
            await asyncio.sleep(pause_after(deaths))
            try:
                return await self._start()
            except NotReady as failure:
                if failure.is_code and self._watch is not None:
                    log_event(logging.ERROR, "code.broken", f"the next change of the code is waited for: {failure}")
                    await self._change.wait()
                    continue
                if failure.is_explained and not (self._begun or (failure.is_transient and self._is_serving)):
                    raise
                broken = 0 if failure.is_transient or (self._begun and self._is_serving) else broken + 1
                if broken == TRIES:
                    raise _GaveUp(f"{TRIES} workers in a row did not start; the last one: {failure}") from None
                deaths += 1
                again = f"the next try is in {pause_after(deaths):g} s"
                log_event(logging.WARNING, "worker.failed", f"a worker did not start, {again}: {failure}")

    @property
    def _is_serving(self) -> bool:
        """Whether a worker was ready and has not ended."""
        return any(worker.is_ready for worker in self._alive)

    async def _keep(self, place: int) -> None:
        """Start the worker of a place again whenever it ends."""
        quick = 0
        while True:
            worker, replaced = self._serving[place], asyncio.create_task(self._replaced.wait())
            await asyncio.wait({worker.ended, replaced}, return_when=asyncio.FIRST_COMPLETED)
            replaced.cancel()
            if not worker.ended.done():
                continue
            async with self._places[place]:
                if self._serving[place] is not worker:
                    continue  # it ended because it was replaced
                pid, how = worker.pid, format_status(worker.ended.result())
                log_event(
                    logging.WARNING, "worker.ended", f"worker {pid} ended with {how}; another one takes its place"
                )
                quick = quick + 1 if time.monotonic() - worker.began < QUICK_SECONDS else 0
                await asyncio.sleep(pause_after(quick))
                self._serving[place] = await self._start_with_retries()

    # Being replaced

    def _on_change(self, what: str) -> None:
        log_event(logging.INFO, "code.changed", f"{what} changed; loading the new code")
        self._ask_replacement()

    def _ask_replacement(self) -> None:
        self._asked = time.monotonic()
        self._hangup.set()
        if self._watch is not None:
            self._change.set()
            self._change = asyncio.Event()

    async def _replace_at_hangups(self) -> None:
        """At SIGHUP or a change: replace the workers one by one, each by one that is ready before the old leaves."""
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            asked, began = self._asked, time.monotonic()
            try:
                replaced = [await self._replace(place, asked) for place in range(len(self._places))]
            except NotReady as failure:
                self._log_kept(failure)
            else:
                took = f"{time.monotonic() - began:.1f} s"
                if self._watch is None:  # a warning, so that the sender of the signal sees it at the default level
                    sentence = f"{sum(replaced)} workers were replaced, after {took}; code and tokens were read again"
                    log_event(logging.WARNING, "workers.replaced", sentence)
                elif any(replaced):
                    sentence = f"the new code serves, after {took}; calls that run go on with the code they began with"
                    log_event(logging.INFO, "code.loaded", sentence)

    async def _replace(self, place: int, asked: float) -> bool:
        """Replace the worker of a place, unless another one was started there since that was asked for."""
        if self._serving[place].began > asked:
            return False
        # Not under the place's lock: this start may hang, and the worker at the place may die meanwhile.
        fresh = await self._start()
        async with self._places[place]:
            old, self._serving[place] = self._serving[place], fresh
            self._replaced.set()
            self._replaced = asyncio.Event()
            if self._watch is None:
                old.end(LEAVE)
            else:  # those that were replaced before it may have running calls still
                replaced = [worker for worker in self._alive.difference(self._serving) if worker.is_ready]
                await asyncio.gather(*(worker.hand_over_to(fresh) for worker in replaced))
            asyncio.get_running_loop().call_later(self._patience, old.end, KILL)
            return True

    def _log_kept(self, failure: NotReady) -> None:
        if self._watch is None:
            log_event(logging.ERROR, "workers.kept", f"the workers were not replaced, the old ones stay: {failure}")
        else:
            log_event(logging.ERROR, "code.kept", f"the old code goes on serving: {failure}")

    # Ending

    def _on_signal(self, sig: signal.Signals) -> None:
        """The first signal lets the workers drain, the second one ends them at once."""
        if not self._ending.is_set():
            self._end_all(DRAIN)  # each worker says what it waits for
            return
        self._ended_badly = self._ended_badly or sig is signal.SIGINT
        self._end_all(AT_ONCE)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self._end_all, KILL)

    def _end_all(self, word: bytes) -> None:
        self._ending.set()
        for worker in self._alive:
            worker.end(word)
