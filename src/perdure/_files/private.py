"""A folder and files that are this user's alone (T8).

The folder is held open and files are reached through it, so that nobody can put another folder in its place. What is
a link, belongs to somebody else, or may be read by others is not trusted, whatever it holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

EVERYONES_LOCK = "lock"
"""The name of the file that is locked while one process looks through a folder. It stays there, empty."""


class Untrusted(Exception):
    """A file is there, and it cannot be read or must not be believed."""


class Folder:
    """A folder of mode 0700. Raises `OSError` if it cannot be made, opened or trusted."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        _make(self.path)
        if self.path.is_symlink():  # said here, since systems differ in how they refuse it below
            raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(self.path))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check_folder(os.fstat(self._fd), self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def read(self, name: str, *, limit: int) -> bytes | None:
        """What a file holds, or None if there is none. Raises `Untrusted`."""
        try:
            # A pipe must not make us wait.
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            link = error.errno in {errno.ELOOP, errno.EMLINK}
            raise Untrusted("it is a link" if link else f"it cannot be opened: {error.strerror}") from error
        try:
            _check_file(os.fstat(file))
            return _read_all(file, limit)
        except OSError as error:
            raise Untrusted(f"it cannot be read: {error.strerror}") from error
        finally:
            os.close(file)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file, whole or not at all; a power cut cannot undo it. Raises `OSError`."""
        made = f"{name}.new"
        self.remove(made)
        file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)
        try:
            try:
                _write_all(file, data)
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(made, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self.remove(made)
            raise
        os.fsync(self._fd)

    def remove(self, name: str) -> None:
        """A file that is not there, or that cannot be removed, is left."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def is_plain(self, name: str) -> bool:
        """Whether it is a file of this user's, and no link."""
        about = self._about(name)
        return about is not None and stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()

    def changed(self, name: str) -> int:
        """When a file was changed, in nanoseconds; 0 if it is not there."""
        about = self._about(name)
        return 0 if about is None else about.st_mtime_ns

    def lock(self, name: str) -> int | None:
        """The locked file of this name, made if need be; None if somebody has it, or if it is none to be trusted.

        Raises `OSError` where no file can be made. Whoever removes such a file holds its lock, so a lock counts only
        if the file is still the one of that name.
        """
        try:
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self._fd)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO}:
                return None
            raise
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.is_plain(name) and self.is_still(name, file):
                return file
        except BlockingIOError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        return None

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether we are the only process that looks through the folder, which is so until the block ends."""
        file = self.lock(EVERYONES_LOCK)
        try:
            yield file is not None
        finally:
            if file is not None:
                unlock(file)
                os.close(file)

    def is_still(self, name: str, file: int) -> bool:
        """Whether an open file is the one of this name."""
        about = self._about(name)
        return about is not None and os.path.samestat(about, os.fstat(file))

    def _about(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return None


def unlock(file: int) -> None:
    """Free a lock also where a child that was forked in this moment has the file: closing it would not be enough."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def _make(path: Path) -> None:
    """The folder and those above it that are missing, each for this user alone."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def _check_folder(about: os.stat_result, path: Path) -> None:
    if about.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "it belongs to another user", str(path))
    if about.st_mode & 0o077:
        mode = stat.S_IMODE(about.st_mode)
        raise PermissionError(errno.EACCES, f"others may use it (mode {mode:04o}; chmod 700 it)", str(path))


def _check_file(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise Untrusted("it is not a plain file")
    if about.st_uid != os.geteuid():
        raise Untrusted("it belongs to another user")
    if about.st_mode & 0o077:
        raise Untrusted(f"others may use it (mode {stat.S_IMODE(about.st_mode):04o})")
    if about.st_nlink != 1:
        raise Untrusted("it has a second name")


def _read_all(file: int, limit: int) -> bytes:
    data = b""
    while chunk := os.read(file, limit + 1 - len(data)):
        data += chunk
        if len(data) > limit:
            raise Untrusted(f"it has more than {limit:,} bytes")
    return data


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
