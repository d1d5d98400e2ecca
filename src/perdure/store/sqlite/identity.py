"""Tells whether the path of a SQLite file still leads to the file that was opened.

A file may be deleted under a running server, or another one moved into its place. SQLite does not notice: what is open
stays the old file, what is opened later is the new one, and both use the log of one name beside it (`-wal`, `-shm`). So
it is looked at now and then, and before each further connection. (A connection to a file that has gone may be closed:
then SQLite does look, and leaves the log of that name alone.)
"""

from __future__ import annotations

import contextlib
import os

from perdure.errors import StoreReplaced

_LOGS = ("-wal", "-shm")

_File = tuple[int, int]


class FileIdentity:
    """The file at a path as it was when it was opened. May be used in any thread."""

    def __init__(self, path: str) -> None:
        # As SQLite names the log: by what a link leads to.
        self._path = path
        self._real = os.path.realpath(path)
        self._file: _File | None = None
        self._logs: dict[str, _File] = {}
        self.lost = ""
        """What became of the file, once it is not there any more."""

    def opened(self) -> None:
        """From now on the file that is there is the one."""
        self._real = os.path.realpath(self._path)
        self._file, self._logs, self.lost = _file(self._path), {}, ""

    def check(self) -> None:
        """Raise `StoreReplaced` if the path leads elsewhere, now or ever before."""
        if self._file is None:
            return
        if not self.lost:
            found = _file(self._path)
            if found == self._file:
                for suffix in _LOGS:
                    if (log := _file(self._real + suffix)) is not None:
                        self._logs[suffix] = log
                return
            self.lost = "was deleted" if found is None else "was replaced by another one"
        raise StoreReplaced(f"the SQLite file {self._path} {self.lost} while it was open; start the server again")

    def take_logs_away(self) -> None:
        """Remove the lost file's log, if it is still there: applied to another file it would damage that one."""
        while self._logs:
            suffix, log = self._logs.popitem()
            with contextlib.suppress(OSError):
                if _file(self._real + suffix) == log:
                    os.unlink(self._real + suffix)


def _file(path: str) -> _File | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
