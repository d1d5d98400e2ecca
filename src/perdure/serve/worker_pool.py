"""Several worker processes on one listening socket, and the parent that looks after them.

The parent serves nothing and imports nothing of what is served. It holds the socket, starts the workers, starts those
again that die, tells them when to stop, and replaces all of them one by one at SIGHUP. The first worker starts alone:
what is wrong with the target or the store is found, and told, once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from perdure.errors import Misuse
from perdure.serve.worker import NotReady, Worker, say_status
from perdure.serve.worker_channel import AT_ONCE, DRAIN, LEAVE
from perdure.telemetry.events import log_event

#: A worker that ends sooner than this has hardly served; the next such one is started with a pause.
QUICK_SECONDS = 10.0
#: The first pause, doubled with each quick death in a row, and the longest one.
PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 10.0
#: So many starts in a row that come to nothing, while no worker serves, are no accident.
TRIES = 5
#: After a second signal workers end by themselves within two seconds; one whose event loop is blocked is killed.
KILL_SECONDS = 2.0
#: A worker that was replaced has its drain time, the time of an idle connection (65 s) and this, for the target's own
#: shutdown.
RETIRE_SECONDS = 125.0


class _GaveUp(Exception):
    """Workers do not start any more."""


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
    ready: Callable[[], None],
) -> int:
    """Serve with so many workers until a signal; returns the exit status. Raises `Misuse` if they do not start."""

    async def run() -> int:
        patience = drain_timeout + RETIRE_SECONDS  # the longest a worker takes that leaves
        return await WorkerPool(command, environment, listener, count=count, patience=patience).run(ready)

    return asyncio.run(run())


class WorkerPool:
    """The workers."""

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
        """Held while the worker at a place is replaced, because it died or in its turn."""
        self._renewal = asyncio.Event()
        self._ending = asyncio.Event()
        self._begun = False
        self._ended_badly = False

    async def run(self, ready: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._heard, sig)
        loop.add_signal_handler(signal.SIGHUP, self._renewal.set)
        work = asyncio.create_task(self._work(ready))
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        work.cancel()
        failure = (await asyncio.gather(work, return_exceptions=True))[0]
        await self._end()
        return self._status(_first(failure))

    async def _work(self, ready: Callable[[], None]) -> None:
        self._serving = [await self._hire()]
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(self._hire()) for _ in self._places[1:]]
        self._serving += [other.result() for other in others]
        self._begun = True
        ready()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew())
            for place in range(len(self._places)):
                group.create_task(self._keep(place))

    def _status(self, failure: BaseException | None) -> int:
        if isinstance(failure, NotReady):
            raise Misuse(str(failure))
        if isinstance(failure, _GaveUp):
            log_event(logging.ERROR, "workers.gave_up", str(failure))
            return 1
        if failure is not None and not isinstance(failure, asyncio.CancelledError):
            raise failure
        return 1 if self._ended_badly else 0

    # Starting, and starting again

    async def _start(self) -> Worker:
        try:
            worker = await Worker.start(self._command, self._environment, self._listener)
        except OSError as error:  # too many processes, or too little memory, at the moment
            raise NotReady(f"it could not be started: {error}", told=False) from error
        self._alive.add(worker)
        worker.ended.add_done_callback(lambda ended: self._has_ended(worker, ended.result()))
        if self._ending.is_set():  # it was not there yet when the others were told
            worker.tell(DRAIN)
        await worker.get_ready()
        return worker

    async def _hire(self) -> Worker:
        """A worker that is ready, after some tries if need be.

        What the very first one has to say against its start is final (`NotReady`): the target or the store is wrong.
        Later on a start that fails costs nothing but itself: it is tried again, with pauses, for as long as another
        worker serves or the store fails, which passes.
        """
        broken = 0
        for deaths in itertools.count():
            await asyncio.sleep(pause_after(deaths))
            try:
                return await self._start()
            except NotReady as failure:
                if failure.told and not (self._begun or (failure.passes and self._is_serving)):
                    raise
                broken = 0 if failure.passes or (self._begun and self._is_serving) else broken + 1
                if broken == TRIES:
                    raise _GaveUp(f"{TRIES} workers in a row did not start; the last one: {failure}") from None
                again = f"the next try is in {pause_after(deaths + 1):g} s"
                log_event(logging.WARNING, "worker.failed", f"a worker did not start, {again}: {failure}")
        raise AssertionError("counting does not end")

    @property
    def _is_serving(self) -> bool:
        """There is a worker that was ready and has not ended."""
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
                how = say_status(worker.ended.result())
                log_event(
                    logging.WARNING,
                    "worker.ended",
                    f"worker {worker.pid} ended with {how}; another one takes its place",
                )
                quick = quick + 1 if worker.age < QUICK_SECONDS else 0
                await asyncio.sleep(pause_after(quick))
                self._serving[place] = await self._hire()

    async def _renew(self) -> None:
        """At SIGHUP: replace the workers one by one, each by one that is ready before the old one leaves."""
        while True:
            await self._renewal.wait()
            self._renewal.clear()
            try:
                for place in range(len(self._places)):
                    await self._replace(place)
            except NotReady as failure:
                log_event(logging.ERROR, "workers.kept", f"the workers were not replaced, the old ones stay: {failure}")

    async def _replace(self, place: int) -> None:
        async with self._places[place]:
            fresh = await self._start()
            old, self._serving[place] = self._serving[place], fresh
            old.tell(LEAVE)
            asyncio.get_running_loop().call_later(self._patience, old.kill)

    # Ending

    def _heard(self, sig: signal.Signals) -> None:
        """The first signal lets the workers drain, the second one ends them at once."""
        if not self._ending.is_set():
            self._tell_all(DRAIN)
            return
        self._ended_badly = self._ended_badly or sig is signal.SIGINT
        self._tell_all(AT_ONCE)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self._kill_all)

    def _tell_all(self, word: bytes) -> None:
        self._ending.set()
        for worker in self._alive:
            worker.tell(word)

    def _kill_all(self) -> None:
        for worker in self._alive:
            worker.kill()

    async def _end(self) -> None:
        """Nobody is started any more; wait until all have ended."""
        self._listener.close()
        if not self._ending.is_set():
            self._tell_all(DRAIN)
        while self._alive:
            await asyncio.wait({worker.ended for worker in self._alive})

    def _has_ended(self, worker: Worker, status: int) -> None:
        self._alive.discard(worker)
        if self._ending.is_set() and worker.is_ready and status:
            self._ended_badly = True


def _first(failure: BaseException | None) -> BaseException | None:
    """What is inside a group of failures."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
