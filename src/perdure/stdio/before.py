"""Calls of an instance of before. The host that made them forgot them when it ended that instance, and its ids begin
anew: so their results are no answers to anything. They are followed to their ends and reported.

The report is a log message (`notifications/message`, level info). A host that has asked for less does not get it; the
bridge's own log has a line about it in any case.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from perdure._core import splice
from perdure.stdio import log_capability as own_logging
from perdure.stdio.call import Asked, Call
from perdure.stdio.messages import encode
from perdure.telemetry.events import log_event

if TYPE_CHECKING:
    from perdure.stdio.bridge import Bridge


class Before:
    """The calls of before, each until it is reported."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._calls: dict[str, Asked] = {}

    def recall(self) -> None:
        """Those that stand in the notes, before this instance adds its own."""
        self._calls = dict(self._bridge.notes.noted.calls)

    def revive(self) -> None:
        """Go on with them, once the host has finished its handshake."""
        for wire_id, asked in self._calls.items():
            self._bridge.hear(self._go_on, wire_id, asked)
        self._calls = {}

    async def _go_on(self, wire_id: str, asked: Asked) -> None:
        call = Call(self._bridge, asked, "", wire_id=wire_id)
        if asked.position is None:
            answer = call.unknown("the bridge ended before the server had answered")
        else:
            answer = await call.answer()
        await self._report(asked, answer)
        if self._bridge.notes.noted.calls.pop(wire_id, None) is not None:
            self._bridge.changed()

    async def _report(self, asked: Asked, answer: str) -> None:
        sentence = f"a call of {asked.name or asked.method} that an earlier instance began has ended"
        log_event(logging.INFO, "stdio.ended_before", sentence, tool=asked.name)
        if own_logging.hears_info(self._bridge.notes.noted.sticky):
            await self._bridge.give(reported(asked, answer))


def reported(asked: Asked, answer: str) -> str:
    """The message that tells the host what became of a call that it no longer knows."""
    what = "result" if splice.find(answer, "result") is not None else "error"
    data = f'"message":"A call of before has ended","method":{encode(asked.method)},"requestId":{asked.id}'
    if asked.name:
        data += f',"tool":{encode(asked.name)}'
    data += f',"{what}":{splice.cut(answer, what)}'
    params = f'{{"level":"info","logger":"perdure","data":{{{data}}}}}'
    return f'{{"jsonrpc":"2.0","method":"notifications/message","params":{params}}}'
