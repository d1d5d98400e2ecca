"""Defines `perdure call` and `perdure list`, which try a server without writing a client.

Both run `perdure.connect` on a terminal: a call continues over lost connections and restarts of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, get_args

import click

from perdure._core.codes import NO_SERVER, UNREACHABLE
from perdure._core.reconnect import Patience
from perdure._core.text import printable
from perdure.cli.dev import running
from perdure.cli.options import INTERRUPTED, LEVELS, REFUSED
from perdure.cli.stdio import BRIDGE_OPTIONS, check_token_options
from perdure.errors import Misuse

if TYPE_CHECKING:
    import mcp_types as types

    from perdure import Client
    from perdure.cli.terminal import Terminal

# The SDK takes most of a second to import, so it is imported where it is used.

#: The tool ran, or may have run, and returned an error. (2: it did not run.)
FAILED = 1
#: Characters of a name, a title or a message of the server in a line.
MAX_SHOWN = 300

_READY = re.compile(rb"perdure: serving on (http://\S+)")
#: No time to drain: the log is in memory, and the one call was answered.
_SERVE = ("--store", "memory:", "--host", "127.0.0.1", "--port", "0", "--workers", "1", "--drain-timeout", "0")
_MODES = ("auto", "legacy", "2026-07-28")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options that name the server and how to reach it."""

    url: str
    token_env: str | None
    token_file: Path | None
    mode: str
    patience: float
    log_level: str


def _connection_params() -> list[click.Parameter]:
    options = {str(option.name): option for option in BRIDGE_OPTIONS}
    mode = click.Option(
        ["--mode"],
        type=click.Choice(_MODES),
        default="auto",
        show_default=True,
        help="legacy speaks the revisions with sessions, auto those if the server has them",
    )
    url = click.Argument(["url"], metavar="URL|FILE")
    return [url, options["token_env"], options["token_file"], mode, options["patience"], options["log_level"]]


@click.command(params=_connection_params(), short_help="Call a tool of an MCP server.")
@click.argument("tool", metavar="TOOL")
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--input-json", metavar="JSON|@FILE|-", help="arguments as one JSON object, from a file, or from stdin")
@click.option("--prompt", "is_prompt", is_flag=True, help="TOOL is the name of a prompt, which is shown")
@click.option("--json", "as_json", is_flag=True, help="print the result as one JSON object")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="write the image, sound or file of the result here, or its text if it has none of them",
)
def call(
    tool: str,
    arguments: tuple[str, ...],
    input_json: str | None,
    is_prompt: bool,
    as_json: bool,
    output: Path | None,
    **given: Any,
) -> int:
    """Call TOOL on the MCP server at URL, and print its result. In place of URL, FILE.py is served for this call.

    The tool's schema says how a VALUE is read: as text where it allows text, otherwise as JSON. KEY:=JSON is always
    JSON. For an array, KEY=ITEM may be repeated. A TOOL with :// in it is the URI of a resource, which is read.

    Progress, log messages and questions of the tool go to stderr. The status is 0; 1 if the tool returned an error; 2
    if nothing was called.
    """
    if output and (as_json or is_prompt):
        raise click.UsageError(f"--output and {'--json' if as_json else '--prompt'} cannot be given together")
    check_token_options(given)
    from perdure.cli.terminal import Terminal
    from perdure.cli.tool_calls import call_tool, get_prompt, parse_words, read_input, read_resource

    connection, words, more = ServerOptions(**given), parse_words(arguments), read_input(input_json)
    terminal = Terminal(printable(tool, MAX_SHOWN))

    async def work() -> int:
        async with _connected(connection, terminal) as client:
            if is_prompt:
                return await get_prompt(client, connection.url, tool, words, more, as_json=as_json)
            if "://" in tool:
                if words or more:
                    raise Misuse(f"{tool!r} is a resource, which takes no arguments")
                return await read_resource(client, tool, as_json=as_json, output=output)
            return await call_tool(client, connection.url, tool, words, more, terminal, as_json=as_json, output=output)

    return _run(work(), connection, terminal, as_json=as_json)


@click.command("list", params=_connection_params(), short_help="List what an MCP server offers.")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object, with whole schemas")
def list_command(as_json: bool, **given: Any) -> int:
    """List the tools of the MCP server at URL with their arguments, and its resources and prompts. In place of URL,
    FILE.py is served for this."""
    from perdure.cli.terminal import Terminal

    check_token_options(given)
    connection, terminal = ServerOptions(**given), Terminal("list")

    async def work() -> int:
        from perdure.cli.tool_calls import listing_lines, one_line, read_offers

        async with _connected(connection, terminal) as client:
            offers = await read_offers(client)
        click.echo(one_line(offers) if as_json else "\n".join(listing_lines(offers)))
        return 0

    return _run(work(), connection, terminal, as_json=as_json)


