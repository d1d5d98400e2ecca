"""JSON-RPC errors that have a name of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp.shared.exceptions import MCPError

from perdure.errors import UNREACHABLE, OutcomeUnknown, Unreachable
from perdure.ledger import OUTCOME_UNKNOWN, POSITION_LOST


def named(error: MCPError, tool: str, arguments: Mapping[str, Any] | None) -> MCPError:
    """`OutcomeUnknown` and `Unreachable` where the code says so, whoever made it; else the error as it is.

    An answer that is no longer retained (-31002) is as unknown as one that was never given.
    """
    if error.code in (OUTCOME_UNKNOWN, POSITION_LOST):
        data = error.data if isinstance(error.data, Mapping) else {}
        return OutcomeUnknown(tool, arguments, str(data.get("reason") or error.message), error.data)
    if error.code == UNREACHABLE:
        return Unreachable(error.message, error.data)
    return error
