"""Which era an upstream speaks: found out on lanes of their own, with real processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from perdure._core.envelope import SUBSCRIPTION
from perdure._core.eras import Era
from perdure.gateway.children import Children
from perdure.gateway.known_era import PROBE_SECONDS, KnownEra, open_in_era
from perdure.gateway.lane import Lane, Opened, Reason, UpstreamUnavailable, open_lane
from perdure.gateway.modern_lane import ModernLane
from perdure.gateway.modern_wire import PipeWire, WireRequest
from perdure.gateway.pipe import PipeLane
from perdure.gateway.watched_lane import NO_CALLER, WatchedLane
from perdure.runtime.health import Health
from tests.clients.node_clients import HERE as CLIENTS
from tests.gateway.modern_lanes import CLIENT, Heard, children_of, pipe_lane
from tests.gateway.real_upstreams import REAL_SERVERS
from tests.gateway.typescript_upstreams import typescript_program
from tests.gateway.web_lanes import Recorder
from tests.support.processes.node_programs import node_modules, program
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

MODERN, SESSION = "2026-07-28", "2025-06-18"


class Chameleon:
    """The program, its era, and how often it was started."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "era.json"
        self.argv = (sys.executable, str(Path(__file__).with_name("era_program.py")), str(self.place))

    def answers(self, **greetings: object) -> None:
        self.place.write_text(json.dumps({name.replace("_", "/"): word for name, word in greetings.items()}))

    @property
    def starts(self) -> int:
        return len(self.place.with_suffix(".starts").read_text().splitlines())


@pytest.fixture
def chameleon(tmp_path: Path) -> Chameleon:
    return Chameleon(tmp_path)


@asynccontextmanager
async def opened(children: Children, era: KnownEra, *, probe_seconds: float = PROBE_SECONDS) -> AsyncIterator[Opened]:
    heard = Heard()
    lane: Lane

    def make(tried: Era, probe: float | None) -> Lane:
        nonlocal lane
        is_session = tried is Era.SESSION
        wire = PipeWire(children, probe_seconds=probe)
        lane = PipeLane(children, heard) if is_session else ModernLane(wire, heard)
        return lane

    found = await open_in_era(era, make, CLIENT, probe_seconds=probe_seconds)
    try:
        lane.notify("notifications/initialized", None)
        lane.request("k", "tools/list", None)
        await heard.answer("k")
        yield found
    finally:
        await lane.aclose(ended=True)


@pytest.mark.parametrize("code", [-32022, -32601, -32602])
async def test_a_server_that_refuses_a_session_is_asked_for_the_other_era(chameleon: Chameleon, code: int) -> None:
    """The era is learnt: the next lane starts one process only."""
    chameleon.answers(initialize=code)
    era = KnownEra()
    async with children_of(chameleon.argv) as children:
        async with opened(children, era) as found:
            assert (found.version, era.learnt, chameleon.starts) == (MODERN, Era.MODERN, 2)
            assert found.result["serverInfo"]["name"] == "chameleon"
        async with opened(children, era) as found:
            assert (found.version, chameleon.starts) == (MODERN, 3)


async def test_a_server_of_both_eras_gets_a_session(chameleon: Chameleon) -> None:
    chameleon.answers()
    era = KnownEra()
    async with children_of(chameleon.argv) as children, opened(children, era) as found:
        assert (found.version, era.learnt, chameleon.starts) == ("2025-11-25", Era.SESSION, 1)


async def test_a_server_that_is_replaced_by_one_of_the_other_era_is_learnt_again(chameleon: Chameleon) -> None:
    era = KnownEra()
    async with children_of(chameleon.argv) as children:
        for refused, expected in (
            ("initialize", Era.MODERN),
            ("server_discover", Era.SESSION),
            ("initialize", Era.MODERN),
        ):
            chameleon.answers(**{refused: -32601})
            async with opened(children, era):
                assert era.learnt is expected


@pytest.mark.parametrize(("pinned", "refused"), [(Era.SESSION, "initialize"), (Era.MODERN, "server_discover")])
async def test_a_pinned_era_is_the_only_one_that_is_tried(chameleon: Chameleon, pinned: Era, refused: str) -> None:
    """G41."""
    chameleon.answers(**{refused: -32602})
    async with children_of(chameleon.argv) as children:
        with pytest.raises(UpstreamUnavailable, match="not that one") as found:
            async with opened(children, KnownEra(pinned=pinned)):
                pass
    assert found.value.reason is Reason.VERSION
    assert chameleon.starts == 1


