"""The operator's commands on a real store, while a server writes the store.

What is told of any store is told of a SQLite file and of a PostgreSQL schema.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from perdure._core.ids import Fence, Kind, NodeId, SessionId, StreamId, reader_name
from perdure._core.states import CallState, SessionState
from perdure.admin.queries import PAGE, SessionTail, find
from perdure.errors import Misuse, StoreError
from perdure.store import Inspect, SqliteStore, existing_store, open_store
from perdure.store.records import AskRecord, CallRecord, Event, ReaderRecord, SessionRecord, StreamRecord
from perdure.store.steps import (
    Append,
    CallEnd,
    EndSession,
    OpenAsk,
    OpenStream,
    PutReader,
    PutSession,
    Reached,
    Step,
    Trim,
)
from tests.cli.commands_here import run_here
from tests.cli.test_process import exchange, hello, open_session, port_of
from tests.cli.test_process import start as serve
from tests.support.clients.modern_requests import TASKS, modern
from tests.support.clients.raw_http import Peer
from tests.support.processes.starting import Program
from tests.support.processes.starting import start as start_module
from tests.support.stores.postgres import connection, new_schema, store_url

__all__ = ["hello"]

pytestmark = pytest.mark.anyio

SECONDS = 60
NODE = NodeId("nodeAAAAxxxxxxxxxxxxxx")


def an_id(begin: str) -> SessionId:
    return SessionId(begin.ljust(43, "x"))


ID = an_id("first-session")
STANDALONE, CALL = StreamId("standalonexxxxxxxxxxxx"), StreamId("callxxxxxxxxxxxxxxxxxx")


def a_session(session: SessionId = ID, *, active: float = 1_800_000_000.0, **more: Any) -> SessionRecord:
    record = SessionRecord(
        id=session,
        owner="",
        state=SessionState.ACTIVE,
        version="2025-11-25",
        client_params=b'{"clientInfo":{"name":"inspector","version":"1.2"}}',
        result=b"{}",
        initialized=True,
        sticky=(),
        incarnation=1,
        standalone=STANDALONE,
        created=active - 60,
        active=active,
    )
    return replace(record, **more)


@dataclass(kw_only=True)
class Server:
    """What a server does with its store."""

    store: Inspect
    fence: Fence
    folder: Path
    address: str

    async def commit(self, *steps: Step) -> None:
        refusals = await self.store.commit(steps)
        assert not any(refusals), refusals

    async def open_stream(self, stream: StreamId = CALL, *, kind: Kind = Kind.CALL, call: int | None = None) -> None:
        record = StreamRecord(
            id=stream, session=ID, kind=kind, node=NODE, fence=self.fence, opened=1_800_000_000.0 + (call or 0)
        )
        request = b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"count"}}' % (call or 0)
        row = CallRecord(
            session=ID,
            incarnation=1,
            request_id=call or 0,
            stream=stream,
            method="tools/call",
            request=request,
            principal="",
        )
        await self.commit(OpenStream(record=record, calls=() if call is None else (row,)))

    async def tell(self, seq: int, *, stream: StreamId = CALL) -> None:
        """Append a progress notification."""
        message = {"method": "notifications/progress", "params": {"progressToken": 3, "progress": seq}}
        event = Event(seq, 1_800_000_010.0 + seq, json.dumps(message).encode())
        await self.commit(Append(stream=stream, fence=self.fence, events=(event,)))

    async def answer(self, seq: int, *, call: int, stream: StreamId = CALL) -> None:
        event = Event(seq, 1_800_000_020.0 + seq, b'{"id":%d,"result":{"content":[]}}' % call, True)
        end = CallEnd(incarnation=1, request_id=call, state=CallState.ANSWERED)
        await self.commit(Append(stream=stream, fence=self.fence, events=(event,), ends=(end,), seal=True))


#: The store that a command finds in the environment, by the folder in which it runs.
ADDRESSES: dict[Path, str] = {}


@contextlib.asynccontextmanager
async def serving(folder: Path, address: str) -> AsyncIterator[Server]:
    """A store with one session, open in this process."""
    async with open_store(address, busy_timeout=SECONDS) as store:
        fence = await store.join(NODE)
        server = Server(store=cast("Inspect", store), fence=fence, folder=folder, address=address)
        await server.commit(PutSession(record=a_session()))
        await server.open_stream(STANDALONE, kind=Kind.STANDALONE)
        yield server


@pytest.fixture
async def sqlite_server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path, f"sqlite:{tmp_path / 'perdure.db'}") as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    address = f"sqlite:{tmp_path / 'perdure.db'}"
    if request.param == "postgres":
        address = ADDRESSES[tmp_path] = store_url()
    async with serving(tmp_path, address) as server:
        yield server


def variables_in(folder: Path, **variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    found = {"PERDURE_STORE": ADDRESSES[folder]} if folder in ADDRESSES else {}
    return {**clean, **found, **variables}


async def start(folder: Path, *arguments: str, **variables: str) -> Program:
    return await start_module("perdure", *arguments, cwd=folder, env=variables_in(folder, **variables))


async def done(folder: Path, *arguments: str, **variables: str) -> tuple[int | None, str, str]:
    if arguments[0] in ("serve", "tail"):  # they handle signals, and look at their output
        return await ended(await start(folder, *arguments, **variables))
    return await run_here(folder, *arguments, env=variables_in(folder, **variables))


async def ended(process: Program) -> tuple[int | None, str, str]:
    said, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    return process.returncode, said.decode(), errors.decode()


async def lines(folder: Path, *arguments: str, **variables: str) -> list[str]:
    """What a command says that does what it is asked for."""
    status, said, errors = await done(folder, *arguments, **variables)
    assert (status, errors) == (0, "")
    return said.splitlines()


async def objects(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in await lines(folder, *arguments, "--json")]


async def refusal(folder: Path, *arguments: str) -> str:
    """The one sentence of a command that cannot."""
    status, said, errors = await done(folder, *arguments)
    assert (status, said) == (2, "")
    assert errors.startswith("perdure: ")
    assert errors.count("\n") == 1, errors
    return errors.removeprefix("perdure: ").rstrip()


def names(folder: Path) -> list[str]:
    """Of all files below, also those by which nodes are known."""
    return sorted(str(path) for path in folder.rglob("*"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# The list


async def test_sessions_are_listed_the_last_active_one_first(server: Server) -> None:
    await server.open_stream(CALL, call=3)
    late = a_session(an_id("late-session"), active=1_800_000_500.0, owner="alice", state=SessionState.DORMANT)
    await server.commit(PutSession(record=late))
    first, second = await objects(server.folder, "sessions")
    assert first == {
        "kind": "session",
        "id": late.id,
        "owner": "alice",
        "owner_name": "alice",
        "state": "dormant",
        "version": "2025-11-25",
        "created": late.created,
        "active": late.active,
        "client_name": "inspector 1.2",
        "readers": 0,
        "connected": None,
        "calls": 0,
        "streams": 0,
        "home": None,
        "call": None,
    }
    assert (second["id"], second["calls"], second["streams"], second["home"]) == (ID, 1, 2, NODE)
    opened = 1_800_000_003.0
    assert (second["active"], second["readers"], second["connected"]) == (opened, 1, opened)
    await server.tell(1)
    await server.commit(
        Reached(stream=CALL, generation=1, through=1, unread=True),
        PutReader(record=ReaderRecord(stream=CALL, reader=reader_name(NODE, 1, opened + 9), node=NODE, seq=1)),
    )
    moved = (await objects(server.folder, "sessions"))[1]
    assert (moved["active"], moved["readers"], moved["connected"]) == (1_800_000_011.0, 1, opened + 9)
    table = await lines(server.folder, "sessions")
    assert [line.split()[0] for line in table] == ["ID", late.id, ID]


async def test_sessions_are_chosen_by_state_and_owner(server: Server) -> None:
    for number, state in enumerate(SessionState):
        record = a_session(an_id(state.value), owner="alice" if number % 2 else "bob", state=state)
        await server.commit(PutSession(record=record))

    async def chosen(*options: str) -> set[str]:
        return {session["id"].rstrip("x") for session in await objects(server.folder, "sessions", *options)}

    assert await chosen("--owner", "bob") == {"opening", "dormant"}
    assert await chosen("--owner", "alice") == {"active"}
    assert await chosen("--owner", "alice", "--all") == {"active", "ended"}
    assert (await lines(server.folder, "sessions"))[-1] == "1 more has ended; --all shows them"
    assert await chosen("--owner", "alice", "--state", "ended") == {"ended"}
    assert await lines(server.folder, "sessions", "--owner", "nobody") == ["no sessions"]


async def test_more_sessions_than_are_read_at_a_time_are_all_listed(server: Server) -> None:
    many = [a_session(an_id(f"many-{n}"), active=float(n)) for n in range(2 * PAGE)]
    await server.commit(*(PutSession(record=record) for record in many))
    listed = [session["id"] for session in await objects(server.folder, "sessions")]
    assert listed == [ID, *(record.id for record in reversed(many))]


# One session


async def test_everything_about_a_session_is_shown(server: Server) -> None:
    """S6"""
    await server.open_stream(CALL, call=3)
    await server.tell(1)
    other = StreamId("otherxxxxxxxxxxxxxxxxx")
    await server.open_stream(other, call=4)
    await server.answer(1, call=4, stream=other)
    request = b'{"id":"ask-1","method":"roots/list"}'
    await server.commit(
        OpenAsk(record=AskRecord(session=ID, id="ask-1", stream=CALL, request=request, node=NODE)),
        PutReader(record=ReaderRecord(stream=CALL, reader="r", node=NODE, seq=1)),
    )
    shown = await lines(server.folder, "sessions", "show", ID[:8])
    assert {
        f"session       {ID}",
        "client        inspector 1.2",
        f"home          {NODE}",
        "retained      0 events and 1 answer of 1 sealed stream",
        "  3        running  1        nodeAAAA  callxxxx  tools/call count",
        "  ask-1  nodeAAAA  callxxxx  roots/list",
    } <= set(shown)
    [whole] = await objects(server.folder, "sessions", "show", ID)
    assert [(call["request_id"], call["state"]) for call in whole["calls"]] == [(3, "running"), (4, "answered")]
    assert [(s["id"], s["last"], s["sealed"], s["answers"]) for s in whole["streams"]] == [
        (STANDALONE, 0, False, None),
        (CALL, 1, False, None),
        (other, 1, True, 1),
    ]
    assert whole["streams"][1]["reader"] == {"node": NODE, "seq": 1, "since": None}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("first", "'first' is too short; give at least 8 characters of the id"),
        ("first-se", "several ids begin with 'first-se'; give more of the id"),
        ("first-xx", "no session or task 'first-xx' in the store"),
        ("zzzzzzzz", "no session or task 'zzzzzzzz' in the store"),
        (f"{ID}x", f"no session or task '{ID}x' in the store"),
    ],
)
async def test_a_session_is_named_clearly_or_not_at_all(server: Server, name: str, sentence: str) -> None:
    await server.commit(PutSession(record=a_session(an_id("first-season"))))
    with pytest.raises(Misuse) as refused:
        await find(server.store, name)
    assert str(refused.value) == sentence
    assert (await find(server.store, "first-ses")).id == ID


@pytest.mark.parametrize("command", [("sessions", "show"), ("sessions", "end"), ("tail",)])
async def test_a_session_that_is_not_there_is_refused(sqlite_server: Server, command: tuple[str, ...]) -> None:
    assert await refusal(sqlite_server.folder, *command, "zzzzzzzz") == "no session or task 'zzzzzzzz' in the store"


@pytest.mark.parametrize("begin", ["-h-a-session", "--store", "-xsession"])
async def test_an_id_may_begin_with_a_dash(sqlite_server: Server, begin: str) -> None:
    server = sqlite_server
    record = a_session(an_id(begin))
    await server.commit(PutSession(record=record))
    [by_id] = await objects(server.folder, "sessions", "show", record.id, "--store", server.address)
    assert by_id["id"] == record.id
    by_prefix = await lines(server.folder, "sessions", "show", "--store", server.address, "--", record.id[:9])
    assert by_prefix[0] == f"session       {record.id}"
    if not begin.startswith("--"):
        [bare] = await objects(server.folder, "sessions", "show", record.id[:9])
        assert bare["id"] == record.id


# The end


async def test_an_operator_ends_a_session_and_every_node_is_told(server: Server) -> None:
    other = NodeId("nodeBBBBxxxxxxxxxxxxxx")
    await server.store.join(other)
    await server.open_stream(CALL, call=3)
    assert await lines(server.folder, "sessions", "end", ID[:8]) == [f"session {ID} has ended: operator ended"]
    record = await server.store.session(ID)
    assert record is not None
    assert (record.state, record.ended) == (SessionState.ENDED, "operator ended")
    assert list(await server.store.streams(ID)) == []
    for node in (NODE, other):
        [mail] = await server.store.mail(node)
        assert json.loads(mail.message) == {"kind": "ended", "session": ID, "reason": "operator ended"}
    assert {node.id for node in await server.store.nodes()} == {NODE, other}
    again = await refusal(server.folder, "sessions", "end", ID[:8])
    assert again == f"session {ID} has ended already: operator ended"


async def test_a_session_that_is_opening_is_not_ended(server: Server) -> None:
    record = a_session(an_id("opening-"), state=SessionState.OPENING, version="")
    await server.commit(PutSession(record=record))
    sentence = f"session {record.id} is opening; it can be ended once its handshake is done"
    assert await refusal(server.folder, "sessions", "end", record.id) == sentence
    assert await server.store.session(record.id) == record


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_an_operator_sees_who_is_connected_and_since_when(hello: Path, kind: str) -> None:
    """Until the client leaves, or the server is killed."""
    address = ADDRESSES[hello] = store_url() if kind == "postgres" else "sqlite:perdure.db"
    process = serve(hello, "--log-level", "error", "--store", address)

    async def readers() -> tuple[int, float | None]:
        await asyncio.sleep(0.05)  # the server has the processor meanwhile
        [listed] = await objects(hello, "sessions")
        return listed["readers"], listed["connected"]

    try:
        port = port_of(process)
        header = f"mcp-session-id: {open_session(port)}\r\n"
        assert await readers() == (0, None)
        began = time.time()
        with exchange(port, "GET", more=header) as stream:
            assert stream.recv(65_536).startswith(b"HTTP/1.1 200 OK")
            while (seen := await readers())[0] == 0:
                pass
            assert seen[0] == 1
            assert seen[1] is not None
            assert began - 1 < seen[1] < time.time() + 1
        while await readers() != (0, None):
            pass
        with exchange(port, "GET", more=header) as stream:
            assert stream.recv(65_536).startswith(b"HTTP/1.1 200 OK")
            while (await readers())[0] == 0:
                pass
            process.kill()
            process.wait()
            assert await readers() == (0, None)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_server_lets_go_of_a_session_that_an_operator_ended(hello: Path, kind: str) -> None:
    address = ADDRESSES[hello] = store_url() if kind == "postgres" else "sqlite:perdure.db"
    process = serve(hello, "--log-level", "error", "--store", address)
    try:
        port = port_of(process)
        session = open_session(port)
        header = f"mcp-session-id: {session}\r\nconnection: close\r\n"
        with exchange(port, "GET", more=header) as stream:
            assert stream.recv(65_536).startswith(b"HTTP/1.1 200 OK")
            assert await lines(hello, "sessions", "end", session) == [f"session {session} has ended: operator ended"]
            while await asyncio.to_thread(stream.recv, 65_536):
                pass  # The server closes it.
        with exchange(port, "GET", more=header) as refused:
            answer = b"".join(iter(lambda: refused.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.1 404")
        assert b"operator ended" in answer
    finally:
        process.kill()
        process.communicate()


async def test_the_sessions_of_a_token_s_principal_are_found_by_its_name(hello: Path) -> None:
    tokens = hello / "tokens"
    tokens.write_text("alice:0123456789abcdef\nbob:fedcba9876543210\n")
    tokens.chmod(0o600)
    process = serve(hello, "--tokens", "tokens", "--log-level", "error")
    try:
        port = port_of(process)
        session = open_session(port, "authorization: Bearer 0123456789abcdef\r\n")
        open_session(port, "authorization: Bearer fedcba9876543210\r\n")
        assert [found["id"] for found in await objects(hello, "sessions", "--owner", "alice")] == [session]
        head, line = await lines(hello, "sessions", "--owner", "alice")
        assert (head.split()[:3], line.split()[:3]) == (["ID", "KIND", "OWNER"], [session, "session", "alice"])
        assert "owner         alice" in await lines(hello, "sessions", "show", session)
    finally:
        process.kill()
        process.communicate()


# The store


#: One that only reads, and the one that writes: they open the store in different ways.
COMMANDS = [("sessions",), ("sessions", "end", ID)]


@pytest.mark.parametrize("command", [*COMMANDS, ("tail", ID)])
async def test_a_store_that_is_not_there_is_not_made(tmp_path: Path, command: tuple[str, ...]) -> None:
    assert await refusal(tmp_path, *command) == f"there is no SQLite file {tmp_path / 'perdure.db'}"
    assert files(tmp_path) == {}


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_schema_that_is_not_there_is_not_made(tmp_path: Path, command: tuple[str, ...]) -> None:
    schema = new_schema()
    address = ADDRESSES[tmp_path] = store_url(schema)
    assert await refusal(tmp_path, *command) == (
        f"the database {address} has no Perdure store in schema {schema}; `perdure store init` makes one"
    )
    with connection(address) as run:
        assert not run("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema)


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_store_in_memory_is_its_servers_own(tmp_path: Path, command: tuple[str, ...]) -> None:
    sentence = (
        "store is 'memory:'; a store in memory can be read only by its own server; give the store that the server"
        " writes, such as sqlite:PATH"
    )
    assert await refusal(tmp_path, *command, "--store", "memory:") == sentence


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("version", "release"), [(0, "an older"), (9_999, "a newer")])
async def test_a_file_of_another_version_is_left_as_it_is(
    tmp_path: Path, command: tuple[str, ...], version: int, release: str
) -> None:
    path = tmp_path / "perdure.db"
    async with SqliteStore(str(path)):
        pass
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    assert f"has version {version}, written by {release} release" in await refusal(tmp_path, *command)
    assert path.read_bytes() == before


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("letter.db", "cannot be opened: file is not a database"),
        ("empty.db", "is not a Perdure store"),
        ("other.db", "is not a Perdure store"),
        (".", "cannot be opened"),
    ],
)
async def test_what_is_no_store_is_refused(tmp_path: Path, name: str, sentence: str, writes: bool) -> None:
    (tmp_path / "letter.db").write_text("Dear reader, this is a letter and no database. " * 100)
    (tmp_path / "empty.db").touch()
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE t (a)")
    before = files(tmp_path)
    with pytest.raises(StoreError, match=sentence):
        await existing_store(f"sqlite:{tmp_path / name}", writes=writes).open()
    assert files(tmp_path) == before


async def test_what_only_reads_cannot_write(server: Server) -> None:
    async with existing_store(server.address, writes=False) as view:
        with pytest.raises(StoreError):
            await view.commit([EndSession(session=ID, time=0, reason="client deleted")])
        with pytest.raises(StoreError):
            await view.reattach(ID)
        assert await view.session(ID) == a_session()


async def test_the_store_is_named_by_option_or_environment(sqlite_server: Server) -> None:
    sqlite_server.folder.joinpath("elsewhere").mkdir()
    store = f"sqlite:{sqlite_server.folder / 'perdure.db'}"
    elsewhere = sqlite_server.folder / "elsewhere"
    for arguments, variables in [
        (("sessions", "--store", store, "show", ID), {}),
        (("sessions", "show", ID), {"PERDURE_STORE": store}),
        (("sessions", "show", ID, "--store", store), {"PERDURE_STORE": "memory:"}),
    ]:
        assert any(ID in line for line in await lines(elsewhere, *arguments, **variables))


async def test_a_name_with_signs_of_an_address_is_a_name(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "100%#.db")):
        pass
    assert await lines(tmp_path, "sessions", "--store", "sqlite:100%#.db") == ["no sessions"]


async def test_readers_and_a_writer_are_not_in_each_others_way(sqlite_server: Server) -> None:
    """The lock that a writer holds is not waited for, and nobody joins."""
    before = names(sqlite_server.folder)
    with contextlib.closing(sqlite3.connect(sqlite_server.folder / "perdure.db", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert [session["id"] for session in await objects(sqlite_server.folder, "sessions")] == [ID]
        writer.execute("ROLLBACK")
    assert names(sqlite_server.folder) == before
    assert [node.id for node in await sqlite_server.store.nodes()] == [NODE]


async def test_no_server_needs_to_run(tmp_path: Path) -> None:
    async with SqliteStore(str(tmp_path / "perdure.db")) as store:
        await store.commit([PutSession(record=a_session())])
    before = files(tmp_path)
    assert [session["id"] for session in await objects(tmp_path, "sessions")] == [ID]
    assert files(tmp_path) == before
    assert await lines(tmp_path, "sessions", "end", ID) == [f"session {ID} has ended: operator ended"]


async def test_sessions_on_a_server_that_only_reads_are_listed_and_not_ended(tmp_path: Path) -> None:
    """A standby: an operator may look at it."""
    address = store_url()
    async with serving(tmp_path, address):
        ADDRESSES[tmp_path] = f"{address}&default_transaction_read_only=on"
        assert [session["id"] for session in await objects(tmp_path, "sessions")] == [ID]
        assert "only reads" in await refusal(tmp_path, "sessions", "end", ID)


# Following


@contextlib.asynccontextmanager
async def tailed(server: Server, *options: str, **variables: str) -> AsyncIterator[Program]:
    process = await start(server.folder, "tail", ID, *options, **variables)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def next_line(process: Program) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), SECONDS)).decode().rstrip("\n")


async def test_events_are_shown_as_they_are_appended_and_new_streams_appear(server: Server) -> None:
    await server.open_stream(CALL, call=3)
    await server.tell(1)
    async with tailed(server, "--from-start") as tail:
        assert [await next_line(tail) for _ in range(3)] == [
            "08:00:00.000  standalone  standalo          opened",
            "08:00:03.000  call        callxxxx          opened: tools/call count (request 3)",
            "08:00:11.000  call        callxxxx  1       notifications/progress 1 (token 3)",
        ]
        await server.tell(2)
        assert await next_line(tail) == "08:00:12.000  call        callxxxx  2       notifications/progress 2 (token 3)"
        await server.tell(1, stream=STANDALONE)
        assert (await next_line(tail)).split()[1:4] == ["standalone", "standalo", "1"]
        await server.answer(3, call=3)
        assert await next_line(tail) == '08:00:23.000  call        callxxxx  3       answer 3: {"content":[]}'
        new = StreamId("newxxxxxxxxxxxxxxxxxxx")
        await server.open_stream(new, call=4)
        assert (
            await next_line(tail) == "08:00:04.000  call        newxxxxx          opened: tools/call count (request 4)"
        )
        await server.tell(1, stream=new)
        assert (await next_line(tail)).split()[1:4] == ["call", "newxxxxx", "1"]
        await server.commit(EndSession(session=ID, time=0, reason="client deleted"))
        assert await next_line(tail) == f"session {ID} has ended: client deleted"
        assert await ended(tail) == (0, "", "")


async def test_without_being_asked_only_what_comes_next_is_shown(sqlite_server: Server) -> None:
    server = sqlite_server
    await server.open_stream(CALL, call=3)
    await server.tell(1)
    tail = SessionTail(server.store, ID)
    await tail.skip()
    await server.tell(2)
    message = {"method": "notifications/progress", "params": {"progressToken": 3, "progress": 2}}
    event = {"what": "event", "time": 1_800_000_012.0, "stream": CALL, "kind": "call", "seq": 2, "final": False}
    assert [item async for item in tail.read()] == [{**event, "message": message}]


async def followed(server: Server, stream: str = "") -> list[dict[str, Any]]:
    """What `perdure tail --from-start --stream STREAM` shows first."""
    return [item async for item in SessionTail(server.store, ID, only=lambda name: name.startswith(stream)).read()]


async def test_several_streams_are_told_in_the_order_of_time(server: Server) -> None:
    streams = [StreamId(f"{name * 8}xxxxxxxxxxxxxx") for name in "abc"]
    for number, stream in enumerate(streams):
        await server.open_stream(stream, call=number)
    for seq in range(1, 41):
        for stream in streams:
            await server.tell(seq, stream=stream)
    events = [thing for thing in await followed(server) if thing["what"] == "event"]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    for stream in streams:
        assert [event["seq"] for event in events if event["stream"] == stream] == list(range(1, 41))


@pytest.mark.parametrize("through", [9, 10])
async def test_what_was_trimmed_is_a_gap(sqlite_server: Server, through: int) -> None:
    """Promise 4: loss is told."""
    await sqlite_server.open_stream(CALL, call=3)
    for seq in range(1, 11):
        await sqlite_server.tell(seq)
    await sqlite_server.commit(Trim(stream=CALL, through=through))
    _, gap, *events = await followed(sqlite_server, "callxxxx")
    assert gap == {"what": "gap", "stream": CALL, "kind": "call", "first": 1, "last": through}
    assert [event["seq"] for event in events] == list(range(through + 1, 11))


async def test_one_stream_is_followed_alone(sqlite_server: Server) -> None:
    server, dashed = sqlite_server, StreamId("-xxxxxxxxxxxxxxxxxxxxx")
    await server.open_stream(dashed, call=3)
    await server.tell(1, stream=STANDALONE)
    await server.tell(1, stream=dashed)
    async with tailed(server, "--from-start", "--stream", dashed, "--json") as tail:
        seen = [json.loads(await next_line(tail)) for _ in range(2)]
    assert [(thing["what"], thing["stream"]) for thing in seen] == [("opened", dashed), ("event", dashed)]
    assert await refusal(server.folder, "tail", ID, "--stream", "none") == f"session {ID} has no stream 'none'"


async def test_control_c_ends_it_quietly(sqlite_server: Server) -> None:
    async with tailed(sqlite_server, "--from-start") as tail:
        await next_line(tail)
        tail.send_signal(signal.SIGINT)
        status, said, errors = await ended(tail)
        assert (status, said, errors.strip()) == (130, "", "")


@pytest.mark.parametrize("more", [True, False])
async def test_a_closed_pipe_ends_it_quietly(sqlite_server: Server, more: bool) -> None:
    """As with `| head`: at once, whether there is more to say or not."""
    for seq in range(1, 1_001 if more else 2):
        await sqlite_server.tell(seq, stream=STANDALONE)
    command = f"{sys.executable} -m perdure tail {ID} --from-start --json; echo status $? >&2"
    process = await asyncio.create_subprocess_shell(
        f"({command}) | head -n 1",
        cwd=sqlite_server.folder,
        env=variables_in(sqlite_server.folder),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    status, said, errors = await ended(process)
    assert (status, said.count("\n"), errors) == (0, 1, "status 0\n")


async def test_a_session_that_has_ended_is_not_followed_for_long(sqlite_server: Server) -> None:
    await sqlite_server.commit(EndSession(session=ID, time=0, reason="replay window passed"))
    assert await lines(sqlite_server.folder, "tail", ID) == [f"session {ID} has ended: replay window passed"]


# Tasks and other durable calls


WAITING = """
import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("waiting")


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def wait(ctx: Context) -> str:
    await ctx.report_progress(1, 2, "waiting")
    await anyio.sleep(600)
    return "never"
