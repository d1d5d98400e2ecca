"""Defines `perdure serve`: its options, where it listens, and how it runs, alone or as the parent of workers."""

import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perdure
from perdure._core.loopback import is_loopback
from perdure._core.text import parse_count, printable, see
from perdure._files.locks import HAS_FLOCK, NO_FLOCK
from perdure.cli.options import (
    DEFAULT_STORE,
    LEVELS,
    REFUSED,
    SOURCES,
    ProgramCommand,
    ServeOption,
    parsed,
    setting_options,
    settings_from,
    source_options,
)
from perdure.cli.upstreams import check_servers, find_servers, make_router, upstream_options
from perdure.errors import Misuse, PerdureError, StoreUnavailable, TargetFailed
from perdure.gateway.config import Servers, check_serving
from perdure.http import BESIDE
from perdure.http.issuer_addresses import parse_issuer, parse_key_source, parse_resource, parse_scopes
from perdure.serve.forwarded import TrustedProxies
from perdure.serve.log_output import FORMATS, name_node, start_log
from perdure.serve.worker_pool import Fault, Watch, WorkerChannel, run_workers
from perdure.settings import SECURITY, Rule
from perdure.telemetry.log_records import MAX_LINE, MAX_LINES, log_event

if TYPE_CHECKING:
    from perdure.http.router import Router

# The serving side is imported where it is used: the SDK takes most of a second, and not every command serves.

_WHERE = "Where to serve"
#: Options that say more about `--issuer`.
_OF_ISSUER = ("audience", "public_url", "scopes", "jwks")
_PATH = re.compile(r"/[A-Za-z0-9._~/-]*")
_WORKERS = Rule(kind="count", group=_WHERE, why="processes that serve, all on the same port and store", low=1, high=64)
_PORT = Rule(kind="count", group=_WHERE, why="port to listen on; 0 picks a free one", low=0, high=65_535)

_ABOUT = """\
Serve TARGET, a Python MCP server, over Streamable HTTP. Its sessions outlive dropped connections and restarts.

TARGET is path/file.py or package.module; its object server, mcp or app is served, or the only server that it has.
path/file.py:name and package.module:name name another. The object is an MCPServer or a low-level Server (package mcp),
or a FastMCP server.

A server in another language is served as a program (perdure serve -- COMMAND), by its address (TARGET is a URL), or
with others (--servers FILE, or tables [servers.NAME] in perdure.toml).
"""
_VALUES = """\
TIME is a number of seconds, or has a suffix: 500ms, 30s, 5m, 1h, 7d. SIZE is a number of bytes, or has a suffix: 64KiB,
4MiB.

Each option, but those for one program or URL, has an environment variable: PERDURE_EVENT_TTL=1h is --event-ttl 1h,
PERDURE_JSON_RESPONSE=true is --json-response, and PERDURE_ALLOWED_HOSTS, PERDURE_ALLOWED_ORIGINS and
PERDURE_CORS_ORIGINS take several names, separated by commas. perdure.toml, or [tool.perdure] in pyproject.toml, may
have each option under its name: event_ttl = "1h", json_response = true, allowed_hosts = ["a.example"], and target =
"bakery.py:server". The command line overrides the environment, which overrides the file.
"""


