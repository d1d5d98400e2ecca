"""The official conformance suite passes at every revision we serve (P7, P8; A9, A10, A14, A22, A24, A25)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.conformance import EXPECTED, HERE, Check, Report, examine, read_checks
from tests.support.node import node_modules


@pytest.fixture(scope="session")
def suite() -> Path:
    return node_modules(HERE)


@pytest.mark.anyio
@pytest.mark.timeout(400)  # the first run on a machine installs the suite
@pytest.mark.parametrize("version", EXPECTED)
async def test_the_suite_has_no_objection(version: str, suite: Path) -> None:
    report = await examine(version)
    assert report.objections() == []


def a_report(*checks: Check) -> Report:
    """Checks on top of all the successes that the revision needs."""
    successes = tuple(Check(scenario="s", name="fine", status="SUCCESS") for _ in range(EXPECTED["2025-03-26"]))
    return Report(version="2025-03-26", checks=(*successes, *checks))


def test_a_failure_is_an_objection() -> None:
    failure = Check(scenario="ping", name="ping-answered", status="FAILURE", message="no answer")
    assert a_report(failure).objections() == ["FAILURE ping: ping-answered: no answer"]


def test_a_warning_is_an_objection_until_it_is_allowed() -> None:
    report = a_report(Check(scenario="polling", name="retry-field", status="WARNING", message="no retry"))
    assert report.objections() == ["WARNING polling: retry-field: no retry"]
    assert report.objections(allowed={"retry-field": "a reason"}) == []


def test_checks_that_fall_silent_are_an_objection() -> None:
    silent = Report(version="2025-11-25", checks=(Check(scenario="polling", name="resume", status="INFO"),))
    assert silent.objections() == [f"only 0 successes; 2025-11-25 has {EXPECTED['2025-11-25']}"]


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
