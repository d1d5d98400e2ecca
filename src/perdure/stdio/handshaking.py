"""Handshakes of the bridge: the host's own, which a resumed session takes for a reattach, and another one with the same
words when the session is gone."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import anyio
import httpx2

from perdure._core import splice
from perdure._core.codes import NO_SERVER, UNREACHABLE
from perdure._core.reconnect import Patience
from perdure.client.state import Handshake
from perdure.client.wire import Broken, NotSent, kind, retry_after
from perdure.observe import note
from perdure.stdio import troubles
from perdure.stdio.call import NO_ANSWER, NOT_NOW
from perdure.stdio.following import Following, endless, whole
from perdure.stdio.messages import FromServer, encode, error, from_server, notification
from perdure.stdio.resuming import Unavailable

if TYPE_CHECKING:
    from perdure.stdio.bridge import Bridge

SESSION_HEADER = "mcp-session-id"
#: Seconds for a handshake, however patient the bridge is otherwise: hosts give up after 30 (some editors) or 60 (the
#: TypeScript SDK), and an answer that says what is wrong must come before that.
HANDSHAKE_SECONDS = 25.0


class Handshaking:
    """Makes and renews the session of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._turn = anyio.Lock()
        self._text = ""
        """The host's own `initialize`."""
        self.handshake: Handshake | None = None
        self.is_resumed = False
        self.is_begun = False
        """The host has asked for one, answered or not."""

    async def initialize(self, host_id: str, text: str, params: dict[str, Any]) -> str:
        """The answer to the host's `initialize`."""
        async with self._turn:
            self._text = text
            patience = self._patience()
            try:
                known = self.handshake.session if self.handshake else await self._bridge.resuming.session(patience)
                answer = await self._negotiate(text, params, known, patience)
            except Unavailable as unavailable:
                return error(host_id, UNREACHABLE, f"The server did not answer within the limits: {unavailable}")
            except troubles.Refused as refused:
                self._bridge.teller.refused(refused.trouble)
                return error(host_id, NO_SERVER, refused.trouble.sentence, {"reason": refused.trouble.reason})
            return answer.answering(host_id)

    async def renew(self, gone: Handshake | None) -> bool:
        """One new session in place of one that is gone, however many requests have noticed (B5, H8)."""
        bridge = self._bridge
        async with self._turn:
            if self.handshake is not gone or gone is None:
                return self.handshake is not None
            note(logging.WARNING, "stdio.session_gone", "the session is gone; a new one is begun")
            try:
                answer = await self._negotiate(self._text, gone.request, None, self._patience())
            except (Unavailable, troubles.Refused) as failure:
                note(logging.WARNING, "stdio.not_renewed", f"no new session could be begun: {failure}")
                return False  # the next request finds out again whether it is still gone
            if answer.is_error:
                return False
            await bridge.forget_asks()
            await self._settle_in()
            return True

    def _patience(self) -> Patience:
        ours = self._bridge.patience
        return Patience(
            max_time=min(ours.max_time, HANDSHAKE_SECONDS),
            max_tries=ours.max_tries,
            first_delay=min(ours.first_delay, ours.max_delay),
            max_delay=min(ours.max_delay, 2.0),
        )

    async def _settle_in(self) -> None:
        """Bring a new session to where the old one was."""
        assert self.handshake is not None
        self.handshake.initialized = True
        try:
            body = notification("notifications/initialized").encode()
            async with self._bridge.wire.post(body, self.handshake):
                pass
            for sticky in self._bridge.notes.noted.sticky:
                body = splice.replaced(sticky, encode(self._bridge.new_id()), "id").encode()
                await self._once(body, self.handshake)
        except (NotSent, Broken, troubles.Refused) as failure:
            note(logging.WARNING, "stdio.not_repeated", f"subscriptions or the log level are lost: {failure}")
        self._bridge.listen()

    async def _negotiate(self, text: str, params: dict[str, Any], known: str | None, patience: Patience) -> FromServer:
        body = splice.replaced(text, encode(self._bridge.new_id()), "id").encode()
        named = None if known is None else Handshake(session=known, request={}, result={})
        answer, session = await self._until_answered(body, named, patience)
        if answer.is_error:
            return answer
        is_again = self.handshake is not None and self.handshake.session == session
        result = answer.body.get("result")
        self.handshake = Handshake(session=session, request=params, result=result if isinstance(result, dict) else {})
        self.is_resumed = known is not None and session == known
        if self.is_resumed:
            if not is_again:
                self._bridge.notes.recall(session)
                self._bridge.before.recall()
            return answer
        if known is not None:
            sentence = "the session could not go on with what the host says of itself; a new one has begun"
            note(logging.INFO, "stdio.session_other", sentence)
        if not await self._bridge.resuming.opened(session):
            self._bridge.start(self.open_later, session)
        self._bridge.notes.begin(session)
        return answer

    async def open_later(self, session: str) -> None:
        """Ask for the session's first token until it is there: the host need not wait for that."""
        course = Following(_Deaf(), endless(self._bridge.patience))
        while self.handshake is not None and self.handshake.session == session:
            course.failed("the broker does not answer")
            await course.wait()
            if await self._bridge.resuming.opened(session):
                return

    async def _until_answered(self, body: bytes, named: Handshake | None, patience: Patience) -> tuple[FromServer, str]:
        """A handshake is begun again, not resumed: at worst a session that nobody uses remains."""
        with anyio.move_on_after(HANDSHAKE_SECONDS):
            return await self._try(body, named, patience)
        raise Unavailable(f"no answer within {HANDSHAKE_SECONDS:.0f} s")

    async def _try(self, body: bytes, named: Handshake | None, patience: Patience) -> tuple[FromServer, str]:
        bridge = self._bridge
        course = Following(_Deaf(), patience, since=time.monotonic())
        while True:
            try:
                found = await self._once(body, named)
                if not isinstance(found, httpx2.Response):
                    bridge.teller.reached(bridge.wire.url)
                    return found
                course.failed(f"HTTP {found.status_code}", at_least=retry_after(found))
            except (NotSent, Broken) as failure:
                if (trouble := troubles.of_error(failure, bridge.wire.url)) is not None:
                    raise troubles.Refused(trouble) from failure
                course.failed(str(failure))
            bridge.teller.waiting(bridge.wire.url, course.trouble)
            if not await course.wait():
                raise Unavailable(course.trouble)

    async def _once(self, body: bytes, handshake: Handshake | None) -> tuple[FromServer, str] | httpx2.Response:
        """A request of ours and its answer with the session that it names; the response, where it may pass."""
        bridge = self._bridge
        async with bridge.wire.post(body, handshake) as response:
            if response.status_code in NOT_NOW | NO_ANSWER:
                return response
            session = response.headers.get(SESSION_HEADER, "")
            if response.status_code == 200 and kind(response) == "text/event-stream":
                following = Following(_Deaf(), bridge.patience)
                if (found := await following.read(response)) is None:
                    raise Broken(following.trouble)
                return found, session
            try:
                answers = [one for one in from_server(await whole(response)) if one.is_answer]
            except ValueError:
                answers = []
            if answers and (response.status_code == 200 or answers[0].is_error):
                if response.status_code in (401, 403):
                    raise troubles.Refused(self._trouble(response))
                return answers[0], session
            raise troubles.Refused(self._trouble(response))

    def _trouble(self, response: httpx2.Response) -> troubles.Trouble:
        return troubles.of_response(response, self._bridge.wire.url, credentials=self._bridge.credentials)


class _Deaf:
    """Hears the answer alone: a handshake has no notifications of its own."""

    async def hear(self, message: FromServer) -> FromServer | None:
        return message if message.is_answer else None

    def misheard(self, reason: str) -> None:
        return None

    def move(self, position: str) -> None:
        return None
