"""Run the official MCP conformance suite against a server and count what it says.

    python -m tests.conformance.conformance                       every revision, `perdure serve`
    python -m tests.conformance.conformance 2025-11-25            one revision
    python -m tests.conformance.conformance --serve "COMMAND"     another server that prints the same ready line

The suite's own verdict overlooks warnings, and checks that fall silent: a server that refuses to resume, for instance,
earns a remark (INFO) instead of a failure. So here a warning counts unless `ALLOWED` says why not, and a revision needs
as many successes as it has had (`EXPECTED`).

What a pass does not show: at 2025-06-18 the suite runs that revision's scenarios, but its client asks for 2025-11-25 in
all sessions except two; and 2025-03-26 has a single scenario. What each revision changes on the wire needs tests of our
own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.node import node_modules, program
from tests.support.serving import ROOT, SERVE, serving

HERE = Path(__file__).parent
EVERYTHING = f"{ROOT / 'examples' / 'everything.py'}:server"
STATUSES = ("SUCCESS", "FAILURE", "WARNING", "INFO", "SKIPPED")

#: Successes of each revision with the pinned suite and `examples/everything.py`.
EXPECTED: Mapping[str, int] = {"2025-03-26": 3, "2025-06-18": 56, "2025-11-25": 84, "2026-07-28": 152}

#: Warnings we accept: the check's id, and the reason. None so far.
ALLOWED: Mapping[str, str] = {}

#: All scenarios of a revision together; they take about three seconds on an idle machine.
SUITE_SECONDS = 100


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statement of the suite about the server."""

    scenario: str
    name: str
    status: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.status} {self.scenario}: {self.name}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the suite says about one revision."""

    version: str
    checks: tuple[Check, ...]

    @property
    def counts(self) -> Counter[str]:
        return Counter(check.status for check in self.checks)

    def objections(self, *, allowed: Mapping[str, str] = ALLOWED) -> list[str]:
        """What must not be overlooked."""
        found = [
            str(check)
            for check in self.checks
            if check.status == "FAILURE" or (check.status == "WARNING" and check.name not in allowed)
        ]
        successes, expected = self.counts["SUCCESS"], EXPECTED[self.version]
        if successes < expected:
            found.append(f"only {successes} successes; {self.version} has {expected}")
        return found


async def examine(version: str, *, serve: Sequence[str] = SERVE) -> Report:
    """Start the everything server, put one revision's scenarios to it, stop it."""
    async with serving(EVERYTHING, "--store", "memory:", argv=serve) as served:
        return Report(version=version, checks=await run_suite(served.url, version))


async def run_suite(url: str, version: str) -> tuple[Check, ...]:
    suite = HERE / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    with tempfile.TemporaryDirectory() as results:
        options = ("--url", url, "--suite", "all", "--spec-version", version, "--output-dir", results)
        process = await asyncio.create_subprocess_exec(
            program("node"),
            suite,
            "server",
            *options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(SUITE_SECONDS):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        checks = read_checks(Path(results))
    failed = any(check.status == "FAILURE" for check in checks)
    if not checks or (process.returncode and not failed):
        raise RuntimeError(f"the suite ended with status {process.returncode}:\n{output.decode()}")
    return checks


def read_checks(results: Path) -> tuple[Check, ...]:
    """All checks below the suite's output folder, which has one folder for each scenario."""
    return tuple(
        Check(
            scenario=_scenario(file.parent.name),
            name=check["id"],
            status=check["status"],
            message=check.get("errorMessage", ""),
        )
        for file in sorted(results.glob("*/checks.json"))
        for check in json.loads(file.read_text())
    )


def _scenario(folder: str) -> str:
    return re.sub(r"-\d{4}-\d\d-\d\dT[\d-]+Z$", "", folder.removeprefix("server-"))


def table(reports: Sequence[Report]) -> str:
    total = sum((report.counts for report in reports), Counter[str]())
    rows = [("revision", list(STATUSES))]
    rows += [(report.version, [str(report.counts[status]) for status in STATUSES]) for report in reports]
    rows += [("total", [str(total[status]) for status in STATUSES])]
    return "\n".join(f"{title:<12}" + "".join(f"{cell:>9}" for cell in cells) for title, cells in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="conformance", description="The MCP conformance suite, counted strictly.")
    parser.add_argument("versions", nargs="*", metavar="REVISION", help=f"of {', '.join(EXPECTED)}; all by default")
    parser.add_argument("--serve", type=shlex.split, default=SERVE, metavar="COMMAND", help="what starts the server")
    wanted = parser.parse_args(arguments)
    if unknown := set(wanted.versions) - set(EXPECTED):
        parser.error(f"unknown revision: {', '.join(sorted(unknown))}")
    node_modules(HERE)
    reports = [asyncio.run(examine(version, serve=wanted.serve)) for version in wanted.versions or EXPECTED]
    print(table(reports))
    objections = [objection for report in reports for objection in report.objections()]
    print("\n".join(objections) or "No objection.")
    return 1 if objections else 0


if __name__ == "__main__":
    sys.exit(main())