class ServeCommand(ProgramCommand):
    """A command whose help shows its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        chapters: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, ServeOption):
                chapters.setdefault(option.group, []).append(option.get_help_record(ctx))
        for chapter, records in chapters.items():
            with formatter.section(chapter):
                formatter.write_dl(records, col_max=34)


def run_serve(
    target: str | None,
    store: str,
    path: str,
    tokens: Path | None,
    log_level: str,
    upstreams: Servers | None = None,
    watch: Watch | None = None,
    on_served: Callable[[], None] = lambda: None,
    **given: Any,
) -> int:
    # Before the target is imported: the SDK would set up its own logging, with a record for each request.
    has_colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    is_shared = given["workers"] > 1 or watch is not None
    log = start_log(log_level, given["log_format"], target=target or "", colors=has_colors, shared=is_shared)
    auth: Any = None
    _check_together(tokens, given)
    if tokens is not None:
        from perdure.serve.token_file import FileTokens

        auth = FileTokens(tokens)
    elif given["issuer"] is not None:
        from perdure.http.issuer_tokens import IssuerTokens

        auth = IssuerTokens(**{name: given[name] for name in ("issuer", *_OF_ISSUER)})
    settings = settings_from(given)
    channel = WorkerChannel.from_environment(os.environ)
    if upstreams is not None:
        for warning in upstreams.warnings if channel is None else ():  # the parent has logged it once for all
            log_event(logging.WARNING, "serve.unknown_key", warning)
        if given["check"]:
            return check_servers(upstreams)
        check_serving(
            upstreams.upstreams,
            platform=sys.platform,
            has_tokens=auth is not None,
            has_issuer=given["issuer"] is not None,
        )

    def on_failure(reason: str) -> None:
        log_event(logging.ERROR, "serve.failed", f"the server ends: {reason}")

    def serve(listener: socket.socket, on_ready: Callable[[], None], channel: WorkerChannel | None = None) -> int:
        from perdure.serve.uvicorn_server import serve as run

        app: perdure.App | Router
        if upstreams is not None:
            app = make_router(upstreams, store=store, settings=settings, auth=auth, path=path)
        else:
            from perdure.serve.target import load_target, owner_of

            assert target is not None
            with quiet_fastmcp():
                served = load_target(target)
            app = perdure.App(served, store=store, settings=settings, auth=auth, path=path, owner=owner_of(target))
        name_node(log, lambda: app.node)
        how = {"channel": channel, "access_log": given["access_log"], "proxies": given["forwarded_allow_ips"]}
        programs = [one.program for one in (upstreams.upstreams if upstreams else ()) if one.program is not None]
        how["processes"] = sum(program.max_processes for program in programs)
        how["tokens"] = auth if tokens is not None else None
        return run(app, listener=listener, settings=settings, on_ready=on_ready, on_failure=on_failure, **how)

    if channel is not None:
        try:
            return serve(channel.listener, channel.send_ready, channel)
        except PerdureError as error:  # the parent reports once for all workers why they do not serve
            show_frames(error)
            fault = Fault.CODE if isinstance(error, TargetFailed) else Fault.TARGET
            channel.send_failed(str(error), Fault.STORE if isinstance(error, StoreUnavailable) else fault)
            return REFUSED
    several = "perdure dev" if watch else f"--workers {given['workers']}" if given["workers"] > 1 else None
    if several and store.startswith("memory:"):
        raise Misuse(
            f"{several} needs a store that processes share, and {store} is not one; use sqlite:PATH;"
            f" {see('errors', 'several-processes-need-a-shared-store')}"
        )
    if several and not HAS_FLOCK:
        raise Misuse(f"{several} cannot work here: {NO_FLOCK}; serve with one process")
    with _listening(given, is_open=auth is None) as listener:

        def on_ready() -> None:
            host, found = given["host"], listener.getsockname()
            names = [] if upstreams is None else [f"/{upstream.name}" for upstream in upstreams.upstreams]
            for name in names if len(names) > 1 else [""]:
                place = path.rstrip("/") + name if name else path
                shown = f"http://{f'[{host}]' if ':' in host else host}:{found[1]}{place}"
                if isinstance(found, str):
                    shown = f"unix:{found}, path {place}"
                print(f"perdure: serving on {shown}", flush=True)
            on_served()

        if not several:
            return serve(listener, on_ready)
        return run_workers(
            click.get_current_context().find_root().obj,
            environment=os.environ,
            listener=listener,
            count=given["workers"],
            longest_drain=settings.longest_drain,
            on_ready=on_ready,
            watch=watch,
        )


def _check_together(tokens: Path | None, given: Mapping[str, Any]) -> None:
    """Raise `Misuse` unless there is one way to authenticate callers, and it is complete."""
    if given["issuer"] is None:
        for name in _OF_ISSUER:
            if given[name]:
                raise Misuse(f"--{name.replace('_', '-')} needs --issuer: it says more about the tokens of an issuer")
    elif tokens is not None:
        raise Misuse("--issuer and --tokens cannot be given together: tokens come from one of them")
    elif given["audience"] is None:
        raise Misuse("--issuer needs --audience: a token that is for another server must not be accepted here")


def _listening(given: Mapping[str, Any], *, is_open: bool) -> AbstractContextManager[socket.socket]:
    """Listen on a Unix socket or on a port, whichever its source puts above the other. Warn if any caller
    on other machines may come."""
    from perdure.serve.listener import listen, listening_at

    ctx, host = click.get_current_context(), given["host"]
    rank = {name: SOURCES.index(ctx.get_parameter_source(name)) for name in ("uds", "host", "port")}
    if given["uds"] is not None and rank["uds"] <= min(rank["host"], rank["port"]):
        for name in ("host", "port"):
            if rank[name] == rank["uds"]:
                raise Misuse(f"--uds and --{name} cannot be given together: a Unix socket has no address and no port")
        return listening_at(given["uds"], mode=given["uds_mode"])
    listener = listen(host, given["port"])
    if is_open and not is_loopback(listener.getsockname()[0]):
        sentence = f"other machines can reach {host}, and everyone may use it: set --tokens or --issuer"
        log_event(logging.WARNING, "serve.open", sentence, host=host)
    return listener


@contextlib.contextmanager
def quiet_fastmcp() -> Iterator[None]:
    """Let FastMCP write no log of its own beside ours, if it is imported now and the user has not asked for that log.
    Programs that the target starts later are left alone."""
    if "FASTMCP_LOG_ENABLED" in os.environ:
        yield
        return
    os.environ["FASTMCP_LOG_ENABLED"] = "false"
    try:
        yield
    finally:
        del os.environ["FASTMCP_LOG_ENABLED"]


def _path(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not _PATH.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a path such as /mcp", ctx, param)
    if value in BESIDE:
        raise click.BadParameter(f"{value!r} is where {BESIDE[value]}", ctx, param)
    return value


def _option(name: str, metavar: str, says: str, *, group: str = _WHERE, **attributes: Any) -> ServeOption:
    return ServeOption([name], group=group, metavar=metavar, help=says, **attributes)


_STORE_HELP = (
    "where the log is kept: memory:, sqlite:PATH, sqlite:PATH?sync=full to survive power cuts as well, or"
    " postgresql://USER@HOST/DATABASE, which machines share"
)
_UDS_HELP = "Unix socket to listen on, in place of --host and --port"
_UDS_MODES = ("600", "660", "666")
_UDS_MODE_HELP = "who may connect to it: its owner (600), its group as well (660), every user (666)"
_PROXIES_HELP = (
    "proxies whose X-Forwarded-For or Forwarded header names the client: addresses and networks, separated by commas;"
    " * believes everyone"
)
_TOKENS_HELP = (
    "serve only callers that send one of the bearer tokens in FILE; its lines are principal:token; it is read again at"
    " SIGHUP"
)
_ISSUER_HELP = "serve only callers that send an access token (a JWT) of this authorization server"
_AUDIENCE_HELP = "what such a token must be for (aud): the address of this server, as the authorization server knows it"
_PUBLIC_URL_HELP = "address by which clients know this server, if it is not the audience"
_SCOPES_HELP = "scopes that such a token must have, separated by commas"
_JWKS_HELP = "where the keys of the authorization server are, if it does not publish that, or has them at another host"
_LEVEL_HELP = f"what is logged on stderr: {', '.join(LEVELS)}"
_FORMAT_HELP = "how: lines of text, or one JSON object in each line"
_ACCESS_HELP = "log each request on stderr as well, when its response has ended"


def show_frames(error: PerdureError) -> None:
    """Print the traceback of the user's own code, above the line with the reason."""
    if isinstance(error, TargetFailed):
        lines = error.traceback.rstrip().split("\n")
        print(*(printable(line, MAX_LINE) for line in lines[:MAX_LINES]), sep="\n", file=sys.stderr, flush=True)


