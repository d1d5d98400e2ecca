"""Runs `perdure stdio` from its start to its end: checks its options, makes the HTTP client, runs the bridge.

The bridge's log goes to stderr, and to a file if the user names one. stdout belongs to MCP. A thread writes the
records: a host that does not read stderr must not stop the bridge. Unread records beyond `ROOM` are dropped.

`--explain` prints which session a bridge would continue: the host that was found, its slots, and why (T7, T9).
"""

import asyncio
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from perdure._core.jsonrpc import InvalidMessage, Request, parse_body
from perdure._core.reconnect import Patience
from perdure._core.text import printable
from perdure._files.locks import HAS_FLOCK
from perdure.remote.call import failure_answer
from perdure.remote.endpoint import Endpoint, Refused, checked_client, on_401, token_provider
from perdure.remote.message import encode
from perdure.remote.route import Notice
from perdure.stdio.bridge import Bridge, connection_log
from perdure.stdio.identity import here, identify, parents
from perdure.stdio.launchers import ProcessKind, is_script
from perdure.stdio.pipes import HostGone, Output, lines
from perdure.stdio.resume_broker import ResumeBroker
from perdure.stdio.resume_slot import (
    Slot,
    SlotState,
    Target,
    default_directory,
    open_slot,
    resume_off,
    survey,
)
from perdure.stdio.state_files import KeysFile, PositionsFile
from perdure.telemetry.log_records import LogLines, log_event

#: As for the other commands: the request cannot be fulfilled.
REFUSED = 2
#: What a shell reports for a program that a signal ended, beyond the signal's number.
BY_SIGNAL = 128
#: Characters of a process's name in the log: a program may give itself any.
MAX_NAME = 64
#: Characters of a line of `--explain`, which may hold an address and a path.
MAX_TEXT = 500
SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Records that wait for stderr. A bridge writes a few at its start and at trouble, and none for each message.
ROOM = 1_000
#: Seconds for the last records at the end of the process.
FLUSH = 0.2


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command."""

    url: str
    command: Sequence[str] = ()
    """The program that is served in place of a URL."""
    token_env: str | None = None
    token_file: Path | None = None
    token_dir: Path | None = None
    resume: bool = True
    patience: float = Patience().max_time
    handshake_seconds: float | None = None
    """How long a handshake may take, if that is not the bridge's own limit."""
    log_level: str = "info"
    log_file: Path | None = None


Place = tuple[Path | None, Target]
"""The directory of the files for the next bridge, and the target that they are for."""

Connect = Callable[[Place | None], AbstractAsyncContextManager[Endpoint]]
"""Leads to the server during a block; the place is `None` if nothing may be kept on disk. Raises `Refused`."""


def run(options: Options, *, arguments: list[str], environ: Mapping[str, str], connect: Connect | None = None) -> int:
    """Run the bridge, to the server at the URL of the options unless `connect` leads to another one. Returns the exit
    status: 0 at the end of stdin, 128 and its number for a signal, 2 if the options or the environment cannot work."""
    log = to_stderr(options.log_level)
    try:
        if options.log_file is not None:
            opened = os.open(options.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            written = logging.StreamHandler(os.fdopen(opened, "a", encoding="utf-8"))
            written.setFormatter(LogLines("%(asctime)s %(process)d %(levelname)s %(message)s"))
            logging.getLogger("perdure").addHandler(written)
    except OSError as failure:
        log_event(logging.WARNING, "stdio.log_file", f"the log file cannot be written: {failure}")
    try:
        if sys.stdin is None or sys.stdout is None:
            log_event(logging.ERROR, "stdio.no_host", "stdin or stdout is closed: a host speaks MCP over them")
            return REFUSED

        @asynccontextmanager
        async def connect_remote(_: Place | None) -> AsyncIterator[Endpoint]:
            token = token_provider(options.token_env, options.token_file, environ)
            async with checked_client(options.url, token) as client:
                yield Endpoint(client, options.url, on_401=on_401(token))

        return anyio.run(_run, options, _place(options, arguments, environ), connect or connect_remote)
    except KeyboardInterrupt:  # before the signals are handled
        return BY_SIGNAL + signal.SIGINT
    finally:
        log.finish()


async def _run(options: Options, place: Place | None, connect: Connect) -> int:
    output = Output(sys.stdout.fileno())
    async with AsyncExitStack() as stack:
        try:
            endpoint = await stack.enter_async_context(connect(place))
        except Refused as refused:
            return await _refuse(options.url, output, refused)
        slot, keys = Slot(), KeysFile()
        if place is not None:
            if (host := identify()) is not None:
                log_event(
                    logging.INFO, "token.host", f"The host is process {host.pid} ({printable(host.name, MAX_NAME)})"
                )
            slot, keys = await open_slot(place[0], host, place[1]), KeysFile(*place)
        positions = PositionsFile(slot.positions)
        bridge = Bridge(
            endpoint,
            output,
            ResumeBroker(endpoint, slot),
            positions,
            keys,
            patience=Patience(max_time=options.patience),
            handshake_seconds=options.handshake_seconds,
        )

        def on_leaving() -> None:
            positions.close()
            keys.close()
            slot.release()

        def on_signal(number: int) -> None:
            """The second one ends the process as it would without a handler."""
            received.append(number)
            for each in SIGNALS:
                loop.remove_signal_handler(each)
            bridge.stop()

        received: list[int] = []
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError):  # Windows
            for each in SIGNALS:
                loop.add_signal_handler(each, on_signal, each)
        await bridge.run(lines(sys.stdin.fileno(), on_left=bridge.stop), on_leaving)
    return BY_SIGNAL + received[0] if received else 0


