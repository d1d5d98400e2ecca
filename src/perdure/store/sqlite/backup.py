"""Copies a SQLite file that servers write to another file, whole or not at all.

All pages are read as of one moment, in one transaction that reads, so writers do not wait. They are written to a file
beside the target (`TARGET.part`), which gets the target's name when it is complete, checked and on the disk. A process
that dies leaves no target. Its part is locked while it lives; the next backup to the same target removes it.
"""

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator

from perdure._files.locks import HAS_FLOCK, NO_FOLLOW, flock, is_still
from perdure.errors import Misuse, StoreError
from perdure.store.maintenance import CheckResult
from perdure.store.sqlite.file import BACKUP_ID, check_file, connect_existing, named, pragma, refuse_unfit

PART = ".part"

PAGES = 1_024
"""Pages between two reports of how far the copy is: about two mebibytes, which take milliseconds."""

MARGIN = 16 << 20
"""Bytes that stay free on the target's disk: the servers may write to the same one."""

_BESIDE = ("-journal", "-wal", "-shm")

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
"""The errors of a file system without hard links."""

OnCopied = Callable[[int, int], None]
"""Called with the bytes that are copied, and with all there are."""


def back_up(path: str, target: str, *, on_copied: OnCopied, checks: bool = True) -> tuple[int, CheckResult | None]:
    """Copy the store at a path to a new file; returns its bytes, and the verdict of its check. Raises `StoreError`;
    then no target exists. Without `checks` the copy is not read again."""
    refuse_unfit(path)
    _refuse_there(target)
    part = target + PART
    with named(target, "made"), _own_part(part, target):
        _copy(path, part, target, on_copied=on_copied)
        with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as copy:
            # One file without a log beside it, which can be moved and read from anywhere. A server that opens it
            # changes that again.
            copy.execute("PRAGMA journal_mode = DELETE")
            copy.execute(f"PRAGMA application_id = {BACKUP_ID}")
            verdict = check_file(copy) if checks else None
        if verdict is not None and verdict.faults:
            fault = verdict.faults[0]
            raise StoreError(
                f"the store is damaged, and so would be its copy: {fault.where} ({fault.rule}); `perdure check` names"
                " all that is wrong; --no-check copies it as it is"
            )
        size = os.path.getsize(part)
        _sync(part)
        _give_name(part, target)
        _sync(os.path.dirname(target))
    return size, verdict


def _refuse_there(target: str) -> None:
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise Misuse(f"there is no folder {folder} for the backup; make it, or give another path")
    if os.path.isdir(target):
        raise Misuse(f"{target} is a folder; give the path of a file that does not exist yet")
    if os.path.lexists(target):
        raise Misuse(f"{target} exists already, and is not overwritten; give a path that does not exist yet")


@contextlib.contextmanager
def _own_part(part: str, target: str) -> Iterator[None]:
    """Make the part of this backup, private and locked, and remove it at the end."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW
    try:
        file = os.open(part, flags, 0o600)
    except FileExistsError:  # the part of a backup that runs, or that was killed
        if not HAS_FLOCK:
            raise Misuse(f"{part} exists; if no other backup to {target} runs, remove it") from None
        left_over = os.open(part, os.O_RDWR | NO_FOLLOW)
        try:
            if not flock(left_over) or not is_still(part, left_over):
                raise Misuse(f"another backup to {target} runs; wait for it, or give another path") from None
            _remove(part)
        finally:
            os.close(left_over)
        file = os.open(part, flags, 0o600)
    try:
        if HAS_FLOCK:
            flock(file)
        yield
    finally:
        _remove(part)
        os.close(file)


def _remove(part: str) -> None:
    for suffix in ("", *_BESIDE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part + suffix)


def _copy(path: str, part: str, target: str, *, on_copied: OnCopied) -> None:
    with (
        contextlib.closing(connect_existing(path)) as source,
        contextlib.closing(sqlite3.connect(part)) as copy,
    ):
        # The transaction keeps all steps at one moment. Without it each commit of a server would begin the copy again.
        with named(path, "read"):
            source.execute("BEGIN")
            source.execute("SELECT count(*) FROM sqlite_master").fetchone()
            page = pragma(source, "page_size")
            size = pragma(source, "page_count") * page
        room = shutil.disk_usage(os.path.dirname(target)).free
        if room < size + MARGIN:
            raise StoreError(
                f"the backup takes {size:,} bytes, and the disk of {os.path.dirname(target)} has {room:,} left; free"
                " some, or give a path on another disk"
            )
        # A copy that fails is removed, so nothing has to be undone or on the disk before its end.
        copy.execute("PRAGMA journal_mode = OFF")
        copy.execute("PRAGMA synchronous = OFF")
        source.backup(
            copy,
            pages=PAGES,
            progress=lambda _, left, pages: on_copied((pages - left) * page, pages * page),
            sleep=0.01,
        )


def _sync(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _give_name(part: str, target: str) -> None:
    """Rename the part to the target, unless another file has that name by now."""
    try:
        os.link(part, target)
    except FileExistsError:
        _refuse_there(target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _refuse_there(target)
        os.rename(part, target)
