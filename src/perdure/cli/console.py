"""Defines the operator's command `perdure console`: a page that shows a store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from perdure.cli.options import Name, store_option
from perdure.errors import Misuse
from perdure.store import existing_store

MAX_TOKEN_FILE = 4_096
"""Bytes: a token is shorter. A larger file is most likely the wrong one."""


@click.command(short_help="Show what is in a store on a web page.")
@store_option()
@click.option("--allow-end", is_flag=True, help="let the page end sessions; without it the store is only read")
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="address to listen on")
@click.option(
    "--port",
    metavar="PORT",
    default=8001,
    show_default=True,
    help="port to listen on; 0 picks a free one",
    type=click.IntRange(0, 65_535),
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    type=Name(),
    help="a name under which the console is reached, beside localhost and IP addresses; may be repeated",
)
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="the token that callers must show, in place of a new one for each start",
)
@click.option("--open", "opens", is_flag=True, help="open the page in a browser")
def console(
    store: str,
    allow_end: bool,
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    token_file: Path | None,
    opens: bool,
) -> None:
    """Serve a page that shows the nodes, sessions and calls of a store, and print its address.

    It is a process of its own, beside the servers, and only reads: servers do not wait for it. The address has a token
    that lets one browser in; then the next address is printed. A browser that is in sees all messages of clients and
    servers.
    """
    import secrets
    import webbrowser

    from perdure.console.app import console_app, serve_console
    from perdure.console.auth import TOKEN_BYTES, Ticket
    from perdure.serve.connection import Connection
    from perdure.serve.listener import listen

    async def check_store() -> None:
        """Raise if the store cannot be read: uvicorn would not say why."""
        async with existing_store(store, writes=False):
            pass

    asyncio.run(check_store())
    token = secrets.token_urlsafe(TOKEN_BYTES) if token_file is None else _read_token(token_file)
    with listen(host, port) as listener:
        # The host that was given, or this machine for "all addresses".
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listener.getsockname()[0], host)
        address = f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}/"

        def on_used(next_word: str) -> None:
            if not token_file:
                click.echo(f"perdure: a browser has opened the console; the next one needs {address}?token={next_word}")

        def on_ready() -> None:
            shown = (
                f"{address} (it asks for the token in {token_file})" if token_file else f"{address}?token={ticket.word}"
            )
            click.echo(f"perdure: console on {shown}")
            if opens:
                webbrowser.open(f"{address}?token={ticket.word}")

        ticket = Ticket(on_used)
        app = console_app(
            store,
            token=token,
            ticket=ticket,
            allow_end=allow_end,
            allowed_hosts=[*allowed_hosts, host],
            on_ready=on_ready,
        )
        serve_console(app, listener=listener, protocol=Connection)


def _read_token(path: Path) -> str:
    from perdure._files.private import Untrusted, read
    from perdure.console.auth import MIN_TOKEN

    try:
        data = read(path, limit=MAX_TOKEN_FILE)
    except Untrusted as error:
        raise Misuse(f"--token-file: {path} is not used: {error}; it must be yours alone: chmod 600") from None
    if data is None:
        raise Misuse(f"--token-file: there is no file {path}; write a token of {MIN_TOKEN} characters or more to it")
    token = data.decode("ascii", "replace").strip()
    if not all("!" <= character <= "~" for character in token) or len(token) < MIN_TOKEN:
        raise Misuse(
            f"--token-file: {path} holds {len(token)} characters that are not a token; one has {MIN_TOKEN} or more of"
            " visible ASCII, in one line"
        )
    return token
