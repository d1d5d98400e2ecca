"""The npm package: its unit tests, its build and its size, in a copy that has no repository around it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.clients.chromium import PACKAGE
from tests.support.processes.node_programs import node_modules, program

#: Bytes gzipped: what a page pays for sessions that last, and for calls that last without them.
MOST = 10_200


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("outside") / "browser"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("node_modules", "dist", "build"))
    (copy / "node_modules").symlink_to(node_modules(PACKAGE))
    return copy


def run(package: Path, script: str, *options: str) -> str:
    done = subprocess.run([program("node"), package / script, *options], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_units(package: Path) -> None:
    found = re.search(r"(?:#|ℹ) pass (\d+)", run(package, "test.mjs"))
    assert found is not None
    assert int(found[1]) > 50


def test_it_builds_and_stays_small(package: Path) -> None:
    found = re.fullmatch(r"perdure.js: (\d+) bytes gzipped\n", run(package, "build.mjs"))
    assert found is not None
    assert int(found[1]) <= MOST


@pytest.mark.long
def test_it_builds_with_its_types(package: Path) -> None:
    run(package, "build.mjs", "--types")
    assert "PerdureTransport" in (package / "dist" / "types" / "index.d.ts").read_text()
