from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _all_sentences(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "perdure")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where tokens are kept. It is not there yet."""
    return tmp_path / "state" / "perdure"
