"""Runs the command `perdure`. A command's module is imported when it is used: hosts start `perdure stdio` often."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, NoReturn

import click

from perdure._core.text import did_you_mean, printable
from perdure.cli.options import (
    INTERRUPTED,
    REFUSED,
    check_variables,
    commands_below,
    config_here,
    default_map,
    serves,
    spelling,
)
from perdure.errors import PerdureError, TargetFailed

_COMMANDS = {
    "backup": "store:backup",
    "call": "call:call",
    "check": "store:check_contents",
    "console": "console:console",
    "dev": "dev:dev",
    "install": "hosts:install",
    "list": "call:list_command",
    "serve": "serve:serve",
    "sessions": "sessions:sessions",
    "stdio": "stdio:stdio",
    "store": "store:store",
    "tail": "sessions:tail",
    "uninstall": "hosts:uninstall",
}
#: The names here of commands of other programs.
_ELSEWHERE = {
    "run": "perdure serve FILE.py serves a server, and perdure dev FILE.py loads its code again at each save",
    "start": "perdure serve FILE.py serves a server",
    "inspect": "perdure list FILE.py shows what a server offers, and perdure call FILE.py TOOL calls a tool",
    "version": "perdure --version prints it",
    "help": "perdure --help lists the commands",
}


class _Commands(Mapping[str, click.Command]):
    def __getitem__(self, name: str) -> click.Command:
        module, _, attribute = _COMMANDS[name].partition(":")
        command: click.Command = getattr(import_module(f"perdure.cli.{module}"), attribute)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class PerdureGroup(click.Group):
    """Commands that read variables refuse those that no command knows; commands that read a store use the one of the
    configuration, which is checked as a whole.

    `perdure serve` does so with its own options, which may name other files.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        commands: Any = _Commands()
        self.commands = commands

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
            check_variables(os.environ, chain([command], commands_below(self)))
            if "PERDURE_STORE" in read and (config := config_here()) is not None:
                values = default_map(config, self.commands["serve"], self)
                ctx.default_map = {name: {"store": values["store"]} if "store" in values else {}}
        return name, command, rest


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the program. A mistake of the user is reported in one line on stderr, with status 2."""
    # The command line that starts this program again, with the interpreter's options; workers are started with it.
    again = [sys.executable, *(sys.orig_argv[1:] if arguments is None else ["-m", "perdure", *arguments])]
    status, message = REFUSED, ""
    try:
        status = perdure_command.main(arguments, prog_name="perdure", standalone_mode=False, obj=again)
    except PerdureError as error:
        if isinstance(error, TargetFailed):
            from perdure.cli.serve import show_frames

            show_frames(error)
        message = str(error)
    except click.BadParameter as error:
        message = error.format_message()
        if error.param is not None:
            name, command = spelling(error.ctx, error.param), error.ctx.command_path if error.ctx else "perdure"
            is_missing = isinstance(error, click.MissingParameter)
            message = f"{name} is missing; see {command} --help" if is_missing else f"{name}: {error.message}"
    except click.ClickException as error:
        message = error.format_message()
        message = _option_hint(error) or message[:1].lower() + message[1:]
    except (KeyboardInterrupt, click.Abort):
        status = INTERRUPTED
    if message:  # one line, whatever it holds
        print(f"perdure: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)
    sys.exit(status or 0)


def _option_hint(error: click.ClickException) -> str:
    """Return a hint for an option that does not exist; "" without one."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    name, command = error.option_name, error.ctx.command.name
    known = [spelled for param in error.ctx.command.params for spelled in param.opts]
    if command == "call" and name.startswith("--") and not did_you_mean(name, known):
        argument = name[2:].replace("-", "_")
        return f"{name} is not an option of perdure call; arguments of a tool are written {argument}=VALUE"
    if command == "serve" and name == "--reload":
        return "--reload is not an option of perdure serve; perdure dev loads the code again at each save"
    return ""


@click.group(
    cls=PerdureGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="perdure", message="perdure %(version)s")
@click.pass_context
def perdure_command(ctx: click.Context) -> None:
    """MCP sessions that last: serve any MCP server so that dropped connections lose nothing."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
