"""`perdure stdio` from its start to its end."""

from __future__ import annotations

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
from perdure.remote.auth import TokenProvider
from perdure.remote.old_wire import Wire
from perdure.stdio import failures as troubles
from perdure.stdio import logs
from perdure.stdio.bridge import Bridge
from perdure.stdio.credentials import BadCredentials, provider
from perdure.stdio.dialing import http_client
from perdure.stdio.host.identity import identify
from perdure.stdio.messages import encode, error
from perdure.stdio.notes import Notes
from perdure.stdio.pipes import HostGone, Output, lines
from perdure.stdio.resuming import Resuming
from perdure.stdio.slots import NoSlot, Slot, Target, default_directory, open_slot
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
    log, unwritten = _log(options)
    if unwritten is not None:
        log_event(logging.WARNING, "stdio.log_file", f"the log file cannot be written: {unwritten}")
    try:
        if sys.stdin is None or sys.stdout is None:
            log_event(logging.ERROR, "stdio.no_host", "stdin or stdout is closed: a host speaks MCP over them")
            return REFUSED
        return anyio.run(_run, options, arguments, environ)
    except KeyboardInterrupt:  # before anybody listens to signals
        return BY_SIGNAL + signal.SIGINT
    finally:
        log.finish()


def _log(options: Options) -> tuple[logs.Unblocked, OSError | None]:
    log = logs.to_stderr(options.log_level)
    try:
        if options.log_file is not None:
            logs.to_file(options.log_file)
    except OSError as failure:
        return log, failure
    return log, None


async def _run(options: Options, arguments: list[str], environ: Mapping[str, str]) -> int:
    output = Output(sys.stdout.fileno())
    trouble = troubles.of_address(options.url)
    token: TokenProvider | None = None
    if trouble is None:
        try:
            token = provider(options.token_env, options.token_file, environ)
        except BadCredentials as bad:
            trouble = bad.trouble
    if trouble is not None:
        return await _refuse(output, trouble)
    return await _bridge(options, arguments, environ, output, token)


async def _bridge(
    options: Options,
    arguments: list[str],
    environ: Mapping[str, str],
    output: Output,
    token: TokenProvider | None,
) -> int:
    try:
        client = http_client(options.url, token)
    except troubles.Refused as refused:
        return await _refuse(output, refused.trouble)
    async with client:
        slot = await _slot(options, arguments, environ)
        notes = Notes(lambda: slot.notes)
        has_token = token is not None
        bridge = Bridge(
            Wire(client, options.url),
            output,
            Resuming(client, options.url, slot, credentials=has_token),
            notes,
            patience=Patience(max_time=options.patience),
            credentials=has_token,
        )

        def leaving() -> None:
            notes.close()
            slot.release()

        with _signals(bridge.stop) as received:
            await bridge.run(lines(sys.stdin.fileno(), left=bridge.stop), leaving)
    return BY_SIGNAL + received[0] if received else 0


async def _slot(options: Options, arguments: list[str], environ: Mapping[str, str]) -> Slot:
    if not options.resume:
        return NoSlot()
    if not HAS_FLOCK:  # Windows
        sentence = "Could not verify parent process start time, session resume disabled for this instance"
        log_event(logging.WARNING, "stdio.no_resume", sentence)
        return NoSlot()
    directory = options.token_dir or default_directory(environ, platform=sys.platform, home=_home())
    try:
        started_in = Path.cwd()
    except OSError as error:  # it was removed: the target is not known
        log_event(
            logging.WARNING, "token.off", f"Session resume disabled for this instance: the directory is gone: {error}"
        )
        return NoSlot()
    name = options.token_env or (str(options.token_file) if options.token_file else "")
    secret = environ.get(options.token_env, "") if options.token_env else ""
    target = Target(url=options.url, credential=name, arguments=arguments, directory=started_in, secret=secret)
    return await open_slot(directory, identify(), target)


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry and without HOME, as in some containers
        return None


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[list[int]]:
    """The signal that was received, if one was; the second of them ends the process as if nobody listened."""
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


async def _refuse(output: Output, trouble: troubles.Trouble) -> int:
    """It cannot work as it was started. Hosts show the answer to `initialize` rather than stderr."""
    troubles.Teller().refused(trouble)
    with contextlib.suppress(HostGone):
        async for line in lines(sys.stdin.fileno()):
            try:
                message = parse_body(line) if isinstance(line, bytes) else None
            except InvalidMessage:
                message = None
            if isinstance(message, Request):
                data = {"reason": trouble.reason}
                await output.write(error(encode(message.id), NO_SERVER, trouble.sentence, data))
    return REFUSED
