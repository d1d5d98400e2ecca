"""A stop: calls that may run again are left to the next process, the others get their answer."""

from __future__ import annotations

from perdure._core import settling
from perdure._core.settling import Verdict
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.tool_hints import ToolHints


class Handover:
    def __init__(self, sessions: SessionRegistry, *, outlived: bool) -> None:
        self._sessions = sessions
        self._outlived = outlived
        """There may be a next process: the store outlives this one."""
        self._tools = ToolHints(sessions)

    async def learn_tools(self) -> None:
        """Find out, while there is time, which of the tools that run here may run again elsewhere."""
        for session, call in self._sessions.running_calls():
            if call.request.method == "tools/call":
                await self._tools.ask(session.id, str((call.request.params or {}).get("name")), None)

    def __call__(self, reason: str) -> None:
        for session, call in self._sessions.running_calls():
            verdict = settling.verdict(call.request.method, attempt=call.attempt)
            name = str((call.request.params or {}).get("name"))
            again = verdict is Verdict.RERUN or (verdict is Verdict.ASK and self._tools.known(name))
            if not (again and self._outlived):
                session.exchange.answer_unknown(call, reason)
