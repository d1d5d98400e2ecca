"""`GET /metrics`, read with Prometheus's own parser (P9)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from prometheus_client.parser import text_string_to_metric_families
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.routing import Mount

import perdure
from perdure._core.ids import NodeId
from perdure._core.states import SessionState
from perdure.errors import Misuse
from perdure.store import MemoryStore, SqliteStore
from perdure.store.records import NodeRecord
from perdure.telemetry import prometheus as metrics
from perdure.telemetry.counters import BUCKETS, Counters, Histogram
from perdure.telemetry.prometheus import Snapshot
from tests.support.clients.modern_requests import TASKS, modern
from tests.support.clients.raw_http import Peer as RawPeer
from tests.support.clients.wire_client import Peer
from tests.support.servers.in_process import Site, info_of, serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore

OWN, OTHER = NodeId("own-node-0123456789"), NodeId("other-node-0123456789")

Numbers = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def numbers(text: str) -> Numbers:
    """Every sample of a page by its name and its labels; a page that cannot be parsed raises."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(page: Numbers, name: str, **labels: str) -> float | None:
    return page.get((name, tuple(sorted(labels.items()))))


def a_snapshot(node: NodeId = OWN, **counts: int) -> Snapshot:
    counters = Counters(**counts)  # type: ignore[arg-type]
    counters.append_seconds.observe(0.003)
    counters.append_seconds.observe(99.0)
    return metrics.snapshot(
        node,
        counters,
        sessions={"active": 2, "dormant": 1},
        durable_calls=6,
        streams={"call": 4},
        readers=3,
        degraded=True,
    )


def beaten(snapshot: Snapshot) -> NodeRecord:
    return NodeRecord(id=snapshot.node, beat=1, facts=metrics.facts(snapshot))


# The page


def rendered(*given: Any, **stored: Any) -> str:
    return metrics.render({"": metrics.page_of(*given, **stored)})


def test_every_number_of_a_node_is_on_the_page() -> None:
    page = numbers(
        rendered(
            a_snapshot(events_appended=7, calls_settled=5),
            (),
            {OWN: 0.25},
            stored={SessionState.ACTIVE: 9},
            stored_calls={SessionState.DORMANT: 8},
        )
    )
    node = OWN[:8]
    assert of(page, "perdure_events_appended_total", node=node) == 7
    assert of(page, "perdure_settles_total", node=node, outcome="unknown") == 5
    assert of(page, "perdure_settles_total", node=node, outcome="rerun") == 0
    assert of(page, "perdure_sessions", node=node, state="active") == 2
    assert of(page, "perdure_streams", node=node, kind="call") == 4
    assert of(page, "perdure_readers", node=node) == 3
    assert of(page, "perdure_store_degraded", node=node) == 1
    assert of(page, "perdure_node_lease_age_seconds", node=node) == 0.25
    assert of(page, "perdure_store_sessions", state="active") == 9
    assert of(page, "perdure_store_sessions", state="dormant") == 0
    assert of(page, "perdure_durable_calls", node=node) == 6
    assert of(page, "perdure_store_durable_calls", state="active") == 0
    assert of(page, "perdure_store_durable_calls", state="dormant") == 8
    assert of(page, "perdure_store_durable_calls", state="ended") is None


def test_every_counter_is_exported_once() -> None:
    counts = {name: 1_000 + number for number, name in enumerate(Counters().snapshot())}
    page = numbers(rendered(a_snapshot(OWN, **counts), (), {}))
    assert sorted(value for value in page.values() if value >= 1_000) == sorted(counts.values())


def test_every_family_has_its_help_and_its_type() -> None:
    text = rendered(a_snapshot(), (), {})
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
    assert text.count("# HELP ") == text.count("# TYPE ") > 20


