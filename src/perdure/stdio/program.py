"""Runs `perdure stdio` from its start to its end."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio

from perdure._core.codes import NO_SERVER
from perdure._core.jsonrpc import InvalidMessage, Request, parse_body
from perdure._core.reconnect import Patience
from perdure._files.locks import HAS_FLOCK
from perdure.remote.endpoint import Endpoint, Refusal, Refused
from perdure.remote.link import Notice
from perdure.remote.message import encode, error
from perdure.stdio import logs
from perdure.stdio.bridge import Bridge
from perdure.stdio.http_client import http_client, token_provider
from perdure.stdio.identity import identify
from perdure.stdio.notes import Notes
from perdure.stdio.pipes import HostGone, Output, lines
from perdure.stdio.resume_broker import ResumeBroker
from perdure.stdio.slot import Slot, Target, default_directory, open_slot, resume_off
from perdure.telemetry.events import log_event

#: As for the other commands: what was asked for cannot be done.
REFUSED = 2
#: What a shell reports for a program that a signal ended, beyond the signal's number.
BY_SIGNAL = 128


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
        client = http_client(options.url, token)
    except Refused as refused:
        return await _refuse(options.url, output, refused.refusal)
    on_401 = "wants a token: see --token-env and --token-file" if token is None else "does not accept the given token"
    endpoint = Endpoint(client, options.url, on_401=on_401)
    async with client:
        slot = await _slot(options, arguments, environ)
        notes = Notes(lambda: slot.notes)
        bridge = Bridge(
            endpoint, output, ResumeBroker(endpoint, slot), notes, patience=Patience(max_time=options.patience)
        )

        def on_leaving() -> None:
            notes.close()
            slot.release()

        with _signals(bridge.stop) as received:
            await bridge.run(lines(sys.stdin.fileno(), on_left=bridge.stop), on_leaving)
    return BY_SIGNAL + received[0] if received else 0


async def _slot(options: Options, arguments: list[str], environ: Mapping[str, str]) -> Slot:
    if not options.resume:
        return Slot()
    if not HAS_FLOCK:  # Windows
        log_event(
            logging.WARNING,
            "stdio.no_resume",
            "Could not verify parent process start time, session resume disabled for this instance",
        )
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
    target = Target(url=options.url, credential=name, arguments=arguments, directory=started_in, secret=secret)
    return await open_slot(directory, identify(), target)


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[list[int]]:
    """The signal that was received, if one was; the second one ends the process as it would without a handler."""
    received: list[int] = []
    loop = asyncio.get_running_loop()
    wanted = (signal.SIGTERM, signal.SIGINT)

    def heard(number: int) -> None:
        received.append(number)
        for each in wanted:
            loop.remove_signal_handler(each)
        stop()

    with contextlib.suppress(NotImplementedError):  # Windows
        for each in wanted:
            loop.add_signal_handler(each, heard, each)
    yield received


async def _refuse(url: str, output: Output, refusal: Refusal) -> int:
    """It cannot work as it was started. Hosts show the answer to `initialize` rather than stderr."""
    logs.ConnectionLog(url)(Notice.REFUSED, refusal.sentence, reason=refusal.reason)
    with contextlib.suppress(HostGone):
        async for line in lines(sys.stdin.fileno()):
            try:
                message = parse_body(line) if isinstance(line, bytes) else None
            except InvalidMessage:
                message = None
            if isinstance(message, Request):
                data = {"reason": refusal.reason}
                await output.write(error(encode(message.id), NO_SERVER, refusal.sentence, data).text)
    return REFUSED
