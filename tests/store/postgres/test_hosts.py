"""Addresses with several hosts, of which one may be down, hang, or only read."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from perdure.errors import BadSetting, StoreUnavailable
from perdure.store import existing_store, open_store
from perdure.store.postgres.address import each_host, for_writing, parse_address
from perdure.store.postgres.store import PostgresStore
from perdure.store.steps import OpenStream, PutSession
from perdure.testing._values import NODE, STREAM, a_session, a_stream, an_append, some_events
from tests.support.processes.starting import ROOT
from tests.support.servers.in_process import until
from tests.support.stores.postgres_faults import OwnServer, hosts, own_server

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, kw_only=True)
class Pair:
    primary: OwnServer
    standby: OwnServer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with own_server(folder / "primary") as primary:
        standby = primary.copy_to(folder / "standby", standby=True)
        try:
            standby.start()
            yield Pair(primary=primary, standby=standby)
        finally:
            standby.end()


class Silent:
    """A machine that lost its power, or a firewall: it accepts a connection, and sends nothing."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    it = Silent()
    yield it
    it.close()


def address(*ports: int, schema: str = "s", more: str = "") -> str:
    return f"postgresql://postgres@{','.join(f'127.0.0.1:{port}' for port in ports)}/postgres?schema={schema}{more}"


# --- Which values are allowed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["primary", "read-write"])
def test_a_store_that_is_written_may_ask_for_the_server_that_takes_writes(target: str) -> None:
    given = parse_address(address(1, 2, more=f"&target_session_attrs={target}"))
    assert for_writing(given) == given


def test_of_several_hosts_the_one_that_takes_writes_is_meant() -> None:
    given = for_writing(parse_address(address(1, 2)))
    expected = "postgresql://postgres@127.0.0.1:1,127.0.0.1:2/postgres?target_session_attrs=read-write"
    assert (given.dsn, given.listen) == (expected, expected)


@pytest.mark.parametrize(
    ("ports", "target"),
    [((1,), "standby"), ((1,), "prefer-standby"), ((1,), "read-only"), ((1, 2), "any"), ((1, 2), "standby")],
)
def test_a_store_that_is_written_may_not_ask_for_a_server_that_only_reads(ports: tuple[int, ...], target: str) -> None:
    with pytest.raises(BadSetting) as caught:
        open_store(address(*ports, more=f"&target_session_attrs={target}"))
    assert f"target_session_attrs is {target!r}" in str(caught.value)
    assert str(caught.value).endswith("needs target_session_attrs=read-write")


def test_a_value_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(BadSetting, match="target_session_attrs is 'master', allowed: any, primary, standby"):
        existing_store(address(1, more="&target_session_attrs=master"), writes=False)


def test_each_host_keeps_what_is_around_it() -> None:
    dsn = "postgresql://me:p%2Cw@a,[::1]:6000,c:1/db?sslmode=require"
    around = ("postgresql://me:p%2Cw@", "/db?sslmode=require")
    assert each_host(dsn) == [f"{around[0]}{host}{around[1]}" for host in ("a", "[::1]:6000", "c:1")]
    for alone in ("postgresql:///db?host=a,b", "postgresql://a/db", f"{dsn}&target_session_attrs=prefer-standby"):
        assert each_host(alone) == [alone]


# --- Which host answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["standby", "down", "silent"])
async def test_a_store_finds_the_primary_behind_a_host_that_is_not_fit(pair: Pair, silent: Silent, first: str) -> None:
    """A silent one takes no more than a moment, also when all connections are made again."""
    ports = {"standby": pair.standby.port, "down": 1, "silent": silent.port}
    began = time.monotonic()
    async with PostgresStore(address(ports[first], pair.primary.port, schema=f"s_{first}"), timeout=20.0) as store:
        await store.join(NODE)
        assert list(await store.commit([PutSession(record=a_session())])) == [None]
        await asyncio.to_thread(
            pair.primary.tell,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'perdure'",
        )

        async def is_back() -> bool:
            try:
                return list(await store.commit([PutSession(record=a_session("other"))])) == [None]
            except StoreUnavailable:
                return False

        await until(is_back)
        assert len(await store.newest(limit=9)) == 2
    assert time.monotonic() - began < 10, "no connection waited until a host was given up"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", "cannot be opened: None of the hosts match the target attribute requirement"),
        ("&target_session_attrs=primary", "cannot be opened: None of the hosts match"),
    ],
)
async def test_where_no_host_takes_writes_that_is_said_and_not_that_another_is_down(
    pair: Pair, more: str, said: str
) -> None:
    with pytest.raises(StoreUnavailable, match=said):
        await open_store(address(pair.standby.port, 1, more=more)).open()


# --- A standby ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perdure", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


async def test_a_standby_cannot_be_served_and_says_so_in_one_line(pair: Pair) -> None:
    schemas = "SELECT nspname FROM pg_namespace"
    before = pair.primary.tell(schemas)
    url = address(pair.standby.port, schema="never")
    with pytest.raises(StoreUnavailable) as caught:
        await open_store(url).open()
    assert str(caught.value) == (
        f"the database {url} cannot be used: its server only reads (a standby, or default_transaction_read_only); give"
        " the primary, or several hosts with target_session_attrs=read-write"
    )
    assert pair.primary.tell(schemas) == before


@pytest.mark.parametrize("target", [pytest.param("", marks=pytest.mark.long), "&target_session_attrs=prefer-standby"])
async def test_an_operator_lists_and_follows_sessions_on_a_standby(pair: Pair, target: str) -> None:
    schema, session = f"look_{len(target)}", "session-of-ours"
    async with PostgresStore(hosts(pair.primary, schema=schema), timeout=20.0) as store:
        fence = await store.join(NODE)
        steps = [
            PutSession(record=a_session(session)),
            OpenStream(record=a_stream(fence, session=session)),
            an_append(fence, some_events(1, 2)),
        ]
        assert list(await store.commit(steps)) == [None, None, None]
        url = address(pair.standby.port, *([pair.primary.port] if target else []), schema=schema, more=target)
        reached = f"SELECT count(*) FROM {schema}.event"
        await until(lambda: asyncio.to_thread(lambda: _told(pair.standby, reached) == [(2,)]))
        listed = await asyncio.to_thread(run, "sessions", "--store", url, "--json")
        assert listed.returncode == 0, listed.stderr
        assert f'"id": "{session}"' in listed.stdout
        command = [sys.executable, "-m", "perdure", "tail", session, "--from-start", "--json", "--store", url]
        pipe = asyncio.subprocess.PIPE
        tail = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe)
        try:
            assert tail.stdout is not None
            lines = [await tail.stdout.readline() for _ in range(2)]
            assert [STREAM.encode() in line for line in lines] == [True, True]
            await store.commit([an_append(fence, some_events(3, 3))])
            assert STREAM.encode() in await tail.stdout.readline()
        finally:
            tail.kill()
            await tail.wait()


def _told(server: OwnServer, statement: str) -> object:
    """Return the rows of a standby; it may not have the table yet."""
    try:
        return server.tell(statement)
    except Exception:
        return None
