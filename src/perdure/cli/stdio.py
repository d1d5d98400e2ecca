"""Defines `perdure stdio`: reads its options and the environment, then imports and runs the bridge, to a server
elsewhere or to a program that it starts."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from perdure._core.text import format_duration, parse_duration
from perdure.cli.options import LEVELS, ProgramCommand, parsed
from perdure.errors import Misuse

#: Seconds to wait for a server that is away; `perdure.Patience` has the same.
_PATIENCE = 300.0
_FILE: dict[str, Any] = {"type": click.Path(path_type=Path), "metavar": "FILE"}

_ABOUT = """\
Connect an MCP host that starts its servers as programs to the MCP server at URL. Messages on stdin go to the server,
the server's messages go to stdout. If the server is a Perdure server, the session is resumed when the host starts this
command again.

With a COMMAND after -- in place of URL, start that MCP server, in any language, and start it again when it ends. The
host's session goes on.
"""


class BridgeCommand(ProgramCommand):
    """Shows in its usage that it takes a program."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND [ARG]...]"]


BRIDGE_OPTIONS = (
    click.Option(["--token-env"], metavar="NAME", help="environment variable that holds the bearer token"),
    click.Option(
        ["--token-file"], **_FILE, help="file that holds the bearer token; read again when the server refuses it"
    ),
    click.Option(
        ["--token-dir"],
        type=click.Path(path_type=Path),
        envvar="PERDURE_TOKEN_DIR",
        metavar="DIR",
        help="directory for resume tokens  [env: PERDURE_TOKEN_DIR]",
    ),
    click.Option(["--no-resume"], is_flag=True, help="begin a new session at each start, and keep nothing on disk"),
    click.Option(
        ["--instance"],
        metavar="NAME",
        help="a name for this bridge, where the host starts several with the same address and options",
    ),
    click.Option(
        ["--patience"],
        type=parsed(parse_duration),
        default=_PATIENCE,
        metavar="TIME",
        help=f"how long to wait for a server that is away  [default: {format_duration(_PATIENCE)}]",
    ),
    click.Option(
        ["--log-level"],
        type=click.Choice(LEVELS),
        default="info",
        metavar="LEVEL",
        help=f"least level that is logged on stderr: {', '.join(LEVELS)}  [default: info]",
    ),
    click.Option(["--log-file"], **_FILE, help="also append the log to FILE"),
)
"""The options of the bridge. `perdure install` has them too, and writes them into a host's configuration.
`perdure call` and `perdure list` have some of them."""

PROGRAM_OPTIONS = (
    click.Option(
        ["--watch"],
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="PATH",
        help="file or folder of the COMMAND's code: start COMMAND again when it changes; may be given several times",
    ),
    click.Option(["--cwd"], type=click.Path(path_type=Path), metavar="DIR", help="folder in which COMMAND is run"),
)
"""The options of the bridge that are for a program."""


_BESIDE = frozenset({"--log-level", "--log-file", "--patience"})
"""Options that users change to find a mistake: the session continues."""


def check_token_options(given: Mapping[str, Any]) -> None:
    if given["token_env"] is not None and given["token_file"] is not None:
        raise click.UsageError("--token-env and --token-file cannot be given together")


def check_source(given: Mapping[str, Any], url: str | None, command: Sequence[str] | None) -> None:
    """Raise `Misuse` unless the server is a URL or a program, and the options fit it and exist."""
    if command is None:
        for name in ("watch", "cwd"):
            if given[name]:
                raise Misuse(f"--{name} is for a command after --; a server at a URL is not started here")
        return
    if url is not None:
        raise Misuse("a URL and a command after -- cannot be given together: keep one of them")
    for name in ("token_env", "token_file"):
        if given[name] is not None:
            raise Misuse(f"--{name.replace('_', '-')} is for a URL; a command has the variables of this process")
    if not command or not command[0]:
        raise Misuse("there is no command after --; write what starts the server, as in -- python server.py")
    if given["cwd"] is not None and not given["cwd"].is_dir():
        raise Misuse(f"--cwd: {str(given['cwd'])!r} is not a folder")
    for path in given["watch"]:
        if not path.exists():
            raise Misuse(f"--watch: there is no file or folder {str(path)!r}")
    if given["watch"]:
        from perdure.serve.code_watch import need_watchfiles

        need_watchfiles("--watch")


@click.command(
    cls=BridgeCommand,
    params=[
        click.Argument(["url"], metavar="[URL]", required=False),
        *BRIDGE_OPTIONS,
        *PROGRAM_OPTIONS,
        click.Option(
            ["--explain"],
            is_flag=True,
            help="print which process counts as the host, which session would go on, and why; then end",
        ),
    ],
    help=_ABOUT,
    short_help="Connect a desktop host to an MCP server.",
)
@click.pass_context
def stdio(
    ctx: click.Context,
    /,
    url: str | None,
    command: Sequence[str] | None,
    watch: Sequence[Path],
    cwd: Path | None,
    no_resume: bool,
    instance: str | None,
    explain: bool,
    **given: Any,
) -> int:
    """`instance` works by being an argument: those are a part of the target."""
    check_token_options(given)
    check_source({**given, "watch": watch, "cwd": cwd}, url, command)
    if command is None and url is None:
        raise Misuse("URL is missing; see perdure stdio --help")
    from perdure.stdio import program

    connect = None
    if command is not None:
        from perdure.cli import child_server

        is_given = ctx.get_parameter_source("patience") is ParameterSource.COMMANDLINE
        patience = given["patience"] if is_given else None
        server = child_server.child_server(command, watch=watch, cwd=cwd, patience=patience)
        connect, url = server.connect, child_server.URL
        given["handshake_seconds"] = server.handshake_seconds
    # The arguments that make a bridge another one: all but those that change nothing about the session.
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    arguments, rest = [], iter(words[:at])
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in _BESIDE:
            if not equals:
                next(rest, None)
        elif word != "--explain":
            arguments.append(word)
    arguments += words[at:]
    options = program.Options(url=url or "", command=command or (), resume=not no_resume, **given)
    if explain:
        return program.explain(options, arguments=arguments, environ=os.environ)
    return program.run(options, arguments=arguments, environ=os.environ, connect=connect)