serve = ServeCommand(
    "serve",
    callback=lambda **given: run_serve(**given, upstreams=find_servers(click.get_current_context())),
    params=[
        click.Argument(["target"], metavar="TARGET", envvar="PERDURE_TARGET", required=False),
        *source_options(_WHERE),
        _option("--store", "STORE", _STORE_HELP, default=DEFAULT_STORE),
        _option("--host", "HOST", "address to listen on", default="127.0.0.1"),
        _option("--port", "PORT", _PORT.why, default=8000, type=parsed(parse_count, _PORT)),
        _option("--uds", "PATH", _UDS_HELP, type=click.Path(path_type=Path)),
        _option("--uds-mode", "MODE", _UDS_MODE_HELP, default="600", type=click.Choice(_UDS_MODES)),
        _option("--path", "PATH", "path of the endpoint", default="/mcp", callback=_path),
        _option("--workers", "N", _WORKERS.why, default=1, type=parsed(parse_count, _WORKERS)),
        _option("--log-level", "LEVEL", _LEVEL_HELP, default="warning", type=click.Choice(LEVELS)),
        _option("--log-format", "|".join(FORMATS), _FORMAT_HELP, default="text", type=click.Choice(FORMATS)),
        _option("--access-log/--no-access-log", "", _ACCESS_HELP, default=False, shown="off"),
        *setting_options(),
        _option(
            "--forwarded-allow-ips",
            "IPS",
            _PROXIES_HELP,
            group=SECURITY,
            type=parsed(lambda text: TrustedProxies(map(str.strip, text.split(",")))),
        ),
        _option("--tokens", "FILE", _TOKENS_HELP, group=SECURITY, type=click.Path(path_type=Path)),
        _option("--issuer", "URL", _ISSUER_HELP, group=SECURITY, type=parsed(parse_issuer)),
        _option("--audience", "URL", _AUDIENCE_HELP, group=SECURITY, type=parsed(parse_resource)),
        _option("--public-url", "URL", _PUBLIC_URL_HELP, group=SECURITY, type=parsed(parse_resource)),
        _option("--scopes", "NAMES", _SCOPES_HELP, group=SECURITY, type=parsed(parse_scopes)),
        _option("--jwks", "URL", _JWKS_HELP, group=SECURITY, type=parsed(parse_key_source)),
        *upstream_options(),
    ],
    help=_ABOUT,
    epilog=_VALUES,
    short_help="Serve an MCP server.",
)
