"""The dashboard and the alert rules in `deploy/` name only what a real server exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from perdure.store import MemoryStore, SqliteStore, Store, open_store
from perdure.store.sqlite import metrics as store_metrics
from perdure.store.steps import OpenStream, PutSession
from perdure.testing._values import NODE, a_call, a_session, a_stream, an_append, an_end, put, some_events
from tests.support.processes.serving import ROOT
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.postgres import store_url
from tests.telemetry.test_metrics import numbers, of, page_of, scraped

DEPLOY = Path(ROOT) / "deploy"
DASHBOARD = DEPLOY / "grafana" / "perdure.json"
RULES = DEPLOY / "prometheus" / "perdure.rules.yml"

SELECTOR = re.compile(r"(perdure_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!=|=)\s*"([^"]*)"')
GROUPED = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
OUTSIDE = {"job", "instance", "le"}
"""Labels that Prometheus adds, and that of a histogram."""


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Each expression with the place where it stands, and what it shows of its labels."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}: {target['legendFormat']}", target["expr"]
    for alert in alerts():
        yield f"alert {alert['alert']}: {alert['annotations']['summary']}", alert["expr"]


Exported = dict[str, dict[str, set[str]]]
"""The labels of each metric with their values; none for a metric of which there is nothing to show here."""


async def exported(store: Store) -> Exported:
    """What a real server shows that has served one call."""
    async with serve(ToolServer().server, store=store) as site:
        peer = await site.join()
        await peer.result("count", n=2)
        text = (await scraped(site)).text
    found: Exported = {}
    for family in text_string_to_metric_families(text):
        suffixes = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
        plain = f"{family.name}_total" if family.type == "counter" else family.name
        found |= {plain + suffix: defaultdict(set) for suffix in suffixes}
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
    return found


@pytest.mark.anyio
async def test_what_the_dashboard_and_the_alerts_name_is_what_servers_export(tmp_path: Path) -> None:
    both = [await exported(SqliteStore(str(tmp_path / "log.db"))), await exported(open_store(store_url()))]
    names = set(both[0]) & set(both[1])
    labels = {name: {label for each in both for label in each[name]} for name in names}
    wrong = []
    for place, expression in expressions():
        used = SELECTOR.findall(expression)
        assert used or expression.startswith("up{"), place
        for name, selector in used:
            if name not in names:
                wrong.append(f"{place} names {name}")
                continue
            for label, value in MATCHER.findall(selector):
                values = {value for each in both for value in each[name].get(label, ())}
                if label not in OUTSIDE and values and value not in values:
                    wrong.append(f"{place} asks for {name}{{{label}={value}}}")
        named = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")}
        named |= set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", place))
        known = set().union(*(labels.get(name, set()) for name, _ in used)) | OUTSIDE | {"standby"}
        wrong += [f"{place} names the label {label}" for label in named - known]
    assert wrong == []


def test_each_alert_says_what_it_means_and_has_a_test() -> None:
    tested = {
        case["alertname"]
        for test in yaml.safe_load((DEPLOY / "prometheus" / "perdure.rules.test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert tested == {alert["alert"] for alert in alerts()}
    assert all(alert["annotations"]["summary"] and alert["annotations"]["description"] for alert in alerts())
    assert {alert["labels"]["severity"] for alert in alerts()} == {"critical", "warning", "info"}


def test_no_alert_and_no_sum_misses_what_a_process_counts_before_its_first_scrape() -> None:
    """A process that is started behind a crash settles calls at once; `increase` takes its first sample as the zero."""
    early = re.compile(r"increase\(perdure_(?:settles|gaps|positions_lost|resume_chains_revoked)_total")
    assert [place for place, expression in expressions() if early.search(expression)] == []


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize("what", ["check", "test"])
def test_promtool_accepts_the_alerts(what: str) -> None:
    file = {"check": RULES, "test": RULES.with_suffix(".test.yml")}[what]
    done = subprocess.run(["promtool", what, "rules", file], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)


# The gauges that they show


@pytest.mark.anyio
async def test_open_readers_are_counted_by_kind() -> None:
    shop = ToolServer()
    async with serve(shop.server) as site:
        peer = await site.join()
        standalone = await peer.get()
        call = await peer.call("count", n=3, gate="g", pauses=[1], token="t")
        await call.messages(1)
        page = await page_of(site)
        kinds = ("call", "standalone", "sessionless")
        assert [page("perdure_open_readers", kind=kind) for kind in kinds] == [1, 1, 0]
        shop.open("g/1")
        await call.rest()
        await standalone.drop()

        async def left() -> bool:
            page = await page_of(site)
            return [page("perdure_open_readers", kind=kind) for kind in kinds] == [0, 0, 0]

        await until(left)


@pytest.mark.anyio
async def test_what_is_held_while_the_store_fails_is_shown() -> None:
    shop, store = ToolServer(), FaultyStore(MemoryStore())
    async with serve(shop.server, store=store, complaint="the store fails", store_timeout=0.2) as site:
        peer = await site.join()
        assert (await page_of(site))("perdure_held_bytes") == 0
        store.writes = Fault.RAISES
        call = await peer.call("wait", gate="g")
        await until(lambda: site.app.counters.outages == 1)
        assert ((await page_of(site))("perdure_held_bytes") or 0) > 0
        store.works()
        shop.open("g")
        await call.rest()

        async def written() -> bool:
            return (await page_of(site))("perdure_held_bytes") == 0

        await until(written)


@pytest.mark.anyio
async def test_a_scrape_counts_what_a_file_keeps_and_how_large_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    async with serve(ToolServer().server, store=SqliteStore(str(path))) as site:
        peer = await site.join()
        await peer.result("count", n=5)
        page = numbers((await scraped(site)).text)
        # The answers are those of the handshake and of the call.
        assert of(page, "perdure_store_retained_events", kind="answer") == 2
        assert (of(page, "perdure_store_retained_bytes", kind="answer") or 0) > 100
        used, free, log = (of(page, "perdure_store_file_bytes", part=part) or 0 for part in ("used", "free", "log"))
        assert (used > 0, free, log > 0) == (True, 0, True)


@pytest.mark.anyio
@pytest.mark.parametrize(("walk", "scrapes"), [(21, 1), (20, 2), (7, 3), (1, 21)])
async def test_a_large_file_is_counted_a_part_with_each_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, walk: int, scrapes: int
) -> None:
    """Twenty events: a walk that meets its bound exactly looks once more whether there is anything behind it."""
    monkeypatch.setattr(store_metrics, "WALK", walk)
    async with SqliteStore(str(tmp_path / "log.db")) as store:
        fence = await store.join(NODE)
        await put(store, PutSession(record=a_session()))
        for number in range(4):
            name = f"call-{number}"
            await put(store, OpenStream(record=a_stream(fence, name), calls=(a_call(number, stream=name),)))
            answered = an_append(fence, some_events(1, 5, final=True), stream=name, ends=(an_end(number),), seal=True)
            await put(store, answered)
        found = [(await store.survey()).kept for _ in range(2 * scrapes)]
        whole = {"event": 16, "answer": 4}
        assert found == [*[{}] * (scrapes - 1), *[whole] * (scrapes + 1)]
        assert (await store.survey()).kept_bytes == {"event": 16 * 7, "answer": 4 * 7}


@pytest.mark.anyio
async def test_a_server_estimates_what_its_store_keeps() -> None:
    async with open_store(store_url()) as store:
        survey = await store.survey()  # type: ignore[attr-defined]
        assert set(survey.kept) == set(survey.kept_bytes) == {"event", "answer"}
        assert survey.kept_bytes["event"] > 0
