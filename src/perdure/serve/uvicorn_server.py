"""Runs the app under uvicorn: a gentle end on the first signal, a quick one on the second.

The first SIGTERM or SIGINT drains: the server keeps listening, so that balancers and clients learn of it, while
running calls finish. When the app is drained, what is left is settled and the process ends with status 0. A second
signal does not wait: what is left is settled at once and the process is gone within two seconds, whatever its tools do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.errors import Misuse, NodeBuried, PerdureError, StoreLost, StoreReplaced, TargetFailed
from perdure.serve.connection import Connection
from perdure.serve.forwarded import TrustedProxies, with_forwarded_clients
from perdure.serve.listener import BACKLOG
from perdure.serve.log_output import last_line, with_access_log
from perdure.serve.target import blame, own_traceback
from perdure.serve.worker_pool import AT_ONCE, GONE, HANDING_OVER, LEAVE, RELOAD, RELOAD_SECONDS, TOKENS, WorkerChannel
from perdure.settings import Settings
from perdure.telemetry.log_records import log_event

if TYPE_CHECKING:
    from perdure.http.app import App
    from perdure.http.router import Router
    from perdure.serve.token_file import FileTokens

_logger = logging.getLogger("perdure")

#: Longer than what load balancers keep an idle connection for (60 s is common), so that they close first and no
#: request meets a connection that we are just closing.
KEEP_ALIVE_SECONDS = 65
#: Readers end when the drain is over; this is for peers that do not take their last bytes or do not finish their body.
STOP_SECONDS = 3
#: The same after a second signal.
HURRY_SECONDS = 0.3
#: After a second signal the process is gone within this time, even if its event loop is blocked.
CUT_SECONDS = 1.9
#: All of Perdure has ended; then the target's threads get this long. One that is stuck would hold the process.
LEAVE_SECONDS = 5
#: The interval in which a worker that leaves checks whether connections are open and calls run.
LEAVING_POLL_SECONDS = 0.05
#: Names of running calls that a line shows.
MOST_NAMES = 5
#: Files, pipes and idle connections beside the readers.
SPARE_FILES = 4096
#: Of a program that the app runs: its three pipes, and one while it is started.
FILES_OF_PROCESS = 4
#: For the store, the log and some hundred readers beside the programs: fewer would be noticed at once.
FILES_OF_READERS = 512


def serve(
    app: App | Router,
    *,
    listener: socket.socket,
    settings: Settings,
    on_ready: Callable[[], None],
    on_failure: Callable[[str], None],
    channel: WorkerChannel | None = None,
    access_log: bool = False,
    proxies: TrustedProxies | None = None,
    processes: int = 0,
    tokens: FileTokens | None = None,
) -> int:
    """Serve until a signal; returns the exit status. Raises `PerdureError` if the app does not start.

    `on_failure` gets the reason if the server ends because of a failure. With a channel this is a worker, whose parent
    may tell it to leave. `access_log`: each request is logged when its response has ended. `proxies`: peers that are
    believed which client they speak for. `processes`: how many programs the app may run at once. `tokens`: those of the
    app, which are read again at SIGHUP.
    """
    # Raise the limit of open files: each reader is one, and many systems begin with 1,024 and allow more.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = settings.max_readers + SPARE_FILES + FILES_OF_PROCESS * processes
        ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        needed = FILES_OF_READERS + FILES_OF_PROCESS * processes
        if processes and ceiling < needed:
            sentence = f"this process may open {ceiling} files, and needs {needed} for {processes} programs"
            log_event(logging.WARNING, "serve.files", f"{sentence}; raise ulimit -n, or lower max_processes")
        if soft != resource.RLIM_INFINITY and soft < ceiling:
            resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
    answer: ASGIApp = with_access_log(app) if access_log else app
    if proxies:
        answer = with_forwarded_clients(answer, proxies)
    server = _Server(app, answer, settings, channel, tokens, on_ready=on_ready, on_failure=on_failure)

    def is_shown(record: logging.LogRecord) -> bool:
        """Not what uvicorn logs about a start that failed (it is raised) and about requests it cancels at the end."""
        cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
        return server.started and not cancelled

    uvicorn_log = logging.getLogger("uvicorn.error")
    uvicorn_log.addFilter(is_shown)
    # uvicorn ends the program when the app does not start; the app's own error says why.
    with contextlib.suppress(SystemExit):
        server.run(sockets=[listener])
    uvicorn_log.removeFilter(is_shown)
    if server.started:
        return server.status
    cause = server.failure
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, PerdureError):
        raise cause
    if cause is None:
        raise Misuse("the server did not start: it gave no reason")
    raise TargetFailed(f"the server did not start: {blame(cause)}", traceback=own_traceback(cause)) from cause


class _Server(uvicorn.Server):
    """uvicorn's server with our way to end: drain, leave (a worker that is replaced), or stop at once."""

    def __init__(
        self,
        app: App | Router,
        answer: ASGIApp,
        settings: Settings,
        channel: WorkerChannel | None,
        tokens: FileTokens | None,
        *,
        on_ready: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`answer` takes the requests: the app, or what logs them before it."""
        super().__init__(
            uvicorn.Config(
                self.run_app,
                interface="asgi3",
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                # Its warnings are about what peers do wrong; they would let any peer fill our log.
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=STOP_SECONDS,
                h11_max_incomplete_event_size=settings.max_headers,
            )
        )
        self.app = app
        self.answer = answer
        self.channel = channel
        self.tokens = tokens
        self.checking: set[asyncio.Task[None]] = set()
        """Checks of open requests against tokens that were read again."""
        self.drain_timeout = settings.drain_timeout
        self.longest_drain = settings.longest_drain
        self.on_ready = on_ready
        self.on_failure = on_failure
        self.loop: asyncio.AbstractEventLoop | None = None
        self.signals = 0
        self.failed = False
        """The store was lost, or Ctrl-C did not wait for the drain."""
        self.failure: BaseException | None = None
        """Why the app's lifespan failed: uvicorn would only print a traceback."""
        self.draining: asyncio.Task[None] | None = None
        self.leaving: asyncio.Task[None] | None = None
        self.giving: socket.socket | None = None
        """Leads to the workers that have newer code, once there are any."""
        self.taking: set[asyncio.Task[None]] = set()
        """Connections of a worker with older code that are on their way to this one."""
        self.deadline = _Deadline()

    @property
    def status(self) -> int:
        return 1 if self.failed or self.failure else 0

    def run_app(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return (self.run_lifespan if scope["type"] == "lifespan" else self.answer)(scope, receive, send)

    async def run_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = error
            raise

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        # SIGHUP would end the process without a drain. One that was started with SIGHUP ignored (nohup) ignores it.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            has_terminal = False
            with contextlib.suppress(OSError):  # it cannot be opened any more once it has sent the signal
                os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
                has_terminal = True
            self.loop.add_signal_handler(signal.SIGHUP, self.on_hangup, has_terminal)
        self.app.when_lost(self.on_store_lost)
        await super().startup(sockets)
        gc.freeze()  # what is loaded stays: looking for garbage in it would hold up all calls for 50 ms, each time
        if self.channel is not None:
            self.loop.add_reader(self.channel.fileno(), self.on_parent_word)
            for taking in self.channel.idle[1:]:
                self.loop.add_reader(taking, self.take_connection, taking)
        self.on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # It comes between any two instructions, so it leaves what it can to the loop. (The base class would raise the
        # signal again after a clean stop; then the exit status would not be 0.)
        self.signals += 1
        again = self.signals > 1
        if again:
            self.failed = self.failed or sig == signal.SIGINT
            self.deadline.set(CUT_SECONDS, status=1)
        if self.loop is None or not self.started:
            self.should_exit = True
        else:
            self.loop.call_soon_threadsafe(self.stop_at_once if again else self.drain)

    def on_hangup(self, has_terminal: bool) -> None:
        """A terminal that goes away sends SIGHUP, and then the user expects a drain. In a process without a terminal a
        service manager sends it to have tokens and code loaded: the process reads its tokens again. Only a parent of
        workers can load new code, so the process only logs that. A worker leaves SIGHUP to its parent."""
        if self.channel is not None:
            return
        if has_terminal:
            self.handle_exit(signal.SIGHUP, None)
        elif self.tokens is not None:
            self.read_tokens()
        else:
            log_event(
                logging.WARNING,
                "serve.hangup",
                "SIGHUP loads no new code without --workers: restart this process",
            )

    def read_tokens(self) -> None:
        """Read the token file again, and end what was opened with a token that is no longer in it."""
        if self.tokens is None:
            return
        try:
            self.tokens.read_again()
        except Misuse as error:
            log_event(logging.ERROR, "tokens.kept", f"the tokens stay as they were: {error}")
            return

        async def check() -> None:
            ended = await self.app.check_tokens()
            sentence = f"the tokens were read again; {ended} streams and polls of removed ones were ended"
            # In a worker the parent says that; a process alone says it to the sender of the signal, at the default
            # level.
            log_event(logging.WARNING if self.channel is None else logging.INFO, "tokens.read", sentence)

        task = asyncio.get_running_loop().create_task(check())
        self.checking.add(task)
        task.add_done_callback(self.checking.discard)

    def on_parent_word(self) -> None:
        assert self.channel is not None
        words = self.channel.receive()
        if TOKENS in words:
            self.read_tokens()
            words = words.replace(TOKENS, b"")
        if GONE in words:
            asyncio.get_running_loop().remove_reader(self.channel.fileno())
        if AT_ONCE in words:
            self.deadline.set(CUT_SECONDS, status=1)
            self.stop_at_once()
        elif RELOAD in words:
            self.hand_over(*self.channel.idle)
            self.channel.send(HANDING_OVER)
        elif LEAVE in words or GONE in words:
            self.leave()
        elif words:
            self.drain()

    def leave(self) -> None:
        """Let other workers have the port, and end once no client uses a connection to this process any more.

        Requests over open connections are served like any other. An idle connection is not closed, because a request
        may be on its way: it ends with its next answer, or when it has been idle for as long as it always may.
        """
        for server in self.servers:
            server.close()
        if self.leaving is None and self.draining is None:
            self.announce_close()
            self.leaving = asyncio.create_task(self.run_leave())

    def hand_over(self, giving: socket.socket, taking: socket.socket) -> None:
        """Leave for workers that have newer code, which get every connection as soon as the connection is idle."""
        self.drain_timeout = max(self.drain_timeout, RELOAD_SECONDS)
        self.longest_drain = max(self.longest_drain, RELOAD_SECONDS)
        asyncio.get_running_loop().remove_reader(taking)
        self.giving = giving
        self.leave()
        self.hand_over_connections()

    def hand_over_connections(self) -> None:
        """Hand over all connections, also one that was just being accepted when the parent's word came."""
        for connection in self._connections():
            if self.giving is not None and connection.giving is None:
                connection.hand_over(self.giving)

    def take_connection(self, taking: socket.socket) -> None:
        """Go on with a connection of a worker that has older code."""
        try:
            _, files, _, _ = socket.recv_fds(taking, 1, 1)
        except OSError:  # another worker was faster
            return

        async def take(peer: socket.socket) -> None:
            peer.set_inheritable(False)
            peer.setblocking(False)
            loop, state = asyncio.get_running_loop(), self.server_state
            try:
                _, connection = await loop.connect_accepted_socket(
                    lambda: Connection(config=self.config, server_state=state, app_state=self.lifespan.state), peer
                )
            except OSError:  # the peer has left meanwhile
                peer.close()
                return
            if self.draining is not None:
                connection.shutdown()
            elif self.giving is not None:
                connection.hand_over(self.giving)

        for file in files:
            task = asyncio.get_running_loop().create_task(take(socket.socket(fileno=file)))
            self.taking.add(task)
            task.add_done_callback(self.taking.discard)

    def announce_close(self) -> None:
        """From now on answers say that their connection closes, so that clients go elsewhere."""
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)  # from which uvicorn makes the default headers again each second
        self.server_state.default_headers = [*self.server_state.default_headers, close]
        for connection in self._connections():
            connection.announce_close()

    async def run_leave(self) -> None:
        loop = asyncio.get_running_loop()
        calls_until = loop.time() + self.drain_timeout
        tasks_until = loop.time() + self.longest_drain
        await self.app.learn_tools()
        while True:
            self.app.end_idle_readers()
            self.app.leave_at_steps()
            await asyncio.sleep(LEAVING_POLL_SECONDS)
            self.hand_over_connections()
            connections = self._connections()
            if not connections and not self.app.is_busy:
                break
            until = tasks_until if self.app.has_tasks else calls_until
            if any(connection.is_idle for connection in connections):
                until += KEEP_ALIVE_SECONDS
            if loop.time() > until:
                break
        self.should_exit = True

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]

    def drain(self) -> None:
        if self.leaving is not None:
            self.leaving.cancel()
        elif self.draining is None:
            self.announce_close()
        if self.draining is None:
            seconds = self.longest_drain if self.app.has_tasks else self.drain_timeout
            # Without this line, a user who pressed Ctrl-C sees nothing for as long as calls run.
            if seconds and (running := self.app.running):
                names = ", ".join(dict.fromkeys(running[:MOST_NAMES])) + ("" if len(running) <= MOST_NAMES else ", …")
                what = f"{len(running)} running {'call' if len(running) == 1 else 'calls'} ({names})"
                how = f"waits for {what}, up to {seconds:g} s; a second Ctrl-C or SIGTERM does not wait"
                log_event(logging.WARNING, "serve.stopping", f"the server stops and {how}")
            self.draining = asyncio.create_task(self.run_drain())
            # The idle ones are closed now: stock clients send a request again over another connection, and do not come
            # again after a 503.
            for connection in list(self.server_state.connections):
                connection.shutdown()

    async def run_drain(self) -> None:
        try:
            await self.app.drain()
        except Exception:
            _logger.exception("draining failed", extra={"action": "drain.failed"})
        finally:
            self.should_exit = True

    def on_store_lost(self, failure: StoreLost) -> None:
        """End if the store's file was replaced, or other nodes have buried this one: another process can serve the file
        that is there now, or join as a new node. A file that is too new would be so for that process as well, so this
        one stays and says so in its answers."""
        if isinstance(failure, StoreReplaced | NodeBuried):
            self.failed = True
            self.on_failure(str(failure))
            if isinstance(failure, StoreReplaced):
                self.drain()  # its calls are known to no other process
            else:
                self.stop_at_once()

    def stop_at_once(self) -> None:
        """End now: peers get a moment to take their last bytes."""
        self.should_exit = True
        if self.draining is not None:
            self.draining.cancel()
        self.app.begin_stop()
        asyncio.get_running_loop().call_later(HURRY_SECONDS, self.abort_connections)

    def abort_connections(self) -> None:
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.begin_stop()
        await super().shutdown(sockets)
        if self.force_exit:  # the base class leaves the app alone then, but its log has to be closed
            await self.lifespan.shutdown()
        self.deadline.set(LEAVE_SECONDS, status=self.status)


class _Deadline:
    """Ends the process at a time, whatever holds its other threads.

    The thread runs from the start: a signal handler may put something into this queue, but may not start a thread.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="perdure deadline", daemon=True).start()

    def set(self, seconds: float, *, status: int) -> None:
        """The earliest deadline counts, with the newest status."""
        self._queue.put((time.monotonic() + seconds, status))

    def _watch(self) -> None:
        at, status = self._queue.get()
        while (left := at - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                other, status = self._queue.get(timeout=left)
                at = min(at, other)
        with contextlib.suppress(OSError):  # the terminal may be gone
            # Not through the log: what is stuck may hold its lock.
            os.write(2, last_line("serve.cut", "ended without waiting for what does not stop"))
        os._exit(status)
