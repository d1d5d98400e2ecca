"""Which command lines are only there to start us (T11), and which are a host's: the rule, row by row.

`tests/stdio/host/test_identity.py` runs such command lines for real.
"""

from __future__ import annotations

import shlex

import pytest

from perdure.stdio.launchers import MANAGERS, ProcessKind, classify

LAUNCHERS = [
    "uvx perdure stdio URL",
    "/opt/bin/uv tool uvx --from perdure[x] perdure stdio URL",
    "uv tool run perdure stdio URL",
    "uv --directory /srv/x run perdure stdio URL",
    "npx -y perdure stdio URL",
    "node /usr/lib/node_modules/npm/bin/npx-cli.js perdure stdio URL",
    "node --no-warnings -r ./hook.js /usr/lib/node_modules/npm/bin/npm-cli.js exec perdure stdio URL",
    "nodejs /home/u/.npm/_npx/1/node_modules/.bin/perdure stdio URL",
    "node /opt/perdure.mjs stdio URL",
    "npm exec perdure stdio URL",
    "'npm exec perdure stdio URL'",
    "'npm exec perdure stdio URL' '' ''",
    "npm x -- perdure stdio URL",
    "pipx run perdure stdio URL",
    "python3 /usr/bin/pipx run --spec x perdure stdio URL",
    "python -m pipx run perdure stdio URL",
    "python3 -m uv tool run perdure stdio URL",
    "python3 /venv/bin/npx perdure stdio URL",
    "python3 /venv/bin/node /x/node_modules/.bin/perdure stdio URL",
    "env A=1 perdure stdio URL",
    "env -i -u B -C /srv PATH=/bin A=1 uvx perdure stdio URL",
    "perdure stdio URL",
    "/usr/local/bin/perdure stdio --token-env NAME URL",
    "python -m perdure stdio URL",
    "python3.13t -X dev -W error -Im perdure stdio URL",
    "python -Xdev -u /venv/bin/perdure stdio URL",
    "/Library/Frameworks/Python.app/Contents/MacOS/Python /venv/lib/perdure/__main__.py stdio URL",
    "pypy3.11 /srv/perdure.pyz stdio URL",
    "python --check-hash-based-pycs never -m perdure stdio URL",
    "sh -c 'perdure stdio URL'",
    "sh -c 'exec perdure stdio URL'",
    "-bash -c 'perdure stdio URL'",
    "/bin/zsh -l -c 'perdure stdio URL'",
    "bash -lc 'uvx perdure stdio URL'",
    "bash -c -l 'perdure stdio URL'",
    "bash -euo pipefail -c 'perdure stdio URL'",
    "bash --login -o pipefail -ec 'perdure stdio URL'",
    "fish -c 'perdure stdio URL'",
    "sh -c 'A=1 B=\"x y\" perdure stdio URL'",
    "sh -c 'cd /srv && perdure stdio URL'",
    "sh -c 'export A=1; . ./env.sh; set -e; perdure stdio \"$URL\" 2>>log;'",
    "sh -c 'A=1; perdure stdio URL 2>&1'",
    "sh -c 'env A=1 python -m perdure stdio URL'",
    "sh -c \"bash -c 'perdure stdio URL'\"",
    "sh -c 'perdure stdio \"https://x/mcp?a=1&b=2;c\"'",
    "sh /usr/local/bin/perdure stdio URL",
    "bash -e /nix/store/x/bin/perdure stdio URL",
]

HOSTS = [
    "",
    "claude",
    "python host.py",
    "python host.py perdure stdio URL",
    "python -m host perdure stdio URL",
    "python -c 'import host' perdure stdio URL",
    "python -Ic 'import host' perdure stdio URL",
    "python -",
    "python -m",
    "python -X dev",
    "python",
    "python -m perdure serve x:y",
    "python -m perdure",
    "perdure serve stdio",
    "perdure --option stdio URL",
    "perdure",
    "node host.js perdure stdio URL",
    "node /x/node_modules/@modelcontextprotocol/inspector/cli/build/cli.js --cli perdure stdio URL",
    "node -e 'spawn()' perdure stdio URL",
    "node",
    "'/opt/My Host/npm exec host'",
    "npm run x",
    "npm start",
    "npm --prefix exec",
    "npx",
    "uvx",
    "uv pip install perdure",
    "pipx install run",
    "env",
    "env A=1 host perdure stdio URL",
    "env A=1",
    "pnpm dlx perdure stdio URL",
    "sudo perdure stdio URL",
    "timeout 9 perdure stdio URL",
    "bash",
    "-zsh",
    "bash -i",
    "bash -l",
    "bash -c",
    "bash -c ''",
    "bash -o c",
    "bash start.sh",
    "bash start.sh perdure stdio URL",
    "bash -s perdure stdio URL",
    "sh -c 'host perdure stdio URL'",
    "sh -c 'host; perdure stdio URL'",
    "sh -c 'host & perdure stdio URL'",
    "sh -c 'perdure stdio URL & host'",
    "sh -c 'perdure stdio URL; host'",
    "sh -c 'perdure stdio URL; cd /'",
    "sh -c 'perdure stdio URL && perdure stdio URL'",
    "sh -c 'perdure stdio URL || host'",
    "sh -c 'perdure stdio URL | tee log'",
    "sh -c '(perdure stdio URL)'",
    "sh -c 'perdure stdio $(host)'",
    "sh -c 'perdure stdio `host`'",
    "sh -c 'while true; do perdure stdio URL; done'",
    "sh -c 'perdure stdio URL\nhost'",
    "sh -c 'cd /srv\nperdure stdio URL'",
    "sh -c 'perdure stdio \"URL'",
    "sh -c ';; perdure stdio URL'",
    "sh -c 'perdure stdio URL < file'",
    "sh -c '$PERDURE stdio URL'",
    "sh -c '\"$@\"' - perdure stdio URL",
    "sh -c 'perdure serve x:y'",
    "sh -c 'A=1'",
]


@pytest.mark.parametrize("line", LAUNCHERS)
def test_a_command_line_that_is_only_there_to_start_us(line: str) -> None:
    assert classify(name="anything", words=shlex.split(line)) is ProcessKind.LAUNCHER


@pytest.mark.parametrize("line", HOSTS)
def test_a_command_line_that_may_be_a_hosts(line: str) -> None:
    """T7: what is in doubt is a host."""
    assert classify(name="anything", words=shlex.split(line)) is ProcessKind.HOST


@pytest.mark.parametrize("name", sorted(MANAGERS))
def test_a_manager_is_known_by_its_name_or_its_program(name: str) -> None:
    """T2."""
    assert classify(name=name, words=["perdure", "stdio"]) is ProcessKind.MANAGER
    assert classify(name="x", words=[f"/usr/lib/{name}", "--user"]) is ProcessKind.MANAGER


def test_a_command_line_without_end_is_a_hosts() -> None:
    assert classify(name="env", words=[*["env"] * 10, "perdure", "stdio"]) is ProcessKind.LAUNCHER
    assert classify(name="env", words=[*["env"] * 10_000, "perdure", "stdio"]) is ProcessKind.HOST
