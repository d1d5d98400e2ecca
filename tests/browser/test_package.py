"""The npm package: its unit tests, its build and its size."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.chromium import PACKAGE
from tests.support.node import node_modules, program

#: Bytes gzipped: what a page pays for sessions that last, and for calls that last without them.
MOST = 9500


@pytest.fixture(autouse=True)
def packages() -> Path:
    return node_modules(PACKAGE)


def run(script: str, *options: str) -> str:
    done = subprocess.run([program("node"), PACKAGE / script, *options], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_units() -> None:
    found = re.search(r"(?:#|ℹ) pass (\d+)", run("test.mjs"))
    assert found is not None
    assert int(found[1]) > 50


def test_it_builds_and_stays_small() -> None:
    found = re.fullmatch(r"perdure.js: (\d+) bytes gzipped\n", run("build.mjs", "--types"))
    assert found is not None
    assert int(found[1]) <= MOST
    assert "PerdureTransport" in (PACKAGE / "dist" / "types" / "index.d.ts").read_text()
