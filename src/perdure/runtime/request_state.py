"""Seals the request state of multi-round calls with keys that all processes share.

The SDK makes a key in each process, so the second round of a call succeeds only at the process that answered the first.
Here the keys are secrets of the store: a round may come to any process, also after a restart. The operator may give
keys (`PERDURE_STATE_KEYS`) for deployments that share no store.

A key is named by the time in which it seals, so all processes on a store have the same keys without a message. A key is
made one life before it seals, so every process reads it in time.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcp.server.lowlevel.server import Server
from mcp.server.request_state import AESGCMRequestStateCodec, RequestStateBoundary, RequestStateSecurity

from perdure.errors import Misuse, StoreError
from perdure.store import notes
from perdure.store.interface import Store
from perdure.telemetry.log_records import log_event

KEYS = "PERDURE_STATE_KEYS"
"""The environment variable with the operator's keys, separated by commas; the first one seals."""

RING = "request-state"
KEY_BYTES = 32

LIFE = 30 * 86_400.0
"""Seconds for which a key seals. Sealed state lives for minutes (the SDK's default is ten)."""

RENEW_SECONDS = 3_600.0
"""Seconds between two reads of the keys: one small query, often within the life of a key."""


def ring(now: float) -> tuple[str, str, str]:
    """The names of the present, the previous and the next key, at a time in seconds since 1970."""
    number = int(now // LIFE)
    return f"{RING}-{number}", f"{RING}-{number - 1}", f"{RING}-{number + 1}"


@dataclass(slots=True, eq=False)
class SharedKeys:
    """Seals with the keys of the store: a codec for the SDK."""

    _codec: AESGCMRequestStateCodec = field(
        default_factory=lambda: AESGCMRequestStateCodec([secrets.token_bytes(KEY_BYTES)])
    )

    def seal(self, payload: bytes) -> str:
        return self._codec.seal(payload)

    def unseal(self, token: str) -> bytes:
        return self._codec.unseal(token)

    async def load(self, store: Store, clock: Callable[[], float]) -> None:
        """Read the keys, and make the present and the next key if they are missing."""
        kept = dict(await store.notes(""))
        present, previous, following = ring(clock())
        for name in (present, following):
            if name not in kept:
                kept[name] = await notes.keep(store, name, secrets.token_bytes(KEY_BYTES))
        self._codec = AESGCMRequestStateCodec([kept[name] for name in (present, previous, following) if name in kept])

    async def renew(self, store: Store, clock: Callable[[], float]) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self.load(store, clock)
            except StoreError as failure:  # the keys in memory last for as long as a key does
                log_event(logging.WARNING, "keys.unread", f"the keys for request state wait: {failure}")


def given_keys() -> Sequence[str]:
    """The operator's keys. Raises `Misuse` if they cannot be used."""
    keys = [key.strip() for key in os.environ.get(KEYS, "").split(",") if key.strip()]
    if keys:
        try:
            AESGCMRequestStateCodec(keys)
        except ValueError as problem:
            raise Misuse(f"{KEYS} cannot be used: {problem}") from None
    return keys


def share_request_state(server: Server[Any]) -> SharedKeys | None:
    """Make a server seal its request state with shared keys. Returns the keys that the caller loads from the store;
    `None` if the operator gave keys, or the server seals nothing."""
    if not any(isinstance(part, RequestStateBoundary) for part in server.middleware):
        return None
    keys = given_keys()
    shared = None if keys else SharedKeys()
    security = RequestStateSecurity(keys=keys) if shared is None else RequestStateSecurity(codec=shared)
    boundary = RequestStateBoundary(security, default_audience=server.name)
    server.middleware = [boundary if isinstance(part, RequestStateBoundary) else part for part in server.middleware]
    return shared
