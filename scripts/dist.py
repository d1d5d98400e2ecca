"""Builds the packages for a release from what is committed, checks them, and says how to install them: `make dist`.

The wheel and the sdist are built from a checkout of their own, the npm package from a copy of its folder outside of any
repository. What is checked: metadata (`twine check`, `publint`), the contents, that the package installs into an empty
environment and works there with every supported Python of this machine, and that the npm package can be imported and
has its types. The results are in dist/.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Tools of the release only, as tried; they are installed into an environment of their own.
BUILD, TWINE, PUBLINT = "build==1.6.1", "twine==7.0.0", "publint@0.3.25"
#: Files that must be in the packages. The wheel gets what `src/perdure` has; these would be missed last.
IN_WHEEL = (
    "perdure/py.typed",
    "perdure/store/sqlite/sql/schema_1.sql",
    "perdure/store/postgres/sql/queries.sql",
    "perdure/store/sql/queries.sql",
    "perdure/console/page/index.html",
)
IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/perdure/py.typed", "tests/conftest.py")
IN_NPM = ("package.json", "README.md", "LICENSE", "dist/perdure.js", "dist/types/index.d.ts")
#: Parts of paths that must not be: what tools leave behind, and what only this machine has.
NEVER = ("node_modules", "__pycache__", ".venv", ".git", ".hypothesis")
IMPORTS = "import { PerdureTransport } from 'perdure';\n"


class Failed(Exception):
    """The packages are not fit for a release."""


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is done, and how long it took."""
    print(f"dist: {what} …", flush=True)
    begun = time.monotonic()
    yield
    print(f"dist: {what}: done in {time.monotonic() - begun:.0f} s", flush=True)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command; its output is shown only if it fails."""
    path = os.pathsep.join([str(ROOT / ".venv" / "bin"), os.environ.get("PATH", os.defpath)])
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=cwd, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    except OSError as error:
        raise Failed(f"{words[0]} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_out(folder: Path) -> Path:
    """The files of the last commit, in a folder without a repository."""
    checkout = folder / "checkout"
    checkout.mkdir()
    archive = folder / "head.tar"
    run("git", "archive", "--format=tar", "--output", archive, "HEAD", cwd=ROOT)
    with tarfile.open(archive) as opened:
        opened.extractall(checkout, filter="data")
    if run("git", "status", "--porcelain", cwd=ROOT):
        print("dist: there are changes that are not committed; they are not in the packages", flush=True)
    return checkout


def version_of(checkout: Path) -> str:
    """The version of the release, which all packages must have."""
    python = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["version"]
    browser = checkout / "clients" / "browser"
    found = {
        name: json.loads((browser / name).read_text())["version"] for name in ("package.json", "package-lock.json")
    }
    if other := {name: version for name, version in found.items() if version != python}:
        raise Failed(f"pyproject.toml has version {python}, and in clients/browser {other}: give them one version")
    return str(python)


def build_npm(checkout: Path, folder: Path, dist: Path) -> Path:
    """Build, test and pack the browser package in a copy that has nothing around it."""
    outside = folder / "browser"
    shutil.copytree(checkout / "clients" / "browser", outside)  # links become files
    run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=outside)
    run("npm", "run", "build", cwd=outside)
    run("npm", "run", "check", cwd=outside)
    run("npm", "test", cwd=outside)
    run("npm", "pack", "--ignore-scripts", "--pack-destination", dist, cwd=outside)
    (packed,) = dist.glob("*.tgz")
    return packed


def build_python(checkout: Path, folder: Path, dist: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from the sdist."""
    tools = folder / "tools"
    run(sys.executable, "-m", "venv", tools, cwd=folder)
    python = tools / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", BUILD, TWINE, cwd=folder)
    run(python, "-m", "build", "--outdir", dist, checkout, cwd=folder)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    run(python, "-m", "twine", "check", "--strict", wheel, sdist, cwd=folder)
    return wheel, sdist


def names_in(package: Path) -> list[str]:
    """The files of a package, without the folder that sdists and npm packages have around them."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as opened:
            return opened.namelist()
    with tarfile.open(package) as opened:
        return [name.partition("/")[2] for name in opened.getnames()]


def check_contents(package: Path, needed: tuple[str, ...]) -> None:
    names = names_in(package)
    if missing := [name for name in needed if name not in names]:
        raise Failed(f"{package.name} has no {', '.join(missing)}")
    if found := [name for name in names if set(name.split("/")) & set(NEVER)]:
        raise Failed(f"{package.name} has {found[0]}, and {len(found) - 1} more of the kind")


def check_npm(packed: Path, folder: Path) -> None:
    """Lint the package, install it into an empty project, import it, and let the compiler read its types."""
    run("npm", "exec", "--yes", f"--package={PUBLINT}", "--", "publint", packed, "--strict", cwd=folder)
    project = folder / "project"
    project.mkdir()
    (project / "package.json").write_text('{"private": true, "type": "module"}\n')
    wanted = (str(packed), "@modelcontextprotocol/client@2", "typescript@7")
    run("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *wanted, cwd=project)
    (project / "use.mjs").write_text(IMPORTS + "console.log(typeof PerdureTransport);\n")
    if (said := run("node", "use.mjs", cwd=project)) != "function\n":
        raise Failed(f"{packed.name}: PerdureTransport is {said!r}")
    (project / "use.ts").write_text(IMPORTS + "export const make = (url: URL) => new PerdureTransport(url);\n")
    options = ("--strict", "--noEmit", "--skipLibCheck", "--target", "es2022", "--module", "nodenext")
    run("node", "node_modules/typescript/bin/tsc", *options, "use.ts", cwd=project)


def build(dist: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="perdure-dist-") as made:
        folder = Path(made)
        with step("check out the last commit"):
            checkout = check_out(folder)
            print(f"dist: version {version_of(checkout)}", flush=True)
        with step("build and test the npm package outside of the repository (a minute)"):
            packed = build_npm(checkout, folder, dist)
            check_contents(packed, IN_NPM)
        with step("check the npm package: publint, install, import, types (half a minute)"):
            check_npm(packed, folder)
        with step("build the sdist and the wheel, and check their metadata (a minute)"):
            wheel, sdist = build_python(checkout, folder, dist)
            check_contents(wheel, IN_WHEEL)
            check_contents(sdist, IN_SDIST)
        with step("install the wheel into empty environments and use it (a minute for each Python)"):
            smoke = subprocess.run([sys.executable, str(ROOT / "scripts" / "smoke.py"), str(wheel)])
            if smoke.returncode:
                raise Failed("the wheel does not work with every Python, see above")
    print(f"""dist: all checks passed. Until the packages are published, install them from their files:
  pip install {wheel}
  pip install '{wheel}[postgres,fastmcp]'
  pip install {sdist}
  npm install {packed}
To publish them: project/releasing.md""")


def main() -> int:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    try:
        build(dist)
    except Failed as error:
        print(f"dist: FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
