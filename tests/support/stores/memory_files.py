"""Puts the files of tests in memory, where the system has a place for them.

Files are synced to the disk many thousand times, which takes minutes and proves nothing: no test takes the power away.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PLACE = Path("/dev/shm")
#: Bytes of room for the files of all tests; they take a tenth of it.
ROOM = 4 << 30

#: The folder for the small files of tests that sync most, also where the place has no room for all; `None`: the usual.
SMALL = str(_PLACE) if _PLACE.is_dir() and os.access(_PLACE, os.W_OK) else None


def use_for_all() -> None:
    """Make it the folder for temporary files, of this process and those that it starts, unless one is chosen already.
    There must be room, and programs must be allowed to start from there."""
    if SMALL is not None and "TMPDIR" not in os.environ:
        system = os.statvfs(SMALL)
        if system.f_bavail * system.f_frsize >= ROOM and not system.f_flag & os.ST_NOEXEC:
            os.environ["TMPDIR"] = tempfile.tempdir = SMALL
