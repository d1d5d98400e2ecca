"""The command line: what it reads, and what it refuses in one line."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from perdure.cli.entry import main, perdure_command
from perdure.cli.options import settings_from
from perdure.serve.listener import listen
from perdure.settings import Settings, rule_of

FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PERDURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", list(sys.path))


def read(*arguments: str) -> dict[str, object]:
    """What the command makes of its arguments and the environment."""
    command = perdure_command.commands["serve"]
    with command.make_context("serve", ["shop:server", *arguments]) as ctx:
        return ctx.params


def settings(*arguments: str) -> Settings:
    return settings_from(read(*arguments))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that tells what is wrong, without the name before it."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.out == ""
    found = re.fullmatch(r"perdure: ([^\n]+)\n", said.err)
    assert found, said.err
    return found[1]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    return capsys.readouterr().out


def spelled(name: str) -> str:
    dashed = name.replace("_", "-")
    return f"--{dashed.removesuffix('s') if rule_of(FIELDS[name]).kind == 'names' else dashed}"


# What it says about itself


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(r"perdure \d+\.\d+\.\d+\n", output(capsys, "--version"))


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_the_help_names_the_commands(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    said = output(capsys, *arguments)
    assert "MCP sessions that last" in said
    assert re.search(r"^  serve +Serve an MCP server", said, re.MULTILINE)


def test_the_help_of_serve_shows_each_setting_with_its_default_under_its_heading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = output(capsys, "serve", "--help")
    assert [line for line in said.splitlines() if line.endswith(":") and not line.startswith(" ")] == [
        "Where to serve:",
        "How long things are kept:",
        "How connections behave:",
        "How much is kept and done at once:",
        "What happens when the store fails:",
        "Who may connect:",
        "What is served in place of TARGET:",
    ]
    assert max(map(len, said.splitlines())) <= 80
    for name in FIELDS:
        assert f"  {spelled(name)}" in said
    words = " ".join(said.split())
    for default in ("[1h]", "[1d]", "[30m]", "[4 MiB]", "[32 KiB]", "[10,000]", "[on]", "[off]", "[auto]", "[/mcp]"):
        assert default in words


# Options and environment


def test_without_options_the_defaults_hold() -> None:
    assert settings() == Settings()
    given = read()
    assert {name: given[name] for name in given if name not in FIELDS} == {
        "target": "shop:server",
        "store": "sqlite:perdure.db",
        "host": "127.0.0.1",
        "port": 8000,
        "path": "/mcp",
        "workers": 1,
        "tokens": None,
        "issuer": None,
        "audience": None,
        "public_url": None,
        "scopes": None,
        "jwks": None,
        "log_level": "warning",
        "uds": None,
        "uds_mode": "600",
        "log_format": "text",
        "access_log": False,
        "forwarded_allow_ips": None,
        "command": None,
        "servers": None,
        "stdio": None,
        "check": False,
        "env": (),
        "cwd": None,
        "headers": (),
        "token_env": None,
        "token_file": None,
        "auth": None,
        "era": None,
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("event_ttl", "2h", 7_200.0),
        ("replay_window", "7d", 604_800.0),
        ("session_grace", "90", 90.0),
        ("runtime_idle", "1.5m", 90.0),
        ("cleanup_interval", "1m", 60.0),
        ("retry", "250ms", 0.25),
        ("keepalive_interval", "15s", 15.0),
        ("stream_timeout", "10m", 600.0),
        ("eras", "session", "session"),
        ("max_stream_events", "7", 7),
        ("max_streams", "7", 7),
        ("max_session_events", "7", 7),
        ("max_answers", "7", 7),
        ("max_sessions", "7", 7),
        ("max_principal_sessions", "7", 7),
        ("max_calls", "7", 7),
        ("max_readers", "7", 7),
        ("max_body", "1MiB", 1 << 20),
        ("max_headers", "8KiB", 8_192),
        ("store_timeout", "3", 3.0),
        ("on_store_failure", "refuse", "refuse"),
        ("max_held_events", "7", 7),
        ("allowed_hosts", "a.example", ("a.example",)),
        ("allowed_origins", "https://a.example", ("https://a.example",)),
        ("cors_origins", "*", ("*",)),
    ],
)
def test_an_option_and_a_variable_give_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    expected = dataclasses.replace(Settings(), **{name: value})
    assert expected != Settings()
    assert settings(spelled(name), text) == expected
    monkeypatch.setenv(f"PERDURE_{name.upper()}", text)
    assert settings() == expected


@pytest.mark.parametrize(
    ("name", "option", "variable", "value"),
    [
        ("json_response", "--json-response", "true", True),
        ("json_response", "--json-response", "1", True),
        ("enable_replay", "--no-enable-replay", "false", False),
        ("enable_replay", "--no-enable-replay", "off", False),
    ],
)
def test_a_flag_and_its_variable_give_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str, option: str, variable: str, value: bool
) -> None:
    assert getattr(settings(option), name) is value
    monkeypatch.setenv(f"PERDURE_{name.upper()}", variable)
    assert getattr(settings(), name) is value


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PERDURE_EVENT_TTL": "1d",
        "PERDURE_JSON_RESPONSE": "true",
        "PERDURE_ALLOWED_HOSTS": "a.example,b.example",
        "PERDURE_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    given = read("--event-ttl", "2h", "--no-json-response", "--allowed-host", "c.example", "--port", "2")
    assert settings_from(given) == Settings(event_ttl=7_200.0, allowed_hosts=("c.example",))
    assert given["port"] == 2


def test_where_to_serve_can_be_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {
        "store": "memory:",
        "host": "::1",
        "port": 0,
        "path": "/a/b",
        "tokens": Path("t"),
        "log_level": "debug",
    }
    for name, value in expected.items():
        monkeypatch.setenv(f"PERDURE_{name.upper()}", str(value))
    given = read()
    assert {name: given[name] for name in expected} == expected


def test_names_are_repeated_as_options_and_separated_by_commas_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = Settings(allowed_hosts=("a.example", "b.example:8000"))
    assert settings("--allowed-host", "a.example", "--allowed-host", "b.example:8000") == expected
    monkeypatch.setenv("PERDURE_ALLOWED_HOSTS", " a.example, b.example:8000,")
    assert settings() == expected


def test_the_name_of_a_client_in_a_rule_may_have_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = ("Visual Studio Code=45s", "*=55s")
    assert settings("--answer-within", rules[0], "--answer-within", rules[1]).answer_within == rules
    monkeypatch.setenv("PERDURE_ANSWER_WITHIN", ", ".join(rules))
    assert settings().answer_within == rules


# Refusals: one line, status 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("serve",), "TARGET is missing; see perdure serve --help"),
        (("serve", "a:b", "c:d"), "got unexpected extra argument (c:d)"),
        (("srve",), "no such command 'srve'"),
        (("--evnt",), "no such option '--evnt'"),
        (("serve", "a:b", "--replay-windw", "1h"), "no such option '--replay-windw'. Did you mean '--replay-window'?"),
        (
            ("serve", "a:b", "--reload"),
            "--reload is not an option of perdure serve; perdure dev loads the code again at each",
        ),
        (("run", "a.py"), "there is no command 'run'; perdure serve FILE.py serves a server, and perdure dev FILE.py"),
        (("version",), "there is no command 'version'; perdure --version prints it"),
        (
            ("call", "http://127.0.0.1:9/mcp", "bake", "--loaf-steps", "1"),
            "--loaf-steps is not an option of perdure call; arguments of a tool are written loaf_steps=VALUE",
        ),
        (("call", "http://127.0.0.1:9/mcp", "bake", "--jsn"), "no such option '--jsn'. Did you mean '--json'?"),
        (("call", "a.py", "bake", "--json", "--output", "x"), "--output and --json cannot be given together"),
        (
            ("sessions", "--store", "bread.db"),
            "store is 'bread.db'; allowed: memory: or sqlite:PATH or sqlite:PATH?sync=",
        ),
        (("sessions", "--store", "redis:x"), "store is 'redis:x'; allowed: memory: or sqlite:PATH"),
        (("sessions", "--store", "sqlite:x.db?sync=maybe"), "store is 'sqlite:x.db?sync=maybe'; "),
        (
            ("dev", "http://127.0.0.1:9/mcp"),
            "perdure dev loads Python code again when it changes, and http://127.0.0.1:9/mcp is an address",
        ),
        (
            ("dev", "--", "npx", "server"),
            "perdure dev loads Python code again when it changes, and what follows -- is a program; perdure",
        ),
        (("dev",), "TARGET is missing; see perdure dev --help"),
        (("dev", "--servers", "mcp.json"), "no such option '--servers'"),
        (("serve", "a:b", "--port"), "option '--port' requires an argument."),
        (("serve", "a:b", "--port", "http"), "--port: 'http' is not a whole number"),
        (
            ("serve", "a:b", "--port", "65536"),
            "--port: '65536' is out of range; allowed: a whole number from 0 to 65,535",
        ),
        (
            ("serve", "a:b", "--workers", "65"),
            "--workers: '65' is out of range; allowed: a whole number from 1 to 64",
        ),
        (("serve", "a:b", "--path", "mcp"), "--path: 'mcp' is not a path such as /mcp"),
        (("serve", "a:b", "--path", "/mcp?x"), "--path: '/mcp?x' is not a path such as /mcp"),
        (
            ("serve", "a:b", "--retry", "soon"),
            "--retry: 'soon' is not a duration such as 90, 500ms, 30s, 5m, 1h or 7d",
        ),
        (
            ("serve", "a:b", "--retry", "2h"),
            "--retry: '2h' is out of range; allowed: 0.001 to 3,600 seconds (1ms to 1h)",
        ),
        (("serve", "a:b", "--max-body", "4MB"), "--max-body: '4MB' is not a size such as 65536, 64KiB or 4MiB"),
        (("serve", "a:b", "--max-calls", "1.5"), "--max-calls: '1.5' is not a whole number"),
        (("serve", "a:b", "--eras", "old"), "--eras: 'old' is not one of 'auto', 'both', 'session'."),
        (
            ("serve", "a:b", "--allowed-host", "a,b"),
            "--allowed-host: 'a,b' is not one name; repeat the option to give several",
        ),
        (
            ("serve", "no_such"),
            "no module named 'no_such' in this directory or among the installed packages",
        ),
        (("serve", "no_such:a"), "no module named 'no_such' in this directory or among the installed packages"),
        (("serve", "no.py:a"), "no file 'no.py'"),
        (
            ("serve", "a:b", "--host", "no such host"),
            "cannot listen on 'no such host': no such address; choose another with --host",
        ),
        (("serve", "a:b", "--tokens", "none"), "cannot read the tokens in none: No such file or directory"),
        (
            ("serve", "a:b", "--issuer", "https://a.example", "--audience", "https://b.example", "--tokens", "none"),
            "--issuer and --tokens cannot be given together: tokens come from one of them",
        ),
        (
            ("serve", "a:b", "--issuer", "https://a.example"),
            "--issuer needs --audience: a token that is for another server must not be accepted here",
        ),
        (("serve", "a:b", "--audience", "https://b.example"), "--audience needs --issuer: it says more about"),
        (("serve", "a:b", "--public-url", "https://b.example"), "--public-url needs --issuer: it says more about"),
        (("serve", "a:b", "--scopes", "read"), "--scopes needs --issuer: it says more about the tokens of an issuer"),
        (("serve", "a:b", "--jwks", "https://a.example/jwks"), "--jwks needs --issuer: it says more about"),
        (
            ("serve", "a:b", "--issuer", "http://a.example", "--audience", "https://b.example"),
            "--issuer: 'http://a.example' is not https:; keys that come over plain http: may be anyone's",
        ),
        (
            ("serve", "a:b", "--issuer", "https://a.example", "--audience", "mcp"),
            "--audience: 'mcp' is not an address such as https://login.example",
        ),
        (
            ("serve", "a:b", "--issuer", "https://a.example", "--audience", "https://b.example", "--scopes", "a b"),
            "--scopes: 'a b' is not the name of a scope; write names that are separated by commas",
        ),
        (
            ("serve", "a:b", "--issuer", "https://a.example", "--audience", "https://b.example", "--jwks", "keys.json"),
            "--jwks: 'keys.json' is not an address such as https://login.example",
        ),
        (
            ("serve", "a:b", "--issuer", "https://a..b%zz", "--audience", "https://b.example"),
            "tokens cannot be verified: Input should be a valid URL, invalid",
        ),
    ],
)
def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str) -> None:
    if arguments[0] == "serve":
        arguments = ("serve", "--port", "0", *arguments[1:])
    assert refusal(capsys, *arguments).startswith(line)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("PERDURE_EVENT_TTL", "0", "PERDURE_EVENT_TTL: '0' is out of range; allowed: 0.001 to 31,622,400 seconds"),
        ("PERDURE_PORT", "tcp://10.0.0.1:80", "PERDURE_PORT: 'tcp://10.0.0.1:80' is not a whole number"),
        ("PERDURE_JSON_RESPONSE", "perhaps", "PERDURE_JSON_RESPONSE: 'perhaps' is not a valid boolean"),
        ("PERDURE_CORS_ORIGINS", "a b", "PERDURE_CORS_ORIGINS: 'a b' is not one name"),
        ("PERDURE_TOKENS", "none", "cannot read the tokens in none: No such file or directory"),
    ],
)
def test_a_bad_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str
) -> None:
    monkeypatch.setenv(name, value)
    assert refusal(capsys, "serve", "a:b").startswith(line)


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "talkative.py").write_text("raise ValueError('first\\nsecond\\x1b[31m')\n")
    with pytest.raises(SystemExit) as end:
        main(["serve", "talkative.py:server", "--port", "0"])
    *frames, line = capsys.readouterr().err.splitlines()
    assert (end.value.code, line) == (
        2,
        "perdure: talkative.py cannot be imported: ValueError: first second�[31m (talkative.py:1)",
    )
    assert frames == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/talkative.py", line 1, in <module>',
        "    raise ValueError('first\\nsecond\\x1b[31m')",
        "ValueError: first",
        "second�[31m",
    ]


def test_a_busy_port_is_told_before_anything_is_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as busy:
        port = busy.getsockname()[1]
        line = refusal(capsys, "serve", "no_such:a", "--port", str(port))
    assert line == f"port {port} on 127.0.0.1 is in use; choose another with --port (0 picks a free one)"
    assert list(tmp_path.iterdir()) == []


def test_control_c_before_it_serves_is_no_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(SystemExit) as end:
        main(["serve", "interrupted.py:server", "--port", "0"])
    assert end.value.code == 130
    assert capsys.readouterr().err.strip() == ""


def test_every_option_has_a_variable_of_its_own() -> None:
    command = perdure_command.commands["serve"]
    options = [option for option in command.params if isinstance(option, click.Option)]
    of_one_server = {"env", "cwd", "headers", "token_env", "token_file", "auth", "era"}
    assert {option.name for option in options if option.envvar is None} == {"check", *of_one_server}
    variables = [option.envvar for option in options if option.envvar is not None]
    assert len(set(variables)) == len(variables) == len(FIELDS) + 21
    assert all(str(variable).startswith("PERDURE_") for variable in variables)
