"""`perdure serve` of servers that are not Python code: the forms of the command, its refusals, and two that serve."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.entry import main, perdure_command
from perdure.cli.upstreams import find_servers
from perdure.gateway import host
from perdure.gateway.config import Servers
from perdure.gateway.lane import Lane, Reason, Receiver, UpstreamUnavailable
from perdure.gateway.upstream import Upstream
from tests.cli.test_main import quiet_environment, refusal
from tests.gateway.memory_lane import MemoryServer
from tests.support.clients.wire_client import Peer, Web, answer_of
from tests.support.processes.serving import SERVE, serving
from tests.support.servers import scripted_stdio

__all__ = ["quiet_environment"]

SECRET = "s3cret-token"


@pytest.fixture(autouse=True)
def own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test's file adds to the environment goes with the test."""
    monkeypatch.setattr(os, "environ", {**os.environ, "TOKEN": SECRET})


def find(*arguments: str) -> Servers | None:
    with perdure_command.commands["serve"].make_context("serve", list(arguments)) as ctx:
        return find_servers(ctx)


def only(*arguments: str) -> Upstream:
    found = find(*arguments)
    assert found is not None
    [upstream] = found.upstreams
    return upstream


def write(servers: Any, name: str = "mcp.json") -> None:
    Path(name).write_text(servers if isinstance(servers, str) else json.dumps({"mcpServers": servers}))


# The forms of the command


@pytest.mark.parametrize(
    "arguments",
    [
        ("--", "npx", "-y", "server-files", "--port", "1"),
        ("--port", "0", "--", "npx", "-y", "server-files", "--port", "1"),
        ("--stdio", "npx -y 'server-files' --port 1"),
    ],
)
def test_a_program_is_given_as_words_or_as_one_text(arguments: tuple[str, ...]) -> None:
    upstream = only(*arguments)
    assert upstream.program is not None
    assert upstream.program.argv == ("npx", "-y", "server-files", "--port", "1")
    assert (upstream.name, upstream.program.cwd) == ("server-files", Path.cwd())


def test_the_words_of_a_program_may_have_another_mark() -> None:
    upstream = only("--", "npx", "--", "-y")
    assert upstream.program is not None
    assert upstream.program.argv == ("npx", "--", "-y")


def test_the_options_of_a_program() -> None:
    upstream = only("--env", "A=1", "--env", "TOKEN", "--cwd", "sub", "--era", "session", "--", "bake")
    assert upstream.program is not None
    assert upstream.values_for({}, "") == {"A": "1", "TOKEN": SECRET}
    assert (upstream.program.cwd, upstream.era) == (Path.cwd() / "sub", "session")
    assert upstream.mask(f"a {SECRET}") == "a ***"


def test_an_address_and_its_options() -> None:
    upstream = only("https://shop.example/mcp", "--header", "X-Key: ${TOKEN}", "--token-file", "token")
    assert upstream.address is not None
    assert (upstream.name, upstream.address.url) == ("shop.example", "https://shop.example/mcp")
    assert upstream.address.headers["X-Key"].fill() == SECRET
    assert upstream.address.token_file == Path.cwd() / "token"
    assert only("http://127.0.0.1:9/mcp", "--token-env", "TOKEN").secrets == {SECRET}
    secret = only("https://shop.example/${TOKEN}/mcp")
    assert (secret.name, secret.shown) == ("shop.example", "https://shop.example/***/mcp")
    assert secret.address is not None
    assert secret.address.url == f"https://shop.example/{SECRET}/mcp"


def test_a_file_of_servers_is_read_in_its_own_folder() -> None:
    Path("sub").mkdir()
    write({"a": {"command": "bake", "envFile": "variables"}, "b": {"url": "https://b/mcp"}}, "sub/mcp.json")
    Path("sub/variables").write_text("FLOUR=rye\n")
    found = find("--servers", "sub/mcp.json")
    assert found is not None
    assert found.are_named
    a, b = found.upstreams
    assert a.program is not None
    assert (a.program.cwd, a.values_for({}, "")) == (Path.cwd() / "sub", {"FLOUR": "rye"})
    assert (a.name, b.name) == ("a", "b")


def test_tables_of_the_configuration_are_served_without_a_target() -> None:
    Path("perdure.toml").write_text('port = 9\n[servers.a]\ncommand = "bake"\npatience = "5s"\n')
    upstream = only()
    assert (upstream.name, upstream.patience) == ("a", 5.0)
    Path("perdure.toml").unlink()
    Path("pyproject.toml").write_text('[tool.perdure.servers.b]\nurl = "https://b/mcp"\n')
    assert only().name == "b"


