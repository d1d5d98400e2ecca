"""Which tools may run again, as the server tells whoever asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure._core import settling
from perdure._core.ids import SessionId
from perdure.sessions.registry import SessionRegistry

_TOOL_PAGES = 100
"""Pages of `tools/list` that are read to find out which tools may run again."""


class ToolHints:
    """What was learnt, for as long as one settles or stops."""

    def __init__(self, sessions: SessionRegistry) -> None:
        self._sessions = sessions
        self._known: dict[str, bool] | None = None
        """As callers without a name see them."""

    async def ask(self, session_id: SessionId, name: str, origin: object) -> bool | None:
        """Whether a tool may run again; `None` if the server does not show it to whoever is asking."""
        if origin is not None:
            return (await self._list(session_id, origin)).get(name)
        if self._known is None:  # asked once: a server that does not answer is not waited for with each call
            self._known = {}
            self._known = await self._list(session_id, None)
        return self._known.get(name)

    def known(self, name: str) -> bool:
        """Whether it is known that a tool may run again."""
        return (self._known or {}).get(name, False)

    async def _list(self, session_id: SessionId, origin: object) -> dict[str, bool]:
        session = await self._sessions.load(session_id)
        tools: dict[str, bool] = {}
        if session is None:
            return tools
        cursor: object = None
        with session.in_use():
            for _ in range(_TOOL_PAGES):
                params = {} if cursor is None else {"cursor": cursor}
                page = await session.exchange.runtime.ask("tools/list", params, origin) or {}
                tools |= {str(tool.get("name")): settling.may_run_again(tool) for tool in page.get("tools", ())}
                cursor = page.get("nextCursor")
                if cursor is None:
                    break
        return tools


@dataclass(frozen=True, kw_only=True)
class SettlingContext:
    """What is known, and was done, while one settles."""

    tools: ToolHints
    origin: object = None
    """The request of the principal whose calls are settled."""
    cancelled: frozenset[tuple[SessionId, int, int | str]] = frozenset()
    withdrawn: set[str] = field(default_factory=set)
    """Asks of dead nodes."""
