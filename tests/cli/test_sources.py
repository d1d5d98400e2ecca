"""Where the options of `perdure serve` come from beside the command line: configuration, variables, a file of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.cli import options as sources
from perdure.cli.entry import main, perdure_command
from perdure.cli.options import settings_from
from perdure.errors import Misuse
from perdure.serve.listener import listen
from perdure.settings import Settings
from tests.cli.test_main import quiet_environment, read, refusal
from tests.support.processes.serving import ROOT

__all__ = ["quiet_environment"]


@pytest.fixture(autouse=True)
def own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test's file adds to the environment goes with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def given(*arguments: str) -> dict[str, object]:
    """What the command makes of its sources; without a target on the command line."""
    with perdure_command.commands["serve"].make_context("serve", list(arguments)) as ctx:
        return ctx.params


def write(text: str, name: str = "perdure.toml") -> None:
    Path(name).write_text(text)


CONFIG = """\
target = "bakery.py:server"
port = 9000
event-ttl = "2h"
retry = 0.25
max_body = 1048576
json_response = true
enable_replay = false
allowed_hosts = ["a.example", "b.example:8000"]
eras = "session"
tokens = "tokens"
"""
EXPECTED = Settings(
    event_ttl=7_200.0,
    retry=0.25,
    max_body=1 << 20,
    json_response=True,
    enable_replay=False,
    allowed_hosts=("a.example", "b.example:8000"),
    eras="session",
)


@pytest.mark.parametrize("name", ["perdure.toml", "pyproject.toml", "elsewhere.toml"])
def test_a_file_has_every_option_and_the_target(name: str) -> None:
    write(f"[project]\nname = 'shop'\n[tool.perdure]\n{CONFIG}" if name == "pyproject.toml" else CONFIG, name)
    found = given(*(("--config", name) if name == "elsewhere.toml" else ()))
    assert settings_from(found) == EXPECTED
    assert (found["target"], found["port"], found["tokens"]) == ("bakery.py:server", 9000, Path("tokens"))


def test_the_example_of_the_documentation_is_accepted() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    write(page.partition("```toml\n")[2].partition("```")[0])
    write("", ".env")
    found = given()
    assert (found["target"], found["port"]) == ("bakery.py:server", 8080)
    assert settings_from(found) == Settings(event_ttl=7_200.0, json_response=True, allowed_hosts=("bakery.example",))


def test_the_command_line_wins_over_variables_they_over_a_file_of_them_and_that_over_the_configuration() -> None:
    write(f'{CONFIG}workers = 2\nhost = "::1"\npath = "/config"\nenv_file = "variables"\n')
    write('PERDURE_HOST=127.0.0.2\nPERDURE_PATH=/file\nPERDURE_PORT=9001\nFLOUR="rye # and $spelt"\n', "variables")
    os.environ |= {"PERDURE_PORT": "9002", "PERDURE_PATH": "/variable", "PERDURE_TARGET": "variable:server"}
    found = given("--port", "9003")
    assert {name: found[name] for name in ("port", "path", "host", "workers", "target")} == {
        "port": 9003,
        "path": "/variable",
        "host": "127.0.0.2",
        "workers": 2,
        "target": "variable:server",
    }
    assert os.environ["FLOUR"] == "rye # and $spelt"
    assert read()["target"] == "shop:server"


def test_the_own_file_wins_over_the_project_and_a_project_that_says_nothing_changes_nothing() -> None:
    write("[tool.other]\n", "pyproject.toml")
    assert read()["port"] == 8000
    write("[tool.perdure]\nport = 1\n", "pyproject.toml")
    assert read()["port"] == 1
    write("port = 2\n")
    assert read()["port"] == 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("evnt_ttl = 1", "there is no setting 'evnt_ttl'; did you mean 'event_ttl'?"),
        ("[serve]\nport = 1", "serve is a table; write the settings above all tables"),
        ('config = "a"', "there is no setting 'config'; perdure serve --help shows all"),
        ("event-ttl = 1\nevent_ttl = 1", "'event_ttl' is given twice, with a dash and with an underscore"),
        ('event_ttl = "soon"', "event_ttl: 'soon' is not a duration such as 90, 500ms, 30s, 5m, 1h or 7d"),
        ("port = 65536", "port: '65536' is out of range; allowed: a whole number from 0 to 65,535"),
        ("port = true", "port is true; write a text or a number"),
        ("port = 2026-01-01", 'port is "2026-01-01"; write a text or a number'),
        ("json_response = 1", "json_response is 1; write true or false"),
        ('allowed_hosts = "a"', 'allowed_hosts is "a"; write a list of texts, such as ["a.example"]'),
        ("allowed_hosts = [1]", 'allowed_hosts is [1]; write a list of texts, such as ["a.example"]'),
    ],
)
def test_a_mistake_in_the_file_is_one_line(capsys: pytest.CaptureFixture[str], text: str, line: str) -> None:
    write(text)
    assert refusal(capsys, "serve", "a:b") == f"perdure.toml: {line}"
    assert os.listdir() == ["perdure.toml"]


def test_a_file_that_is_no_configuration_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    write("a = =")
    assert refusal(capsys, "serve", "a:b") == "perdure.toml is not TOML: Invalid value (at line 1, column 5)"
    write("[tool]\nperdure = 3\n", "pyproject.toml")
    line = "pyproject.toml: tool.perdure is 3; write a table, [tool.perdure]"
    assert refusal(capsys, "serve", "a:b", "--config", "pyproject.toml") == line
    write("", "pyproject.toml")
    line = "pyproject.toml has no table [tool.perdure]"
    assert refusal(capsys, "serve", "a:b", "--config", "pyproject.toml") == line
    line = "cannot read the configuration none.toml: No such file or directory"
    assert refusal(capsys, "serve", "a:b", "--config", "none.toml") == line


def test_the_mark_that_some_editors_put_before_a_text_is_skipped() -> None:
    write("\ufeffport = 1\n")
    assert read()["port"] == 1


def test_the_other_commands_use_the_store_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    write('stoer = "sqlite:bread.db"')
    assert refusal(capsys, "sessions") == "perdure.toml: there is no setting 'stoer'; did you mean 'store'?"
    write("store = true")
    assert refusal(capsys, "store", "check") == "perdure.toml: store is true; write a text or a number"
    write('port = 1\nreload_dirs = ["src"]\nstore = "sqlite:bread.db"')
    assert refusal(capsys, "sessions") == f"there is no SQLite file {Path('bread.db').absolute()}"
    assert refusal(capsys, "tail", "12345678") == f"there is no SQLite file {Path('bread.db').absolute()}"
    os.environ["PERDURE_STORE"] = "sqlite:own.db"
    assert refusal(capsys, "sessions") == f"there is no SQLite file {Path('own.db').absolute()}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("A=1\n\nB C\n", ".env:3: this is not NAME=value"),
        ('# keys\nA="1\n', ".env:2: this is not NAME=value"),
        ("SECRET\n", ".env:1: this is not NAME=value"),
        ("A=\0\n", ".env is not a text: it has a zero byte"),
        ("PERDURE_PROT=1\n", "there is no variable PERDURE_PROT; did you mean 'PERDURE_PORT'?"),
        ("PERDURE_PORT=x\n", "PERDURE_PORT: 'x' is not a whole number"),
    ],
)
def test_a_mistake_in_the_file_of_variables_is_one_line(
    capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    write(text, ".env")
    assert refusal(capsys, "serve", "a:b", "--env-file", ".env") == line


BAD_BRIDGE = ("stdio", "http://127.0.0.1/mcp", "--log-level", "loud")


@pytest.mark.parametrize(
    "command", [("serve", "a:b"), ("sessions",), ("store", "check"), ("install", "cursor", "ftp://x"), BAD_BRIDGE]
)
def test_a_mistyped_variable_is_one_line_and_foreign_ones_are_left_alone(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    os.environ |= {
        "PERDURE_SERVICE_HOST": "10.0.0.1",
        "PERDURE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PERDURE_TEST_STORE": "x",
        "PERDURE_TOKEN_DIR": "x",
        "PERDURE_STATE_KEYS": "x",
    }
    assert "there is no variable" not in refusal(capsys, *command)
    os.environ["PERDURE_STOER"] = "memory:"
    assert refusal(capsys, *command) == "there is no variable PERDURE_STOER; did you mean 'PERDURE_STORE'?"
    del os.environ["PERDURE_STOER"]
    os.environ["PERDURE_KITCHEN"] = "1"
    line = "there is no variable PERDURE_KITCHEN; unset it: names that begin with PERDURE_ are for the command"
    assert refusal(capsys, *command) == line


def test_the_bridge_that_loads_no_other_command_refuses_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        return capsys.readouterr().err

    monkeypatch.setattr(sys, "argv", ["perdure", *BAD_BRIDGE])
    os.environ["PERDURE_STORE"] = "memory:"
    assert said().startswith("perdure: --log-level: 'loud' is not one of")
    os.environ["PERDURE_TOKENDIR"] = "x"
    assert said().startswith("perdure: there is no variable PERDURE_TOKENDIR; did you mean 'PERDURE_TOKEN_DIR'")


def test_every_variable_that_the_package_reads_is_known() -> None:
    """Another one would be refused where a user sets it."""
    import re

    root = Path(sys.modules["perdure"].__file__ or "").parent
    named = {
        name for path in root.rglob("*.py") for name in re.findall(r"\"(PERDURE_[A-Z_]+[A-Z])\"", path.read_text())
    }
    assert {"PERDURE_STORE", "PERDURE_WORKER_FDS", "PERDURE_STATE_KEYS"} <= named
    sources.check_variables(dict.fromkeys(named, "x"), sources.commands_below(perdure_command))


@pytest.mark.parametrize("use", [sources.read_config, lambda path: sources.load_env_file(path, {})])
def test_a_file_has_a_limit(use: Callable[[Path], object], tmp_path: Path) -> None:
    path, most = tmp_path / "file", sources.MAX_FILE
    path.write_bytes(b"#".ljust(most, b"x"))
    use(path)
    path.write_bytes(b"#".ljust(most + 1, b"x"))
    with pytest.raises(Misuse, match="file is larger than 1 MiB"):
        use(path)


def test_of_a_unix_socket_and_a_port_the_one_that_overrides_the_other_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        write('uds = "sock"')
        assert f"port {port} on 127.0.0.1 is in use" in refusal(capsys, "serve", "none.py:a", "--port", port)
        os.environ["PERDURE_UDS"] = "sock"
        write(f"port = {port}")
        assert refusal(capsys, "serve", "none.py:a") == "no file 'none.py'"
        line = "--uds and --host cannot be given together: a Unix socket has no address and no port"
        assert refusal(capsys, "serve", "none.py:a", "--uds", "a", "--host", "::1") == line
        assert os.listdir() == ["perdure.toml"]


def test_a_setting_is_known_by_its_name_in_other_documents() -> None:
    """`retry_timeout` is `retry`."""
    write("target = 'a:b'\nretry_timeout = '2s'\n")
    assert given()["retry"] == 2.0
    assert given("--retry-timeout", "3s")["retry"] == 3.0
