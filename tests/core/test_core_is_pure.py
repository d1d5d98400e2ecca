"""The core takes values and returns values: it reaches for nothing but harmless parts of the standard library."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "src" / "perdure" / "_core"
SOURCES = sorted(CORE.rglob("*.py"))

#: Clocks, chance, input and output, and the ways around this test. Time and randomness come in as arguments.
IMPURE = {
    *("asyncio", "threading", "subprocess", "signal", "multiprocessing", "concurrent"),
    *("time", "random", "secrets", "uuid"),
    *("logging", "os", "io", "pathlib", "tempfile", "shutil", "socket", "ssl", "select", "selectors", "sqlite3"),
    *("urllib", "http", "importlib", "ctypes"),
}


def module_name(source: Path) -> str:
    parts = source.relative_to(CORE.parents[1]).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def is_pure(name: str) -> bool:
    top = name.partition(".")[0]
    return name.startswith("perdure._core") or (top in sys.stdlib_module_names and top not in IMPURE)


@pytest.mark.parametrize("source", SOURCES, ids=module_name)
def test_a_core_module_imports_only_the_core_and_pure_parts_of_the_standard_library(source: Path) -> None:
    assert [name for name in imported(ast.parse(source.read_text("utf-8"))) if not is_pure(name)] == []


#: `perdure/__init__.py` brings in everything, so an empty package stands in for it.
LOAD_ALONE = """
import importlib, json, sys, types
root, *names = sys.argv[1:]
package = types.ModuleType("perdure")
package.__path__ = [root]
sys.modules["perdure"] = package
for name in names:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def test_the_core_loads_where_nothing_else_is_installed() -> None:
    names = [module_name(source) for source in SOURCES]
    command = [sys.executable, "-I", "-S", "-c", LOAD_ALONE, str(CORE.parent), *names]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stderr == ""
    loaded = set(json.loads(run.stdout))
    assert set(names) <= loaded
    foreign = {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}
    assert foreign - {"__main__"} == {"perdure", *names}
