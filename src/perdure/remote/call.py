"""A call takes one request to its one answer; a sender sends messages without an answer.

A request is sent until the server has taken it. In a session it is then read until it is answered; without one
(2026-07-28) a broken response cannot be read on, so reads, the requests of tasks and calls with a key are sent again.
In a session a call with a key is sent again where it has no position, but not in another session: a server that has
lost a session may have lost the key as well. A tool's call without a key that may have arrived is sent again only if
its tool says that it may run twice; otherwise its outcome is unknown. What each response and each failure means for a
request stands in one table, `_core/delivery.py`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure._core import splice
from perdure._core.codes import INTERNAL_ERROR, NO_SERVER, OUTCOME_UNKNOWN, UNREACHABLE
from perdure._core.delivery import REPEATABLE, SESSIONLESS, Attempt, Failure, Meaning, Purpose, is_read, of_failure
from perdure._core.jsonrpc import JsonObject
from perdure._core.reconnect import Patience
from perdure._core.sse import EventTooLarge
from perdure._core.unknown_outcome import unknown_error
from perdure.remote.endpoint import Handshake, Refused, Unavailable
from perdure.remote.link import Link
from perdure.remote.message import Message, encode, error
from perdure.remote.route import Notice, Route
from perdure.remote.stream import Move, Stream, Take, ignore
from perdure.telemetry.log_records import log_event

#: Seconds until a message without any sign of the server counts as sent, and the next one may follow it. Servers that
#: answer with plain JSON give no sign before the answer.
DEPARTURE = 0.5
#: Runs of one tool that says that it may run twice, and whose call has no key. Each lost connection is another run: a
#: tool that takes longer than a proxy keeps a silent connection would otherwise run for ever. In a session a lost
#: connection costs nothing, so one more run is enough.
MOST_RUNS = 5
MOST_RUNS_IN_SESSION = 2

FAILED_HERE = "failed_here"
"""The reason of a refusal that is an error of this program, not the server's."""

_WAITS = (Meaning.AGAIN, Meaning.RESTART, Meaning.RENEW)

