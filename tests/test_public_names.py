"""`perdure` is the list of public names, and nothing else."""

import types

import pytest

import perdure


def test_the_public_names_are_those_of_the_list() -> None:
    public = {name for name in dir(perdure) if not name.startswith("_")}
    assert public == set(perdure.__all__)
    here = {
        name
        for name, value in vars(perdure).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert here - {"annotations", "TYPE_CHECKING", "Any"} <= public


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        perdure.nothing  # type: ignore[attr-defined]  # noqa: B018 - asking for it is the test
    assert perdure.__version__


def test_every_public_name_says_what_it_is() -> None:
    assert [name for name in perdure.__all__ if not getattr(perdure, name).__doc__] == []


def test_the_list_is_sorted_so_that_a_name_is_found() -> None:
    assert perdure.__all__ == sorted(perdure.__all__)
