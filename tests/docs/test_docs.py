"""The documentation tells the truth: made parts are fresh, links lead somewhere, examples run.

What the words behind a fence mean is in CONTRIBUTING.md.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests.support.processes.serving import ROOT
from tests.support.processes.starting import can_fork
from tests.support.processes.starting_sync import Program, start
from tests.support.stores.postgres import free_port

OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "deploy/README.md", "bench/README.md")
SITE_PAGES = [ROOT / name for name in OUTSIDE] + sorted(ROOT.glob("docs/*.md"))
PAGES = SITE_PAGES + sorted(ROOT.glob("project/*.md"))

_FENCE = re.compile(r"^( *)```(\w+)([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_READY = re.compile(r"perdure: serving on \S+|Uvicorn running on \S+")
_ASSIGNMENT = re.compile(r"\w+=")
#: Programs start slowly when several start at once on a small machine.
SECONDS = 270


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page: its language, the words behind it, its text, and the block that follows."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int
    output: str | None = None

    def word(self, name: str) -> str | None:
        return next((word.removeprefix(f"{name}=") for word in self.words if word.startswith(f"{name}=")), None)

    @property
    def is_possible(self) -> bool:
        needed = self.word("needs")
        return needed is None or find_spec(needed) is not None

    @property
    def is_tried(self) -> bool:
        if self.language == "console":
            return "by-hand" not in self.words
        return self.is_possible and ("run" in self.words or self.word("file") is not None)


def blocks(page: str) -> Iterator[Block]:
    found = list(_FENCE.finditer(page))
    for fence, after in itertools.zip_longest(found, found[1:]):
        is_output = after is not None and (after[2], after[3].split()) == ("text", ["output"])
        yield Block(
            language=fence[2],
            words=tuple(fence[3].split()),
            text=textwrap.dedent(fence[4]),
            line=page.count("\n", 0, fence.start()) + 1,
            output=after[4] if after is not None and is_output else None,
        )


EXAMPLES = [
    pytest.param(page, block, id=f"{page.name}:{block.line}")
    for page in PAGES
    for block in blocks(page.read_text())
    if block.is_tried
]


def test_blocks_are_read_with_their_words_and_their_output() -> None:
    page = "```python run\nprint(1)\n```\n\n```text output\n1\n```\n\n- item\n\n  ```python file=a.py\n  a = 1\n  ```\n"
    first, output, second = blocks(page)
    assert first == Block(language="python", words=("run",), text="print(1)\n", line=1, output="1\n")
    assert (second.word("file"), second.text, second.line) == ("a.py", "a = 1\n", 11)
    assert (first.is_tried, output.is_tried, second.is_tried) == (True, False, True)


def test_the_made_parts_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_docs.py", "--check"], capture_output=True, text=True, timeout=SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_has_its_head(page: Path) -> None:
    """A blank line within a table leaves its lower rows as text."""
    for block in re.split(r"\n\s*\n", _FENCE.sub("", page.read_text())):
        rows = [line for line in block.splitlines() if line.lstrip().startswith("|")]
        assert not rows or re.fullmatch(r"[ |:-]+", rows[1]), rows[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            dead.append(target)
    assert dead == []


def anchors(page: str) -> set[str]:
    """The names that headings get on the web: lower case, without punctuation, dashes for blanks."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    wanted += [*project["dependency-groups"]["dev"], *project["dependency-groups"]["docs"]]
    lines = (ROOT / "bench" / "requirements.txt").read_text().splitlines()
    wanted += [line for line in lines if line and not line.startswith("#")]
    names = {re.split(r"[\[<>=;! ]", requirement)[0] for requirement in wanted}
    told = (ROOT / "project" / "dependencies.md").read_text()
    assert {name for name in names if f"`{name}`" not in told} == set()


