"""Talks to the resume broker: turns the slot's token into a session, and stores the next token.

A new token is on disk before it is confirmed, and the old one stays good until then: whenever this process dies, the
token on disk leads back to the session (T10). Nothing else of the bridge asks whether there is anything to resume with
(T6): without a slot, or without a broker at the server, there is simply no earlier session.
"""

import json
import logging
from urllib.parse import urlsplit, urlunsplit

import anyio

from perdure._core.reconnect import Patience
from perdure._core.sse import EventTooLarge
from perdure._core.text import see
from perdure.remote.endpoint import FINAL, Endpoint, Handshake, Refused, RequestFailed, Unavailable
from perdure.remote.stream import Attempts
from perdure.stdio.resume_slot import Slot
from perdure.telemetry.log_records import log_event

#: Seconds for one request to the broker. It does little, and a handshake waits for it.
TIMEOUT = 5.0
#: At the start the broker is asked before the host says anything. If that fails, the handshake asks again.
ONCE = Patience(max_time=0.0, max_tries=1)
#: Of an answer. It holds a session's id and a token.
MAX_ANSWER_BYTES = 64 << 10


class _Rejected(Exception):
    """The broker rejects the token or the session."""


class _NoBroker(Exception):
    """The server has no broker, or something else answers at its address."""


class ResumeBroker:
    """Finds the session of one process, and prepares the resume of the next process."""

    def __init__(self, endpoint: Endpoint, slot: Slot) -> None:
        self._endpoint = endpoint
        self._slot = slot
        self._turn = anyio.Lock()
        self._is_asked = False
        self._session: str | None = None
        self._has_reported = False

    async def start(self) -> None:
        """Ask the broker before the host sends anything."""
        try:
            await self.session(ONCE)
        except (Unavailable, Refused):
            return  # the handshake asks again, and answers the host

    async def session(self, patience: Patience) -> str | None:
        """Return the session to continue, if there is one. Raises `Unavailable` or `Refused`; the token stays."""
        async with self._turn:
            token = self._slot.token() if not self._is_asked and self._slot.holder else None
            if token is not None:
                try:
                    session, renewed = await self._ask("resume", {"token": token}, patience, "session", "token")
                except _NoBroker:
                    # No broker has rejected the token: it is deleted when another session begins, not while a gateway
                    # says 404.
                    self._without_broker()
                except _Rejected:
                    sentence = "Broker rejected resume token, starting fresh session"
                    log_event(logging.WARNING, "token.rejected", sentence)
                    self._slot.forget()
                else:
                    await self._keep(renewed)
                    self._session = session
            self._is_asked = True
            return self._session

    async def get_first_token(self, session: str) -> bool:
        """Ask for the first token of a new session, once; False if asking again may help.

        Without a token the session works as well, and is not resumed.
        """
        if not session or not self._slot.holder:
            return True
        async with self._turn:
            if self._session != session:
                self._slot.forget()  # the files must not lead back to the earlier session
            self._is_asked, self._session = True, session
            try:
                [token] = await self._ask("open", {}, ONCE, "token", session=session)
                await self._keep(token)
            except Unavailable as failure:
                log_event(logging.WARNING, "stdio.not_resumable", f"the session cannot be resumed for now: {failure}")
                return False
            except _NoBroker:
                self._without_broker()
            except (_Rejected, Refused) as failure:
                sentence = f"the session will not be resumed: {failure or 'the broker rejects it'}"
                log_event(logging.WARNING, "stdio.not_resumable", sentence)
            return True

    async def _keep(self, token: str) -> None:
        """On disk first: only then may the old token be retired. If that fails, the old one is still good."""
        if not self._slot.keep(token):
            return
        try:
            await self._ask("confirm", {"token": token}, ONCE)
        except (_NoBroker, _Rejected, Unavailable, Refused) as failure:
            # The token on disk is good, confirmed or not.
            log_event(logging.DEBUG, "stdio.not_confirmed", f"the new resume token was not confirmed: {failure}")

    def _without_broker(self) -> None:
        if not self._has_reported:
            self._has_reported = True
            sentence = (
                "the server has no resume broker: the session ends with this process;"
                f" {see('errors', 'no-resume-broker')}"
            )
            log_event(logging.INFO, "stdio.no_broker", sentence)

    async def _ask(
        self, action: str, body: dict[str, str], patience: Patience, *wanted: str, session: str = ""
    ) -> list[str]:
        """Return the texts of these names in the broker's answer. Raises what is above, `Unavailable` and `Refused`."""
        # A server may ask for any time; the host has its answer after as long as it was promised.
        attempts = Attempts(patience, counts_from_request=True)
        broker = self._endpoint.at(beside(self._endpoint.url, action))
        said = json.dumps({**body, "holder": self._slot.holder}).encode()
        named = Handshake(session=session, request={}, result={})
        while True:
            try:
                with anyio.fail_after(TIMEOUT):
                    async with broker.post(said, named) as response:
                        content = await response.whole(MAX_ANSWER_BYTES)
                if response.status < 500 and response.status != 429:
                    break
                attempts.failed(f"HTTP {response.status}", at_least=response.retry_after)
            except EventTooLarge:
                raise _NoBroker from None
            except TimeoutError:
                attempts.failed(f"the broker has not answered within {TIMEOUT:.0f} s")
            except RequestFailed as failed:
                if failed.failure in FINAL:
                    raise failed.refusal from failed
                attempts.failed(str(failed))
            if not await attempts.wait():
                raise Unavailable(attempts.trouble)
        try:
            found = json.loads(content) if content else None
        except ValueError:
            found = None
        if response.status == 403 and isinstance(found, dict) and found.get("error") == "rejected":
            raise _Rejected
        if response.status in (401, 403):
            raise self._endpoint.refusal(response)
        if response.status not in (200, 204) or not isinstance(found, dict | None):
            raise _NoBroker
        texts = [text for name in wanted if isinstance(text := (found or {}).get(name), str) and text]
        if len(texts) < len(wanted):
            raise _NoBroker
        return texts


def beside(url: str, action: str) -> str:
    """Return the broker's address: a sibling of the endpoint. The query goes along: gateways find tenants and keys
    there."""
    parts = urlsplit(url)
    folder = parts.path.rstrip("/").rpartition("/")[0]
    return urlunsplit((parts.scheme, parts.netloc, f"{folder}/resume/{action}", parts.query, ""))
