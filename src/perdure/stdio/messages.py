"""JSON-RPC messages as texts: what a message is, and the few that the bridge makes itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perdure._core import splice

INTERNAL_ERROR = -32603
"""JSON-RPC: something unforeseen happened on this side; the sentence says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FromServer:
    """One message of the server's, as it came."""

    text: str
    body: Mapping[str, Any]

    @property
    def method(self) -> str | None:
        found = self.body.get("method")
        return found if isinstance(found, str) else None

    @property
    def params(self) -> Mapping[str, Any]:
        found = self.body.get("params")
        return found if isinstance(found, dict) else {}

    @property
    def is_request(self) -> bool:
        return self.method is not None and "id" in self.body

    @property
    def is_answer(self) -> bool:
        is_ours = self.method is None and self.body.get("jsonrpc") == "2.0"
        return is_ours and ("result" in self.body or isinstance(self.body.get("error"), dict))

    @property
    def is_error(self) -> bool:
        return self.body.get("error") is not None

    def answering(self, request_id: str) -> str:
        """The answer under the id that its request had, given as JSON."""
        if "id" in self.body:
            return splice.replaced(self.text, request_id, "id")
        return f'{{"jsonrpc":"2.0","id":{request_id},"error":{splice.cut(self.text, "error") or "{}"}}}'


def from_server(text: str) -> list[FromServer]:
    """The messages in a text of the server's; 2025-03-26 allows several in an array. Raises `ValueError`."""
    text = splice.one_line(text).strip(" ")
    found = splice.decode(text)
    bodies, texts = (found, splice.items(text)) if isinstance(found, list) else ([found], [text])
    if not all(isinstance(body, dict) for body in bodies):
        raise ValueError("a message must be an object")
    return [FromServer(text=one, body=body) for one, body in zip(texts, bodies, strict=True)]


def same_id(text: str) -> str:
    """An id in one spelling: `"\\u00e9"` and `"é"` are the same, and the two sides escape differently."""
    found = splice.decode(text)
    return encode(found) if isinstance(found, str) else text


def encode(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def error(request_id: str, code: int, message: str, data: Mapping[str, Any] | None = None) -> str:
    """An error response; the id is given as JSON."""
    told: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        told["data"] = data
    return f'{{"jsonrpc":"2.0","id":{request_id},"error":{encode(told)}}}'


def notification(method: str, params: Mapping[str, Any] | None = None) -> str:
    body: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        body["params"] = params
    return encode(body)


def request(request_id: str, method: str, params: Any) -> str:
    return encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
