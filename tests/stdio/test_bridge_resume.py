"""The host starts the bridge again and again, and the session goes on."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure.stdio.identity import Identity, here
from perdure.stdio.resume_slot import Target, open_slot
from perdure.store import SqliteStore
from tests.stdio.served_hosts import (
    FIRST,
    HOST,
    REJECTED,
    RESUMED,
    ServedHost,
    noted_calls,
    question,
    reply,
    sentences,
    serving_host,
)
from tests.stdio.stdio_bridges import PATIENCE, HostedBridge, a_host, text_of
from tests.support.proxies.cutting_proxy import cutting_proxy
from tests.support.servers.in_process import Site, serve, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


async def test_restarts_between_calls_and_in_the_middle_of_them(folder: Path) -> None:
    """T3, T5, T6, T10: one session, whatever way each instance ends; each result is given or reported exactly once."""
    dice = random.Random(12)
    async with serving_host(folder, max_calls=200, max_readers=500) as hosted:
        reported: list[str] = []
        left: list[str] = []
        for number in range(12):
            bridge = await hosted.host.session()
            await _reported(bridge, len(left))
            reported += [report["result"]["content"][0]["text"] for report in bridge.reports()]
            assert (
                text_of(await bridge.answer(bridge.begin("tools/call", _count(number), id=1))) == f"counted to {number}"
            )
            left = [f"g{number}.{n}" for n in range(dice.randrange(3))]
            for gate in left:
                bridge.begin_call("wait", gate=gate)
                await hosted.saw(f"waiting at {gate}", bridge)
            await _noted(hosted, len(left))
            assert (await sentences(bridge))[0] == (RESUMED if number else FIRST)  # a killed process writes no more
            how = dice.choice([signal.SIGKILL, signal.SIGTERM, None])
            await (bridge.end() if how is None else bridge.kill(how))
            for gate in left:
                hosted.tool_server.open(gate)
        assert len(hosted.sessions) == 1
        assert sorted(reported) == sorted(set(reported))
        assert all(text.startswith("went through") for text in reported)
        [token] = hosted.host.tokens.glob("*/token-*")
        assert token.name.split("-")[1] == str(hosted.host.pid)
        assert len(token.read_text()) == 64


async def _noted(hosted: ServedHost, count: int) -> None:
    """Wait until the notes have so many calls, each with a position: none of those that have ended."""

    def are_all() -> bool:
        calls = noted_calls(hosted)
        return len(calls) == count and all(call["position"] for call in calls)

    try:
        async with asyncio.timeout(PATIENCE):
            await until(are_all)
    except TimeoutError:
        raise AssertionError(f"{noted_calls(hosted)} are noted, where {count} calls run") from None


async def _reported(bridge: HostedBridge, count: int) -> None:
    await bridge.until(lambda: len(bridge.reports()) >= count, "what was left")


async def _noticed(bridge: HostedBridge) -> None:
    await bridge.until(lambda: bool(bridge.notices()), "the notice of its own session")


def _count(n: int) -> dict[str, object]:
    return {"name": "count", "arguments": {"n": n}}


async def test_what_the_next_instance_finds(folder: Path) -> None:
    """Level and subscriptions are kept; missed notices, questions and results arrive after the handshake."""
    async with serving_host(folder) as hosted:
        first = await hosted.host.session(elicitation={})
        await first.request("logging/setLevel", {"level": "info"})
        await first.request("resources/subscribe", {"uri": "notice://7"})
        running = first.begin_call("count", token="t", n=4, gate="c", pauses=[2])
        await first.until(lambda: len(first.progress()) == 2, "two of four")
        asking = first.begin_call("ask", question="Still there?")
        old = await question(first)
        await first.call("announce", n=2)
        await first.until(lambda: first.notices() == [1, 2], "two notices")
        for _ in range(2):  # the second one is read when what was written before the first one's answer is noted
            await first.request("ping")
        await first.kill()
        # No bridge runs; things happen.
        await hosted.tool_server.update("notice://7")
        hosted.tool_server.open("c/2")
        await hosted.saw("counted 4", first)

        second = await hosted.host.session(elicitation={})
        new = await question(second)
        assert (new["params"]["message"], new["id"] != old["id"]) == ("Still there?", True)
        await second.until(lambda: len(second.reports()) == 1, "a report")
        assert second.reports() == [
            {
                "message": "A call of an earlier process has ended",
                "method": "tools/call",
                "requestId": running,
                "tool": "count",
                "result": {
                    "content": [{"type": "text", "text": "counted to 4"}],
                    "isError": False,
                    "structuredContent": {"result": "counted to 4"},
                },
            }
        ]
        assert second.order[0] == "answer 0"  # nothing comes before the answer to initialize
        await second.until(lambda: second.notices() == [7], "what was missed, and nothing twice")
        assert second.progress() == []  # its token means nothing to this instance
        # The question is answered by the bridge that runs now, and its call is reported too.
        reply(second, new, "yes")
        await second.until(lambda: len(second.reports()) == 2, "the other report")
        assert second.reports()[1]["result"]["structuredContent"] == {"result": "yes"}
        assert (second.reports()[1]["requestId"], asking) == (asking, asking)
        # Ids begin again: the first call of this instance has the id of an earlier one, and an answer of its own.
        assert text_of(await second.answer(second.begin("tools/call", _count(1), id=running))) == "counted to 1"
        await hosted.tool_server.update("notice://7")
        await second.until(lambda: second.notices() == [7, 7], "the subscription lives")
        assert hosted.tool_server.levels == ["info"]
        assert len(hosted.sessions) == 1


async def test_a_host_that_wants_fewer_messages_is_not_sent_reports(folder: Path) -> None:
    async with serving_host(folder) as hosted:
        first = await hosted.host.session()
        await first.request("logging/setLevel", {"level": "warning"})
        first.begin_call("wait", gate="w")
        await hosted.saw("waiting at w", first)
        await first.kill()
        hosted.tool_server.open("w")
        second = await hosted.host.session()
        await second.logged("the call of wait that an earlier process made has ended")
        await second.request("ping")
        assert second.reports() == []


async def test_a_server_without_logging_has_its_results_reported_too(folder: Path) -> None:
    """The bridge declares logging in its place, and keeps the level."""
    async with serving_host(folder, logs=False) as hosted:
        first = await hosted.host.start()
        offered = await first.handshake()
        assert offered["capabilities"]["logging"] == {}
        assert offered["capabilities"]["resources"]["subscribe"] is True  # what the server declares stays
        refused = await first.request("logging/setLevel", {"level": "loud"})
        assert (refused["error"]["code"], "debug, info" in refused["error"]["message"]) == (-32602, True)
        assert (await first.request("logging/setLevel", {"level": "debug"}))["result"] == {}
        first.begin_call("wait", gate="w")
        await hosted.saw("waiting at w", first)
        await first.kill()
        hosted.tool_server.open("w")
        second = await hosted.host.session()
        await _reported(second, 1)
        assert (await second.request("logging/setLevel", {"level": "error"}))["result"] == {}
        second.begin_call("wait", gate="v")
        await hosted.saw("waiting at v", second)
        await second.kill()
        hosted.tool_server.open("v")
        third = await hosted.host.session()
        await third.logged("the call of wait that an earlier process made has ended")
        await third.request("ping")
        assert third.reports() == []
        assert hosted.tool_server.levels == []


async def test_hosts_and_instances_keep_sessions_of_their_own(folder: Path) -> None:
    """T7, T9: two hosts, and four instances of one of them, each of which is restarted while the others run."""
    async with serving_host(folder) as hosted, a_host(folder, hosted.site.url) as other:
        alone = await other.session()
        together = list(await asyncio.gather(*(hosted.host.session() for _ in range(4))))
        for number, bridge in enumerate((*together, alone)):
            await bridge.request("resources/subscribe", {"uri": f"notice://{number}"})
        for how in (signal.SIGKILL, signal.SIGTERM):
            for number in range(4):
                await together[number].kill(how)
                await hosted.tool_server.update(f"notice://{number}")
                together[number] = await hosted.host.session()
                await _noticed(together[number])
                assert await sentences(together[number]) == [RESUMED]
                assert together[number].notices() == [number]
        await hosted.tool_server.update("notice://4")
        await alone.until(lambda: alone.notices() == [4], "its own notice")
        assert len(hosted.sessions) == 5


async def test_named_instances_that_are_restarted_together_get_their_own_sessions(folder: Path) -> None:
    """T9: started again in the order in which they stopped, in the other one, and all at once."""
    names = ("one", "two", "three")
    async with serving_host(folder) as hosted:
        bridges = {name: await hosted.host.session("--instance", name) for name in names}
        for number, bridge in enumerate(bridges.values()):
            await bridge.request("resources/subscribe", {"uri": f"notice://{number}"})
        for order in (names, names[::-1], None):
            for bridge in bridges.values():
                await bridge.end()
            for number in range(3):
                await hosted.tool_server.update(f"notice://{number}")
            starting = [(name, hosted.host.session("--instance", name)) for name in order or names]
            if order is None:
                bridges = dict(zip(names, await asyncio.gather(*(start for _, start in starting)), strict=True))
            else:
                bridges = {name: await start for name, start in starting}
            for number, name in enumerate(names):
                await _noticed(bridges[name])
                assert bridges[name].notices() == [number]
        assert len(hosted.sessions) == 3


async def test_options_that_only_look_into_it_do_not_cost_the_session(folder: Path) -> None:
    """T9: the options by which bridges differ. The log names the process that counts as the host (T2)."""
    async with serving_host(folder) as hosted:
        await (await hosted.host.session()).end()
        log = folder / "a.log"
        for options in (("--log-level", "debug", f"--log-file={log}"), ("--patience", "9s"), ()):
            bridge = await hosted.host.session(*options)
            await bridge.logged(RESUMED)
            await bridge.logged(f"{HOST}{hosted.host.pid} (python")
            await bridge.end()
        other = await hosted.host.session("--instance", "other")
        assert await sentences(other) == [FIRST]
        assert RESUMED in log.read_text()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in the order of their stops", "in the other one"])
async def test_instances_that_nothing_tells_apart_never_get_each_others_sessions(
    folder: Path, order: tuple[int, int]
) -> None:
    """T7: both begin fresh sessions, and are resumed in these."""
    async with serving_host(folder) as hosted:
        bridges = [await hosted.host.session() for _ in range(2)]
        for number, bridge in enumerate(bridges):
            await bridge.request("resources/subscribe", {"uri": f"notice://{number}"})
        for bridge in bridges:
            await bridge.end()
        for number in order:
            bridges[number] = await hosted.host.session()
            assert RESUMED not in await sentences(bridges[number])
        assert len(hosted.sessions) == 4
        for number, bridge in enumerate(bridges):
            await bridge.request("resources/subscribe", {"uri": f"notice://{number + 2}"})
        await bridges[0].kill()
        again = await hosted.host.session()
        assert await sentences(again) == [RESUMED]
        for number in range(4):
            await hosted.tool_server.update(f"notice://{number}")
        await _noticed(again)
        await _noticed(bridges[1])
        assert (again.notices(), bridges[1].notices()) == ([2], [3])


async def test_another_target_of_the_same_host_gets_no_token_of_this_one(folder: Path) -> None:
    """T9: the same server by another spelling is another target."""
    async with serving_host(folder) as hosted:
        await (await hosted.host.session()).end()
        elsewhere = await hosted.host.start(url=hosted.site.url + "/")
        await elsewhere.handshake()
        assert await sentences(elsewhere) == [FIRST]
        await elsewhere.end()
        back = await hosted.host.session()
        assert await sentences(back) == [RESUMED]
        assert len(hosted.sessions) == 2
        assert len(list(hosted.host.tokens.glob("*/token-*"))) == 2


async def test_a_stolen_token_is_worth_nothing_to_another_host(folder: Path) -> None:
    """T10, T12: the thief is rejected and learns nothing; the owner goes on. A retired token ends the chain, not the
    session of the attached bridge, which gets a new chain."""
    async with serving_host(folder) as hosted, a_host(folder / "thief", hosted.site.url) as thief:
        thief.folder.mkdir()
        owner = await hosted.host.session()
        stolen = next(hosted.host.tokens.glob("*/token-*")).read_text()
        # The thief begins a session of its own, then puts the stolen token in its place.
        await (await thief.session()).end()
        own = next(thief.tokens.glob("*/token-*"))
        own.write_text(stolen)
        robbing = await thief.session()
        assert await sentences(robbing) == [REJECTED]
        assert len(hosted.sessions) == 3  # it got a fresh one
        # The owner has not noticed anything, and resumes.
        await owner.kill()
        owner = await hosted.host.session()
        assert await sentences(owner) == [RESUMED]
        assert await owner.call("count", n=1) == "counted to 1"
        # Its retired token, offered as if by itself: the chain is revoked, and the owner asks for another one.
        now = next(hosted.host.tokens.glob("*/token-*"))
        (folder / "copy").mkdir(0o700)
        await _offer_again(hosted, stolen)
        await until(lambda: now.read_text()[:20] not in (stolen[:20], ""))
        await owner.logged("another process used a resume token of this session")
        await owner.kill()
        again = await hosted.host.session()
        assert await sentences(again) == [RESUMED]
        assert len(hosted.sessions) == 3
        assert all("resume_revoked" not in message["method"] for message in owner.heard)


async def _offer_again(hosted: ServedHost, retired: str) -> None:
    """What a thief would send who has copied everything, the holder's name too."""
    seen = here()
    host = None if seen is None else seen.look(hosted.host.pid)
    assert seen is not None
    assert host is not None
    identity = Identity(pid=host.pid, start=host.start, boot=seen.boot, space=seen.space)
    target = Target(url=hosted.host.url, arguments=["stdio", hosted.host.url], directory=Path.cwd())
    slot = await open_slot(hosted.host.folder / "copy", identity, target)
    response = await hosted.site.http.post(
        hosted.site.url.replace("/mcp", "/resume/resume"), json={"token": retired, "holder": slot.holder}
    )
    slot.release()
    assert (response.status_code, response.json()) == (403, {"error": "rejected"})


