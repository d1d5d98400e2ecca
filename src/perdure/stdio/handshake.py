"""Opens the session of a bridge with the host's own `initialize`: a reattach to the earlier session, or a new one."""

from __future__ import annotations

import logging
from typing import Any

import anyio

from perdure._core.codes import INTERNAL_ERROR, NO_SERVER, UNREACHABLE
from perdure._core.delivery import Purpose
from perdure.remote.call import Sender
from perdure.remote.endpoint import Handshake, Refused, Unavailable
from perdure.remote.link import Link, Notice
from perdure.remote.message import error
from perdure.remote.stream import Attempts
from perdure.stdio import log_capability
from perdure.stdio.earlier_calls import EarlierCalls
from perdure.stdio.notes import Notes
from perdure.stdio.resume_broker import ResumeBroker
from perdure.telemetry.events import log_event


class HostHandshake:
    """The handshake of the host, from its `initialize` to its `initialized`."""

    def __init__(self, link: Link, sender: Sender, broker: ResumeBroker, notes: Notes, earlier: EarlierCalls) -> None:
        self._link = link
        self._sender = sender
        self._broker = broker
        self._notes = notes
        self._earlier = earlier
        self._is_resumed = False
        self.text = ""
        """The host's own `initialize`."""

    async def initialize(self, host_id: str, text: str, params: dict[str, Any]) -> str:
        """The answer to the host's `initialize`."""
        self.text = text
        try:
            return await self._open(host_id, params)
        except Unavailable as unavailable:
            self._link.report(Notice.WAITING, str(unavailable))
            found = error(host_id, UNREACHABLE, f"The server did not answer within the limits: {unavailable}")
        except Refused as refused:
            refusal = refused.refusal
            self._link.report(Notice.REFUSED, refusal.sentence, reason=refusal.reason)
            found = error(host_id, NO_SERVER, refusal.sentence, {"reason": refusal.reason})
        except Exception as failure:  # the host waits, whatever it is
            said = f"{type(failure).__name__}: {failure}"
            log_event(logging.ERROR, "stdio.failed", f"something unforeseen: {said}")
            found = error(host_id, INTERNAL_ERROR, said)
        return found.text

    async def _open(self, host_id: str, params: dict[str, Any]) -> str:
        link, limits = self._link, self._link.limits
        current = link.handshake
        with anyio.move_on_after(limits.handshake_seconds) as scope:  # one limit for both: the host waits for both
            known = current.session if current else await self._broker.session(limits.handshake)
            answer, session = await link.handshakes.begin(self.text, link.new_id(), known=known or "")
        if scope.cancelled_caught:
            raise Unavailable(f"no answer within {limits.handshake_seconds:.0f} s")
        if answer.is_error:
            return answer.answering(host_id)
        made = Handshake(session=session, request=params, result=answer.result)
        self._is_resumed = known is not None and session == known
        if known is not None and not self._is_resumed:
            log_event(
                logging.INFO,
                "stdio.session_other",
                "the earlier session does not fit the host's version or capabilities; a new one has begun",
            )
        link.use(made)
        if not self._is_resumed:
            await self.get_token(session)
            self._notes.begin(session)
        elif current is None or current.session != session:
            self._notes.recall(session)
            self._earlier.recall()
        return log_capability.with_logging(answer.answering(host_id), made)

    async def finish(self, text: str, departed: anyio.Event) -> None:
        """The host's `initialized`. In a resumed session the server swallows it."""
        try:
            await self._sender.send(text.encode(), Purpose.NOTIFICATION)
            handshake = self._link.handshake
            if handshake is None or handshake.initialized:
                return
            handshake.initialized = True
            await self._link.listen(position=self._notes.noted.position, is_new=not self._is_resumed)
        finally:
            departed.set()
        if self._is_resumed:
            self._earlier.revive()

    async def get_token(self, session: str) -> None:
        """Get the first resume token of a new session; the host waits for one attempt at most."""
        if not await self._broker.get_first_token(session):
            self._link.start(self._get_token_later, session)

    async def _get_token_later(self, session: str) -> None:
        attempts = Attempts(self._link.limits.listening)
        while self._link.handshake is not None and self._link.handshake.session == session:
            attempts.failed("the broker does not answer")
            await attempts.wait()
            if await self._broker.get_first_token(session):
                return
