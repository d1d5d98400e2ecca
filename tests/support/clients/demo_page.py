"""The page of the demo, built for tests."""

from __future__ import annotations

import fcntl
import subprocess

from examples.front import PAGE, SCRIPT

from tests.support.clients.chromium import PACKAGE
from tests.support.processes.node_programs import node_modules, program


def have_page() -> None:
    """Build the demo's page, unless it is built of these sources."""
    build = PACKAGE / "build.mjs"
    with build.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes come here at once
        sources = (build, *(PACKAGE / "src").rglob("*"), *PAGE.glob("*.ts"))
        newest = max(source.stat().st_mtime for source in sources)
        if not SCRIPT.exists() or SCRIPT.stat().st_mtime < newest:
            node_modules(PACKAGE)
            subprocess.run([program("node"), build], check=True, capture_output=True, timeout=110)
