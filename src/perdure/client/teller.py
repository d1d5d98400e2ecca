"""Sends what has no answer: notifications, and answers to the server's questions."""

from __future__ import annotations

import logging
from typing import Any

import anyio

from perdure._core.reconnect import Patience
from perdure.remote.attempts import Attempts
from perdure.remote.endpoint import Broken, NotSent, Wire, retry_after
from perdure.remote.state import Handshake
from perdure.telemetry.events import log_event


class Teller:
    """It may be sent twice: an answer that nobody waits for is dropped."""

    def __init__(self, wire: Wire, patience: Patience) -> None:
        self._wire = wire
        self._patience = patience
        self._underway = 0
        self._is_idle = anyio.Event()

    async def tell(self, body: dict[str, Any], handshake: Handshake | None) -> bool:
        """Send it until it is accepted; False if that cannot be."""
        attempts = Attempts(self._patience)
        told = await self._attempt(attempts, body, handshake)
        while told is None and await attempts.wait():
            told = await self._attempt(attempts, body, handshake)
        if not told:
            what = body.get("method", "an answer")
            log_event(logging.WARNING, "client.not_told", f"{what} could not be sent: {attempts.trouble}")
        return bool(told)

    async def idle(self) -> None:
        """Wait until nothing is on its way. What waits for a server that is away is not."""
        while self._underway:
            await self._is_idle.wait()

    async def _attempt(self, attempts: Attempts, body: dict[str, Any], handshake: Handshake | None) -> bool | None:
        """Whether it was accepted; None if it is worth another try."""
        self._underway += 1
        try:
            async with self._wire.post(body, handshake) as response:
                if response.status_code < 300:
                    return True
                attempts.failed(f"HTTP {response.status_code}", at_least=retry_after(response))
                return None if response.status_code >= 500 or response.status_code == 429 else False
        except (NotSent, Broken) as error:
            attempts.failed(str(error))
            return None
        except Exception as error:  # An auth flow of the user's may raise anything.
            attempts.trouble = f"{type(error).__name__}: {error}"
            return False
        finally:
            self._underway -= 1
            if not self._underway:
                self._is_idle.set()
                self._is_idle = anyio.Event()
