"""The client's state on disk: whole, private, of one holder, and honest when it cannot be kept (R12, T4, T8)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from pathlib import Path

import mcp_types as types
import pytest
from mcp.client.session import ClientRequestContext

import perdure
from perdure.client.memory import Ask, Running, State, StateFile, decode
from perdure.remote.endpoint import Handshake
from perdure.remote.state_file import BadState, encode
from tests.client.client_process import client_process
from tests.client.conftest import text
from tests.support.processes.serving import BASIC_TOOLS, serving
from tests.support.proxies.cutting_proxy import CuttingProxy
from tests.support.servers.in_process import Site, until
from tests.support.servers.tool_server import ToolServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(site: Site) -> str:
    return f"http://127.0.0.1:{site.port}/mcp"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.json"


def saved(path: Path) -> bytes:
    return path.read_bytes()


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)


def test_a_state_comes_back_as_it_was_written() -> None:
    state = State(
        url="http://a/mcp",
        start=3,
        handshake=Handshake(session="s", request={"capabilities": {}}, result={"protocolVersion": "2025-11-25"}),
        position="p",
        retry=500,
        calls={"3.1": Running(id="3.1", params={"name": "pay", "arguments": {"ä": 1}}, position="q")},
        asks={"7": Ask(message={"id": 7}, call="3.1")},
    )
    state.stick("logging/setLevel", {"level": "error"})
    assert decode(encode(state)) == state


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[]", b"{}", b'{"perdure":1}', b"\xff\xfe", b'{"perdure":"1"}', b"null", b"[" * 100_000),
        b'{"perdure":0,"url":"a"}',
    ],
)
def test_what_is_no_state_is_told(data: bytes) -> None:
    with pytest.raises(BadState):
        decode(data)


def test_every_cut_of_a_state_is_told_and_none_is_taken_for_a_state() -> None:
    data = encode(State(url="http://a/mcp", handshake=Handshake(session="s", request={}, result={})))
    for end in range(len(data)):
        with pytest.raises(BadState):
            decode(data[:end])


CALL: dict[str, object] = {"id": "1", "params": {}, "position": None, "retry": None}


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": True},
        {"start": -1},
        {"position": 7},
        {"retry": "soon"},
        {"retry": -5},
        {"sticky": {}},
        {"sticky": [1]},
        {"handshake": {"session": "s", "request": {}, "result": {}, "initialized": "yes"}},
        {"calls": {"1": {**CALL, "position": 7}}},
        {"calls": {"1": {**CALL, "retry": 1.5}}},
        {"calls": {"2": CALL}},
        {"asks": {"1": {"message": {}, "call": 1}}},
    ],
)
def test_a_state_with_a_value_of_another_kind_is_told_before_it_does_harm(wrong: dict[str, object]) -> None:
    whole = json.loads(encode(State(url="http://a/mcp")))
    decode(json.dumps({**whole, "calls": {"1": CALL}}).encode())
    with pytest.raises(BadState):
        decode(json.dumps({**whole, **wrong}).encode())


async def test_the_session_goes_on_without_a_handshake(shop: ToolServer, proxy: CuttingProxy, path: Path) -> None:
    async with perdure.connect(proxy.url, state=path) as client:
        session = client.session_id
        await client.call_tool("count", {"n": 1})
    posts = proxy.requests["POST"]
    async with perdure.connect(proxy.url, state=path) as client:
        assert client.session_id == session
        assert client.server_info is not None
        assert (client.server_info.name, client.protocol_version) == ("tools", "2025-11-25")
        assert client.pending() == []
        assert text(await client.call_tool("count", {"n": 2})) == "counted to 2"
    assert proxy.requests["POST"] - posts == 1  # the call
    assert proxy.requests["DELETE"] == 0


async def test_the_file_is_for_its_owner_alone_and_replaced_as_a_whole(url: str, path: Path) -> None:
    async with perdure.connect(url, state=path) as client:
        with path.open("rb") as before:
            await client.call_tool("count", {"n": 1})
            old = before.read()
    assert decode(old).start == 1  # who had it open still reads the whole of what it was
    assert old != saved(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert sorted(os.listdir(path.parent)) == ["agent.json", "agent.json.lock"]


async def test_a_running_call_is_on_disk_before_it_is_sent_and_gone_when_it_is_answered(
    shop: ToolServer, url: str, path: Path
) -> None:
    async with perdure.connect(url, state=path) as client:
        call = asyncio.create_task(client.call_tool("wait", {"gate": "g"}))
        await until(lambda: "waiting at g" in shop.seen)
        (found,) = json.loads(saved(path))["calls"].values()
        assert (found["params"]["name"], found["params"]["arguments"]) == ("wait", {"gate": "g"})
        shop.open("g")
        await call
        await until(lambda: json.loads(saved(path))["calls"] == {})


async def test_ended_with_the_block_if_the_user_wants(proxy: CuttingProxy, path: Path) -> None:
    async with perdure.connect(proxy.url, state=path, terminate_on_close=True) as client:
        first = client.session_id
    assert proxy.requests["DELETE"] == 1
    async with perdure.connect(proxy.url, state=path) as client:
        assert client.session_id != first


# Trouble with the file


async def test_an_unreadable_state_is_set_aside_and_a_new_session_begins(
    url: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T4."""
    write(path, b'{"perdure":1,"url":')
    with caplog.at_level(logging.WARNING, logger="perdure"):
        async with perdure.connect(url, state=path) as client:
            assert client.session_id is not None
            await client.list_tools()
    assert [vars(record)["action"] for record in caplog.records] == ["client.state_unreadable"]
    assert saved(path.with_name("agent.json.unreadable")) == b'{"perdure":1,"url":'
    assert decode(saved(path)).handshake is not None


