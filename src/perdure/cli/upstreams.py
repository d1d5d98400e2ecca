"""Reads which upstreams `perdure serve` serves, from the command line and from files, and makes what serves or checks
them."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click
from click.core import ParameterSource

from perdure._core.text import printable
from perdure.cli.options import SERVERS, SOURCES, ServeOption, load_env_file, read_text, spelling
from perdure.errors import Misuse
from perdure.gateway.config import Servers, Surroundings, address_from, parse_servers, parse_tables, program_from
from perdure.gateway.upstream import Auth, EraName, Upstream

if TYPE_CHECKING:
    from mcp.server.auth.provider import TokenVerifier

    from perdure.http.router import MakeApp, Router
    from perdure.settings import Settings

BEHIND = "What is served in place of TARGET"
#: The status of `--check` if an upstream cannot be used.
FAILED = 1
#: Characters of a name of a tool or a server in a line.
MAX_SHOWN = 300

_SERVERS_HELP = 'serve the servers in FILE, which is JSON with "mcpServers" as hosts have it, each at PATH/NAME'
_STDIO_HELP = "serve a program over its stdin and stdout, as -- COMMAND does; the text is split, and no shell is used"
_FOR = {
    "env": "a program",
    "cwd": "a program",
    "headers": "a URL",
    "token_env": "a URL",
    "token_file": "a URL",
    "auth": "a URL",
    "era": "a program or a URL",
}
"""What the options for one server are for, in the words of `_WHAT`."""
_WHAT = {
    "target": "Python code",
    "command": "a program",
    "stdio": "a program",
    "servers": "a file of servers: write it there",
    "tables": "a table of servers: write it there",
}


def upstream_options() -> Iterator[ServeOption]:
    def option(*names: str, metavar: str, says: str, has_variable: bool = False, **more: Any) -> ServeOption:
        return ServeOption(names, group=BEHIND, metavar=metavar, help=says, has_variable=has_variable, **more)

    file = click.Path(path_type=Path)
    yield option("--servers", metavar="FILE", says=_SERVERS_HELP, has_variable=True, type=file)
    yield option("--stdio", metavar="COMMAND", says=_STDIO_HELP, has_variable=True)
    yield option(
        "--check", metavar="", says="start or reach each server, list its tools, and end", is_flag=True, shown="off"
    )
    yield option(
        "--env",
        metavar="NAME[=VALUE]",
        says="variable for the program; NAME alone passes the one of this environment",
        multiple=True,
    )
    yield option("--cwd", metavar="DIR", says="folder in which the program runs", type=file)
    yield option(
        "--header",
        "headers",
        metavar="'NAME: VALUE'",
        says="header for the server at a URL; ${VAR} in it is a variable",
        multiple=True,
    )
    yield option("--token-env", metavar="NAME", says="variable that holds the bearer token for that server")
    yield option("--token-file", metavar="FILE", says="file that holds it; read again when it is refused", type=file)
    modes = get_args(Auth)
    yield option(
        "--auth",
        metavar="|".join(modes),
        says="whose credentials it gets: those above, or the token of each caller (needs --issuer)",
        type=click.Choice(modes),
        shown="own",
    )
    eras = get_args(EraName)
    yield option(
        "--era", metavar="|".join(eras), says="revisions that are spoken to it", type=click.Choice(eras), shown="auto"
    )


class _Source(NamedTuple):
    """One source of what is served."""

    spelled: str
    rank: int
    value: Any


def find_servers(ctx: click.Context) -> Servers | None:
    """Return the upstreams that the command is to serve; `None` if it serves TARGET, Python code.

    What overrides the other sources counts: the command line, then variables, then the configuration. Raises `Misuse`.
    """
    given = ctx.params
    params = {str(param.name): param for param in ctx.command.params}

    def rank(name: str) -> int:
        return SOURCES.index(ctx.get_parameter_source(name) or ParameterSource.DEFAULT)

    found = {
        name: _Source(spelling(ctx, params[name]), rank(name), given[name])
        for name in ("target", "stdio", "servers")
        if given.get(name) is not None
    }
    if given["command"] is not None:
        found["command"] = _Source("-- COMMAND", SOURCES.index(ParameterSource.COMMANDLINE), given["command"])
    if (config := ctx.meta.get(SERVERS)) is not None:
        found["tables"] = _Source(f"[servers] of {config.name}", SOURCES.index(ParameterSource.DEFAULT_MAP), config)
    least = min((source.rank for source in found.values()), default=0)
    chosen = [(kind, source) for kind, source in found.items() if source.rank == least]
    if len(chosen) > 1:
        first, second = (source.spelled for _, source in chosen[:2])
        raise Misuse(f"{first} and {second} cannot be given together: each names what to serve")
    if not chosen:
        raise click.MissingParameter(ctx=ctx, param=params["target"])
    kind, source = chosen[0]

    is_address = kind == "target" and "://" in source.value
    is_code = kind == "target" and not is_address
    if is_code and given["check"]:
        raise Misuse(f"--check is for servers that are not Python code; perdure list {source.value} shows this one")
    is_what = "a URL" if is_address else _WHAT[kind]
    for name, what in _FOR.items():
        # Options of a weaker source belong to the overridden target.
        if given[name] and is_what not in what and rank(name) <= source.rank:
            raise Misuse(f"{spelling(ctx, params[name])} is for {what}, and {source.spelled} is {is_what}")
    around = _surroundings(Path.cwd())
    era: EraName = given["era"] or "auto"
    match kind:
        case "target" if is_code:
            return None
        case "target":
            tokens = {name: given[name] for name in ("token_env", "token_file")}
            how: dict[str, Any] = {"auth": given["auth"] or "own", "era": era, "around": around}
            one = address_from(source.value, headers=given["headers"], **tokens, **how)
        case "command" | "stdio":
            words = source.value
            try:
                words = shlex.split(words) if kind == "stdio" else words
            except ValueError as error:
                reason = f"{str(error)[:1].lower()}{str(error)[1:]}"
                raise Misuse(f"--stdio cannot be split into words: {reason}") from None
            if not words:
                raise Misuse(f"{source.spelled} has no command; write the program and its arguments")
            one = program_from(words, env=given["env"], cwd=given["cwd"], era=era, around=around)
        case "servers":
            text = read_text(source.value, "the servers in")
            return parse_servers(text, file=str(source.value), around=_surroundings(source.value.resolve().parent))
        case _:
            around = _surroundings(Path(source.value.name).resolve().parent)
            return parse_tables(source.value.values["servers"], file=source.value.name, around=around)
    return Servers(upstreams=(one,))


def _surroundings(folder: Path) -> Surroundings:
    def read_variables(path: Path) -> Mapping[str, str]:
        found: dict[str, str] = {}
        load_env_file(path, found)
        return found

    return Surroundings(environ=os.environ, folder=folder, read_variables=read_variables)


def make_router(servers: Servers, *, store: str, settings: Settings, auth: TokenVerifier | None, path: str) -> Router:
    from perdure.gateway.host import host_upstream
    from perdure.http.app import App
    from perdure.http.router import Router
    from perdure.store import own_store
    from perdure.store.owner import Owner

    def maker(upstream: Upstream) -> MakeApp:
        own = own_store(store, upstream.name) if servers.are_named else store

        def make(path: str) -> App:
            hosted = host_upstream(upstream, settings)
            return App(hosted, store=own, settings=settings, auth=auth, path=path, owner=Owner(name=upstream.name))

        return make

    makers = {upstream.name: maker(upstream) for upstream in servers.upstreams}
    return Router(makers, settings=settings, auth=auth, path=path)


def check_servers(servers: Servers) -> int:
    """Try all upstreams, and print a table for each. Returns the exit status."""
    from perdure.admin.text import table
    from perdure.gateway.check import Checked, check_upstream
    from perdure.gateway.host import lane_for_check

    async def check_all() -> list[Checked]:
        return await asyncio.gather(*(check_upstream(upstream, lane_for_check) for upstream in servers.upstreams))

    def shown(text: str) -> str:
        return printable(" ".join(text.split()), MAX_SHOWN)

    checked = asyncio.run(check_all())
    for one in checked:
        name = f"{one.upstream.name}: {shown(one.upstream.shown)}"
        if one.failure:
            click.echo(f"{name} cannot be used: {shown(one.failure)}")
            continue
        tools = "1 tool" if len(one.tools) == 1 else f"{len(one.tools)} tools"
        click.echo(", ".join(filter(None, (f"{name} speaks {shown(one.revision)}", shown(one.server), tools))))
        rows = [(shown(tool.name), "yes" if tool.may_run_again else "no", shown(tool.because)) for tool in one.tools]
        if rows:
            click.echo("\n".join(table(("TOOL", "RUNS AGAIN", "BECAUSE"), rows, indent="  ")))
    return FAILED if any(one.failure for one in checked) else 0
