"""Makes command line options and environment variables from the table in `perdure.settings`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from perdure._core.text import format_duration, format_size, parse_count, parse_duration, parse_size
from perdure.settings import Rule, Settings, rule_of

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic since click 8.4 only


class Value(_ParamType):
    """Parses a setting's text and checks the value against its rule."""

    def __init__(self, name: str, read: Callable[[str], object], rule: Rule) -> None:
        self.name = name
        self._read = read
        self._rule = rule

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if not isinstance(value, str):
            return value
        try:
            read = self._read(value.strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self._rule.fits(read):
            self.fail(f"{value!r} is out of range; allowed: {self._rule.allowed}", param, ctx)
        return read


class Name(_ParamType):
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
    """One option for each setting."""
    for field in dataclasses.fields(Settings):
        rule = rule_of(field)
        flag, shown, attributes = _option(field.name, rule, field.default)
        yield ServeOption(
            [flag, field.name],
            group=rule.group,
            shown=shown,
            default=field.default,
            help=rule.why.replace("`", ""),
            **attributes,
        )


def _option(name: str, rule: Rule, default: Any) -> tuple[str, str, dict[str, Any]]:
    """How an option is spelled, its default as users write it, and what click needs to know."""
    dashed = name.replace("_", "-")
    match rule.kind:
        case "flag":
            return f"--{dashed}/--no-{dashed}", "on" if default else "off", {}
        case "choice":
            return f"--{dashed}", default, {"type": click.Choice(rule.choices), "metavar": "|".join(rule.choices)}
        case "names":
            names = {"type": Name(), "multiple": True, "metavar": "NAME" if name == "allowed_hosts" else "ORIGIN"}
            return f"--{dashed.removesuffix('s')}", "", names
        case "duration":
            duration = {"type": Value("duration", parse_duration, rule), "metavar": "TIME"}
            return f"--{dashed}", format_duration(default), duration
        case "bytes":
            return f"--{dashed}", format_size(default), {"type": Value("size", parse_size, rule), "metavar": "SIZE"}
        case "count":
            return f"--{dashed}", f"{default:,}", {"type": Value("count", parse_count, rule), "metavar": "N"}


def settings_from(values: Mapping[str, Any]) -> Settings:
    """The settings among a command's values."""
    return Settings(**{field.name: values[field.name] for field in dataclasses.fields(Settings)})


def spelling(ctx: click.Context | None, param: click.Parameter) -> str:
    """How the user gave a parameter: the option's name, or the variable's where that was the source."""
    if ctx is not None and ctx.meta.get(f"{__name__}.{param.name}") is ParameterSource.ENVIRONMENT:
        return str(param.envvar)
    return str(param.metavar or param.name) if isinstance(param, click.Argument) else max(param.opts, key=len)
