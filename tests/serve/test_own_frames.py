"""An error of the user's code, shown by the frames that the user can change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from perdure.errors import TargetFailed
from perdure.serve.target import blame, load_target, own_traceback


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(path: Path, source: str) -> BaseException:
    """The error of a file's code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    with pytest.raises(BaseException) as told:  # noqa: PT011
        exec(compile(source, str(path), "exec"), vars(ModuleType("made")))
    return told.value.with_traceback(told.tb.tb_next)


def places(error: BaseException) -> list[str]:
    """The files that a traceback names."""
    lines = [line.strip() for line in own_traceback(error).splitlines() if line.startswith("  File ")]
    return [line.split('"')[1].rpartition("/")[2] for line in lines]


def test_the_frames_of_libraries_are_left_out_also_of_causes(folder: Path) -> None:
    error = run(
        folder / "bakery.py",
        "import json\ntry:\n    json.loads('{')\nexcept ValueError as error:\n    raise KeyError('oven') from error\n",
    )
    assert places(error) == ["bakery.py", "bakery.py"]
    assert "The above exception was the direct cause" in own_traceback(error)
    assert blame(error) == "KeyError: 'oven' (bakery.py:5)"


def test_the_frames_of_a_group_are_the_users_too(folder: Path) -> None:
    source = "import json\ntry:\n    json.loads('{')\nexcept ValueError as e:\n    raise ExceptionGroup('two', [e])\n"
    error = run(folder / "bakery.py", source)
    said = own_traceback(error)
    assert said.count("bakery.py") == 3  # the group, its member, and the member as what was handled then
    assert "json/" not in said


def test_a_module_that_cannot_be_read_is_shown_without_what_imported_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "broken_bakery.py").write_text("def (\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(TargetFailed) as told:
        load_target("broken_bakery")
    assert told.value.traceback.splitlines()[0] == f'  File "{folder / "broken_bakery.py"}", line 1'


def test_a_syntax_error_is_shown_without_the_library_that_imports_in_its_own_way(folder: Path) -> None:
    """FastMCP brings one along (beartype)."""
    error = run(folder / "site-packages" / "loader.py", "compile('def (', 'bakery.py', 'exec')\n")
    assert own_traceback(error).splitlines()[0] == '  File "bakery.py", line 1'


@pytest.mark.parametrize("place", ["site-packages", "dist-packages"])
def test_code_that_is_itself_installed_is_shown(folder: Path, place: str) -> None:
    error = run(folder / "lib" / place / "bakery.py", "\n1 / 0\n")
    assert places(error) == ["bakery.py"]
    assert blame(error) == f"ZeroDivisionError: division by zero (lib/{place}/bakery.py:2)"


def test_installed_code_is_left_out_where_the_users_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = folder / "site-packages" / "flour_of_the_library.py"
    library.parent.mkdir()
    library.write_text("def sift():\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(library.parent)
    error = run(folder / "bakery.py", "import flour_of_the_library\nflour_of_the_library.sift()\n")
    del sys.modules["flour_of_the_library"]
    assert places(error) == ["bakery.py"]
    assert blame(error) == "ZeroDivisionError: division by zero (bakery.py:2)"


@pytest.mark.parametrize("show", [blame, own_traceback])
def test_an_error_without_frames_is_still_told(show: Callable[[BaseException], str]) -> None:
    assert show(ValueError("no stock")).strip() == "ValueError: no stock"
