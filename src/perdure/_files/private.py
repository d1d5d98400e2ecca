"""Reads and writes files that are this user's alone (T8).

`Folder` is held open and its files are reached through it, so that no other folder can be put in its place. What is a
link, belongs to another user, or may be used by others is not trusted, whatever it holds. `read` and `replace` work on
paths as well, on Windows too, where numbers of users and modes mean nothing.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from perdure._files.locks import NO_FOLLOW, NO_WAIT, is_still, lock_file, release

EVERYONES_LOCK = "lock"
"""The name of the file that is locked while one process reads a whole folder. The file stays, empty."""


class Untrusted(Exception):
    """A file exists, and it cannot be read or must not be believed."""


def read(
    path: str | os.PathLike[str], *, limit: int | None, dir_fd: int | None = None, may_be_shared: bool = False
) -> bytes | None:
    """Return the bytes of a file that only this user can change; None if it does not exist. Raises `Untrusted`.

    `may_be_shared`: others may read it, and it may have a second name.
    """
    try:
        file = os.open(path, os.O_RDONLY | NO_FOLLOW | NO_WAIT, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        is_link = error.errno in {errno.ELOOP, errno.EMLINK}
        raise Untrusted("it is a link" if is_link else f"it cannot be opened: {error.strerror}") from error
    try:
        about = os.fstat(file)
        mode = stat.S_IMODE(about.st_mode)
        if not stat.S_ISREG(about.st_mode):
            raise Untrusted("it is not a plain file")
        if hasattr(os, "geteuid"):  # not on Windows, whose folders say who may read
            if about.st_uid != os.geteuid():
                raise Untrusted("it belongs to another user")
            if mode & (0o022 if may_be_shared else 0o077):
                raise Untrusted(f"others may {'write' if may_be_shared else 'use'} it (mode {mode:04o})")
            if about.st_nlink != 1 and not may_be_shared:
                raise Untrusted("it has a second name")
        with open(file, "rb", closefd=False) as opened:
            data = opened.read(-1 if limit is None else limit + 1)
        if limit is not None and len(data) > limit:
            raise Untrusted(f"it has more than {limit:,} bytes")
        return data
    except OSError as error:
        raise Untrusted(f"it cannot be read: {error.strerror}") from error
    finally:
        os.close(file)


def replace(path: str | os.PathLike[str], data: bytes, *, dir_fd: int | None = None) -> None:
    """Replace a file, whole or not at all, by one of mode 0600. Raises `OSError`.

    Within an open folder (`dir_fd`) a power cut cannot undo it. Otherwise it survives the death of this process, and a
    power cut may take the last moments with it.
    """
    made = f"{os.fspath(path)}.new"
    with contextlib.suppress(OSError):
        os.unlink(made, dir_fd=dir_fd)
    file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o600, dir_fd=dir_fd)
    try:
        with open(file, "wb") as opened:
            opened.write(data)
            opened.flush()
            if dir_fd is not None:
                os.fsync(file)
        os.replace(made, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made, dir_fd=dir_fd)
        raise
    if dir_fd is not None:
        os.fsync(dir_fd)


def check_folder(about: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raise `OSError` unless this is a folder that only this user can use."""
    if not stat.S_ISDIR(about.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(path))
    if about.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "it belongs to another user", str(path))
    if about.st_mode & 0o077:
        mode = stat.S_IMODE(about.st_mode)
        raise PermissionError(errno.EACCES, f"others may use it (mode {mode:04o}; chmod 700 it)", str(path))


class Folder:
    """A folder of mode 0700. Raises `OSError` if it cannot be made, opened or trusted."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        missing = [folder for folder in (self.path, *self.path.parents) if not os.path.lexists(folder)]
        for folder in reversed(missing):  # each for this user alone
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        if self.path.is_symlink():  # said here, since systems differ in how they refuse it below
            raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(self.path))
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            check_folder(os.fstat(self._fd), self.path)
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
        return read(name, limit=limit, dir_fd=self._fd)

    def write(self, name: str, data: bytes) -> None:
        replace(name, data, dir_fd=self._fd)

    def remove(self, *names: str) -> None:
        """Remove files. A file that does not exist, or that cannot be removed, is ignored."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)

    def is_plain(self, name: str) -> bool:
        """Whether it is this user's own file, and not a link."""
        about = self._about(name)
        return about is not None and stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()

    def changed(self, name: str) -> int:
        """Return when a file was changed, in nanoseconds; 0 if it does not exist."""
        about = self._about(name)
        return 0 if about is None else about.st_mtime_ns

    def lock(self, name: str) -> int | None:
        """Lock the file of this name, made if need be. None if another process has it, or if it cannot be trusted.

        Raises `OSError` where no file can be made.
        """
        try:
            file = lock_file(name, dir_fd=self._fd)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO}:
                return None
            raise
        if file is not None and not self.is_plain(name):
            os.close(file)
            return None
        return file

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Yield whether this is the only process that reads the whole folder, until the block ends."""
        file = self.lock(EVERYONES_LOCK)
        try:
            yield file is not None
        finally:
            if file is not None:
                release(file)

    def is_still(self, name: str, file: int) -> bool:
        return is_still(name, file, dir_fd=self._fd)

    def _about(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return None
