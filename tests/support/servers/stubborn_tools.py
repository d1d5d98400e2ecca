"""The slow tools in a module that kills its process as it is imported, or fails, when a file says so."""

from __future__ import annotations

import os
import signal

from tests.support.servers.slow_tools import folder, server

__all__ = ["server"]

if (folder() / "dies").exists():
    os.kill(os.getpid(), signal.SIGKILL)
if (folder() / "broken").exists():
    raise RuntimeError("broken on purpose")
