"""Serves a program's MCP server inside `perdure stdio`: the process, its log, and the application that the bridge talks
to, all in this process and without a socket.

The program is started first, because it can get ready while this process imports the serving side, which takes longer
than all else here.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2

from perdure._core.backoff import Pauses
from perdure._core.lines import MAX_LINE_BYTES
from perdure.errors import Misuse, StoreError
from perdure.gateway.children import Children, Reaper, program_of
from perdure.gateway.config import Surroundings, program_from
from perdure.gateway.upstream import Upstream
from perdure.remote.endpoint import Endpoint
from perdure.settings import Settings
from perdure.stdio.log_folder import log_folder
from perdure.stdio.program import Place
from perdure.telemetry.log_records import log_event

URL = "http://localhost/mcp"
"""The address of the application, which only this process's client reaches."""

PAUSES = Pauses(first=0.1, longest=5.0, free=1)
"""A host and its user wait for the next process, and nothing but their requests starts one. So the first is started at
once, and a broken program is tried often enough."""

#: Seconds for a handshake beyond `start_timeout`, in which the application answers why there is none.
ANSWER_SECONDS = 5.0

_CHATTER = ("call.answered", "era.", "node.", "resume.", "session.", "store.swept")
"""Actions for the operator of a server. A host shows its user every record that is written here."""


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno != logging.INFO or not str(getattr(record, "action", "")).startswith(_CHATTER)


@dataclass(frozen=True, kw_only=True)
class ChildServer:
    """What the user asks for."""

    upstream: Upstream
    watched: tuple[Path, ...] = ()

    @property
    def handshake_seconds(self) -> float:
        assert self.upstream.program is not None
        return self.upstream.program.start_timeout + ANSWER_SECONDS

    @asynccontextmanager
    async def connect(self, place: Place | None) -> AsyncIterator[Endpoint]:
        """Lead to the server during a block."""
        async with AsyncExitStack() as stack:
            logger = logging.getLogger("perdure")
            if not logger.isEnabledFor(logging.DEBUG):
                logger.addFilter(_is_shown)
                stack.callback(logger.removeFilter, _is_shown)
            reaper = Reaper()
            stack.push_async_callback(reaper.aclose)
            # The next bridge continues the sessions as soon as this one's node has left, which waits for no process.
            children = Children(
                program_of(self.upstream), reaper=reaper, pauses=PAUSES, lanes_wait=False, shows_errors=True
            )
            stack.push_async_callback(children.aclose)
            children.start_ahead()
            client = await stack.enter_async_context(_serving(self.upstream, children, place))
            for task in self._watch(children, None if place is None else place[0]):
                stack.callback(task.cancel)
            yield Endpoint(client, URL, on_401="wants a token")

    def _watch(self, children: Children, but: Path | None) -> list[asyncio.Task[None]]:
        from perdure.serve.code_watch import WatchedCode, watch_code, watched_paths

        def on_change(what: str) -> None:
            name = self.upstream.name
            log_event(logging.INFO, "code.changed", f"{what} changed; {name} is started again", upstream=name)
            children.restart()

        async def watch(code: WatchedCode) -> None:
            try:
                await watch_code(code, on_change, option="--watch")
            except Misuse as refused:
                log_event(logging.ERROR, "code.unwatched", f"changes of the code are no longer noticed: {refused}")

        return [asyncio.create_task(watch(code)) for code in watched_paths(self.watched, but=but)]


@asynccontextmanager
async def _serving(upstream: Upstream, children: Children, place: Place | None) -> AsyncIterator[httpx2.AsyncClient]:
    """Run the application during a block: on the log of the target or, if that cannot be used, in memory."""
    from perdure.gateway.host import host_upstream
    from perdure.http.app import App
    from perdure.serve.in_process import InProcess
    from perdure.store import MemoryStore, SqliteStore

    # One user has all of it, so no limit protects others.
    settings = Settings(max_share=100, max_body=MAX_LINE_BYTES, metrics=False)

    def make_app(folder: Path | None) -> App:
        store = MemoryStore() if folder is None else SqliteStore(str(folder / "log.db"))
        hosted = host_upstream(upstream, settings, children=children)
        return App(hosted, store=store, settings=settings, auth=None, path="/mcp")

    async with AsyncExitStack() as stack:
        folder = None if place is None else stack.enter_context(log_folder(*place))
        app = make_app(folder)
        try:
            await stack.enter_async_context(app.lifespan())
        except StoreError as error:
            if folder is None:
                raise
            sentence = f"the log is kept in memory, and ends with this process: {error}"
            log_event(logging.WARNING, "stdio.log_in_memory", sentence)
            app = make_app(None)
            await stack.enter_async_context(app.lifespan())
        # A new process can use the present log; this one cannot.
        app.when_lost(lambda _: signal.raise_signal(signal.SIGTERM))
        yield await stack.enter_async_context(httpx2.AsyncClient(transport=InProcess(app), timeout=None))


def child_server(
    command: Sequence[str], *, watch: Sequence[Path], cwd: Path | None, patience: float | None
) -> ChildServer:
    """Return the server for a command line (`cli.stdio.check_source`)."""
    around = Surroundings(environ=os.environ, folder=Path.cwd(), read_variables=lambda _: {})
    upstream = program_from(command, env=(), cwd=cwd, era="auto", around=around)
    assert upstream.program is not None
    # The host has chosen these variables for this program.
    upstream = replace(upstream, program=replace(upstream.program, inherit_env=True))
    if patience is not None:
        upstream = replace(upstream, patience=patience)
    return ChildServer(upstream=upstream, watched=tuple(path.resolve() for path in watch))
