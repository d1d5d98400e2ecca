from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stdio.stdio_bridges import end_hosts


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: the path of a socket may have 100 characters."""
    with tempfile.TemporaryDirectory(prefix="p-") as name:
        yield Path(name)


@pytest.fixture(scope="session", autouse=True)
def _hosts() -> Iterator[None]:
    yield
    end_hosts()
