"""Watching the code: what is code, and when a change of it is reported."""

from __future__ import annotations

import asyncio
import py_compile
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import Misuse
from perdure.serve.code_watch import QUIET_SECONDS, WatchedCode, code_folder, describe, watch_code
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@asynccontextmanager
async def watching(folder: Path, *, quiet: float = QUIET_SECONDS, **choice: Any) -> AsyncIterator[asyncio.Queue[str]]:
    """What is reported of a folder that is watched already."""
    told: asyncio.Queue[str] = asyncio.Queue()
    code = WatchedCode(folders=(folder,), **choice)
    task = asyncio.create_task(watch_code(code, told.put_nowait, quiet=quiet))
    await until(lambda: is_watched(folder))
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.wait({task})


def is_watched(folder: Path) -> bool:
    """Whether this process has asked the system for the changes of a folder."""
    if not Path("/proc/self/fdinfo").is_dir():  # only Linux tells it
        return True
    mark = f" ino:{folder.stat().st_ino:x} "
    for file in Path("/proc/self/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            if mark in file.read_text():
                return True
    return False


async def test_changes_in_quick_succession_are_one_report(folder: Path) -> None:
    async with watching(folder, quiet=1.0) as told:
        for name in ("a.py", "b.py", "a.py", "c.py"):
            (folder / name).write_text("x = 1")
            await asyncio.sleep(0.15)  # so that the watcher sees them one by one
        assert await told.get() == "a.py and 2 other files"


async def test_what_is_no_code_is_not_reported(folder: Path) -> None:
    async with watching(folder, includes=("*",), excludes=("made*",), store=folder / "perdure.db") as told:
        for name in ("perdure.db", "perdure.db-wal", "perdure.db-nodes/1.lock", "__pycache__/a.pyc", "made/x.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("x")
        (folder / "menu.txt").write_text("bread")
        assert await told.get() == "menu.txt"  # and nothing of what was written before it


async def test_a_change_of_one_length_within_a_second_is_not_hidden_by_the_compiled_file(folder: Path) -> None:
    (folder / "bread.py").write_text("x = 1")
    py_compile.compile(str(folder / "bread.py"))
    assert len(list((folder / "__pycache__").iterdir())) == 1
    async with watching(folder) as told:
        (folder / "bread.py").write_text("x = 2")
        assert await told.get() == "bread.py"
        assert list((folder / "__pycache__").iterdir()) == []
        (folder / "bread.py").unlink()
        assert await told.get() == "bread.py"


async def test_a_folder_that_cannot_be_watched_is_told(folder: Path) -> None:
    with pytest.raises(Misuse, match="the code cannot be watched: "):
        await watch_code(WatchedCode(folders=(folder / "none",)), lambda _: None)


@pytest.mark.parametrize(
    ("name", "choice", "expected"),
    [
        ("bakery.py", {}, True),
        ("shop/till.py", {}, True),
        ("menu.sql", {}, False),
        ("menu.sql", {"includes": ("*.sql",)}, True),
        ("bakery.py", {"includes": ("*.sql",)}, True),
        ("made/by_tool.py", {"excludes": ("made",)}, False),
        ("made/by_tool.py", {"excludes": ("*_tool.py",)}, False),
        ("deep/made/by_tool.py", {"excludes": ("deep/made/",)}, False),
        ("other/made.py", {"excludes": ("deep/made/",)}, True),
        ("../elsewhere.py", {}, False),
    ],
)
def test_patterns_choose_what_is_code(folder: Path, name: str, choice: dict[str, Any], expected: bool) -> None:
    code = WatchedCode(folders=(folder,), **choice)
    assert code.is_code((folder / name).resolve(), lambda _: False) is expected
    assert code.is_code((folder / name).resolve(), lambda _: True) is False


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("inner/main.py", "inner"),
        ("inner/main.py:server", "inner"),
        ("shop.till:server", "."),
        ("no_such_module", "."),
        ("no/such/file.py", "."),
    ],
)
def test_the_folder_that_a_target_is_imported_from_is_watched(folder: Path, target: str, expected: str) -> None:
    (folder / "inner").mkdir()
    (folder / "shop").mkdir()
    (folder / "shop" / "__init__.py").write_text("raise RuntimeError('it is not imported')\n")
    assert code_folder(target) == (folder / expected).resolve()


def test_the_package_of_an_installed_target_is_watched(folder: Path) -> None:
    import asyncio as installed

    assert code_folder("asyncio.events:server") == Path(str(installed.__file__)).parent


def test_a_report_names_one_file_and_counts_the_others() -> None:
    assert describe([Path("a.py")]) == "a.py"
    assert describe([Path("b.py"), Path("a.py")]) == "a.py and 1 other file"
    assert describe(map(Path, "abc")) == "a and 2 other files"


async def test_a_folder_that_is_deleted_and_made_again_is_watched_again(folder: Path) -> None:
    """As by a checkout of a branch that does not have it, and back."""
    app = folder / "app"
    app.mkdir()
    (app / "bakery.py").write_text("1")
    async with watching(app) as told:
        shutil.rmtree(app)
        assert await told.get() == "bakery.py"
        app.mkdir()
        (app / "bakery.py").write_text("2")
        assert (await told.get()).startswith("app")
        await until(lambda: is_watched(app))
        (app / "oven.py").write_text("3")
        while "oven.py" not in await told.get():
            pass
