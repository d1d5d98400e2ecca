"""What stands in the way to the server, in a sentence for people and a word for machines.

Two kinds: what may pass, and is waited for, and what does not pass by waiting, and is told at once.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass

import httpx2

from perdure.remote.old_wire import kind
from perdure.telemetry.events import log_event

#: As the bridge's own HTTP library names them; the rest are passing troubles.
SCHEMES = ("http", "https")
#: Longer sentences are other people's pages.
_MAX_SAID = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Something that waiting does not mend."""

    reason: str
    sentence: str


class Refused(Exception):
    """The server, or the way to it, says no for good."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.sentence)
        self.trouble = trouble


def plain(url: str) -> str:
    """An address as it may be shown: without credentials and query."""
    try:
        return str(httpx2.URL(url).copy_with(userinfo=b"", query=None, fragment=None))
    except (httpx2.InvalidURL, ValueError):
        return "the given address"


def of_address(url: str) -> Trouble | None:
    """What is wrong with an address before anybody has been asked."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        return Trouble(reason="bad_address", sentence=f"the address cannot be read: {error}")
    if parsed.scheme not in SCHEMES or not parsed.host:
        sentence = f"{plain(url)} is no address of an MCP server: it must begin with http:// or https://"
        return Trouble(reason="bad_address", sentence=sentence)
    if parsed.port is not None and not 0 < parsed.port < 65_536:
        return Trouble(reason="bad_address", sentence=f"{plain(url)} is no address: there is no port {parsed.port}")
    if parsed.userinfo:
        sentence = "credentials do not belong into the address: give them with --token-env or --token-file"
        return Trouble(reason="bad_address", sentence=sentence)
    return None


def of_response(response: httpx2.Response, url: str, *, credentials: bool) -> Trouble:
    """What a response means that is neither an answer nor a passing trouble."""
    status, where = response.status_code, plain(url)
    if status == 401:
        helps = "does not accept the given token" if credentials else "wants a token: see --token-env and --token-file"
        return Trouble(reason="unauthorized", sentence=f"{where} {helps} (HTTP 401)")
    if status == 403:
        return Trouble(reason="forbidden", sentence=f"{where} does not let us in (HTTP 403)")
    if status in (404, 405, 410):
        return Trouble(reason="not_found", sentence=f"there is no MCP server at {where} (HTTP {status})")
    if response.next_request is not None:
        place = plain(str(response.next_request.url))
        return Trouble(reason="moved", sentence=f"{where} sends us to {place}, which is not followed: use that address")
    if status == 200:
        sentence = f"{where} is no MCP server: it answers with {kind(response) or 'no content type'}"
        return Trouble(reason="not_mcp", sentence=sentence)
    return Trouble(reason="refused", sentence=f"{where} refuses the request (HTTP {status})")


def of_error(error: BaseException, url: str) -> Trouble | None:
    """What a failed connection means, if trying again cannot help: TLS that does not fit."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ssl.SSLError) and not isinstance(found, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            said = str(getattr(found, "verify_message", "") or found.reason)
            sentence = f"{plain(url)} cannot be trusted: {said[:_MAX_SAID]} (TLS)"
            return Trouble(reason="tls", sentence=sentence)
        found = found.__cause__ or found.__context__
    return None


class Teller:
    """Says each trouble once, and again when it comes back after a success."""

    def __init__(self) -> None:
        self._told: str | None = None

    def refused(self, trouble: Trouble) -> None:
        if self._told != trouble.sentence:
            self._told = trouble.sentence
            log_event(logging.ERROR, "stdio.refused", trouble.sentence, reason=trouble.reason)

    def waiting(self, url: str, why: str) -> None:
        if self._told is None:
            self._told = ""
            log_event(logging.WARNING, "stdio.waiting", f"{plain(url)} cannot be reached, and is tried again: {why}")

    def reached(self, url: str) -> None:
        if self._told is not None:
            self._told = None
            log_event(logging.INFO, "stdio.reached", f"{plain(url)} answers again")
