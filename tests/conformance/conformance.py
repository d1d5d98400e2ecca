"""Run the official MCP conformance suite against a server and count what it says.

    python -m tests.conformance.conformance                       every run, `perdure serve`
    python -m tests.conformance.conformance 2025-11-25            one run
    python -m tests.conformance.conformance --serve "COMMAND"     another server that prints the same ready line

A run is a revision; or the scenarios of the tasks extension, which belong to no revision and are run by their names; or
2026-07-28 once more with every tool call on the log, with a key or as a task (`on_the_log`); or one of these with the
server behind Perdure as a gateway, over stdio or HTTP, where one check less succeeds at 2025-11-25: its tool closes its
own connection (SEP-1699), which it cannot through a gateway. `stdio-` and `http-` pass 2026-07-28 through, `session-`
translates it.

The suite's own verdict overlooks warnings, and checks that fall silent: a server that refuses to resume, for instance,
earns a remark (INFO) instead of a failure. So here a warning counts unless `ALLOWED` says why not, and a run needs as
many successes as it has had.

What a pass does not show: at 2025-06-18 the suite runs that revision's scenarios, but its client asks for 2025-11-25 in
all sessions except two; and 2025-03-26 has a single scenario. What each revision changes on the wire needs tests of our
own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mcp.server.mcpserver import MCPServer

import perdure
from perdure import Settings
from perdure.serve.target import load_target
from tests.conformance.on_the_log import Gateway, WithKeys, WithTasks
from tests.support.processes.node_programs import node_modules, program
from tests.support.processes.serving import ROOT, SERVE, serving
from tests.support.processes.starting import stand_ins
from tests.support.servers.in_process import under_uvicorn
from tests.support.stores.shared_store import SharedStore

HERE = Path(__file__).parent
EVERYTHING = f"{ROOT / 'examples' / 'everything.py'}:server"
UPSTREAM = "tests.conformance.upstream"
STATUSES = ("SUCCESS", "FAILURE", "WARNING", "INFO", "SKIPPED")

#: Warnings we accept: the check's id, and the reason. None so far.
ALLOWED: Mapping[str, str] = {}

#: The suite's client asks `server/discover` for 2026-07-28, and mostly declares no tasks: by default (`--eras auto`)
#: such a client is led to a session on purpose, and its scenarios would not be about 2026-07-28 any more.
BOTH = ("--eras", "both")

#: The tools of the scenarios for tasks work for a second, and those that have to be tasks say so or take longer.
TASKS = (*BOTH, "--task-after", "500ms")

#: Which tools run as tasks, said by the operator: at 2026-07-28 the SDK does not list it.
RULES = tuple(f"--task={rule}" for rule in ("greet=never", "failing_job=required", "protocol_error_job=required"))

#: The tools of these scenarios ask in the middle of their work. In this process Perdure takes the questions; the SDK's
#: own server has no way for them at 2026-07-28.
ASKS_IN_A_TASK = dict.fromkeys(
    (
        "sep-2663-tasks-get-status-input-required",
        "tasks-mrtr-tasks-update-resumes",
        "tasks-mrtr-partial-fulfillment",
        "tasks-result-type-complete-on-non-task-responses",
    ),
    "the upstream refuses to ask within a call",
)

STARTS_A_PROCESS = {
    "sep-2575-http-server-no-independent-requests-on-stream": "the suite waits 0.6 s; a process has to start",
}

#: All scenarios of a revision together; they take about three seconds on an idle machine.
SUITE_SECONDS = 100

#: Scenarios that are put to the server at once where each takes a process of its own: they wait more than they work.
AT_ONCE = 4

TASK_SCENARIOS = (
    "tasks-lifecycle",  # takes longest
    "tasks-capability-negotiation",
    "tasks-wire-fields",
    "tasks-request-state-removal",
    "tasks-mrtr-input",
    "tasks-request-headers",
    "tasks-dispatch-and-envelope",
    "tasks-status-notifications",
    "tasks-required-task-error",
    "tasks-mrtr-composition",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to put the suite to the server."""

    successes: int
    """With the pinned suite and `examples/everything.py`."""
    version: str = ""
    """The revision whose scenarios are run."""
    scenarios: Sequence[str] = ()
    """What is run in place of a revision's."""
    skipped: int = 0
    """Checks that the suite leaves out by itself."""
    options: Sequence[str] = ()
    """Of `perdure serve`."""
    gateway: type[Gateway] | None = None
    """Stands between the suite and the server."""
    upstream: str = ""
    """The server is another process, behind Perdure as a gateway: of which kind (`upstream.py`)."""
    era: str = "auto"
    """Spoken to a server over stdio, which has both."""
    excused: Mapping[str, str] = field(default_factory=dict)
    """Checks that must fail in this way, or warn: their ids, and the reasons."""
    timed: Mapping[str, str] = field(default_factory=dict)
    """Checks that may fail on a busy machine: their ids, and the reasons."""


