import asyncio
import functools
import gc
import inspect
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.stores import memory_files

# Where the environment forbids bytecode (container images do), each program compiles the package again: a fifth of the
# time that it takes to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every program that they start and
# stop with it: those tests would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `nohup` does the same with the signal of a terminal that is closed.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

memory_files.use_for_all()

# A busy machine makes examples slow, not wrong; the timeout of each test is the bound that counts. There are more in
# `make test-all`.
EXAMPLES = 20 * int(os.environ.get("PERDURE_TEST_FUZZ", "1"))
settings.register_profile("perdure", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("perdure")


OWN_SHARE = 0.9
"""The part of a test's timeout that its coroutine has. The rest is for fixtures."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bound tests that are coroutines in their own event loop, too.

    The signal of pytest-timeout ends the loop's run and not the test's task. The same task of anyio tears the fixtures
    down: it would wait for the test for ever, and the whole run with it.
    """
    usual = config.getoption("timeout") or config.getini("timeout")
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("timeout")
            item.obj = _bounded(item.obj, OWN_SHARE * float(marker.args[0] if marker else usual))


def _bounded(test: Callable[..., Awaitable[None]], seconds: float) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def bounded(*arguments: Any, **named: Any) -> None:
        async with asyncio.timeout(seconds or None):
            await test(*arguments, **named)

    return bounded


def pytest_collection_finish() -> None:
    """What is there now stays for ever: not looking at it makes the collection at a test's end ten times as fast."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So does what the tests of a module have imported and leave behind."""
    yield
    if nextitem is None or nextitem.parent is not item.parent:
        gc.collect()
        gc.freeze()


@pytest.fixture
def anyio_backend() -> str:
    """asyncio is what the supported servers run on; anyio's own default would run each test on trio as well."""
    return "asyncio"
