"""The program `perdure`. It runs `perdure stdio` without loading the other commands: hosts start it again and again."""

from __future__ import annotations

import sys
from typing import NoReturn

import click


def main() -> NoReturn:
    if sys.argv[1:2] == ["stdio"]:
        _stdio(sys.argv[2:])
    from perdure.cli.main import main as whole

    whole()


def _stdio(arguments: list[str]) -> None:
    """Run `perdure stdio` and end the program. Returns if the arguments are wrong: the whole command reports that."""
    from perdure.cli.stdio import stdio

    try:
        with stdio.make_context("perdure stdio", arguments) as context:
            sys.exit(stdio.invoke(context))
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException:
        return
