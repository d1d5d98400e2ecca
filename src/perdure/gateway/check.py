"""Tries an upstream: opens a lane, lists its tools, and says which of them may run again."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version

from perdure._core import splice
from perdure._core.handshakes import capabilities_in
from perdure._core.jsonrpc import JsonObject
from perdure._core.settling import may_run_again
from perdure.gateway.lane import AskKey, Lane, Lost, RequestKey, SessionReceiver, UpstreamUnavailable
from perdure.gateway.tool_list import ToolPages
from perdure.gateway.upstream import Upstream

LIST_SECONDS = 60.0
"""How long an upstream may take to list its tools: as long as a program may take to start."""

CLIENT_PARAMS: JsonObject = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "perdure serve --check", "version": version("perdure")},
}

MakeLane = Callable[[Upstream, SessionReceiver], AbstractAsyncContextManager[Lane]]
"""Makes a lane, not opened yet, for a block."""


@dataclass(frozen=True, kw_only=True)
class CheckedTool:
    name: str
    may_run_again: bool
    because: str
    """The hint or the pattern that decides."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found out about an upstream. Texts are masked, but not made printable."""

    upstream: Upstream
    failure: str = ""
    """Why it cannot be used; empty if it can."""
    revision: str = ""
    server: str = ""
    """Its name and version, as it says."""
    tools: tuple[CheckedTool, ...] = ()


async def check_upstream(upstream: Upstream, make_lane: MakeLane) -> Checked:
    """Start or reach an upstream, list its tools, and let it go again."""
    answers, pages = _Answers(), ToolPages()
    try:
        async with make_lane(upstream, answers) as lane:
            try:
                opened = await lane.open(CLIENT_PARAMS)
                lane.notify("notifications/initialized", None)
                cursor: str | None = "" if "tools" in capabilities_in(opened.result) else None
                async with asyncio.timeout(LIST_SECONDS):
                    while cursor is not None:
                        page = await answers.of(lane, "tools/list", {"cursor": cursor} if cursor else {})
                        if not isinstance(page.get("tools"), list):
                            raise _NoAnswer("its answer to tools/list has no list of tools")
                        cursor = pages.add(page)
            finally:
                await lane.aclose(ended=True)
    except UpstreamUnavailable as unavailable:
        return Checked(upstream=upstream, failure=upstream.mask(f"{unavailable} ({unavailable.reason.value})"))
    except _NoAnswer as error:
        return Checked(upstream=upstream, failure=upstream.mask(opened.mask(str(error))))
    except TimeoutError:
        return Checked(upstream=upstream, failure=f"it did not list its tools within {LIST_SECONDS:g} s")
    info = opened.result.get("serverInfo")
    info = info if isinstance(info, dict) else {}
    return Checked(
        upstream=upstream,
        revision=opened.version,
        server=upstream.mask(" ".join(str(info[key]) for key in ("name", "version") if key in info)),
        tools=tuple(_checked(upstream, tool) for tool in pages.tools),
    )


def _checked(upstream: Upstream, tool: JsonObject) -> CheckedTool:
    name = str(tool.get("name"))
    if (rule := upstream.rerun_rule(name)) is not None:
        because = f"rerun, {rule}"
    elif may_run_again(tool):
        hints = tool["annotations"]
        because = next(hint for hint in ("readOnlyHint", "idempotentHint") if hints.get(hint) is True)
    else:
        because = "no hint"
    return CheckedTool(name=name, may_run_again=upstream.may_run_again(tool), because=because)


class _NoAnswer(Exception):
    """A request has an error, or none, for an answer."""


class _Answers(SessionReceiver):
    """Takes the answers of a lane."""

    def __init__(self) -> None:
        self._waiting: dict[RequestKey, asyncio.Future[JsonObject]] = {}
        self._keys = itertools.count(1)

    async def of(self, lane: Lane, method: str, params: JsonObject) -> JsonObject:
        """Send a request, and return its result."""
        key = next(self._keys)
        waiting: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting
        lane.request(key, method, params)
        return await waiting

    def on_answer(self, key: RequestKey, body: bytes, *, failed: bool) -> None:
        found = splice.decode(body.decode())
        if failed or not isinstance(found, dict):
            said = found.get("message") if isinstance(found, dict) else None
            self._fail(key, _NoAnswer(f"it refuses to list its tools: {said}"))
        elif (waiting := self._waiting.pop(key, None)) is not None and not waiting.done():
            waiting.set_result(found)

    def on_lost(self, key: RequestKey, lost: Lost) -> None:
        self._fail(key, lost.unavailable or _NoAnswer(f"it did not answer tools/list: {lost.why}"))

    def _fail(self, key: RequestKey, error: Exception) -> None:
        if (waiting := self._waiting.pop(key, None)) is not None and not waiting.done():
            waiting.set_exception(error)

    def on_ask(self, ask: AskKey, method: str, params: JsonObject | None, *, key: RequestKey | None) -> None:
        """Nothing: the upstream was told that its client takes no asks."""
