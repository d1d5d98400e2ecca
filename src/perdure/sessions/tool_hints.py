"""Asks the server which of its tools may run again, and ends the calls of a process that stops accordingly."""

from perdure._core.ids import SessionId
from perdure._core.jsonrpc import Request
from perdure._core.settling import Occasion, Rerun, may_run_again, rerun
from perdure.sessions.registry import SessionRegistry, running_calls

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
            return _of_tool(request, await self._list(session_id, origin))
        if self._known is None:  # asked once: a server that does not answer is not waited for with each call
            self._known = {}
            self._known = await self._list(session_id, None)
        return _of_tool(request, self._known)

    async def learn_running(self) -> None:
        """Find out, while there is time, which of the tools that run here may run again elsewhere."""
        for session, call in running_calls(self._sessions):
            if call.request.method == "tools/call":
                await self.ask(session.id, call.request, None)

    def end_calls(self, reason: str, *, outlived: bool, but_kept: bool = False) -> None:
        """Leave calls that may run again to the next process, and answer the others. `outlived`: there may be a next
        process, because the store outlives this one. `but_kept`: let those run that clients can ask for again."""
        for session, call in running_calls(self._sessions):
            if but_kept and session.is_kept_call:
                continue
            may = rerun(call.request.method, attempt=call.attempt, occasion=Occasion.NODE_LEFT)
            may = _of_tool(call.request, self._known or {}) if may is Rerun.ASK else may
            if not (outlived and may is Rerun.YES):
                session.exchange.answer_unknown(call, reason)

    async def _list(self, session_id: SessionId, origin: object) -> dict[str, Rerun]:
        session = await self._sessions.load(session_id)
        tools: dict[str, Rerun] = {}
        if session is None:
            return tools
        with session.in_use():
            params: dict[str, object] = {}
            for _ in range(_TOOL_PAGES):
                page = await session.exchange.runtime.ask("tools/list", params, origin) or {}
                for tool in page.get("tools", ()):
                    tools[str(tool.get("name"))] = Rerun.YES if may_run_again(tool) else Rerun.NO
                if (cursor := page.get("nextCursor")) is None:
                    break
                params = {"cursor": cursor}
        return tools


def _of_tool(request: Request, tools: dict[str, Rerun]) -> Rerun:
    return tools.get(str((request.params or {}).get("name")), Rerun.HIDDEN)
