"""Messages as JSON, and what a handler sees beside one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from mcp_types import JSONRPCError, JSONRPCRequest, JSONRPCResponse
from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest

from perdure.log.stream import Stream

answer_json: TypeAdapter[JSONRPCResponse | JSONRPCError] = TypeAdapter(JSONRPCResponse | JSONRPCError)
ask_json = TypeAdapter(JSONRPCRequest)


def encode_notification(method: str, params: dict[str, Any] | None) -> bytes:
    """A notification as JSON. Put together by hand, because progress comes by the tens of thousands a second."""
    if params is None:
        return b'{"jsonrpc":"2.0","method":%b}' % _name(method)
    # JSON has no NaN; the SDK writes null in its place as well.
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (_name(method), to_json(params, inf_nan_mode="null"))


@lru_cache(maxsize=64)
def _name(method: str) -> bytes:
    return to_json(method)


def stand_in(session_id: str) -> HttpRequest:
    """What a handler sees as its HTTP request when a sticky request is repeated without one."""
    headers = [(b"mcp-session-id", session_id.encode())]
    return HttpRequest({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers})


def closer(stream: Stream) -> Callable[[], Awaitable[None]]:
    """What a handler calls to close its connection."""

    async def close() -> None:
        if stream.reader is not None:
            stream.reader.stop_here()

    return close
