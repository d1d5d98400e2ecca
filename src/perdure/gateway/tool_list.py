"""Knows the tools of an upstream, as its `tools/list` has shown them."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure._core.jsonrpc import JsonObject
from perdure._core.pages import Cursors

MAX_TOOLS = 10_000
"""Tools of one upstream that are known; beyond, only those that were listed last. Servers have up to some hundred, and
one that makes up names must not fill the memory."""

RELIST_SECONDS = 1.0
"""How soon after a list was read it is read again because it has changed: a server may report a change with each."""


@dataclass(slots=True)
class ToolPages:
    """The pages of one list, as they come."""

    tools: list[JsonObject] = field(default_factory=list)
    _cursors: Cursors = field(default_factory=Cursors)

    def add(self, page: Mapping[str, Any] | None) -> str | None:
        """Add a page. Returns the cursor of the next one, as `Cursors.after`."""
        page = page if isinstance(page, Mapping) else {}
        found = page.get("tools")
        self.tools += [tool for tool in found if isinstance(tool, dict)] if isinstance(found, list) else []
        return self._cursors.after(page)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.tools, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(slots=True)
class ToolList:
    """The tools of one upstream that its lists have shown. `_judge`: whether a tool may run again."""

    _judge: Callable[[Mapping[str, Any]], bool]
    tools: Mapping[str, JsonObject] | None = None
    """By name; `None` before the first list."""
    is_stale: bool = False
    """The upstream's code has changed since then."""
    _judged: dict[str, bool] = field(default_factory=dict)
    """What was said of listed tools: each call asks several times."""

    def learn(self, tools: Sequence[JsonObject]) -> None:
        """Take in a whole list. Tools that other lists have shown stay (each caller may be shown its own), unless they
        are of earlier code."""
        listed = {str(tool.get("name")): tool for tool in tools}
        known = {**({} if self.is_stale else self.tools or {}), **listed}
        self.tools = known if len(known) <= MAX_TOOLS else listed
        self.is_stale, self._judged = False, {}

    def learn_page(self, params: Mapping[str, Any] | None, page: Mapping[str, Any]) -> None:
        """Take in the answer to a request of a client: a whole list, or a page of one that is known."""
        pages = ToolPages()
        is_whole = pages.add(page) is None and not (params or {}).get("cursor")
        if is_whole or (self.tools is not None and not self.is_stale):
            self.learn(pages.tools)

    def may_run_again(self, name: str) -> bool | None:
        """Whether a tool may run a second time; `None` if no list was read yet. A tool that is not listed may not."""
        if self.tools is None:
            return None
        if name not in self._judged and name in self.tools:
            self._judged[name] = self._judge(self.tools[name])
        return self._judged.get(name, False)

    def may_still_run_again(self, name: str, at_start: bool | None) -> bool | None:
        """Whether a tool may run again for a call that has begun. `at_start`: what was known then. A tool that has lost
        its hint since then may not: another release of the server may have run it already, after its session was lost
        and begun again."""
        now = self.may_run_again(name)
        return now if at_start is None else at_start and now is not False
