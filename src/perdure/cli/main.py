"""Runs the command `perdure`, and collects its commands."""

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from perdure._core.text import printable
from perdure.cli.call import INTERRUPTED, call, list_command
from perdure.cli.console import console
from perdure.cli.dev import make_dev
from perdure.cli.hints import option_hint
from perdure.cli.hosts import install, uninstall
from perdure.cli.options import spelling
from perdure.cli.serve import REFUSED, serve, show_frames
from perdure.cli.sessions import sessions, tail
from perdure.cli.sources import PerdureGroup
from perdure.cli.stdio import stdio
from perdure.cli.store import store as store_commands
from perdure.cli.upkeep import backup, check
from perdure.errors import PerdureError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the program. A mistake of the user is reported in one line on stderr, with status 2."""
    # The command line that starts this program again, with the interpreter's options; workers are started with it.
    again = [sys.executable, *(sys.orig_argv[1:] if arguments is None else ["-m", "perdure", *arguments])]
    try:
        status = perdure_command.main(arguments, prog_name="perdure", standalone_mode=False, obj=again)
    except PerdureError as error:
        show_frames(error)
        _complain(str(error))
        status = REFUSED
    except click.ClickException as error:
        message = error.format_message()
        message = message[:1].lower() + message[1:]
        if isinstance(error, click.BadParameter) and error.param is not None:
            name, command = spelling(error.ctx, error.param), error.ctx.command_path if error.ctx else "perdure"
            is_missing = isinstance(error, click.MissingParameter)
            message = f"{name} is missing; see {command} --help" if is_missing else f"{name}: {error.message}"
        _complain(option_hint(error) or message)
        status = REFUSED
    except (KeyboardInterrupt, click.Abort):
        status = INTERRUPTED
    sys.exit(status or 0)


@click.group(
    cls=PerdureGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="perdure", message="perdure %(version)s")
@click.pass_context
def perdure_command(ctx: click.Context) -> None:
    """MCP sessions that last: serve any Python MCP server so that dropped connections lose nothing."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (
    serve,
    make_dev(serve),
    sessions,
    tail,
    store_commands,
    backup,
    check,
    console,
    stdio,
    install,
    uninstall,
    call,
    list_command,
):
    perdure_command.add_command(_command)


def _complain(message: str) -> None:
    """Print one line, whatever the message holds."""
    print(f"perdure: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
