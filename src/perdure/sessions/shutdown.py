"""Ends the running calls of a process that stops."""

from __future__ import annotations

from perdure._core.settling import Rerun, rerun
from perdure.sessions.registry import SessionRegistry
from perdure.sessions.tool_hints import ToolHints


async def learn_tools(sessions: SessionRegistry, tools: ToolHints) -> None:
    """Find out, while there is time, which of the tools that run here may run again elsewhere."""
    for session, call in sessions.running_calls():
        if call.request.method == "tools/call":
            await tools.ask(session.id, call.request, None)


def end_calls(sessions: SessionRegistry, tools: ToolHints, reason: str, *, outlived: bool) -> None:
    """Leave calls that may run again to the next process, and answer the others. `outlived`: there may be a next
    process, because the store outlives this one."""
    for session, call in sessions.running_calls():
        may = rerun(call.request.method, attempt=call.attempt)
        may = tools.known(call.request) if may is Rerun.ASK else may
        if not (outlived and may is Rerun.YES):
            session.exchange.answer_unknown(call, reason)
