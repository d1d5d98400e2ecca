"""A link holds one client's session at one server, renews it when it is gone, and reads its standalone stream.

A renewal is a task of its own: a request that found the session gone waits for it, and may stop waiting, but it is
finished. Only then is the new session the one that requests go to; so none of them comes before `initialized`.

A Perdure server with `recover="reissue"` answers 404 with the id of a session that it has made already. That id is
not used: the specification has a client begin again without one (B5), and what the server agreed to would be unknown.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
import anyio.abc

from perdure._core import splice
from perdure._core.delivery import Attempt, Failure, Meaning, Purpose, of_failure
from perdure._core.sse import EventTooLarge
from perdure._core.text import format_duration
from perdure.remote.endpoint import Endpoint, Handshake, Refused, RequestFailed, Unavailable, shown
from perdure.remote.message import Message, encode
from perdure.remote.stream import Attempts, Limits, Listener, Stream
from perdure.telemetry.log_records import log_event

_SENT_AGAIN = (Meaning.AGAIN, Meaning.RESTART)
Task = Callable[..., Coroutine[Any, Any, object]]


class Notice(enum.Enum):
    """An event of a link, for the log."""

    WAITING = "the server cannot be reached, and is tried again"
    REACHED = "the server answers"
    REFUSED = "the server, or the way to it, refuses for good"
    SESSION_GONE = "the session is gone, a new one is begun"
    NOT_RENEWED = "no new session could be begun"
    NOT_REPEATED = "a sticky request could not be repeated in the new session"
    NOT_SENT = "a notification or a reply could not be sent"
    POSITION_LOST = "the server refuses the position of the standalone stream"
    LISTENING_LOST = "the standalone stream is given up"


class Report(Protocol):
    """`why` says more about it; `reason` is the word for machines of a refusal."""

    def __call__(self, notice: Notice, why: str = "", *, reason: str = "") -> None: ...


class ConnectionLog:
    """Writes a link's notices to the log: once that the server is away or refuses, and again after it has answered.

    `level` is that of a server that is away. A program that raises an error for some notices `skips` them. Patience for
    a server that has not answered yet is `first_wait` seconds; where there is none, the handshake's error says why.
    """

    def __init__(self, url: str, *, level: int, first_wait: float, skips: Collection[Notice] = ()) -> None:
        self._where = shown(url)
        self._level = level
        self._skips = skips
        self._first_wait = first_wait
        self._has_answered = False
        self._last: str | None = None
        """The last refusal in the log, "" for a server that is away, None for one that answers."""

    def __call__(self, notice: Notice, why: str = "", *, reason: str = "") -> None:
        if notice in self._skips:
            return
        match notice:
            case Notice.WAITING if self._last is None and (self._has_answered or self._first_wait):
                self._last, level = "", self._level
                sentence = f"{self._where} cannot be reached, and is tried again: {why}"
                if not self._has_answered and self._first_wait < math.inf:
                    sentence = f"waiting for {self._where}, for {format_duration(self._first_wait)} at most: {why}"
                log_event(level, "remote.waiting", sentence)
            case Notice.REACHED:
                if self._last is not None:
                    log_event(logging.INFO, "remote.reached", f"{self._where} answers again")
                self._last, self._has_answered = None, True
            case Notice.REFUSED if self._last != why:
                self._last = why
                log_event(logging.ERROR, "remote.refused", why, reason=reason)
            case Notice.SESSION_GONE:
                log_event(logging.WARNING, "remote.session_gone", "the session is gone; a new one is begun")
            case Notice.NOT_RENEWED:
                log_event(logging.WARNING, "remote.not_renewed", f"no new session could be begun: {why}")
            case Notice.NOT_REPEATED:
                log_event(logging.WARNING, "remote.not_repeated", f"subscriptions or the log level are lost: {why}")
            case Notice.NOT_SENT:
                log_event(logging.WARNING, "remote.not_sent", f"a notification or a reply could not be sent: {why}")
            case Notice.POSITION_LOST:
                sentence = "the server refused the position; what was missed is not repeated"
                log_event(logging.WARNING, "remote.position_lost", sentence)
            case Notice.LISTENING_LOST:
                sentence = f"the standalone stream is given up, what belongs to no call is missed: {why}"
                log_event(logging.WARNING, "remote.standalone_lost", sentence)


class Program(Protocol):
    """The client above a link. It takes what the standalone stream brings, and has its say in renewals."""

    async def take(self, message: Message) -> None:
        """A message of the standalone stream, before its position moves."""

    async def complain(self, error: Exception, /) -> object:
        """The server sent what is not a message, or a stray answer."""

    def move(self, position: str | None, retry: int | None) -> None:
        """The standalone stream of the current session was read up to there."""

    async def lose_position(self) -> None:
        """The server refuses the position of the standalone stream, which goes on from now."""

    def initialize(self, gone: Handshake) -> str:
        """The text of the handshake that begins a session in place of this one."""

    async def prepare(self, handshake: Handshake) -> None:
        """A new session was begun, and no request goes to it yet. Raises `Refused` if it cannot be used."""

    def sticky(self, handshake: Handshake) -> Iterable[str]:
        """The texts of the requests to repeat in a new session."""

    async def adopt(self, handshake: Handshake) -> None:
        """Requests go to the new session from now on."""

    def fail(self, error: Exception) -> None:
        """A task of the link raised."""


async def _ignore(_: object) -> None:
    return None


#: A handshake has no messages but its answer.
_NO_LISTENER = Listener(take=_ignore, complain=_ignore, move=lambda position, retry: None)


class Standalone:
    """Reads the standalone stream of one session, which brings what belongs to no call."""

    def __init__(
        self, link: Link, handshake: Handshake, *, position: str | None, retry: int | None, is_new: bool
    ) -> None:
        self.stream = Stream(
            link.endpoint,
            link.limits,
            Listener(take=link.program.take, complain=link.program.complain, move=self._move),
            patience=link.limits.listening,
            position=position,
            retry=retry,
        )
        self.scope = anyio.CancelScope()
        self.has_begun = anyio.Event()
        """The first attempt was answered, or failed."""
        self.has_given_up = False
        """Patience has ended: it is worth another try when the server answers a call."""
        self._link = link
        self._handshake = handshake
        self._is_sure = not is_new
        """The server has such a stream; then 404 means that the session is gone."""

    def _move(self, position: str | None, retry: int | None) -> None:
        if self._link.handshake is self._handshake:
            self._link.program.move(position, retry)

    async def run(self) -> None:
        """Read until there is no such stream, or another one in its place, or patience has ended."""
        link, stream = self._link, self.stream
        with self.scope:
            try:
                while (meaning := await self._attempt()) is not Meaning.REFUSED:
                    if meaning is Meaning.RESTART:  # the position is refused, and the stream goes on without it
                        stream.position = None
                        self._move(None, None)
                    if not await stream.wait():
                        self.has_given_up = True
                        link.report(Notice.LISTENING_LOST, stream.trouble)
                        return
                    if meaning is Meaning.RESTART:
                        link.report(Notice.POSITION_LOST)
                        await link.program.lose_position()
                    elif meaning is Meaning.RENEW:
                        if (trouble := await link.renew(self._handshake)) is None:
                            return  # another stream is listened to by now
                        stream.trouble = str(trouble)
            except EventTooLarge as error:  # calls go on
                link.report(Notice.LISTENING_LOST, str(error))
                await link.program.complain(error)
            finally:
                self.has_begun.set()

    async def _attempt(self) -> Meaning:
        """One connection."""
        link, stream = self._link, self.stream
        attempt = Attempt(purpose=Purpose.LISTENER, has_position=stream.position is not None, may_renew=self._is_sure)
        try:
            async with link.endpoint.get(stream.position, self._handshake) as response:
                self.has_begun.set()
                meaning, _ = await response.meaning(attempt, None, link.limits.message_bytes)
                if meaning is Meaning.FOLLOW:
                    self._is_sure = True
                    link.report(Notice.REACHED)
                    await stream.read(response, awaited=None)
                    return of_failure(attempt, Failure.LOST)
                stream.failed(f"HTTP {response.status}", at_least=response.retry_after)
                return meaning
        except RequestFailed as failed:
            if failed.is_final:
                link.report(Notice.REFUSED, str(failed.refusal), reason=failed.refusal.reason)
            else:
                link.report(Notice.WAITING, str(failed))
            stream.failed(str(failed))
            self.has_begun.set()
            return of_failure(attempt, failed.failure)


class Link:
    """`prefix` makes request ids that never repeat within a session, not even over several processes.

    `listening_seconds`: how long `listen` waits for the standalone stream. Some servers answer a GET only with
    their first event.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        program: Program,
        report: Report,
        *,
        prefix: str,
        listening_seconds: float,
    ) -> None:
        self.endpoint = endpoint
        self.limits = limits
        self.report = report
        self.handshake: Handshake | None = None
        """The session that requests go to."""
        self.program = program
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._listening_seconds = listening_seconds
        self._renewal: asyncio.Future[Exception | None] | None = None
        self._standalone: Standalone | None = None
        self._tasks: anyio.abc.TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[anyio.CancelScope]:
        """The tasks of the link live for as long as this block, or until its scope is cancelled."""
        async with anyio.create_task_group() as self._tasks:
            yield self._tasks.cancel_scope

    def start(self, task: Task, *arguments: object) -> None:
        """Run something for as long as the link lives."""

        async def guarded() -> None:
            try:
                await task(*arguments)
            except Exception as error:
                self.program.fail(error)

        self._tasks.start_soon(guarded)

    def new_id(self) -> str:
        # Not a number, also not as a string: the SDK takes "7" for 7.
        return f"{self._prefix}.{next(self._numbers)}"

    def use(self, handshake: Handshake) -> None:
        """Requests go to this session from now on."""
        self.handshake = handshake

    # Handshakes

    async def begin(self, text: str, request_id: str, *, known: str = "") -> tuple[Message, str]:
        """The answer to a client's `initialize`, and the session that the server names with it.

        `known` is a session that the handshake goes on with (a reattach). A handshake is begun again, not resumed: at
        worst a session that no client uses remains. Raises `Unavailable` and `Refused`.
        """
        named = Handshake(session=known, request={}, result={}) if known else None
        attempts = Attempts(self.limits.handshake, counts_from_request=self.limits.counts_from_request)
        with anyio.move_on_after(self.limits.handshake_seconds):
            while True:
                try:
                    found = await self._once(text, request_id, named)
                    self.report(Notice.REACHED)
                    return found
                except Unavailable as unavailable:
                    attempts.failed(str(unavailable), at_least=unavailable.at_least)
                self.report(Notice.WAITING, attempts.trouble)
                if not await attempts.wait():
                    raise Unavailable(attempts.trouble)
        raise Unavailable(f"no answer within {self.limits.handshake_seconds:.0f} s")

    async def _once(
        self, text: str, request_id: str, handshake: Handshake | None, *, is_sticky: bool = False
    ) -> tuple[Message, str]:
        """One attempt at a handshake, or at a sticky request that is repeated in a new session."""
        attempt = Attempt(purpose=Purpose.CALL if is_sticky else Purpose.HANDSHAKE, is_repeatable=is_sticky)
        body = splice.replaced(text, encode(request_id), "id").encode()
        try:
            async with self.endpoint.post(body, handshake) as response:
                meaning, message = await response.meaning(attempt, request_id, self.limits.message_bytes)
                if meaning is Meaning.FOLLOW:
                    stream = Stream(self.endpoint, self.limits, _NO_LISTENER, patience=self.limits.handshake)
                    message = await stream.read(response, awaited=request_id)
                    if message is None:
                        raise Unavailable(stream.trouble)
                if message is not None and meaning in (Meaning.FOLLOW, Meaning.ANSWER):
                    return message, response.session
                if meaning in _SENT_AGAIN:
                    raise Unavailable(f"HTTP {response.status}", at_least=response.retry_after)
                raise self.endpoint.refusal(response)
        except RequestFailed as failed:
            if of_failure(attempt, failed.failure) in _SENT_AGAIN:
                raise Unavailable(f"it cannot be reached: {failed}") from failed
            raise failed.refusal from failed
        except EventTooLarge as too_large:
            raise Refused("not_mcp", str(too_large)) from too_large

    # Renewal

    async def renew(self, gone: Handshake | None) -> Exception | None:
        """One new session in place of one that is gone, however many requests have noticed (B5, H8).

        None if there is one; else `Unavailable` or `Refused`.
        """
        if gone is None or self.handshake is not gone:
            return None
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().create_future()
            self.start(self._renew, gone, self._renewal)
        return await asyncio.shield(self._renewal)

    async def _renew(self, gone: Handshake, over: asyncio.Future[Exception | None]) -> None:
        self.report(Notice.SESSION_GONE)
        trouble: Exception | None = Unavailable("the renewal was interrupted")
        try:
            answer, session = await self.begin(self.program.initialize(gone), self.new_id())
            if answer.is_error:
                raise Refused("refused", f"the server refuses a handshake: {answer.why}")
            made = Handshake(session=session, request=gone.request, result=answer.result)
            await self.program.prepare(made)
            await self._bring_up(made)
            self.use(made)
            await self.program.adopt(made)
            await self.listen(is_new=True)
            trouble = None
        except (Unavailable, Refused) as error:
            self.report(Notice.NOT_RENEWED, str(error))
            trouble = error
        finally:
            self._renewal = None
            over.set_result(trouble)

    async def _bring_up(self, made: Handshake) -> None:
        """Bring a new session to where the old one was."""
        body = encode({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode()
        try:
            async with self.endpoint.post(body, made) as response:
                attempt = Attempt(purpose=Purpose.NOTIFICATION)
                meaning, _ = await response.meaning(attempt, None, self.limits.message_bytes)
                made.initialized = meaning is Meaning.ANSWER
            for text in self.program.sticky(made):
                answer, _ = await self._once(text, self.new_id(), made, is_sticky=True)
                if answer.is_error:
                    self.report(Notice.NOT_REPEATED, answer.why)
        except (RequestFailed, Unavailable, Refused) as failure:
            self.report(Notice.NOT_REPEATED, str(failure))

    # The standalone stream

    async def listen(self, *, position: str | None = None, retry: int | None = None, is_new: bool) -> None:
        """Read the standalone stream of the session that there is now, and no other. `is_new`: it has just begun.

        Waits until the stream is open, or cannot be: what a server without a log says before is lost.
        """
        self.stop_listening()
        if self.handshake is None or not self.handshake.session:
            return
        standalone = self._standalone = Standalone(self, self.handshake, position=position, retry=retry, is_new=is_new)
        self.start(standalone.run)
        with anyio.move_on_after(self._listening_seconds):
            await standalone.has_begun.wait()

    async def listen_again(self) -> None:
        """Try a standalone stream again that was given up: the server has answered a call."""
        if self._standalone is not None and self._standalone.has_given_up:
            stream = self._standalone.stream
            retry = None if stream.course.retry is None else int(stream.course.retry * 1000)
            await self.listen(position=stream.position, retry=retry, is_new=False)

    def stop_listening(self) -> None:
        if self._standalone is not None:
            self._standalone.scope.cancel()
            self._standalone = None
