"""Sends what has no answer: notifications, and answers to the server's questions."""

from __future__ import annotations

import logging
from typing import Any

import anyio

from perdure._core.reconnect import Patience
from perdure.client.reader import Answer, Reader
from perdure.client.state import Handshake
from perdure.client.wire import Broken, NotSent, Wire, retry_after
from perdure.observe import note


class Teller:
    """It may be sent twice: an answer that nobody waits for is dropped."""

    def __init__(self, wire: Wire, patience: Patience) -> None:
        self._wire = wire
        self._patience = patience
        self._underway = 0
        self._is_idle = anyio.Event()

    async def tell(self, body: dict[str, Any], handshake: Handshake | None) -> bool:
        """Send it until it is accepted; False if that cannot be."""
        reader = Reader(Deaf(), self._patience, position=None, retry=None)
        told = await self._attempt(reader, body, handshake)
        while told is None and await reader.wait():
            told = await self._attempt(reader, body, handshake)
        if not told:
            what = body.get("method", "an answer")
            note(logging.WARNING, "client.not_told", f"{what} could not be sent: {reader.trouble}")
        return bool(told)

    async def idle(self) -> None:
        """Wait until nothing is on its way. What waits for a server that is away is not."""
        while self._underway:
            await self._is_idle.wait()

    async def _attempt(self, reader: Reader, body: dict[str, Any], handshake: Handshake | None) -> bool | None:
        """Whether it was accepted; None if it is worth another try."""
        self._underway += 1
        try:
            async with self._wire.post(body, handshake) as response:
                if response.status_code < 300:
                    return True
                reader.failed(f"HTTP {response.status_code}", at_least=retry_after(response))
                return None if response.status_code >= 500 or response.status_code == 429 else False
        except (NotSent, Broken) as error:
            reader.failed(str(error))
            return None
        except Exception as error:  # An auth flow of the user's may raise anything.
            reader.trouble = f"{type(error).__name__}: {error}"
            return False
        finally:
            self._underway -= 1
            if not self._underway:
                self._is_idle.set()
                self._is_idle = anyio.Event()


class Deaf:
    """A listener that hears nothing but an answer."""

    def awaits(self, answer: Answer) -> bool:
        return True

    async def take(self, message: object) -> None:
        return None

    async def complain(self, error: Exception) -> None:
        return None

    def move(self, position: str | None, retry: int | None) -> None:
        return None
