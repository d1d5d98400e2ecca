"""Reads options from where they stand beside the command line: a configuration, environment variables, a file of them.

The order of precedence is: command line, environment (with the variables of the file), configuration, default. The
configuration is `perdure.toml`, or `[tool.perdure]` in `pyproject.toml`. Its keys are the names of the options of
`perdure serve`, with underscores or dashes, and `target`. It becomes click's `default_map`, so that its values are
checked as those of the command line are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from perdure.cli.options import CONFIG, ServeOption, did_you_mean
from perdure.errors import Misuse

# `perdure stdio` reads variables only, and starts often: what the files need is imported where it is used.

OWN_FILE = "perdure.toml"
PROJECT_FILE = "pyproject.toml"
PREFIX = "PERDURE_"
#: Bytes of a configuration or a file of variables: a larger file is most likely the wrong one.
MAX_FILE = 1 << 20

#: Variables that no command has as an option: of `perdure stdio` and the runtime, and from a parent to its workers.
_OTHERS = ("PERDURE_TOKEN_DIR", "PERDURE_STATE_KEYS", "PERDURE_WORKER_FDS")
#: Variables that are not for the commands: those of this project's tests, and those that Kubernetes sets in every pod
#: if there is a service named `perdure`.
_FOREIGN = re.compile(r"PERDURE_(?:TEST_.*|SERVICE_(?:HOST|PORT.*)|PORT_[0-9]+_.*)")
_CONFIG_HELP = "configuration to read, in place of perdure.toml or [tool.perdure] of pyproject.toml in this directory"
_ENV_FILE_HELP = "file with lines of NAME=value: variables for TARGET and for these options, unless they are set"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The values of a configuration file, and its name in messages."""

    name: str
    values: Mapping[str, Any]


def source_options(group: str) -> Iterator[ServeOption]:
    """`--config` and `--env-file`, which are read before the others. The configuration may name the other file."""
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


def _use_config(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    config = config_here() if value is None else read_config(value)
    if config is not None:
        ctx.default_map = {**(ctx.default_map or {}), **default_map(config, ctx.command, ctx.find_root().command)}
        ctx.meta[CONFIG] = config.name


def _use_env_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    if value is not None:
        load_env_file(value, os.environ)
    check_variables(os.environ, commands_below(ctx.find_root().command))


def config_here() -> Config | None:
    """Return the configuration of the current directory. `perdure.toml` wins over `pyproject.toml`. Raises `Misuse`."""
    for path in (Path(OWN_FILE), Path(PROJECT_FILE)):
        if path.is_file() and (found := _read_config(path)) is not None:
            return found
    return None


def read_config(path: Path) -> Config:
    """Read the file that the user named. Raises `Misuse`."""
    if (found := _read_config(path)) is None:
        raise Misuse(f"{path} has no table [tool.perdure]")
    return found


def _read_config(path: Path) -> Config | None:
    """Return None for a `pyproject.toml` that does not mention Perdure."""
    import tomllib

    try:
        values: Any = tomllib.loads(_read(path, "the configuration"))
    except tomllib.TOMLDecodeError as error:
        raise Misuse(f"{path} is not TOML: {error}") from None
    if path.name == PROJECT_FILE:
        tools = values.get("tool")
        if not isinstance(tools, dict) or "perdure" not in tools:
            return None
        values = tools["perdure"]
        if not isinstance(values, dict):
            raise Misuse(f"{path}: tool.perdure is {_shown(values)}; write a table, [tool.perdure]")
    return Config(name=str(path), values=values)


def default_map(config: Config, command: click.Command, root: click.Command) -> dict[str, Any]:
    """Return the values as click's defaults for a command. Keys of other commands that serve are known, and ignored.

    Raises `Misuse` for a key that no command has, and for a value of the wrong type.
    """
    from perdure.settings import OTHER_NAMES

    serving = (one for one in commands_below(root) if serves(one))
    known = {str(param.name) for one in (command, *serving) for param in one.params if param.name != "config"}
    mine = {param.name: param for param in command.params}
    found: dict[str, Any] = {}
    for written, value in config.values.items():
        key = written.replace("-", "_")
        key = OTHER_NAMES.get(key, key)
        if isinstance(value, dict):
            place = "in [tool.perdure] itself" if Path(config.name).name == PROJECT_FILE else "above all tables"
            raise Misuse(f"{config.name}: {written} is a table; write the settings {place}")
        if key not in known:
            hint = did_you_mean(key, sorted(known)) or "; perdure serve --help shows all"
            raise Misuse(f"{config.name}: there is no setting {written!r}{hint}")
        if key in found:
            raise Misuse(f"{config.name}: {written!r} is given twice, with a dash and with an underscore")
        found[key] = _value(config.name, written, value, mine[key]) if key in mine else None
    return {key: value for key, value in found.items() if key in mine}


def _value(file: str, key: str, value: Any, param: click.Parameter) -> Any:
    """Return a value as the command line would have it."""
    if getattr(param, "is_flag", False):
        fits, wanted = isinstance(value, bool), "true or false"
    elif getattr(param, "multiple", False):
        fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
        wanted = 'a list of texts, such as ["a.example"]'
    else:
        fits, wanted = isinstance(value, str | int | float) and not isinstance(value, bool), "a text or a number"
        value = str(value) if fits else value
    if not fits:
        raise Misuse(f"{file}: {key} is {_shown(value)}; write {wanted}")
    return value


def _shown(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def load_env_file(path: Path, environ: MutableMapping[str, str]) -> None:
    """Add the variables of a file. A variable that is set already stays as it is. Raises `Misuse`."""
    from io import StringIO

    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    text = _read(path, "the variables in")
    if "\0" in text:
        raise Misuse(f"{path} is not a text: it has a zero byte")
    # What is wrong is not shown: these files hold secrets.
    for statement in parse_stream(StringIO(text)):
        if statement.error or (statement.key is not None and statement.value is None):
            begun = statement.original.string
            line = statement.original.line + begun[: len(begun) - len(begun.lstrip())].count("\n")
            raise Misuse(f"{path}:{line}: this is not NAME=value")
    for name, value in dotenv_values(stream=StringIO(text)).items():
        environ.setdefault(name, value or "")


def _read(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise Misuse(f"{path} is larger than {MAX_FILE >> 20} MiB")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise Misuse(f"cannot read {what} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise Misuse(f"{path} is not UTF-8 text") from None


def check_variables(environ: Mapping[str, str], commands: Iterator[click.Command]) -> None:
    """Raise `Misuse` for a variable of Perdure that none of the commands knows."""
    known = {*_OTHERS, *(str(param.envvar) for command in commands for param in command.params if param.envvar)}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and not _FOREIGN.fullmatch(name):
            # Without what they all have in common, which would make them look alike.
            close = did_you_mean(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in sorted(known)], PREFIX)
            hint = close or "; unset it: names that begin with PERDURE_ are for the command"
            raise Misuse(f"there is no variable {name}{hint}")


def commands_below(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for one in command.commands.values():
            yield from commands_below(one)


def serves(command: click.Command) -> bool:
    return any(isinstance(param, ServeOption) for param in command.params)
