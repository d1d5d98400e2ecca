"""Reads bearer tokens from a file: one `principal:token` in each line.

Several tokens may name one principal, so that a token can be replaced while the old one still works. Messages name the
file and the line and never show a token.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from mcp.server.auth.provider import AccessToken, TokenVerifier

from perdure.errors import Misuse

#: Tens of thousands of tokens fit; a larger file is most likely the wrong one.
MAX_FILE = 1 << 20
#: An attacker must guess 16 characters: 64 bits even if they are only hexadecimal digits.
MIN_TOKEN = 16


class FileTokens(TokenVerifier):
    """Finds the principal of a bearer token.

    It keeps digests only. The time of a lookup says nothing useful about the token, because an attacker cannot choose
    the digest's bytes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read a file of tokens. Raises `Misuse` with the file, the line and the reason."""
        self._path = path
        self.read_again()

    def read_again(self) -> None:
        """Read the tokens again. Raises `Misuse` as the constructor, and keeps the old ones then."""
        path = self._path
        principals: dict[bytes, str] = {}
        for where, line in _lines(Path(path)):
            principal, colon, token = (part.strip() for part in line.partition(":"))
            if not colon:
                raise Misuse(f"{where}: no colon; each line is principal:token")
            if not principal or not token:
                raise Misuse(f"{where}: no {'principal before' if not principal else 'token after'} the colon")
            if not principal.isprintable():
                raise Misuse(f"{where}: the principal has characters that cannot be shown")
            if not all("!" <= character <= "~" for character in token):
                why = "which an HTTP header cannot carry safely"
                raise Misuse(f"{where}: the token has blanks or other characters than visible ASCII, {why}")
            if ":" in token:
                raise Misuse(f"{where}: more than one colon; neither a principal nor a token may have one")
            if len(token) < MIN_TOKEN:
                raise Misuse(f"{where}: the token has {len(token)} characters; fewer than {MIN_TOKEN} could be guessed")
            if (owner := principals.setdefault(_digest(token), principal)) != principal:
                raise Misuse(f"{where}: this token already belongs to another principal, {owner!r}")
        if not principals:
            raise Misuse(f"{path} has no token, so every request would be refused; write lines of principal:token")
        self._principals = principals

    async def verify_token(self, token: str) -> AccessToken | None:
        principal = self._principals.get(_digest(token))
        if principal is None:
            return None
        return AccessToken(token=token, client_id=principal, subject=principal, scopes=[])


def _digest(token: str) -> bytes:
    # Header values may hold any text that a peer sends, and none may make this raise.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def is_open_to_others(mode: int, *, owner: int, reader: int) -> bool:
    """Whether more users than its owner may use a file. The group may read a file of root's: that is how Kubernetes
    gives a secret to a process that is not root, and how PostgreSQL takes its keys."""
    forbidden = 0o037 if owner == 0 != reader else 0o077
    return mode & forbidden != 0


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is neither empty nor a comment, with its place."""
    try:
        # Without O_NONBLOCK a pipe would make us wait for its writer before we see that it is a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            # The open file is asked, so that a link is judged by its target and nothing can change in between.
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Misuse(f"{path} is not a regular file")
            # Windows has no such mode bits; access lists decide there.
            if os.name == "posix" and is_open_to_others(status.st_mode, owner=status.st_uid, reader=os.geteuid()):
                mode = f"{status.st_mode & 0o777:04o}"
                raise Misuse(f"{path} can be used by others than its owner (mode {mode}); do: chmod 600")
            if status.st_size > MAX_FILE:
                raise Misuse(f"{path} is larger than {MAX_FILE >> 20} MiB")
            text = file.read(MAX_FILE).decode("utf-8-sig")
    except OSError as error:
        raise Misuse(f"cannot read the tokens in {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise Misuse(f"{path} is not UTF-8 text") from None
    for number, line in enumerate(text.split("\n"), 1):
        if (line := line.strip()) and not line.startswith("#"):
            yield f"{path}:{number}", line
