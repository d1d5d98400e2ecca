"""Sends what has no answer: notifications, and replies to the server's requests."""

from __future__ import annotations

import asyncio

import anyio

from perdure._core.delivery import Attempt, Failure, Meaning, Purpose, of_failure
from perdure.remote.attempts import Attempts
from perdure.remote.call import DEPARTURE
from perdure.remote.failures import RequestFailed, Unavailable
from perdure.remote.link import Link
from perdure.remote.notice import Notice
from perdure.remote.state import Handshake


class Sender:
    """A message may arrive twice: servers drop a reply that no tool waits for."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._underway = 0
        self._is_idle = anyio.Event()

    async def idle(self) -> None:
        """Wait until nothing is on its way. What waits for a server that is away is not."""
        while self._underway:
            await self._is_idle.wait()

    def attempts(self) -> Attempts:
        """The attempts at a message that is handed over now, and may have to wait before it is sent."""
        return self._link.limits.attempts(self._link.limits.patience)

    async def send(
        self,
        body: bytes,
        purpose: Purpose,
        *,
        departed: anyio.Event | None = None,
        attempts: Attempts | None = None,
        may_renew: bool = True,
    ) -> bool:
        """Send a notification or a reply until the server has taken it; False if it does not.

        `departed` is set when the next message may follow. Without `may_renew` a session that is gone is left for the
        next request to find: the second half of a handshake does not begin another one.
        """
        departed, attempts = departed or anyio.Event(), attempts or self.attempts()
        try:
            while True:
                handshake = self._link.handshake
                has_session = handshake is not None and bool(handshake.session)
                attempt = Attempt(purpose=purpose, may_renew=may_renew and has_session)
                meaning, why, at_least = await self._attempt(body, attempt, handshake, departed)
                if meaning is Meaning.RENEW:
                    may_renew, why = False, "the session is gone"
                    trouble = await self._link.renew(handshake)
                    if isinstance(trouble, Unavailable):
                        may_renew, meaning = True, Meaning.AGAIN
                    elif trouble is None:
                        meaning = of_failure(attempt, Failure.SESSION_REPLACED)
                    else:
                        meaning = Meaning.REFUSED
                if meaning is Meaning.ANSWER:
                    return True
                if meaning is Meaning.AGAIN:
                    attempts.failed(why, at_least=at_least)
                    self._link.report(Notice.WAITING, why)
                    if await attempts.wait():
                        continue
                self._link.report(Notice.NOT_SENT, why)
                return False
        finally:
            departed.set()

    async def _attempt(
        self, body: bytes, attempt: Attempt, handshake: Handshake | None, departed: anyio.Event
    ) -> tuple[Meaning, str, float | None]:
        """One HTTP request: what became of it, why, and the seconds that the server asks for."""
        timer = asyncio.get_running_loop().call_later(DEPARTURE, departed.set)
        self._underway += 1
        try:
            async with self._link.endpoint.post(body, handshake) as response:
                meaning, _ = await response.meaning(attempt, None, self._link.limits.message_bytes)
                return meaning, f"HTTP {response.status}", response.retry_after
        except RequestFailed as failed:
            return of_failure(attempt, failed.failure), str(failed), None
        finally:
            timer.cancel()
            self._underway -= 1
            if not self._underway:
                self._is_idle.set()
                self._is_idle = anyio.Event()
