"""Installs a package with every Python of this machine that is supported, each in an empty environment, and uses it.

    .venv/bin/python scripts/smoke.py dist/perdure-0.1.0-py3-none-any.whl

Supported are the versions that pyproject.toml names; the next one is tried as well. They are looked for on the path and
among those of pyenv. A version that is not on this machine is named in the output: it is not tested here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORY = Path(__file__).with_name("smoke_story.py")
#: Seconds for one program that looks for itself; a shim of pyenv runs a shell first.
LOOK = 30.0


def supported(project: Path = ROOT / "pyproject.toml") -> list[str]:
    """The versions of Python that the package says it runs on, such as 3.11."""
    classifiers = tomllib.loads(project.read_text())["project"]["classifiers"]
    found = (re.fullmatch(r"Programming Language :: Python :: (\d+\.\d+)", line) for line in classifiers)
    return [match[1] for match in found if match]


def newer(versions: list[str]) -> str:
    """The version after the last one that is supported: users have it before the package names it."""
    major, minor = versions[-1].split(".")
    return f"{major}.{int(minor) + 1}"


def candidates(wanted: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Programs that may be this version of Python, the likeliest first."""
    if wanted == ".".join(map(str, sys.version_info[:2])):
        yield sys.executable
    if found := shutil.which(f"python{wanted}", path=environ.get("PATH")):
        yield found
    root = Path(environ.get("PYENV_ROOT") or Path(environ.get("HOME") or "/") / ".pyenv")
    for folder in sorted((root / "versions").glob(f"{wanted}.*"), reverse=True):
        yield str(folder / "bin" / "python")


def find_python(wanted: str, environ: Mapping[str, str]) -> str | None:
    """A program that runs and is this version. A shim of pyenv may be on the path for one that is not chosen."""
    ask = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    for program in candidates(wanted, environ):
        try:
            done = subprocess.run([program, "-c", ask], capture_output=True, text=True, timeout=LOOK)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip() == wanted:
            return program
    return None


def use(program: str, package: Path) -> None:
    """Install the package into an empty environment of this Python, and use it. Raises `CalledProcessError`."""
    with tempfile.TemporaryDirectory(prefix="perdure-smoke-") as folder:
        python = str(Path(folder, "bin", "python"))
        run(program, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--disable-pip-version-check", str(package))
        run(python, "-m", "pip", "check", "--disable-pip-version-check")
        # Outside of the repository, whose own package would be imported otherwise.
        print(run(python, str(STORY), cwd=folder), end="", flush=True)


def run(*command: str, cwd: str | None = None) -> str:
    """Run a command; its output is shown only if it fails. Raises `CalledProcessError`."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, end="", flush=True)
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout


def main() -> int:
    if len(sys.argv) != 2 or not (package := Path(sys.argv[1]).absolute()).is_file():
        print("smoke: give the wheel or sdist to install; make dist makes them", file=sys.stderr)
        return 2
    failed, versions = 0, supported()
    for wanted in (*versions, newer(versions)):
        program = find_python(wanted, os.environ)
        if program is None:
            named = "" if wanted in versions else " (pyproject.toml does not name it)"
            print(f"Python {wanted}: not on this machine, NOT TESTED{named}", flush=True)
            continue
        try:
            use(program, package)
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"Python {wanted} ({program}): FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
