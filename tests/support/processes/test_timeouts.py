"""A test that waits for ever fails by its timeout, and the run continues."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.processes.serving import ROOT

pytestmark = pytest.mark.anyio

HANGS = """
import asyncio

import pytest

from tests import conftest

conftest.OWN_SHARE = 0.01

@pytest.fixture
async def opened():
    yield
    await asyncio.sleep(0)
    print("closed")

@pytest.mark.anyio
async def test_hangs(opened):
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up")

def test_next():
    pass
"""


async def test_a_test_that_hangs_fails_and_its_fixtures_are_closed(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGS)
    command = (
        "-p",
        "tests.conftest",
        "-p",
        "no:xdist",
        "--timeout=30",
        "--tb=no",
        "-s",
        "--rootdir",
        tmp_path,
        tmp_path,
    )
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    said = (await run.communicate())[0].decode()
    assert "1 failed, 1 passed" in said
    assert said.index("cleaned up") < said.index("closed")
