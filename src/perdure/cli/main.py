"""Runs the command `perdure`, and collects its commands."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from perdure._core.text import printable
from perdure.cli.call import INTERRUPTED, call, list_command
from perdure.cli.console import console
from perdure.cli.dev import make_dev
from perdure.cli.hosts import install, uninstall
from perdure.cli.options import did_you_mean, spelling
from perdure.cli.serve import REFUSED, serve, show_frames
from perdure.cli.sessions import sessions, tail
from perdure.cli.sources import check_variables, commands_below, config_here, default_map, serves
from perdure.cli.stdio import stdio
from perdure.cli.store import backup, check_contents
from perdure.cli.store import store as store_commands
from perdure.errors import PerdureError

#: What commands of other programs are called here.
_ELSEWHERE = {
    "run": "perdure serve FILE.py serves a server, and perdure dev FILE.py loads its code again at each save",
    "start": "perdure serve FILE.py serves a server",
    "inspect": "perdure list FILE.py shows what a server offers, and perdure call FILE.py TOOL calls a tool",
    "version": "perdure --version prints it",
    "help": "perdure --help lists the commands",
}


class PerdureGroup(click.Group):
    """Commands that read variables refuse those that no command knows; commands that read a store use the one of the
    configuration, which is checked as a whole.

    `perdure serve` does so with its own options, which may name other files.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _ELSEWHERE:
            ctx.fail(f"there is no command {args[0]!r}; {_ELSEWHERE[args[0]]}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is None or name is None or any(word in ("-h", "--help") for word in rest):
            return name, command, rest
        read = {param.envvar for one in commands_below(command) for param in one.params if param.envvar}
        if read and not serves(command):
            check_variables(os.environ, commands_below(self))
            if "PERDURE_STORE" in read and (config := config_here()) is not None:
                values = default_map(config, serve, self)
                ctx.default_map = {name: {"store": values["store"]} if "store" in values else {}}
        return name, command, rest


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
        _complain(_option_hint(error) or message)
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
    check_contents,
    console,
    stdio,
    install,
    uninstall,
    call,
    list_command,
):
    perdure_command.add_command(_command)


def _option_hint(error: click.ClickException) -> str:
    """Return what a person may have meant by an option that does not exist; "" if it is not known."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    name, command = error.option_name, error.ctx.command.name
    known = [spelled for param in error.ctx.command.params for spelled in param.opts]
    if command == "call" and name.startswith("--") and not did_you_mean(name, known):
        return (
            f"{name} is no option of perdure call; arguments of a tool are written {name[2:].replace('-', '_')}=VALUE"
        )
    if command == "serve" and name == "--reload":
        return "--reload is no option of perdure serve; perdure dev loads the code again at each save"
    return ""


def _complain(message: str) -> None:
    """Print one line, whatever the message holds."""
    print(f"perdure: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
