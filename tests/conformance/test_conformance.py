"""The official conformance suite passes at every revision we serve (P7, P8; A9, A10, A14, A22, A24, A25)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.conformance import HERE, RUNS, Check, Report, examine, read_checks
from tests.support.processes.node_programs import node_modules

#: The runs of `make test`: the newest revision with sessions and the one without, and through the gateway the first of
#: these by each transport, the other and the tasks to a server with sessions only. Each takes 4 to 11 s of a processor.
SOON = ("2025-11-25", "2026-07-28", "http-2025-11-25", "stdio-2025-11-25", "session-2026-07-28", "session-tasks")


@pytest.fixture(scope="session")
def suite() -> Path:
    return node_modules(HERE)


@pytest.mark.anyio
@pytest.mark.timeout(400)  # the first run on a machine installs the suite
@pytest.mark.parametrize("run", [run if run in SOON else pytest.param(run, marks=pytest.mark.long) for run in RUNS])
async def test_the_suite_has_no_objection(run: str, suite: Path) -> None:
    """G38."""
    report = await examine(run)
    assert report.objections() == []


def a_report(*checks: Check, run: str = "2025-03-26", results: int = 0, logged: int = 0) -> Report:
    """Checks on top of all the successes that the run needs."""
    successes = tuple(Check(scenario="s", name="fine", status="SUCCESS") for _ in range(RUNS[run].successes))
    return Report(run=run, checks=(*successes, *checks), results=results, logged=logged)


def test_a_failure_is_an_objection() -> None:
    failure = Check(scenario="ping", name="ping-answered", status="FAILURE", message="no answer")
    assert a_report(failure).objections() == ["FAILURE ping: ping-answered: no answer"]


def test_a_warning_is_an_objection_until_it_is_allowed() -> None:
    report = a_report(Check(scenario="polling", name="retry-field", status="WARNING", message="no retry"))
    assert report.objections() == ["WARNING polling: retry-field: no retry"]
    assert report.objections(allowed={"retry-field": "a reason"}) == []


def test_checks_that_fall_silent_are_an_objection() -> None:
    silent = Report(run="2025-11-25", checks=(Check(scenario="polling", name="resume", status="INFO"),))
    assert silent.objections() == [f"only 0 successes; 2025-11-25 has {RUNS['2025-11-25'].successes}"]


def test_a_check_is_skipped_only_where_the_suite_does_that_by_itself() -> None:
    skipped = Check(scenario="tasks-status-notifications", name="listen", status="SKIPPED")
    assert a_report(skipped, run="tasks").objections() == []
    assert a_report(skipped).objections() == ["1 checks were skipped; 2025-03-26 skips 0"]


def test_an_excuse_holds_in_its_own_run_and_for_a_check_that_fails() -> None:
    [name] = RUNS["with-tasks"].excused
    failure = Check(scenario="tools", name=name, status="FAILURE", message="none came")
    assert a_report(failure, run="with-tasks", results=1, logged=1).objections() == []
    assert a_report(failure).objections() == [f"FAILURE tools: {name}: none came"]
    unused = a_report(run="with-tasks", results=1, logged=1)
    assert unused.objections() == [f"{name} passes, and needs no excuse"]


def test_a_check_that_may_be_late_may_fail_and_may_pass() -> None:
    run = "stdio-2026-07-28"
    excused = [Check(scenario="s", name=name, status="FAILURE") for name in RUNS[run].excused]
    [name] = RUNS[run].timed
    assert a_report(*excused, run=run).objections() == []
    assert a_report(*excused, Check(scenario="s", name=name, status="FAILURE"), run=run).objections() == []


def test_a_call_that_was_not_on_the_log_is_an_objection() -> None:
    assert a_report(run="with-keys", results=36, logged=36).objections() == []
    for results, logged in ((36, 35), (0, 0)):
        told = f"{results} calls had a result, but {logged} calls were on the log"
        assert a_report(run="with-keys", results=results, logged=logged).objections() == [told]


def test_checks_are_read_with_the_scenario_they_belong_to(tmp_path: Path) -> None:
    folder = tmp_path / "server-server-sse-polling-2026-01-31T08-53-27-227Z"
    folder.mkdir()
    check = {"id": "server-sse-retry-field", "status": "WARNING", "errorMessage": "no retry"}
    (folder / "checks.json").write_text(json.dumps([check]))
    assert read_checks(tmp_path) == (
        Check(scenario="server-sse-polling", name="server-sse-retry-field", status="WARNING", message="no retry"),
    )


def test_the_lock_file_holds_no_address() -> None:
    assert "://" not in (HERE / "package-lock.json").read_text()
