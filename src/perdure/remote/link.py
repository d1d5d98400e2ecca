"""A link holds one client's session at one server, renews it when it has ended, and reads its standalone stream.

A renewal is a task of its own: a request that found the session ended waits for the renewal, and may stop waiting; the
renewal is finished all the same. Only then do requests use the new session, so none of them precedes `initialized`.

A Perdure server with `recover="reissue"` answers 404 with the id of a session that it has made already. That id is
not used: the specification has a client begin again without one (B5), and what the server agreed to would be unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
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

#: Seconds between two checks of one session, so that errors that only speak of a session cost little; and for one.
CHECK_PAUSE, CHECK_SECONDS = 60.0, 10.0

Task = Callable[..., Coroutine[Any, Any, object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A server's answer to a request outside of a call, such as `initialize`."""

    answer: Message
    session: str
    """The session that the server names with it."""
    status: int
    """0 on an event stream."""


class LinkClient(Protocol):
    """The client above a link. It takes messages of the standalone stream, and takes part in renewals."""

    async def take(self, message: Message) -> None:
        """A message of the standalone stream, before its position moves."""

    def move(self, position: str | None, retry: int | None) -> None:
        """The standalone stream of the current session was read up to there."""

    async def lose_position(self) -> None:
        """The server refuses the position of the standalone stream, which is read from now on."""

    async def replace(self, gone: Handshake) -> Handshake:
        """Begin a session in place of this one (`Link.begin_again`), and bring it to where the old one was
        (`Link.bring_up`). Raises `Unavailable`, and `Refused` if the new one cannot be used."""

    async def on_replaced(self, handshake: Handshake) -> None:
        """Requests use the new session from now on."""

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
        self.has_begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The first attempt was answered, or failed."""
        self.has_given_up = False
        """Patience has ended: it is worth another try when the server answers a call."""
        self._link = link
        self._handshake = handshake
        self._is_sure = not is_new
        """The server has such a stream; then 404 means that the session has ended."""

    def _move(self, position: str | None, retry: int | None) -> None:
        if self._link.handshake is self._handshake:
            self._link.program.move(position, retry)

    def _begin(self) -> None:
        if not self.has_begun.done():
            self.has_begun.set_result(None)

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
                self._begin()

    async def _attempt(self) -> Meaning:
        """One connection."""
        route, stream = self._link.route, self.stream
        attempt = Attempt(purpose=Purpose.LISTENER, has_position=stream.position is not None, may_renew=self._is_sure)
        opened = route.endpoint.get(stream.position, self._handshake)
        found = await stream.attempt(opened, attempt, None, self._on_response)
        self._begin()
        if found.failure in FINAL and found.refusal is not None:
            route.report(Notice.REFUSED, str(found.refusal), reason=found.refusal.reason)
        elif found.failure is not None:
            route.report(Notice.WAITING, found.why)
        stream.failed(found.why, at_least=found.at_least)
        # Some servers answer 404 or 400 to every GET, and some because the session has ended.
        may_be_gone = found.meaning is Meaning.REFUSED and found.status in (400, 404)
        return Meaning.RENEW if may_be_gone and await self._link.is_gone(self._handshake) else found.meaning

    def _on_response(self, meaning: Meaning, status: int) -> None:
        self._begin()
        if meaning is Meaning.FOLLOW:
            self._is_sure = True
            self._link.route.report(Notice.REACHED)


class Link:
    """Holds the session. `listening_seconds`: how long `listen` waits for the standalone stream. Some servers answer a
    GET only with their first event. `checks`: a session that seems to have ended is checked (`is_gone`). `listens`: the
    standalone stream of a new session is read. `start_soon` runs the link's tasks, in place of `running`.
    """

    def __init__(
        self,
        route: Route,
        program: LinkClient,
        *,
        listening_seconds: float,
        checks: bool = False,
        listens: bool = True,
        start_soon: Callable[[Task], object] | None = None,
    ) -> None:
        self.route = route
        self.handshake: Handshake | None = None
        """The session that requests use."""
        self.program = program
        self.listens = listens
        self._listening_seconds = listening_seconds
        self._checks = checks
        self._checked: tuple[Handshake, float, asyncio.Future[bool]] | None = None
        """The session that was asked for last, when, and whether it is gone."""
        self._renewal: asyncio.Future[Exception | None] | None = None
        self._standalone: Standalone | None = None
        if start_soon is not None:
            self._start_soon = start_soon

    @asynccontextmanager
    async def running(self) -> AsyncIterator[anyio.CancelScope]:
        """The tasks of the link live for as long as this block, or until its scope is cancelled."""
        async with anyio.create_task_group() as tasks:
            self._start_soon = tasks.start_soon
            yield tasks.cancel_scope

    def start(self, task: Task, *arguments: object) -> None:
        """Run a task for as long as the link lives."""

        async def guarded() -> None:
            try:
                await task(*arguments)
            except Exception as error:
                self.program.fail(error)

        self._start_soon(guarded)

    # Handshakes

    async def begin(self, text: str, request_id: str, *, known: str = "") -> Begun:
        """The answer to a client's `initialize`.

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
                    raise Unavailable(attempts.trouble, at_least=attempts.course.at_least)
        raise Unavailable(f"no answer within {self.route.limits.handshake_seconds:.0f} s")

    async def _once(self, text: str, request_id: str, handshake: Handshake | None, *, is_sticky: bool = False) -> Begun:
        """One attempt at a handshake, or at a sticky request that is repeated in a new session."""
        attempt = Attempt(purpose=Purpose.CALL if is_sticky else Purpose.HANDSHAKE, is_repeatable=is_sticky)
        body = splice.replaced(text, encode(request_id), "id").encode()
        stream = Stream(self.route, patience=self.route.limits.handshake)
        try:
            found = await stream.attempt(self.route.endpoint.post(body, handshake), attempt, request_id)
        except EventTooLarge as too_large:
            raise Refused("not_mcp", str(too_large)) from too_large
        if found.meaning is Meaning.ANSWER and found.message is not None:
            return Begun(answer=found.message, session=found.session, status=found.status)
        if found.meaning in (Meaning.AGAIN, Meaning.RESTART):
            why = found.why if found.failure is None else f"it cannot be reached: {found.why}"
            raise Unavailable(why, at_least=found.at_least)
        raise found.refusal or Refused("refused", found.why)

    # Renewal

    async def renew(self, gone: Handshake | None) -> Exception | None:
        """Begin one new session in place of one that has ended, however many requests have noticed (B5, H8).

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
            self.handshake = await self.program.replace(gone)
            await self.program.on_replaced(self.handshake)
            if self.listens:
                await self.listen(is_new=True)
            trouble = None
        except (Unavailable, Refused) as error:
            self.route.report(Notice.NOT_RENEWED, str(error))
            trouble = error
        finally:
            self._renewal = None
            over.set_result(trouble)

    async def begin_again(self, text: str, gone: Handshake) -> Handshake:
        """Begin a session in place of one that has ended, by the text of an `initialize` request."""
        begun = await self.begin(text, self.route.new_id())
        if begun.answer.is_error:
            raise Refused("refused", f"the server refuses a handshake: {begun.answer.why}")
        return Handshake(session=begun.session, request=gone.request, result=begun.answer.result)

    async def bring_up(self, made: Handshake, sticky: Iterable[str]) -> None:
        """Bring a new session to where the old one was: `sticky` are the texts of the requests to repeat."""
        body = encode({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode()
        stream = Stream(self.route, patience=self.route.limits.patience)
        attempt = Attempt(purpose=Purpose.NOTIFICATION)
        found = await stream.attempt(self.route.endpoint.post(body, made), attempt, None)
        made.initialized = found.meaning is Meaning.ANSWER
        try:
            for text in sticky:
                answer = (await self._once(text, self.route.new_id(), made, is_sticky=True)).answer
                if answer.is_error:
                    self.route.report(Notice.NOT_REPEATED, answer.why)
        except (Unavailable, Refused) as failure:
            self.route.report(Notice.NOT_REPEATED, str(failure))

    async def settled(self) -> None:
        """Wait for the renewal that is under way, if there is one."""
        if self._renewal is not None:
            await asyncio.shield(self._renewal)

    async def is_gone(self, doubted: Handshake | None) -> bool:
        """Whether a session has ended that the server seems not to know: then it refuses a `ping` in it as well.

        At most one `ping` in `CHECK_PAUSE` finds that out for all who ask.
        """
        if doubted is None or not self._checks:
            return False
        if self.handshake is not doubted or self._renewal is not None:
            return True
        now = asyncio.get_running_loop().time()
        if self._checked is None or self._checked[0] is not doubted or now - self._checked[1] >= CHECK_PAUSE:
            self._checked = doubted, now, asyncio.get_running_loop().create_future()
            self.start(self._check, doubted, self._checked[2])
        return await asyncio.shield(self._checked[2])

    async def _check(self, doubted: Handshake, is_gone: asyncio.Future[bool]) -> None:
        found = None
        try:
            request_id = self.route.new_id()
            body = encode({"jsonrpc": "2.0", "id": request_id, "method": "ping"}).encode()
            attempt = Attempt(purpose=Purpose.CALL, is_repeatable=True, may_renew=True)
            with anyio.move_on_after(CHECK_SECONDS):
                stream = Stream(self.route, patience=self.route.limits.patience)
                found = await stream.attempt(self.route.endpoint.post(body, doubted), attempt, request_id)
        finally:
            is_gone.set_result(found is not None and (found.doubts_session or found.meaning is Meaning.RENEW))

    # The standalone stream

    async def listen(self, *, position: str | None = None, retry: int | None = None, is_new: bool) -> None:
        """Read the standalone stream of the present session, and no other. `is_new`: it has just begun.

        Waits until the stream is open, or cannot be opened: earlier messages of a server without a log are lost.
        """
        self.stop_listening()
        if self.handshake is None:
            return
        standalone = self._standalone = Standalone(self, self.handshake, position=position, retry=retry, is_new=is_new)
        self.start(standalone.run)
        with anyio.move_on_after(self._listening_seconds):
            await asyncio.shield(standalone.has_begun)

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
