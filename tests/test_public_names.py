"""`perdure` is the list of public names, and nothing else."""

import subprocess
import sys
import types
from importlib.metadata import version

import pytest

import perdure


def test_the_public_names_are_those_of_the_list() -> None:
    public = {
        name
        for name in dir(perdure)
        if not name.startswith("_") and not isinstance(getattr(perdure, name), types.ModuleType)
    } - {"annotations"}
    assert public == set(perdure.__all__)


def test_every_public_name_says_what_it_is() -> None:
    assert [name for name in perdure.__all__ if not getattr(perdure, name).__doc__] == []


def test_the_list_is_sorted_so_that_a_name_is_found() -> None:
    assert perdure.__all__ == sorted(perdure.__all__, key=lambda name: (not name.isupper(), name))  # constants first


def test_a_name_that_is_not_there_is_told_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'perdure' has no attribute 'nothing'"):
        perdure.nothing  # noqa: B018
    assert perdure.__version__ == version("perdure")


@pytest.mark.parametrize("module", ["perdure.cli.entry", "perdure.store", "perdure.admin", "perdure.serve.worker_pool"])
def test_who_serves_nothing_does_not_wait_for_the_sdk(module: str) -> None:
    """Importing it takes most of a second, and 40 MiB."""
    code = f"import sys, {module}; print({{'mcp', 'mcp_types', 'pydantic', 'uvicorn'}} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
