"""Runs `perdure stdio` from its start to its end: checks what the user gave, makes the HTTP client, runs the bridge.

The bearer token comes from the environment or from a file, never from the command line, which every user of the machine
can read.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import httpx2

from perdure._core.codes import NO_SERVER
from perdure._core.jsonrpc import InvalidMessage, Request, parse_body
from perdure._core.reconnect import Patience
from perdure._files.locks import HAS_FLOCK
from perdure.remote import endpoint as remote
from perdure.remote.endpoint import Bearer, Endpoint, Refused, TokenProvider, shown
from perdure.remote.link import Notice
from perdure.remote.message import encode, error
from perdure.stdio import logs
from perdure.stdio.bridge import Bridge
from perdure.stdio.call_ledger import CallLedger, open_ledger
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
SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Of the token's file. A signed token with many claims has some 10 KiB.
MAX_BYTES = 64 << 10
_FIT = re.compile(r"[!-~]+")


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
        token = None
        if options.token_env is not None or options.token_file is not None:
            token = partial(_token, options, environ)
            token()
        client = _http_client(options.url, token)
    except Refused as refused:
        return await _refuse(options.url, output, refused)
    on_401 = "wants a token: see --token-env and --token-file" if token is None else "does not accept the given token"
    endpoint = Endpoint(client, options.url, on_401=on_401)
    async with client:
        place = _place(options, arguments, environ)
        slot = place if isinstance(place, Slot) else await open_slot(place[0], identify(), place[1])
        ledger = CallLedger() if isinstance(place, Slot) else open_ledger(*place)
        notes = Notes(lambda: slot.notes)
        patience = Patience(max_time=options.patience)
        bridge = Bridge(endpoint, output, ResumeBroker(endpoint, slot), notes, ledger, patience=patience)

        def on_leaving() -> None:
            notes.close()
            ledger.close()
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


def check_address(url: str) -> None:
    """Raise `Refused` unless this is the address of a server, without credentials in it."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise Refused("bad_address", f"the address cannot be read: {error}") from error
    bad = ""
    if parsed.scheme not in ("http", "https") or not parsed.host:
        bad = f"{shown(url)} is not the address of an MCP server: it must begin with http:// or https://"
    elif parsed.port is not None and not 0 < parsed.port < 65_536:
        bad = f"{shown(url)} is not an address: there is no port {parsed.port}"
    elif parsed.userinfo:
        bad = "credentials must not stand in the address: give them with --token-env or --token-file"
    if bad:
        raise Refused("bad_address", bad)


def _http_client(url: str, token: TokenProvider | None) -> httpx2.AsyncClient:
    """Raises `Refused` where the address, the proxies or the certificates cannot be used."""
    check_address(url)
    try:
        return remote.http_client(url, auth=None if token is None else Bearer(token))
    except OSError as error:
        sentence = f"the certificates that are trusted (SSL_CERT_FILE) cannot be read: {error.strerror or error}"
        raise Refused("bad_certificates", sentence) from error
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        # Not all of it: some libraries add advice.
        first_line = str(error).partition("\n")[0].partition(". ")[0]
        sentence = f"the proxy that the environment names cannot be used: {first_line}"
        raise Refused("bad_proxy", sentence) from error


def _token(options: Options, environ: Mapping[str, str]) -> str:
    """The user's token, read again each time: the program that renews it writes it to its file. Raises `Refused`."""
    reason = "no_credentials"
    if options.token_file is not None:
        where = f"the file {options.token_file} of --token-file"
        try:
            with options.token_file.open("rb") as opened:
                data = opened.read(MAX_BYTES + 1)
                mode = os.fstat(opened.fileno()).st_mode
        except OSError as error:
            raise Refused(reason, f"{where} cannot be read: {error.strerror}") from error
        if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
            log_event(logging.WARNING, "stdio.token_file_open", f"{where} can be read by other users")
        if len(data) > MAX_BYTES:
            raise Refused(reason, f"{where} is larger than {MAX_BYTES} bytes")
        text = data.decode("utf-8", "replace")
    else:
        name = options.token_env or ""
        where = f"the variable {name} of --token-env"
        if name not in environ:
            raise Refused(reason, f"{where} is not set")
        text = environ[name]
    if not _FIT.fullmatch(token := text.strip()):
        # Not what was seen: it is a secret.
        raise Refused(reason, f"{where} does not hold a token: one line of visible ASCII characters is expected")
    return token
