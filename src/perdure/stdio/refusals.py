"""Answers to what the host should not have said."""

from __future__ import annotations

from typing import Any

from perdure._core import splice
from perdure._core.jsonrpc import INVALID_REQUEST, InvalidMessage, Request
from perdure._core.revisions import REVISIONS, UNSUPPORTED_VERSION
from perdure.stdio.messages import encode, error


def refused(line: bytes, invalid: InvalidMessage) -> str:
    """The answer to what is no message, under its id if that can be read at all: the host may be waiting for it."""
    request_id = encode(invalid.id)
    if invalid.id is None:
        found = looked_at(line)
        if "method" in found and type(found.get("id")) in (int, str):
            request_id = splice.cut(line.decode(), "id") or "null"
    return error(request_id, invalid.code, invalid.reason.replace("the body", "the line"))


def looked_at(line: bytes) -> dict[str, Any]:
    """What a line says that is refused; nothing if it is no object at all."""
    try:
        found = splice.decode(line.decode())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def before_the_handshake(message: Request, host_id: str) -> str:
    """Hosts of 2026-07-28 begin without a handshake. They are told which revisions have sessions, and fall back."""
    if message.method == "ping":
        return f'{{"jsonrpc":"2.0","id":{host_id},"result":{{}}}}'
    meta = (message.params or {}).get("_meta")
    asked = meta.get("io.modelcontextprotocol/protocolVersion") if isinstance(meta, dict) else None
    if message.method == "server/discover" or asked is not None:
        data = {"supported": sorted(REVISIONS, reverse=True), "requested": asked}
        return error(host_id, UNSUPPORTED_VERSION, "The bridge speaks the revisions that have sessions", data)
    return error(host_id, INVALID_REQUEST, "Begin with an initialize request")
