"""One browser and one server for all the stories of a test process: each takes seconds to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.support.clients.chromium import Browser, browsing
from tests.support.processes.cluster import Cluster, cluster


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What lives longer than a test needs an event loop that does."""
    return "asyncio"


@pytest.fixture(scope="session")
async def chromium() -> AsyncIterator[Browser]:
    async with browsing() as it:
        yield it


@pytest.fixture
async def browser(chromium: Browser) -> AsyncIterator[Browser]:
    """A private window: nothing in it is another test's."""
    async with chromium.window() as it:
        yield it


@pytest.fixture
async def caching_browser(chromium: Browser) -> AsyncIterator[Browser]:
    """A private window that keeps a page for the way back."""
    async with chromium.window(caches=True) as it:
        yield it


@pytest.fixture(scope="session")
async def shared(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    origins = (chromium.origin, chromium.origin.replace("127.0.0.1", "plain.test"))
    options = [word for origin in origins for word in ("--cors-origin", origin)]
    # On a busy machine a page is away for longer than a call takes to say 500 events, the default.
    options += ["--retry", "100ms", "--max-stream-events", "20000", "--max-session-events", "100000"]
    # Without sessions a call that takes a moment is a task, and one of `count` never is: it is found by its key alone.
    options += ["--task-after", "300ms", "--task", "count=never"]
    async with cluster(tmp_path_factory.mktemp("browser") / "log.db", *options) as it:
        yield it


@pytest.fixture
async def servers(shared: Cluster) -> AsyncIterator[Cluster]:
    """A server on a file, behind the proxy, both as good as new. The page comes from another origin."""
    yield shared
    shared.proxy.cut()
    shared.proxy.accept()
    shared.proxy.release()
    if shared.server.process.returncode is not None:
        await shared.restart()


@pytest.fixture
def sessions(servers: Cluster) -> Callable[[], list[tuple[object, ...]]]:
    """Id and incarnation of the sessions that this test has made."""
    before = {row[0] for row in servers.sessions()}
    return lambda: [row for row in servers.sessions() if row[0] not in before]


@pytest.fixture
def gate(tmp_path: Path) -> str:
    """A gate that tools wait at; `open_gate(f"{gate}.3")` lets one pass its third stop."""
    return str(tmp_path / "gate")
