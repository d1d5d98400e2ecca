"""Reads the options of `perdure serve` from a file: `perdure.toml`, or `[tool.perdure]` in `pyproject.toml`.

The keys are the names of the options, with underscores or dashes, and `target`. A value goes the way of a value from
the command line, so both are checked alike. The command line and the environment override the file (click's
`default_map`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from perdure.cli.hints import did_you_mean
from perdure.errors import Misuse
from perdure.settings import OTHER_NAMES

OWN_FILE = "perdure.toml"
PROJECT_FILE = "pyproject.toml"
#: Bytes: a larger file is most likely the wrong one.
MAX_FILE = 1 << 20

#: Parameters that say where the settings come from, and so cannot be settings themselves.
_OUTSIDE = ("config",)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a file says, and how it is called in messages."""

    name: str
    values: Mapping[str, Any]


def find_config(directory: Path) -> Config | None:
    """The file of a directory. `perdure.toml` wins over `pyproject.toml`. Raises `Misuse`."""
    for name in (OWN_FILE, PROJECT_FILE):
        path = directory / name
        if path.is_file() and (found := _read(path, Path(name))) is not None:
            return found
    return None


def read_config(path: Path) -> Config:
    """The file that the user named. Raises `Misuse`."""
    found = _read(path, path)
    if found is None:
        raise Misuse(f"{path} has no table [tool.perdure]")
    return found


def default_map(config: Config, command: click.Command, others: Iterator[click.Command]) -> dict[str, Any]:
    """The values as click's defaults for a command. Keys of the `others` are known, and mean nothing here.

    Raises `Misuse` for a key that no command has, and for a value of the wrong type.
    """
    known = {str(param.name) for one in (command, *others) for param in one.params if param.name not in _OUTSIDE}
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
    """A value as the command line would give it."""
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise Misuse(f"{file}: {key} is {_shown(value)}; write true or false")
        return value
    if getattr(param, "multiple", False):
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise Misuse(f'{file}: {key} is {_shown(value)}; write a list of texts, such as ["a.example"]')
        return value
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise Misuse(f"{file}: {key} is {_shown(value)}; write a text or a number")


def _shown(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _read(path: Path, name: Path) -> Config | None:
    """None for a `pyproject.toml` that does not mention Perdure."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise Misuse(f"{name} is larger than {MAX_FILE >> 20} MiB")
        values: Any = tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise Misuse(f"cannot read the configuration {name}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise Misuse(f"{name} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise Misuse(f"{name} is not TOML: {error}") from None
    if path.name != PROJECT_FILE:
        return Config(name=str(name), values=values)
    tools = values.get("tool")
    if not isinstance(tools, dict) or "perdure" not in tools:
        return None
    if not isinstance(tools["perdure"], dict):
        raise Misuse(f"{name}: tool.perdure is {_shown(tools['perdure'])}; write a table, [tool.perdure]")
    return Config(name=str(name), values=tools["perdure"])
