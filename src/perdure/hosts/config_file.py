"""Reads a host's configuration file and replaces it: whole or not at all, with its mode, with a backup beside it."""

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from perdure._files.locks import HAS_FLOCK, flock
from perdure.errors import Misuse

BACKUP = ".perdure-backup"
"""Put after the file's name: the file as it was before the last change."""
_BINARY: int = getattr(os, "O_BINARY", 0)  # Windows would change line ends without it


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The text and the mode of a file when it was read."""

    path: Path
    """The file itself: a link stays, and the file that it points to is replaced."""
    text: str | None
    """None for a file that does not exist."""
    mode: int = 0
    owner: tuple[int, int] = (-1, -1)

    @classmethod
    def read(cls, path: Path) -> "ConfigFile":
        """Raises `Misuse` where it cannot be read, or is not text."""
        try:
            real = Path(os.path.realpath(path))
            about = os.stat(real)
            if not stat.S_ISREG(about.st_mode):
                raise Misuse(f"{path} is not a plain file: name another one with --file")
            text = real.read_bytes().decode()
        except FileNotFoundError:
            return cls(path=real, text=None)
        except UnicodeDecodeError as error:
            seen = f"byte {error.start} is 0x{error.object[error.start]:02x}"
            raise Misuse(f"{path} is not UTF-8 text ({seen}): save it as UTF-8, or use --print") from error
        except OSError as error:
            raise Misuse(f"{path} cannot be read: {error.strerror}") from error
        return cls(path=real, text=text, mode=stat.S_IMODE(about.st_mode), owner=(about.st_uid, about.st_gid))

    def replace(self, text: str) -> Path | None:
        """Write another text. Returns the backup's path, if there was something to back up.

        Raises `Misuse`, and then nothing has changed.
        """
        if self.text is not None and not self.mode & stat.S_IWUSR:
            raise Misuse(f"{self.path} is read-only (mode {self.mode:04o}): chmod u+w it, or use --print")
        try:
            data = text.encode()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                # Other processes of `perdure install` change no file in this directory meanwhile. The lock is the
                # directory's, because the file is replaced.
                is_free = True
                with contextlib.suppress(OSError):  # a file system without locks, or a directory that may not be read
                    if HAS_FLOCK:
                        directory = os.open(self.path.parent, os.O_RDONLY)
                        stack.callback(os.close, directory)
                        is_free = flock(directory)
                if not is_free or ConfigFile.read(self.path) != self:
                    raise Misuse(f"{self.path} was changed by another program in this moment: run the command again")
                backup = None
                if self.text is not None:
                    backup = self.path.with_name(self.path.name + BACKUP)
                    self._write(backup, self.text.encode())
                self._write(self.path, data)
                return backup
        except UnicodeEncodeError as error:
            raise Misuse("the options hold bytes that are not UTF-8, which the file cannot hold") from error
        except OSError as error:
            raise Misuse(f"{error.filename or self.path} cannot be written: {error.strerror}") from error

    def _write(self, path: Path, data: bytes) -> None:
        """Replace a file, whole or not at all, by one with the mode and owner that the configuration has."""
        made = path.with_name(f"{path.name}.{os.getpid()}.new")
        mode = 0o666 if self.text is None else 0o600  # until the file has its own mode
        with contextlib.suppress(FileNotFoundError):
            made.unlink()
        try:
            with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, mode), "wb") as opened:
                if self.text is not None and hasattr(os, "fchown"):  # not on Windows
                    with contextlib.suppress(PermissionError):  # only root gives files away
                        os.fchown(opened.fileno(), *self.owner)
                    os.fchmod(opened.fileno(), self.mode)
                opened.write(data)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(made, path)
        except BaseException:
            with contextlib.suppress(OSError):
                made.unlink()
            raise
