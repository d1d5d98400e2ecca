"""Another session in place of one that is gone: the host's own handshake once more, and what was sticky.

A renewal is a task of its own: whoever found the session gone waits for it, and may stop waiting, but it is made whole.
Only then is the new session the one that messages go to; so none of them comes before `initialized`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import httpx2

from perdure._core import splice
from perdure.remote.old_wire import Broken, NotSent
from perdure.remote.state import Handshake
from perdure.stdio import failures as troubles
from perdure.stdio import log_capability as own_logging
from perdure.stdio.messages import encode, notification
from perdure.stdio.resuming import Unavailable
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.stdio.bridge import Bridge
    from perdure.stdio.handshaking import Handshaking


@dataclass(kw_only=True)
class _Renewal:
    trouble: Exception | None = None
    is_over: anyio.Event = field(default_factory=anyio.Event)


class Renewing:
    """Renews the session of a bridge."""

    def __init__(self, bridge: Bridge, handshaking: Handshaking) -> None:
        self._bridge = bridge
        self._handshaking = handshaking
        self._renewal: _Renewal | None = None

    async def renew(self, gone: Handshake | None) -> Exception | None:
        """One new session, however many have noticed (B5, H8): None if there is one. `Unavailable`: not yet."""
        if gone is None or self._handshaking.handshake is not gone:
            return None
        renewal = self._renewal
        if renewal is None:
            renewal = self._renewal = _Renewal()
            self._bridge.start(self._renew, gone, renewal)
        await renewal.is_over.wait()
        return renewal.trouble

    async def _renew(self, gone: Handshake, renewal: _Renewal) -> None:
        log_event(logging.WARNING, "stdio.session_gone", "the session is gone; a new one is begun")
        renewal.trouble = Unavailable("the bridge ends")
        try:
            await self._begin_again(gone)
            renewal.trouble = None
        except (Unavailable, troubles.Refused) as trouble:
            log_event(logging.WARNING, "stdio.not_renewed", f"no new session could be begun: {trouble}")
            renewal.trouble = trouble
        finally:
            self._renewal = None
            renewal.is_over.set()

    async def _begin_again(self, gone: Handshake) -> None:
        bridge, handshaking = self._bridge, self._handshaking
        answer, handshake = await handshaking.begin(gone.request, None)
        if handshake is None:
            said = splice.cut(answer.text, "error", "message") or "no reason"
            raise troubles.Refused(
                troubles.Trouble(reason="refused", sentence=f"the server refuses a handshake: {said}")
            )
        await self._bring_up(handshake)
        await handshaking.opened(handshake.session)
        handshaking.handshake = handshake
        bridge.notes.begin(handshake.session)
        await bridge.forget_asks()
        await bridge.listen(is_new=True)

    async def _bring_up(self, handshake: Handshake) -> None:
        """Bring a new session to where the old one was."""
        handshake.initialized = True
        try:
            body = notification("notifications/initialized").encode()
            async with self._bridge.wire.post(body, handshake):
                pass
            for sticky in self._bridge.notes.noted.sticky:
                if own_logging.is_own(handshake) and own_logging.sets_level(sticky):
                    continue
                body = splice.replaced(sticky, encode(self._bridge.new_id()), "id").encode()
                found = await self._handshaking.once(body, handshake)
                if isinstance(found, httpx2.Response):
                    self._not_repeated(f"HTTP {found.status_code}")
                elif found[0].is_error:
                    self._not_repeated(splice.cut(found[0].text, "error", "message") or "refused")
        except (NotSent, Broken, troubles.Refused) as failure:
            self._not_repeated(str(failure))

    def _not_repeated(self, why: str) -> None:
        log_event(logging.WARNING, "stdio.not_repeated", f"subscriptions or the log level are lost: {why}")