def test_a_histogram_counts_what_is_within_each_bound() -> None:
    page = numbers(rendered(a_snapshot(), (), {}))
    node = OWN[:8]
    within = [of(page, "perdure_append_seconds_bucket", node=node, le=str(bound)) for bound in BUCKETS]
    assert within == [0.0 if bound < 0.003 else 1.0 for bound in BUCKETS]
    assert of(page, "perdure_append_seconds_bucket", node=node, le="+Inf") == 2
    assert of(page, "perdure_append_seconds_count", node=node) == 2
    assert of(page, "perdure_append_seconds_sum", node=node) == pytest.approx(99.003)


@pytest.mark.parametrize("bound", BUCKETS)
def test_a_bound_belongs_to_its_own_bucket(bound: float) -> None:
    histogram = Histogram()
    histogram.observe(bound)
    assert histogram.counts.index(1) == BUCKETS.index(bound)


# Several nodes


def test_what_a_node_tells_the_store_is_read_back_whole() -> None:
    told = a_snapshot(OTHER, take_overs=3)
    read = metrics.read_facts(beaten(told))
    assert json.loads(metrics.facts(read)) == json.loads(metrics.facts(told))
    assert read.node == OTHER


def test_each_node_has_its_own_samples() -> None:
    others = [beaten(a_snapshot(OTHER, resumes=2)), beaten(a_snapshot(OWN, resumes=99))]
    page = numbers(rendered(a_snapshot(resumes=1), others, {OWN: 0.0, OTHER: 4.5}))
    assert of(page, "perdure_resumes_total", node=OWN[:8]) == 1  # as it is now, not as it was told
    assert of(page, "perdure_resumes_total", node=OTHER[:8]) == 2
    assert of(page, "perdure_node_lease_age_seconds", node=OTHER[:8]) == 4.5


@pytest.mark.parametrize(
    "facts",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b'{"counters": 5}',
        b'{"counters": {"resumes": "many"}}',
        b'{"sessions": null}',
        b'{"seconds": {"append": [[1, 2], 3]}}',
        b'{"seconds": {"append": 7}}',
        b'{"version": 7, "readers": "x"}',
        b'{"version": "1.0\\"} evil 1\\n", "sessions": {"a\\"b\\\\c\\nd": 1}}',
        b"\xff\xfe",
    ],
)
def test_a_node_that_tells_something_else_spoils_nothing(facts: bytes) -> None:
    """An older release, a newer one, one that has told nothing yet, or bytes that somebody damaged."""
    other = NodeRecord(id=OTHER, beat=1, facts=facts)
    page = numbers(rendered(a_snapshot(resumes=1), [other], {OTHER: 1.0}))
    assert of(page, "perdure_resumes_total", node=OWN[:8]) == 1
    assert of(page, "perdure_resumes_total", node=OTHER[:8]) is None
    assert of(page, "perdure_node_lease_age_seconds", node=OTHER[:8]) == 1.0


def test_a_node_of_an_older_release_shows_what_it_has() -> None:
    told = json.loads(metrics.facts(a_snapshot(OTHER, resumes=2)))
    del told["counters"]["gaps"], told["readers"], told["seconds"]
    other = NodeRecord(id=OTHER, beat=1, facts=json.dumps(told | {"news": 1}).encode())
    page = numbers(rendered(a_snapshot(), [other], {}))
    assert of(page, "perdure_resumes_total", node=OTHER[:8]) == 2
    assert of(page, "perdure_gaps_total", node=OTHER[:8]) is None
    assert of(page, "perdure_append_seconds_count", node=OTHER[:8]) is None


def test_the_pages_of_several_servers_are_one_page_with_a_label() -> None:
    text = metrics.render({name: metrics.page_of(a_snapshot(resumes=3), (), {}) for name in ("files", "git")})
    page = numbers(text)
    assert of(page, "perdure_resumes_total", upstream="files", node=OWN[:8]) == 3
    assert of(page, "perdure_resumes_total", upstream="git", node=OWN[:8]) == 3
    assert text.count("# TYPE perdure_resumes_total ") == 1


# Over HTTP


async def scraped(site: Site, **headers: str) -> httpx2.Response:
    response: httpx2.Response = await site.http.get(f"http://127.0.0.1:{site.port}/metrics", headers=headers)
    return response


