"""Handshakes of the bridge: the host's own words, which a session of before takes for a reattach."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import httpx2

from perdure._core import splice
from perdure._core.codes import NO_SERVER, UNREACHABLE
from perdure._core.reconnect import Patience
from perdure.remote.old_wire import Broken, NotSent, kind, retry_after
from perdure.remote.state import Handshake
from perdure.stdio import failures as troubles
from perdure.stdio import log_capability as own_logging
from perdure.stdio.call import NO_ANSWER
from perdure.stdio.following import Following, attempts, endless, whole
from perdure.stdio.messages import FromServer, encode, error, from_server
from perdure.stdio.resuming import Unavailable
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.stdio.bridge import Bridge

SESSION_HEADER = "mcp-session-id"
#: Seconds for a handshake, however patient the bridge is otherwise: hosts give up after 30 (some editors) or 60 (the
#: TypeScript SDK), and an answer that says what is wrong must come before that.
HANDSHAKE_SECONDS = 25.0


class Handshaking:
    """Makes the session of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self.text = ""
        """The host's own `initialize`."""
        self.handshake: Handshake | None = None
        self.is_resumed = False
        self.is_begun = False
        """The host has asked for one, answered or not."""

    async def initialize(self, host_id: str, text: str, params: dict[str, Any]) -> str:
        """The answer to the host's `initialize`."""
        self.text = text
        try:
            answer, handshake, known = await self._begin_or_resume(params)
        except Unavailable as unavailable:
            self._bridge.teller.waiting(self._bridge.wire.url, str(unavailable))
            return error(host_id, UNREACHABLE, f"The server did not answer within the limits: {unavailable}")
        except troubles.Refused as refused:
            self._bridge.teller.refused(refused.trouble)
            return error(host_id, NO_SERVER, refused.trouble.sentence, {"reason": refused.trouble.reason})
        if handshake is None:
            return answer.answering(host_id)
        await self._adopt(handshake, known)
        return own_logging.declared(answer.answering(host_id), handshake)

    async def _begin_or_resume(self, params: dict[str, Any]) -> tuple[FromServer, Handshake | None, str | None]:
        """Also the session of before. One limit for both: the host waits for both."""
        with anyio.move_on_after(HANDSHAKE_SECONDS):
            resuming = self._bridge.resuming
            known = self.handshake.session if self.handshake else await resuming.session(self._patience())
            return *await self.begin(params, known), known
        raise Unavailable(f"no answer within {HANDSHAKE_SECONDS:.0f} s")

    async def begin(self, params: dict[str, Any], known: str | None) -> tuple[FromServer, Handshake | None]:
        """A handshake with the host's own words, on a session of before or on none. Raises `Unavailable`, `Refused`."""
        body = splice.replaced(self.text, encode(self._bridge.new_id()), "id").encode()
        named = None if known is None else Handshake(session=known, request={}, result={})
        answer, session = await self._until_answered(body, named)
        if answer.is_error:
            return answer, None
        result = answer.body.get("result")
        made = Handshake(session=session, request=params, result=result if isinstance(result, dict) else {})
        return answer, made

    async def opened(self, session: str) -> None:
        """A session without a before gets its first token; the host waits for one attempt at most."""
        if not await self._bridge.resuming.opened(session):
            self._bridge.start(self._open_later, session)

    async def _adopt(self, handshake: Handshake, known: str | None) -> None:
        is_again = self.handshake is not None and self.handshake.session == handshake.session
        self.is_resumed = known is not None and handshake.session == known
        if known is not None and not self.is_resumed:
            sentence = "the session could not go on with what the host says of itself; a new one has begun"
            log_event(logging.INFO, "stdio.session_other", sentence)
        self.handshake = handshake
        if not self.is_resumed:
            await self.opened(handshake.session)
            self._bridge.notes.begin(handshake.session)
        elif not is_again:
            self._bridge.notes.recall(handshake.session)
            self._bridge.before.recall()

    async def _open_later(self, session: str) -> None:
        course = attempts(endless(self._bridge.patience))
        while self.handshake is not None and self.handshake.session == session:
            course.failed("the broker does not answer")
            await course.wait()
            if await self._bridge.resuming.opened(session):
                return

    def _patience(self) -> Patience:
        ours = self._bridge.patience
        soon = min(ours.max_delay, 2.0)
        first = min(ours.first_delay, soon)
        return replace(ours, max_time=min(ours.max_time, HANDSHAKE_SECONDS), first_delay=first, max_delay=soon)

    async def _until_answered(self, body: bytes, named: Handshake | None) -> tuple[FromServer, str]:
        """A handshake is begun again, not resumed: at worst a session that nobody uses remains."""
        with anyio.move_on_after(HANDSHAKE_SECONDS):
            return await self._try(body, named)
        raise Unavailable(f"no answer within {HANDSHAKE_SECONDS:.0f} s")

    async def _try(self, body: bytes, named: Handshake | None) -> tuple[FromServer, str]:
        bridge = self._bridge
        course = attempts(self._patience(), since=time.monotonic())
        while True:
            try:
                found = await self.once(body, named)
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

    async def once(self, body: bytes, handshake: Handshake | None) -> tuple[FromServer, str] | httpx2.Response:
        """A request of ours and its answer with the session that it names; the response, where it may pass."""
        bridge = self._bridge
        async with bridge.wire.post(body, handshake) as response:
            if response.status_code in NO_ANSWER | {429}:
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
