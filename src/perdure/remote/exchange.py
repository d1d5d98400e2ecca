"""An exchange takes one request without a session (2026-07-28) to its one answer.

Each attempt is a POST of its own, under a new id, because the revision has no way to read a broken response on. What a
response or a failure means for the request stands in `_core/delivery.py`, as for calls of a session: reads and the
requests of tasks are sent again, and so are calls with a key. For a tool's call without a key, the tool's own word is
asked for when it may have arrived; without that word its outcome is unknown.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from perdure._core.codes import INTERNAL_ERROR
from perdure._core.delivery import SESSIONLESS, Attempt, Failure, Meaning, Purpose, of_failure
from perdure._core.reconnect import Patience
from perdure._core.sse import EventTooLarge
from perdure.remote.call import not_run, unknown
from perdure.remote.endpoint import Endpoint, Refused, RequestFailed
from perdure.remote.link import Notice, Report
from perdure.remote.message import Message, encode, error
from perdure.remote.stream import Limits, Listener, Stream

#: Runs of one tool that says that it may run twice, and whose call has no key. Each lost connection is another run: a
#: tool that takes longer than a proxy keeps a silent connection would otherwise run for ever.
MOST_RUNS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is sent. `body` makes its JSON for an id on the wire."""

    method: str
    name: str = ""
    """Of the tool, for people."""
    body: Callable[[str], bytes]
    headers: Mapping[str, str] = field(default_factory=dict)
    is_keyed: bool = False
    """The server runs it once, however often it comes."""
    is_first: bool = False
    """Patience is for servers that were there: it fails at once if no connection can be made."""
    may_run_again: Callable[[], Awaitable[bool]] | None = None
    """Asked for a call without a key when it may have run. Without an answer it may not."""


def _say_nothing(notice: Notice, why: str = "", *, reason: str = "") -> None:
    return None


class Exchange:
    """`new_id` makes ids that never repeat; `patience` is that of `limits`, if none is given.

    `may_have_arrived`: an earlier process has sent the request. `report` is told that the server is away or answers.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        request: Request,
        *,
        new_id: Callable[[], str],
        take: Callable[[Message], Awaitable[None]],
        complain: Callable[[Exception], Awaitable[object]],
        patience: Patience | None = None,
        may_have_arrived: bool = False,
        report: Report | None = None,
    ) -> None:
        self.id = ""
        """Of the newest attempt."""
        self._endpoint = endpoint
        self._limits = limits
        self._request = request
        self._new_id = new_id
        self._is_repeatable = request.method in SESSIONLESS
        self._is_keyed = request.is_keyed
        self._may_have_arrived = may_have_arrived
        self._report = report or _say_nothing
        self._runs = 1
        self._stream = Stream(
            endpoint,
            limits,
            Listener(take=take, complain=complain, move=lambda position, retry: None),
            patience=patience or limits.patience,
            begins_now=True,
            has_positions=False,
            may_break=self._is_repeatable or self._is_keyed,
        )

    async def answer(self) -> Message:
        """Exactly one, whatever happens."""
        try:
            if self._may_have_arrived and not self._is_keyed and not await self._runs_again():
                return self._end(Meaning.UNKNOWN, "the client's process ended before the server had answered")
            while (found := await self._attempt()) is None:
                self._report(Notice.WAITING, self._stream.trouble)
                if not await self._stream.wait():
                    ended = of_failure(self._attempted(), Failure.PATIENCE_ENDED)
                    return self._end(ended, f"the server did not come back: {self._stream.trouble}")
            return found
        except EventTooLarge as too_large:
            ended = of_failure(self._attempted(), Failure.TOO_LARGE)
            return self._end(ended, str(too_large), Refused("too_large", str(too_large)))
        except Exception as failure:  # whatever it is, it costs this request alone
            said = f"{type(failure).__name__}: {failure}"
            if self._may_have_arrived:
                return self._end(Meaning.UNKNOWN, said)
            return error(encode(self.id), INTERNAL_ERROR, said)

    def _attempted(self) -> Attempt:
        if self._is_keyed or self._runs > 1:
            return Attempt(purpose=Purpose.KEYED, may_have_arrived=self._may_have_arrived)
        return Attempt(purpose=Purpose.CALL, is_repeatable=self._is_repeatable)

    async def _attempt(self) -> Message | None:
        """One HTTP request; None if there shall be another one after a pause."""
        self.id = self._new_id()
        attempt, at_least, refusal = self._attempted(), None, None
        try:
            opened = self._endpoint.post(self._request.body(self.id), None, self._request.headers)
            async with opened as response:
                meaning, message = await response.meaning(attempt, self.id, self._limits.message_bytes)
                if meaning in (Meaning.FOLLOW, Meaning.ANSWER):
                    self._report(Notice.REACHED)
                if meaning is Meaning.FOLLOW:
                    message = await self._stream.read(response, awaited=self.id)
                    meaning = Meaning.ANSWER if message is not None else of_failure(attempt, Failure.LOST)
                    why = self._stream.trouble
                else:
                    at_least, refusal = response.retry_after, self._endpoint.refusal(response)
                    why = str(refusal) if response.status < 300 else f"HTTP {response.status}"
                if message is not None and meaning is Meaning.ANSWER:
                    return message
        except RequestFailed as failed:
            meaning, why, refusal = of_failure(attempt, failed.failure), str(failed), failed.refusal
            if self._request.is_first and failed.failure is Failure.NOT_SENT:
                meaning, self._stream.trouble = Meaning.UNREACHABLE, why
        if meaning in (Meaning.UNKNOWN, Meaning.RESTART) and not (self._is_keyed or self._is_repeatable):
            meaning = Meaning.RESTART if await self._runs_again() else Meaning.UNKNOWN
        if meaning not in (Meaning.AGAIN, Meaning.RESTART):
            return self._end(meaning, why, refusal)
        if meaning is Meaning.RESTART:
            self._may_have_arrived = True
        self._stream.failed(why, at_least=at_least)
        return None

    async def _runs_again(self) -> bool:
        """Whether a call without a key may be sent again, though it may have run."""
        ask = self._request.may_run_again
        if ask is None or self._runs >= MOST_RUNS or not await ask():
            return False
        self._runs += 1
        return True

    def _end(self, meaning: Meaning, why: str, refusal: Refused | None = None) -> Message:
        if meaning is Meaning.UNKNOWN:
            return unknown(self.id, self._request.method, self._request.name, why)
        return not_run(meaning, self.id, self._stream.trouble, refusal or Refused("refused", why))
