"""Options that say where other options come from: `--config` and `--env-file`, which are read before the others.

The order of precedence is: command line, environment (with the variables of the file), configuration, default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from perdure.cli.config_file import Config, default_map, find_config, read_config
from perdure.cli.hints import command_hint
from perdure.cli.options import CONFIG, ServeOption
from perdure.cli.variables import check_variables, commands_below, load_env_file

_CONFIG_HELP = "configuration to read, in place of perdure.toml or [tool.perdure] of pyproject.toml in this directory"
_ENV_FILE_HELP = "file with lines of NAME=value: variables for TARGET and for these options, unless they are set"


def source_options(group: str) -> Iterator[ServeOption]:
    """The configuration first: it may name the file with variables."""
    for name, says, use in (("--config", _CONFIG_HELP, _use_config), ("--env-file", _ENV_FILE_HELP, _use_env_file)):
        yield ServeOption(
            [name],
            group=group,
            metavar="FILE",
            help=says,
            type=click.Path(path_type=Path),
            is_eager=True,
            expose_value=False,
            callback=use,
        )


def config_here() -> Config | None:
    """The configuration of the current directory. Raises `Misuse`."""
    try:
        here = Path.cwd()
    except OSError:  # it was removed
        return None
    return find_config(here)


class PerdureGroup(click.Group):
    """Commands that read variables refuse those that no command knows; commands that read a store use the one of the
    configuration, which is checked as a whole.

    `perdure serve` does so with its own options, which may name other files.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if hint := command_hint(args[0]):
            ctx.fail(hint)
        name, command, rest = super().resolve_command(ctx, args)
        if command is None or name is None or any(word in ("-h", "--help") for word in rest):
            return name, command, rest
        read = {param.envvar for one in commands_below(command) for param in one.params if param.envvar}
        if read and not _serves(command):
            check_variables(os.environ, commands_below(self))
            if "PERDURE_STORE" in read and (config := config_here()) is not None:
                serving = [one for one in commands_below(self) if _serves(one)]
                values = default_map(config, serving[0], iter(serving))
                ctx.default_map = {name: {"store": values["store"]} if "store" in values else {}}
        return name, command, rest


def _use_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    config = config_here() if value is None else read_config(value)
    if config is None:
        return
    others = (one for one in commands_below(ctx.find_root().command) if _serves(one))
    ctx.default_map = {**(ctx.default_map or {}), **default_map(config, ctx.command, others)}
    ctx.meta[CONFIG] = config.name


def _serves(command: click.Command) -> bool:
    return any(isinstance(param, ServeOption) for param in command.params)


def _use_env_file(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        load_env_file(value, os.environ)
    check_variables(os.environ, commands_below(ctx.find_root().command))
