"""Defines `perdure install` and `perdure uninstall`, which edit the configuration of a desktop host."""

import contextlib
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from click.core import ParameterSource

from perdure._core.jsonc import BadDocument
from perdure._core.text import format_duration
from perdure.cli.stdio import BRIDGE_OPTIONS, PROGRAM_OPTIONS, BridgeCommand, check_source, check_token_options
from perdure.errors import Misuse
from perdure.hosts import entries, toml_entries
from perdure.hosts.config_file import ConfigFile
from perdure.hosts.known import HOSTS, NAME_RULE, Host, Scope, config_path, described, entry, is_bridge, is_name

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FILE = click.Path(path_type=Path)
_HOST = click.Argument(["host"], type=click.Choice(list(HOSTS)), metavar="HOST")
_WHERE = (
    click.Option(
        ["--name"], default="perdure", metavar="NAME", help="the server's name in the host  [default: perdure]"
    ),
    click.Option(
        ["--scope"],
        type=click.Choice(["user", "project"]),
        default="user",
        help="the user's own file, or the one of the project in this directory  [default: user]",
    ),
    click.Option(["--file"], type=_FILE, metavar="FILE", help="the host's file, where it is not at its usual place"),
)
_HOST_LIST = ", ".join(HOSTS)

#: The words with which a launcher runs Perdure, and those for Perdure with its extra `dev`, which `--watch` needs.
_LAUNCHERS = {
    "uvx": (["perdure"], ["--from", "perdure[dev]", "perdure"]),
    "pipx": (["run", "perdure"], ["run", "--spec", "perdure[dev]", "perdure"]),
}


