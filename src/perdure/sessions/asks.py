"""What servers ask their clients: under ids that name the node that waits, until it is answered or withdrawn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import anyio
from mcp.shared.message import ServerMessageMetadata
from mcp_types import JSONRPCError, JSONRPCRequest
from starlette.requests import Request as HttpRequest

from perdure._core.codes import CLIENT_AWAY
from perdure._core.ids import NodeId
from perdure._core.jsonrpc import Response
from perdure._core.states import CallState
from perdure.runtime.base import Flow
from perdure.sessions.ledger import Call
from perdure.sessions.messages import answer_json, ask_json, encode_notification
from perdure.store.base import AskRecord, CloseAsk, OpenAsk

if TYPE_CHECKING:
    from perdure.sessions.exchange import Exchange

_ASK = re.compile(r"ask-([A-Za-z0-9_-]{22})-[0-9]+")
"""The id of an ask names the node that waits."""


class _Ask:
    """An ask that waits: the id under which the runtime knows it, and what was asked."""

    __slots__ = ("call", "inner", "request")

    def __init__(self, inner: str, request: JSONRPCRequest, call: Call | None) -> None:
        self.inner = inner
        self.request = request
        self.call = call


class Asks:
    """The asks of one session that this node waits for."""

    __slots__ = ("_exchange", "_open")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._open: dict[str, _Ask] | None = None

    def answer(self, response: Response, http: HttpRequest | None) -> bool:
        """Pass on the client's answer to an ask; tells whether somebody here waits for it."""
        ask = self._open.get(response.id) if self._open and isinstance(response.id, str) else None
        if ask is None:
            return False
        assert isinstance(response.id, str)
        self._close(response.id)
        raw = {**response.raw, "id": ask.inner}
        self._exchange.feed(answer_json.validate_python(raw, by_name=False), self._exchange.metadata(http))
        return True

    def give_up(self) -> None:
        """The client has been away for too long: whoever waits for its answer is told."""
        for name, ask in self._all():
            self._close(name)
            error = {"code": CLIENT_AWAY, "message": "The client has been away for too long to answer"}
            answer = JSONRPCError.model_validate({"jsonrpc": "2.0", "id": ask.inner, "error": error}, by_name=False)
            self._exchange.feed(answer, ServerMessageMetadata())

    def repeat(self) -> None:
        """The client began anew and has forgotten what it was asked: the old ids are cancelled, new ones asked."""
        session = self._exchange.session
        for name, ask in self._all():
            self._forget(name)
            before = CloseAsk(session=session.id, id=name)
            params = {"requestId": name, "reason": "the client began anew; it is asked again"}
            self._exchange.append(ask.call, encode_notification("notifications/cancelled", params), also=before)
            again = f"ask-{session.context.node}-{next(session.context.ask_ids)}"
            self._ask(ask.request.model_copy(update={"id": again}), ask.inner, ask.call)

    def emit(self, message: JSONRPCRequest, related: int | str | None) -> Flow | None:
        """The runtime asks; gives the stream, if it is written here."""
        call = self._exchange.calls.numbered(related)
        if related is not None and (call is None or call.state is not CallState.RUNNING):
            raise anyio.ClosedResourceError  # a cancelled call that does not stop must not wait for an answer for ever
        return self._ask(message, str(message.id), call)

    def _ask(self, message: JSONRPCRequest, inner: str, call: Call | None) -> Flow | None:
        session = self._exchange.session
        stream = session.standalone if call is None or self._exchange.goes_standalone(call) else call.stream
        payload = ask_json.dump_json(message, by_alias=True, exclude_unset=True)
        ask = AskRecord(
            session=session.id, id=str(message.id), stream=stream.id, request=payload, node=session.context.node
        )
        if self._open is None:
            self._open = {}
        self._open[ask.id] = _Ask(inner, message, call)
        return self._exchange.append(call, payload, also=OpenAsk(record=ask))

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
        if self._open and name in self._open:
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
