"""Requests of 2026-07-28, byte by byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp.shared.inbound import encode_header_value

from tests.support.clients.raw_http import message

MODERN = "2026-07-28"
NAMES = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    "tasks/get": "taskId",
    "tasks/update": "taskId",
    "tasks/cancel": "taskId",
}
TASKS = "io.modelcontextprotocol/tasks"


def modern(
    method: str,
    params: Mapping[str, Any] | None = None,
    *,
    id: int | str = 1,  # noqa: A002
    capabilities: Mapping[str, Any] | None = None,
) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a request."""
    params = dict(params or {})
    params["_meta"] = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "peer", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": dict(capabilities or {}),
        **params.get("_meta", {}),
    }
    headers = {"mcp-protocol-version": MODERN, "mcp-method": method}
    if (name := params.get(NAMES.get(method, ""))) is not None:
        headers["mcp-name"] = encode_header_value(str(name))
    return message(method, params, id=id), headers
