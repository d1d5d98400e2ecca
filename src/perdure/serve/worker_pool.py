"""Runs several worker processes on one listening socket.

The parent does not serve and does not import the target. It holds the socket, starts the workers, starts those again
that die, tells them when to stop, and replaces all of them one by one at SIGHUP. The first worker starts alone, so that
what is wrong with the target or the store is found, and shown, once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from perdure.errors import Misuse
from perdure.serve.worker import NotReady, Worker, format_status
from perdure.serve.worker_channel import AT_ONCE, DRAIN, LEAVE
from perdure.telemetry.events import log_event

#: A worker that ends sooner than this has hardly served. After the second such end in a row there is a pause.
QUICK_SECONDS = 10.0
#: The first pause, doubled with each quick death in a row, and the longest one.
PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 10.0
#: After so many failed starts in a row, while no worker serves, the parent gives up.
TRIES = 5
#: After a second signal workers end by themselves within two seconds; one whose event loop is blocked is killed.
KILL_SECONDS = 2.0
#: A worker that was replaced has its drain time and this: the time of an idle connection (65 s), and a minute for the
#: target's own shutdown.
RETIRE_SECONDS = 125.0


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
    drain_timeout: float,
    on_ready: Callable[[], None],
) -> int:
    """Serve with so many workers until a signal; returns the exit status. Raises `Misuse` if they do not start."""

    async def run() -> int:
        patience = drain_timeout + RETIRE_SECONDS  # the longest a worker takes that leaves
        return await WorkerPool(command, environment, listener, count=count, patience=patience).run(on_ready)

    return asyncio.run(run())


class WorkerPool:
    """The workers of one listening socket, each at its place."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        listener: socket.socket,
        *,
        count: int,
        patience: float,
    ) -> None:
        self._command = command
        self._environment = environment
        self._listener = listener
        self._patience = patience
        self._serving: list[Worker] = []
        self._alive: set[Worker] = set()
        """Also those that are starting, and those that were replaced and have not ended yet."""
        self._places = [asyncio.Lock() for _ in range(count)]
        """Held while the worker at a place is replaced, because it died or because of SIGHUP."""
        self._hangup = asyncio.Event()
        self._ending = asyncio.Event()
        self._begun = False
        self._ended_badly = False

    async def run(self, on_ready: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._on_signal, sig)
        loop.add_signal_handler(signal.SIGHUP, self._hangup.set)
        work = asyncio.create_task(self._work(on_ready))
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        work.cancel()
        failure: BaseException | None = (await asyncio.gather(work, return_exceptions=True))[0]
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        # No worker is started any more; wait until all have ended.
        self._listener.close()
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
        self._serving = [await self._start_with_retries()]
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(self._start_with_retries()) for _ in self._places[1:]]
        self._serving += [other.result() for other in others]
        self._begun = True
        on_ready()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._replace_at_hangups())
            for place in range(len(self._places)):
                group.create_task(self._keep(place))

    # Starting and restarting

    async def _start(self) -> Worker:
        try:
            worker = await Worker.start(self._command, self._environment, self._listener)
        except OSError as error:  # too many processes, or too little memory, at the moment
            raise NotReady(f"it could not be started: {error}", is_explained=False) from error
        self._alive.add(worker)
        worker.ended.add_done_callback(lambda ended: self._on_ended(worker, ended.result()))
        if self._ending.is_set():  # it was not there yet when the others were told to end
            worker.end(DRAIN)
        await worker.get_ready()
        return worker

    async def _start_with_retries(self) -> Worker:
        """Start a worker, after failed tries if need be, and wait until it is ready.

        The reason that the very first worker gives is final (`NotReady`): the target or the store is wrong. Later on a
        start that fails is tried again, with pauses, for as long as another worker serves or the store fails, which
        passes.
        """
        broken = 0
        for deaths in itertools.count():
            await asyncio.sleep(pause_after(deaths))
            try:
                return await self._start()
            except NotReady as failure:
                if failure.is_explained and not (self._begun or (failure.is_transient and self._is_serving)):
                    raise
                broken = 0 if failure.is_transient or (self._begun and self._is_serving) else broken + 1
                if broken == TRIES:
                    raise _GaveUp(f"{TRIES} workers in a row did not start; the last one: {failure}") from None
                again = f"the next try is in {pause_after(deaths + 1):g} s"
                log_event(logging.WARNING, "worker.failed", f"a worker did not start, {again}: {failure}")
        raise AssertionError("counting does not end")

    @property
    def _is_serving(self) -> bool:
        """Whether a worker was ready and has not ended."""
        return any(worker.is_ready for worker in self._alive)

    async def _keep(self, place: int) -> None:
        """Start the worker of a place again whenever it ends."""
        quick = 0
        while True:
            worker = self._serving[place]
            await asyncio.wait({worker.ended})
            async with self._places[place]:
                if self._serving[place] is not worker:
                    continue  # it ended because it was replaced
                how = format_status(worker.ended.result())
                log_event(
                    logging.WARNING,
                    "worker.ended",
                    f"worker {worker.pid} ended with {how}; another one takes its place",
                )
                quick = quick + 1 if worker.age < QUICK_SECONDS else 0
                await asyncio.sleep(pause_after(quick))
                self._serving[place] = await self._start_with_retries()

    async def _replace_at_hangups(self) -> None:
        """At SIGHUP: replace the workers one by one, each by one that is ready before the old one leaves."""
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            try:
                for place, lock in enumerate(self._places):
                    async with lock:
                        fresh = await self._start()
                        old, self._serving[place] = self._serving[place], fresh
                        old.end(LEAVE)
                        asyncio.get_running_loop().call_later(self._patience, old.kill)
            except NotReady as failure:
                log_event(logging.ERROR, "workers.kept", f"the workers were not replaced, the old ones stay: {failure}")

    # Ending

    def _on_signal(self, sig: signal.Signals) -> None:
        """The first signal lets the workers drain, the second one ends them at once."""
        if not self._ending.is_set():
            self._end_all(DRAIN)
            return
        self._ended_badly = self._ended_badly or sig is signal.SIGINT
        self._end_all(AT_ONCE)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self._kill_all)

    def _end_all(self, word: bytes) -> None:
        self._ending.set()
        for worker in self._alive:
            worker.end(word)

    def _kill_all(self) -> None:
        for worker in self._alive:
            worker.kill()

    def _on_ended(self, worker: Worker, status: int) -> None:
        self._alive.discard(worker)
        if self._ending.is_set() and worker.is_ready and status:
            self._ended_badly = True
