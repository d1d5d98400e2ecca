"""Handshakes: sends `initialize` until it is answered, or refused, or its time is over."""

from __future__ import annotations

import anyio

from perdure._core import splice
from perdure._core.delivery import Attempt, Meaning, Purpose, of_failure
from perdure._core.sse import EventTooLarge
from perdure.remote.endpoint import Endpoint
from perdure.remote.failures import Refusal, Refused, RequestFailed, Unavailable
from perdure.remote.limits import Limits
from perdure.remote.message import Message, encode
from perdure.remote.notice import Notice, Report
from perdure.remote.state import Handshake
from perdure.remote.stream import Listener, Stream

_SENT_AGAIN = (Meaning.AGAIN, Meaning.RESTART)


async def _ignore(_: object) -> None:
    return None


#: A handshake has no messages but its answer.
_DEAF = Listener(take=_ignore, complain=_ignore, move=lambda position, retry: None)


class Handshakes:
    """Makes sessions at one endpoint."""

    def __init__(self, endpoint: Endpoint, limits: Limits, report: Report) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._report = report

    async def begin(self, text: str, request_id: str, *, known: str = "") -> tuple[Message, str]:
        """The answer to a client's `initialize`, and the session that the server names with it.

        `known` is a session that the handshake goes on with (a reattach). A handshake is begun again, not resumed: at
        worst a session that no client uses remains. Raises `Unavailable` and `Refused`.
        """
        named = Handshake(session=known, request={}, result={}) if known else None
        attempts = self._limits.attempts(self._limits.handshake)
        with anyio.move_on_after(self._limits.handshake_seconds):
            while True:
                try:
                    found = await self.once(text, request_id, named)
                    self._report(Notice.REACHED)
                    return found
                except Unavailable as unavailable:
                    attempts.failed(str(unavailable), at_least=unavailable.at_least)
                self._report(Notice.WAITING, attempts.trouble)
                if not await attempts.wait():
                    raise Unavailable(attempts.trouble)
        raise Unavailable(f"no answer within {self._limits.handshake_seconds:.0f} s")

    async def once(
        self, text: str, request_id: str, handshake: Handshake | None, *, is_sticky: bool = False
    ) -> tuple[Message, str]:
        """One attempt at a handshake, or at a sticky request that is repeated in a new session."""
        attempt = Attempt(purpose=Purpose.CALL if is_sticky else Purpose.HANDSHAKE, is_repeatable=is_sticky)
        body = splice.replaced(text, encode(request_id), "id").encode()
        try:
            async with self._endpoint.post(body, handshake) as response:
                meaning, message = await response.meaning(attempt, request_id, self._limits.message_bytes)
                if meaning is Meaning.FOLLOW:
                    stream = Stream(self._endpoint, self._limits, _DEAF, patience=self._limits.handshake)
                    message = await stream.read(response, awaited=request_id)
                    if message is None:
                        raise Unavailable(stream.trouble)
                if message is not None and meaning in (Meaning.FOLLOW, Meaning.ANSWER):
                    return message, response.session
                if meaning in _SENT_AGAIN:
                    raise Unavailable(f"HTTP {response.status}", at_least=response.retry_after)
                raise Refused(self._endpoint.refusal(response))
        except RequestFailed as failed:
            if of_failure(attempt, failed.failure) in _SENT_AGAIN:
                raise Unavailable(f"it cannot be reached: {failed}") from failed
            raise Refused(failed.refusal) from failed
        except EventTooLarge as too_large:
            raise Refused(Refusal(reason="not_mcp", sentence=str(too_large))) from too_large
