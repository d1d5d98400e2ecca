"""Reads the standalone stream of one session, which brings what belongs to no call."""

from __future__ import annotations

import anyio

from perdure._core.delivery import Attempt, Failure, Meaning, Purpose, of_failure
from perdure._core.sse import EventTooLarge
from perdure.remote.endpoint import Endpoint
from perdure.remote.failures import RequestFailed
from perdure.remote.limits import Limits
from perdure.remote.notice import Notice, Report
from perdure.remote.state import Handshake
from perdure.remote.stream import Listener, Stream


class Standalone:
    """`is_new`: the session has just begun."""

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        listener: Listener,
        report: Report,
        handshake: Handshake,
        *,
        position: str | None,
        retry: int | None,
        is_new: bool,
    ) -> None:
        self.handshake = handshake
        self.stream = Stream(endpoint, limits, listener, patience=limits.listening, position=position, retry=retry)
        self.scope = anyio.CancelScope()
        self.has_begun = anyio.Event()
        """The first attempt was answered, or failed."""
        self.has_given_up = False
        """Patience has ended: it is worth another try when the server answers a call."""
        self._endpoint = endpoint
        self._limits = limits
        self._listener = listener
        self._report = report
        self._is_sure = not is_new
        """The server has such a stream; then 404 means that the session is gone."""

    async def run(self) -> Meaning:
        """Read until something has to be decided, and come back to be run again after it.

        RENEW: the session is gone. RESTART: the position is refused, and the stream goes on without it. REFUSED: there
        is no such stream, or it cannot be read on. UNREACHABLE: patience has ended.
        """
        try:
            while (meaning := await self._attempt()) is not Meaning.REFUSED:
                if meaning is Meaning.RESTART:
                    self.stream.position = None
                    self._listener.move(None, None)
                if not await self.stream.wait():
                    self.has_given_up = True
                    return Meaning.UNREACHABLE
                if meaning is not Meaning.AGAIN:
                    return meaning
            return meaning
        except EventTooLarge as error:  # calls go on
            self._report(Notice.LISTENING_LOST, str(error))
            await self._listener.complain(error)
            return Meaning.REFUSED
        finally:
            self.has_begun.set()

    async def _attempt(self) -> Meaning:
        """One connection."""
        stream = self.stream
        attempt = Attempt(purpose=Purpose.LISTENER, has_position=stream.position is not None, may_renew=self._is_sure)
        try:
            async with self._endpoint.get(stream.position, self.handshake) as response:
                self.has_begun.set()
                meaning, _ = await response.meaning(attempt, None, self._limits.message_bytes)
                if meaning is Meaning.FOLLOW:
                    self._is_sure = True
                    self._report(Notice.REACHED)
                    await stream.read(response, awaited=None)
                    return of_failure(attempt, Failure.LOST)
                stream.failed(f"HTTP {response.status}", at_least=response.retry_after)
                return meaning
        except RequestFailed as failed:
            if failed.failure in (Failure.UNTRUSTED, Failure.NO_CREDENTIALS):
                self._report(Notice.REFUSED, failed.refusal.sentence, reason=failed.refusal.reason)
            else:
                self._report(Notice.WAITING, str(failed))
            stream.failed(str(failed))
            self.has_begun.set()
            return of_failure(attempt, failed.failure)
