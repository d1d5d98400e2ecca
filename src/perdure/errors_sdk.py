"""Errors of the client that are also the SDK's. Import them from `perdure.errors`, which shows the whole tree."""

from collections.abc import Mapping
from typing import Any

from mcp.shared.exceptions import MCPError

from perdure._core.codes import OUTCOME_UNKNOWN, UNREACHABLE
from perdure._core.unknown_outcome import unknown_message
from perdure.errors import ClientError


class OutcomeUnknown(ClientError, MCPError):
    """A call was sent, and its outcome is not known. Perdure does not send it again."""

    CODE = OUTCOME_UNKNOWN

    def __init__(
        self, tool: str, arguments: Mapping[str, Any] | None, reason: str, data: Any = None, message: str = ""
    ) -> None:
        """`message`: the server's, which may say more than the client's own words."""
        MCPError.__init__(self, self.CODE, message or unknown_message(tool), data)
        self.tool = tool
        self.arguments = dict(arguments or {})
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.message} Reason: {self.reason}"


class Unreachable(ClientError, MCPError):
    """The server did not answer within the limits. The request did not reach it."""

    def __init__(self, message: str, data: Any = None) -> None:
        MCPError.__init__(self, UNREACHABLE, message, data)
