"""The commands behind `make` say what they do, and why they cannot: no step is silent, no dead page is offered."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.serving import ROOT
from tests.support.processes.starting_sync import start

SECONDS = 110

INVITE = """\
from examples.demo import Terminal, invite
from examples.front import SCRIPT, Front
front = Front(0, upstream=str, stock="", restart=str)
invite(front, Terminal())
print("---")
SCRIPT.parent.mkdir()
SCRIPT.touch()
invite(front, Terminal())
front.stop()
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # The tests may run below `make test`, and a make below another one says more.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment is made, and in which no page was built."""
    for name in ("Makefile", "scripts/browser", "clients/browser/package.json", "clients/browser/package-lock.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("dist", "__pycache__"))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / "scripts" / "setup").touch()
    (tmp_path / ".venv" / "ready").touch()
    return tmp_path


def test_a_page_that_cannot_be_built_is_told_with_the_error_of_npm(checkout: Path) -> None:
    package = checkout / "clients" / "browser" / "package.json"
    wanted = json.loads(package.read_text())
    wanted["devDependencies"]["no-such-package-of-the-bakery"] = "1.0.0"  # the lock file does not have it
    package.write_text(json.dumps(wanted))
    done = run(checkout, "make", "page")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("browser: installing its packages with npm (half a minute, once)\n")
    assert "npm error" in done.stderr
    assert "no-such-package-of-the-bakery@1.0.0" in done.stderr
    told = "browser: the page could not be built, for the reason above; the rest goes on without it"
    assert told in done.stderr.splitlines()


def test_the_demo_offers_the_page_only_if_it_is_built(checkout: Path) -> None:
    without, _, offered = run(checkout, sys.executable, "-c", INVITE).stdout.partition("---")
    assert "make page builds it, or says why it cannot" in without
    assert "the MCP Inspector" in without
    assert "a page that you can reload" not in without
    assert "a page that you can reload" in offered


def test_the_demo_of_the_page_alone_is_refused_without_the_page(checkout: Path) -> None:
    process = start("examples.demo", "--page", "--port", "0", cwd=checkout)
    told = "demo: the page is not built; make page builds it, or says why it cannot\n"
    assert (process.communicate(), process.returncode) == (("", told), 2)
