"""The bridge's side of the broker: a token from the slot becomes a session, and the next token takes its place.

A new token is on disk before it is confirmed, and the old one stays good until then: whenever this process dies, what
is on disk leads back to the session (T10). Whoever drives the session does not ask whether there is anything to resume
with (T6): without a slot, or without a broker at the server, there is simply no session of before.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import httpx2

from perdure._core.reconnect import Patience
from perdure.remote.old_wire import retry_after
from perdure.stdio import failures as troubles
from perdure.stdio.following import attempts
from perdure.stdio.slots import Slot
from perdure.telemetry.events import log_event

#: Seconds for one word with the broker. It does little, and a handshake waits for it.
TIMEOUT = 5.0
#: At the start the broker is asked before the host says anything. If that fails, the handshake asks again.
ONCE = Patience(max_time=0.0, max_tries=1)
#: Of an answer. It holds a session's id and a token.
MAX_ANSWER_BYTES = 64 << 10
_ABSENT = frozenset({404, 405, 501})


class Unavailable(Exception):
    """The server did not answer within the limits."""


class _Rejected(Exception):
    """The broker says no."""


class _NoBroker(Exception):
    """The server has none."""


class Resuming:
    """One instance's way into its session, and the way back for the next."""

    def __init__(self, client: httpx2.AsyncClient, url: str, slot: Slot, *, credentials: bool) -> None:
        self._client = client
        self._url = url
        self._slot = slot
        self._credentials = credentials
        self._turn = anyio.Lock()
        self._is_asked = False
        self._session: str | None = None
        self._is_told = False

    async def start(self) -> None:
        """Ask the broker while the host makes up its mind."""
        try:
            await self.session(ONCE)
        except (Unavailable, troubles.Refused):
            return  # the handshake asks again, and tells

    async def session(self, patience: Patience) -> str | None:
        """The session to go on with, if there is one. Raises `Unavailable` or `Refused`; the token stays."""
        async with self._turn:
            if not self._is_asked:
                self._session = await self._resume(patience)
                self._is_asked = True
            return self._session

    async def opened(self, session: str) -> bool:
        """A session without a before: ask for its first token, once; False if asking again may help.

        Without a token the session works as well, and is not resumed.
        """
        if not session or not self._slot.holder:
            return True
        async with self._turn:
            if self._session != session:
                self._slot.forget()  # what is on disk must not lead back to the session before this one
            self._is_asked, self._session = True, session
            try:
                answer = await self._until_answered("open", {}, ONCE, session=session)
                await self._keep(_text(answer, "token"))
            except Unavailable as failure:
                log_event(logging.WARNING, "stdio.not_resumable", f"the session cannot be resumed for now: {failure}")
                return False
            except _NoBroker:
                self._without_broker()
            except (_Rejected, troubles.Refused) as failure:
                sentence = f"the session will not be resumed: {failure or 'the broker rejects it'}"
                log_event(logging.WARNING, "stdio.not_resumable", sentence)
            return True

    async def _resume(self, patience: Patience) -> str | None:
        token = self._slot.token() if self._slot.holder else None
        if token is None:
            return None
        try:
            answer = await self._until_answered("resume", {"token": token}, patience)
            session, renewed = _text(answer, "session"), _text(answer, "token")
        except _NoBroker:
            # Nobody has rejected the token: it goes when another session begins, and not while a gateway says 404.
            self._without_broker()
            return None
        except _Rejected:
            self._slot.drop()
            return None
        await self._keep(renewed)
        self._slot.resumed()
        return session

    async def _keep(self, token: str) -> None:
        """On disk first: only then may the one before be retired. If that fails, the one before is still good."""
        if not self._slot.keep(token):
            return
        try:
            await self._until_answered("confirm", {"token": token}, ONCE)
        except (_NoBroker, _Rejected, Unavailable, troubles.Refused) as failure:
            # The token on disk is good, confirmed or not.
            log_event(logging.DEBUG, "stdio.not_confirmed", f"the new resume token was not confirmed: {failure}")

    def _without_broker(self) -> None:
        if not self._is_told:
            self._is_told = True
            log_event(
                logging.INFO, "stdio.no_broker", "the server has no resume broker: its sessions end with this process"
            )

    async def _until_answered(
        self, action: str, body: dict[str, str], patience: Patience, *, session: str | None = None
    ) -> dict[str, Any]:
        course = attempts(patience, since=time.monotonic())
        while True:
            try:
                response, content = await self._post(action, body, session)
                if response.status_code < 500 and response.status_code != 429:
                    return self._answer(response, content)
                course.failed(f"HTTP {response.status_code}", at_least=retry_after(response))
            except httpx2.TransportError as failure:
                if (trouble := troubles.of_error(failure, self._url)) is not None:
                    raise troubles.Refused(trouble) from failure
                course.failed(f"{type(failure).__name__}: {failure}")
            if not await course.wait():
                raise Unavailable(course.trouble)

    async def _post(self, action: str, body: dict[str, str], session: str | None) -> tuple[httpx2.Response, bytes]:
        headers = {"accept": "application/json"} if session is None else {"mcp-session-id": session}
        said = {**body, "holder": self._slot.holder}
        request = self._client.build_request(
            "POST", beside(self._url, action), json=said, headers=headers, timeout=TIMEOUT
        )
        response = await self._client.send(request, stream=True, follow_redirects=False)
        try:
            return response, await _whole(response)
        finally:
            await response.aclose()

    def _answer(self, response: httpx2.Response, content: bytes) -> dict[str, Any]:
        if response.status_code in _ABSENT:
            raise _NoBroker
        try:
            found = json.loads(content) if content else None
        except ValueError:
            found = None
        if response.status_code == 403 and isinstance(found, dict) and found.get("error") == "rejected":
            raise _Rejected
        if response.status_code in (401, 403):
            raise troubles.Refused(troubles.of_response(response, self._url, credentials=self._credentials))
        if response.status_code not in (200, 204) or not isinstance(found, dict | None):
            raise _NoBroker  # something else answers there
        return found or {}


def beside(url: str, action: str) -> str:
    """The broker's address: a sibling of the endpoint. The query goes along: gateways find tenants and keys there."""
    parts = urlsplit(url)
    folder = parts.path.rstrip("/").rpartition("/")[0]
    return urlunsplit((parts.scheme, parts.netloc, f"{folder}/resume/{action}", parts.query, ""))


def _text(answer: dict[str, Any], name: str) -> str:
    found = answer.get(name)
    if not isinstance(found, str) or not found:
        raise _NoBroker
    return found


async def _whole(response: httpx2.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise _NoBroker  # something else answers there
    return bytes(body)
