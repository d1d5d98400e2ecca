"""The parts of `make dist` that decide something. The whole takes minutes and is run by hand before a release."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.processes.serving import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from dist import Failed, check_contents, names_in, version_of
from smoke import find_python, newer, supported


def a_program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_python_is_found_where_it_runs_and_not_where_only_its_name_is(tmp_path: Path) -> None:
    """pyenv puts a program on the path for each version that it has, and most of them refuse to run."""
    environ = {"PATH": str(tmp_path / "shims"), "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert find_python("3.99", environ) is None
    a_program(tmp_path / "shims" / "python3.99", "echo 'pyenv: python3.99: command not found' >&2; exit 127")
    assert find_python("3.99", environ) is None
    a_program(tmp_path / "pyenv" / "versions" / "3.99.1" / "bin" / "python", "echo 3.9")
    assert find_python("3.99", environ) is None
    chosen = tmp_path / "pyenv" / "versions" / "3.99.2" / "bin" / "python"
    a_program(chosen, "echo 3.99")
    assert find_python("3.99", environ) == str(chosen)
    a_program(tmp_path / "shims" / "python3.99", "echo 3.99")
    assert find_python("3.99", environ) == str(tmp_path / "shims" / "python3.99")


def test_the_running_python_is_one_of_the_supported() -> None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert running in (*supported(), newer(supported()))
    assert find_python(running, {}) == sys.executable
    assert newer(["3.8", "3.9"]) == "3.10"


def test_a_package_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "scripts" / "smoke.py"), str(tmp_path / "missing.whl")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (2, "smoke: give the wheel or sdist to install; make dist makes them\n")


def test_what_is_missing_in_a_package_or_must_not_be_there_fails(tmp_path: Path) -> None:
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.writestr("perdure/py.typed", "")
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("a-1/README.md", "a-1/clients/node_modules/x.js"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert names_in(sdist) == ["README.md", "clients/node_modules/x.js"]
    check_contents(wheel, ("perdure/py.typed",))
    with pytest.raises(Failed, match=r"a\.whl has no LICENSE, b"):
        check_contents(wheel, ("LICENSE", "perdure/py.typed", "b"))
    with pytest.raises(Failed, match=r"a\.tar\.gz has clients/node_modules/x\.js"):
        check_contents(sdist, ("README.md",))


def test_all_packages_have_one_version(tmp_path: Path) -> None:
    version = version_of(ROOT)
    browser = tmp_path / "clients" / "browser"
    browser.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    (browser / "package.json").write_text(json.dumps({"version": version}))
    (browser / "package-lock.json").write_text(json.dumps({"version": "0.0.9"}))
    with pytest.raises(Failed, match=r"in clients/browser \{'package-lock.json': '0.0.9'\}: give them one version"):
        version_of(tmp_path)