async def test_a_server_of_neither_era_says_both_refusals(chameleon: Chameleon) -> None:
    chameleon.answers(initialize=-32601, server_discover=-32601)
    async with children_of(chameleon.argv) as children:
        with pytest.raises(UpstreamUnavailable, match=r"refused initialize.*refused server/discover") as found:
            async with opened(children, KnownEra()):
                pass
    assert found.value.reason is Reason.VERSION


async def test_a_server_that_dies_in_its_handshake_says_nothing_of_its_era(chameleon: Chameleon) -> None:
    chameleon.answers(initialize="dies")
    era = KnownEra(learnt=Era.SESSION)
    async with children_of(chameleon.argv) as children:
        with pytest.raises(UpstreamUnavailable) as found:
            async with opened(children, era):
                pass
    assert (found.value.reason, era.learnt, chameleon.starts) == (Reason.DIED, None, 1)


@pytest.mark.parametrize("word", ["dies", "hangs", 0, -32600, -32601])
async def test_a_server_that_has_no_words_for_a_probe_gets_a_session(chameleon: Chameleon, word: object) -> None:
    """The Rust SDK exits, and the Go SDK answers with code 0. The end of a probe is no failed start."""
    chameleon.answers(server_discover=word)
    era = KnownEra(front=Era.MODERN)
    async with children_of(chameleon.argv) as children:
        async with opened(children, era, probe_seconds=1.0 if word == "hangs" else PROBE_SECONDS) as found:
            assert (found.version, era.learnt, chameleon.starts) == ("2025-11-25", Era.SESSION, 2)
        async with opened(children, era) as found:
            assert (found.version, children.pause, chameleon.starts) == ("2025-11-25", 0.0, 3)


async def test_clients_that_come_together_wait_for_one_probe(chameleon: Chameleon) -> None:
    chameleon.answers(server_discover="dies")
    era = KnownEra(front=Era.MODERN)
    async with children_of(chameleon.argv) as children, AsyncExitStack() as stack:
        found = await asyncio.gather(*(stack.enter_async_context(opened(children, era)) for _ in range(4)))
        assert [one.version for one in found] == ["2025-11-25"] * 4
        assert chameleon.starts == 5


async def test_a_client_may_leave_while_another_probes(chameleon: Chameleon) -> None:
    era = KnownEra(front=Era.MODERN)
    async with children_of(chameleon.argv) as children, era.probing:
        lane = WatchedLane(
            lambda own, *_: PipeLane(children, own),
            Recorder(),
            era=era,
            health=Health(),
            caller=NO_CALLER,
            seats=None,
            call_timeout=None,
        )
        opening = asyncio.create_task(open_lane(lambda: lane, CLIENT, patience=1.0))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening


async def test_a_server_that_starts_slowly_is_not_taken_for_one_of_sessions(chameleon: Chameleon) -> None:
    """It is too slow for the probe. One of both eras gets a session, and the next lane finds the era that it also has;
    one without sessions is asked once more, and has its time then."""
    era, slow = KnownEra(front=Era.MODERN), 0.2
    async with children_of(chameleon.argv, grace=0.1) as children:
        chameleon.answers(sleep=0.5)
        async with opened(children, era, probe_seconds=slow) as found:
            assert (found.version, era.learnt, chameleon.starts) == ("2025-11-25", None, 2)
        chameleon.answers(sleep=0.5, initialize=-32601)
        async with opened(children, era, probe_seconds=slow) as found:
            assert (found.version, era.learnt, chameleon.starts) == (MODERN, Era.MODERN, 5)


async def test_a_refused_handshake_costs_no_failed_start(chameleon: Chameleon) -> None:
    """The cause may be one client's params, for which no other client has to wait."""
    chameleon.answers(initialize=-32602, server_discover="dies")
    async with children_of(chameleon.argv) as children:
        with pytest.raises(UpstreamUnavailable, match=r"refused initialize.*exit status 3") as found:
            async with opened(children, KnownEra()):
                pass
        assert found.value.reason is Reason.VERSION
        assert (children.pause, chameleon.starts) == (0.0, 2)


@pytest.mark.parametrize("front", Era)
async def test_a_server_that_ends_at_everything_is_started_less_and_less(chameleon: Chameleon, front: Era) -> None:
    chameleon.answers(initialize="dies", server_discover="dies")
    era = KnownEra(front=front)
    async with children_of(chameleon.argv) as children:
        for reason in (Reason.DIED, Reason.BACKING_OFF):
            with pytest.raises(UpstreamUnavailable) as found:
                async with opened(children, era):
                    pass
            assert found.value.reason is reason
        assert children.pause > 0


