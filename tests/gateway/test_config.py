"""Which servers a configuration names: both formats, variables, secrets, and a sentence for each mistake."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import Misuse
from perdure.gateway.config import (
    MAX_NAME,
    Servers,
    Surroundings,
    address_from,
    check_serving,
    parse_servers,
    parse_tables,
    program_from,
)
from perdure.gateway.upstream import CallerLacks, HttpUpstream, Program, Text, Upstream

FOLDER = Path("/srv/bakery")
ENVIRON = {"TOKEN": "s3cret-token", "EMPTY": "", "SHORT": "abc", "OVEN": "wood"}
FILES = {FOLDER / ".env": {"FLOUR": "rye-from-file", "OVEN": "gas"}}


def around(environ: Mapping[str, str] = ENVIRON) -> Surroundings:
    return Surroundings(environ=environ, folder=FOLDER, read_variables=lambda path: FILES[path])


def read(servers: Mapping[str, Any] | str, *, holder: str = "mcpServers") -> Servers:
    text = servers if isinstance(servers, str) else json.dumps({holder: servers})
    return parse_servers(text, file="mcp.json", around=around())


def one(entry: Mapping[str, Any], name: str = "a") -> Upstream:
    [upstream] = read({name: entry}).upstreams
    return upstream


def refusal(servers: Mapping[str, Any] | str) -> str:
    with pytest.raises(Misuse) as refused:
        read(servers)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert not any(value in sentence for value in ENVIRON.values() if len(value) > 4)
    return sentence.removeprefix("mcp.json: ")


def plain(texts: Mapping[str, Text]) -> dict[str, str]:
    return {name: text.fill() for name, text in texts.items()}


# Both formats


TOML = """\
[servers.github]
url = "https://mcp.example.com/mcp"
headers = { Authorization = "Bearer ${TOKEN}" }
rerun = { "search_*" = true, create_issue = false }
patience = "60s"
[servers.files]
command = "npx"
args = ["-y", "server-filesystem", "/data"]
env_file = ".env"
warm = 1
call_timeout = 90
"""
JSON = """\
{
  // what the desktop has
  "mcpServers": {
    "github": {
      "type": "http",
      "url": "https://mcp.example.com/mcp",
      "headers": {"Authorization": "Bearer ${TOKEN}"},
      "perdure": {"rerun": {"search_*": true, "create_issue": false}, "patience": "60s"},
      "alwaysAllow": ["search"], /* of a host */
    },
    "files": {
      "command": "npx",
      "args": ["-y", "server-filesystem", "/data"],
      "envFile": ".env",
      "perdure": {"warm": 1, "call_timeout": 90},
    },
    "old": {"command": "${NOT_SET}", "disabled": true},
    "older": {"enabled": false},
  },
}
"""


def test_json_of_hosts_and_tables_of_our_own_file_name_the_same_servers() -> None:
    tables = parse_tables(tomllib.loads(TOML)["servers"], file="perdure.toml", around=around())
    found = read(JSON)
    assert found == tables
    assert found.warnings == ()
    github, files = found.upstreams
    assert github.name == "github"
    assert github.address is not None
    assert github.address.url == "https://mcp.example.com/mcp"
    assert plain(github.address.headers) == {"Authorization": "Bearer s3cret-token"}
    assert (github.patience, github.era, github.on_restart) == (60.0, "auto", "keep")
    assert files.program is not None
    assert files.program.argv == ("npx", "-y", "server-filesystem", "/data")
    assert plain(files.program.env) == {"FLOUR": "rye-from-file", "OVEN": "gas"}
    assert (files.program.cwd, files.program.warm, files.call_timeout) == (FOLDER, 1, 90.0)


@pytest.mark.parametrize("holder", ["mcpServers", "servers", "context_servers"])
def test_the_servers_stand_under_the_key_of_any_host(holder: str) -> None:
    found = read({"a": {"command": "b"}}, holder=holder)
    assert [upstream.name for upstream in found.upstreams] == ["a"]


@pytest.mark.parametrize("key", ["httpUrl", "serverUrl"])
def test_hosts_have_other_names_for_an_address(key: str) -> None:
    found = read({"a": {key: "https://b.example/mcp"}})
    assert found == read({"a": {"url": "https://b.example/mcp"}})
    both = read({"a": {"url": "https://b.example/mcp", key: "https://c.example/mcp"}})
    assert both.upstreams == found.upstreams
    assert both.warnings == (f"mcp.json: the key {key!r} of a is not known, and is ignored",)


def test_the_defaults_are_those_of_the_documentation() -> None:
    upstream = one({"command": "b"})
    assert upstream == Upstream(name="a", program=Program(argv=("b",), cwd=FOLDER))
    program = upstream.program
    assert program is not None
    assert (program.start_timeout, program.max_processes, program.max_caller_processes) == (60.0, 64, 16)
    assert (program.process_idle, program.lanes) == (None, None)
    assert (upstream.patience, upstream.call_timeout) == (30.0, None)
    assert one({"url": "https://b/mcp"}).address == HttpUpstream(url="https://b/mcp")


def test_every_key_of_ours_is_read() -> None:
    upstream = one(
        {
            "command": "b",
            "cwd": "sub",
            "perdure": {
                "inherit_env": True,
                "warm": 2,
                "start_timeout": "2m",
                "max_processes": 8,
                "max_caller_processes": "4",
                "process_idle": "10m",
                "lanes": 1,
                "era": "session",
                "on_restart": "end",
            },
        }
    )
    assert upstream == Upstream(
        name="a",
        era="session",
        on_restart="end",
        program=Program(
            argv=("b",),
            cwd=FOLDER / "sub",
            inherit_env=True,
            warm=2,
            start_timeout=120.0,
            max_processes=8,
            max_caller_processes=4,
            process_idle=600.0,
            lanes=1,
        ),
    )
    own = {"token_file": "token", "pass_headers": ["X-Tenant"], "insecure": True}
    assert one({"url": "http://b.example/mcp", "perdure": own}).address == HttpUpstream(
        url="http://b.example/mcp", token_file=FOLDER / "token", pass_headers=("X-Tenant",), insecure=True
    )


def test_a_number_may_be_the_value_of_a_variable() -> None:
    program = one({"command": "b", "env": {"PORT": 8080}}).program
    assert program is not None
    assert plain(program.env) == {"PORT": "8080"}


def test_unknown_keys_are_warned_of_once_and_those_of_hosts_are_ignored() -> None:
    entry = {"command": "b", "timeout": 5, "comand": "x", "patience": "5s"}
    found = read({"a": entry, "b": entry})
    assert len(found.upstreams) == 2
    assert found.warnings == (
        "mcp.json: the key 'comand' of a, b is not known, and is ignored; did you mean 'command'?",
        "mcp.json: the key 'patience' of a, b is not known, and is ignored; write it under \"perdure\"",
    )


# Variables and secrets


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${TOKEN}", "s3cret-token"),
        ("${env:TOKEN}", "s3cret-token"),
        ("a ${OVEN} b ${OVEN}", "a wood b wood"),
        ("${NONE:-rye}", "rye"),
        ("${EMPTY:-rye}", "rye"),
        ("${EMPTY}", ""),
        ("${NONE:-}", ""),
        ("${TOKEN:-rye}", "s3cret-token"),
        ("$TOKEN {TOKEN} ${ $", "$TOKEN {TOKEN} ${ $"),
    ],
)
def test_variables_are_put_into_every_text(text: str, value: str) -> None:
    program = one({"command": f"x{text}", "args": [text], "env": {"A": text}}).program
    assert program is not None
    assert program.argv == (f"x{value}", value)
    assert plain(program.env) == {"A": value}


def test_a_url_and_paths_may_have_variables_too() -> None:
    upstream = one({"url": "https://${OVEN}.example/mcp", "perdure": {"token_file": "${OVEN}/token"}})
    assert upstream.address == HttpUpstream(url="https://wood.example/mcp", token_file=FOLDER / "wood" / "token")


def test_parts_that_come_from_the_caller_are_filled_for_each() -> None:
    upstream = one({"command": "b", "env": {"GH": "t ${header:X-GitHub-Token}", "WHO": "${principal}"}})
    assert upstream.needs_caller
    headers = {"x-github-token": "hers"}
    assert upstream.values_for(headers, "ann") == {"GH": "t hers", "WHO": "ann"}
    with pytest.raises(CallerLacks, match="no header X-GitHub-Token"):
        upstream.values_for({}, "ann")
    with pytest.raises(CallerLacks, match="no principal"):
        upstream.values_for(headers, "")
    own = {"pass_headers": ["X-Tenant", "X-Other"]}
    upstream = one({"url": "https://b/mcp", "headers": {"X-Who": "${principal}"}, "perdure": own})
    assert upstream.needs_caller
    assert upstream.values_for({"x-tenant": "7", "cookie": "c"}, "ann") == {"X-Tenant": "7", "X-Who": "ann"}
    assert not one({"command": "b", "env": {"A": "1"}}).needs_caller


def test_values_of_variables_are_masked_wherever_they_are_shown() -> None:
    upstream = one(
        {"command": "run-${OVEN}", "args": ["--key=${TOKEN}"], "env": {"A": "${SHORT}"}, "envFile": ".env"},
        name="bread",
    )
    assert upstream.mask("s3cret-token abc wood rye-from-file s3cret") == "*** abc *** *** s3cret"
    assert repr(upstream) == "Upstream('bread', Program('run-***'))"
    assert upstream.shown == "run-***"
    web = one({"url": "https://b.example/${TOKEN}/mcp?key=k", "headers": {"A": "${TOKEN}"}})
    assert repr(web) == "Upstream('a', HttpUpstream('https://b.example'))"
    assert web.shown == "https://b.example/***/mcp"
    shown = repr((upstream, upstream.program, web, web.address))
    assert "s3cret" not in shown
    assert "rye" not in shown


def test_a_value_that_holds_another_is_masked_as_a_whole_and_none_masks_nothing() -> None:
    upstream = Upstream(
        name="a", address=HttpUpstream(url="https://b"), secrets=frozenset({"bread", "bread-and-butter"})
    )
    assert upstream.mask("bread-and-butter bread") == "*** ***"
    assert Upstream(name="a", address=HttpUpstream(url="https://b"), secrets=frozenset({"abc"})).mask("abc") == "abc"


def test_a_secret_is_masked_as_json_and_each_of_its_lines_because_a_log_has_lines() -> None:
    key = """-----BEGIN KEY-----
  Qm9ybi
