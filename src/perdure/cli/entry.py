"""The program `perdure`. Hosts start `perdure stdio` again and again, so that one begins without loading the others."""

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
    """Ends the program, unless the arguments are wrong: the whole command says how."""
    from perdure.cli.stdio import stdio

    try:
        with stdio.make_context("perdure stdio", arguments) as context:
            sys.exit(stdio.invoke(context))
    except click.exceptions.Exit as told:
        sys.exit(told.exit_code)
    except click.ClickException:
        return
