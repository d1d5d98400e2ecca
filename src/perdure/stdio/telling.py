"""What the host says without wanting an answer: notifications, and its answers to what the server asked."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import anyio

from perdure._core import splice
from perdure.remote.old_wire import Broken, NotSent, retry_after
from perdure.stdio.call import DEPARTURE
from perdure.stdio.following import attempts
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.stdio.bridge import Bridge


class Telling:
    """One message on its way. It may arrive twice: an answer that nobody waits for is dropped."""

    def __init__(self, bridge: Bridge, text: str) -> None:
        self._bridge = bridge
        self._text = text
        self._attempts = attempts(bridge.patience, since=time.monotonic())
        self._handshake = bridge.handshake
        self._is_repeated = False
        self.departed = anyio.Event()

    async def run(self) -> None:
        """Until it was taken, refused, or patience ends."""
        try:
            while not await self._attempt():
                self._bridge.teller.waiting(self._bridge.wire.url, self._attempts.trouble)
                if not await self._attempts.wait():
                    self._lost(self._attempts.trouble)
                    return
        except Exception as failure:  # whatever it is, it costs this message alone
            self._lost(f"{type(failure).__name__}: {failure}")
        finally:
            self.departed.set()

    async def _attempt(self) -> bool:
        timer = asyncio.get_running_loop().call_later(DEPARTURE, self.departed.set)
        try:
            self._handshake = self._bridge.handshake
            async with self._bridge.wire.post(self._text.encode(), self._handshake) as response:
                status = response.status_code
                if status < 300:
                    return True
                if status == 404 and not self._is_repeated:
                    self._is_repeated = True
                    return not await self._again()
                if status < 500 and status != 429:
                    self._lost(f"HTTP {status}")
                    return True
                self._attempts.failed(f"HTTP {status}", at_least=retry_after(response))
        except (NotSent, Broken) as failure:
            self._attempts.failed(str(failure))
        finally:
            timer.cancel()
        return False

    async def _again(self) -> bool:
        """The session is gone. An answer was for that one; a notification is as good in the next."""
        if await self._bridge.renew(self._handshake) is not None or splice.find(self._text, "method") is None:
            return False
        self._attempts.failed("the session is gone")
        return True

    def _lost(self, reason: str) -> None:
        log_event(logging.WARNING, "stdio.not_told", f"a message of the host's could not be handed on: {reason}")