async def test_an_unreadable_state_that_cannot_be_put_aside_is_told_and_let_go(url: str, path: Path) -> None:
    write(path, b"{")
    path.with_name("agent.json.unreadable").mkdir()
    path.with_name("agent.json.unreadable").joinpath("full").touch()
    for _ in range(2):
        with pytest.raises(perdure.StateUnusable, match="out of the way"):
            async with perdure.connect(url, state=path):
                raise AssertionError("it cannot be kept")


async def test_a_recorded_handshake_that_the_sdk_cannot_read_is_made_again(url: str, path: Path) -> None:
    async with perdure.connect(url, state=path) as client:
        first = client.session_id
    found = json.loads(saved(path))
    found["handshake"]["result"]["protocolVersion"] = "1999-01-01"
    write(path, json.dumps(found).encode())
    async with perdure.connect(url, state=path) as client:
        assert client.session_id not in (None, first)


def test_a_child_of_the_process_does_not_keep_the_state(path: Path) -> None:
    """A fork has the lock's file open as well, for as long as it lives."""
    first, reading, writing = StateFile(path), *os.pipe()
    first.open()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(0)
    try:
        first.close()
        StateFile(path).open()
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)


async def test_a_copied_state_does_not_repeat_ids(site: Site, url: str, path: Path, shop: ToolServer) -> None:
    """Two clients of one session that count alike: each has a part of the id that is its own."""
    async with perdure.connect(url, state=path) as client:
        await client.list_tools()
    copy = path.with_name("copy.json")
    write(copy, saved(path))
    async with perdure.connect(url, state=path) as one, perdure.connect(url, state=copy) as two:
        assert one.session_id == two.session_id
        waiting = [asyncio.create_task(client.call_tool("wait", {"gate": "g"})) for client in (one, two)]
        await until(lambda: shop.seen == ["waiting at g"] * 2)
        shop.open("g")
        assert [text(await call) for call in waiting] == ["went through g"] * 2


async def test_two_clients_never_share_a_state(url: str, path: Path) -> None:
    """R13 for programs: the second is refused; it does not get a session without memory in silence."""
    async with perdure.connect(url, state=path) as first:
        with pytest.raises(perdure.StateInUse, match="another client uses"):
            async with perdure.connect(url, state=path):
                raise AssertionError("two clients with one state")
        await first.list_tools()
    async with perdure.connect(url, state=path) as again:
        await again.list_tools()


async def test_two_processes_never_share_a_state_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    state = tmp_path / "agent.json"
    async with serving(BASIC_TOOLS, "--store", "memory:") as served:
        async with client_process(served.url, state, "gate", name="shut") as holder:
            await holder.line()
            with pytest.raises(perdure.StateInUse):
                async with perdure.connect(served.url, state=state):
                    raise AssertionError("two clients with one state")
            # It says its line before it calls, and before the handshake is finished.
            await until(lambda: all(part in state.read_bytes() for part in (b'"shut"', b'"initialized":true')))
            await holder.kill()
        async with client_process(served.url, state) as heir:
            assert await heir.line() == {
                "session": holder.said[0]["session"],
                "pending": [["gate", {"name": "shut"}]],
            }


async def test_a_state_of_another_server_is_refused(url: str, path: Path) -> None:
    """T9: a session id is never offered to another address."""
    async with perdure.connect(url, state=path):
        pass
    with pytest.raises(perdure.StateUnusable, match="belongs to"):
        async with perdure.connect(url + "/other", state=path):
            raise AssertionError("another address")
    async with perdure.connect(url, state=path) as client:  # and the lock is free again
        await client.list_tools()


async def test_a_state_of_a_newer_release_is_left_alone(url: str, path: Path) -> None:
    write(path, b'{"perdure": 99}')
    with pytest.raises(perdure.StateUnusable, match="form 99"):
        async with perdure.connect(url, state=path):
            raise AssertionError("a newer form")
    assert saved(path) == b'{"perdure": 99}'


