"""Hints at names that the user may have meant."""

import difflib
from collections.abc import Iterable

import click

#: How much two names must have in common: `loavse` is `loaves`, and not `oven`.
ALIKE = 0.7


#: What commands of other programs are called here.
_COMMANDS = {
    "run": "perdure serve FILE.py serves a server, and perdure dev FILE.py loads its code again at each save",
    "start": "perdure serve FILE.py serves a server",
    "inspect": "perdure list FILE.py shows what a server offers, and perdure call FILE.py TOOL calls a tool",
    "version": "perdure --version prints it",
    "help": "perdure --help lists the commands",
}


def command_hint(name: str) -> str:
    """What a person may have meant by a command that there is not; "" if it is not known."""
    return f"there is no command {name!r}; {_COMMANDS[name]}" if name in _COMMANDS else ""


def option_hint(error: click.ClickException) -> str:
    """What a person may have meant by an option that there is not; "" if it is not known."""
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


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint at names that look alike, each with the prefix; "" if there are none."""
    close = difflib.get_close_matches(name, list(known), cutoff=ALIKE)
    return f"; did you mean {' or '.join(repr(prefix + one) for one in close)}?" if close else ""
