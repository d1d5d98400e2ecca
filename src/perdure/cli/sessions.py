"""Defines the operator's commands `perdure sessions`, `perdure sessions show`, `perdure sessions end`, `perdure
tail`."""

import asyncio
import contextlib
import json
import os
import re
import select
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import click

from perdure._core.ids import NodeId
from perdure._core.jsonrpc import JsonObject
from perdure._core.states import CallState, SessionState
from perdure.admin.queries import (
    EntryKind,
    SessionTail,
    end_session,
    entry_kind,
    find,
    has_ended,
    list_sessions,
    show_session,
)
from perdure.admin.text import list_lines, show_lines, tail_line
from perdure.cli.options import store_option
from perdure.errors import Misuse
from perdure.store import Inspect, existing_store, maintenance_of

T = TypeVar("T")

POLL = 0.1
"""Seconds between two reads of a store that `tail` follows. Where nothing was written, a read is one short query."""

REST = 4
"""A pause is at least so many times as long as the last read, so that following a large session costs others little."""

_STATES: dict[str, SessionState | CallState] = {state.value: state for state in (*SessionState, *CallState)}
_ID = re.compile(r"-[A-Za-z0-9_][A-Za-z0-9_-]{6,}|[A-Za-z0-9_-]{43}")


class SessionCommand(click.Command):
    """A command about one session. An id that begins with a dash, as one in 64 does, is not taken for an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {name for param in self.params if not getattr(param, "is_flag", True) for name in param.opts}
        options: list[str] = []
        ids: list[str] = []
        for before, argument in zip(["", *args], args, strict=False):
            is_id = argument.startswith("-") and _ID.fullmatch(argument) and before not in valued
            (ids if is_id else options).append(argument)
        return super().parse_args(ctx, [*options, "--", *ids] if ids and "--" not in args else args)


def _with_store(work: Callable[[Inspect], Awaitable[T]], store: str, *, writes: bool = False) -> T:
    """Open a store that exists, do the work, close it."""

    async def run() -> T:
        async with existing_store(store, writes=writes) as opened:
            return await work(opened)

    return asyncio.run(run())


@contextlib.contextmanager
def _until_closed() -> Iterator[None]:
    """End with status 0 when the reader of the output closes it (`| head`)."""
    try:
        yield
    except BrokenPipeError:
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(invoke_without_command=True, short_help="List, show and end the sessions and tasks in a store.")
@store_option()
@click.option("--json", "as_json", is_flag=True, help="one JSON object for each session, task or call")
@click.option(
    "--kind", type=click.Choice([kind.value for kind in EntryKind]), help="only sessions, only tasks or only calls"
)
@click.option("--state", type=click.Choice(list(_STATES)), help="only entries in this state")
@click.option("--all", "with_ended", is_flag=True, help="also entries that have ended and are kept for a while")
@click.option("--owner", metavar="NAME", help="only entries of this principal: its subject, client id or identity")
@click.pass_context
@_until_closed()
def sessions(
    ctx: click.Context,
    store: str,
    as_json: bool,
    kind: str | None,
    state: str | None,
    with_ended: bool,
    owner: str | None,
) -> None:
    """List the sessions, tasks and calls in a store that have not ended, the last active one first.

    A task is a call of 2026-07-28 whose client has its handle or gave it a key. A call is one whose client only waits,
    and can be asked something. Plain calls of 2026-07-28 are not in the store.

    Without authentication an id is a secret: a caller that has it can use the session, or read the task.
    """
    if ctx.invoked_subcommand is not None:
        return
    in_state, of_kind = _STATES[state] if state else None, EntryKind(kind) if kind else None

    async def work(opened: Inspect) -> list[JsonObject]:
        living = await maintenance_of(store).living(patiently=False)
        return await list_sessions(opened, state=in_state, owner=owner, kind=of_kind, living=living)

    everything = _with_store(work, store)
    found = everything if with_ended or state else [entry for entry in everything if not has_ended(entry)]
    if as_json:
        lines = [json.dumps(session) for session in found]
    else:
        lines = list_lines(found, now=time.time()) or [f"no {kind or EntryKind.SESSION.value}s"]
        if ended := len(everything) - len(found):
            lines.append(f"{ended} more {'has' if ended == 1 else 'have'} ended; --all shows them")
    for line in lines:
        click.echo(line)


@sessions.command(cls=SessionCommand, short_help="Show everything about a session or a task.")
@click.argument("id_", metavar="ID")
@store_option(is_inner=True)
@click.option("--json", "as_json", is_flag=True, help="one JSON object, with everything")
@_until_closed()
def show(id_: str, store: str, as_json: bool) -> None:
    """Show everything about the session or task with this ID, or whose id begins with it (8 characters at least)."""

    async def work(opened: Inspect) -> tuple[JsonObject, frozenset[NodeId]]:
        return await show_session(opened, id_, living=await maintenance_of(store).living(patiently=False))

    session, nodes = _with_store(work, store)
    lines = [json.dumps(session)] if as_json else show_lines(session, nodes=nodes, now=time.time())
    click.echo("\n".join(lines))


@sessions.command(cls=SessionCommand, short_help="End a session or a task.")
@click.argument("id_", metavar="ID")
@store_option(is_inner=True)
@_until_closed()
def end(id_: str, store: str) -> None:
    """End the session or task with this ID (8 characters of it at least).

    The log of a session is deleted, and its client must begin a new session. A task that runs is cancelled, and
    its client is answered; a task that has ended is deleted.
    """
    living = maintenance_of(store).living
    click.echo(_with_store(lambda opened: end_session(opened, id_, now=time.time(), living=living), store, writes=True))


@click.command(cls=SessionCommand, short_help="Follow the events of a session or a task.")
@click.argument("id_", metavar="ID")
@store_option()
@click.option("--from-start", is_flag=True, help="begin with the retained events, not with the next one")
@click.option("--stream", metavar="STREAM", help="only the stream with this id, or whose id begins with it")
@click.option("--json", "as_json", is_flag=True, help="whole messages, as JSON")
@_until_closed()
def tail(id_: str, store: str, from_start: bool, stream: str | None, as_json: bool) -> None:
    """Follow the events of the session or task with this ID as the servers write them.

    Ends with the session or the task, or with Ctrl-C. It only reads: servers do not notice it.
    """

    async def work(opened: Inspect) -> None:
        record = await find(opened, id_)
        if stream is not None and not any(s.id.startswith(stream) for s in await opened.streams(record.id)):
            raise Misuse(f"{entry_kind(record).value} {record.id} has no stream {stream!r}")
        following = SessionTail(opened, record.id, only=lambda name: name.startswith(stream or ""))
        if not from_start:
            await following.skip()
        stamp: object = None
        # A pipe whose other end is closed reports an error. Without this only the next line would notice it.
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        while not any(events & select.POLLERR for _, events in output.poll(0)):
            before, stamp, began = stamp, opened.stamp(), time.monotonic()
            if stamp != before:
                async for item in following.read():
                    click.echo(json.dumps(item) if as_json else tail_line(item))
                    if item["what"] == "ended":
                        return
            await asyncio.sleep(max(POLL, REST * (time.monotonic() - began)))

    _with_store(work, store)