class _InstallCommand(BridgeCommand):
    """Lets `--print` stand alone, before an address or a name, and before `link`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        if "--print" in own:
            at = own.index("--print")
            is_link = own[at + 1 : at + 2] == ["link"]
            args = [*args[:at], f"--print={'link' if is_link else 'entry'}", *args[at + 1 + is_link :]]
        return super().parse_args(ctx, args)


def _where(host: Host, scope: Scope, file: Path | None) -> Path | None:
    """Return the file to change; None for the common format without a file, which is printed."""
    if file is not None:
        return Path(os.path.abspath(file))
    try:
        home = Path.home()
    except RuntimeError as error:  # a user without an entry and without HOME, as in some containers
        raise Misuse("the home directory is not known: set HOME, or name the file with --file") from error
    found = config_path(host, scope, platform=sys.platform, home=home, project=Path.cwd(), environ=os.environ)
    if found is None and host.home + host.settings:
        raise Misuse(f"{host.title} has no file for one project: leave --scope out, or name a file with --file")
    return None if found is None else Path(found)


def _program(launcher: str | None, *, needs_watch: bool, is_shared: bool) -> list[str]:
    """Return the command that runs Perdure from any directory and with any PATH. What is shared is for other machines,
    so a launcher has no path there."""
    if launcher is not None:
        path = launcher if is_shared else shutil.which(launcher)
        if path is None:
            raise Misuse(f"there is no program {launcher!r} here: install it first, or leave --launcher out")
        return [path, *_LAUNCHERS[launcher][needs_watch]]
    script = Path(sysconfig.get_path("scripts"), "perdure.exe" if sys.platform == "win32" else "perdure")
    if script.is_file() and os.access(script, os.X_OK):
        return [str(script)]
    if not sys.executable:
        raise Misuse("the path of this Python is not known: write the configuration by hand, see --print")
    return [sys.executable, "-m", "perdure"]


def _bridge_arguments(ctx: click.Context) -> list[str]:
    """Return the options for `perdure stdio` that the user gave. Paths become absolute: hosts start it elsewhere."""
    words = []
    for option in BRIDGE_OPTIONS:
        name = str(option.name)
        if ctx.get_parameter_source(name) not in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            continue
        words.append(option.opts[0])
        value = ctx.params[name]
        if isinstance(value, Path):
            words.append(os.path.abspath(value.expanduser()))
        elif not option.is_flag:
            words.append(format_duration(value) if isinstance(value, float) else str(value))
    return words


def _server_words(command: Sequence[str], watch: Sequence[Path], cwd: Path | None) -> list[str]:
    """Return the end of the command line for a program. The host has another folder and another PATH than this shell,
    so both are written down as they are here."""
    folder = os.path.abspath(cwd or Path.cwd())
    # As the system searches it, which begins in the folder for a path that is not absolute.
    program = shutil.which(os.path.join(folder, command[0]) if os.sep in command[0] else command[0])
    if program is None:
        raise Misuse(f"there is no program {command[0]!r} here: install it first, or give its path")
    watched = [word for path in watch for word in ("--watch", os.path.abspath(path))]
    return [*watched, "--cwd", folder, "--", os.path.abspath(program), *command[1:]]


def _check(host: Host, name: str, given: dict[str, Any]) -> None:
    check_token_options(given)
    if not is_name(name):
        raise Misuse(f"--name: {name!r} does not fit all hosts: {NAME_RULE}")
    if host.splits_names and "_" in name:
        raise Misuse(
            f"--name: {name!r} does not fit {host.title}, whose rules for tools fail at underscores: use hyphens"
        )
    variable = given["token_env"]
    if variable is not None and not _VARIABLE.fullmatch(variable):
        # The message omits the text: it may be the token.
        raise Misuse(
            "--token-env takes the name of a variable, such as BAKERY_TOKEN; the token itself is never written"
        )


def _editor(host: Host) -> ModuleType:
    return toml_entries if host.is_toml else entries


@contextlib.contextmanager
def _editing(file: ConfigFile) -> Iterator[None]:
    try:
        yield
    except BadDocument as error:
        raise Misuse(f"{file.path} cannot be edited, {error}: mend it first, or use --print") from error


def _say(sentence: str, **where: Any) -> None:
    click.echo(f"perdure: {sentence}", **where)


@click.command(
    cls=_InstallCommand,
    params=[
        _HOST,
        click.Argument(["url"], metavar="URL|NAME", required=False),
        *_WHERE,
        click.Option(
            ["--print"],
            type=click.Choice(["entry", "link"]),
            metavar="[link]",
            help="show the configuration instead of writing it, or with link a link that adds it (cursor, vscode)",
        ),
        click.Option(
            ["--launcher"],
            type=click.Choice(list(_LAUNCHERS)),
            help="have uvx or pipx run Perdure, in place of the Perdure of this environment",
        ),
        click.Option(["--force"], is_flag=True, help="replace another server of this name"),
        *BRIDGE_OPTIONS,
        *PROGRAM_OPTIONS,
    ],
    short_help="Add an MCP server to a desktop host.",
    help=(
        "Write into HOST's configuration that it starts perdure stdio for the MCP server at URL, or for the one that"
        f" COMMAND starts, under NAME. HOST is one of {_HOST_LIST}. Everything else in the file stays as it is, and a"
        " backup is put beside it. mcp-json prints the configuration that most hosts read, unless --file or --scope"
        " project says where to write it. The options from --token-env on are those of perdure stdio, and are written"
        " into the configuration."
    ),
)
@click.pass_context
def install(ctx: click.Context, /, host: str, url: str | None, command: Sequence[str] | None, **given: Any) -> None:
    known, name = HOSTS[host], given["name"]
    if command is None and url is None:
        raise Misuse("URL is missing; see perdure install --help")
    if command is not None and url is not None and "://" not in url:
        if ctx.get_parameter_source("name") is ParameterSource.COMMANDLINE and name != url:
            raise Misuse(f"the server has two names, {url!r} and {name!r} of --name: keep one of them")
        name, url = url, None
    check_source(given, url, command)
    _check(known, name, given)
    if url is not None:
        from perdure.remote.endpoint import Refused, check_address

        try:
            check_address(url)
        except Refused as refused:
            raise Misuse(str(refused)) from refused
    is_link = given["print"] == "link"
    program = _program(given["launcher"], needs_watch=bool(given["watch"]), is_shared=is_link)
    words = [*program, "stdio", *([] if url is None else [url]), *_bridge_arguments(ctx)]
    # With a name, two entries of one host for the same server differ, so each continues its own session.
    if given["instance"] is None and not given["no_resume"]:
        words += ["--instance", name]
    if command is not None:
        words += _server_words(command, given["watch"], given["cwd"])
    wanted = entry(known, words)
    if is_link:
        if known.link is None:
            having = ", ".join(key for key, each in HOSTS.items() if each.link is not None)
            raise Misuse(f"{known.title} has no links that add a server; those of {having} have: leave link out")
        click.echo(known.link(name, wanted))
        return
    editor = _editor(known)
    path = _where(known, given["scope"], given["file"])
    if given["print"] or path is None:
        click.echo(editor.add(None, known.key, name, wanted), nl=False)
        _say(f"this goes into {path}" if path else "name a file with --file to have it written", err=True)
        return
    file = ConfigFile.read(path)
    with _editing(file):
        found = editor.find(file.text, known.key, name)
    if found == wanted:
        _say(f"nothing to do: {path} has this server as {name}")
        return
    if found is not None and not given["force"]:
        raise Misuse(
            f"{path} has another server called {name} ({described(found)}):"
            " choose another name with --name, or replace it with --force"
        )
    with _editing(file):
        text = editor.add(file.text, known.key, name, wanted)
    backup = file.replace(text)
    _say(f"{path} has the server {name} now")
    if backup is not None:
        _say(f"the file as it was: {backup}")
    if given["token_env"] is not None:
        _say(f"give {given['token_env']} to the host's environment; it was not written into the file")
    if known.then:
        _say(f"next: {known.then}")


@click.command(
    params=[
        _HOST,
        *_WHERE,
        click.Option(["--print"], is_flag=True, help="show what would be taken out"),
        click.Option(["--force"], is_flag=True, help="take out a server that does not run perdure stdio as well"),
    ],
    short_help="Take an MCP server out of a desktop host.",
    help=(
        "Take what perdure install has written out of HOST's configuration. The rest of the file stays as it is. HOST"
        f" is one of {_HOST_LIST}."
    ),
)
def uninstall(host: str, **given: Any) -> None:
    known, name = HOSTS[host], given["name"]
    path = _where(known, given["scope"], given["file"])
    if path is None:
        raise Misuse(f"{host} has no usual file: name it with --file, or use --scope project")
    file = ConfigFile.read(path)
    editor = _editor(known)
    with _editing(file):
        found = editor.find(file.text, known.key, name)
    if found is None or file.text is None:
        _say(f"nothing to do: {path} has no server called {name}")
        return
    if not is_bridge(found) and not given["force"]:
        raise Misuse(f"the server {name} in {path} does not run perdure stdio: take it out with --force")
    if given["print"]:
        click.echo(editor.add(None, known.key, name, found), nl=False)
        _say(f"this would be taken out of {path}", err=True)
        return
    with _editing(file):
        text = editor.remove(file.text, known.key, name)
    backup = file.replace(text)
    _say(f"{path} has no server {name} any more")
    if backup is not None:
        _say(f"the file as it was: {backup}")
    if known.then:
        _say(f"next: {known.then}")
