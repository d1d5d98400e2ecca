"""Tries an upstream: opens a lane, lists its tools, and says which of them may run again."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version

from perdure._core import splice
from perdure._core.handshakes import capabilities_in
from perdure._core.jsonrpc import JsonObject
from perdure._core.settling import may_run_again
from perdure.errors import Misuse
from perdure.gateway.lane import Lane, SessionReceiver, UpstreamUnavailable
from perdure.gateway.pool import Gone, LaneRequests, RequestRefused
from perdure.gateway.tool_list import ToolPages
from perdure.gateway.upstream import Upstream

LIST_SECONDS = 60.0
"""How long an upstream may take to list its tools: as long as a program may take to start."""

CLIENT_PARAMS: JsonObject = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "perdure serve --check", "version": version("perdure")},
}

MakeCheckedLane = Callable[[Upstream, SessionReceiver], AbstractAsyncContextManager[Lane]]
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


async def check_upstream(upstream: Upstream, make_lane: MakeCheckedLane) -> Checked:
    """Start or reach an upstream, list its tools, and let it go again."""

    def failed(why: str) -> Checked:
        return Checked(upstream=upstream, failure=upstream.mask(why))

    requests, pages = LaneRequests(), ToolPages()
    try:
        async with make_lane(upstream, requests) as lane:
            try:
                opened = await lane.open(CLIENT_PARAMS)
                requests.lane = lane
                lane.notify("notifications/initialized", None)
                cursor: str | None = "" if "tools" in capabilities_in(opened.result) else None
                async with asyncio.timeout(LIST_SECONDS):
                    while cursor is not None:
                        text = await requests.call("tools/list", {"cursor": cursor} if cursor else {})
                        page = splice.decode(text.decode())
                        if not isinstance(page, dict) or not isinstance(page.get("tools"), list):
                            return failed("its answer to tools/list has no list of tools")
                        cursor = pages.add(page)
            finally:
                await lane.aclose(ended=True)
    except UpstreamUnavailable as unavailable:
        return failed(f"{unavailable} ({unavailable.reason.value})")
    except Misuse as misuse:
        return failed(str(misuse))
    except RequestRefused as refused:
        return failed(opened.mask(f"it refuses to list its tools: {refused}"))
    except Gone as gone:
        if (away := gone.lost.unavailable) is not None:
            return failed(f"{away} ({away.reason.value})")
        return failed(opened.mask(f"it did not answer tools/list: {gone}"))
    except TimeoutError:
        return failed(f"it did not list its tools within {LIST_SECONDS:g} s")
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
