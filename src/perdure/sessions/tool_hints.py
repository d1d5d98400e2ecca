"""Asks the server which of its tools may run again."""

from __future__ import annotations

from perdure._core.ids import SessionId
from perdure._core.jsonrpc import Request
from perdure._core.settling import Rerun, may_run_again
from perdure.sessions.registry import SessionRegistry

_TOOL_PAGES = 100
"""Pages of `tools/list` that are read to find out which tools may run again."""


class ToolHints:
    """What the server said, kept for one round of settling, or one stop."""

    def __init__(self, sessions: SessionRegistry) -> None:
        self._sessions = sessions
        self._known: dict[str, Rerun] | None = None
        """As callers without credentials see them."""

    async def ask(self, session_id: SessionId, request: Request, origin: object) -> Rerun:
        """Whether the tool that a request calls may run again."""
        if origin is not None:
            return (await self._list(session_id, origin)).get(_name(request), Rerun.HIDDEN)
        if self._known is None:  # asked once: a server that does not answer is not waited for with each call
            self._known = {}
            self._known = await self._list(session_id, None)
        return self._known.get(_name(request), Rerun.HIDDEN)

    def known(self, request: Request) -> Rerun:
        """The same, as far as it was asked."""
        return (self._known or {}).get(_name(request), Rerun.HIDDEN)

    async def _list(self, session_id: SessionId, origin: object) -> dict[str, Rerun]:
        session = await self._sessions.load(session_id)
        tools: dict[str, Rerun] = {}
        if session is None:
            return tools
        cursor: object = None
        with session.in_use():
            for _ in range(_TOOL_PAGES):
                params = {} if cursor is None else {"cursor": cursor}
                page = await session.exchange.runtime.ask("tools/list", params, origin) or {}
                for tool in page.get("tools", ()):
                    tools[str(tool.get("name"))] = Rerun.YES if may_run_again(tool) else Rerun.NO
                cursor = page.get("nextCursor")
                if cursor is None:
                    break
        return tools


def _name(request: Request) -> str:
    return str((request.params or {}).get("name"))
