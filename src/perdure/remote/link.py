"""A link holds one client's session at one server, renews it when it is gone, and reads its standalone stream.

A renewal is a task of its own: a request that found the session gone waits for it, and may stop waiting, but it is
finished. Only then is the new session the one that requests go to; so none of them comes before `initialized`.

A Perdure server with `recover="reissue"` answers 404 with the id of a session that it has made already. That id is
not used: the specification has a client begin again without one (B5), and what the server agreed to would be unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
import anyio.abc

from perdure._core import splice
from perdure._core.delivery import Attempt, Meaning, Purpose
from perdure._core.sse import EventTooLarge
from perdure.remote.endpoint import FINAL, Handshake, Refused, Unavailable
from perdure.remote.message import Message, encode
from perdure.remote.route import Notice, Route
from perdure.remote.stream import Attempts, Stream

Task = Callable[..., Coroutine[Any, Any, object]]


class Program(Protocol):
    """The client above a link. It takes what the standalone stream brings, and has its say in renewals."""

    async def take(self, message: Message) -> None:
        """A message of the standalone stream, before its position moves."""

    def move(self, position: str | None, retry: int | None) -> None:
        """The standalone stream of the current session was read up to there."""

    async def lose_position(self) -> None:
        """The server refuses the position of the standalone stream, which is read from now on."""

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


class Standalone:
    """Reads the standalone stream of one session, which brings what belongs to no call."""

    def __init__(
        self, link: Link, handshake: Handshake, *, position: str | None, retry: int | None, is_new: bool
    ) -> None:
        self.stream = Stream(
            link.route,
            take=link.program.take,
            move=self._move,
            patience=link.route.limits.listening,
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
                    if meaning is Meaning.RESTART:  # the position is refused, and the stream is read without it
                        stream.position = None
                        self._move(None, None)
                    if not await stream.wait():
                        self.has_given_up = True
                        link.route.report(Notice.LISTENING_LOST, stream.trouble)
                        return
                    if meaning is Meaning.RESTART:
                        link.route.report(Notice.POSITION_LOST)
                        await link.program.lose_position()
                    elif meaning is Meaning.RENEW:
                        if (trouble := await link.renew(self._handshake)) is None:
                            return  # another stream is listened to by now
                        stream.trouble = str(trouble)
            except EventTooLarge as error:  # calls are not affected
                link.route.report(Notice.LISTENING_LOST, str(error))
                await link.route.complain(error)
            finally:
                self.has_begun.set()

    async def _attempt(self) -> Meaning:
        """One connection."""
        route, stream = self._link.route, self.stream
        attempt = Attempt(purpose=Purpose.LISTENER, has_position=stream.position is not None, may_renew=self._is_sure)
        opened = route.endpoint.get(stream.position, self._handshake)
        found = await stream.attempt(opened, attempt, None, self._on_response)
        self.has_begun.set()
        if found.failure in FINAL and found.refusal is not None:
            route.report(Notice.REFUSED, str(found.refusal), reason=found.refusal.reason)
        elif found.failure is not None:
            route.report(Notice.WAITING, found.why)
        stream.failed(found.why, at_least=found.at_least)
        return found.meaning

    def _on_response(self, meaning: Meaning, status: int) -> None:
        self.has_begun.set()
        if meaning is Meaning.FOLLOW:
            self._is_sure = True
            self._link.route.report(Notice.REACHED)


class Link:
    """Holds the session. `listening_seconds`: how long `listen` waits for the standalone stream. Some servers answer a
    GET only with their first event.
    """

    def __init__(self, route: Route, program: Program, *, listening_seconds: float) -> None:
        self.route = route
        self.handshake: Handshake | None = None
        """The session that requests go to."""
        self.program = program
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
        """Run a task for as long as the link lives."""

        async def guarded() -> None:
            try:
                await task(*arguments)
            except Exception as error:
                self.program.fail(error)

        self._tasks.start_soon(guarded)

    # Handshakes

    async def begin(self, text: str, request_id: str, *, known: str = "") -> tuple[Message, str]:
        """The answer to a client's `initialize`, and the session that the server names with it.

        `known` is a session that the handshake goes on with (a reattach). A handshake is begun again, not resumed: at
        worst a session that no client uses remains. Raises `Unavailable` and `Refused`.
        """
        named = Handshake(session=known, request={}, result={}) if known else None
        attempts = Attempts(self.route.limits.handshake, counts_from_request=self.route.limits.counts_from_request)
        with anyio.move_on_after(self.route.limits.handshake_seconds):
            while True:
                try:
                    found = await self._once(text, request_id, named)
                    self.route.report(Notice.REACHED)
                    return found
                except Unavailable as unavailable:
                    attempts.failed(str(unavailable), at_least=unavailable.at_least)
                self.route.report(Notice.WAITING, attempts.trouble)
                if not await attempts.wait():
                    raise Unavailable(attempts.trouble)
        raise Unavailable(f"no answer within {self.route.limits.handshake_seconds:.0f} s")

    async def _once(
        self, text: str, request_id: str, handshake: Handshake | None, *, is_sticky: bool = False
    ) -> tuple[Message, str]:
        """One attempt at a handshake, or at a sticky request that is repeated in a new session."""
        attempt = Attempt(purpose=Purpose.CALL if is_sticky else Purpose.HANDSHAKE, is_repeatable=is_sticky)
        body = splice.replaced(text, encode(request_id), "id").encode()
        stream = Stream(self.route, patience=self.route.limits.handshake)
        try:
            found = await stream.attempt(self.route.endpoint.post(body, handshake), attempt, request_id)
        except EventTooLarge as too_large:
            raise Refused("not_mcp", str(too_large)) from too_large
        if found.meaning is Meaning.ANSWER and found.message is not None:
            return found.message, found.session
        if found.meaning in (Meaning.AGAIN, Meaning.RESTART):
            why = found.why if found.failure is None else f"it cannot be reached: {found.why}"
            raise Unavailable(why, at_least=found.at_least)
        raise found.refusal or Refused("refused", found.why)

    # Renewal

    async def renew(self, gone: Handshake | None) -> Exception | None:
        """Begin one new session in place of one that is gone, however many requests have noticed (B5, H8).

        None if there is one; else `Unavailable` or `Refused`.
        """
        if gone is None or self.handshake is not gone:
            return None
        if self._renewal is None:
            self._renewal = asyncio.get_running_loop().create_future()
            self.start(self._renew, gone, self._renewal)
        return await asyncio.shield(self._renewal)

    async def _renew(self, gone: Handshake, over: asyncio.Future[Exception | None]) -> None:
        self.route.report(Notice.SESSION_GONE)
        trouble: Exception | None = Unavailable("the renewal was interrupted")
        try:
            answer, session = await self.begin(self.program.initialize(gone), self.route.new_id())
            if answer.is_error:
                raise Refused("refused", f"the server refuses a handshake: {answer.why}")
            made = Handshake(session=session, request=gone.request, result=answer.result)
            await self.program.prepare(made)
            await self._bring_up(made)
            self.handshake = made
            await self.program.adopt(made)
            await self.listen(is_new=True)
            trouble = None
        except (Unavailable, Refused) as error:
            self.route.report(Notice.NOT_RENEWED, str(error))
            trouble = error
        finally:
            self._renewal = None
            over.set_result(trouble)

    async def _bring_up(self, made: Handshake) -> None:
        """Bring a new session to where the old one was."""
        body = encode({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode()
        stream = Stream(self.route, patience=self.route.limits.patience)
        attempt = Attempt(purpose=Purpose.NOTIFICATION)
        found = await stream.attempt(self.route.endpoint.post(body, made), attempt, None)
        made.initialized = found.meaning is Meaning.ANSWER
        try:
            for text in self.program.sticky(made):
                answer, _ = await self._once(text, self.route.new_id(), made, is_sticky=True)
                if answer.is_error:
                    self.route.report(Notice.NOT_REPEATED, answer.why)
        except (Unavailable, Refused) as failure:
            self.route.report(Notice.NOT_REPEATED, str(failure))

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
