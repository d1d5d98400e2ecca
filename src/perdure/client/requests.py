"""Sends requests without a session (2026-07-28): those of the SDK's client, and the client's own about its calls."""

import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import count
from typing import Any

from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    encode_header_value,
)
from mcp_types import PROTOCOL_VERSION_META_KEY, RequestId

from perdure._core.reconnect import Patience
from perdure.client.notices import ConnectionLog
from perdure.remote.endpoint import Endpoint
from perdure.remote.exchange import Exchange, Request
from perdure.remote.message import Message, encode
from perdure.remote.stream import Limits

Take = Callable[[Message], Awaitable[None]]

ENVELOPE = "io.modelcontextprotocol/"
"""The prefix of what the revision wants in `_meta` of every request: version, client, capabilities."""


async def ignore(_: object) -> None:
    """For requests whose messages have no reader."""


class Requests:
    """Ids begin with the number of the process, and with chance.

    `tokens` has the ids of the SDK's client behind progress tokens on the wire. `complain` is given what is not a
    message.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        start: int,
        tokens: dict[str, RequestId],
        complain: Callable[[Exception], Awaitable[object]],
    ) -> None:
        self.limits = limits
        self._endpoint = endpoint
        self._tokens = tokens
        self._complain = complain
        self._report = ConnectionLog(endpoint.url, limits.handshake)
        self._ids: Iterator[int] = count(1)
        self._prefix = f"{start}-{secrets.token_hex(4)}"

    def new_id(self) -> str:
        return f"{self._prefix}.{next(self._ids)}"

    def exchange(
        self,
        request: Request,
        take: Take = ignore,
        *,
        patience: Patience | None = None,
        may_have_arrived: bool = False,
    ) -> Exchange:
        return Exchange(
            self._endpoint,
            self.limits,
            request,
            new_id=self.new_id,
            take=take,
            complain=self._complain,
            patience=patience,
            may_have_arrived=may_have_arrived,
            report=self._report,
        )

    async def send(
        self,
        whole: Mapping[str, Any],
        take: Take,
        *,
        local_id: RequestId | None = None,
        may_have_arrived: bool = False,
        **about: Any,
    ) -> Message:
        """The answer to a request of the SDK's client. `about` is what else a `Request` says.

        Each attempt has a progress token of its own, if the request has one: the id.
        """
        tokens: list[str] = []

        def body(wire_id: str) -> bytes:
            params = whole.get("params") or {}
            meta = params.get("_meta") or {}
            if "progressToken" in meta:
                params = {**params, "_meta": {**meta, "progressToken": wire_id}}
                if local_id is not None:
                    tokens.append(wire_id)
                    self._tokens[wire_id] = local_id
            return encode({**whole, "id": wire_id, "params": params}).encode()

        request = Request(method=whole["method"], body=body, **about)
        try:
            return await self.exchange(request, take, may_have_arrived=may_have_arrived).answer()
        finally:
            for token in tokens:
                self._tokens.pop(token, None)

    async def ask(self, method: str, params: Mapping[str, Any], call: Mapping[str, Any], name: str = "") -> Message:
        """The answer to a request of our own that may be repeated, with the envelope of `call`'s params."""
        meta = {key: value for key, value in call.get("_meta", {}).items() if key.startswith(ENVELOPE)}
        headers = {
            MCP_PROTOCOL_VERSION_HEADER: str(meta.get(PROTOCOL_VERSION_META_KEY, "")),
            MCP_METHOD_HEADER: method,
            **({MCP_NAME_HEADER: encode_header_value(name)} if name else {}),
        }
        whole = {"jsonrpc": "2.0", "method": method, "params": {**params, "_meta": meta}}
        return await self.send(whole, ignore, headers=headers)
