"""Makes command line options and environment variables from the table in `perdure.settings`.

That table is imported where it is used, because `perdure stdio` does not need it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from perdure.settings import Rule, Settings

LEVELS = ("debug", "info", "warning", "error")
DEFAULT_STORE = "sqlite:perdure.db"
#: Under this key a click context has the name of its configuration file, if there is one.
CONFIG = f"{__name__}.config"
#: How much two names must have in common: `loavse` is `loaves`, and not `oven`.
ALIKE = 0.7

_METAVARS = {"allowed_hosts": "NAME", "tasks": "NAME=HOW"}


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

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value or not value.isprintable() or any(mark in value for mark in ", "):
            self.fail(f"{value!r} is not one name; repeat the option to give several", param, ctx)
        return value

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [name.strip() for name in rv.split(",") if name.strip()]


class ServeOption(click.Option):
    """An option with a heading in the help and an environment variable."""

    def __init__(self, declarations: Sequence[str], *, group: str, shown: str | None = None, **attributes: Any) -> None:
        super().__init__(declarations, **attributes)
        self.group = group
        self.shown = str(attributes.get("default", "")) if shown is None else shown
        self.envvar = f"PERDURE_{str(self.name).upper()}"

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        # Before 8.5 click keeps this only after it has read the value, and a value may be unreadable.
        ctx.meta[f"{__name__}.{self.name}"] = source
        return value, source

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        spelled = "/".join([*self.opts, *self.secondary_opts])
        spelled = spelled if self.is_flag else f"{spelled} {self.metavar}"
        return spelled, f"{self.help}  [{self.shown}]" if self.shown else f"{self.help}"


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
                more = {"type": Name(), "multiple": True, "metavar": metavar}
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


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint at names that look alike, each with the prefix; "" if there are none."""
    close = difflib.get_close_matches(name, list(known), cutoff=ALIKE)
    return f"; did you mean {' or '.join(repr(prefix + one) for one in close)}?" if close else ""
