"""Opens the listening socket: on an address and a port, or on a Unix socket, for a proxy on the same machine.

**Stale sockets.** The file of a Unix socket outlives a process that was killed. It is removed only if it is a socket on
which no process listens. Another start may check the same file in the same moment: it could take a socket that is
bound and not listened on yet for a stale one, and remove it. So a start locks the directory until it listens.

**Modes.** The file has its mode from the beginning: the system makes it by the process's mask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from perdure._files.locks import flock
from perdure.errors import Misuse

#: Connections that the system keeps for us until we accept them; what uvicorn uses.
BACKLOG = 2048
LOCK_LOOKS, LOCK_PAUSE = 500, 0.01
"""How often a start, or an end, tries to lock its directory, and the seconds in between. Others that start there take
some milliseconds each."""


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket, before anything else, so that a busy port is found first. Raises `Misuse`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise Misuse(f"cannot listen on {host!r}: no such address; choose another with --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # A port whose last server has just ended may be taken at once; one that is listened on may not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host} port {port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} on {host} is in use; choose another with --port (0 picks a free one)"
        raise Misuse(reason) from error
    return listener


@contextlib.contextmanager
def listening_at(path: Path, *, mode: str, sleep: Callable[[float], None] = time.sleep) -> Iterator[socket.socket]:
    """Listen at a path, which is removed at the end if it is still this socket's. Raises `Misuse`."""
    if not hasattr(socket, "AF_UNIX"):
        raise Misuse("--uds cannot work here: this system has no Unix sockets; use --host and --port")
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _locked(path, sleep):
            _remove_stale(path)
            # The mask is the whole process's; nothing else runs yet.
            mask = os.umask(0o777 & ~int(mode, 8))
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            listener.listen(BACKLOG)
            made = path.lstat()
    except (OSError, Misuse) as error:
        listener.close()
        if isinstance(error, Misuse):
            raise
        reason = f"cannot listen at {path}: {error.strerror or error}"
        if "too long" in str(error):
            reason = (
                f"cannot listen at {str(path)!r}: its {len(os.fsencode(path))} bytes are too long for a Unix socket"
            )
        elif error.errno == errno.EADDRINUSE:
            reason = f"{path} is in use; choose another path with --uds"
        raise Misuse(reason) from error
    try:
        with listener:
            yield listener
    finally:
        # Another server may have put its own socket there, after an operator removed this one's.
        with contextlib.suppress(OSError, Misuse), _locked(path, sleep):
            if os.path.samestat(path.lstat(), made):
                path.unlink()


@contextlib.contextmanager
def _locked(path: Path, sleep: Callable[[float], None]) -> Iterator[None]:
    """Keep other starts from checking the sockets of this directory, for a moment. Raises `Misuse` if another process
    holds the lock for longer: any user who may read a directory may lock it."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for _ in range(LOCK_LOOKS):
            if flock(directory):
                break
            sleep(LOCK_PAUSE)
        else:
            raise Misuse(f"another process keeps {path.parent} locked; choose a path in another folder with --uds")
        yield
    finally:
        os.close(directory)


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise Misuse(f"{path} exists and is not a socket; remove it, or choose another path with --uds")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # its backlog is full, so there is a listener
            pass
    raise Misuse(f"another process listens at {path}; stop it, or choose another path with --uds")
