"""Reads environment variables from a file, and refuses variables of Perdure that no command knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from io import StringIO
from pathlib import Path

import click

from perdure.cli.hints import did_you_mean
from perdure.errors import Misuse

PREFIX = "PERDURE_"
#: Bytes: a larger file is most likely the wrong one.
MAX_FILE = 1 << 20

#: Variables that no command has as an option: of `perdure stdio` and the runtime, and from a parent to its workers.
_OTHERS = ("PERDURE_TOKEN_DIR", "PERDURE_STATE_KEYS", "PERDURE_WORKER_FDS")
#: Variables that are not for the commands: those of this project's tests, and those that Kubernetes sets in every pod
#: if there is a service named `perdure`.
_FOREIGN = re.compile(r"PERDURE_(?:TEST_.*|SERVICE_(?:HOST|PORT.*)|PORT_[0-9]+_.*)")


def load_env_file(path: Path, environ: MutableMapping[str, str]) -> None:
    """Add the variables of a file. A variable that is set already stays as it is. Raises `Misuse`."""
    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise Misuse(f"{path} is larger than {MAX_FILE >> 20} MiB")
        text = data.decode("utf-8-sig")
        if "\0" in text:
            raise Misuse(f"{path} is not a text: it has a zero byte")
    except OSError as error:
        raise Misuse(f"cannot read the variables in {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise Misuse(f"{path} is not UTF-8 text") from None
    # What is wrong is not shown: these files hold secrets.
    for statement in parse_stream(StringIO(text)):
        if statement.error or (statement.key is not None and statement.value is None):
            begun = statement.original.string
            line = statement.original.line + begun[: len(begun) - len(begun.lstrip())].count("\n")
            raise Misuse(f"{path}:{line}: this is not NAME=value")
    for name, value in dotenv_values(stream=StringIO(text)).items():
        environ.setdefault(name, value or "")


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
