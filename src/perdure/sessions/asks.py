"""Keeps what the server asks its client: under ids that name the node that waits, until it is answered or withdrawn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perdure._core.codes import CLIENT_AWAY
from perdure._core.ids import NodeId
from perdure._core.jsonrpc import Response
from perdure.runtime.base import Flow
from perdure.sessions.ledger import Call
from perdure.sessions.messages import encode_ask, encode_notification
from perdure.store.base import AskRecord, CloseAsk, OpenAsk

if TYPE_CHECKING:
    from perdure.sessions.exchange import Exchange

_ASK = re.compile(r"ask-([A-Za-z0-9_-]{22})-[0-9]+")
"""The id of an ask names the node that waits. The letters in front keep it from being taken for an integer."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """An ask that waits: the id under which the runtime knows it, and what was asked."""

    inner: str
    method: str
    params: dict[str, Any] | None
    call: Call | None


class Asks:
    """The asks of one session that this node waits for."""

    __slots__ = ("_exchange", "_open")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._open: dict[str, _Ask] | None = None

    def new_id(self) -> str:
        context = self._exchange.session.context
        return f"ask-{context.node}-{next(context.ask_ids)}"

    def ask(self, name: str, method: str, params: dict[str, Any] | None, call: Call | None) -> Flow | None:
        """Ask the client; gives where to wait before more is said."""
        return self._put(name, _Ask(name, method, params, call))

    def _put(self, name: str, ask: _Ask) -> Flow | None:
        exchange, session = self._exchange, self._exchange.session
        call = ask.call
        stream = session.standalone if call is None or exchange.goes_standalone(call) else call.stream
        payload = encode_ask(name, ask.method, ask.params)
        record = AskRecord(session=session.id, id=name, stream=stream.id, request=payload, node=session.context.node)
        if self._open is None:
            self._open = {}
        self._open[name] = ask
        return exchange.append(call, payload, also=OpenAsk(record=record))

    def answer(self, response: Response, origin: object) -> bool:
        """Pass on the client's answer to an ask; tells whether the ask waits here."""
        ask = self._open.get(response.id) if self._open and isinstance(response.id, str) else None
        if ask is None:
            return False
        assert isinstance(response.id, str)
        self._close(response.id)
        answer = Response(id=ask.inner, raw={**response.raw, "id": ask.inner})
        self._exchange.runtime.send(answer, origin=origin)
        return True

    def give_up(self) -> None:
        """The client has been away for too long: answer the runtime in its place."""
        error = {"code": CLIENT_AWAY, "message": "The client has been away for too long to answer"}
        for name, ask in self._all():
            self._close(name)
            raw = {"jsonrpc": "2.0", "id": ask.inner, "error": error}
            self._exchange.runtime.send(Response(id=ask.inner, raw=raw), origin=None)

    def repeat(self) -> None:
        """The client has reattached and forgotten what it was asked: cancel the old ids, ask under new ones."""
        session = self._exchange.session
        for name, ask in self._all():
            self._forget(name)
            close = CloseAsk(session=session.id, id=name)
            params = {"requestId": name, "reason": "the client attached again, and is asked under a new id"}
            self._exchange.append(ask.call, encode_notification("notifications/cancelled", params), also=close)
            self._put(self.new_id(), ask)

    def withdraw(self, params: dict[str, Any]) -> dict[str, Any]:
        """The runtime no longer waits for an ask, which the client may know under a later id."""
        for name, ask in self._all():
            if ask.inner == params.get("requestId"):
                self._close(name)
                return {**params, "requestId": name}
        return params

    @property
    def open(self) -> set[str]:
        """The ids under which the client is asked at this moment."""
        return set(self._open or ())

    def _all(self) -> list[tuple[str, _Ask]]:
        return list(self._open.items()) if self._open else []

    def _close(self, name: str) -> None:
        self._forget(name)
        self._exchange.session.put(CloseAsk(session=self._exchange.session.id, id=name))

    def _forget(self, name: str) -> None:
        assert self._open is not None
        del self._open[name]
        self._open = self._open or None


def node_of_ask(ask: object) -> NodeId | None:
    """The node that waits for the answer to an ask."""
    match = _ASK.fullmatch(ask) if isinstance(ask, str) else None
    return None if match is None else NodeId(match[1])
