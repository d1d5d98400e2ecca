"""The standalone stream: what belongs to no call. It is read for as long as its session lives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from perdure._core.sse import EventTooLarge
from perdure.remote.old_wire import Broken, NotSent, kind, retry_after
from perdure.remote.state import Handshake
from perdure.stdio import failures as troubles
from perdure.stdio.following import Following, endless
from perdure.stdio.messages import FromServer
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.stdio.bridge import Bridge


class Standalone:
    """The listener of one session's standalone stream. `is_new`: the session was begun a moment ago."""

    def __init__(self, bridge: Bridge, handshake: Handshake, *, is_new: bool) -> None:
        self._bridge = bridge
        self._handshake = handshake
        self._is_sure = not is_new
        """That the server has such a stream: then 404 means that the session is gone."""
        position = bridge.notes.noted.position
        self._following = Following(self, endless(bridge.patience), position=position, pulse=bridge.pulse)
        self.has_begun = anyio.Event()
        """The first attempt was answered, or failed."""

    async def run(self) -> None:
        """Until the session is another one, or the server has no such stream."""
        try:
            while self._bridge.handshake is self._handshake:
                status = await self._attempt()
                if status == 400 and self._following.position is not None:
                    self._lose_position()
                elif status in (400, 405) or (status == 404 and not self._is_sure):
                    return
                await self._following.wait()
                if status == 404:
                    await self._bridge.renew(self._handshake)
        except EventTooLarge as error:
            log_event(
                logging.WARNING, "stdio.standalone_lost", f"what belongs to no call is not heard any more: {error}"
            )
        finally:
            self.has_begun.set()

    async def _attempt(self) -> int:
        """One connection; the status of the answer, 0 if there was none."""
        bridge, following = self._bridge, self._following
        try:
            async with bridge.wire.get(following.position, self._handshake) as response:
                self.has_begun.set()
                status = response.status_code
                if status == 200 and kind(response) == "text/event-stream":
                    self._is_sure = True
                    bridge.teller.reached(bridge.wire.url)
                    await following.read(response)
                else:
                    following.failed(f"HTTP {status}", at_least=retry_after(response))
                return status
        except troubles.Refused as refused:
            bridge.teller.refused(refused.trouble)
            following.failed(str(refused))
        except (NotSent, Broken) as error:
            bridge.teller.waiting(bridge.wire.url, str(error))
            following.failed(str(error))
        self.has_begun.set()
        return 0

    def _lose_position(self) -> None:
        """The server does not know the position: go on from now, and say what that costs."""
        log_event(
            logging.WARNING, "stdio.position_lost", "the server refused the position; what was missed is not repeated"
        )
        self._following.position = None

    async def hear(self, message: FromServer) -> FromServer | None:
        await self._bridge.take(message)
        return None

    def misheard(self, reason: str) -> None:
        self._bridge.misheard(reason)

    def move(self, position: str) -> None:
        if self._bridge.handshake is self._handshake:
            self._bridge.notes.noted.position = position
            self._bridge.changed()
