"""Gives each target a folder for its log, which all bridges of the target share, and removes folders that no bridge
has used for a long time. A bridge holds a shared lock on its folder for as long as it lives."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from perdure._files.locks import flock, is_still, release
from perdure._files.private import Folder
from perdure.stdio.resume_slot import FORGOTTEN, Target
from perdure.telemetry.log_records import log_event

_NAME = re.compile(r"log-[0-9a-f]{16}")
_TRIES = 3
"""A folder may be removed in the moment before it is locked; then another one is made in its place."""


@contextlib.contextmanager
def log_folder(directory: Path | None, target: Target, *, now: float | None = None) -> Iterator[Path | None]:
    """Yield the folder of a target, of mode 0700; `None`, and a sentence in the log, if there can be none."""
    with contextlib.ExitStack() as stack:
        path: Path | None = None
        try:
            if directory is None:
                raise FileNotFoundError("no directory for it is known")
            with contextlib.closing(Folder(directory)) as top:
                _remove_forgotten(top, time.time() if now is None else now)
                # A short name: the log's sockets are below it, and their paths may have 100 bytes.
                path = top.path / f"log-{target.digest[:16]}"
            for _ in range(_TRIES):
                Folder(path).close()
                file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(release, file)
                os.utime(file)
                if flock(file, shared=True) and is_still(path, file):
                    break
        except (OSError, RuntimeError, ValueError) as error:
            sentence = f"the log is kept in memory, and ends with this process: {error}"
            log_event(logging.WARNING, "stdio.log_in_memory", sentence)
            path = None
        yield path


def _remove_forgotten(top: Folder, now: float) -> None:
    for name in filter(_NAME.fullmatch, top.names()):
        with contextlib.suppress(OSError):
            file = os.open(top.path / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(file).st_mtime < now - FORGOTTEN and flock(file):
                    shutil.rmtree(top.path / name)
            finally:
                release(file)
