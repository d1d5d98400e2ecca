"""The operator's commands about a store as a whole: `perdure store init`, `migrate`, `check`, `restored` and
`disown`."""

import asyncio
import json
import logging
from typing import Any

import click

from perdure.errors import Misuse, StoreError
from perdure.store import existing_store, owner, upkeep_of
from perdure.store.owner import Owner

UNFIT = 1
"""The status of a check that found a problem."""

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
    """Make the tables, or the file, of a new store. A store of this release that is there already stays as it is.

    With --print nothing is connected to.
    """
    upkeep = upkeep_of(address)
    if prints:
        click.echo(upkeep.script(0, grant=grant))
        return

    async def work() -> str:
        version = await upkeep.version()
        if 0 < version < upkeep.latest:
            raise Misuse(
                f"{upkeep.shown} has a store already, of version {version}; `perdure store migrate` brings it to"
                f" version {upkeep.latest}"
            )
        await upkeep.make(grant=grant)
        return f"{upkeep.shown} {'has a store already, of' if version else 'is made, in'} version {upkeep.latest}"

    click.echo(asyncio.run(work()))


@store.command(short_help="Bring a store of an older release up to date.")
@click.argument("address", **_ADDRESS)
@click.option("--print", "prints", is_flag=True, help=_PRINT_HELP)
@click.option("--grant", metavar="ROLE", help=_GRANT_HELP)
def migrate(address: str, prints: bool, grant: str | None) -> None:
    """Bring a store of an older release to the version of this one. Nothing happens to one that has it."""
    upkeep = upkeep_of(address)

    async def work() -> str:
        version = await upkeep.version()
        if version == 0:
            raise Misuse(f"{upkeep.shown} has no store; `perdure store init` makes one")
        if prints:
            return upkeep.script(version, grant=grant) if version < upkeep.latest else "-- there is nothing to do"
        await upkeep.make(grant=grant)
        if version == upkeep.latest:
            return f"{upkeep.shown} has version {version} already"
        return f"{upkeep.shown} is migrated from version {version} to {upkeep.latest}"

    click.echo(asyncio.run(work()))


@store.command(short_help="Tell whether a store is fit for a server.")
@click.argument("address", **_ADDRESS)
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def check(address: str, as_json: bool) -> int:
    """Tell whether a store is fit for a server of this release: its version, what the role may do, whether
    notifications arrive, which nodes live. Nothing is changed.

    The status is 0 if it is, 1 if it is not, and 2 if that cannot be told.
    """
    # What is logged of this is among the facts.
    logging.getLogger("perdure").addHandler(logging.NullHandler())
    upkeep = upkeep_of(address)
    facts = asyncio.run(upkeep.check())
    problems = [fact.problem for fact in facts if fact.problem]
    if as_json:
        values = {fact.name: fact.value for fact in facts}
        click.echo(json.dumps({"store": upkeep.shown, "fit": not problems, **values, "problems": problems}))
    else:
        for name, says in [("store", upkeep.shown), *((fact.name, fact.says or fact.value) for fact in facts)]:
            click.echo(f"{name:<8}  {says}")
        for problem in problems:
            click.echo(f"problem   {problem}")
        click.echo("fit       no" if problems else "fit       yes")
    return UNFIT if problems else 0


@store.command(short_help="Tell a store that it was put back from a copy.")
@click.argument("address", **_ADDRESS)
def restored(address: str) -> None:
    """Tell a store that it was put back from a copy of an earlier moment, before servers use it.

    Positions that the servers gave out after that moment then never name other events: clients that come with one are
    told what is gone. A file that `perdure backup` has made needs no telling. A database that was restored does
    (pg_restore, a point in time), and so does a file that was copied by other means.
    """
    upkeep = upkeep_of(address)

    async def work() -> None:
        if await upkeep.version() == 0:
            raise StoreError(f"{upkeep.shown} has no store that could have been put back")
        if living := [node[:8] for node in await upkeep.living()]:
            raise StoreError(f"{upkeep.shown} is in use by node {', '.join(living)}; stop its servers first")
        await upkeep.put_back()

    asyncio.run(work())
    click.echo(f"{upkeep.shown} begins again: positions from after the copy are answered as lost")


@store.command(short_help="Let another server have a store.")
@click.argument("address", **_ADDRESS)
def disown(address: str) -> None:
    """Let another server have a store: the next one that starts becomes its owner.

    A server that starts on another server's store is refused. If it is the same server under a new name, in another
    file, or if it takes the other's place, this lets it in. Servers that run are not disturbed.
    """

    async def work() -> Owner | None:
        async with existing_store(address, writes=True) as there:
            return await owner.disown(there)

    before = asyncio.run(work())
    had = f"belonged to {before}; it" if before else "has no owner, and"
    click.echo(f"{upkeep_of(address).shown} {had} belongs to the next server that starts")
