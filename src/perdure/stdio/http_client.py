"""Makes the HTTP client of a bridge: checks the address, gets the bearer token, and heeds the host's environment.

The token comes from the environment or from a file, never from the command line, which every user of the machine can
read.
"""

import logging
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

import httpx2

from perdure.remote import endpoint
from perdure.remote.endpoint import Bearer, Refused, TokenProvider, shown
from perdure.telemetry.events import log_event

#: Of the token's file. A signed token with many claims has some 10 KiB.
MAX_BYTES = 64 << 10
_FIT = re.compile(r"[!-~]+")


def http_client(url: str, token: TokenProvider | None) -> httpx2.AsyncClient:
    """Raises `Refused` where the address, the proxies or the certificates cannot be used."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise Refused("bad_address", f"the address cannot be read: {error}") from error
    bad = ""
    if parsed.scheme not in ("http", "https") or not parsed.host:
        bad = f"{shown(url)} is not the address of an MCP server: it must begin with http:// or https://"
    elif parsed.port is not None and not 0 < parsed.port < 65_536:
        bad = f"{shown(url)} is not an address: there is no port {parsed.port}"
    elif parsed.userinfo:
        bad = "credentials must not stand in the address: give them with --token-env or --token-file"
    if bad:
        raise Refused("bad_address", bad)
    try:
        return endpoint.http_client(url, auth=None if token is None else Bearer(token))
    except OSError as error:
        sentence = f"the certificates that are trusted (SSL_CERT_FILE) cannot be read: {error.strerror or error}"
        raise Refused("bad_certificates", sentence) from error
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        # Not all of it: some libraries add advice.
        first_line = str(error).partition("\n")[0].partition(". ")[0]
        sentence = f"the proxy that the environment names cannot be used: {first_line}"
        raise Refused("bad_proxy", sentence) from error


def token_provider(token_env: str | None, token_file: Path | None, environ: Mapping[str, str]) -> TokenProvider | None:
    """Gives the token each time it is needed; None if the user named none. Raises `Refused`."""
    if token_env is not None:
        if token_env not in environ:
            raise Refused("no_credentials", f"the variable {token_env} of --token-env is not set")
        token = _checked_token(environ[token_env], f"the variable {token_env} of --token-env")
        return lambda: token
    if token_file is not None:
        path = token_file
        _read_token(path)
        return lambda: _read_token(path)
    return None


def _read_token(path: Path) -> str:
    """Read again each time: the program that renews the token writes it there."""
    where = f"the file {path} of --token-file"
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
            mode = os.fstat(opened.fileno()).st_mode
    except OSError as error:
        raise Refused("no_credentials", f"{where} cannot be read: {error.strerror}") from error
    if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
        log_event(logging.WARNING, "stdio.token_file_open", f"{where} can be read by other users")
    if len(data) > MAX_BYTES:
        raise Refused("no_credentials", f"{where} is larger than {MAX_BYTES} bytes")
    return _checked_token(data.decode("utf-8", "replace"), where)


def _checked_token(text: str, where: str) -> str:
    token = text.strip()
    if not _FIT.fullmatch(token):
        # Not what was seen: it is a secret.
        sentence = f"{where} does not hold a token: one line of visible ASCII characters is expected"
        raise Refused("no_credentials", sentence)
    return token
