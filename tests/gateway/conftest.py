from __future__ import annotations

import os
from collections.abc import Iterator

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.processes.marked_processes import MARK, marked


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """No process that a test has started is left after it: neither a child or a zombie of this process, nor one that a
    child has started and that belongs to nobody any more."""
    before = set(psutil.Process().children())
    yield
    left = [process for process in psutil.Process().children() if process not in before]
    left += marked(f"{MARK}={os.getpid()}".encode())
    assert left == []
