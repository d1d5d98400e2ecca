"""The bearer token for the HTTP server: from the environment or from a file, never from the command line, which every
user of the machine can read."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from perdure.remote.auth import TokenProvider
from perdure.stdio.failures import Refused, Trouble
from perdure.telemetry.events import log_event

#: Of the file. A signed token with many claims has some 10 KiB.
MAX_BYTES = 64 << 10
_FIT = re.compile(r"[!-~]+")


class BadCredentials(Refused):
    """There is no usable token where the user said there would be one."""

    def __init__(self, sentence: str) -> None:
        super().__init__(Trouble(reason="no_credentials", sentence=sentence))


def provider(token_env: str | None, token_file: Path | None, environ: Mapping[str, str]) -> TokenProvider | None:
    """Gives the token each time it is needed; None if the user named none. Raises `BadCredentials`."""
    if token_env is not None:
        if token_env not in environ:
            raise BadCredentials(f"the variable {token_env} of --token-env is not set")
        token = _checked(environ[token_env], f"the variable {token_env} of --token-env")
        return lambda: token
    if token_file is not None:
        path = token_file
        _read(path)
        return lambda: _read(path)
    return None


def _read(path: Path) -> str:
    """Read anew each time: whoever renews the token writes it there."""
    where = f"the file {path} of --token-file"
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
            mode = os.fstat(opened.fileno()).st_mode
    except OSError as error:
        raise BadCredentials(f"{where} cannot be read: {error.strerror}") from error
    if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
        log_event(logging.WARNING, "stdio.token_file_open", f"{where} can be read by other users")
    if len(data) > MAX_BYTES:
        raise BadCredentials(f"{where} is larger than {MAX_BYTES} bytes")
    return _checked(data.decode("utf-8", "replace"), where)


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not _FIT.fullmatch(token):
        # Not what was seen: it is a secret.
        raise BadCredentials(f"{where} holds no token: one line of visible ASCII characters is expected")
    return token