def test_a_variable_may_name_the_file_or_the_program() -> None:
    write({"a": {"command": "bake"}})
    os.environ["PERDURE_SERVERS"] = "mcp.json"
    assert only().name == "a"
    del os.environ["PERDURE_SERVERS"]
    os.environ["PERDURE_STDIO"] = "bake --well"
    assert only().name == "bake"


def test_the_command_line_wins_over_variables_and_they_over_the_configuration() -> None:
    Path("perdure.toml").write_text('target = "https://cake.example/mcp"\nheaders = ["X: y"]\n')
    assert only().name == "cake.example"
    os.environ["PERDURE_STDIO"] = "bake"
    assert only().name == "bake"  # the headers are for what it overrides
    assert only("https://shop.example/mcp").name == "shop.example"
    assert find("shop.py") is None
    Path("perdure.toml").write_text('[servers.a]\ncommand = "bake"\n')
    assert only().name == "bake"
    assert find("shop.py") is None


# Refusals: one line, status 2, no secret


TOGETHER = "cannot be given together: each names what to serve"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "TARGET is missing; see perdure serve --help"),
        (("shop.py", "--", "bake"), f"TARGET and -- COMMAND {TOGETHER}"),
        (("shop.py", "--servers", "a.json"), f"TARGET and --servers {TOGETHER}"),
        (("--stdio", "a", "--servers", "a.json"), f"--stdio and --servers {TOGETHER}"),
        (("--stdio", "a", "--", "b"), f"--stdio and -- COMMAND {TOGETHER}"),
        (("--",), "-- COMMAND has no command; write the program and its arguments"),
        (("--stdio", " "), "--stdio has no command; write the program and its arguments"),
        (("--stdio", "a 'b"), "--stdio cannot be split into words: no closing quotation"),
        (
            ("ftp://a/mcp",),
            "TARGET: ftp://a/mcp is not the address of an MCP server: it must begin with http:// or https://",
        ),
        (("https://",), "TARGET: https: is not the address of an MCP server: it has no host"),
        (("npx", "-y", "bake"), "npx is a program, so write -- before it: perdure serve -- npx …"),
        (
            ("/bin/python3", "shop.py"),
            "/bin/python3 is a program, so write -- before it: perdure serve -- /bin/python3 …",
        ),
        (("--workers", "npx", "--", "npx"), "--workers: 'npx' is not a whole number"),
        (("https://a/mcp", "--env", "A=1"), "--env is for a program, and TARGET is a URL"),
        (("https://a/mcp", "--cwd", "x"), "--cwd is for a program, and TARGET is a URL"),
        (("--header", "A: b", "--", "bake"), "--header is for a URL, and -- COMMAND is a program"),
        (("--stdio", "bake", "--token-env", "TOKEN"), "--token-env is for a URL, and --stdio is a program"),
        (("--stdio", "bake", "--auth", "pass"), "--auth is for a URL, and --stdio is a program"),
        (("shop.py", "--env", "A=1"), "--env is for a program, and TARGET is Python code"),
        (("shop.py", "--era", "session"), "--era is for a program or a URL, and TARGET is Python code"),
        (
            ("--servers", "a.json", "--token-file", "x"),
            "--token-file is for a URL, and --servers is a file of servers: write it there",
        ),
        (
            ("shop.py", "--check"),
            "--check is for servers that are not Python code; perdure list shop.py shows this one",
        ),
        (("--era", "old", "--", "a"), "--era: 'old' is not one of 'auto', 'session', '2026-07-28'."),
        (("--env", "NONE", "--", "a"), "--env: the variable 'NONE' is not set; set it, or write NONE=VALUE"),
        (("https://a/mcp", "--header", SECRET), "--header: one has no colon; write 'Name: value'"),
        (
            ("https://a/mcp", "--header", "A: ${TOKEN} ${NONE}"),
            "TARGET: header A needs the variable NONE, which is not set; set it, or write ${NONE:-default}",
        ),
        (
            (f"https://me:{SECRET}@a/mcp",),
            "TARGET: url has credentials in it; give them with token_env, token_file or headers",
        ),
        (
            ("http://10.0.0.5/mcp", "--token-env", "TOKEN"),
            "TARGET: http://10.0.0.5 would get headers or credentials over http:, which others can read; use https:, or"
            " set insecure = true for this server in a file of servers",
        ),
        (("--servers", "none.json"), "cannot read the servers in none.json: No such file or directory"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    """G48."""
    said = refusal(capsys, "serve", *arguments)
    assert said == line
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "mcp.json is not JSON: line 1, column 2: Expecting property name enclosed in double quotes"),
        ("{}", "mcp.json has no servers: it has none of the keys mcpServers, servers, context_servers"),
        ('{"servers": {"a": {}}}', "mcp.json: server 'a': it has neither command nor url"),
        (
            '{"servers": {"a": {"command": "b", "env": {"A": "${TOKEN}", "B": "${NONE}"}}}}',
            "mcp.json: server 'a': env B needs the variable NONE, which is not set; set it, or write ${NONE:-default}",
        ),
        (
            '{"servers": {"a": {"command": "b", "envFile": "none"}}}',
            "cannot read the variables in {here}/none: No such file or directory",
        ),
        (
            '{"servers": {"a": {"type": "sse", "url": "https://b/sse"}}}',
            "mcp.json: server 'a': type is \"sse\": legacy HTTP+SSE is not served; use its Streamable HTTP address with"
            ' "http"',
        ),
    ],
)
def test_a_bad_file_of_servers_is_one_line(capsys: pytest.CaptureFixture[str], text: str, line: str) -> None:
    """G48."""
    write(text)
    assert refusal(capsys, "serve", "--servers", "mcp.json") == line.replace("{here}", os.getcwd())
    assert os.listdir() == ["mcp.json"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('target = "a.py"\n[servers.a]\ncommand = "b"', f"TARGET and [servers] of perdure.toml {TOGETHER}"),
        ("[servers]", "perdure.toml has no servers"),
        ("[servers]\na = 1", "perdure.toml: server 'a' is not a table; write [servers.a]"),
        ('[servers.a]\ncomand = "b"', "perdure.toml: server 'a': there is no key 'comand'; did you mean 'command'?"),
        ('servers = "none.json"', "cannot read the servers in none.json: No such file or directory"),
        ("servers = true", "perdure.toml: servers is true; write a text or a number"),
        ("check = true", "perdure.toml: there is no setting 'check'; perdure serve --help shows all"),
    ],
)
def test_a_bad_table_of_servers_is_one_line(capsys: pytest.CaptureFixture[str], text: str, line: str) -> None:
    Path("perdure.toml").write_text(text)
    assert refusal(capsys, "serve") == line


