"""Made-up histories: the SQLite store shows what the store in memory shows, after every step, also when reopened."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from perdure.store.sqlite import SqliteStore
from tests.conftest import EXAMPLES
from tests.store.machine import store_machine
from tests.support.stores import memory_files


@pytest.fixture
def folder() -> Iterator[Path]:
    """For the thousand small files that are made."""
    with tempfile.TemporaryDirectory(dir=memory_files.SMALL) as name:
        yield Path(name)


@pytest.mark.timeout(400)
def test_histories_on_sqlite_show_what_the_model_shows(folder: Path) -> None:
    machine = store_machine(lambda name: SqliteStore(str(folder / name)))
    run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES // 2, stateful_step_count=30))