Body = Callable[[str], bytes]
"""Makes the JSON of a request for its id on the wire."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingRequest:
    """A request as it is sent."""

    method: str
    name: str = ""
    """Of the tool, for people."""
    body: Body | None
    """None: an earlier process has sent the request, and it is only read."""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_keyed: bool = False
    """The server runs it once, however often it is sent."""
    is_first: bool = False
    """Patience is for servers that answered before: the request fails at once if no connection can be made."""
    may_run_again: Callable[[], Awaitable[bool]] | None = None
    """Called for a call without a key when it may have run. None: it may not."""
    restarts: bool = True
    """A read that may have run is sent again; otherwise its sender decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a request ended that got no answer."""

    meaning: Meaning
    """`UNKNOWN`: the server may have run it. `UNREACHABLE` and `REFUSED`: it did not, or it was a read that failed."""
    why: str
    """A sentence, or part of one."""
    refusal: Refused
    """The same for machines, of `REFUSED`."""


def params_body(method: str, params: Mapping[str, Any]) -> Body:
    """The body of a request whose params, with `_meta`, are values."""

    def body(wire_id: str) -> bytes:
        whole = {**params, "_meta": _with_token(params["_meta"], wire_id)}
        return encode({"jsonrpc": "2.0", "id": wire_id, "method": method, "params": whole}).encode()

    return body


def text_body(text: str, meta: Mapping[str, Any]) -> Body:
    """The body of a request that is kept as the text that it came in, with another `_meta`."""

    def body(wire_id: str) -> bytes:
        changed = splice.replaced(text, encode(_with_token(meta, wire_id)), "params", "_meta")
        return splice.replaced(changed, encode(wire_id), "id").encode()

    return body


def _with_token(meta: Mapping[str, Any], wire_id: str) -> JsonObject:
    """Each attempt has a progress token of its own, if the request has one: the id."""
    return {**meta, "progressToken": wire_id} if "progressToken" in meta else dict(meta)


class Call:
    """One request, over as many attempts as it takes; in the session of `link`, or without one.

    `take` is given each message before the answer, `move` each position. `may_have_arrived`: an earlier process has
    sent the request. `handshake`: it belongs to that session alone, is not sent in another one, and does not wait for
    a renewal. `asks_again`: a resumed stream that falls silent is resumed again (`Stream`).
    """

    def __init__(
        self,
        route: Route,
        request: OutgoingRequest,
        *,
        link: Link | None = None,
        request_id: str | None = None,
        take: Take = ignore,
        move: Move = lambda position, retry: None,
        patience: Patience | None = None,
        position: str | None = None,
        retry: int | None = None,
        may_have_arrived: bool = False,
        handshake: Handshake | None = None,
        asks_again: bool = False,
    ) -> None:
        self.id = self.first_id = request_id or route.new_id()
        """On the wire, and the one under which the call is remembered. A request that is sent again, and may have
        arrived, gets another one."""
        self.is_repeatable = request.method in (SESSIONLESS if link is None else REPEATABLE)
        self.is_begun = False
        self.departed = asyncio.Event()
        """Set when the next message may follow, where messages leave one after the other."""
        self._route = route
        self._request = request
        self._body = request.body
        self._link = link
        self.handshake = handshake or (None if link is None else link.handshake)
        """The session that it was sent in last."""
        self._is_bound = handshake is not None
        was_sent = may_have_arrived or position is not None
        self._sent_in = self.handshake.session if self.handshake is not None and was_sent else None
        """The session in which the server has its key, if it may have arrived."""
        self.refusal: Refused | None = None
        """What the last response is, unless it is an event stream or the expected answer."""
        self.doubts_session = False
        """The last response reads as if the server did not know the session, or the revision."""
        self._was_renewed = False
        """It is sent in a session that was begun for it, by a server that has not been away since."""
        self._was_taken = False
        """The server has answered with an event stream."""
        self._may_have_arrived = may_have_arrived
        self._runs = 1
        self._stream = Stream(
            route,
            take=take,
            move=move,
            patience=patience or route.limits.patience,
            position=position,
            retry=retry,
            begins_now=position is None,
            has_positions=link is not None,
            may_break=link is None and (self.is_repeatable or request.is_keyed),
            asks_again=asks_again,
        )

    async def answer(self) -> Message:
        """Exactly one, whatever happens: the server's, or an error of our own that says how the request ended."""
        found = await self.outcome()
        if isinstance(found, Message):
            return found
        if found.meaning is Meaning.UNKNOWN:
            return self.unknown(found.why)
        if found.meaning is Meaning.UNREACHABLE:
            return failure_answer(encode(self.id), Unavailable(self._stream.trouble))
        if found.refusal.reason == FAILED_HERE:
            return error(encode(self.id), INTERNAL_ERROR, found.why)
        return failure_answer(encode(self.id), found.refusal)

    async def outcome(self) -> Message | Ended:
        """The server's answer, or how the request ended without one."""
        self.is_begun = True
        stream, following = self._stream, self._route.limits.following
        try:
            if self._may_have_arrived and not self._request.is_keyed and not await self._runs_again():
                return self._end(Meaning.UNKNOWN, "the client's process ended before the server had answered")
            while (found := await self._attempt()) is None:
                if stream.has_fallen_silent:
                    continue
                self._route.report(Notice.WAITING, stream.trouble)
                if not await stream.wait(following if stream.position is not None else None):
                    ended = of_failure(self._attempted(), Failure.PATIENCE_ENDED)
                    return self._end(ended, f"the server did not come back: {stream.trouble}")
            return found
        except EventTooLarge as too_large:
            # The server would send the same event again and again.
            ended = of_failure(self._attempted(), Failure.TOO_LARGE)
            return self._end(ended, str(too_large), Refused("too_large", str(too_large)))
        except Exception as failure:  # any error ends this request alone
            said = f"{type(failure).__name__}: {failure}"
            may_have_run = self._may_have_arrived or self._was_taken or stream.position is not None
            meaning = Meaning.UNKNOWN if may_have_run and not self.is_repeatable else Meaning.REFUSED
            return Ended(meaning=meaning, why=said, refusal=Refused(FAILED_HERE, said))
        finally:
            self.departed.set()

    def _attempted(self) -> Attempt:
        if self._link is None and (self._request.is_keyed or self._runs > 1):
            return Attempt(purpose=Purpose.KEYED, may_have_arrived=self._may_have_arrived)
        has_session = bool(self.handshake and self.handshake.session) and not self._is_bound
        has_position = self._stream.position is not None
        may_renew = has_session and (has_position or not self._was_renewed)
        repeatable = self.is_repeatable
        return Attempt(purpose=Purpose.CALL, is_repeatable=repeatable, has_position=has_position, may_renew=may_renew)

    async def _attempt(self) -> Message | Ended | None:
        """One HTTP request; None if another one follows after a pause."""
        stream, endpoint, request, link = self._stream, self._route.endpoint, self._request, self._link
        if link is not None and stream.position is None and not self._is_bound:
            await link.settled()
            self.handshake = link.handshake
            if self._request.is_keyed:
                if self._may_have_arrived and not self._is_known_by_key and self._sent_in is not None:
                    return await self._conclude(Meaning.UNKNOWN, "its session is gone")
                self._sent_in = None if link.handshake is None else link.handshake.session
        attempt = self._attempted()
        if stream.position is not None or self._body is None:
            self.departed.set()
            opened = endpoint.get(stream.position, self.handshake)
        else:
            opened = endpoint.post(self._body(self.id), self.handshake, request.headers)
        timer = asyncio.get_running_loop().call_later(DEPARTURE, self.departed.set)
        try:
            found = await stream.attempt(opened, attempt, self.id, self._on_response)
        finally:
            timer.cancel()
        meaning, why, refusal = found.meaning, found.why, found.refusal
        self.refusal, self.doubts_session = refusal, found.doubts_session
        # Also where there is no session: a server that had none may want one by now.
        may_be_gone = found.doubts_session and not self._is_bound and (is_read(attempt) or not self._was_renewed)
        if link is not None and (meaning is Meaning.RENEW or (may_be_gone and await link.is_gone(self.handshake))):
            return await self._renew(link, attempt)
        if found.failure is Failure.NOT_SENT:
            self._was_renewed = False  # it may be restarted again later
        is_new_one_gone = found.status == 404 and self._was_renewed
        if meaning is Meaning.ANSWER and found.message is not None and not is_new_one_gone:
            return found.message
        if found.status and is_read(attempt) and meaning is not Meaning.AGAIN:
            why = f"the server does not resume it: {why}"
        elif is_new_one_gone:
            meaning, refusal = Meaning.REFUSED, Refused("session_gone", "Session terminated, and so was the new one")
        elif request.is_first and found.failure is Failure.NOT_SENT:
            meaning, stream.trouble = Meaning.UNREACHABLE, why
        return await self._conclude(meaning, why, refusal, at_least=found.at_least)

    @property
    def _is_known_by_key(self) -> bool:
        """Whether the server runs it once, however often it comes: in a session, only while that is the same one."""
        if self._link is None or not self._request.is_keyed:
            return self._request.is_keyed
        return self._link.handshake is not None and self._link.handshake.session == self._sent_in

    def _on_response(self, meaning: Meaning, status: int) -> None:
        if meaning not in _WAITS or status == 429:
            self.departed.set()  # where there are too many at once, those in front must be able to end
        self._was_taken = self._was_taken or meaning is Meaning.FOLLOW
        if meaning in (Meaning.FOLLOW, Meaning.ANSWER):
            self._route.report(Notice.REACHED)
        request = self._request
        is_last = self._link is not None and not (self.is_repeatable and request.restarts)
        is_last = is_last and request.may_run_again is None and not request.is_keyed
        if meaning is Meaning.FOLLOW and is_last:
            self._body = None  # it will not be sent again, and may be large

    async def _renew(self, link: Link, attempt: Attempt) -> Message | Ended | None:
        """Renew the session. A request that was not accepted is sent again in the new one, at once, and once."""
        is_newest = link.handshake is self.handshake
        trouble = await link.renew(self.handshake)
        if is_read(attempt):
            return await self._conclude(of_failure(attempt, Failure.SESSION_REPLACED), "its session is gone")
        if trouble is None and self._may_have_arrived and self._request.is_keyed and self._runs == 1:
            return await self._conclude(Meaning.UNKNOWN, "its session is gone")
        if trouble is None:
            # A session that was begun for an earlier request, or by another process, may have ended as well.
            self._was_renewed = is_newest and link.handshake is not None and not link.handshake.is_adopted
            return await self._attempt()
        if isinstance(trouble, Refused):
            sentence = f"Session terminated, and no new one could be begun: {trouble}"
            return self._end(Meaning.REFUSED, sentence, Refused(trouble.reason, sentence, challenge=trouble.challenge))
        return await self._conclude(Meaning.AGAIN, str(trouble))

    async def _runs_again(self) -> bool:
        """Whether a call without a key is sent again, though it may have run."""
        most = MOST_RUNS if self._link is None else MOST_RUNS_IN_SESSION
        may_run_again = self._request.may_run_again
        if may_run_again is None or self._runs >= most or not await may_run_again():
            return False
        self._runs += 1
        sentence = "a tool that may run twice is called again"
        log_event(logging.INFO, "remote.call_again", sentence, tool=self._request.name)
        return True

    async def _conclude(
        self, meaning: Meaning, why: str, refusal: Refused | None = None, *, at_least: float | None = None
    ) -> Ended | None:
        """How the request ends with this attempt; None if another one follows."""
        if meaning in (Meaning.UNKNOWN, Meaning.RESTART) and not self.is_repeatable:
            if self._is_known_by_key:
                meaning = meaning if self._link is None else Meaning.RESTART
            elif await self._runs_again():
                meaning, self._sent_in = Meaning.RESTART, None
            else:
                meaning = Meaning.UNKNOWN
        if meaning is Meaning.RESTART and not self._request.restarts:
            meaning = Meaning.UNKNOWN
        if meaning not in (Meaning.AGAIN, Meaning.RESTART):
            return self._end(meaning, why, refusal)
        self._stream.failed(why, at_least=at_least)
        if meaning is Meaning.RESTART:
            # The server may still have the first request, and ids never repeat within a session.
            self._stream.position, self._may_have_arrived, self.id = None, True, self._route.new_id()
        return None

    def _end(self, meaning: Meaning, why: str, refusal: Refused | None = None) -> Ended:
        if self._may_have_arrived and not self.is_repeatable:
            meaning = Meaning.UNKNOWN
        refusal = refusal or Refused("refused", why)
        if meaning is Meaning.REFUSED:
            self._route.report(Notice.REFUSED, str(refusal), reason=refusal.reason)
        return Ended(meaning=meaning, why=why, refusal=refusal)

    def unknown(self, reason: str) -> Message:
        return unknown(self.id, self._request.method, self._request.name, reason)


