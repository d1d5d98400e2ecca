"""The console beside real servers: calls as they go on, nodes that are killed, sessions that are ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clients.raw_http import Peer, SessionPeer
from tests.support.processes.console_process import Json, consoling
from tests.support.processes.serving import serving
from tests.support.servers.gate_file_tools import open_gate
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

GATE_FILE_TOOLS = "tests.support.servers.gate_file_tools:server"
#: Nodes tell their numbers with each beat: five in a lease.
OFTEN = ("--lease", "3s")


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url() if request.param == "postgres" else f"sqlite:{tmp_path / 'perdure.db'}"


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'perdure.db'}"


async def a_session(port: int) -> SessionPeer:
    return await Peer(port=port).session()


async def begin_put(client: SessionPeer, gate: Path) -> None:
    """Begin a call that tells two steps of its progress, and waits at the gate; its client leaves."""
    async with await client.begin_call("put", n=3, gate=str(gate), pauses=[2]) as call:
        await call.until_messages(2)


def the_call(session: Json) -> Json:
    """The call of a tool, behind that of the handshake."""
    [call] = [call for call in session["calls"] if call["method"] == "tools/call"]
    found: Json = call
    return found


def shows(state: str, attempt: int = 1) -> Callable[[Json], bool]:
    """Whether a picture of a session shows its call in this state."""

    def is_wanted(one: Json) -> bool:
        call = the_call(one["session"]) if one["what"] == "state" else {}
        return (call.get("state"), call.get("attempt")) == (state, attempt)

    return is_wanted


async def test_a_call_is_shown_while_it_runs_and_its_events_as_they_are_written(store: str, tmp_path: Path) -> None:
    async with (
        serving(GATE_FILE_TOOLS, "--store", store, *OFTEN) as served,
        consoling(store) as console,
        console.live("/api/live") as pulse,
    ):
        first = await pulse.what("tick")
        assert (first["events"], first["nodes"]) == (0, 1)
        client = await a_session(served.port)
        await begin_put(client, tmp_path / "gate")

        listed = await console.until("/api/sessions?tool=put&state=active", lambda found: found["items"])
        [item] = listed["items"]
        assert (item["id"], item["calls"], item["owner_name"], listed["total"]) == (client.id, 1, None, 1)
        assert (await console.get("/api/sessions?tool=pay"))["items"] == []
        for path in ("events?stream=%00", "events/%00/1"):
            assert (await console.refused(f"/api/sessions/{client.id}/{path}"))[0] == 404
        [node] = (await console.get("/api/nodes"))["nodes"]
        assert (node["id"], node["alive"], node["calls"]) == (item["home"], True, 1)
        assert node["since"] is None or abs(node["since"] - first["time"]) < 60

        stream = the_call(await console.get(f"/api/sessions/{client.id}"))["stream"]
        page = await console.get(f"/api/sessions/{client.id[:12]}/events?stream={stream}&limit=1")
        assert ([one["seq"] for one in page["items"]], page["next"]) == ([1], 1)
        rest = await console.get(f"/api/sessions/{client.id}/events?stream={stream}&after=1")
        assert ([one["seq"] for one in rest["items"]], rest["next"]) == ([2], None)

        async with console.live(f"/api/sessions/{client.id}/live") as view:
            assert shows("running")(await view.what("state"))
            open_gate(f"{tmp_path / 'gate'}.2")
            answer = await view.until(lambda one: bool(one.get("final")))
            assert answer["message"]["result"]["content"][0]["text"] == "counted to 3"
            await view.until(shows("answered"))
            assert [one["seq"] for one in view.seen if one["what"] == "event"] == [3, 4], "no event twice, none lost"
            await pulse.what("changed")
            told = await pulse.until(lambda one: bool(one["what"] == "tick" and one["latency"]))
            assert told["latency"]["of"] == "call"
            assert 0 < told["latency"]["p50"] <= told["latency"]["p99"]
            await pulse.until(lambda one: one.get("events") == 5 and one["calls_begun"] == one["calls_ended"] == 2)
            await client.delete()
            assert (await view.what("ended"))["reason"] == "client deleted"
            assert await view.ended()


async def test_a_killed_node_is_shown_as_dead_and_its_call_as_run_again_at_another(file: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with serving(GATE_FILE_TOOLS, "--store", file) as first, consoling(file) as console:
        client = await a_session(first.port)
        await begin_put(client, gate)
        [node] = (await console.until("/api/nodes", lambda found: found["nodes"]))["nodes"]
        assert node["state"] == "alive"
        await first.kill()
        await console.until("/api/nodes", lambda found: found["nodes"][0]["state"] == "dead")

        async with serving(GATE_FILE_TOOLS, "--store", file), console.live(f"/api/sessions/{client.id}/live") as view:
            again = await view.until(shows("running", attempt=2))
            name = the_call(again["session"])["stream"]
            [stream] = [one for one in again["session"]["streams"] if one["id"] == name]
            assert (stream["generation"], stream["generations"]) == (2, [{"generation": 1, "end": 2}])
            open_gate(f"{gate}.2")
            await view.until(lambda one: bool(one.get("final")))
            nodes = (await console.until("/api/nodes", lambda found: found["nodes"][-1]["state"] == "gone"))["nodes"]
            assert [one["alive"] for one in nodes] == [True, False]
            assert nodes[1]["id"] == node["id"]


async def test_a_session_is_ended_only_where_that_is_allowed_and_by_no_other_page(file: str) -> None:
    async with serving(GATE_FILE_TOOLS, "--store", file) as served:
        client = await a_session(served.port)
        path = f"/api/sessions/{client.id}/end"
        async with consoling(file) as console:
            assert await console.refused(path, method="POST") == (
                403,
                "this console only reads; start it with --allow-end to end sessions",
            )
            assert (await console.get("/api/store"))["allow_end"] is False
        async with consoling(file, "--allow-end") as console:
            # A page of another origin has no key, and is told by no answer that it may show a header.
            other = {"origin": "http://evil.example"}
            assert (await console.refused(path, method="POST", headers=other))[0] == 401
            wish = other | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
            asked = await console.ask(path, method="OPTIONS", headers=wish)
            assert (asked.status, asked.header("access-control-allow-headers")) == (401, None)
            assert (await client.ask("POST", client.call_body("where"))).status == 200, "it goes on"
            ended = await console.ask(path, method="POST", headers=console.known)
            assert (ended.status, ended.json["said"]) == (200, f"session {client.id} has ended: operator ended")
            assert (await client.call("where")).status == 404
            status, said = await console.refused(path, method="POST")
            assert (status, said) == (400, f"session {client.id} has ended already: operator ended")
