"""The official suite's client scenarios pass with `perdure.connect`, as many as with the official client (B1–B8)."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.conformance.conformance import HERE
from tests.support.processes.node_programs import node_modules, program
from tests.support.processes.starting import python_path, stand_ins

#: Of the official client, with the pinned suite and the same program (`client_program.py --stock`), by revision: the
#: checks that succeed, and those that the suite skips because the program does not do what they are about.
OFFICIAL = {"2025-11-25": (247, 0), "2026-07-28": (384, 10)}
#: The suite starts nineteen clients at once.
CLIENT_SECONDS = 240


async def run_suite(results: Path, version: str, *options: str) -> str:
    """Put the client scenarios to our program; what the suite says."""
    suite = node_modules(HERE) / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
    async with stand_ins(results) as python:
        command = " ".join([*python, "tests.conformance.client_program", *options])
        process = await asyncio.create_subprocess_exec(
            *(program("node"), "--require", HERE / "loopback.cjs", suite, "client", "--command", command),
            *("--suite", "all", "--spec-version", version, "--timeout", str(CLIENT_SECONDS * 1000)),
            *("--output-dir", results / "checks"),
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return output.decode()


def read_all(results: Path) -> dict[Path, list[dict[str, str]]]:
    return {file: json.loads(file.read_text()) for file in results.rglob("checks.json")}


@pytest.mark.anyio
@pytest.mark.timeout(600)  # the first run on a machine installs the suite
@pytest.mark.parametrize("version", ["2025-11-25", pytest.param("2026-07-28", marks=pytest.mark.long)])
async def test_the_client_scenarios_pass(tmp_path: Path, version: str) -> None:
    """`sse-retry` (B7) among them, where there are sessions."""
    is_modern = version == "2026-07-28"
    output = await run_suite(tmp_path, version, *(["--modern"] if is_modern else []))
    checks = read_all(tmp_path)
    counts = Counter(check["status"] for found in checks.values() for check in found)
    success, skipped = OFFICIAL[version]
    assert (counts["FAILURE"], counts["WARNING"], counts["SKIPPED"]) == (0, 0, skipped), output
    assert counts["SUCCESS"] >= success, output
    assert any("sse-retry" in str(file) for file in checks) != is_modern
