"""What `perdure stdio` refuses before it reads anything from its host: one sentence, status 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perdure.cli.entry import main

URL = "https://user:secret@bakery.example/mcp"
REFUSED = [
    ([], "URL is missing; see perdure stdio --help"),
    (["--"], "there is no command after --; write what starts the server, as in -- python server.py"),
    (["--", ""], "there is no command after --; write what starts the server, as in -- python server.py"),
    ([URL, "--", "sh"], "a URL and a command after -- cannot be given together: keep one of them"),
    (["--token-file", "t", "--", "sh"], "--token-file is for a URL; a command has the variables of this process"),
    (["--watch", "nowhere", "--", "sh"], "--watch: there is no file or folder 'nowhere'"),
    (["--cwd", "nowhere", "--", "sh"], "--cwd: 'nowhere' is not a folder"),
    ([URL, "--watch", "."], "--watch is for a command after --; a server at a URL is not started here"),
    ([URL, "--cwd", "."], "--cwd is for a command after --; a server at a URL is not started here"),
]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["stdio", *arguments])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    return said.err.removeprefix("perdure: ").removesuffix("\n")


@pytest.mark.parametrize(("arguments", "reason"), REFUSED, ids=lambda value: None)
def test_bad_input_is_refused(
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *arguments) == reason


def test_watching_needs_its_extra(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    said = refused(capsys, "--watch", str(tmp_path), "--", "sh")
    assert said == "--watch needs watchfiles: pip install 'perdure[dev]'"
