"""Defines `perdure stdio`: reads its options and the environment, then imports and runs the bridge."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from perdure._core.text import format_duration, parse_duration
from perdure.cli.options import LEVELS, parsed

#: Seconds to wait for a server that is away; `perdure.Patience` has the same.
_PATIENCE = 300.0
_FILE: dict[str, Any] = {"type": click.Path(path_type=Path), "metavar": "FILE"}

_ABOUT = """\
Connect an MCP host that starts its servers as programs to the MCP server at URL. Messages on stdin go to the server,
the server's messages go to stdout. If the server is a Perdure server, the session is resumed when the host starts this
command again.
"""


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


_BESIDE = frozenset({"--log-level", "--log-file", "--patience"})
"""Options that users change to find a mistake: the session continues."""


def check_token_options(given: Mapping[str, Any]) -> None:
    if given["token_env"] is not None and given["token_file"] is not None:
        raise click.UsageError("--token-env and --token-file cannot be given together")


@click.command(
    params=[
        click.Argument(["url"], metavar="URL"),
        *BRIDGE_OPTIONS,
        click.Option(
            ["--explain"],
            is_flag=True,
            help="print which process counts as the host, which session would go on, and why; then end",
        ),
    ],
    help=_ABOUT,
    short_help="Connect a desktop host to an MCP server.",
)
def stdio(no_resume: bool, instance: str | None, explain: bool, **given: Any) -> int:
    """`instance` works by being an argument: those are a part of the target."""
    check_token_options(given)
    from perdure.stdio import program

    # The arguments that make a bridge another one: all but those that change nothing about the session.
    arguments, rest = [], iter(sys.argv[1:])
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in _BESIDE:
            if not equals:
                next(rest, None)
        elif word != "--explain":
            arguments.append(word)
    run = program.explain if explain else program.run
    return run(program.Options(resume=not no_resume, **given), arguments=arguments, environ=os.environ)
