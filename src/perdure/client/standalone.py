"""The standalone stream: what belongs to no call. It is read for as long as its session lives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mcp_types import JSONRPCMessage

from perdure._core.sse import EventTooLarge
from perdure.client.reader import Reader
from perdure.client.state import Handshake
from perdure.client.wire import Broken, NotSent, kind, retry_after
from perdure.observe import note

if TYPE_CHECKING:
    from perdure.client.link import Link


class Standalone:
    """The listener of one session's standalone stream."""

    def __init__(self, link: Link, handshake: Handshake) -> None:
        self._link = link
        self._handshake = handshake

    async def run(self) -> None:
        """Until the session is another one, the server has no such stream, or patience ends."""
        handshake = self._handshake
        reader = Reader(self, self._link.patience, position=self._link.state.position, retry=self._link.state.retry)
        try:
            while self._link.handshake is handshake and await self._attempt(reader, handshake):
                if not await reader.wait():
                    note(
                        logging.WARNING,
                        "client.standalone_lost",
                        f"the standalone stream is given up, what belongs to no call is missed: {reader.trouble}",
                    )
                    return
        except EventTooLarge as error:
            await self._link.complain(error)
        except Exception as error:  # An auth flow of the user's may raise anything; calls go on.
            await self._link.complain(error)

    async def _attempt(self, reader: Reader, handshake: Handshake) -> bool:
        """One connection; whether there shall be another."""
        try:
            async with self._link.wire.get(reader.position, handshake) as response:
                if response.status_code == 200 and kind(response) == "text/event-stream":
                    await reader.read(response)
                elif response.status_code == 404:
                    await self._link.renew(handshake)
                    return False
                elif response.status_code in (400, 405):
                    return False  # a server that has no such stream
                else:
                    reader.failed(f"HTTP {response.status_code}", at_least=retry_after(response))
        except (NotSent, Broken) as error:
            reader.failed(str(error))
        return True

    async def take(self, message: JSONRPCMessage) -> None:
        await self._link.take(message, None, None)

    async def complain(self, error: Exception) -> None:
        await self._link.complain(error)

    def move(self, position: str | None, retry: int | None) -> None:
        if self._link.handshake is not self._handshake:
            return
        self._link.state.position = position
        if retry is not None:
            self._link.state.retry = retry
        self._link.moved()
