"""What `--check` finds out about an upstream, over a lane."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from perdure._core import pages
from perdure.gateway.check import Checked, CheckedTool, check_upstream
from perdure.gateway.host import lane_for_check
from perdure.gateway.lane import Lost, Reason, UpstreamUnavailable
from perdure.gateway.upstream import HttpUpstream, Upstream
from tests.gateway.memory_lane import MemoryServer
from tests.support.servers.scripted_http import scripted_http

pytestmark = pytest.mark.anyio

UPSTREAM = Upstream(
    name="shop",
    address=HttpUpstream(url="https://shop.example/mcp"),
    rerun={"search_*": True, "look": False},
    secrets=frozenset({"s3cret"}),
)


async def check(server: MemoryServer) -> Checked:
    return await check_upstream(UPSTREAM, lambda _, receiver: server.lane(receiver))


def tool(name: str, **hints: Any) -> dict[str, Any]:
    return {"name": name, "annotations": hints}


async def test_the_tools_of_all_pages_say_whether_they_may_run_again() -> None:
    first = [tool("read", readOnlyHint=True), tool("put", idempotentHint=True), tool("bake"), {"name": "bare"}]
    second = [tool("search_all"), tool("look", readOnlyHint=True)]
    server = MemoryServer(pages={"": {"tools": first, "nextCursor": "2"}, "2": {"tools": second}})
    assert await check(server) == Checked(
        upstream=UPSTREAM,
        revision="2025-11-25",
        server="table 1",
        tools=(
            CheckedTool(name="read", may_run_again=True, because="readOnlyHint"),
            CheckedTool(name="put", may_run_again=True, because="idempotentHint"),
            CheckedTool(name="bake", may_run_again=False, because="no hint"),
            CheckedTool(name="bare", may_run_again=False, because="no hint"),
            CheckedTool(name="search_all", may_run_again=True, because="rerun, search_*"),
            CheckedTool(name="look", may_run_again=False, because="rerun, look"),
        ),
    )
    assert server.sent == ["initialize", "notifications/initialized", "tools/list", "tools/list 2", "ended"]


async def test_a_cursor_that_repeats_ends_the_list() -> None:
    """G35."""
    listed = {"": {"tools": [tool("a")], "nextCursor": "x"}, "x": {"tools": [tool("b")], "nextCursor": "x"}}
    found = await check(MemoryServer(pages=listed))
    assert [one.name for one in found.tools] == ["a", "b"]


async def test_a_list_without_an_end_is_read_for_so_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_PAGES", 3)
    numbers = ["", "1", "2", "3", "4"]
    listed = {here: {"tools": [tool(f"t{here}")], "nextCursor": after} for here, after in itertools.pairwise(numbers)}
    found = await check(MemoryServer(pages=listed))
    assert [one.name for one in found.tools] == ["t", "t1", "t2"]


async def test_an_upstream_without_tools_is_not_asked_for_them() -> None:
    server = MemoryServer(capabilities={"prompts": {}})
    assert (await check(server)).tools == ()
    assert server.sent == ["initialize", "notifications/initialized", "ended"]


@pytest.mark.parametrize("odd", [7, True, "tools", ["tools"], None])
async def test_a_handshake_in_an_odd_form_is_read_as_far_as_it_can_be(odd: object) -> None:
    """The checks of the other servers go on, and this one has no tools that a client could be told of."""
    assert await check(MemoryServer(capabilities=odd, info=odd)) == Checked(upstream=UPSTREAM, revision="2025-11-25")


@pytest.mark.parametrize(
    ("server", "failure"),
    [
        (
            MemoryServer(unavailable=UpstreamUnavailable(Reason.NO_PROGRAM, "there is no program s3cret")),
            "there is no program *** (no_program)",
        ),
        (MemoryServer(error={"code": 1, "message": "no s3cret"}), "it refuses to list its tools: no ***"),
        (MemoryServer(lost=Lost(ran=True, why="its process ended")), "it did not answer tools/list: its process ended"),
        (
            MemoryServer(
                lost=Lost(ran=False, why="-", unavailable=UpstreamUnavailable(Reason.DIED, "its process ended"))
            ),
            "its process ended (died)",
        ),
        (MemoryServer(pages={"": {"tools": "none"}}), "its answer to tools/list has no list of tools"),
    ],
)
async def test_an_upstream_that_cannot_be_used_says_why(server: MemoryServer, failure: str) -> None:
    assert await check(server) == Checked(upstream=UPSTREAM, failure=failure)
    assert server.sent[-1] == "ended"


async def test_an_upstream_that_cannot_be_set_up_says_why_and_leaves_the_checks_of_others(tmp_path: Path) -> None:
    upstream = Upstream(name="shop", address=HttpUpstream(url="https://shop.example", token_file=tmp_path / "none"))
    found = await check_upstream(upstream, lane_for_check)
    assert found.failure == f"the file {tmp_path}/none of --token-file cannot be read: No such file or directory"


async def test_a_token_that_an_upstream_repeats_is_masked(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret-token")
    token.chmod(0o600)
    async with scripted_http() as server:
        server.refuse("tools/list", 200, error=[-32000, "I know s3cret-token"])
        upstream = Upstream(name="shop", address=HttpUpstream(url=server.url, token_file=token))
        found = await check_upstream(upstream, lane_for_check)
    assert found.failure == "it refuses to list its tools: I know ***"
