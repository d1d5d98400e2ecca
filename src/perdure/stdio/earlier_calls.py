"""Calls of an earlier process of the bridge: reads them to their ends and reports their results.

The host forgot them when it ended that process, and its ids begin from 0 again, so their results answer no request of
the host. The report is a log message (`notifications/message`, level info). A host that has asked for less does not get
it; the bridge's own log has a line about it in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from perdure._core import splice
from perdure.remote.call import Call
from perdure.remote.link import Link
from perdure.remote.message import Message, encode
from perdure.stdio import log_capability
from perdure.stdio.notes import NotedCall, Notes
from perdure.telemetry.events import log_event


class EarlierCalls:
    """`take` is given what their streams bring, `write` the reports for the host."""

    def __init__(
        self,
        link: Link,
        notes: Notes,
        take: Callable[[Message], Awaitable[None]],
        write: Callable[[str], Awaitable[None]],
    ) -> None:
        self._link = link
        self._notes = notes
        self._take = take
        self._write = write
        self._noted: dict[str, NotedCall] = {}
        self._running: set[Call] = set()

    def recall(self) -> None:
        """Keep those that stand in the notes, before this process adds its own."""
        self._noted = dict(self._notes.noted.calls)

    def revive(self) -> None:
        """Go on with them, once the host has finished its handshake."""
        for wire_id, noted in self._noted.items():
            self._link.start(self._go_on, wire_id, noted)
        self._noted = {}

    def stop(self) -> None:
        """The host does not listen any more: they are for the next process."""
        for call in list(self._running):
            call.scope.cancel()

    async def _go_on(self, wire_id: str, noted: NotedCall) -> None:
        call = Call(
            self._link,
            None,
            request_id=wire_id,
            method=noted.method,
            name=noted.name,
            take=self._take,
            move=lambda position, _: self._notes.move_call(noted, position),
            position=noted.position,
        )
        self._running.add(call)
        try:
            with call.scope:
                if noted.position is None:
                    answer = call.unknown("the bridge ended before the server had answered")
                else:
                    answer = await call.answer()
                log_event(
                    logging.INFO,
                    "stdio.ended_before",
                    f"the call of {noted.name or noted.method} that an earlier process made has ended",
                    tool=noted.name,
                )
                if log_capability.wants_info(self._notes.noted.sticky):
                    await self._write(report(noted, answer))
                self._notes.end_call(wire_id)
        finally:
            self._running.discard(call)


def report(noted: NotedCall, answer: Message) -> str:
    """The message that tells the host how a call ended that it no longer knows."""
    what = "error" if answer.is_error else "result"
    data = f'"message":"A call of an earlier process has ended","method":{encode(noted.method)},"requestId":{noted.id}'
    if noted.name:
        data += f',"tool":{encode(noted.name)}'
    data += f',"{what}":{splice.cut(answer.text, what)}'
    params = f'{{"level":"info","logger":"perdure","data":{{{data}}}}}'
    return f'{{"jsonrpc":"2.0","method":"notifications/message","params":{params}}}'