def test_other_commands_ignore_the_tables_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("perdure.toml").write_text('store = "sqlite:bread.db"\n[servers.a]\ncommand = "b"\n')
    assert refusal(capsys, "sessions") == f"there is no SQLite file {Path('bread.db').absolute()}"
    assert refusal(capsys, "dev") == "TARGET is missing; see perdure dev --help"


# --check


def test_a_check_prints_the_tools_of_each_and_which_may_run_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [
        {"name": "search_bread", "annotations": {"readOnlyHint": True}},
        {"name": "bake\x1b[2J"},
    ]
    lanes = {
        "shop": MemoryServer(pages={"": {"tools": tools}}),
        "empty": MemoryServer(capabilities={}),
        "gone": MemoryServer(unavailable=UpstreamUnavailable(Reason.NO_PROGRAM, f"no program {SECRET}")),
    }

    def lane_for_check(upstream: Upstream, receiver: Receiver) -> AbstractAsyncContextManager[Lane]:
        return lanes[upstream.name].lane(receiver)

    monkeypatch.setattr(host, "lane_for_check", lane_for_check)
    own = {"rerun": {"bake*": True}}
    write(
        {
            "shop": {"command": "bake", "args": ["${TOKEN}"], "perdure": own},
            "empty": {"url": "https://b/mcp?key=${TOKEN}"},
            "gone": {"command": "x-${TOKEN}"},
        }
    )
    with pytest.raises(SystemExit) as end:
        main(["serve", "--servers", "mcp.json", "--check"])
    said = capsys.readouterr()
    assert (end.value.code, said.err) == (1, "")
    assert said.out.splitlines() == [
        "shop: bake speaks 2025-11-25, table 1, 2 tools",
        "  TOOL          RUNS AGAIN  BECAUSE",
        "  search_bread  yes         readOnlyHint",
        "  bake\N{REPLACEMENT CHARACTER}[2J      yes         rerun, bake*",
        "empty: https://b/mcp speaks 2025-11-25, table 1, 0 tools",
        "gone: x-*** cannot be used: no program *** (no_program)",
    ]
    lanes["gone"] = lanes["empty"]
    with pytest.raises(SystemExit) as end:
        main(["serve", "--servers", "mcp.json", "--check"])
    assert end.value.code == 0


def test_a_check_starts_real_programs_and_ends_them(capsys: pytest.CaptureFixture[str]) -> None:
    starts = Path("starts").absolute()
    write({"shop": {**scripted(f"starts={starts}", "pages=2"), "envFile": "variables"}})
    Path("variables").write_text("SCRIPTED_NAME=bakery\n")
    with pytest.raises(SystemExit) as end:
        main(["serve", "--servers", "mcp.json", "--check"])
    assert end.value.code == 0
    assert capsys.readouterr().out.splitlines() == [
        f"shop: {sys.executable} speaks 2025-11-25, *** 1, 3 tools",
        "  TOOL        RUNS AGAIN  BECAUSE",
        "  plain       no          no hint",
        "  idempotent  yes         idempotentHint",
        "  read_only   yes         readOnlyHint",
    ]
    [pid] = starts.read_text().split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


