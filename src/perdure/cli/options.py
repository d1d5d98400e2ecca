"""Makes the options of commands, and reads them from where they stand beside the command line.

`perdure.settings` has the table of the settings. The order of precedence is: command line, environment (with the
variables of a file), configuration, default. The configuration is `perdure.toml`, or `[tool.perdure]` in
`pyproject.toml`. Its keys are the names of the options of `perdure serve`, with underscores or dashes, and `target`. It
becomes click's `default_map`, so that its values are checked as those of the command line are.

Settings and files are imported where they are used, because `perdure stdio` starts often and needs neither.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from perdure._core.text import did_you_mean
from perdure.errors import Misuse

if TYPE_CHECKING:
    from perdure.settings import Rule, Settings

#: The status of a command that cannot be run: bad arguments, a busy port, an unusable store. argparse and click use it.
REFUSED = 2
#: The status that a shell reports for a command that Ctrl-C ended.
INTERRUPTED = 130
LEVELS = ("debug", "info", "warning", "error")
DEFAULT_STORE = "sqlite:perdure.db"
#: The sources of an option; each overrides those after it.
SOURCES = (
    ParameterSource.COMMANDLINE,
    ParameterSource.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP,
    ParameterSource.DEFAULT,
)
#: Under these keys a click context has the name of its configuration file, if there is one, and the configuration
#: itself, if it has tables of servers.
CONFIG = f"{__name__}.config"
SERVERS = f"{__name__}:servers"

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

F = TypeVar("F", bound=Callable[..., Any])

_METAVARS = {"allowed_hosts": "NAME", "tasks": "NAME=HOW", "answer_within": "CLIENT=TIME"}


def parsed(read: Callable[[str], object], rule: Rule | None = None) -> Callable[[object], object]:
    """Return a type of options that parses the text, and checks the value against its rule, if it has one."""

    def convert(value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            found = read(value.strip())
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        if rule is not None and not rule.fits(found):
            raise click.BadParameter(f"{value!r} is out of range; allowed: {rule.allowed}")
        return found

    return convert


class Name(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """One of several names. An environment variable has all of them, separated by commas."""

    name = "name"

    def __init__(self, *, takes_spaces: bool = False) -> None:
        self._apart = "," if takes_spaces else ", "

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value or not value.isprintable() or any(mark in value for mark in self._apart):
            self.fail(f"{value!r} is not one name; repeat the option to give several", param, ctx)
        return value

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [name.strip() for name in rv.split(",") if name.strip()]


class ProgramCommand(click.Command):
    """A command that takes a program after `--`: the parameter `command`, `None` without the mark."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # click would drop the mark, and take the program's options for its own.
        at = args.index("--") if "--" in args else None
        try:
            rest = super().parse_args(ctx, args[:at])
        except click.UsageError as error:
            from perdure.gateway.config import is_launcher

            if at is not None or not args or not is_launcher(args[0]):
                raise
            written = f"{ctx.command_path} -- {args[0]} …"
            raise Misuse(f"{args[0]} is a program, so write -- before it: {written}") from error
        ctx.params["command"] = None if at is None else tuple(args[at + 1 :])
        return rest


class ServeOption(click.Option):
    """An option with a heading in the help and, unless it is for the command line alone, an environment variable."""

    def __init__(
        self,
        declarations: Sequence[str],
        *,
        group: str,
        shown: str | None = None,
        has_variable: bool = True,
        **attributes: Any,
    ) -> None:
        super().__init__(declarations, **attributes)
        self.group = group
        self.shown = str(attributes.get("default", "")) if shown is None else shown
        self.envvar = f"PERDURE_{str(self.name).upper()}" if has_variable else None

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        # Before 8.5 click keeps this only after it has read the value, and a value may be unreadable.
        ctx.meta[f"{__name__}.{self.name}"] = source
        return value, source

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        spelled = "/".join([*self.opts, *self.secondary_opts])
        spelled = spelled if self.is_flag else f"{spelled} {self.metavar}"
        return spelled, f"{self.help}  [{self.shown}]" if self.shown else f"{self.help}"


def store_option(*, is_inner: bool = False) -> Callable[[F], F]:
    """`is_inner`: of a command below `perdure sessions`, which may name the store as well."""
    more: dict[str, Any] = {"default": DEFAULT_STORE, "envvar": "PERDURE_STORE", "show_default": True}
    if is_inner:
        more = {"callback": lambda ctx, _, given: given or ctx.parent.params["store"]}
    says = "where the log is kept: sqlite:PATH or postgresql://USER@HOST/DATABASE"
    return click.option("--store", metavar="STORE", help=says, **more)


