"""Turns answers into the SDK's values, and gives JSON-RPC errors their own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCResponse, RequestId, jsonrpc_message_adapter
from pydantic import ValidationError

from perdure._core.codes import OUTCOME_UNKNOWN, POSITION_LOST, UNREACHABLE
from perdure.errors import OutcomeUnknown, Unreachable
from perdure.remote.message import Message


def answer_of(message: Message, request_id: RequestId | None = None) -> JSONRPCResponse | JSONRPCError:
    """An answer as the SDK's value, under the id that the SDK's client gave its request."""
    try:
        found = jsonrpc_message_adapter.validate_json(message.text, by_name=False)
    except ValidationError as error:
        found = None
        why = f"The answer is not a JSON-RPC response: {error.error_count()} errors"
    if not isinstance(found, JSONRPCResponse | JSONRPCError):
        found = JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=INTERNAL_ERROR, message=why))
    return found if request_id is None else found.model_copy(update={"id": request_id})


def named(error: MCPError, tool: str | None = None, arguments: Mapping[str, Any] | None = None) -> MCPError:
    """`Unreachable`, and for a tool `OutcomeUnknown`, where the code says so; else the error as it is.

    An answer that is no longer retained (-31002) is as unknown as one that was never given.
    """
    if error.code == UNREACHABLE:
        return Unreachable(error.message, error.data)
    if tool is not None and error.code in (OUTCOME_UNKNOWN, POSITION_LOST):
        data = error.data if isinstance(error.data, Mapping) else {}
        return OutcomeUnknown(tool, arguments, str(data.get("reason") or error.message), error.data)
    return error


@contextmanager
def naming(tool: str | None = None, arguments: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Errors of the SDK's client come out under their names."""
    try:
        yield
    except MCPError as error:
        found = named(error, tool, arguments)
        if found is error:
            raise
        raise found from error