RUNS: Mapping[str, Run] = {
    "2025-03-26": Run(successes=3, version="2025-03-26"),
    "2025-06-18": Run(successes=56, version="2025-06-18"),
    "2025-11-25": Run(successes=84, version="2025-11-25"),
    "2026-07-28": Run(successes=152, version="2026-07-28", options=BOTH),
    "tasks": Run(successes=44, skipped=1, scenarios=TASK_SCENARIOS, options=TASKS),
    "with-keys": Run(successes=152, version="2026-07-28", gateway=WithKeys),
    "with-tasks": Run(
        successes=151,
        version="2026-07-28",
        gateway=WithTasks,
        excused={"tools-call-with-progress": "a client that has a handle gets no messages on its call's response"},
    ),
    "stdio-2025-03-26": Run(successes=3, version="2025-03-26", upstream="stdio"),
    "stdio-2025-06-18": Run(successes=56, version="2025-06-18", upstream="stdio"),
    "stdio-2025-11-25": Run(successes=83, version="2025-11-25", upstream="stdio"),
    "stdio-2026-07-28": Run(
        successes=151, version="2026-07-28", upstream="stdio", options=BOTH, timed=STARTS_A_PROCESS
    ),
    "stdio-tasks": Run(
        successes=40,
        skipped=1,
        scenarios=TASK_SCENARIOS,
        upstream="stdio",
        options=(*TASKS, *RULES),
        excused=ASKS_IN_A_TASK,
    ),
    "http-2026-07-28": Run(successes=152, version="2026-07-28", upstream="modern", options=BOTH),
    "http-tasks": Run(
        successes=40,
        skipped=1,
        scenarios=TASK_SCENARIOS,
        upstream="modern",
        options=(*TASKS, *RULES),
        excused=ASKS_IN_A_TASK,
    ),
    "session-2026-07-28": Run(
        successes=138,
        version="2026-07-28",
        upstream="stdio",
        era="session",
        options=BOTH,
        excused={
            **dict.fromkeys(
                (
                    "sep-2322-elicitation-incomplete",
                    "sep-2322-respect-client-capabilities",
                    "sep-2322-non-tool-incomplete",
                    "sep-2322-request-state-incomplete",
                    "sep-2322-result-type-included",
                    "sep-2322-missing-response-rerequests",
                ),
                "the tool returns `input_required` itself, which the upstream refuses in a session",
            ),
            "sep-2322-multi-round-r2": "the state of a round is the gateway's: the upstream waits for one answer",
            "sep-2322-multiple-inputs-incomplete": "in a session a server asks one thing after the other",
        },
        timed=STARTS_A_PROCESS,
    ),
    "session-tasks": Run(
        successes=43,
        skipped=1,
        scenarios=TASK_SCENARIOS,
        upstream="stdio",
        era="session",
        options=TASKS,
        excused={
            "sep-2663-mrtr-synchronous-before-task-creation": "in a session the upstream asks within the call, so the "
            "task is there before",
        },
    ),
    "http-2025-11-25": Run(successes=83, version="2025-11-25", upstream="sessions"),
    "http-modern-2025-11-25": Run(successes=83, version="2025-11-25", upstream="modern"),
}


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
    """What the suite says in one run."""

    run: str
    checks: tuple[Check, ...]
    results: int = 0
    """Tool calls that had a result, as the gateway of the run saw it."""
    logged: int = 0
    """Tool calls that went on the log."""

    @property
    def counts(self) -> Counter[str]:
        return Counter(check.status for check in self.checks)

    def objections(self, *, allowed: Mapping[str, str] = ALLOWED) -> list[str]:
        """What must not be overlooked."""
        run = RUNS[self.run]
        warned = [check for check in self.checks if check.status == "WARNING" and check.name not in allowed]
        failed = [check for check in self.checks if check.status == "FAILURE"] + warned
        found = [str(check) for check in failed if check.name not in {*run.excused, *run.timed}]
        passes = set(run.excused) - {check.name for check in failed}
        found += [f"{name} passes, and needs no excuse" for name in sorted(passes)]
        counts = self.counts
        if counts["SUCCESS"] < run.successes:
            found.append(f"only {counts['SUCCESS']} successes; {self.run} has {run.successes}")
        if counts["SKIPPED"] > run.skipped:
            found.append(f"{counts['SKIPPED']} checks were skipped; {self.run} skips {run.skipped}")
        if run.gateway is not None and not 0 < self.results <= self.logged:
            found.append(f"{self.results} calls had a result, but {self.logged} calls were on the log")
        return found


