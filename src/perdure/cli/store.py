"""Defines the operator's commands about a whole store: `perdure store init`, `migrate`, `check`, `restored` and
`disown`, `perdure backup` and `perdure check`."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from perdure.cli.options import store_option
from perdure.errors import Misuse, StoreError
from perdure.store import existing_store, maintenance_of, owner
from perdure.store.maintenance import INVARIANTS, CheckResult, Fact, Violation
from perdure.store.owner import Owner

UNFIT = 1
"""The status of a check that found a problem or a fault."""

PROGRESS_SECONDS = 0.2
"""Seconds between two lines of progress on a terminal."""

_ADDRESS: dict[str, Any] = {"metavar": "ADDRESS", "envvar": "PERDURE_STORE"}
_PRINT_HELP = "print the SQL for review, and change nothing"
_GRANT_HELP = "also grant this role of the database what a server needs"


@click.group(short_help="Make, migrate and check a store.")
def store() -> None:
    """Make, migrate and check a store.

    ADDRESS is sqlite:PATH or postgresql://USER@HOST/DATABASE; without it the variable PERDURE_STORE is used. Other
    users of the machine can see the arguments of a command, so keep a password out of them: use PGPASSWORD, PGPASSFILE
    or PERDURE_STORE.

    Servers make and migrate their store by themselves if they may. These commands are for databases in which the
    servers' role may not make tables.
    """


@store.command(short_help="Make the tables, or the file, of a new store.")
@click.argument("address", **_ADDRESS)
@click.option("--print", "prints", is_flag=True, help=_PRINT_HELP)
@click.option("--grant", metavar="ROLE", help=_GRANT_HELP)
def init(address: str, prints: bool, grant: str | None) -> None:
    """Make the tables, or the file, of a new store. A store of this release that exists already stays as it is.

    --print makes no connection.
    """
    maintenance = maintenance_of(address)
    if prints:
        click.echo(maintenance.script(0, grant=grant))
        return

    async def work() -> str:
        version = await maintenance.version()
        if 0 < version < maintenance.latest:
            raise Misuse(
                f"{maintenance.shown} has a store already, of version {version}; `perdure store migrate` brings it to"
                f" version {maintenance.latest}"
            )
        await maintenance.make(grant=grant)
        outcome = "has a store already, of" if version else "is made, in"
        return f"{maintenance.shown} {outcome} version {maintenance.latest}"

    click.echo(asyncio.run(work()))


@store.command(short_help="Bring a store of an older release up to date.")
@click.argument("address", **_ADDRESS)
@click.option("--print", "prints", is_flag=True, help=_PRINT_HELP)
@click.option("--grant", metavar="ROLE", help=_GRANT_HELP)
def migrate(address: str, prints: bool, grant: str | None) -> None:
    """Bring a store of an older release to the version of this release. A store of this version stays as it is."""
    maintenance = maintenance_of(address)

    async def work() -> str:
        version = await maintenance.version()
        if version == 0:
            raise Misuse(f"{maintenance.shown} has no store; `perdure store init` makes one")
        if prints:
            is_old = version < maintenance.latest
            return maintenance.script(version, grant=grant) if is_old else "-- there is nothing to do"
        await maintenance.make(grant=grant)
        if version == maintenance.latest:
            return f"{maintenance.shown} has version {version} already"
        return f"{maintenance.shown} is migrated from version {version} to {maintenance.latest}"

    click.echo(asyncio.run(work()))


@store.command(short_help="Check whether a server can use a store.")
@click.argument("address", **_ADDRESS)
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def check(address: str, as_json: bool) -> int:
    """Check whether a server of this release can use a store: its version, the rights of the role, whether
    notifications arrive, which nodes live. Nothing is changed.

    The status is 0 if it can, 1 if it cannot, and 2 if it cannot be checked.
    """
    return _check(address, as_json=as_json, with_contents=False)


@store.command(short_help="Mark a store as put back from a copy.")
@click.argument("address", **_ADDRESS)
def restored(address: str) -> None:
    """Mark a store as put back from a copy of an earlier moment, before servers use it.

    Positions from after that moment then never name other events: clients that come with one get a gap. A file that
    `perdure backup` has made needs no mark. A database that was restored does (pg_restore, a point in time), and so
    does a file that was copied by other means.
    """
    maintenance = maintenance_of(address)

    async def work() -> None:
        if await maintenance.version() == 0:
            raise StoreError(f"{maintenance.shown} has no store that could have been put back")
        if living := [node[:8] for node in await maintenance.living()]:
            raise StoreError(f"{maintenance.shown} is in use by node {', '.join(living)}; stop its servers first")
        await maintenance.put_back()

    asyncio.run(work())
    click.echo(f"{maintenance.shown} begins again: positions from after the copy are answered as lost")


@store.command(short_help="Let another server own a store.")
@click.argument("address", **_ADDRESS)
def disown(address: str) -> None:
    """Let another server own a store: the next one that starts becomes its owner.

    A server that starts on another server's store is refused. Use this command if it is the same server under a new
    name or in another file, or if it takes the other server's place. Running servers continue.
    """

    async def work() -> Owner | None:
        async with existing_store(address, writes=True) as there:
            return await owner.disown(there)

    before = asyncio.run(work())
    had = f"belonged to {before}; it" if before else "has no owner, and"
    click.echo(f"{maintenance_of(address).shown} {had} belongs to the next server that starts")


@click.command(short_help="Copy a store to a file while servers use it.")
@click.argument("target", metavar="FILE")
@store_option()
@click.option("--no-check", is_flag=True, help="do not read the copy again, and copy a damaged store as it is")
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def backup(target: str, store: str, no_check: bool, as_json: bool) -> None:
    """Copy a SQLite store to FILE, as of one moment, while servers use it. Servers do not wait for the copy.

    FILE must not exist. It appears when it is complete, checked as `perdure check` does, and on the disk; otherwise
    nothing is left. Only its owner can read it, because it holds everything that the store holds.

    To restore it: stop the servers, move the store's file and its log (-wal) away, put the copy in its place, and start
    the servers.
    """
    maintenance = maintenance_of(store)
    began = shown = time.monotonic()

    def on_copied(done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - shown >= PROGRESS_SECONDS:
            shown = time.monotonic()
            click.echo(f"\r{f'copied {_size(done)} of {_size(total)}':<60}", nl=False, err=True)

    made = maintenance.back_up(target.removeprefix("sqlite:"), checks=not no_check, on_copied=on_copied)
    if shown > began:
        click.echo(f"\r{'':<60}\r", nl=False, err=True)
    counts = {} if made.verdict is None else made.verdict.counts
    if as_json:
        seconds = round(time.monotonic() - began, 3)
        facts = {"store": maintenance.shown, "file": made.path, "bytes": made.bytes, "seconds": seconds}
        click.echo(json.dumps({**facts, "checked": made.verdict is not None, **counts}))
        return
    click.echo(f"{maintenance.shown} is copied to {made.path}: {_size(made.bytes)}")
    click.echo(f"checked: {_counted(counts)}, no faults" if counts else "not checked")


@click.command("check", short_help="Check everything in a store, also while servers use it.")
@store_option()
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def check_contents(store: str, as_json: bool) -> int:
    """Check everything in a store: the facts of `perdure store check`, then every record, event and answer.

    All of it is read as of one moment. Servers may write meanwhile and do not wait. Nothing is changed.

    The status is 0 if the store is sound, 1 if it is not, and 2 if it cannot be checked.
    """
    return _check(store, as_json=as_json, with_contents=True)


def _check(address: str, *, as_json: bool, with_contents: bool) -> int:
    # The facts hold what would be logged.
    logging.getLogger("perdure").addHandler(logging.NullHandler())
    maintenance = maintenance_of(address)

    async def work() -> tuple[Sequence[Fact], CheckResult | None]:
        facts = await maintenance.check()
        is_readable = any(fact.name == "version" and fact.value == maintenance.latest for fact in facts)
        return facts, await maintenance.verify() if with_contents and is_readable else None

    facts, verdict = asyncio.run(work())
    problems = [fact.problem for fact in facts if fact.problem]
    faults = () if verdict is None else verdict.faults
    name, is_good = "sound" if with_contents else "fit", not problems and not faults
    if as_json:
        found: dict[str, Any] = {"store": maintenance.shown, name: is_good, **{fact.name: fact.value for fact in facts}}
        if verdict is not None:
            found |= {"counts": verdict.counts, "unnamed": list(verdict.unnamed)}
        found["problems"] = problems
        if with_contents:
            found["faults"] = [
                {"rule": fault.rule, "promise": _promise(fault), "where": fault.where} for fault in faults
            ]
        click.echo(json.dumps(found))
        return 0 if is_good else UNFIT
    click.echo(f"{'store':<8}  {maintenance.shown}")
    for fact in facts:
        click.echo(f"{fact.name:<8}  {fact.says or fact.value}")
    for problem in problems:
        click.echo(f"problem   {problem}")
    if verdict is not None and verdict.counts:
        click.echo(f"holds     {_counted(verdict.counts)}")
    for fault in faults:
        promise = _promise(fault)
        click.echo(f"fault     {fault.where} ({fault.rule}{f', promise {promise}' if promise else ''})")
    for rule in () if verdict is None else verdict.unnamed:
        meaning = INVARIANTS[rule].says if rule in INVARIANTS else "SQLite can read every page"
        click.echo(f"fault     … and more of the rule {rule}: {meaning}")
    why = f": {len(faults)} fault{'s' if len(faults) != 1 else ''}" if faults else ""
    if with_contents and verdict is None:
        why = ": it was not checked further"
    click.echo(f"{name:<8}  {'yes' if is_good and not why else f'no{why}'}")
    return 0 if is_good else UNFIT


def _promise(fault: Violation) -> int | None:
    rule = INVARIANTS.get(fault.rule)
    return rule.promise or None if rule is not None else None


def _size(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())