async def page_of(site: Site) -> Callable[..., float | None]:
    """The numbers of the only node of a site."""
    response = await scraped(site)
    assert (response.status_code, response.headers["content-type"]) == (
        200,
        "text/plain; version=0.0.4; charset=utf-8",
    )
    page = numbers(response.text)
    [node] = {value for _, labels in page for label, value in labels if label == "node"}
    return lambda name, **labels: of(page, name, node=node, **labels)


@pytest.mark.anyio
async def test_a_scrape_shows_what_happened() -> None:
    """P9."""
    shop = ToolServer()
    async with serve(shop.server) as site:
        peer = await site.join()
        wire = await peer.call("count", n=5, gate="g", pauses=[2], token="t")
        await wire.messages(2)
        await wire.drop()
        shop.open("g/2")
        await until(lambda: "counted 5" in shop.seen)
        await (await peer.get(wire.last_id)).rest()
        standalone = await peer.get()
        stranger = Peer(site)
        stranger.session = "A" * len(peer.session)
        await stranger.try_get()
        page = await page_of(site)
        assert page("perdure_sessions", state="active") == 1
        assert page("perdure_streams", kind="standalone") == 1
        assert page("perdure_readers") == 1
        assert page("perdure_resumes_total") == 1
        assert page("perdure_events_replayed_total") == 4
        assert page("perdure_replay_seconds_count") == 1
        assert page("perdure_replays_total", outcome="complete") == 1
        assert page("perdure_replays_total", outcome="abandoned") == 0
        assert page("perdure_replays_total", outcome="refused") == 0
        assert page("perdure_sessions_not_found_total") == 1
        assert page("perdure_calls_answered_total") == 2
        assert page("perdure_store_degraded") == 0
        assert (page("perdure_append_seconds_count") or 0) > 0
        await standalone.drop()


@pytest.mark.anyio
async def test_durable_calls_are_counted_apart_from_sessions() -> None:
    shop = ToolServer()
    async with serve(shop.server, task_after=0) as site:
        peer = RawPeer(port=site.port)

        async def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
            body, headers = modern(method, params, capabilities={"extensions": {TASKS: {}}})
            result: dict[str, Any] = (await peer.ask("POST", body, headers=headers)).json["result"]
            return result

        key = {"dev.perdure/key": "k"}
        call = {"name": "wait", "arguments": {"gate": "g"}, "_meta": key}
        task = await ask("tools/call", call)
        assert await ask("tools/call", call) == task
        page = await page_of(site)
        assert (page("perdure_durable_calls"), page("perdure_sessions", state="active")) == (1, 0)
        assert (page("perdure_tasks_handed_out_total"), page("perdure_calls_joined_total")) == (1, 1)
        stored = numbers((await scraped(site)).text)
        assert of(stored, "perdure_store_durable_calls", state="active") == 1
        assert of(stored, "perdure_store_sessions", state="active") == 0
        shop.open("g")
        while (await ask("tasks/get", {"taskId": task["taskId"]}))["status"] == "working":
            pass  # each poll is held until there is something to tell

        async def kept() -> bool:
            page = numbers((await scraped(site)).text)
            in_memory = sum(value for (name, _), value in page.items() if name == "perdure_durable_calls")
            return (of(page, "perdure_store_durable_calls", state="dormant"), in_memory) == (1, 0)

        await until(kept)


@pytest.mark.anyio
async def test_nothing_on_the_page_says_who_a_client_is_or_what_it_calls() -> None:
    shop = ToolServer()
    async with serve(shop.server, auth=Verifier()) as site:
        peer = await site.join(token="alice")
        await peer.result("count", n=1)
        text = (await scraped(site, authorization="Bearer alice")).text
        [stream, *_] = info_of(site.app, peer.session).streams
        for secret in (peer.session[:8], stream.id, "alice", 'count"', "tools/call"):
            assert secret not in text