def unknown(request_id: str, method: str, name: str, reason: str) -> Message:
    """The answer to a request that may have run, and whose outcome this client does not know."""
    message, data = unknown_error(method, name or None, reason)
    return error(encode(request_id), OUTCOME_UNKNOWN, message, {**data, "told_by": "client"})


def failure_answer(request_id: str, failure: Unavailable | Refused) -> Message:
    """The answer to a request that did not reach a server, or that no server takes; the id is given as JSON."""
    if isinstance(failure, Refused):
        return error(request_id, NO_SERVER, str(failure), {"reason": failure.reason})
    return error(request_id, UNREACHABLE, f"The server did not answer within the limits: {failure}")


class Sender:
    """Sends notifications, and replies to the server's requests, in a session.

    A message may arrive twice: servers drop a reply that no tool waits for.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._underway: list[asyncio.Event] = []

    async def idle(self) -> None:
        """Wait until nothing is on its way. A message that waits for a server that is away does not count."""
        while self._underway:
            await self._underway[0].wait()

    def attempts(self) -> Stream:
        """The attempts at a message that is handed over now, and may have to wait before it is sent."""
        return Stream(self._link.route, patience=self._link.route.limits.patience, begins_now=True)

    async def send(
        self,
        body: bytes,
        *,
        is_reply: bool = False,
        departed: asyncio.Event | None = None,
        attempts: Stream | None = None,
        may_renew: bool = True,
        handshake: Handshake | None = None,
    ) -> bool:
        """Send a notification or a reply until the server has taken it; False if it does not.

        `departed` is set when the next message may follow. Without `may_renew` a session that has ended is left for the
        next request to find: the second half of a handshake does not begin another one. `handshake`: the session that
        it belongs to, in place of the one that requests go to.
        """
        route, departed, attempts = self._link.route, departed or asyncio.Event(), attempts or self.attempts()
        purpose = Purpose.REPLY if is_reply else Purpose.NOTIFICATION
        try:
            while True:
                used = handshake or self._link.handshake
                attempt = Attempt(purpose=purpose, may_renew=may_renew and bool(used and used.session))
                timer = asyncio.get_running_loop().call_later(DEPARTURE, departed.set)
                self._underway.append(over := asyncio.Event())
                try:
                    found = await attempts.attempt(route.endpoint.post(body, used), attempt, None)
                finally:
                    timer.cancel()
                    self._underway.remove(over)
                    over.set()
                meaning, why = found.meaning, found.why
                if meaning is Meaning.RENEW:
                    trouble = await self._link.renew(used)
                    may_renew, why = isinstance(trouble, Unavailable), "the session is gone"
                    if trouble is None:
                        meaning = of_failure(attempt, Failure.SESSION_REPLACED)
                    elif may_renew:
                        meaning = Meaning.AGAIN
                if meaning is Meaning.ANSWER:
                    return True
                if meaning is Meaning.AGAIN:
                    attempts.failed(why, at_least=found.at_least)
                    route.report(Notice.WAITING, why)
                    if await attempts.wait():
                        continue
                route.report(Notice.NOT_SENT, why)
                return False
        finally:
            departed.set()