async def test_a_session_that_cannot_go_on_is_replaced(folder: Path) -> None:
    """Ended meanwhile, or a host with other capabilities: a fresh session, resumable as any."""
    async with serving_host(folder) as hosted:
        first = await hosted.host.session()
        first.begin_call("wait", gate="w")
        await hosted.saw("waiting at w", first)
        await first.kill()
        [ended] = hosted.sessions
        await hosted.site.http.delete(hosted.site.url, headers={"mcp-session-id": ended})
        second = await hosted.host.session()
        assert await sentences(second) == [REJECTED]
        assert await second.call("count", n=1) == "counted to 1"
        assert second.reports() == []
        await second.end()
        other = await hosted.host.session(roots={})
        [said] = await sentences(other)
        assert said.endswith("; a new one has begun")
        assert len(hosted.sessions) == 2
        await other.end()
        again = await hosted.host.session(roots={})
        assert await sentences(again) == [RESUMED]
        assert len(hosted.sessions) == 2


async def test_the_server_is_restarted_in_between(folder: Path) -> None:
    """Without a bridge, and under one: it waits, and continues in the same session."""
    async with cutting_proxy(0) as proxy, a_host(folder, proxy.url) as host:

        @asynccontextmanager
        async def serving() -> AsyncIterator[Site]:
            store = SqliteStore(str(folder / "log.db"))
            async with serve(ToolServer(logs=True, subscribes=True).server, store=store, retry=0.05) as site:
                proxy.upstreams = (site.port,)
                proxy.accept()
                yield site
                proxy.refuse()

        async with serving() as site:
            bridge = await host.session()
            [session] = site.app.session_ids()
            await bridge.end()
        async with serving() as site:
            bridge = await host.session()
            assert await sentences(bridge) == [RESUMED]
            assert site.app.session_ids() == [session]
        late = bridge.begin("tools/list")  # no server listens
        await bridge.logged("cannot be reached, and is tried again")
        async with serving() as site:
            assert "tools" in (await bridge.answer(late))["result"]
            assert site.app.session_ids() == [session]
            await bridge.end()
