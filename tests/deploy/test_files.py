"""The other files in `deploy/` name options, variables and times that this release has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from perdure.cli.entry import perdure_command
from perdure.settings import Settings
from tests.support.processes.serving import ROOT

DEPLOY = ROOT / "deploy"
SERVE = perdure_command.commands["serve"]
UNIT = DEPLOY / "systemd/perdure.service"
KUBERNETES = DEPLOY / "kubernetes/deployment.yaml"
ALLOWANCE = 10  # seconds that a process manager gives beyond the drain, as docs/deploying.md says


def seconds(text: str) -> int:
    return int(text.rstrip("s"))


def listed(line: str) -> list[str]:
    """The texts of a list in one line, as YAML and Docker write it."""
    found: list[str] = json.loads(line[line.index("[") :])
    return found


COMMANDS = {
    "systemd": re.findall(r"perdure serve (.+)", UNIT.read_text())[0].split(),
    **{
        path.name: listed(line)
        for path in (DEPLOY / "docker/compose.yaml", DEPLOY / "docker/compose.postgres.yaml", KUBERNETES)
        for line in path.read_text().splitlines()
        if re.match(r' +(command|args): \["server', line)
    },
    "Dockerfile": listed((DEPLOY / "docker/Dockerfile").read_text().splitlines()[-1]),
}


@pytest.mark.parametrize("where", COMMANDS)
def test_the_command_has_no_option_that_serve_does_not_know(where: str) -> None:
    SERVE.make_context("serve", list(COMMANDS[where]))


def test_every_place_has_its_command() -> None:
    assert COMMANDS.keys() == {"systemd", "compose.yaml", "compose.postgres.yaml", "deployment.yaml", "Dockerfile"}


def test_every_variable_is_one_of_serve() -> None:
    known = {param.envvar for param in SERVE.params if isinstance(param, click.Option)}
    used = {
        name
        for path in DEPLOY.rglob("*")
        if path.is_file()
        for name in re.findall(r"PERDURE_[A-Z_]+\b", path.read_text())
    }
    assert {"PERDURE_STORE", "PERDURE_DRAIN_TIMEOUT"} <= used <= known


@pytest.mark.parametrize(
    ("path", "drain", "stop"),
    [
        (UNIT, r"--drain-timeout (\d+)", r"TimeoutStopSec=(\d+)"),
        (KUBERNETES, r"PERDURE_DRAIN_TIMEOUT\n +value: (\d+)s", r"terminationGracePeriodSeconds: (\d+)"),
    ],
)
def test_the_process_manager_waits_longer_than_the_drain(path: Path, drain: str, stop: str) -> None:
    text = path.read_text()
    [drained], [stopped] = re.findall(drain, text), re.findall(stop, text)
    paused = sum(map(int, re.findall(r"sleep: {seconds: (\d+)}", text)))  # before the signal
    assert seconds(stopped) == paused + seconds(drained) + ALLOWANCE


def test_a_proxy_lets_a_body_of_the_largest_size_through() -> None:
    [mebibytes] = {
        int(size)
        for path in (DEPLOY / "nginx/perdure.conf", DEPLOY / "kubernetes/ingress.yaml")
        for size in re.findall(r"body[-_]size:? (\d+)m", path.read_text())
    }
    assert mebibytes << 20 == Settings().max_body


def test_containers_are_stopped_later_than_their_drain_ends() -> None:
    [drained] = re.findall(r"PERDURE_DRAIN_TIMEOUT=(\d+)s", (DEPLOY / "docker/Dockerfile").read_text())
    for name in ("compose.yaml", "compose.postgres.yaml"):
        [stopped] = re.findall(r"stop_grace_period: (\d+)s", (DEPLOY / "docker" / name).read_text())
        assert seconds(stopped) == seconds(drained) + ALLOWANCE


def test_systemd_has_no_objection(tmp_path: Path) -> None:
    """But for the program, which is not there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed here")
    unit = tmp_path / "bakery.service"
    unit.write_text(UNIT.read_text().replace("/srv/bakery/.venv/bin/perdure", "/bin/true"))
    said = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout + said.stderr) == (0, "")
