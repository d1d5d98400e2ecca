from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.chromium import Browser, browsing
from tests.support.cluster import Cluster, cluster


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as it:
        yield it


@pytest.fixture
async def servers(browser: Browser, tmp_path: Path) -> AsyncIterator[Cluster]:
    """One server on a file, behind the proxy. The page comes from another origin."""
    origins = (browser.origin, browser.origin.replace("127.0.0.1", "plain.test"))
    options = [word for origin in origins for word in ("--cors-origin", origin)]
    async with cluster(tmp_path / "log.db", "--retry", "100ms", *options) as it:
        yield it


@pytest.fixture
def gate(tmp_path: Path) -> str:
    """A gate that tools wait at; `open_gate(f"{gate}.3")` lets one pass its third stop."""
    return str(tmp_path / "gate")