async def test_a_folder_that_is_not_there_is_told_at_the_start(url: str, tmp_path: Path) -> None:
    with pytest.raises(perdure.StateUnusable, match="cannot be used"):
        async with perdure.connect(url, state=tmp_path / "missing" / "agent.json"):
            raise AssertionError("nowhere to keep it")


async def test_a_link_or_a_file_that_others_may_write_is_not_trusted(url: str, path: Path) -> None:
    """T8."""
    real = path.with_name("real.json")
    write(real, encode(State(url=url)))
    os.symlink(real, path)
    with pytest.raises(perdure.StateUnusable):
        async with perdure.connect(url, state=path):
            raise AssertionError("a link")
    os.unlink(path)
    os.chmod(real, 0o622)
    with pytest.raises(perdure.StateUnusable, match="others may write"):
        async with perdure.connect(url, state=real):
            raise AssertionError("a file of everybody's")


async def test_a_state_that_can_no_longer_be_written_stops_nothing(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise 7 for the client: logged once, and once more when it is over."""
    folder = tmp_path / "kept"
    os.mkdir(folder)
    path = folder / "agent.json"
    aside = tmp_path / "aside"
    with caplog.at_level(logging.INFO, logger="perdure"):
        async with perdure.connect(url, state=path) as client:
            os.rename(folder, aside)
            for _ in range(3):
                assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"
            os.rename(aside, folder)
            await client.call_tool("count", {"n": 1})
    actions = [
        vars(record)["action"] for record in caplog.records if vars(record).get("action", "").startswith("client")
    ]
    assert actions == ["client.state_unwritable", "client.state_written"]
    assert decode(saved(path)).handshake is not None


async def test_other_capabilities_begin_a_new_session_and_earlier_calls_are_reported(
    shop: ToolServer, url: str, path: Path
) -> None:
    """A26: both sides are held to what they agreed on."""

    async def answer(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
        return types.ElicitResult(action="decline")

    async with perdure.connect(url, state=path) as client:
        first = client.session_id
        async with asyncio.TaskGroup() as group:
            call = group.create_task(client.session.send_request(_call("wait", gate="g"), types.CallToolResult))
            await until(lambda: "waiting at g" in shop.seen)
            kept = saved(path)
            shop.open("g")
            await call
    write(path, kept)  # as if the process had been killed in the middle
    async with perdure.connect(url, state=path, elicitation_callback=answer) as client:
        assert client.session_id != first
        (left,) = client.pending()
        with pytest.raises(perdure.OutcomeUnknown, check=lambda error: "other capabilities" in error.reason) as unknown:
            await left
        assert (unknown.value.tool, unknown.value.arguments) == ("wait", {"gate": "g"})
        assert client.pending() == []


def _call(tool: str, **arguments: object) -> types.CallToolRequest:
    return types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=arguments))


async def test_a_password_in_the_address_is_not_written(site: Site, path: Path) -> None:
    async with perdure.connect(f"http://ann:secret@127.0.0.1:{site.port}/mcp", state=path) as client:
        await client.list_tools()
    assert b"secret" not in saved(path)
    async with perdure.connect(f"http://ann:newer@127.0.0.1:{site.port}/mcp", state=path) as again:
        await again.list_tools()


async def test_a_handshake_that_was_not_finished_is_made_again(site: Site, url: str, path: Path) -> None:
    """The process died between its two halves: it is not known whether both sides have accepted it."""
    async with perdure.connect(url, state=path) as client:
        first = client.session_id
    state = decode(saved(path))
    assert state.handshake is not None
    state.handshake.initialized = False
    write(path, encode(state))
    async with perdure.connect(url, state=path) as client:
        assert client.session_id != first
        assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"


class Shelf:
    """A store of the user's own."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.is_open = False
        self.fails = False

    def open(self) -> bytes | None:
        if self.is_open:
            raise perdure.StateInUse
        self.is_open = True
        return self.data

    def save(self, data: bytes) -> None:
        if self.fails:
            raise LookupError("no bucket")
        self.data = data

    def set_aside(self) -> str:
        return "nowhere"

    def close(self) -> None:
        self.is_open = False


async def test_a_store_that_fails_in_its_own_way_stops_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    async with perdure.connect(url, state=shelf) as client:
        shelf.fails = True
        assert text(await client.call_tool("count", {"n": 1})) == "counted to 1"
    assert "client.state_unwritable" in [vars(record).get("action") for record in caplog.records]


async def test_a_store_of_the_users_own(url: str) -> None:
    shelf = Shelf()
    async with perdure.connect(url, state=shelf) as client:
        first = client.session_id
    async with perdure.connect(url, state=shelf) as client:
        assert client.session_id == first
    assert not shelf.is_open
