"""The program `perdure`. It runs `perdure stdio` without loading the other commands: hosts start it again and again."""

import contextlib
import os
import sys
from typing import NoReturn

import click


def main() -> NoReturn:
    if sys.argv[1:2] == ["stdio"]:
        from perdure.cli.sources import check_variables
        from perdure.cli.stdio import stdio
        from perdure.errors import Misuse

        # If the arguments are wrong, the whole command reports that. It also knows the variables of the other commands.
        with contextlib.suppress(click.ClickException, Misuse):
            check_variables(os.environ, iter([stdio]))
            try:
                with stdio.make_context("perdure stdio", sys.argv[2:]) as context:
                    sys.exit(stdio.invoke(context))
            except click.exceptions.Exit as done:
                sys.exit(done.exit_code)
    from perdure.cli.main import main as whole

    whole()
