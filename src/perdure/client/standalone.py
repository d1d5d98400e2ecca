"""The standalone stream: what belongs to no call. It is read for as long as its session lives."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
from mcp_types import JSONRPCMessage

from perdure._core.gap import Gap
from perdure.client.reader import Answer, Reader
from perdure.errors import UNREACHABLE
from perdure.remote.endpoint import Broken, NotSent, kind, retry_after
from perdure.remote.state import Handshake
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.client.link import Link


class Standalone:
    """The listener of one session's standalone stream. `is_new`: the session was begun a moment ago."""

    def __init__(self, link: Link, handshake: Handshake, *, is_new: bool = False) -> None:
        self._link = link
        self._handshake = handshake
        self._is_sure = not is_new
        """That the server has such a stream: then 404 means that the session is gone."""
        self._reader = Reader(
            self, link.patience, position=link.state.position, retry=link.state.retry, pulse=link.pulse
        )
        self.scope = anyio.CancelScope()
        self.has_begun = anyio.Event()
        """The first attempt was answered, or failed."""
        self.has_given_up = False
        """Patience has ended: it is worth another try when the server is heard of."""

    async def run(self) -> None:
        """Until the session is another one, the server has no such stream, or patience ends."""
        with self.scope:
            try:
                await self._listen()
            except Exception as error:  # an event that is too large, among others; calls go on
                await self._link.complain(error)

    async def _listen(self) -> None:
        while True:
            status = await self._attempt()
            if status == 400 and self._reader.position is not None:
                await self._lose_position()
            elif status in (400, 405) or (status == 404 and not self._is_sure):
                return  # the server has no such stream
            if not await self._reader.wait():
                break
            if status == 404 and (trouble := await self._link.renew(self._handshake)) is not None:
                self._reader.trouble = trouble.error.message
                if trouble.error.code != UNREACHABLE:
                    break
        self.has_given_up = True
        log_event(
            logging.WARNING,
            "client.standalone_lost",
            f"the standalone stream is given up, what belongs to no call is missed: {self._reader.trouble}",
        )

    async def _attempt(self) -> int:
        """One connection; the status of the answer, 0 if there was none."""
        reader = self._reader
        try:
            async with self._link.wire.get(reader.position, self._handshake) as response:
                self.has_begun.set()
                if response.status_code == 200 and kind(response) == "text/event-stream":
                    self._is_sure = True
                    await reader.read(response)
                else:
                    reader.failed(f"HTTP {response.status_code}", at_least=retry_after(response))
                return response.status_code
        except (NotSent, Broken) as error:
            reader.failed(str(error))
        except Exception as error:
            reader.not_opened(error)
        self.has_begun.set()
        return 0

    async def _lose_position(self) -> None:
        """The server does not know the position: go on from now, and say what that costs."""
        self._reader.position = None
        self.move(None, None)
        await self._link.tell_gap(Gap(stream="", first=None, last=None, reason="the server refused the position"))

    # The reader's listener

    def awaits(self, answer: Answer) -> bool:
        return False  # no answer may come here (A16)

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