@pytest.mark.parametrize(("page", "block"), EXAMPLES)
def test_the_example_works(page: Path, block: Block, tmp_path: Path) -> None:
    for other in blocks(page.read_text()):
        if (name := other.word("file")) and other.is_possible:
            (tmp_path / name).write_text(other.text)
    if block.language == "console":
        for command, expected in commands(block.text):
            try_command(command, expected, tmp_path, forks=page.name != "README.md")
    elif name := block.word("file"):
        run_python(f"import {name.removesuffix('.py')}", tmp_path)
    else:
        printed = run_python(block.text, tmp_path)
        assert block.output is None or printed == block.output


def test_the_first_screen_of_the_readme_gets_a_result_from_a_call_whose_server_is_killed(tmp_path: Path) -> None:
    """As it is written, but on a free port, and faster."""
    [block] = [block for block in blocks((ROOT / "README.md").read_text()) if "trick" in block.words]
    setup, text = block.text.split("\n", 1)
    assert setup == "make setup && . .venv/bin/activate"
    assert "#" not in text, "zsh, the shell of macOS, takes no comments at its prompt"
    port = free_port()
    changes = {
        "examples/hello.py &": f"{ROOT}/examples/hello.py --port {port} &",
        ":8000/mcp": f":{port}/mcp",
        "seconds_each=1 2>": "seconds_each=0.3 > said 2>",
        "sleep 1": "sleep 0.1",
    }
    for written, tried in changes.items():
        assert written in text
        text = text.replace(written, tried)
    run(["bash", "-c", text], tmp_path)
    assert (tmp_path / "said").read_text().count("10 loaves, still warm.") == 1
    assert "is tried again" in (tmp_path / "progress").read_text()


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console, and what stands below it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def try_command(command: str, expected: str, folder: Path, *, forks: bool) -> None:
    """A server is started as it is written; with `forks`, as one that has everything imported."""
    argv = shlex.split(command)
    assignments = list(itertools.takewhile(_ASSIGNMENT.match, argv))
    variables = dict(word.split("=", 1) for word in assignments)
    program, *rest = argv[len(assignments) :]
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(rest) <= set(targets)
    elif program == "uvicorn" or [program, *rest[:1]] == ["perdure", "serve"]:
        argv = [program, *rest, "--port", "0"]
        said = start_and_stop(argv, variables, folder, forks=forks and program == "perdure" and can_fork())
        assert not expected or without_port(said) == without_port(expected)
    else:
        is_plain = not set(command) & set("|&;<>$*`")
        if is_plain and program == "perdure" and forks:
            printed = run_module("perdure", *rest, cwd=folder, env=environment() | variables)
        else:
            printed = run(["sh", "-c", command], folder)
        assert not expected or printed == expected


def without_port(text: str) -> str:
    return re.sub(r"(?<=127\.0\.0\.1):\d+", "", text)


def start_and_stop(argv: list[str], variables: dict[str, str], folder: Path, *, forks: bool) -> str:
    """Start a server, stop it when it is ready; what it said until then, or until it ended by itself."""
    env = environment() | variables
    process: Program
    if forks:
        module = "tests.support.processes.forked_workers" if "--workers" in argv else "perdure"
        process = start(module, *argv[1:], cwd=folder, env=env, errors=STDOUT)
    else:
        process = subprocess.Popen(argv, cwd=folder, env=env, stdout=PIPE, stderr=STDOUT, text=True)
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if _READY.search(line):
                process.send_signal(signal.SIGTERM)
                assert process.wait(SECONDS) in (0, -signal.SIGTERM)
                return said
        # A refusal is told in one line; whether it is the expected one, the caller sees.
        assert (process.wait(SECONDS), said.count("\n")) == (2, 1), said
        assert said.startswith("perdure: ")
        return said
    finally:
        process.kill()
        process.communicate()


def run_python(text: str, folder: Path) -> str:
    (folder / "example.py").write_text(text)
    return run_module("tests.docs.strict", "example.py", cwd=folder, env=environment())


def run_module(module: str, *arguments: str, cwd: Path, env: dict[str, str]) -> str:
    process = start(module, *arguments, cwd=cwd, env=env)
    said, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said + errors
    return said


def run(argv: list[str], folder: Path) -> str:
    done = subprocess.run(
        argv, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}
