"""A call takes one request to its one answer; a sender sends what has none.

A request is sent until the server has taken it, then read until it is answered. What each response and each failure
means for it stands in one table, `_core/delivery.py`; here is what is done then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from perdure._core.codes import INTERNAL_ERROR, NO_SERVER, OUTCOME_UNKNOWN, OUTCOME_UNKNOWN_TEXT, UNREACHABLE
from perdure._core.delivery import REPEATABLE, Attempt, Failure, Meaning, Purpose, is_read, of_failure
from perdure._core.sse import EventTooLarge
from perdure.remote.endpoint import Refused, RequestFailed, Unavailable
from perdure.remote.link import Link, Notice
from perdure.remote.message import Message, encode, error
from perdure.remote.stream import Attempts, Listener, Stream

#: Seconds until a message without any sign of the server counts as sent, and the next one may follow it. Servers that
#: answer with plain JSON give no sign before the answer.
DEPARTURE = 0.5

_WAITS = (Meaning.AGAIN, Meaning.RESTART, Meaning.RENEW)


@dataclass(kw_only=True)
class ToolCall:
    """A tool's call that was sent, or is about to be, and has no answer yet."""

    id: str
    params: dict[str, Any]

    @property
    def tool(self) -> str:
        return str(self.params.get("name", ""))

    @property
    def arguments(self) -> dict[str, Any]:
        found = self.params.get("arguments")
        return dict(found) if isinstance(found, Mapping) else {}


class Call:
    """`body` makes the request's JSON for an id on the wire; a call of an earlier process has none, and is only read.

    `take` is given each message of the call's stream before its position moves, `move` each position.
    """

    def __init__(
        self,
        link: Link,
        body: Callable[[str], bytes] | None,
        *,
        request_id: str,
        method: str,
        name: str = "",
        take: Callable[[Message], Awaitable[None]],
        move: Callable[[str | None, int | None], None],
        position: str | None = None,
        retry: int | None = None,
    ) -> None:
        self.id = request_id
        """On the wire. A request that is sent again, and may have arrived, gets another one."""
        self.first_id = request_id
        """Under which it is remembered."""
        self.is_repeatable = method in REPEATABLE
        self.is_begun = False
        self.scope = anyio.CancelScope()
        self.departed = anyio.Event()
        """Set when the next message may follow, where messages leave one after the other."""
        self._link = link
        self._body = body
        self._method = method
        self._name = name
        self._handshake = link.handshake
        self._was_renewed = False
        self._stream = Stream(
            link.endpoint,
            link.limits,
            Listener(take=take, complain=link.program.complain, move=move),
            patience=link.limits.patience,
            position=position,
            retry=retry,
            begins_now=position is None,
        )

    async def answer(self) -> Message:
        """Exactly one, whatever happens."""
        self.is_begun = True
        try:
            while (found := await self._attempt()) is None:
                self._link.report(Notice.WAITING, self._stream.trouble)
                if not await self._stream.wait():
                    ended = of_failure(self._attempted(), Failure.PATIENCE_ENDED)
                    return self._end(ended, f"the server did not come back: {self._stream.trouble}")
            return found
        except EventTooLarge as too_large:
            ended = of_failure(self._attempted(), Failure.TOO_LARGE)
            return self._end(ended, str(too_large), Refused("too_large", str(too_large)))
        except Exception as failure:  # whatever it is, it costs this request alone
            said = f"{type(failure).__name__}: {failure}"
            if self._stream.position is not None and not self.is_repeatable:
                return self.unknown(said)
            return error(encode(self.id), INTERNAL_ERROR, said)
        finally:
            self.departed.set()

    def _attempted(self) -> Attempt:
        has_session = bool(self._handshake and self._handshake.session)
        has_position = self._stream.position is not None
        may_renew = has_session and (has_position or not self._was_renewed)
        repeatable = self.is_repeatable
        return Attempt(purpose=Purpose.CALL, is_repeatable=repeatable, has_position=has_position, may_renew=may_renew)

    async def _attempt(self) -> Message | None:
        """One HTTP request; None if there shall be another one after a pause."""
        if self._stream.position is None:
            self._handshake = self._link.handshake
        attempt, at_least, endpoint = self._attempted(), None, self._link.endpoint
        if self._stream.position is not None or self._body is None:
            self.departed.set()
            opened = endpoint.get(self._stream.position, self._handshake)
        else:
            opened = endpoint.post(self._body(self.id), self._handshake)
        timer = asyncio.get_running_loop().call_later(DEPARTURE, self.departed.set)
        try:
            async with opened as response:
                request_id = None if is_read(attempt) else self.id
                meaning, message = await response.meaning(attempt, request_id, self._link.limits.message_bytes)
                if meaning not in _WAITS or response.status == 429:
                    self.departed.set()  # where there are too many at once, those in front must be able to end
                if meaning in (Meaning.FOLLOW, Meaning.ANSWER):
                    self._link.report(Notice.REACHED)
                if meaning is Meaning.FOLLOW:
                    if not self.is_repeatable:
                        self._body = None  # it will not be sent again, and may be large
                    message = await self._stream.read(response, awaited=self.id)
                    ended = of_failure(self._attempted(), Failure.LOST)
                    return message or self._conclude(ended, self._stream.trouble, None)
                if message is not None and meaning is Meaning.ANSWER:
                    return message
                at_least, refusal = response.retry_after, endpoint.refusal(response)
                why = str(refusal) if response.status < 300 else f"HTTP {response.status}"
                if is_read(attempt) and meaning is not Meaning.AGAIN:
                    why = f"the server does not resume it: {why}"
                elif response.status == 404 and self._was_renewed:
                    refusal = Refused("session_gone", "Session terminated, and so was the new one")
        except RequestFailed as failed:
            meaning, why, refusal = of_failure(attempt, failed.failure), str(failed), failed.refusal
        finally:
            timer.cancel()
        if meaning is Meaning.RENEW:
            return await self._renew(attempt)
        return self._conclude(meaning, why, refusal, at_least=at_least)

    async def _renew(self, attempt: Attempt) -> Message | None:
        """The session is gone. A request that was not accepted is sent again in a new one, at once, and once."""
        trouble = await self._link.renew(self._handshake)
        if is_read(attempt):
            return self._conclude(of_failure(attempt, Failure.SESSION_REPLACED), "its session is gone", None)
        if trouble is None:
            self._was_renewed = True
            return await self._attempt()
        if isinstance(trouble, Refused):
            sentence = f"Session terminated, and no new one could be begun: {trouble}"
            return self._end(Meaning.REFUSED, sentence, Refused(trouble.reason, sentence))
        self._stream.failed(str(trouble))
        return None

    def _conclude(
        self, meaning: Meaning, why: str, refusal: Refused | None, *, at_least: float | None = None
    ) -> Message | None:
        if meaning not in (Meaning.AGAIN, Meaning.RESTART):
            return self._end(meaning, why, refusal)
        self._stream.failed(why, at_least=at_least)
        if meaning is Meaning.RESTART:
            self._stream.position = None
            # The server may still have the first one: ids never repeat within a session.
            self.id = self._link.new_id()
        return None

    def _end(self, meaning: Meaning, why: str, refusal: Refused | None = None) -> Message:
        refusal = refusal or Refused("refused", why)
        if meaning is Meaning.REFUSED:
            self._link.report(Notice.REFUSED, str(refusal), reason=refusal.reason)
        if meaning is Meaning.UNKNOWN:
            return self.unknown(why)
        return not_run(meaning, self.id, self._stream.trouble, refusal)

    def unknown(self, reason: str) -> Message:
        return unknown(self.id, self._method, self._name, reason)


