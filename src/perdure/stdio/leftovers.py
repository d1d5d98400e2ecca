"""Files of hosts that no longer live are removed when they are seen; those of living hosts never."""

from __future__ import annotations

import logging
import os

from perdure._files.private import Folder
from perdure.stdio.host.processes import Processes
from perdure.stdio.labels import Label, SlotName, read_name
from perdure.stdio.shelf import label_of, used
from perdure.telemetry.events import log_event

FORGOTTEN = 30 * 24 * 3600
"""Seconds after which the files of a host that cannot be seen from here (another container, another machine with the
same home) are removed. No session is kept for so long after its last use, unless an operator says so."""


def sweep(folder: Folder, mine: Label, processes: Processes, *, keep: SlotName, now: float) -> None:
    """Remove what dead hosts left. A slot that a bridge holds stays, and so does every file that is not ours."""
    names = {name for file in folder.names() if (name := read_name(file)) is not None}
    for name in sorted(names, key=str):
        if (name.pid, name.start) != (keep.pid, keep.start) and _is_left(folder, name, mine, processes, now):
            _remove(folder, name)


def _is_left(folder: Folder, name: SlotName, mine: Label, processes: Processes, now: float) -> bool:
    label = label_of(folder, name)
    if label is not None and label.same_place(mine):
        return processes.is_gone(name.pid, name.start)
    if label is not None and label.machine == mine.machine and label.boot != mine.boot:
        return True
    return used(folder, name) < (now - FORGOTTEN) * 1e9


def _remove(folder: Folder, name: SlotName) -> None:
    try:
        lock = folder.lock(name.lock)
    except OSError:
        return
    if lock is None:
        return
    for file in [*name.contents, name.lock]:
        if folder.is_plain(file):
            folder.remove(file)
    os.close(lock)
    log_event(logging.DEBUG, "token.removed", f"Removed what the host {name.pid} left, which is gone", slot=str(name))
