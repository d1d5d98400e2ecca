"""What Prometheus learns of an upstream."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.gateways import Gateway, begin, gateway, refused_handshake, text_of_call
from tests.telemetry.test_metrics import numbers, scraped

pytestmark = pytest.mark.anyio


async def numbers_of(served: Gateway) -> dict[str, float]:
    """The numbers of the upstream, by their names without `perdure_upstream_`. Each has its label."""
    page = numbers((await scraped(served.site)).text)
    assert all(dict(labels)["upstream"] == "scripted" for _, labels in page)
    own = {name: number for (name, labels), number in page.items() if "le" not in dict(labels)}
    return {name.removeprefix("perdure_upstream_"): number for name, number in own.items() if "_upstream_" in name}


async def test_a_restart_is_counted_with_what_it_costs(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with gateway(tmp_path) as served:
        assert [(await numbers_of(served))[name] for name in ("up", "children", "starts_total")] == [1, 0, 0]
        peer = await served.join()
        wire = await begin(peer, "idempotent", {"wait": str(go)})
        await served.has_run()
        before = await numbers_of(served)
        assert [before[name] for name in ("children", "starts_total", "restarts_total")] == [1, 1, 0]
        await served.kill()
        await served.has_run(2)
        go.touch()
        await wire.rest()
        after = await numbers_of(served)
        assert [after[name] for name in ("up", "children", "starts_total", "restarts_total")] == [1, 1, 2, 1]
        assert after["handshakes_repeated_total"] == 1
        assert after["start_seconds_count"] == 2
        await text_of_call(peer)
        assert (await numbers_of(served))["request_seconds_count"] == after["request_seconds_count"] + 1


async def test_an_upstream_that_does_not_start_is_not_up(tmp_path: Path) -> None:
    async with gateway(tmp_path, "exit=3", patience=0) as served:
        await refused_handshake(served)
        assert (await numbers_of(served))["up"] == 0
