"""Checks the address and the bearer token that a user gave to a command, and makes the HTTP client from them.

The token comes from the environment or from a file, never from the command line, which every user of the machine can
read.
"""

import logging
import os
import re
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import httpx2

from perdure.remote.endpoint import Bearer, Refused, TokenProvider, http_client, shown
from perdure.telemetry.log_records import log_event

#: Of the token's file. A signed token with many claims has some 10 KiB.
MAX_BYTES = 64 << 10
_FIT = re.compile(r"[!-~]+")


def token_provider(env: str | None, file: Path | None, environ: Mapping[str, str]) -> TokenProvider | None:
    """Reads the user's token each time that it is called: the program that renews it writes it to its file.

    None if the user gave none. Raises `Refused` if there is no token now.
    """
    if env is None and file is None:
        return None
    provider = partial(_read, env, file, environ)
    provider()
    return provider


def check_address(url: str) -> None:
    """Raise `Refused` unless this is the address of a server, without credentials in it."""
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


def checked_client(url: str, token: TokenProvider | None) -> httpx2.AsyncClient:
    """Raises `Refused` where the address, the proxies or the certificates cannot be used."""
    check_address(url)
    try:
        return http_client(url, auth=None if token is None else Bearer(token))
    except OSError as error:
        sentence = f"the certificates that are trusted (SSL_CERT_FILE) cannot be read: {error.strerror or error}"
        raise Refused("bad_certificates", sentence) from error
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        # Not all of it: some libraries add advice.
        first_line = str(error).partition("\n")[0].partition(". ")[0]
        sentence = f"the proxy that the environment names cannot be used: {first_line}"
        raise Refused("bad_proxy", sentence) from error


def on_401(token: TokenProvider | None) -> str:
    """How a sentence about a 401 ends: what the user can do about it."""
    return "wants a token: see --token-env and --token-file" if token is None else "does not accept the given token"


def _read(env: str | None, file: Path | None, environ: Mapping[str, str]) -> str:
    reason = "no_credentials"
    if file is not None:
        where = f"the file {file} of --token-file"
        try:
            with file.open("rb") as opened:
                data = opened.read(MAX_BYTES + 1)
                mode = os.fstat(opened.fileno()).st_mode
        except OSError as error:
            raise Refused(reason, f"{where} cannot be read: {error.strerror}") from error
        if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
            log_event(logging.WARNING, "remote.token_file_open", f"{where} can be read by other users")
        if len(data) > MAX_BYTES:
            raise Refused(reason, f"{where} is larger than {MAX_BYTES} bytes")
        text = data.decode("utf-8", "replace")
    else:
        name = env or ""
        where = f"the variable {name} of --token-env"
        if name not in environ:
            raise Refused(reason, f"{where} is not set")
        text = environ[name]
    if not _FIT.fullmatch(token := text.strip()):
        # Not what was seen: it is a secret.
        raise Refused(reason, f"{where} does not hold a token: one line of visible ASCII characters is expected")
    return token
