"""The operator's commands about what a store holds: `perdure backup` and `perdure check`."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from perdure.cli.options import DEFAULT_STORE
from perdure.store import upkeep_of
from perdure.store.invariants import INVARIANTS, Fault, Verdict
from perdure.store.upkeep import Fact, Upkeep

UNSOUND = 1
"""The status of a check that found a fault."""

SHOWN = 0.2
"""Seconds between two lines of progress on a terminal."""

_STORE: dict[str, Any] = {
    "metavar": "STORE",
    "help": "the store that servers write: sqlite:PATH or postgresql://USER@HOST/DATABASE",
    "default": DEFAULT_STORE,
    "envvar": "PERDURE_STORE",
    "show_default": True,
}


@click.command(short_help="Copy a store to a file while servers use it.")
@click.argument("target", metavar="FILE")
@click.option("--store", **_STORE)
@click.option("--no-check", is_flag=True, help="do not read the copy again, and copy a damaged store as it is")
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def backup(target: str, store: str, no_check: bool, as_json: bool) -> None:
    """Copy a SQLite store to FILE, as of one moment, while servers use it. They do not wait for it.

    FILE must not be there. It appears when it is complete, checked as `perdure check` does, and on the disk; otherwise
    nothing is left. It is readable by its owner only, because it holds what the store holds.

    To restore it: stop the servers, move the store's file and its log (-wal) away, put the copy in its place, and start
    them.
    """
    upkeep = upkeep_of(store)
    began = time.monotonic()
    progress = Progress()
    made = upkeep.back_up(target.removeprefix("sqlite:"), checks=not no_check, on_copied=progress.copied)
    progress.end()
    counts = {} if made.verdict is None else made.verdict.counts
    if as_json:
        seconds = round(time.monotonic() - began, 3)
        facts = {"store": upkeep.shown, "file": made.path, "bytes": made.bytes, "seconds": seconds}
        click.echo(json.dumps({**facts, "checked": made.verdict is not None, **counts}))
        return
    click.echo(f"{upkeep.shown} is copied to {made.path}: {_size(made.bytes)}")
    click.echo(f"checked: {_counted(counts)}, no faults" if counts else "not checked")


@click.command(short_help="Check everything in a store, also while servers use it.")
@click.option("--store", **_STORE)
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def check(store: str, as_json: bool) -> int:
    """Check everything in a store: what `perdure store check` looks at, then every record, event and answer.

    All of it is seen as of one moment. Servers may write meanwhile and do not wait. Nothing is changed.

    The status is 0 if the store is sound, 1 if it is not, and 2 if that cannot be told.
    """
    # What is logged of this is among the facts.
    logging.getLogger("perdure").addHandler(logging.NullHandler())
    upkeep = upkeep_of(store)
    facts, verdict = asyncio.run(_look(upkeep))
    problems = [fact.problem for fact in facts if fact.problem]
    faults = () if verdict is None else verdict.faults
    is_sound = not problems and not faults
    if as_json:
        values: dict[str, Any] = {fact.name: fact.value for fact in facts}
        found = [{"rule": fault.rule, "promise": _promise(fault), "where": fault.where} for fault in faults]
        values |= {} if verdict is None else {"counts": verdict.counts, "unnamed": list(verdict.unnamed)}
        click.echo(
            json.dumps({"store": upkeep.shown, "sound": is_sound, **values, "problems": problems, "faults": found})
        )
    else:
        for line in _lines(upkeep.shown, facts, verdict):
            click.echo(line)
    return 0 if is_sound else UNSOUND


async def _look(upkeep: Upkeep) -> tuple[list[Fact], Verdict | None]:
    """What a server would find, and, where it would find a store that it can read, all that is in it."""
    facts = list(await upkeep.check())
    is_readable = any(fact.name == "version" and fact.value == upkeep.latest for fact in facts)
    return facts, await upkeep.verify() if is_readable else None


def _lines(shown: str, facts: list[Fact], verdict: Verdict | None) -> list[str]:
    lines = [f"{'store':<8}  {shown}", *(f"{fact.name:<8}  {fact.says or fact.value}" for fact in facts)]
    lines += [f"problem   {fact.problem}" for fact in facts if fact.problem]
    if verdict is None:
        return [*lines, "sound     no: it was not checked further"]
    if verdict.counts:
        lines.append(f"holds     {_counted(verdict.counts)}")
    for fault in verdict.faults:
        promise = _promise(fault)
        lines.append(f"fault     {fault.where} ({fault.rule}{f', promise {promise}' if promise else ''})")
    lines += [f"fault     … and more of the rule {rule}: {_rule(rule)}" for rule in verdict.unnamed]
    number = len(verdict.faults)
    says = f"no: {number} fault{'s' if number != 1 else ''}" if number else "yes"
    return [*lines, f"sound     {'no' if any(fact.problem for fact in facts) and not number else says}"]


def _promise(fault: Fault) -> int | None:
    rule = INVARIANTS.get(fault.rule)
    return rule.promise or None if rule is not None else None


def _rule(name: str) -> str:
    rule = INVARIANTS.get(name)
    return rule.says if rule is not None else "SQLite can read every page"


class Progress:
    """Shows how far a command is, on a terminal."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._shows = sys.stderr.isatty()
        self._monotonic = monotonic
        self._shown = 0.0

    def copied(self, done: int, total: int) -> None:
        self._show(f"copied {_size(done)} of {_size(total)}")

    def _show(self, says: str) -> None:
        if self._shows and self._monotonic() - self._shown >= SHOWN:
            self._shown = self._monotonic()
            click.echo(f"\r{says:<60}", nl=False, err=True)

    def end(self) -> None:
        if self._shown:
            click.echo(f"\r{'':<60}\r", nl=False, err=True)


def _size(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _counted(counts: Any) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())