def _place(options: Options, arguments: list[str], environ: Mapping[str, str]) -> Place | None:
    """Return the place of the files for the next bridge; None if resume is off."""
    if not options.resume:
        return None
    if not HAS_FLOCK:  # Windows
        sentence = "Could not verify parent process start time, session resume disabled for this instance"
        log_event(logging.WARNING, "stdio.no_resume", sentence)
        return None
    try:
        home = Path.home()
    except RuntimeError:  # a user without an entry and without HOME, as in some containers
        home = None
    directory = options.token_dir or default_directory(environ, platform=sys.platform, home=home)
    try:
        started_in = Path.cwd()
    except OSError as error:  # it was removed: the target is not known
        resume_off(f"the directory is gone: {error}")
        return None
    secret = environ.get(options.token_env, "") if options.token_env else ""
    return directory, Target(url=options.url, arguments=arguments, directory=started_in, secret=secret)


async def _refuse(url: str, output: Output, refused: Refused) -> int:
    """Answer each request with the reason: hosts show the answer to `initialize` rather than stderr."""
    connection_log(url)(Notice.REFUSED, str(refused), reason=refused.reason)
    with contextlib.suppress(HostGone):
        async for line in lines(sys.stdin.fileno()):
            try:
                message = parse_body(line) if isinstance(line, bytes) else None
            except InvalidMessage:
                message = None
            if isinstance(message, Request):
                await output.write(failure_answer(encode(message.id), refused).text)
    return REFUSED


# The log


class Unblocked(logging.Handler):
    """Hands records to another handler, in its own thread."""

    def __init__(self, below: logging.Handler) -> None:
        super().__init__()
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(ROOM)

        def run() -> None:
            while (record := self._records.get()) is not None:
                below.handle(record)

        self._thread = threading.Thread(target=run, name="perdure-stderr", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(record)

    def finish(self) -> None:
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(None)
        self._thread.join(FLUSH)


def to_stderr(level: str) -> Unblocked:
    logging.raiseExceptions = False  # a host that closed stderr
    logger = logging.getLogger("perdure")
    logger.setLevel(level.upper())
    logger.propagate = False
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(LogLines("perdure: %(message)s"))
    unblocked = Unblocked(shown)
    logger.addHandler(unblocked)
    return unblocked


# --explain

_KINDS = {
    ProcessKind.HOST: "the host: Perdure does not know it as a launcher",
    ProcessKind.LAUNCHER: "a launcher",
    ProcessKind.MANAGER: "a process manager: the host is not known",
}


def explain(options: Options, *, arguments: list[str], environ: Mapping[str, str]) -> int:
    """Print which session a bridge with these arguments would continue, and why. Nothing is taken, written or asked
    for."""

    def say(name: str, text: str) -> int:
        print(f"{name:<9} {printable(text, MAX_TEXT)}")
        return 0

    to_stderr(options.log_level)
    if (place := _place(options, arguments, environ)) is None:
        return say("session", "a fresh one: resume is off")
    directory, target = place
    processes = here()
    chain = [] if processes is None else parents(processes, os.getpid())
    for number, found in enumerate(chain):
        say("process", f"{found.pid} {found.name}: {_KINDS[found.kind] if number else 'this bridge'}")
    identity = identify(processes)
    if identity is None:
        return say("session", "a fresh one: no host process is known, so none can be found again")
    say("host", f"process {identity.pid} ({identity.name}): its bridges continue their sessions while it runs")
    if is_script(chain[-1].words):
        say("", "If your host started this script, let the script start the bridge with `exec`: it is another process")
        say("", "each time, and no session is found again by it.")
    if options.command:
        say("command", options.command[0])
    else:
        say("address", target.url)
    if directory is None:
        return say("session", "a fresh one: no directory for resume tokens is known; name one with --token-dir")
    say("files", str(directory))
    try:
        states = survey(directory, identity, target)
    except OSError as error:
        return say("session", f"a fresh one: the directory cannot be used: {error}")
    for state in states:
        what = "a bridge uses it" if state.is_held else "a session waits" if state.has_token else "no session waits"
        say("slot", f"{state.name}: {what}")
    return say("session", outcome(states))


def outcome(states: Sequence[SlotState]) -> str:
    """Return what a bridge does that finds these slots; `resume_slot` has the table."""
    waiting = [state for state in states if state.has_token and not state.is_held]
    held = [state for state in states if state.is_held]
    if len(waiting) > 1:
        return f"a fresh one: {len(waiting)} wait and cannot be told apart; give each bridge a name with --instance"
    if waiting:
        return f"the one of slot {waiting[0].name}: it is the only one that waits"
    if held:
        return f"a fresh one, unless slot {held[0].name} becomes free within a second: its bridge still runs"
    return "a fresh one: none of this host waits for this address, these options and this directory"
