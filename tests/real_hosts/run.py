"""Play the scenarios with real hosts: `make hosts`, or `python -m tests.real_hosts.run [HOST …] [--scenario NAME …]`.

Ends with status 1 if a scenario ended with neither a result nor -31001, and the host's file names no limit of its own.
A host that cannot be installed is reported and left out; its earlier results stay.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib
import json
import pkgutil
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.real_hosts import hosts
from tests.real_hosts.host import Host
from tests.real_hosts.installing import BUILD, NotInstalled, install
from tests.real_hosts.model_apis import call_id
from tests.real_hosts.scenarios import EARLY, PLAIN, SCENARIOS, Scenario, outcome
from tests.real_hosts.stage import stage

RESULTS = Path(__file__).with_name("results")
#: Seconds for a scenario. A host that has shown nothing by then hangs; the limits that hosts set themselves end sooner.
PATIENCE = 180
#: What Claude Code adds to a result says nothing of the call.
_BUDGET = re.compile(r"\s*<system-reminder>\s*<total_tokens>.*?</system-reminder>", re.DOTALL)


async def play(host: Host, installed: Path, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """One scenario with one host: what was seen."""
    tools = list(scenario.tools)
    rules = ("--answer-within", f"{host.client}={EARLY}") if scenario.early else ()
    options = (*host.options, *rules)
    async with stage(folder, installed, host, tools, is_stdio=scenario.is_stdio, options=options) as here:
        await here.start_host(asks=scenario is SCENARIOS["question"])
        story = asyncio.create_task(scenario.story(here))
        seen = asyncio.create_task(here.model.has_seen(len(tools)))
        ended = asyncio.create_task(here.host_ended())
        await asyncio.wait([seen, ended], return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
        has_ended = ended.done()
        for task in (story, seen, ended):
            task.cancel()
        await asyncio.gather(seen, ended, return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            await story
        shown = here.model.shown.get(call_id(len(tools)))
        caller = here.caller()
        return {
            "part": scenario.part,
            "title": scenario.title,
            "version": host.version,
            "date": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
            "outcome": outcome(scenario, shown, caller, has_ended=has_ended),
            "began": here.runs(),
            "shown": _BUDGET.sub("", shown or "").replace(str(folder), "FOLDER")[:500],
            "caller": caller,
        }


async def play_all(key: str, host: Host, names: list[str], at_once: int) -> list[str]:
    """Play these scenarios, write what was seen; gives what nobody can go on from and no limit explains."""
    installed = install(host)
    room = asyncio.Semaphore(at_once)
    file = RESULTS / f"{key}.json"
    before = json.loads(file.read_text()) if file.exists() else {}

    async def one(name: str) -> tuple[str, dict[str, Any]]:
        async with room:
            folder = Path(tempfile.mkdtemp(prefix=f"{key}-{name}-"))
            seen = await play(host, installed, SCENARIOS[name], folder)
        print(f"{host.name}, {name}: {seen['outcome']} ({seen['began']})", file=sys.stderr)
        if is_explained(host, name, seen["outcome"]):
            shutil.rmtree(folder)
        else:
            print(f"    what was written is in {folder}", file=sys.stderr)
        return name, seen

    played = dict(await asyncio.gather(*(one(name) for name in names)))
    result = merged(host, before, played)
    file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    cells = {name: seen["outcome"] for name, seen in result["seen"].items()}
    return [f"{host.name}, {name}: {cell}" for name, cell in cells.items() if not is_explained(host, name, cell)]


def merged(host: Host, before: dict[str, Any], played: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results of a host: what was played, and what was seen of this version before."""
    if before.get("version") != host.version:
        before = {"seen": {}, "caller": {}}
    direct = [seen["caller"] for name, seen in played.items() if seen["caller"] and not SCENARIOS[name].is_stdio]
    known = {**before["seen"], **played}
    seen = {name: dict(known[name]) for name in SCENARIOS if name in known and name not in host.left_out}
    for name, each in seen.items():
        each.pop("caller", None)
        each["limit"] = None if each["outcome"] in PLAIN else host.own_limits.get(name)
    package = next(iter(host.packages))
    return {
        "host": host.name,
        "package": package.partition("[")[0],
        "version": host.version,
        "caller": direct[0] if direct else before["caller"],
        "seen": seen,
        "left_out": dict(host.left_out),
    }


def is_explained(host: Host, name: str, outcome: str) -> bool:
    """Whether a model can go on from the outcome, or a limit of the host's own explains it."""
    return outcome in PLAIN or name in host.own_limits


def known_hosts() -> dict[str, Host]:
    """The host of each file in `hosts`, by the file's name."""
    names = [module.name for module in pkgutil.iter_modules(hosts.__path__)]
    return {name: importlib.import_module(f"{hosts.__name__}.{name}").HOST for name in names}


def main() -> int:
    known = known_hosts()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", metavar="HOST", help=", ".join(known))
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="only this one; may be repeated")
    parser.add_argument("--at-once", type=int, default=3, help="scenarios that run at the same time")
    arguments = parser.parse_args()
    if unknown := set(arguments.hosts) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    unexplained = []
    for key in arguments.hosts or known:
        host = known[key]
        names = [name for name in arguments.scenario or SCENARIOS if name not in host.left_out]
        try:
            # The servers' own words, which `serving` prints for pytest to show.
            with (BUILD / "servers.log").open("a") as log, contextlib.redirect_stdout(log):
                unexplained += asyncio.run(play_all(key, host, names, arguments.at_once))
        except NotInstalled as why:
            print(f"hosts: left out, because it could not be installed: {why}", file=sys.stderr)
    for line in unexplained:
        print(f"hosts: neither a result nor -31001, and no limit of the host's own is named: {line}", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