PYTHON = (sys.executable, "-c", "from tests.support.servers.round_tools import server; server.run('stdio')")


@pytest.mark.parametrize(("pinned", "version"), [(None, SESSION), (Era.MODERN, MODERN)])
async def test_the_python_sdk_serves_the_era_of_the_first_request(pinned: Era | None, version: str) -> None:
    """G41."""
    async with children_of(PYTHON) as children, opened(children, KnownEra(pinned=pinned)) as found:
        assert found.version == version


@pytest.mark.long
async def test_python_sdk_1_and_2_eras(tmp_path: Path) -> None:
    """Version 1 has sessions only, version 2 both, in processes of their own."""
    async with children_of(REAL_SERVERS["sqlite"].argv(tmp_path)) as first:
        async with opened(first, KnownEra()) as found:
            assert found.version == SESSION
        with pytest.raises(UpstreamUnavailable) as refused:
            async with opened(first, KnownEra(pinned=Era.MODERN)):
                pass
        assert refused.value.reason is Reason.VERSION
    async with children_of(REAL_SERVERS["time"].argv(tmp_path)) as second:
        for pinned, version in ((None, SESSION), (Era.SESSION, SESSION), (Era.MODERN, MODERN)):
            async with opened(second, KnownEra(pinned=pinned)) as found:
                assert found.version == version


async def test_the_typescript_sdk_without_its_session_era() -> None:
    era = KnownEra()
    async with children_of(typescript_program()) as children, opened(children, era) as found:
        assert (found.version, era.learnt) == (MODERN, Era.MODERN)


async def test_the_typescript_sdk_1_has_sessions_only() -> None:
    """G41."""
    node_modules(CLIENTS)
    argv = (str(program("node")), str(CLIENTS / "ts1_server.mjs"))
    async with children_of(argv) as children:
        async with opened(children, KnownEra()) as found:
            assert found.version == SESSION
        with pytest.raises(UpstreamUnavailable) as refused:
            async with opened(children, KnownEra(pinned=Era.MODERN)):
                pass
        assert refused.value.reason is Reason.VERSION


async def test_a_modern_child_that_dies_loses_its_requests_and_then_the_lane(chameleon: Chameleon) -> None:
    chameleon.answers(tools_call="hangs", shop_close="dies")
    async with children_of(chameleon.argv) as children, pipe_lane(children) as front:
        calls = [front.call("a"), front.call("b")]
        calls.append(front.start("shop/close"))
        for key in calls:
            lost = await front.heard.loss(key)
            assert lost.ran
            assert "exit status 3" in lost.why
        await until(lambda: front.heard.closed)
        late = await front.heard.loss(front.start("tools/list"))
        assert not late.ran
        assert late.unavailable is not None
        assert late.unavailable.reason is Reason.DIED
        assert len(front.heard.closed) == 1


async def test_a_late_notification_of_a_subscription_that_is_over_is_dropped(chameleon: Chameleon) -> None:
    chameleon.answers()
    async with children_of(chameleon.argv) as children:
        heard, wire = list[str](), PipeWire(children)

        def take(method: str, params: object) -> None:
            heard.append(method)

        await wire.open({}, take, heard.append)
        wire.on_notification("notifications/tools/list_changed", {"_meta": {SUBSCRIPTION: 7}}, key=None)
        wire.on_notification("notifications/message", {"level": "info"}, key=None)
        assert heard == ["notifications/message"]
        await wire.aclose()


async def test_a_hung_child_is_replaced_though_a_subscription_is_open(chameleon: Chameleon) -> None:
    chameleon.answers(subscriptions_listen="hangs", tools_call="hangs", ping="hangs")
    async with children_of(chameleon.argv, ping_timeout=0.2) as children:
        ended, wire = list[str](), PipeWire(children)
        await wire.open({}, lambda method, params: None, ended.append)
        listening, call = (
            asyncio.create_task(wire.send(WireRequest(method=method, params={})))
            for method in ("subscriptions/listen", "tools/call")
        )
        await asyncio.sleep(0)
        call.cancel()
        await until(lambda: ended)
        assert ended == ["it did not answer a ping in 0.2 s, and was ended"]
        await listening
        await wire.aclose()
