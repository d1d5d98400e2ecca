import gc
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.support import memory

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

memory.use_for_all()

# A busy machine makes examples slow, not wrong; the timeout of each test is the bound that counts.
settings.register_profile("perdure", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("perdure")


def pytest_collection_finish() -> None:
    """What is there now stays for ever: not looking at it makes the collection at a test's end ten times as fast."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def anyio_backend() -> str:
    """asyncio is what the supported servers run on; anyio's own default would run each test on trio as well."""
    return "asyncio"
