"""`perdure install` and `perdure uninstall` on real files: what is written, what is kept, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from perdure._files.locks import flock
from perdure.cli.entry import main
from perdure.errors import Misuse
from perdure.hosts import config_file
from perdure.hosts.config_file import BACKUP, ConfigFile
from perdure.hosts.known import HOSTS, MAX_NAME, config_path, is_bridge, is_name
from tests.stdio import tiny_server
from tests.stdio.test_stock_hosts import started
from tests.support.processes.serving import ROOT
from tests.support.servers import basic_tools
from tests.support.servers.in_process import serve

URL = "http://127.0.0.1:8000/mcp"
#: As a user keeps it: comments, tabs, CRLF, a trailing comma, no line end at the end.
KEPT = '\ufeff// mine\n{\n\t"theme": "dark",\n\t"mcpServers": {\n\t\t"other": {"command": "x"}, // old\n\t},\n}'
KEPT = KEPT.replace("\n", "\r\n")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory and a project of their own."""
    of_hosts = (variable for host in HOSTS.values() for variable in (host.variable, host.folder_variable) if variable)
    for name in ("XDG_CONFIG_HOME", "APPDATA", "PERDURE_TOKEN_DIR", *of_hosts):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


class Terminal:
    """Runs the command as the shell does."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        said = self._capsys.readouterr()
        assert end.value.code == 0, said.err
        return said.out

    def refused(self, *arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        said = self._capsys.readouterr()
        assert end.value.code == 2
        assert said.out == ""
        assert said.err.count("\n") == 1, said.err
        return said.err.removeprefix("perdure: ").rstrip("\n")


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, with its mode."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in files}


PATHS = [
    ("claude-desktop", "linux", "/h/.config/Claude/claude_desktop_config.json", None),
    ("claude-desktop", "darwin", "/h/Library/Application Support/Claude/claude_desktop_config.json", None),
    ("claude-desktop", "win32", r"C:\h\AppData\Roaming\Claude\claude_desktop_config.json", None),
    ("claude-code", "linux", "/h/.claude.json", "/p/.mcp.json"),
    ("claude-code", "win32", r"C:\h\.claude.json", r"C:\p\.mcp.json"),
    ("cursor", "darwin", "/h/.cursor/mcp.json", "/p/.cursor/mcp.json"),
    ("vscode", "linux", "/h/.config/Code/User/mcp.json", "/p/.vscode/mcp.json"),
    ("vscode", "darwin", "/h/Library/Application Support/Code/User/mcp.json", "/p/.vscode/mcp.json"),
    ("vscode", "win32", r"C:\h\AppData\Roaming\Code\User\mcp.json", r"C:\p\.vscode\mcp.json"),
    ("windsurf", "win32", r"C:\h\.codeium\windsurf\mcp_config.json", None),
    ("gemini-cli", "linux", "/h/.gemini/settings.json", "/p/.gemini/settings.json"),
    ("qwen-code", "linux", "/h/.qwen/settings.json", "/p/.qwen/settings.json"),
    ("codex", "linux", "/h/.codex/config.toml", "/p/.codex/config.toml"),
    ("opencode", "darwin", "/h/.config/opencode/opencode.json", "/p/opencode.json"),
    ("copilot-cli", "linux", "/h/.copilot/mcp-config.json", None),
    ("zed", "darwin", "/h/.config/zed/settings.json", "/p/.zed/settings.json"),
    ("mcp-json", "linux", None, "/p/.mcp.json"),
]


@pytest.mark.parametrize(("host", "platform", "of_user", "of_project"), PATHS)
def test_each_host_has_its_file_on_each_system(
    host: str, platform: str, of_user: str | None, of_project: str | None
) -> None:
    windows = platform == "win32"
    home, project = (PureWindowsPath("C:/h"), PureWindowsPath("C:/p")) if windows else map(PurePosixPath, ("/h", "/p"))
    for scope, expected in (("user", of_user), ("project", of_project)):
        found = config_path(HOSTS[host], scope, platform=platform, home=home, project=project, environ={})  # type: ignore[arg-type]
        assert (None if found is None else str(found)) == expected


def test_the_environment_says_where_settings_are_kept() -> None:
    def found(platform: str, home: PurePosixPath | PureWindowsPath, host: str = "vscode", **environ: str) -> str:
        return str(config_path(HOSTS[host], "user", platform=platform, home=home, project=home, environ=environ))

    posix, windows = PurePosixPath("/h"), PureWindowsPath("C:/h")
    assert found("linux", posix, XDG_CONFIG_HOME="/c") == "/c/Code/User/mcp.json"
    assert found("linux", posix, XDG_CONFIG_HOME="c", APPDATA="/a") == "/h/.config/Code/User/mcp.json"
    assert found("win32", windows, APPDATA=r"D:\a") == r"D:\a\Code\User\mcp.json"
    assert found("linux", posix, "claude-code", CLAUDE_CONFIG_DIR="/c") == "/c/.claude.json"
    assert found("win32", windows, "claude-code", CLAUDE_CONFIG_DIR="") == r"C:\h\.claude.json"
    assert found("linux", posix, "gemini-cli", GEMINI_CLI_HOME="/g") == "/g/.gemini/settings.json"
    assert found("darwin", posix, XDG_CONFIG_HOME="/c") == "/h/Library/Application Support/Code/User/mcp.json"


@pytest.mark.anyio
async def test_a_host_with_a_bare_environment_starts_what_was_written(home: Path, terminal: Terminal) -> None:
    async with serve(basic_tools.server) as site:
        terminal.run("install", "vscode", site.url, "--name", "bakery", "--token-dir", "tokens", "--patience", "90s")
        written = json.loads((home / ".config/Code/User/mcp.json").read_text())
        entry = written["servers"]["bakery"]
        assert entry["type"] == "stdio"
        assert entry["args"][-6:-2] == ["--token-dir", str(home / "project/tokens"), "--patience", "90s"]
        assert entry["args"][-2:] == ["--instance", "bakery"]
        assert is_bridge(entry)
        command = ["env", "-i", "PATH=/nowhere", f"HOME={home}", entry["command"], *entry["args"]]
        async with started(command, home) as bridge:
            assert "protocolVersion" in await bridge.handshake()
    assert [path.name[:6] for path in (home / "project/tokens").glob("*/token-*")] == ["token-"]


def test_a_directory_that_the_environment_names_is_written_because_hosts_have_another_one(
    monkeypatch: pytest.MonkeyPatch, home: Path, terminal: Terminal
) -> None:
    monkeypatch.setenv("PERDURE_TOKEN_DIR", "tokens")
    shown = json.loads(terminal.run("install", "cursor", URL, "--print"))
    args = ["stdio", URL, "--token-dir", str(home / "project/tokens"), "--instance", "perdure"]
    assert shown["mcpServers"]["perdure"]["args"] == args


@pytest.mark.anyio
async def test_a_host_starts_a_program_that_was_written_with_its_folder(home: Path, terminal: Terminal) -> None:
    """What runs in this shell runs in the host, which has another folder and another PATH."""
    shutil.copy(tiny_server.__file__, home / "project/server.py")
    command = ("python3", "server.py", "starts")
    said = terminal.run("install", "cursor", "tiny", "--token-dir", "tokens", "--watch", "server.py", "--", *command)
    assert "has the server tiny now" in said
    entry = json.loads((home / ".cursor/mcp.json").read_text())["mcpServers"]["tiny"]
    program = shutil.which("python3")
    assert program is not None
    project = str(home / "project")
    assert entry["args"] == [
        *("stdio", "--token-dir", f"{project}/tokens", "--instance", "tiny", "--watch", f"{project}/server.py"),
        *("--cwd", project, "--", program, "server.py", "starts"),
    ]
    assert is_bridge(entry)
    async with started(
        ["env", "-i", "PATH=/usr/bin:/bin", f"HOME={home}", entry["command"], *entry["args"]], home
    ) as bridge:
        assert (await bridge.handshake())["serverInfo"]["name"] == "tiny"
        assert await bridge.call("safe") == (home / "project/starts").read_text().strip()
    assert "nothing to do" in terminal.run(
        "install", "cursor", "--name", "tiny", "--token-dir", "tokens", "--watch", "server.py", "--", *command
    )
    assert "(perdure stdio -- " in terminal.refused("install", "cursor", "tiny", "--", "sh")
    assert "has no server tiny any more" in terminal.run("uninstall", "cursor", "--name", "tiny")


def test_each_entry_has_an_instance_of_its_own(home: Path, terminal: Terminal) -> None:
    """T9: two entries of one host for one server would be alike, and begin afresh whenever the host is reloaded."""
    path = home / ".cursor/mcp.json"
    for name in ("one", "two"):
        terminal.run("install", "cursor", URL, "--name", name)
    servers = json.loads(path.read_text())["mcpServers"]
    assert {name: entry["args"][-2:] for name, entry in servers.items()} == {
        name: ["--instance", name] for name in ("one", "two")
    }
    shown = json.loads(terminal.run("install", "cursor", URL, "--print", "--no-resume"))
    assert shown["mcpServers"]["perdure"]["args"] == ["stdio", URL, "--no-resume"]


def test_an_entry_has_the_form_of_its_host(terminal: Terminal) -> None:
    def shown(host: str) -> dict[str, Any]:
        text = terminal.run("install", host, "--print", URL, "--no-resume")
        servers = (tomllib.loads if HOSTS[host].is_toml else json.loads)(text)[HOSTS[host].key]
        entry: dict[str, Any] = servers["perdure"]
        return entry

    program = shown("cursor")["command"]
    assert shown("codex") == {"command": program, "args": ["stdio", URL, "--no-resume"]}
    assert shown("opencode") == {"type": "local", "command": [program, "stdio", URL, "--no-resume"]}
    assert shown("vscode") == {"type": "stdio", **shown("cursor")}
    assert shown("copilot-cli") == {"type": "local", "tools": ["*"], **shown("cursor")}
    assert all(is_bridge(shown(host)) for host in HOSTS)


def test_a_variable_names_the_folder_of_the_file(
    home: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODEX_HOME", str(home / "elsewhere"))
    terminal.run("install", "codex", URL)
    assert list(tree(home)) == ["elsewhere/config.toml"]


def test_a_link_adds_the_server_on_other_machines(terminal: Terminal) -> None:
    wanted = {"command": "uvx", "args": ["perdure", "stdio", URL, "--instance", "bakery"]}
    words = (URL, "--name", "bakery", "--launcher", "uvx", "--print", "link")
    cursor = urlsplit(terminal.run("install", "cursor", *words).strip())
    assert (cursor.scheme, cursor.netloc, cursor.path) == ("cursor", "anysphere.cursor-deeplink", "/mcp/install")
    given = parse_qs(cursor.query)
    assert (given["name"], json.loads(base64.b64decode(given["config"][0]))) == (["bakery"], wanted)
    vscode = terminal.run("install", "vscode", *words).strip()
    assert json.loads(unquote(vscode.removeprefix("vscode:mcp/install?"))) == {
        "name": "bakery",
        "type": "stdio",
        **wanted,
    }
    assert terminal.refused("install", "zed", *words) == (
        "Zed has no links that add a server; those of cursor, vscode have: leave link out"
    )


@pytest.mark.parametrize(
    ("launcher", "words"),
    [("uvx", ["--from", "perdure[dev]", "perdure"]), ("pipx", ["run", "--spec", "perdure[dev]", "perdure"])],
)
def test_a_launcher_is_written_with_its_path(
    launcher: str, words: list[str], home: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("install", "cursor", "bakery", "--launcher", launcher, "--watch", ".", "--print", "--", "true")
    monkeypatch.setenv("PATH", f"{home}:/bin:/usr/bin")
    assert terminal.refused(*command) == (
        f"there is no program '{launcher}' here: install it first, or leave --launcher out"
    )
    (home / launcher).write_text("#!/bin/sh\n")
    (home / launcher).chmod(0o755)
    entry = json.loads(terminal.run(*command))["mcpServers"]["bakery"]
    assert entry["command"] == str(home / launcher)
    assert entry["args"][: len(words) + 1] == [*words, "stdio"]


def test_a_toml_file_of_another_form_is_refused_and_stays(home: Path, terminal: Terminal) -> None:
    path = home / ".codex" / "config.toml"
    path.parent.mkdir()
    for text, reason in (
        ("a = \n", "Invalid value (at line 1, column 5)"),
        ("mcp_servers = 1\n", 'its "mcp_servers" is something other than a table'),
        ('mcp_servers = { perdure = { command = "x" } }\n', "its servers are not tables of their own"),
    ):
        path.write_text(text)
        assert reason in terminal.refused("install", "codex", URL, "--force")
        assert path.read_text() == text


PLACES = [
    *((name, "user") for name, host in HOSTS.items() if host.home or host.settings),
    *((name, "project") for name, host in HOSTS.items() if host.project),
]


@pytest.mark.parametrize(("host", "scope"), PLACES)
def test_a_file_is_made_in_a_folder_that_did_not_exist_and_emptied(
    host: str, scope: str, home: Path, terminal: Terminal
) -> None:
    said = terminal.run("install", host, URL, "--scope", scope)
    ((name, _),) = tree(home).items()
    assert f"{home / name} has the server perdure now" in said
    assert "backup" not in said
    read: Callable[[str], Any] = tomllib.loads if HOSTS[host].is_toml else json.loads
    assert list(read((home / name).read_text())) == [HOSTS[host].key]
    assert "nothing to do" in terminal.run("install", host, URL, "--scope", scope)
    assert "has no server perdure any more" in terminal.run("uninstall", host, "--scope", scope)
    assert read((home / name).read_text()) == ({} if HOSTS[host].is_toml else {HOSTS[host].key: {}})
    assert "nothing to do" in terminal.run("uninstall", host, "--scope", scope)


def test_everything_else_in_the_file_stays_and_the_backup_is_the_file_as_it_was(home: Path, terminal: Terminal) -> None:
    path = home / ".claude.json"
    path.write_bytes(KEPT.encode())
    path.chmod(0o640)
    before = tree(home)
    assert f"the file as it was: {path}{BACKUP}" in terminal.run("install", "claude-code", URL)
    written = path.read_bytes().decode()
    assert '"mcpServers": {\r\n\t\t"perdure": {\r\n\t\t\t"command": ' in written
    assert tree(home) == {".claude.json": (written.encode(), 0o640), f".claude.json{BACKUP}": before[".claude.json"]}
    terminal.run("uninstall", "claude-code")
    after = tree(home)
    assert after.pop(f".claude.json{BACKUP}") == (written.encode(), 0o640)
    assert after == before


def test_a_link_stays_and_what_it_points_to_is_changed(home: Path, terminal: Terminal) -> None:
    real, link = home / "dotfiles" / "cursor.json", home / ".cursor" / "mcp.json"
    for folder in (real.parent, link.parent):
        folder.mkdir()
    link.symlink_to(real)  # to a file that is not there yet
    terminal.run("install", "cursor", URL)
    assert link.is_symlink()
    assert json.loads(real.read_text())["mcpServers"].keys() == {"perdure"}
    terminal.run("uninstall", "cursor")
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"mcpServers": {}}


def test_another_server_of_the_name_is_replaced_only_by_force(home: Path, terminal: Terminal) -> None:
    path = home / ".gemini" / "settings.json"
    terminal.run("install", "gemini-cli", URL)
    kept = tree(home)
    said = terminal.refused("install", "gemini-cli", URL + "2")
    assert f"has another server called perdure (perdure stdio {URL}): choose another name with --name" in said
    assert tree(home) == kept
    terminal.run("install", "gemini-cli", URL + "2", "--force")
    assert json.loads(path.read_text())["mcpServers"]["perdure"]["args"][1] == URL + "2"
    path.write_text('{"mcpServers": {"perdure": {"command": "/bin/sh", "args": ["secret"]}}}')
    assert "(/bin/sh): choose" in terminal.refused("install", "gemini-cli", URL)
    assert "does not run perdure stdio: take it out with --force" in terminal.refused("uninstall", "gemini-cli")
    terminal.run("uninstall", "gemini-cli", "--force")
    assert path.read_text() == '{"mcpServers": {}}'


def test_the_configuration_is_shown_and_nothing_is_written(home: Path, terminal: Terminal) -> None:
    shown = json.loads(terminal.run("install", "vscode", URL, "--print", "--instance", "${workspaceFolder}"))
    assert shown["servers"]["perdure"]["args"][-3:] == [URL, "--instance", "${workspaceFolder}"]
    assert tree(home) == {}
    assert json.loads(terminal.run("install", "mcp-json", URL)).keys() == {"mcpServers"}
    assert tree(home) == {}
    terminal.run("install", "mcp-json", URL, "--file", "mine.json")
    kept = tree(home)
    taken = json.loads(terminal.run("uninstall", "mcp-json", "--file", "mine.json", "--print"))
    assert taken == json.loads(kept["project/mine.json"][0])
    assert tree(home) == kept


def _a_folder(path: Path) -> None:
    path.mkdir()


def _below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


def _read_only(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0o444)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken": (
        lambda path: path.write_text('{\n  "a": }'),
        "cannot be edited, line 2, column 8: Expecting value: mend",
    ),
    "an array": (lambda path: path.write_text("[]"), "cannot be edited, it holds something other than an object"),
    "servers that are none": (lambda path: path.write_text('{"mcpServers": 1}'), 'its "mcpServers" is something other'),
    "not text": (lambda path: path.write_bytes(b'{"a": "\xe9"}'), "is not UTF-8 text (byte 7 is 0xe9): save it"),
    "of another encoding": (lambda path: path.write_text("{}", "utf-16"), "is not UTF-8 text (byte 0 is 0xff)"),
    "read-only": (_read_only, "is read-only (mode 0444): chmod u+w it, or use --print"),
    "a folder": (_a_folder, "is not a plain file: name another one with --file"),
    "a pipe": (lambda path: os.mkfifo(path), "is not a plain file: name another one with --file"),
    "below a file": (_below_a_file, "cannot be read: Not a directory"),
    "a link to itself": (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
}


@pytest.mark.parametrize("how", BAD_FILES)
def test_a_file_that_cannot_be_used_is_left_as_it_is(how: str, home: Path, terminal: Terminal) -> None:
    spoil, reason = BAD_FILES[how]
    path = home / ".cursor" / "mcp.json"
    path.parent.mkdir()
    spoil(path)
    kept = tree(home)
    said = terminal.refused("install", "cursor", URL)
    assert said.startswith(str(path))
    assert reason in said
    if how != "read-only":  # there is nothing to take out of it
        assert reason in terminal.refused("uninstall", "cursor")
    assert tree(home) == kept


def test_a_disk_that_refuses_leaves_the_file_and_nothing_beside_it(home: Path, terminal: Terminal) -> None:
    path = home / "mcp.json"
    path.write_text("{}")
    (home / f"mcp.json{BACKUP}").mkdir()
    (home / f"mcp.json{BACKUP}" / "kept").write_text("")
    kept = tree(home)
    said = terminal.refused("install", "mcp-json", URL, "--file", str(path))
    assert "cannot be written: " in said
    assert tree(home) == kept


BAD_INPUT = [
    (["install", "nothing", URL], "HOST: 'nothing' is not one of 'claude-desktop', "),
    (["install", "cursor"], "URL is missing; see perdure install --help"),
    (["install", "cursor", "127.0.0.1:8000/mcp"], "it must begin with http:// or https://"),
    (["install", "cursor", "http://user:pass@127.0.0.1/mcp"], "credentials must not stand in the address"),
    (["install", "cursor", URL, "--name", "x" * (MAX_NAME + 1)], "does not fit all hosts: up to 32 letters"),
    (["install", "cursor", URL, "--name", ""], "does not fit all hosts"),
    (
        ["install", "gemini-cli", URL, "--name", "my_shop"],
        "'my_shop' does not fit Gemini CLI, whose rules for tools fail",
    ),
    (["install", "cursor", URL, "--token-env", "sk-12345"], "--token-env takes the name of a variable"),
    (["install", "cursor", URL, "--token-env", "A", "--token-file", "b"], "cannot be given together"),
    (["install", "cursor", URL, "--log-file", "\udcff"], "bytes that are not UTF-8"),
    (["install", "windsurf", URL, "--scope", "project"], "Windsurf has no file for one project"),
    (["install", "cursor", URL, "--", "sh"], "a URL and a command after -- cannot be given together"),
    (["install", "cursor", "shop", "--"], "there is no command after --"),
    (["install", "cursor", "shop", "--name", "bakery", "--", "sh"], "two names, 'shop' and 'bakery' of --name"),
    (["install", "cursor", "my shop", "--", "sh"], "does not fit all hosts"),
    (["install", "cursor", "shop", "--", "nothing-like-it"], "there is no program 'nothing-like-it' here: install"),
    (["install", "cursor", "shop", "--token-env", "A", "--", "sh"], "--token-env is for a URL"),
    (["install", "cursor", "shop", "--watch", "nowhere", "--", "sh"], "there is no file or folder 'nowhere'"),
    (["install", "cursor", URL, "--watch", "."], "--watch is for a command after --"),
    (["uninstall", "mcp-json"], "mcp-json has no usual file: name it with --file"),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD_INPUT, ids=lambda value: None)
def test_bad_input_is_told_in_one_line_and_changes_nothing(
    arguments: list[str], reason: str, home: Path, terminal: Terminal
) -> None:
    said = terminal.refused(*arguments)
    assert reason in said
    assert "sk-12345" not in said
    assert tree(home) == {}


def test_a_name_of_the_longest_length_fits() -> None:
    assert is_name("x" * MAX_NAME)
    assert not is_name("-x")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"command": "uvx", "args": ["perdure", "stdio", URL]}, True),
        ({"command": r"C:\Tools\Perdure.EXE", "args": ["stdio", URL]}, True),
        ({"command": "python3", "args": ["-m", "perdure", "stdio", URL]}, True),
        ({"command": "perdure", "args": ["serve", "stdio"]}, False),
        ({"command": "stdio", "args": []}, False),
        ({"url": URL}, False),
        ("perdure stdio", False),
    ],
)
def test_an_entry_that_runs_the_bridge_is_known_however_it_is_started(entry: object, expected: bool) -> None:
    assert is_bridge(entry) is expected


def test_of_several_changes_in_one_moment_none_is_lost(home: Path) -> None:
    path, together = home / "mcp.json", threading.Barrier(4)

    def change(number: int) -> None:
        together.wait()
        is_changed = False
        while not is_changed:
            file = ConfigFile.read(path)
            with contextlib.suppress(Misuse):  # and the user runs the command again
                file.replace(json.dumps({**json.loads(file.text or "{}"), str(number): True}))
                is_changed = True

    for _ in range(5):
        changes = [threading.Thread(target=change, args=(number,)) for number in range(4)]
        for one in changes:
            one.start()
        for one in changes:
            one.join()
        assert sorted(json.loads(path.read_text())) == ["0", "1", "2", "3"]
        path.unlink()


def test_a_file_that_another_program_changes_in_that_moment_is_left_to_it(home: Path) -> None:
    path = home / "mcp.json"
    path.write_text("{}")
    file = ConfigFile.read(path)
    path.write_text('{"theme": "dark"}')
    kept = tree(home)
    with pytest.raises(Misuse, match="was changed by another program in this moment: run the command again"):
        file.replace("{ }")
    assert tree(home) == kept


def test_a_change_waits_for_no_other_and_overtakes_none(home: Path) -> None:
    """Another `perdure install` holds the directory, with the file not changed yet."""
    path = home / "mcp.json"
    path.write_text("{}")
    file, kept = ConfigFile.read(path), tree(home)
    other = os.open(home, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(Misuse, match="was changed by another program in this moment: run the command again"):
        file.replace("{ }")
    assert tree(home) == kept
    os.close(other)
    file.replace("{ }")
    assert path.read_text() == "{ }"


def test_the_file_is_compared_under_the_lock(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another `perdure install` writes the file in the last moment before it lets go of the lock."""
    path = home / "mcp.json"
    path.write_text("{}")
    file = ConfigFile.read(path)

    def late(directory: int) -> bool:
        path.write_text('{"theme": "dark"}')
        return flock(directory)

    monkeypatch.setattr(config_file, "flock", late)
    with pytest.raises(Misuse, match="was changed by another program"):
        file.replace("{ }")
    assert path.read_text() == '{"theme": "dark"}'


def test_the_page_names_every_host_and_its_files() -> None:
    page = (ROOT / "docs" / "stdio.md").read_text().partition("## Add a server")[2]
    rows = re.findall(r"^\| `([a-z-]+)` \| (?:`([^`]+)`)?[^|]* \| (?:`([^`]+)`|none) \|", page, re.MULTILINE)
    expected = [
        (name, "/".join(host.settings or (("~", *host.home) if host.home else ())), "/".join(host.project))
        for name, host in HOSTS.items()
    ]
    assert rows == expected