def setting_options() -> Iterator[ServeOption]:
    from perdure.settings import NUMBERS, OTHER_NAMES, Settings, rule_of

    for field in dataclasses.fields(Settings):
        rule, shown = rule_of(field), ""
        default: Any = field.default
        flag = f"--{field.name.replace('_', '-')}"
        more: dict[str, Any] = {}
        match rule.kind:
            case "flag":
                flag, shown = f"{flag}/--no-{flag[2:]}", "on" if default else "off"
            case "choice":
                shown, more = default, {"type": click.Choice(rule.choices), "metavar": "|".join(rule.choices)}
            case "names":
                flag, metavar = flag.removesuffix("s"), _METAVARS.get(field.name, "ORIGIN")
                # Names of clients have spaces: "Visual Studio Code".
                name = Name(takes_spaces=field.name == "answer_within")
                more = {"type": name, "multiple": True, "metavar": metavar}
            case kind:
                number = NUMBERS[kind]
                shown, more = number.format(default), {"type": parsed(number.parse, rule), "metavar": number.metavar}
        says = rule.why.replace("`", "")
        flags = [flag, *(f"--{name.replace('_', '-')}" for name, own in OTHER_NAMES.items() if own == field.name)]
        yield ServeOption([*flags, field.name], group=rule.group, shown=shown, default=default, help=says, **more)


def settings_from(values: Mapping[str, Any]) -> Settings:
    from perdure.settings import Settings

    return Settings(**{field.name: values[field.name] for field in dataclasses.fields(Settings)})


def spelling(ctx: click.Context | None, param: click.Parameter) -> str:
    """How the user gave a parameter: the option's name, or the variable's or the key's where that was the source."""
    source = None if ctx is None else ctx.meta.get(f"{__name__}.{param.name}")
    if source is ParameterSource.ENVIRONMENT:
        return str(param.envvar)
    if ctx is not None and source is ParameterSource.DEFAULT_MAP:
        return f"{ctx.meta[CONFIG]}: {param.name}"
    if isinstance(param, click.Argument):
        return str(param.metavar or param.name)
    return next((name for name in param.opts if name.startswith("--")), param.opts[0])


# Configuration and variables


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
        is_served = any(param.name == "servers" for param in ctx.command.params)
        if is_served and isinstance(config.values.get("servers"), dict):
            ctx.meta[SERVERS] = config
    elif value is not None:
        raise Misuse(f"{value} has no table [tool.perdure]")


def _use_env_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    if value is not None:
        load_env_file(value, os.environ)
    check_variables(os.environ, chain([ctx.command], commands_below(ctx.find_root().command)))


def config_here() -> Config | None:
    """Return the configuration of the current directory. `perdure.toml` wins over `pyproject.toml`. Raises `Misuse`."""
    paths = [path for path in (Path(OWN_FILE), Path(PROJECT_FILE)) if path.is_file()]
    return next((config for path in paths if (config := read_config(path)) is not None), None)


def read_config(path: Path) -> Config | None:
    """Return None for a `pyproject.toml` that does not mention Perdure. Raises `Misuse`."""
    import tomllib

    try:
        values: Any = tomllib.loads(read_text(path, "the configuration"))
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

    serving = [root.commands[name] for name in ("serve", "dev")] if isinstance(root, click.Group) else []
    alone = ("config", "check")  # on the command line
    known = {str(param.name) for one in (command, *serving) for param in one.params if param.name not in alone}
    mine = {param.name: param for param in command.params}
    found: dict[str, Any] = {}
    for written, value in config.values.items():
        key = written.replace("-", "_")
        key = OTHER_NAMES.get(key, key)
        if key == "servers" and isinstance(value, dict):  # tables, which `gateway.config` reads
            continue
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

    text = read_text(path, "the variables in")
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


def read_text(path: Path, what: str) -> str:
    """Return the text of a file. `what` names it in a refusal. Raises `Misuse`."""
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


def check_variables(environ: Mapping[str, str], commands: Iterable[click.Command]) -> None:
    """Raise `Misuse` for a variable of Perdure that none of the commands knows. Commands are loaded while one is
    unknown."""
    known = set(_OTHERS)
    unknown = {name for name in environ if name.startswith(PREFIX) and not _FOREIGN.fullmatch(name)} - known
    for command in commands if unknown else ():
        known |= {str(param.envvar) for param in command.params if param.envvar}
        if not (unknown := unknown - known):
            return
    for name in sorted(unknown):
        # Without their common prefix, which would make them alike.
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
