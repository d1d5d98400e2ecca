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
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.real_hosts import hosts
from tests.real_hosts.host import Host
from tests.real_hosts.installing import BUILD, NotInstalled, install
from tests.real_hosts.model_apis import call_id
from tests.real_hosts.scenarios import GOOD, SCENARIOS, Scenario, outcome
from tests.real_hosts.stage import stage

RESULTS = Path(__file__).with_name("results")
#: Seconds for a scenario. A host that has shown nothing by then hangs; the limits that hosts set themselves end sooner.
PATIENCE = 180


async def play(host: Host, installed: Path, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """One scenario with one host: what was seen."""
    tools = list(scenario.tools)
    async with stage(folder, installed, host, tools, is_stdio=scenario.is_stdio) as here:
        await here.start_host()
        story = asyncio.create_task(scenario.story(here))
        seen = asyncio.create_task(here.model.has_seen(len(tools)))
        ended = asyncio.create_task(here.host_ended())
        await asyncio.wait([seen, ended], return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
        has_ended = ended.done()
        for task in (story, seen, ended):
            task.cancel()
        await asyncio.gather(story, seen, ended, return_exceptions=True)
        shown = here.model.shown.get(call_id(len(tools)))
        return {
            "title": scenario.title,
            "stdio": scenario.is_stdio,
            "outcome": outcome(tools[-1], shown, has_ended=has_ended),
            "began": here.runs(),
            "shown": (shown or "").replace(str(folder), "FOLDER")[:500],
            "caller": here.caller(),
        }


async def play_all(key: str, host: Host, names: list[str], at_once: int) -> list[str]:
    """Play these scenarios, write what was seen; gives what nobody can go on from and no limit explains."""
    installed = install(host)
    room = asyncio.Semaphore(at_once)
    file = RESULTS / f"{key}.json"
    before = json.loads(file.read_text())["seen"] if file.exists() else {}

    async def one(name: str) -> tuple[str, dict[str, Any]]:
        async with room:
            folder = Path(tempfile.mkdtemp(prefix=f"{key}-{name}-"))
            seen = await play(host, installed, SCENARIOS[name], folder)
        print(f"{host.name}, {name}: {seen['outcome']} ({seen['began']})", file=sys.stderr)
        if seen["outcome"] in GOOD or host.own_limits.get(name):
            shutil.rmtree(folder)
        else:
            print(f"    what was written is in {folder}", file=sys.stderr)
        return name, seen

    played = dict(await asyncio.gather(*(one(name) for name in names)))
    caller = next((seen["caller"] for seen in played.values() if seen["caller"] and not seen["stdio"]), None)
    known: dict[str, dict[str, Any]] = {**before, **played}
    seen = {name: known[name] for name in SCENARIOS if name in known}
    for each in seen.values():
        each.pop("caller", None)
    for name, each in seen.items():
        each["limit"] = None if each["outcome"] in GOOD else host.own_limits.get(name)
    package = next(iter(host.packages))
    result = {
        "host": host.name,
        "package": package.partition("[")[0],
        "version": host.version,
        "date": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        "caller": caller or (json.loads(file.read_text())["caller"] if file.exists() else {}),
        "seen": seen,
    }
    file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    bad = [name for name, each in seen.items() if each["outcome"] not in GOOD and not each["limit"]]
    return [f"{host.name}, {name}: {seen[name]['outcome']}" for name in bad]


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
        names = [name for name in arguments.scenario or SCENARIOS if host.asks or name != "question"]
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