m\u00fc"h\\le
}
"""
    upstream = Upstream(name="a", address=HttpUpstream(url="https://b"), secrets=frozenset({key}))
    shown = [upstream.mask(line) for line in f"it is {key}!".splitlines()]
    assert shown == ["it is ***", "  ***", "***", "}", "!"]  # a line of one character is in every other text
    assert upstream.mask(f"a {json.dumps({'key': key})} b {key}c") == 'a {"key": "***"} b ***c'
    assert upstream.mask(json.dumps('m\u00fc"h\\le', ensure_ascii=False)) == '"***"'


@given(st.text(max_size=30), st.text(min_size=1, max_size=8))
def test_a_masked_text_has_no_secret(text: str, secret: str) -> None:
    upstream = Upstream(name="a", address=HttpUpstream(url="https://b"), secrets=frozenset({secret}))
    masked = upstream.mask(f"{text}{secret}{text}")
    assert len(secret) < 4 or set(secret) <= {"*"} or secret not in masked.replace("***", "\0")


# Which tools may run again


@pytest.mark.parametrize(
    ("rerun", "tool", "may"),
    [
        ({}, {"name": "look", "annotations": {"readOnlyHint": True}}, True),
        ({}, {"name": "look"}, False),
        ({"look": False}, {"name": "look", "annotations": {"readOnlyHint": True}}, False),
        ({"*": True, "delete_*": False}, {"name": "delete_all"}, False),
        ({"delete_*": False, "*": True}, {"name": "look"}, True),
        ({"delete_*": False, "delete_a": True}, {"name": "delete_a"}, True),
        ({"Look": True}, {"name": "look"}, False),
    ],
)
def test_rerun_decides_by_the_closest_pattern_else_the_tool_by_its_hints(
    rerun: dict[str, bool], tool: dict[str, Any], may: bool
) -> None:
    assert one({"command": "b", "perdure": {"rerun": rerun}}).may_run_again(tool) is may


# Refusals


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "mcp.json is not JSON: line 1, column 2: Expecting property name enclosed in double quotes"),
        ('{\n "a": 1 "b"}', "mcp.json is not JSON: line 2, column 9: Expecting ',' delimiter"),
        ("", "mcp.json is not JSON: line 1, column 1: Expecting value"),
        ("[]", "mcp.json is not a JSON object; it begins with {"),
        ("{}", "mcp.json has no servers: it has none of the keys mcpServers, servers, context_servers"),
        ('{"mcpServers": {}}', "mcp.json has no servers"),
        ('{"mcpServers": {"a": {"disabled": true}}}', "all of its servers are disabled"),
        (
            '{"mcpServers": {}, "servers": {}}',
            "mcp.json has mcpServers and servers; keep the servers under one of them",
        ),
        ('{"mcpServers": []}', "mcpServers is not an object with a member for each server"),
        (
            '{"mcpServers": {"a": {"command": "b"}, "a": {"command": "c"}}}',
            "the name 'a' comes twice; each server needs a name of its own",
        ),
        (
            '{"mcpServers": {"a": {"command": "b"}, "A": {"command": "c"}}}',
            "the names 'a' and 'A' differ in capital letters only",
        ),
        ('{"mcpServers": {"a": NaN}}', "mcp.json is not JSON: NaN is not a JSON number"),
        ("[" * 100_000, "mcp.json is not JSON: it nests too deep"),
    ],
)
def test_a_bad_file_is_one_sentence(text: str, sentence: str) -> None:
    assert refusal(text) == sentence


_PATH_RULE = (
    "its name is not a segment of a path: use up to 64 letters, digits, dots, hyphens and underscores,"
    " a letter or digit first"
)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my server", _PATH_RULE),
        ("a/b", _PATH_RULE),
        ("..", _PATH_RULE),
        ("", _PATH_RULE),
        ("é", _PATH_RULE),
        ("x" * (MAX_NAME + 1), _PATH_RULE),
        ("resume", "this name is taken by the resume broker; give the server another one"),
    ],
)
def test_a_name_is_a_segment_of_a_path(name: str, sentence: str) -> None:
    assert refusal({name: {"command": "b"}}) == f"server {name!r}: {sentence}"
    assert one({"command": "b"}, name="x" * MAX_NAME)


PROGRAM, ADDRESS = {"command": "b"}, {"url": "https://b.example/mcp"}
SECRET_NOT_SET = "needs the variable NOT_SET, which is not set; set it, or write ${NOT_SET:-default}"
FORMS = "${VAR}, ${VAR:-default}, ${env:VAR}, ${header:NAME} and ${principal}"


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({}, "it has neither command nor url"),
        (
            {**PROGRAM, "perdure": {"process": "each"}},
            'process is "each"; allowed: session or principal or shared',
        ),
        ({**ADDRESS, "perdure": {"process": "shared"}}, "process is for a server with command, not url"),
        (
            {**PROGRAM, "env": {"A": "${principal}"}, "perdure": {"process": "shared"}},
            'env needs a caller\'s header or principal, and process = "shared" has none of its own',
        ),
        (
            {**PROGRAM, "perdure": {"share_state": True}},
            'share_state is for process = "shared", and process is "session"',
        ),
        ({"command": ""}, "it has neither command nor url"),
        ({**PROGRAM, **ADDRESS}, "it has command and url; keep one of them"),
        ({**PROGRAM, "type": "websocket"}, 'type is "websocket"; allowed: stdio, http and streamable-http'),
        ({**PROGRAM, "type": ["stdio"]}, "type is list; allowed: stdio, http and streamable-http"),
        (
            {**ADDRESS, "type": "sse"},
            'type is "sse": legacy HTTP+SSE is not served; use its Streamable HTTP address with "http"',
        ),
        ({**ADDRESS, "type": "stdio"}, 'type is "stdio", which needs command, and it has url'),
        ({**PROGRAM, "type": "http"}, 'type is "http", which needs url, and it has command'),
        ({**PROGRAM, "disabled": "yes"}, "disabled is not true or false"),
        ({"command": ["b"]}, "command is not a text"),
        ({"command": "${EMPTY}"}, "command is empty, because the variable that it names is"),
        ({"command": "b\0"}, "command is not a text"),
        ({**PROGRAM, "args": "b"}, "args is not a list of texts"),
        ({**PROGRAM, "args": [1]}, "args is not a text"),
        ({**PROGRAM, "env": ["A=1"]}, "env is not an object with a text for each variable"),
        ({**PROGRAM, "env": {"A": None}}, "env A is not a text"),
        ({**PROGRAM, "env": {"A=B": "1"}}, "'A=B' is not the name of a variable"),
        ({**PROGRAM, "headers": {"A": "b"}}, "headers is for a server with url, not command"),
        ({**ADDRESS, "env": {"A": "b"}}, "env is for a server with command, not url"),
        ({**ADDRESS, "perdure": {"warm": 1}}, "warm is for a server with command, not url"),
        ({**PROGRAM, "perdure": []}, '"perdure" is not an object'),
        ({**PROGRAM, "perdure": {"patince": "1s"}}, "there is no key 'patince'; did you mean 'patience'?"),
        (
            {**PROGRAM, "perdure": {"patience": "soon"}},
            "patience: 'soon' is not a duration such as 90, 500ms, 30s, 5m, 1h or 7d",
        ),
        ({**PROGRAM, "perdure": {"max_processes": 0}}, "max_processes is 0; allowed: a whole number from 1 to 10,000"),
        ({**PROGRAM, "perdure": {"warm": 1.5}}, "warm is 1.5; allowed: a whole number from 0 to 10,000"),
        ({**PROGRAM, "perdure": {"on_restart": "each"}}, 'on_restart is "each"; allowed: keep or end'),
        ({**PROGRAM, "perdure": {"era": "2025"}}, 'era is "2025"; allowed: auto or session or 2026-07-28'),
        ({**PROGRAM, "perdure": {"inherit_env": 1}}, "inherit_env is 1; allowed: true or false"),
        (
            {**PROGRAM, "perdure": {"rerun": {"a": "yes"}}},
            "rerun is not an object with true or false for names of tools, such as search_*",
        ),
        ({**PROGRAM, "args": ["${NOT_SET}"]}, f"args {SECRET_NOT_SET}"),
        ({**PROGRAM, "env": {"A": "${env:NOT_SET}"}}, f"env A {SECRET_NOT_SET}"),
        ({**ADDRESS, "headers": {"A": "${TOKEN} ${NOT_SET}"}}, f"header A {SECRET_NOT_SET}"),
        (
            {**ADDRESS, "perdure": {"token_env": "NOT_SET"}},
            "token_env needs the variable NOT_SET, which is not set; set it",
        ),
        ({**PROGRAM, "env": {"A": "${input:key}"}}, f"env A has ${{input…}}, which is not known; allowed: {FORMS}"),
        ({**PROGRAM, "args": ["${principal}"]}, "args has ${principal}, which may stand in env and headers only"),
        (
            {**PROGRAM, "env": {"A": "x ${header:authorization}"}},
            "env A has ${header:authorization}, which is for the gateway, and is never passed on; have callers send"
            " another header",
        ),
        (
            {**ADDRESS, "headers": {"A": "${header:Authorization}"}},
            "header A has ${header:Authorization}, which is for the gateway, and is never passed on; have callers send"
            " another header",
        ),
        ({"url": "https://${header:Host}/"}, "url has ${header:Host}, which may stand in env and headers only"),
        (
            {**PROGRAM, "env": {"A": "${principal}"}, "perdure": {"warm": 1}},
            "env needs a caller's header or principal, and warm starts processes without a caller",
        ),
        (
            {"url": "https://user:${TOKEN}@b.example/mcp"},
            "url has credentials in it; give them with token_env, token_file or headers",
        ),
        ({"url": "https://b.example:${TOKEN}/mcp"}, "url is not an address such as https://HOST/mcp"),
        (
            {"url": "ftp://b.example/${TOKEN}"},
            "ftp://b.example/*** is not the address of an MCP server: it must begin with http:// or https://",
        ),
        (
            {"url": "http://b.example/${TOKEN}", "headers": {"X-Key": "${TOKEN}"}},
            "http://b.example would get headers or credentials over http:, which others can read; use https:, or set"
            " insecure = true for this server in a file of servers",
        ),
        ({**ADDRESS, "headers": {"A B": "c"}}, "'A B' is not the name of a header"),
        ({**ADDRESS, "headers": {"A": "b\r\nC: d"}}, "header A has characters that a header cannot have"),
        ({**ADDRESS, "headers": {"A": "café"}}, "header A has characters that a header cannot have"),
        ({**ADDRESS, "headers": {"Host": "c"}}, "the header Host is written by Perdure itself; leave it out"),
        ({**ADDRESS, "headers": ["A"]}, "headers is not an object with a text for each header"),
        (
            {**ADDRESS, "perdure": {"pass_headers": ["authorization"]}},
            "pass_headers: Authorization is for the gateway, and is never passed on",
        ),
        ({**ADDRESS, "perdure": {"pass_headers": "X-A"}}, 'pass_headers is "X-A"; allowed: a list of names'),
        (
            {**ADDRESS, "headers": {"authorization": "a"}, "perdure": {"token_env": "TOKEN"}},
            "it has a header Authorization and token_env, and each is sent as Authorization; keep one of them",
        ),
        ({**ADDRESS, "perdure": {"auth": "none"}}, 'auth is "none"; allowed: own or pass'),
        ({**PROGRAM, "perdure": {"auth": "pass"}}, "auth is for a server with url, not command"),
        (
            {**ADDRESS, "perdure": {"auth": "pass", "token_env": "TOKEN"}},
            'it has token_env and auth = "pass", and each is sent as Authorization; keep one of them',
        ),
        (
            {"url": "http://b.example/mcp", "perdure": {"auth": "pass"}},
            "http://b.example would get headers or credentials over http:, which others can read; use https:, or set"
            " insecure = true for this server in a file of servers",
        ),
        (
            {**ADDRESS, "perdure": {"token_env": "s3 cret"}},
            "token_env is not the name of a variable, such as BAKERY_TOKEN",
        ),
    ],
)
def test_a_bad_server_is_one_sentence(entry: dict[str, Any], sentence: str) -> None:
    """G48."""
    assert refusal({"a": entry}) == f"server 'a': {sentence}"


def test_a_server_is_an_object() -> None:
    assert refusal({"a": "npx"}) == "server 'a' is not an object"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/mcp", "http://localhost/mcp", "http://[::1]/mcp"])
def test_credentials_go_over_http_to_this_machine(url: str) -> None:
    assert one({"url": url, "headers": {"X-Key": "${TOKEN}"}}).address


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"a": 1}, "server 'a' is not a table; write [servers.a]"),
        ({"a": {"command": "b", "alwaysAllow": []}}, "server 'a': there is no key 'alwaysAllow'"),
        ({"a": {"comand": "b"}}, "server 'a': there is no key 'comand'; did you mean 'command'?"),
        (
            {"a": {"command": "b", "on_restart": "all"}},
            "server 'a': on_restart is \"all\"; allowed: keep or end",
        ),
    ],
)
def test_a_mistake_in_our_own_file_is_refused(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Misuse) as refused:
        parse_tables(tables, file="perdure.toml", around=around())
    assert str(refused.value) == f"perdure.toml: {sentence}"


def test_an_empty_table_of_servers_is_refused() -> None:
    with pytest.raises(Misuse, match=r"^perdure.toml has no servers$"):
        parse_tables({}, file="perdure.toml", around=around())


# A single server of the command line


def program_of(*argv: str, env: tuple[str, ...] = ()) -> Upstream:
    return program_from(argv, env=env, cwd=None, era="auto", around=around())


def address_of(url: str, *headers: str, token_env: str | None = None) -> Upstream:
    how: dict[str, Any] = {"token_env": token_env, "token_file": None, "auth": "own", "era": "auto"}
    return address_from(url, headers=headers, **how, around=around())


def test_the_words_of_a_command_line_stay_as_they_are() -> None:
    upstream = program_of("sh", "-c", "echo ${TOKEN}", env=("OVEN", "A=${TOKEN}", "B=1=2", "C="))
    assert upstream.program is not None
    assert upstream.program.argv == ("sh", "-c", "echo ${TOKEN}")
    assert plain(upstream.program.env) == {"OVEN": "wood", "A": "s3cret-token", "B": "1=2", "C": ""}
    assert upstream.secrets == {"wood", "s3cret-token"}
    assert upstream.program.cwd == FOLDER


def test_a_variable_of_the_gateway_is_passed_on_as_it_is() -> None:
    found = program_from(["b"], env=["A"], cwd=Path("sub"), era="auto", around=around({"A": "${x}"})).program
    assert found is not None
    assert plain(found.env) == {"A": "${x}"}
    assert found.cwd == FOLDER / "sub"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/usr/bin/mcp-server-git", "--repository", "."], "mcp-server-git"),
        (["npx", "-y", "@modelcontextprotocol/server-filesystem@1.2", "/data"], "server-filesystem"),
        (["uvx", "mcp-server-time==1.0"], "uvx"),
        (["uvx", "mcp-server-time"], "mcp-server-time"),
        (["uv", "run", "python", "bakery.py"], "bakery"),
        (["python3.12", "-m", "bakery.server"], "bakery.server"),
        (["node", "dist/index.js"], "index"),
        (["docker", "run", "-e", "KEY=s3cret", "mcp/fetch"], "docker"),
        (["npx"], "npx"),
        (["./%%"], "upstream"),
        (["resume"], "upstream"),
    ],
)
def test_a_single_program_is_called_after_what_it_runs(argv: list[str], name: str) -> None:
    assert program_of(*argv).name == name


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://mcp.example.com/mcp", "mcp.example.com"),
        ("http://127.0.0.1:9000/mcp?x=1", "127.0.0.1-9000"),
        ("http://[::1]:80", "1-80"),
    ],
)
def test_a_single_address_is_called_after_its_host(url: str, name: str) -> None:
    assert address_of(url).name == name


def test_headers_and_tokens_of_the_command_line() -> None:
    upstream = address_of("https://b.example/mcp", "X-Key: ${TOKEN}", "X-Tenant:  a: b ")
    assert upstream.address is not None
    assert plain(upstream.address.headers) == {"X-Key": "s3cret-token", "X-Tenant": "a: b"}
    assert upstream.secrets == {"s3cret-token"}
    assert address_of("https://b.example/mcp", token_env="TOKEN").secrets == {"s3cret-token"}


def test_mistakes_of_the_command_line_are_one_sentence() -> None:
    with pytest.raises(Misuse, match=r"^--env: the variable 'FLOUR' is not set; set it, or write FLOUR=VALUE$"):
        program_of("b", env=("FLOUR",))
    with pytest.raises(Misuse, match=r"^--env: '' is not the name of a variable$"):
        program_of("b", env=("=1",))
    with pytest.raises(Misuse, match=r"^--header: one has no colon; write 'Name: value'$"):
        address_of("https://b.example/mcp", "s3cret-token")
    with pytest.raises(Misuse, match=r"^TARGET: url has credentials in it"):
        address_of("https://a:b@b.example/mcp")


# How they are served


def test_upstreams_that_cannot_be_served_so_are_refused() -> None:
    with pytest.raises(Misuse, match=r"^a is a program, and on Windows only servers with an address are served$"):
        check_serving([one({"command": "b"})], platform="win32", has_tokens=False, has_issuer=False)
    check_serving([one(ADDRESS)], platform="win32", has_tokens=True, has_issuer=False)


def test_callers_with_tokens_share_a_process_only_where_the_operator_says_so() -> None:
    shared = {"command": "b", "perdure": {"process": "shared"}}
    with pytest.raises(Misuse, match=r'a has process = "shared".*share_state = true') as refused:
        check_serving([one(shared)], platform="linux", has_tokens=True, has_issuer=False)
    assert "\n" not in str(refused.value)
    check_serving([one(shared)], platform="linux", has_tokens=False, has_issuer=False)
    allowed = {"command": "b", "perdure": {"process": "shared", "share_state": True}}
    check_serving([one(allowed)], platform="linux", has_tokens=True, has_issuer=False)


@pytest.mark.parametrize(
    "entry", [{**PROGRAM, "env": {"A": "${principal}"}}, {**ADDRESS, "headers": {"A": "${principal}"}}]
)
def test_a_server_that_gets_the_principal_has_callers_with_tokens(entry: dict[str, Any]) -> None:
    check_serving([one(entry)], platform="linux", has_tokens=True, has_issuer=False)
    with pytest.raises(Misuse) as refused:
        check_serving([one(entry)], platform="linux", has_tokens=False, has_issuer=False)
    assert str(refused.value) == (
        "a has ${principal}, and its callers are not told apart; serve it with --tokens or --issuer"
    )


def test_tokens_are_passed_on_where_they_were_verified_and_to_one_server() -> None:
    passing = replace(one({**ADDRESS, "perdure": {"auth": "pass"}}), name="b")

    def refused(*upstreams: Upstream, has_tokens: bool = True, has_issuer: bool = False) -> str:
        with pytest.raises(Misuse) as misuse:
            check_serving(upstreams, platform="linux", has_tokens=has_tokens, has_issuer=has_issuer)
        return str(misuse.value)

    use = "; serve it with --issuer and --audience"
    assert refused(passing) == f'b has auth = "pass", and tokens of --tokens are for this gateway alone{use}'
    assert refused(passing, has_tokens=False) == f'b has auth = "pass", and its callers are not told apart{use}'
    two = refused(passing, replace(passing, name="c"), has_issuer=True)
    assert two.startswith('b and c have auth = "pass", and a token is for one server')
    check_serving([passing, one(ADDRESS)], platform="linux", has_tokens=True, has_issuer=True)


def test_a_mode_of_ours_that_stands_beside_the_keys_of_hosts_is_warned_of() -> None:
    [warning] = read({"a": {**ADDRESS, "auth": "pass"}}).warnings
    assert warning == "mcp.json: the key 'auth' of a is not known, and is ignored; write it under \"perdure\""
    assert read({"a": {**ADDRESS, "auth": {"CLIENT_ID": "b"}}}).warnings == ()


def test_memory_is_limited_where_it_can_be_measured() -> None:
    limited = one({"command": "b", "perdure": {"max_memory": "512MiB"}})
    assert limited.program is not None
    assert limited.program.max_memory == 512 << 20
    check_serving([limited], platform="linux", has_tokens=False, has_issuer=False)
    with pytest.raises(Misuse, match=r"^a has max_memory, and the memory of processes is measured on Linux only"):
        check_serving([limited], platform="darwin", has_tokens=False, has_issuer=False)
    with pytest.raises(Misuse, match=r'max_memory is "1023KiB"; allowed: '):
        one({"command": "b", "perdure": {"max_memory": "1023KiB"}})


def test_an_upstream_is_a_program_or_an_address() -> None:
    with pytest.raises(ValueError, match="a program or an address"):
        Upstream(name="a")