def unknown(request_id: str, method: str, name: str, reason: str) -> Message:
    """The answer to a request that may have run, and whose outcome this client does not know."""
    data = {"outcome": "unknown", "reason": reason, "method": method, "name": name, "told_by": "client"}
    return error(encode(request_id), OUTCOME_UNKNOWN, OUTCOME_UNKNOWN_TEXT, data)


def not_run(meaning: Meaning, request_id: str, trouble: str, refusal: Refused) -> Message:
    """The answer to a request that no server took, or that cannot work."""
    if meaning is Meaning.UNREACHABLE:
        return error(encode(request_id), UNREACHABLE, f"The server did not answer within the limits: {trouble}")
    return error(encode(request_id), NO_SERVER, str(refusal), {"reason": refusal.reason})


class Sender:
    """Sends notifications, and replies to the server's requests.

    A message may arrive twice: servers drop a reply that no tool waits for.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._underway: set[anyio.Event] = set()

    async def idle(self) -> None:
        """Wait until nothing is on its way. What waits for a server that is away is not."""
        while self._underway:
            await next(iter(self._underway)).wait()

    def attempts(self) -> Attempts:
        """The attempts at a message that is handed over now, and may have to wait before it is sent."""
        limits = self._link.limits
        return Attempts(limits.patience, counts_from_request=limits.counts_from_request)

    async def send(
        self,
        body: bytes,
        *,
        is_reply: bool = False,
        departed: anyio.Event | None = None,
        attempts: Attempts | None = None,
        may_renew: bool = True,
    ) -> bool:
        """Send a notification or a reply until the server has taken it; False if it does not.

        `departed` is set when the next message may follow. Without `may_renew` a session that is gone is left for the
        next request to find: the second half of a handshake does not begin another one.
        """
        departed, attempts = departed or anyio.Event(), attempts or self.attempts()
        purpose = Purpose.REPLY if is_reply else Purpose.NOTIFICATION
        try:
            while True:
                handshake = self._link.handshake
                attempt = Attempt(purpose=purpose, may_renew=may_renew and bool(handshake and handshake.session))
                timer = asyncio.get_running_loop().call_later(DEPARTURE, departed.set)
                self._underway.add(over := anyio.Event())
                try:
                    async with self._link.endpoint.post(body, handshake) as response:
                        meaning, _ = await response.meaning(attempt, None, self._link.limits.message_bytes)
                        why, at_least = f"HTTP {response.status}", response.retry_after
                except RequestFailed as failed:
                    meaning, why, at_least = of_failure(attempt, failed.failure), str(failed), None
                finally:
                    timer.cancel()
                    self._underway.discard(over)
                    over.set()
                if meaning is Meaning.RENEW:
                    trouble = await self._link.renew(handshake)
                    may_renew, why = isinstance(trouble, Unavailable), "the session is gone"
                    if trouble is None:
                        meaning = of_failure(attempt, Failure.SESSION_REPLACED)
                    elif may_renew:
                        meaning = Meaning.AGAIN
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