def _run(work: Coroutine[Any, Any, int], connection: ServerOptions, terminal: Terminal, *, as_json: bool) -> int:
    """Return the exit status. Ctrl-C cancels the call, and notifies the server of it."""
    from mcp.shared.exceptions import MCPError
    from pydantic import ValidationError

    from perdure.remote.endpoint import Refused, on_401, shown

    log = logging.getLogger("perdure")
    log.setLevel(connection.log_level.upper())
    log.addHandler(terminal)
    log.propagate = False
    try:
        with contextlib.closing(work):
            return asyncio.run(work)
    except KeyboardInterrupt:
        terminal.line("perdure: cancelled")
        return INTERRUPTED
    except Refused as refused:
        raise Misuse(str(refused)) from None
    except MCPError as error:
        terminal.clear()
        if error.code == UNREACHABLE:
            why = error.message.rpartition(": ")[2]
            raise Misuse(f"no server answers at {shown(connection.url)}: {why}") from None
        if error.code == NO_SERVER:
            why = error.message
            if isinstance(error.data, dict) and error.data.get("reason") == "unauthorized":
                has_token = connection.token_env is not None or connection.token_file is not None
                why = f"{shown(connection.url)} {on_401((lambda: '') if has_token else None)} (HTTP 401)"
            raise Misuse(why) from None
        if as_json:
            click.echo(json.dumps({"error": error.error.model_dump(mode="json", by_alias=True, exclude_none=True)}))
        else:
            terminal.line(f"perdure: {' '.join(error.message.split())} (error {error.code})")
        return FAILED
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        terminal.line(f"perdure: the server's answer is not as MCP has it: {why}")
        return FAILED
    finally:
        terminal.clear()


@asynccontextmanager
async def _connected(connection: ServerOptions, terminal: Terminal) -> AsyncIterator[Client]:
    """Raises `Refused` for an address or a token that cannot be used, and `MCPError` for a server that cannot."""
    import mcp_types as types

    import perdure
    from perdure.cli.terminal import ElicitationForm
    from perdure.remote.endpoint import checked_client, token_provider

    levels = get_args(types.LoggingLevel)  # the least severe first

    async def on_log(params: types.LoggingMessageNotificationParams) -> None:
        if levels.index(params.level) >= levels.index(connection.log_level):
            text = params.data if isinstance(params.data, str) else json.dumps(params.data, ensure_ascii=False)
            terminal.line(f"{params.logger or 'server'}: {params.level}: {' '.join(text.split())}")

    token = token_provider(connection.token_env, connection.token_file, os.environ)
    async with (
        _address(connection) as url,
        checked_client(url, token) as http,
        perdure.connect(
            url,
            http_client=http,
            mode=connection.mode,
            patience=Patience(max_time=connection.patience),
            wait_for_server=True,
            elicitation_callback=ElicitationForm(terminal).answer,
            logging_callback=on_log,
            log_level=connection.log_level,
            client_info=types.Implementation(name="perdure call", version=perdure.__version__),
        ) as client,
    ):
        yield client


@asynccontextmanager
async def _address(connection: ServerOptions) -> AsyncIterator[str]:
    """Yield the server's address. A file, `bakery.py` or `bakery.py:server`, is served for this one command.

    `perdure serve` runs in a process of its own with its log in memory, so that the call is made as to any server. That
    process ends with its input, also if this one is killed. It reports itself what is wrong with the file.
    """
    if "://" in connection.url or not connection.url.partition(":")[0].endswith(".py"):
        yield connection.url
        return
    log_level = max(connection.log_level, "warning", key=LEVELS.index)
    command = ("serve", connection.url, *_SERVE, "--log-level", log_level)
    with running(*command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        while not (found := _READY.match(line := await asyncio.to_thread(process.stdout.readline))):
            if not line:
                raise click.exceptions.Exit(process.wait() or REFUSED)
            sys.stderr.buffer.write(line)  # output of the code when it is imported
        output = process.stdout.fileno()

        def pass_on() -> None:
            """Write to stderr what a tool prints: it must not be taken for the result, nor fill the pipe."""
            with contextlib.suppress(OSError):
                while data := os.read(output, 65_536):
                    os.write(sys.stderr.fileno(), data)

        Thread(target=pass_on, daemon=True).start()
        yield found[1].decode()
