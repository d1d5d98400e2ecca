"""The standalone stream: what belongs to no call. It is read for as long as its session lives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from perdure._core.sse import EventTooLarge
from perdure.client.state import Handshake
from perdure.client.wire import Broken, NotSent, kind, retry_after
from perdure.observe import note
from perdure.stdio import troubles
from perdure.stdio.following import Following, endless
from perdure.stdio.messages import FromServer

if TYPE_CHECKING:
    from perdure.stdio.bridge import Bridge


class Standalone:
    """The listener of one session's standalone stream."""

    def __init__(self, bridge: Bridge, handshake: Handshake) -> None:
        self._bridge = bridge
        self._handshake = handshake
        self._is_sure = bridge.handshaking.is_resumed
        """That the server has such a stream: then 404 means that the session is gone, and not that there is none."""

    async def run(self) -> None:
        """Until the session is another one, or the server has no such stream."""
        following = Following(self, endless(self._bridge.patience), position=self._bridge.notes.noted.position)
        try:
            while self._bridge.handshake is self._handshake and await self._attempt(following):
                await following.wait()
        except EventTooLarge as error:
            note(logging.WARNING, "stdio.standalone_lost", f"what belongs to no call is not heard any more: {error}")

    async def _attempt(self, following: Following) -> bool:
        """One connection; whether there shall be another."""
        try:
            async with self._bridge.wire.get(following.position, self._handshake) as response:
                if response.status_code == 200 and kind(response) == "text/event-stream":
                    self._is_sure = True
                    self._bridge.teller.reached(self._bridge.wire.url)
                    await following.read(response)
                elif response.status_code == 404 and self._is_sure:
                    if not await self._bridge.renew(self._handshake):
                        following.failed("the session is gone")
                elif response.status_code == 400 and following.position is not None:
                    self._lose_position(following)
                elif response.status_code in (400, 404, 405):
                    return False  # a server that has no such stream
                else:
                    self._bridge.teller.waiting(self._bridge.wire.url, f"HTTP {response.status_code}")
                    following.failed(f"HTTP {response.status_code}", at_least=retry_after(response))
        except troubles.Refused as refused:
            self._bridge.teller.refused(refused.trouble)
            following.failed(str(refused))
        except (NotSent, Broken) as error:
            self._bridge.teller.waiting(self._bridge.wire.url, str(error))
            following.failed(str(error))
        return True

    def _lose_position(self, following: Following) -> None:
        """The server does not know it: go on from now."""
        note(logging.WARNING, "stdio.position_lost", "the server refuses the position: what was missed is lost")
        following.position = None
        following.failed("the server refuses the position")
        if self._bridge.handshake is self._handshake:
            self._bridge.notes.noted.position = None
            self._bridge.changed()

    async def hear(self, message: FromServer) -> FromServer | None:
        await self._bridge.take(message)
        return None

    def misheard(self, reason: str) -> None:
        self._bridge.misheard(reason)

    def move(self, position: str) -> None:
        if self._bridge.handshake is self._handshake:
            self._bridge.notes.noted.position = position
            self._bridge.changed()