# In a process of its own


def scripted(*settings: str) -> dict[str, Any]:
    """The entry of a server that does what it is told."""
    return {"command": sys.executable, "args": [scripted_stdio.__file__, *settings]}


async def refusal_of(url: str) -> dict[str, Any]:
    """The error with which a session is refused."""
    web = Web(url)
    peer = Peer(web)
    response = await web.request("POST", headers=peer.headers(), body=peer.handshake())
    await web.aclose()
    error: dict[str, Any] = answer_of(response)["error"]
    return error


async def flour(url: str) -> str | None:
    """A variable of the program behind an address."""
    web = Web(url)
    try:
        environment = await (await web.join()).result("plain", do=[{"environment": True}])
        found: str | None = json.loads(environment).get("FLOUR")
        return found
    finally:
        await web.aclose()


@pytest.mark.anyio
async def test_bad_ones_leave_the_others_serving_each_with_a_store_of_its_own(tmp_path: Path) -> None:
    """A store that cannot be opened, a program that is not there, and an address that does not answer. G49."""
    bread = {**scripted(), "env": {"FLOUR": "rye"}, "colour": "brown"}
    servers = {
        "bread": bread,
        "cold": scripted(),
        "missing": {"command": "no-such-program"},
        "away": {"url": "http://127.0.0.1:1/mcp", "perdure": {"patience": "0.1s", "era": "session"}},
        "cake": {**scripted(), "env": {"FLOUR": "wheat"}},
    }
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    (tmp_path / "perdure.cold.db").mkdir()
    async with serving("--servers=mcp.json", cwd=tmp_path) as process:
        root = process.url.removesuffix("/mcp/bread")
        assert await flour(f"{root}/mcp/bread") == "rye"
        assert await flour(f"{root}/mcp/cake") == "wheat"
        for name, reason in (("cold", "not_started"), ("missing", "no_program"), ("away", "unreachable")):
            error = await refusal_of(f"{root}/mcp/{name}")
            assert (error["code"], error["data"]["reason"], error["data"]["ran"]) == (-31010, reason, False)
        web = Web(f"{root}/healthz/upstreams")
        health = await web.request("GET")
        await web.aclose()
        states = health.json()["upstreams"]
        down = dict.fromkeys(("cold", "missing", "away"), "down")
        assert {name: states[name]["state"] for name in states} == {"bread": "up", "cake": "up", **down}
        assert health.status_code == 503
        assert "perdure.cold.db" in states["cold"]["reason"]
        assert "no-such-program" in states["missing"]["reason"]
        assert "cannot be reached" in states["away"]["reason"]
        assert await flour(f"{root}/mcp/bread") == "rye"
        assert await process.stop() == 0
    assert [line.rpartition("/")[2] for line in process.output if "serving on" in line] == list(servers)
    assert any("the key 'colour' of bread is not known, and is ignored" in line for line in process.output)
    assert any("the upstream cold failed, and is started again" in line for line in process.output)
    stores = {name for name in os.listdir(tmp_path) if name.endswith(".db")}
    assert stores == {f"perdure.{name}.db" for name in servers}


@pytest.mark.anyio
async def test_a_single_program_is_served_at_the_usual_path_and_store(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, scripted_stdio.__file__])
    options = ("--env", "FLOUR=rye")
    argv = ("sh", "-c", 'ulimit -n 700; exec "$@"', "sh", *SERVE)
    async with serving(f"--stdio={command}", *options, argv=argv, cwd=tmp_path) as process:
        assert process.url.endswith("/mcp")
        assert await flour(process.url) == "rye"
        assert await flour(f"{process.url}/scripted_stdio") == "rye"
        assert await process.stop() == 0
    assert [name for name in os.listdir(tmp_path) if name.endswith(".db")] == ["perdure.db"]
    said = "this process may open 700 files, and needs 768 for 64 programs; raise ulimit -n"
    assert any(said in line for line in process.output)


@pytest.mark.anyio
async def test_two_workers_share_the_one_process_of_a_session(tmp_path: Path) -> None:
    """G51."""
    starts = tmp_path / "starts"
    command = (sys.executable, scripted_stdio.__file__, f"starts={starts}")
    async with serving(f"--stdio={shlex.join(command)}", "--workers", "2", cwd=tmp_path) as process:
        web = Web(process.url)
        peer = await Peer(web).initialize()
        pids = {await peer.result("plain", do=[{"pid": True}]) for _ in range(8)}
        await web.aclose()
        assert await process.stop() == 0
    assert pids == set(starts.read_text().split())
    assert len(pids) == 1
