"""Runs `perdure stdio` from its start to its end: checks what the user gave, makes the HTTP client, runs the bridge."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio

from perdure._core.codes import NO_SERVER
from perdure._core.jsonrpc import InvalidMessage, Request, parse_body
from perdure._core.reconnect import Patience
from perdure._core.text import printable
from perdure._files.locks import HAS_FLOCK
from perdure.remote.credentials import checked_client, on_401, token_provider
from perdure.remote.endpoint import Endpoint, Refused
from perdure.remote.link import Notice
from perdure.remote.message import encode, error
from perdure.stdio import explain as how
from perdure.stdio import logs
from perdure.stdio.bridge import Bridge
from perdure.stdio.identity import Identity, here, identify
from perdure.stdio.keys_file import KeysFile, open_keys
from perdure.stdio.pipes import HostGone, Output, lines
from perdure.stdio.positions_file import PositionsFile
from perdure.stdio.resume_broker import ResumeBroker
from perdure.stdio.resume_slot import Slot, Target, default_directory, open_slot, resume_off
from perdure.telemetry.log_records import log_event

#: As for the other commands: what was asked for cannot be done.
REFUSED = 2
#: What a shell reports for a program that a signal ended, beyond the signal's number.
BY_SIGNAL = 128
#: Characters of a process's name in the log: a program may give itself any.
MAX_NAME = 64
#: Characters of a line of `--explain`, which may hold an address and a path.
MAX_TEXT = 500
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user gave."""

    url: str
    token_env: str | None = None
    token_file: Path | None = None
    token_dir: Path | None = None
    resume: bool = True
    patience: float = Patience().max_time
    log_level: str = "info"
    log_file: Path | None = None


def run(options: Options, *, arguments: list[str], environ: Mapping[str, str]) -> int:
    """The exit status: 0 at the end of stdin, 128 and its number for a signal, 2 if it could not have worked."""
    log = logs.to_stderr(options.log_level)
    try:
        if options.log_file is not None:
            logs.to_file(options.log_file)
    except OSError as failure:
        log_event(logging.WARNING, "stdio.log_file", f"the log file cannot be written: {failure}")
    try:
        if sys.stdin is None or sys.stdout is None:
            log_event(logging.ERROR, "stdio.no_host", "stdin or stdout is closed: a host speaks MCP over them")
            return REFUSED
        return anyio.run(_run, options, arguments, environ)
    except KeyboardInterrupt:  # before the signals are handled
        return BY_SIGNAL + signal.SIGINT
    finally:
        log.finish()


async def _run(options: Options, arguments: list[str], environ: Mapping[str, str]) -> int:
    output = Output(sys.stdout.fileno())
    try:
        token = token_provider(options.token_env, options.token_file, environ)
        client = checked_client(options.url, token)
    except Refused as refused:
        return await _refuse(options.url, output, refused)
    endpoint = Endpoint(client, options.url, on_401=on_401(token))
    async with client:
        place = _place(options, arguments, environ)
        slot = place if isinstance(place, Slot) else await open_slot(place[0], _identified(), place[1])
        keys = KeysFile() if isinstance(place, Slot) else open_keys(*place)
        positions = PositionsFile(lambda: slot.notes)
        patience = Patience(max_time=options.patience)
        bridge = Bridge(endpoint, output, ResumeBroker(endpoint, slot), positions, keys, patience=patience)

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


def _identified() -> Identity | None:
    processes = here()
    if processes is not None and (host := identify(processes)) is not None:
        found = processes.look(host.pid)
        name = "it has ended" if found is None else printable(found.name, MAX_NAME)
        log_event(logging.INFO, "token.host", f"The host is process {host.pid} ({name})")
        return host
    return None if processes is not None else identify()


def explain(options: Options, *, arguments: list[str], environ: Mapping[str, str]) -> int:
    """Print which session a bridge would go on with that is called with these arguments, and why."""
    logs.to_stderr(options.log_level)
    place = _place(options, arguments, environ)
    if isinstance(place, Slot):
        print("session   a fresh one: resume is off")
    else:
        how.explain(*place, lambda name, text: print(f"{name:<9} {printable(text, MAX_TEXT)}"))
    return 0


def _place(options: Options, arguments: list[str], environ: Mapping[str, str]) -> Slot | tuple[Path | None, Target]:
    """The directory for what the next bridge needs, and the target that it is for; an empty slot if resume is off."""
    if not options.resume:
        return Slot()
    if not HAS_FLOCK:  # Windows
        sentence = "Could not verify parent process start time, session resume disabled for this instance"
        log_event(logging.WARNING, "stdio.no_resume", sentence)
        return Slot()
    try:
        home = Path.home()
    except RuntimeError:  # a user without an entry and without HOME, as in some containers
        home = None
    directory = options.token_dir or default_directory(environ, platform=sys.platform, home=home)
    try:
        started_in = Path.cwd()
    except OSError as error:  # it was removed: the target is not known
        return resume_off(f"the directory is gone: {error}")
    name = options.token_env or (str(options.token_file) if options.token_file else "")
    secret = environ.get(options.token_env, "") if options.token_env else ""
    return directory, Target(url=options.url, credential=name, arguments=arguments, directory=started_in, secret=secret)


async def _refuse(url: str, output: Output, refused: Refused) -> int:
    """It cannot work as it was started. Hosts show the answer to `initialize` rather than stderr."""
    logs.ConnectionLog(url)(Notice.REFUSED, str(refused), reason=refused.reason)
    with contextlib.suppress(HostGone):
        async for line in lines(sys.stdin.fileno()):
            try:
                message = parse_body(line) if isinstance(line, bytes) else None
            except InvalidMessage:
                message = None
            if isinstance(message, Request):
                data = {"reason": refused.reason}
                await output.write(error(encode(message.id), NO_SERVER, str(refused), data).text)
    return REFUSED