async def examine(name: str, *, serve: Sequence[str] = SERVE) -> Report:
    """Start the everything server, put the scenarios of a run to it, stop it."""
    run = RUNS[name]
    if run.gateway is not None:
        return await _examine_behind(run.gateway, name)
    async with target_of(run) as target, serving(target, "--store", "memory:", *run.options, argv=serve) as served:
        return Report(run=name, checks=await run_suite(served.url, run))


@asynccontextmanager
async def target_of(run: Run) -> AsyncIterator[str]:
    """The argument of `perdure serve` that names the server."""
    if not run.upstream:
        yield EVERYTHING
    elif run.upstream == "stdio":
        with tempfile.TemporaryDirectory() as folder:
            async with stand_ins(Path(folder)) as python:
                command, *arguments = *python, UPSTREAM, run.upstream
                # The suite gives a call 0.6 s in which a process would have to start, unless one is there.
                server = {
                    "command": command,
                    "args": arguments,
                    "cwd": str(ROOT),
                    "perdure": {"warm": 1, "era": run.era},
                }
                servers = Path(folder) / "servers.json"
                servers.write_text(json.dumps({"mcpServers": {"everything": server}}))
                yield f"--servers={servers}"
    else:
        async with serving(run.upstream, argv=(sys.executable, "-m", UPSTREAM)) as served:
            yield served.url


async def _examine_behind(kind: type[Gateway], name: str) -> Report:
    """The same in this process, with a gateway in front of the server, on a log in a file."""
    server = load_target(EVERYTHING)
    assert isinstance(server, MCPServer)
    # A busy machine is no failing store.
    settings = Settings(eras="both", tasks=("*=optional",), task_after=0, store_timeout=20.0)
    with tempfile.TemporaryDirectory() as folder:
        store = SharedStore(f"{folder}/log.db")
        app = perdure.asgi(server, store=store, settings=settings)
        gateway = kind(app)
        middleware = server.session_manager.app.middleware
        middleware.append(gateway.on_tool)
        try:
            async with under_uvicorn(gateway) as port:
                checks = await run_suite(f"http://127.0.0.1:{port}{app.path}", RUNS[name])
                logged = await gateway.logged(store)
                app.begin_stop()
        finally:
            middleware.remove(gateway.on_tool)
    return Report(run=name, checks=checks, results=gateway.results, logged=logged)


async def run_suite(url: str, run: Run) -> tuple[Check, ...]:
    if not run.scenarios:
        return await _run_suite(url, "--suite", "all", "--spec-version", run.version)
    turns = asyncio.Semaphore(AT_ONCE)

    async def in_turn(scenario: str) -> tuple[Check, ...]:
        async with turns:
            return await _run_suite(url, "--scenario", scenario)

    return tuple(itertools.chain(*await asyncio.gather(*map(in_turn, run.scenarios))))


async def _run_suite(url: str, *scenarios: str) -> tuple[Check, ...]:
    suite = HERE / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    with tempfile.TemporaryDirectory() as results:
        process = await asyncio.create_subprocess_exec(
            program("node"),
            suite,
            *("server", "--url", url, *scenarios, "--output-dir", results),
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
    rows = [("run", list(STATUSES))]
    rows += [(report.run, [str(report.counts[status]) for status in STATUSES]) for report in reports]
    rows += [("total", [str(total[status]) for status in STATUSES])]
    return "\n".join(f"{title:<24}" + "".join(f"{cell:>9}" for cell in cells) for title, cells in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="conformance", description="The MCP conformance suite, counted strictly.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--serve", type=shlex.split, default=SERVE, metavar="COMMAND", help="what starts the server")
    wanted = parser.parse_args(arguments)
    if unknown := set(wanted.runs) - set(RUNS):
        parser.error(f"unknown run: {', '.join(sorted(unknown))}")
    # Only Perdure can be put behind a gateway, or be one.
    mine = wanted.serve == SERVE
    names = wanted.runs or [name for name, run in RUNS.items() if mine or not (run.gateway or run.upstream)]
    node_modules(HERE)
    logging.basicConfig(handlers=[logging.NullHandler()])  # the SDK would show every record of a server in this process
    reports = [asyncio.run(examine(name, serve=wanted.serve)) for name in names]
    print(table(reports))
    objections = [objection for report in reports for objection in report.objections()]
    print("\n".join(objections) or "No objection.")
    return 1 if objections else 0


if __name__ == "__main__":
    sys.exit(main())