"""
TAKES_TASKS: dict[str, Any] = {"extensions": {TASKS: {}}}


def a_call(tool: str, **meta: str) -> tuple[bytes, dict[str, str]]:
    params = {"name": tool, "arguments": {}, "_meta": {f"dev.perdure/{name}": value for name, value in meta.items()}}
    return modern("tools/call", params, capabilities=TAKES_TASKS)


async def ask(peer: Peer, method: str, task: str) -> dict[str, Any]:
    body, headers = modern(method, {"taskId": task}, capabilities=TAKES_TASKS)
    answer = (await peer.ask("POST", body, headers={**headers, "mcp-name": task})).json
    result: dict[str, Any] = answer.get("result") or answer["error"]
    return result


@contextlib.asynccontextmanager
async def waiting_server(folder: Path, kind: str) -> AsyncIterator[Peer]:
    (folder / "waiting.py").write_text(WAITING)
    address = ADDRESSES[folder] = store_url() if kind == "postgres" else "sqlite:perdure.db"
    process = serve(
        folder, "--store", address, "--task-after", "0s", "--log-level", "error", target="waiting.py:server"
    )
    try:
        yield Peer(port=port_of(process))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_tasks_stand_beside_sessions_and_an_operator_cancels_one(tmp_path: Path, kind: str) -> None:
    async with waiting_server(tmp_path, kind) as peer:
        session = open_session(peer.port)
        body, headers = a_call("wait")
        task = (await peer.ask("POST", body, headers=headers)).json["result"]["taskId"]
        listed = {found["id"]: found for found in await objects(tmp_path, "sessions")}
        assert {name: found["kind"] for name, found in listed.items()} == {session: "session", task: "task"}
        call = listed[task]["call"]
        assert (call["name"], call["state"], call["node"]) == ("wait", "running", listed[session]["home"])
        assert [found["id"] for found in await objects(tmp_path, "sessions", "--kind", "task")] == [task]
        assert [found["id"] for found in await objects(tmp_path, "sessions", "--state", "running")] == [task]
        assert await lines(tmp_path, "sessions", "--kind", "call") == ["no calls"]
        prefix = ("--", task[:8]) if task.startswith("-") else (task[:8],)
        assert (await lines(tmp_path, "sessions", "show", *prefix))[0] == f"task          {task}"

        following = await start(tmp_path, "tail", "--from-start", *prefix)
        polling = asyncio.create_task(ask(peer, "tasks/get", task))
        assert await lines(tmp_path, "sessions", "end", *prefix) == [f"task {task} has ended: cancelled"]
        await polling
        assert (await ask(peer, "tasks/get", task))["status"] == "cancelled"
        status, said, errors = await ended(following)
        assert (status, errors, said.splitlines()[-1]) == (0, "", f"task {task} has ended: cancelled")
        assert "tools/call wait" in said
        assert "1/2 waiting" in said
        [found] = await objects(tmp_path, "sessions", "--kind", "task", "--all")
        assert (found["call"]["name"], found["call"]["state"]) == ("wait", "cancelled")

        assert await lines(tmp_path, "sessions", "end", *prefix) == [f"task {task} has ended: operator ended"]
        assert (await ask(peer, "tasks/get", task))["code"] == -32602
        assert await refusal(tmp_path, "sessions", "end", *prefix) == f"no session or task '{task[:8]}' in the store"


async def test_a_client_that_waits_for_its_call_is_answered_when_an_operator_ends_it(tmp_path: Path) -> None:
    async with waiting_server(tmp_path, "sqlite") as peer:
        for key, kind in (({}, "call"), ({"dev.perdure/key": "k"}, "task")):
            params = {"name": "wait", "arguments": {}, "_meta": {"progressToken": 1, **key}}
            body, headers = modern("tools/call", params, capabilities={"elicitation": {}})
            async with await peer.begin("POST", body, headers=headers) as exchange:
                await exchange.until_messages(1)
                [listed] = await objects(tmp_path, "sessions", "--kind", kind)
                said = await lines(tmp_path, "sessions", "end", listed["id"])
                assert said == [f"{kind} {listed['id']} has ended: cancelled"]
                answer = await exchange.answer()
                assert (answer.status, answer.messages[-1]["error"]["message"]) == (200, "Request cancelled")


async def test_a_task_of_a_server_that_was_killed_is_cancelled_by_the_next_one(tmp_path: Path) -> None:
    async with waiting_server(tmp_path, "sqlite") as peer:
        body, headers = a_call("wait")
        task = (await peer.ask("POST", body, headers=headers)).json["result"]["taskId"]
    [left] = await objects(tmp_path, "sessions")
    assert (left["id"], left["call"]["state"]) == (task, "running")
    said = f"task {task} ends when a server starts: none runs that could cancel it"
    assert await lines(tmp_path, "sessions", "end", task) == [said]
    async with waiting_server(tmp_path, "sqlite") as peer:
        while (found := await ask(peer, "tasks/get", task))["status"] == "working":
            pass  # each poll is held until there is something to tell
    assert found["status"] == "cancelled"
