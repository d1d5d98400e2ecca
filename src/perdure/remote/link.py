"""A link holds one client's session at one server, renews it when it is gone, and reads its standalone stream.

A renewal is a task of its own: a request that found the session gone waits for it, and may stop waiting, but it is
finished. Only then is the new session the one that requests go to; so none of them comes before `initialized`.

A Perdure server with `recover="reissue"` answers 404 with the id of a session that it has made already. That id is
not used: the specification has a client begin again without one (B5), and what the server agreed to would be unknown.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
import anyio.abc

from perdure._core.delivery import Attempt, Meaning, Purpose
from perdure.remote.endpoint import Endpoint
from perdure.remote.failures import Refusal, Refused, RequestFailed, Unavailable
from perdure.remote.handshake import Handshakes
from perdure.remote.limits import Limits
from perdure.remote.message import Message, notification
from perdure.remote.notice import Notice, Report
from perdure.remote.standalone import Standalone
from perdure.remote.state import Handshake
from perdure.remote.stream import Listener

Task = Callable[..., Coroutine[Any, Any, object]]


class Program(Protocol):
    """The client above a link. It takes what the standalone stream brings, and has its say in renewals."""

    async def take(self, message: Message) -> None:
        """A message of the standalone stream, before its position moves."""

    async def complain(self, error: Exception) -> None:
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


@dataclass(kw_only=True)
class _Renewal:
    trouble: Exception | None = field(default_factory=lambda: Unavailable("the renewal was interrupted"))
    is_over: anyio.Event = field(default_factory=anyio.Event)


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
        self.handshakes = Handshakes(endpoint, limits, report)
        self.handshake: Handshake | None = None
        """The session that requests go to."""
        self._program = program
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._listening_seconds = listening_seconds
        self._renewal: _Renewal | None = None
        self._standalone: Standalone | None = None
        self._tasks: anyio.abc.TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[anyio.CancelScope]:
        """The tasks of the link live for as long as this block, or until its scope is cancelled."""
        async with anyio.create_task_group() as self._tasks:
            yield self._tasks.cancel_scope

    def start(self, task: Task, *arguments: object) -> None:
        """Run something for as long as the link lives."""
        self._tasks.start_soon(self._guard, task, arguments)

    async def _guard(self, task: Task, arguments: tuple[object, ...]) -> None:
        try:
            await task(*arguments)
        except Exception as error:
            self._program.fail(error)

    def new_id(self) -> str:
        # Not a number, also not as a string: the SDK takes "7" for 7.
        return f"{self._prefix}.{next(self._numbers)}"

    async def complain(self, error: Exception) -> None:
        await self._program.complain(error)

    def use(self, handshake: Handshake) -> None:
        """Requests go to this session from now on."""
        self.handshake = handshake

    # Renewal

    async def renew(self, gone: Handshake | None) -> Exception | None:
        """One new session in place of one that is gone, however many requests have noticed (B5, H8).

        None if there is one; else `Unavailable` or `Refused`.
        """
        if gone is None or self.handshake is not gone:
            return None
        renewal = self._renewal
        if renewal is None:
            renewal = self._renewal = _Renewal()
            self.start(self._renew, gone, renewal)
        await renewal.is_over.wait()
        return renewal.trouble

    async def _renew(self, gone: Handshake, renewal: _Renewal) -> None:
        self.report(Notice.SESSION_GONE)
        try:
            answer, session = await self.handshakes.begin(self._program.initialize(gone), self.new_id())
            if answer.is_error:
                sentence = f"the server refuses a handshake: {answer.why}"
                raise Refused(Refusal(reason="refused", sentence=sentence))
            made = Handshake(session=session, request=gone.request, result=answer.result)
            await self._program.prepare(made)
            await self._bring_up(made)
            self.use(made)
            await self._program.adopt(made)
            await self.listen(is_new=True)
            renewal.trouble = None
        except (Unavailable, Refused) as trouble:
            self.report(Notice.NOT_RENEWED, str(trouble))
            renewal.trouble = trouble
        finally:
            self._renewal = None
            renewal.is_over.set()

    async def _bring_up(self, made: Handshake) -> None:
        """Bring a new session to where the old one was."""
        body = notification("notifications/initialized").encode()
        try:
            async with self.endpoint.post(body, made) as response:
                attempt = Attempt(purpose=Purpose.NOTIFICATION)
                meaning, _ = await response.meaning(attempt, None, self.limits.message_bytes)
                made.initialized = meaning is Meaning.ANSWER
            for text in self._program.sticky(made):
                answer, _ = await self.handshakes.once(text, self.new_id(), made, is_sticky=True)
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
        listening = self.handshake

        def move(position: str | None, retry: int | None) -> None:
            if self.handshake is listening:
                self._program.move(position, retry)

        listener = Listener(take=self._program.take, complain=self._program.complain, move=move)
        standalone = self._standalone = Standalone(
            self.endpoint, self.limits, listener, self.report, listening, position=position, retry=retry, is_new=is_new
        )
        self.start(self._listen, standalone)
        with anyio.move_on_after(self._listening_seconds):
            await standalone.has_begun.wait()

    async def listen_again(self) -> None:
        """The server is there: a standalone stream that was given up is worth another try."""
        if self._standalone is not None and self._standalone.has_given_up:
            stream = self._standalone.stream
            retry = None if stream.course.retry is None else int(stream.course.retry * 1000)
            await self.listen(position=stream.position, retry=retry, is_new=False)

    def stop_listening(self) -> None:
        if self._standalone is not None:
            self._standalone.scope.cancel()
            self._standalone = None

    async def _listen(self, standalone: Standalone) -> None:
        with standalone.scope:
            while (ended := await standalone.run()) in (Meaning.RENEW, Meaning.RESTART):
                if ended is Meaning.RESTART:
                    self.report(Notice.POSITION_LOST)
                    await self._program.lose_position()
                elif (trouble := await self.renew(standalone.handshake)) is None:
                    return  # another stream is listened to by now
                else:
                    standalone.stream.trouble = str(trouble)
            if ended is Meaning.UNREACHABLE:
                self.report(Notice.LISTENING_LOST, standalone.stream.trouble)