@pytest.mark.anyio
async def test_whichever_of_two_nodes_is_scraped_it_shows_both(tmp_path: Path) -> None:
    path = str(tmp_path / "log.db")
    async with (
        serve(ToolServer().server, store=SqliteStore(path), lease=1.0) as one,
        serve(ToolServer().server, store=SqliteStore(path), lease=1.0) as other,
    ):
        peers = [await one.join() for _ in range(3)]
        page: Numbers = {}

        async def told() -> bool:
            """The first node has told the store of its sessions, and the second one shows it."""
            page.update(numbers((await scraped(other)).text))
            opened = sorted(value for (name, _), value in page.items() if name == "perdure_sessions_opened_total")
            return opened == [0, len(peers)]

        await until(told)
        ages = [value for (name, _), value in page.items() if name == "perdure_node_lease_age_seconds"]
        assert (len(ages), max(ages) < 60) == (2, True)
        assert of(page, "perdure_store_sessions", state="active") == len(peers)


@pytest.mark.anyio
async def test_while_the_store_fails_a_node_shows_its_own_numbers() -> None:
    """Promise 7: the state is visible."""
    shop, store = ToolServer(), FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, complaint="the store fails", store_timeout=0.2) as site:
        peer = await site.join()
        store.writes = Fault.RAISES
        wire = await peer.call("wait", gate="g")
        await until(lambda: site.app.counters.outages == 1)
        page = await page_of(site)
        assert (page("perdure_store_degraded"), page("perdure_outages_total")) == (1, 1)
        store.works()
        shop.open("g")
        await wire.rest()


@pytest.mark.anyio
async def test_a_scraper_comes_by_get_or_head_and_by_any_name() -> None:
    """As for the health check: scrapers know addresses, not the public name."""
    async with serve(ToolServer().server) as site:
        assert (await scraped(site, host="10.1.2.3:8000")).status_code == 200
        response = await site.http.post(f"http://127.0.0.1:{site.port}/metrics")
        assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")
        assert (await site.http.head(f"http://127.0.0.1:{site.port}/metrics")).status_code == 200


# Who may see it


class Verifier:
    """Each token is the name of its principal."""

    async def verify_token(self, token: str) -> AccessToken | None:
        return AccessToken(token=token, client_id=token, scopes=[]) if token in ("alice", "bob") else None


@pytest.mark.anyio
async def test_where_callers_must_say_who_they_are_a_scrape_must_too() -> None:
    async with serve(ToolServer().server, auth=Verifier()) as site:
        assert (await scraped(site)).status_code == 401
        assert (await scraped(site, authorization="Bearer mallory")).status_code == 401
        assert (await scraped(site, authorization="Bearer bob")).status_code == 200


@pytest.mark.anyio
async def test_the_servers_own_authentication_guards_the_metrics_as_well() -> None:
    url = AnyHttpUrl("https://auth.example")
    settings = AuthSettings(issuer_url=url, resource_server_url=url, validate_token_resource=False)
    server: Any = MCPServer("guarded", auth=settings, token_verifier=Verifier())
    async with serve(server) as site:
        assert (await scraped(site)).status_code == 401
        assert (await scraped(site, authorization="Bearer bob")).status_code == 200


@pytest.mark.anyio
async def test_the_page_can_be_switched_off() -> None:
    async with serve(ToolServer().server, metrics=False) as site:
        assert (await scraped(site)).status_code == 404


@pytest.mark.anyio
async def test_a_prefix_of_an_outer_application_stays() -> None:
    app = perdure.asgi(MCPServer("inner"), store="memory:")
    outer = Starlette(routes=[Mount("/api", app)])
    transport = httpx2.ASGITransport(outer)
    async with app.lifespan(), httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get("/api/metrics")).text.startswith("# HELP perdure_build_info")


def test_the_endpoint_cannot_stand_where_the_metrics_stand() -> None:
    with pytest.raises(Misuse, match="where the metrics stand"):
        perdure.asgi(MCPServer("x"), store="memory:", path="/metrics")
