"""What the console shows of a store that no server uses, whom it lets in, and what it does when the store is lost."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from perdure._core.chains import Chain
from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId
from perdure._core.principals import token_principal
from perdure._core.states import CallState, SessionState
from perdure.console.auth import MIN_TOKEN
from perdure.console.http import MAX_VIEWS
from perdure.console.sessions import MAX_SHOWN, StoreView
from perdure.store import SqliteStore, notes
from perdure.store.records import AskRecord, CallRecord, Event, SessionRecord, StreamRecord
from perdure.store.steps import Append, CallEnd, OpenAsk, OpenStream, PutSession, Step, Trim
from tests.support.clients.raw_http import Answer
from tests.support.processes.console_process import Console, consoling
from tests.support.processes.starting import start

pytestmark = pytest.mark.anyio

NODE = NodeId("nodeAAAAxxxxxxxxxxxxxx")
ID = SessionId("session-of-alice".ljust(43, "x"))
CALL = StreamId("callxxxxxxxxxxxxxxxxxx")
NOON = 1_800_000_000.0
SECRET = "sealed-by-the-server"


def a_session(id_: str = ID, **more: Any) -> SessionRecord:
    values: dict[str, Any] = {
        "id": SessionId(id_),
        "owner": token_principal("alice", None, "alice"),
        "state": SessionState.ACTIVE,
        "version": "2025-11-25",
        "client_params": b'{"clientInfo":{"name":"half a character: \\ud83d","version":NaN}}',
        "result": b"{}",
        "initialized": True,
        "sticky": (),
        "incarnation": 1,
        "standalone": StreamId(f"standalone-{id_}"),
        "created": NOON - 60,
        "active": NOON,
    }
    return SessionRecord(**(values | more))


async def fill(store: SqliteStore) -> None:
    """A session whose call has sent five events, of which two are forgotten, a large one and one with a secret."""
    fence: Fence = await store.join(NODE)

    async def commit(*steps: Step) -> None:
        refusals = await store.commit(steps)
        assert not any(refusals), refusals

    stream = StreamRecord(id=CALL, session=ID, kind=Kind.CALL, node=NODE, fence=fence, opened=NOON)
    request = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"bake"}}'
    row = CallRecord(
        session=ID, incarnation=1, request_id=7, stream=CALL, method="tools/call", request=request, principal="alice"
    )
    steps = [{"method": "notifications/progress", "params": {"progress": step}} for step in (1, 2, 3)]
    messages: list[object] = [
        *steps,
        {"method": "notifications/message", "params": {"data": "bread " * (MAX_SHOWN // 4)}},
        {"id": 7, "result": {"resultType": "input_required", "requestState": SECRET, "content": [{"requestState": 1}]}},
    ]
    events = tuple(Event(n, NOON + n, json.dumps(m).encode(), n == 5) for n, m in enumerate(messages, 1))
    end = CallEnd(incarnation=1, request_id=7, state=CallState.ANSWERED)
    ask = AskRecord(
        session=ID,
        id="ask-1",
        stream=CALL,
        request=json.dumps({"params": {"requestState": SECRET}}).encode(),
        node=NODE,
    )
    await commit(PutSession(record=a_session()), OpenStream(record=stream, calls=(row,)), OpenAsk(record=ask))
    await commit(Append(stream=CALL, fence=fence, events=events, ends=(end,), seal=True), Trim(stream=CALL, through=2))
    chain = Chain(name="chain-name-secret", session=ID, holder="alice", current="current-secret", next="next-secret")
    assert await notes.put_chain(store, chain)
    await notes.keep(store, "request-state", b"ring-secret")


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    async with SqliteStore(str(tmp_path / "perdure.db")) as store:
        await fill(store)
    return tmp_path


@pytest.fixture
async def console(folder: Path) -> AsyncIterator[Console]:
    async with consoling("sqlite:perdure.db", cwd=folder) as console:
        yield console


async def test_a_session_is_shown_with_its_gap_its_large_message_and_no_secret(console: Console, folder: Path) -> None:
    before = hashlib.sha256((folder / "perdure.db").read_bytes()).hexdigest()
    said: list[str] = []

    async def get(path: str) -> dict[str, Any]:
        answer = await console.ask(path)
        assert answer.status == 200, answer
        said.append(answer.body.decode())
        found: dict[str, Any] = answer.json
        return found

    about = await get("/api/store")
    assert (about["store"], about["degraded"], about["problems"]) == ("sqlite:perdure.db", None, [])
    assert (about["events"], about["events_exact"], about["oldest"]) == (3, True, NOON + 3)
    assert about["counts"] == {"sessions": 1, "calls": 0, "ended": 0, "running": 0}
    assert about["size_bytes"] >= (folder / "perdure.db").stat().st_size
    [node] = (await get("/api/nodes"))["nodes"]
    assert (node["id"], node["state"], node["readers"], node["since"]) == (NODE, "dead", None, None)
    [item] = (await get("/api/sessions?owner=alice"))["items"]
    assert (item["id"], item["owner_name"], item["active"]) == (ID, "alice", NOON + 5)  # with its newest event
    session = await get(f"/api/sessions/{ID[:8]}")
    assert (session["id"], session["resume_token"], session["calls"][0]["state"]) == (ID, True, "answered")

    page = await get(f"/api/sessions/{ID}/events?stream={CALL}")
    gap, first, large, answer = page["items"]
    assert (gap["what"], gap["first"], gap["last"]) == ("gap", 1, 2)
    assert (first["seq"], first["cut"], first["message"]["params"]) == (3, False, {"progress": 3})
    assert (large["cut"], len(large["message"]), large["bytes"] > MAX_SHOWN) == (True, MAX_SHOWN, True)
    assert (answer["final"], answer["message"]["result"]["requestState"]) == (True, "(not shown)")
    whole = await get(f"/api/sessions/{ID}/events/{CALL}/4")
    assert whole["message"]["params"]["data"] == "bread " * (MAX_SHOWN // 4)
    async with console.live(f"/api/sessions/{ID}/live?last=2") as view:
        await view.until(lambda one: one.get("seq") == 5)
        assert [one["what"] for one in view.seen] == ["state", "opened", "event", "event"]
        said.append(json.dumps(view.seen))
    for secret in (SECRET, "chain-name-secret", "current-secret", "next-secret", "ring-secret"):
        assert secret not in "".join(said)
    assert hashlib.sha256((folder / "perdure.db").read_bytes()).hexdigest() == before


async def test_what_is_wrong_with_a_request_is_said_in_one_sentence(console: Console) -> None:
    session = f"/api/sessions/{ID}"
    for path, status, sentence in (
        ("/api/sessions?limit=201", 400, "limit is '201'; allowed is a whole number from 1 to 200"),
        ("/api/sessions?state=lost", 400, "state is 'lost'; allowed are "),
        ("/api/sessions?kind=cat", 400, "kind is 'cat'; allowed are session, task, call"),
        ("/api/sessions?offset=1001", 400, "offset is '1001'; allowed is a whole number from 0 to 1000"),
        ("/api/sessions?active_after=nan", 400, "active_after is 'nan'; allowed are seconds since 1970"),
        ("/api/sessions?ownr=alice", 400, "'ownr' is not a parameter; known are active_after, "),
        (f"/api/sessions?owner={'x' * 201}", 400, "owner has 201 characters; allowed are 200"),
        ("/api/sessions/nobody-here", 404, "no session or task 'nobody-here' in the store"),
        ("/api/sessions/short", 400, "'short' is too short; give at least 8 characters of the id"),
        (f"{session}/events", 400, "stream is missing; give the id of one of the session's streams"),
        (f"{session}/events?stream=other", 404, "the session has no stream other"),
        (f"{session}/events?stream={CALL}&limit=501", 400, "limit is '501'; allowed is a whole number from 1 to 500"),
        (f"{session}/events/{CALL}/1", 404, "stream callxxxx has no event 1: it was forgotten, or it is not written"),
        (f"{session}/live?last=1001", 400, "last is '1001'; allowed is a whole number from 0 to 1000"),
        ("/api/nothing", 404, "there is no such address here"),
        (f"{session}/end", 405, "this address does not take that method"),
    ):
        seen, said = await console.refused(path)
        assert (seen, said[: len(sentence)]) == (status, sentence)
    assert (await console.get(f"/api/sessions?limit=200&owner={'x' * 200}"))["items"] == []


async def test_only_the_caller_with_the_token_is_let_in_and_only_under_a_known_host(console: Console) -> None:
    token, port = console.token, console.port
    entered = await console.ask("/api/enter", method="POST")
    key = entered.json["key"]
    assert (entered.status, token in key) == (200, False)
    near = key[:-1] + ("0" if key[-1] != "0" else "1")
    for wrong in ("", "wrong", near, key[:-1], key + "0", token[:-1], token.upper(), "\xe9"):
        for path, method in (("/api/store", "GET"), ("/api/enter", "POST"), (f"/api/sessions/{ID}/end", "POST")):
            status, said = await console.refused(path, method=method, headers={"authorization": f"Bearer {wrong}"})
            assert (status, said.endswith("open the newest address that `perdure console` has printed")) == (401, True)
    for headers in (
        {},
        {"authorization": token},
        {"authorization": f"Basic {key}"},
        {"cookie": f"perdure_console={key}"},
    ):
        assert (await console.refused("/api/store", headers=headers))[0] == 401

    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[::1].evil.example", ""):
        status, said = await console.refused("/api/store", headers=console.known | {"host": host or " "})
        assert (status, "--allowed-host" in said) == (421, True)
    for host in (f"localhost:{port}", f"[::1]:{port}", "127.0.0.1"):
        assert (await console.ask("/api/store", headers=console.known | {"host": host})).status == 200
    for second in ("evil.example", "127.0.0.1"):
        assert (await console.refused("/api/store", headers=console.known | {"Host": second}))[0] == 421

    page = await console.ask("/", headers={})
    assert (page.status, page.header("cache-control")) == (200, "no-cache")
    shown = await console.ask("/api/store", headers={"authorization": f"Bearer {key}"})
    assert shown.status == 200
    assert (shown.header("content-security-policy") or "").startswith("default-src 'self';")
    assert (shown.header("x-content-type-options"), shown.header("cache-control")) == ("nosniff", "no-store")


async def test_cookies_are_neither_set_nor_read(console: Console) -> None:
    """A browser sends the cookies of one program on 127.0.0.1 to all others there: an odd one must lock nobody out, a
    long one must not cost time, and none of ours may reach another program."""
    answers = [await console.ask("/api/enter", method="POST"), await console.ask("/", headers={})]
    for cookie in ('a="' + "\\" * 60_000 + '"', "a[]=b; c", "=;;", 'x="'):
        answers.append(await console.ask("/api/store", headers=console.known | {"cookie": cookie}))
    assert [(answer.status, answer.header("set-cookie")) for answer in answers] == [(200, None)] * 6
    assert psutil.Process(console.process.pid).cpu_times().user < 4  # seconds; the parser of Python 3.11 takes nine


async def test_the_printed_address_lets_one_browser_in_and_is_followed_by_the_next(folder: Path) -> None:
    async def enter(ticket: str) -> Answer:
        return await running.ask("/api/enter", method="POST", headers={"authorization": f"Bearer {ticket}"})

    async with consoling("sqlite:perdure.db", cwd=folder, has_ticket=True) as running:
        assert running.process.stdout is not None
        assert (await running.refused("/api/store"))[0] == 401  # it is for a page, which gives it for a key
        keys = [(await enter(running.token)).json["key"]]
        for _ in range(2):
            assert (await enter(running.token)).status == 401
        line = (await running.process.stdout.readline()).decode()
        keys.append((await enter(line.strip().rpartition("?token=")[2])).json["key"])
        assert b"the next one needs http://127.0.0.1:" in await running.process.stdout.readline()
        for key in keys:
            assert (await running.ask("/api/store", headers={"authorization": f"Bearer {key}"})).status == 200


async def test_a_stream_of_another_session_is_not_shown_as_this_ones(console: Console, folder: Path) -> None:
    other = "another-session".ljust(43, "x")
    async with SqliteStore(str(folder / "perdure.db")) as store:
        assert not any(await store.commit([PutSession(record=a_session(other))]))
    assert (await console.get(f"/api/sessions/{ID}/events/{CALL}/5"))["final"] is True
    for path in (f"/events?stream={CALL}", f"/events/{CALL}/5"):
        assert await console.refused(f"/api/sessions/{other}{path}") == (404, "the session has no stream callxxxx")


async def test_a_store_that_is_lost_is_told_and_shown_again_when_it_is_back(console: Console, folder: Path) -> None:
    aside = folder / "aside"
    aside.mkdir()
    async with console.live("/api/live") as pulse, console.live(f"/api/sessions/{ID}/live") as view:
        await pulse.what("tick")
        await view.what("state")
        names = [name for name in os.listdir(folder) if name.startswith("perdure.db") and not name.endswith("-nodes")]
        for name in names:
            (folder / name).rename(aside / name)
        for live in (pulse, view):
            assert f"SQLite file {folder / 'perdure.db'}" in (await live.what("lost"))["error"]
        for path in ("/api/store", "/api/nodes", "/api/sessions", f"/api/sessions/{ID}"):
            assert await console.refused(path) == (503, f"there is no SQLite file {folder / 'perdure.db'}")
        for name in names:
            (aside / name).rename(folder / name)
        assert (await view.what("state"))["session"]["id"] == ID
        await pulse.what("tick")
        assert (await console.get("/api/sessions"))["total"] == 1


async def test_a_node_that_holds_what_is_not_written_is_told(console: Console, folder: Path) -> None:
    async with SqliteStore(str(folder / "perdure.db")) as store:
        await store.join(other := NodeId("other-node"))
        liveness = store.liveness(other, lease=15.0, monotonic=time.monotonic)
        await console.until("/api/store", lambda found: found["degraded"] is False)
        liveness.hold(True)
        assert (await console.get("/api/store"))["degraded"] is True
        nodes = {node["id"]: node for node in (await console.get("/api/nodes"))["nodes"]}
        assert nodes[other]["degraded"] is True
        liveness.hold(False)
        assert (await console.get("/api/store"))["degraded"] is False


def test_the_password_of_a_database_is_not_shown() -> None:
    assert (
        StoreView("postgresql://perdure:secret@db.example/log").maintenance.shown
        == "postgresql://perdure:***@db.example/log"
    )


async def test_as_many_live_views_are_open_as_may_be_and_no_more(console: Console) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(MAX_VIEWS - 1):
            await stack.enter_async_context(console.live("/api/live"))
        async with console.live(f"/api/sessions/{ID}/live"):
            status, said = await console.refused("/api/live")
            assert (status, said) == (429, f"{MAX_VIEWS} live views are open already; close one of them")
        await console.until("/api/store", lambda _: True)
        while (answer := await console.peer().begin("GET", path="/api/live", headers=console.known)) and (
            await answer.head() != 200
        ):
            await answer.aclose()
        await answer.aclose()


async def test_the_command_refuses_what_it_cannot_use_in_one_line(folder: Path) -> None:
    token = folder / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o644)
    async with consoling("sqlite:perdure.db", cwd=folder) as running:
        for arguments, sentence in (
            (("--store", "sqlite:nothing.db"), f"there is no SQLite file {folder / 'nothing.db'}"),
            (("--store", "memory:"), "store is 'memory:'; a store in memory can be read only by its own server; "),
            (("--port", str(running.port)), f"port {running.port} on 127.0.0.1 is in use; choose another with --port"),
            (("--token-file", "token"), "--token-file: token is not used: others may use it (mode 0644); "),
            (("--token-file", "none"), "--token-file: there is no file none; write a token of 16 characters or more"),
        ):
            process = await start("perdure", "console", "--port", "0", *arguments, cwd=folder)
            said, errors = await process.communicate()
            assert (process.returncode, said, errors.count(b"\n")) == (2, b"", 1)
            assert errors.decode().startswith(f"perdure: {sentence}")
    token.chmod(0o600)
    for word in ("0" * (MIN_TOKEN - 1), "of two words, 0123456789", "é" * MIN_TOKEN, ""):
        token.write_text(word)
        process = await start("perdure", "console", "--port", "0", "--token-file", "token", cwd=folder)
        _, errors = await process.communicate()
        assert (process.returncode, b"one has 16 or more of visible ASCII, in one line" in errors) == (2, True)
    token.write_text(shortest := "0" * MIN_TOKEN)
    async with consoling("sqlite:perdure.db", "--token-file", "token", cwd=folder) as running:
        assert shortest not in "".join(running.output)
        assert (await running.ask("/api/store", headers={"authorization": f"Bearer {shortest}"})).status == 200
