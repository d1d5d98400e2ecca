"""`perdure` is the list of public names, and nothing else."""

import types

import perdure


def test_the_public_names_are_those_of_the_list() -> None:
    public = {
        name
        for name, value in vars(perdure).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }
    assert public == set(perdure.__all__)


def test_every_public_name_says_what_it_is() -> None:
    assert [name for name in perdure.__all__ if not getattr(perdure, name).__doc__] == []


def test_the_list_is_sorted_so_that_a_name_is_found() -> None:
    assert perdure.__all__ == sorted(perdure.__all__)
