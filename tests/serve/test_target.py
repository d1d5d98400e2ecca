"""Finding the object to serve, and saying in one sentence why it cannot be found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure.runtime.server  # noqa: F401 - here, because what a test imports is forgotten after it
from perdure.errors import BadTarget, TargetFailed
from perdure.serve.target import MAX_SEEN, load_target


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with the interpreter's imports put back afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def refusal(target: str) -> str:
    with pytest.raises(BadTarget) as told:
        load_target(target)
    return str(told.value)


def test_a_module_in_the_current_directory_is_found(folder: Path) -> None:
    (folder / "shop").mkdir()
    (folder / "shop" / "__init__.py").touch()
    (folder / "shop" / "till.py").write_text("class Till:\n    drawer = 'open'\nserver = 'the till'\n")
    assert load_target("shop.till:server") == "the till"
    assert load_target("shop.till:Till.drawer") == "open"


def test_a_file_is_imported_under_its_stem_with_its_folder_importable(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "neighbour_of_main.py").write_text("word = 'hello'\n")
    (folder / "inner" / "main_file.py").write_text("from neighbour_of_main import word\nserver = (__name__, word)\n")
    assert load_target("inner/main_file.py:server") == ("main_file", "hello")
    assert load_target(f"{folder}/inner/main_file.py:server") is sys.modules["main_file"].server


def test_a_file_may_define_dataclasses_with_postponed_annotations(folder: Path) -> None:
    (folder / "typed_file.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass Server:\n    name: ClassVar[str] = 'typed'\nserver = Server()\n"
    )
    assert vars(type(load_target("typed_file.py:server")))["name"] == "typed"


OTHERS = "; a server in another language needs -- COMMAND, or its URL"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_such_shop", f"no module named 'no_such_shop' in this directory or among the installed packages{OTHERS}"),
        ("no_such_shop.py", "no file 'no_such_shop.py'"),
        ("shop:", "'shop:' has nothing after the colon; write package.module:name or path/file.py:name"),
        (":server", "':server' has nothing before the colon; write package.module:name or path/file.py:name"),
        (
            "",
            f"'' is not the name of a module; write package.module:name or path/file.py:name{OTHERS}",
        ),
        (
            "127.0.0.1:80",
            f"'127.0.0.1' is not the name of a module; write package.module:name or path/file.py:name{OTHERS}",
        ),
        ("no_such_shop:x", f"no module named 'no_such_shop' in this directory or among the installed packages{OTHERS}"),
        (
            "no_such_shop.till:x",
            f"no module named 'no_such_shop' in this directory or among the installed packages{OTHERS}",
        ),
        (
            "json.no_such_part:x",
            f"no module named 'json.no_such_part' in this directory or among the installed packages{OTHERS}",
        ),
        ("no/shop.py:server", "no file 'no/shop.py'"),
        ("shop.example/mcp", f"no file 'shop.example/mcp'{OTHERS}"),
    ],
)
def test_a_target_that_leads_nowhere_is_named(target: str, sentence: str) -> None:
    assert refusal(target) == sentence


def test_a_forgotten_ending_is_suggested(folder: Path) -> None:
    (folder / "shop.py").touch()
    assert refusal("./shop:server") == "no file 'shop'; did you mean 'shop.py'?"
    assert refusal("shpo.py") == "no file 'shpo.py'; did you mean 'shop.py'?"
    assert refusal("shpo").endswith("among the installed packages; did you mean 'shop.py'?")
    assert refusal("far-from-it.py") == "no file 'far-from-it.py'"


def test_a_missing_name_brings_close_ones(folder: Path) -> None:
    (folder / "shop.py").write_text("server = 1\n_servr = 2\n")
    assert refusal("shop:servr") == "shop has no 'servr'; did you mean 'server'?"
    assert refusal("shop.py:till") == "shop.py has no 'till'"


@pytest.mark.parametrize("form", ["shop", "shop.py"])
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("\nraise ValueError('no stock')", "cannot be imported: ValueError: no stock (shop.py:2)"),
        ("raise ValueError", "cannot be imported: ValueError (shop.py:1)"),
        ("import no_such_part", "cannot be imported: ModuleNotFoundError: No module named 'no_such_part' (shop.py:1)"),
        ("x = (\n", "cannot be imported: SyntaxError: '(' was never closed (shop.py:1)"),
        ("\n\nimport sys; sys.exit(3)", "ended the program when it was imported: SystemExit: 3 (shop.py:3)"),
    ],
)
def test_an_import_that_fails_says_what_and_where(folder: Path, form: str, source: str, reason: str) -> None:
    (folder / "shop.py").write_text(source)
    assert refusal(f"{form}:server") == f"{form} {reason}"
    assert "shop" not in sys.modules


SERVER = "from mcp.server.mcpserver import MCPServer\n"


@pytest.mark.parametrize("form", ["shop", "shop.py"])
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("mcp = MCPServer('a')\nserver = MCPServer('b')\n", "server"),
        ("app = object()\nserver = 1\nmcp = MCPServer('a')\nother = MCPServer('b')\n", "mcp"),
        ("bakery = MCPServer('a')\nsame = bakery\n_hidden = MCPServer('b')\n", "bakery"),
        ("from mcp.server.lowlevel import Server\nbakery = Server('a')\n", "bakery"),
    ],
)
def test_without_a_name_the_usual_ones_are_tried_and_then_the_only_server(
    folder: Path, form: str, source: str, name: str
) -> None:
    (folder / "shop.py").write_text(SERVER + source)
    assert load_target(form) is getattr(sys.modules["shop"], name)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            SERVER + "left = MCPServer('a')\nright = MCPServer('b')\n",
            "shop.py has 2 MCP servers (left, right) and none is called server, mcp or app; choose one: shop.py:left",
        ),
        (
            "import os\nserver = 1\ndef bake(): ...\n_oven = 2\n",
            "shop.py has no MCP server; it has server (int), bake (function); call one server, mcp or app, or write"
            " shop.py:name",
        ),
        ("", "shop.py has no MCP server; it has no public names; call one server, mcp or app, or write shop.py:name"),
        (
            "".join(f"a{number} = 0\n" for number in range(MAX_SEEN)),
            "shop.py has no MCP server; it has a0 (int), a1 (int), a2 (int), a3 (int), a4 (int), a5 (int), a6 (int),"
            " a7 (int); call one server, mcp or app, or write shop.py:name",
        ),
        (
            "".join(f"a{number} = 0\n" for number in range(MAX_SEEN + 1)),
            "shop.py has no MCP server; it has a0 (int), a1 (int), a2 (int), a3 (int), a4 (int), a5 (int), a6 (int),"
            " a7 (int) and 1 more; call one server, mcp or app, or write shop.py:name",
        ),
    ],
)
def test_a_module_with_several_servers_or_none_is_told_with_what_it_has(
    folder: Path, source: str, sentence: str
) -> None:
    (folder / "shop.py").write_text(source)
    assert refusal("shop.py") == sentence


def test_a_fault_in_another_file_is_placed_there(folder: Path) -> None:
    (folder / "store_room.py").write_text("def count():\n    return 1 / 0\n")
    (folder / "shop.py").write_text("import store_room\nstore_room.count()\n")
    assert refusal("shop:server") == "shop cannot be imported: ZeroDivisionError: division by zero (store_room.py:2)"


def test_a_fault_inside_a_library_is_placed_where_the_users_code_called_it(folder: Path) -> None:
    (folder / "shop.py").write_text("import json\n\nprices = json.loads('{')\n")
    with pytest.raises(TargetFailed) as told:
        load_target("shop.py")
    assert str(told.value).startswith("shop.py cannot be imported: JSONDecodeError: Expecting property name")
    assert str(told.value).endswith(" (shop.py:3)")
    assert [line for line in told.value.traceback.splitlines() if line.strip(" ~^")] == [
        "Traceback (most recent call last):",
        f'  File "{folder}/shop.py", line 3, in <module>',
        "    prices = json.loads('{')",
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]


def test_a_file_may_not_hide_a_module_in_use(folder: Path) -> None:
    (folder / "json.py").write_text("server = 1\n")
    sentence = "json.py has the name of a module that is in use, 'json'; rename the file"
    import json  # in use from here on

    assert refusal("json.py:server") == sentence
    assert sys.modules["json"] is json


def test_control_c_during_an_import_is_not_swallowed(folder: Path) -> None:
    (folder / "shop.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_target("shop:server")
