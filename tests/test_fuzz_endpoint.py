"""Whatever arrives at the endpoint, the invariant holds.

- It is answered, in time, and never with a server error; what is no HTTP at all gets a 400 or a closed connection.
- The next valid request works, on that session and on another.
- The package logs no error, and no task dies unheard.

The examples are the same in every run; `PERDURE_TEST_FUZZ=10` tries ten times as many, and others each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.message import ServerMessageMetadata
from mcp_types import ListRootsRequest, ListRootsResult

from perdure._core.sse import Decoder
from tests.support.live import live
from tests.support.raw import BOTH, VERSION, Answer, Parser, Peer, message

HANG = 10.0
"""Seconds within which every answer must be there."""

TIMES = float(os.environ.get("PERDURE_TEST_FUZZ", "1"))

server = MCPServer("fuzzed", version="1", log_level="CRITICAL")


@server.tool()
async def add(a: int, b: float = 0.5) -> float:
    return a + b


@server.tool()
async def say(text: str, n: int, ctx: Context) -> str:
    """Report progress a few times, then answer with the text."""
    for number in range(max(0, min(n, 5))):
        await ctx.report_progress(number, message=text)
    return text


@server.tool()
async def ask(ctx: Context) -> str:
    """Ask the client for its roots."""
    metadata = ServerMessageMetadata(related_request_id=ctx.request_id)
    return str(await ctx.session.send_request(ListRootsRequest(), ListRootsResult, metadata=metadata))


@server.tool()
async def boom() -> str:
    raise RuntimeError("boom")


@server.resource("note://{name}")
def note(name: str) -> str:
    return f"a note about {name}"


@server.prompt()
def greet(name: str) -> str:
    return f"Greet {name}."


# The server, and the peers that see whether it is still well


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.name}: {self.format(record)}")


@dataclass(kw_only=True)
class Target(Peer):
    """The server under attack, from a thread that is not its own."""

    session_id: str
    old_id: str
    witness_id: str
    errors: Errors = field(default_factory=Errors)

    def exchange(self, data: bytes, *, answers: int = 1, method: str = "POST") -> list[Answer]:
        """Send bytes; read so many whole answers. Of a GET the head is enough: an event stream stays open."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=HANG) as connection:
            _send(connection, data)
            return _read(connection, answers, head_only=method in ("GET", "HEAD"))

    def garbage(self, data: bytes) -> list[Answer]:
        """Send bytes and nothing more; read until the server has closed."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=HANG) as connection:
            _send(connection, data)
            _end_sending(connection)
            return _read(connection, 1_000)

    def valid(self, session_id: str) -> bytes:
        return self.request("POST", message("ping", id="witness"), headers={"mcp-session-id": session_id})

    def check(self, answers: Sequence[Answer]) -> None:
        """The invariant."""
        assert [answer for answer in answers if answer.status >= 500] == []
        for session_id in (self.session_id, self.old_id, self.witness_id):
            [answer] = self.exchange(self.valid(session_id))
            assert answer.status == 200
            assert answer.messages[-1] == {"jsonrpc": "2.0", "id": "witness", "result": {}}
        errors, self.errors.seen = self.errors.seen, []
        assert errors == []


def _send(connection: socket.socket, data: bytes) -> None:
    # It may be refused before it is all there; the answer can be read all the same.
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)


def _end_sending(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def _read(connection: socket.socket, wanted: int, *, head_only: bool = False) -> list[Answer]:
    answers: list[Answer] = []
    rest = b""
    while len(answers) < wanted:
        parser, body = Parser(head_only=head_only), bytearray()
        body += parser.feed(rest)
        while not parser.complete:
            data = _receive(connection)
            if not data:
                break
            body += parser.feed(data)
        if parser.status:
            answers.append(Answer(status=parser.status, headers=parser.headers, body=bytes(body)))
        if not parser.complete:
            break
        rest = parser.rest
    return answers


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except ConnectionError:
        return b""


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    ready: queue.SimpleQueue[Target | BaseException] = queue.SimpleQueue()
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        async with live(server=server) as served:
            ids = [(await served.session(version)).id for version in (VERSION, "2025-03-26", "2025-06-18")]
            stop.append((asyncio.get_running_loop(), asyncio.Event()))
            ready.put(Target(port=served.port, session_id=ids[0], old_id=ids[1], witness_id=ids[2]))
            await stop[0][1].wait()

    failures: list[BaseException] = []

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as failure:
            failures.append(failure)
            ready.put(failure)

    thread = threading.Thread(target=run)
    thread.start()
    found = ready.get()
    if isinstance(found, BaseException):
        raise found
    loggers = [logging.getLogger(name) for name in ("perdure", "uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(found.errors)
    yield found
    for logger in loggers:
        logger.removeHandler(found.errors)
    loop, event = stop[0]
    loop.call_soon_threadsafe(event.set)
    thread.join()
    if failures:
        raise failures[0]


def examples(count: int) -> settings:
    return settings(max_examples=int(count * TIMES), derandomize=TIMES == 1, database=None, deadline=None)


# What is sent

text = st.text(st.characters(codec="utf-8"), max_size=40)
numbers = st.one_of(
    st.integers(-5, 5),
    st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400, 1e308, -0.0, 5e-324]),
    st.floats(allow_nan=False, allow_infinity=False),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, text)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=12
)


def mostly(good: st.SearchStrategy[Any], bad: st.SearchStrategy[Any] = values) -> st.SearchStrategy[Any]:
    """The good one, but for one time in eight: what is wrong everywhere is refused at the first look."""
    return st.integers(0, 7).flatmap(lambda die: bad if die == 0 else good)


ids = mostly(st.integers(0, 9) | st.text("ab7", min_size=1, max_size=3))
meta = mostly(st.fixed_dictionaries({}, optional={"progressToken": mostly(st.integers(0, 9) | text)}))
implementation = st.just({"name": "fuzz", "version": "1"})
versions = st.sampled_from([VERSION, "2025-06-18", "2025-03-26", "2024-11-05", "2026-07-28", "1999-01-01", ""])
names = st.sampled_from(["add", "say", "boom", "none"])
tool_arguments = st.one_of(
    st.fixed_dictionaries({"a": mostly(st.integers(-3, 3))}, optional={"b": mostly(numbers)}),
    st.fixed_dictionaries({"text": mostly(text), "n": mostly(st.integers(0, 9))}),
)
uris = st.fixed_dictionaries({"uri": mostly(st.sampled_from(["note://x", "note://", "x", "a b"]))})
PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "initialize": st.fixed_dictionaries(
        {"protocolVersion": mostly(versions), "capabilities": mostly(st.just({})), "clientInfo": mostly(implementation)}
    ),
    "ping": st.just({}),
    "tools/list": st.fixed_dictionaries({}, optional={"cursor": mostly(text)}),
    "tools/call": st.fixed_dictionaries({"name": mostly(names), "arguments": mostly(tool_arguments)}),
    "resources/list": st.just({}),
    "resources/read": uris,
    "resources/templates/list": st.just({}),
    "resources/subscribe": uris,
    "resources/unsubscribe": uris,
    "prompts/list": st.just({}),
    "prompts/get": st.fixed_dictionaries(
        {"name": mostly(st.just("greet")), "arguments": mostly(st.just({"name": "x"}))}
    ),
    "completion/complete": st.fixed_dictionaries({"ref": values, "argument": values}),
    "logging/setLevel": st.fixed_dictionaries({"level": mostly(st.sampled_from(["info", "debug", "loud"]))}),
    "server/discover": st.just({}),
    "no/such/method": values,
}
NOTIFICATIONS: dict[str, st.SearchStrategy[Any]] = {
    "notifications/initialized": st.just({}),
    "notifications/cancelled": st.fixed_dictionaries({"requestId": ids}, optional={"reason": mostly(text)}),
    "notifications/progress": st.fixed_dictionaries({"progressToken": ids, "progress": mostly(numbers)}),
    "notifications/roots/list_changed": st.just({}),
    "notifications/no_such_thing": values,
}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    method = draw(st.sampled_from(sorted(PARAMS)))
    params = draw(mostly(PARAMS[method]))
    if isinstance(params, dict) and draw(st.booleans()):
        params = {**params, "_meta": draw(meta)}
    return {"jsonrpc": "2.0", "id": draw(ids), "method": method, "params": params}


@st.composite
def notifications(draw: st.DrawFn) -> dict[str, object]:
    method = draw(st.sampled_from(sorted(NOTIFICATIONS)))
    return {"jsonrpc": "2.0", "method": method, "params": draw(mostly(NOTIFICATIONS[method]))}


errors = st.fixed_dictionaries({"code": mostly(st.integers(-40_000, 0)), "message": mostly(text)})
responses = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0"), "id": ids | st.just("ask-x-1")},
    optional={"result": mostly(st.just({})), "error": mostly(errors)},
)
odd_messages = st.dictionaries(
    st.sampled_from(["jsonrpc", "id", "method", "params", "result", "error", "extra"]), values, max_size=6
)
messages = mostly(
    mostly(requests(), notifications()), st.one_of(responses, odd_messages, values, st.just({"jsonrpc": "2.0"}))
)
bodies = mostly(messages, st.lists(messages, max_size=5)).map(lambda value: json.dumps(value).encode())


@st.composite
def broken_bodies(draw: st.DrawFn) -> bytes:
    """JSON that something happened to."""
    body = bytearray(draw(bodies))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(body) - 1)))
        match draw(st.sampled_from(["cut", "byte", "insert", "double", "nest"])):
            case "cut":
                del body[place:]
            case "byte" if body:
                body[place] = draw(st.integers(0, 255))
            case "insert":
                body[place:place] = draw(
                    st.sampled_from(
                        [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800", b"NaN", b"1e999", b"9" * 5_000, b"\r\n"]
                    )
                )
            case "double":
                body += body[:place]
            case "nest":
                depth = draw(st.sampled_from([10, 70, 20_000]))
                body[place:place] = b"[" * depth
    return bytes(body)


long = st.sampled_from(["x" * 300, "x" * 9_000, "x" * 40_000])
odd = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=30).filter(lambda t: t == t.strip())


def header_values(session_id: str, old_id: str) -> dict[str, st.SearchStrategy[str]]:
    position = "c" + "A" * 22 + ".000001.0000000001"
    choices = {
        "accept": [BOTH, "*/*", "application/json", "text/event-stream", "", "text/html", "a/b;q=x,,,"],
        "content-type": ["application/json", "application/json; charset=utf-8", "text/plain", "", "APPLICATION/JSON"],
        "mcp-session-id": [session_id, old_id, session_id[:-1], session_id + "A", "A" * 43, "", "a b"],
        "mcp-protocol-version": [VERSION, "2025-06-18", "2025-03-26", "2026-07-28", "2099-01-01", "1999-01-01", ""],
        "last-event-id": ["", position, "s" + position[1:], position + "~abc", "0", position[:-1] + "x", "c"],
        "origin": ["http://localhost", "http://evil.example", "null", "http://[", "http://localhost:99999"],
        "host": ["127.0.0.1", "localhost:1", "evil.example", "", "[::1]", "[", "a:b:c", "127.0.0.1:x"],
        "authorization": ["Bearer x", "Basic x", ""],
        "connection": ["close", "keep-alive", "upgrade", "close, upgrade"],
        "upgrade": ["h2c", "websocket"],
        "expect": ["100-continue", "200-ok"],
        "mcp-method": ["tools/call", "x"],
        "mcp-name": ["add", "x"],
        "accept-encoding": ["gzip", "identity;q=0"],
        "cookie": ["a=b"],
        "x-mcp-reconnect-session": [session_id, "x"],
    }
    return {name: st.one_of(st.sampled_from(known), odd, long) for name, known in choices.items()}


ODD_METHODS = ["OPTIONS", "PUT", "HEAD", "PATCH", "TRACE", "BREW", "post"]


@st.composite
def http_requests(draw: st.DrawFn, target: Target) -> tuple[str, bytes]:
    """A whole request: its framing is right, all the rest may be anything."""
    method = draw(mostly(st.sampled_from(["POST", "POST", "POST", "GET", "DELETE"]), st.sampled_from(ODD_METHODS)))
    path = draw(
        mostly(st.just("/mcp"), st.sampled_from(["/mcp/", "/mcp?x=1", "/", "/healthz", "/%2e%2e/mcp", "//mcp"]))
    )
    body = draw(mostly(bodies, broken_bodies() | st.binary(max_size=200)))
    # A DELETE must not take the session away from those who see whether it is well.
    session = target.session_id if method != "DELETE" else "A" * 43
    fields = [
        ("host", f"127.0.0.1:{target.port}"),
        ("accept", BOTH),
        ("content-type", "application/json"),
        ("mcp-session-id", session),
        ("content-length", str(len(body))),
    ]
    pool = header_values(session, target.old_id if method != "DELETE" else session)
    for name in draw(st.lists(st.sampled_from(sorted(pool)), max_size=3)):
        value = draw(pool[name])
        if draw(st.booleans()):
            fields = [pair for pair in fields if pair[0] != name]
        fields.append((name, value))
    if draw(st.booleans()):
        fields = draw(st.permutations(fields))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields), "", ""]
    return method, "\r\n".join(lines).encode("latin-1") + body


# The tests


@examples(2_200)
@given(data=st.data())
def test_any_request_is_answered(target: Target, data: st.DataObject) -> None:
    method, request = data.draw(http_requests(target))
    answers = target.exchange(request, method=method)
    assert len(answers) == 1
    target.check(answers)


@examples(2_200)
@given(body=mostly(bodies, broken_bodies()), era=st.sampled_from(["session", "session", "old", "none", "sessionless"]))
def test_any_body_is_answered(target: Target, body: bytes, era: str) -> None:
    headers = {
        "session": {"mcp-session-id": target.session_id, "mcp-protocol-version": VERSION},
        "old": {"mcp-session-id": target.old_id},
        "none": {},
        "sessionless": {"mcp-protocol-version": "2026-07-28"},
    }[era]
    answers = target.exchange(target.request("POST", body, headers=headers))
    assert len(answers) == 1
    target.check(answers)


@st.composite
def mangled_bytes(draw: st.DrawFn) -> bytes:
    """Bytes that were a request, or never were."""
    base = draw(
        st.sampled_from(
            [
                b"POST /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5\r\n\r\nhello",
                b"POST /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
                b"GET /mcp HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n",
                b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 3,
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"",
            ]
        )
    )
    data = bytearray(base + draw(mostly(st.just(b""), st.binary(max_size=60))))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 8))] = draw(
            st.one_of(
                st.binary(max_size=8),
                st.sampled_from(
                    [
                        b"\r\n\r\n",
                        b"\r\n",
                        b"\n",
                        b": ",
                        b"content-length: -1\r\n",
                        b"content-length: 99999999999999999999\r\n",
                        b"content-length: 3\r\ncontent-length: 4\r\n",
                        b"transfer-encoding: chunked\r\n",
                        b"transfer-encoding: chunked, identity\r\n",
                        b"\x00" * 20,
                        b"ffffffffffffffff\r\n",
                        b" /mcp HTTP/9.9",
                        b"x" * 2_000,
                    ]
                ),
            )
        )
    return bytes(data)


@examples(1_500)
@given(data=mangled_bytes())
def test_garbage_is_refused_or_closed(target: Target, data: bytes) -> None:
    target.check(target.garbage(data))


@examples(400)
@given(data=st.data())
def test_requests_in_a_row_are_answered_in_a_row(target: Target, data: st.DataObject) -> None:
    """Pipelining: all are sent before the first answer is read."""
    count = data.draw(st.integers(2, 6))
    row = [data.draw(mostly(bodies, broken_bodies())) for _ in range(count)]
    headers = {"mcp-session-id": target.session_id}
    answers = target.exchange(b"".join(target.request("POST", body, headers=headers) for body in row), answers=count)
    assert len(answers) == count
    target.check(answers)


answers_to_asks = st.one_of(
    st.fixed_dictionaries({"result": mostly(st.just({"roots": []}))}, optional={"error": st.none() | values}),
    st.fixed_dictionaries({"error": mostly(errors)}, optional={"result": st.none() | values}),
    odd_messages,
)


@examples(150)
@given(answer=answers_to_asks, names_it=mostly(st.just(True), st.just(False)))
def test_any_answer_to_an_ask_lets_the_call_end(target: Target, answer: dict[str, object], names_it: bool) -> None:
    """What the client answers is the client's; the call that waits for it ends, and once."""
    body = message("tools/call", {"name": "ask", "arguments": {}}, id="asking")
    headers = {"mcp-session-id": target.session_id}
    with socket.create_connection(("127.0.0.1", target.port), timeout=HANG) as connection:
        connection.sendall(target.request("POST", body, headers=headers))
        parser, decoder = Parser(), Decoder()
        heard: list[dict[str, Any]] = []

        def listen(wanted: int) -> None:
            while len(heard) < wanted:
                received = _receive(connection)
                assert received
                heard.extend(json.loads(event.data) for event in decoder.feed(parser.feed(received)) if event.data)

        listen(1)
        reply = {"jsonrpc": "2.0", "id": heard[0]["id"], **answer}
        if names_it:
            reply["id"] = heard[0]["id"]
        replies = [reply, {"jsonrpc": "2.0", "id": heard[0]["id"], "error": {"code": -1, "message": "no"}}]
        answers = [target.exchange(target.request("POST", json.dumps(r).encode(), headers=headers))[0] for r in replies]
        listen(2)
        assert heard[1]["id"] == "asking"
    assert answers[1].status == 202
    target.check(answers)


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
@pytest.mark.parametrize("spelling", ["upgrade", "Upgrade", "UPGRADE"])
def test_a_wish_for_another_protocol_is_not_heard(target: Target, protocol: str, spelling: str) -> None:
    """Java's HTTP client asks for HTTP/2 with every request, and means the request all the same."""
    headers = {"mcp-session-id": target.session_id, "connection": "Upgrade, HTTP2-Settings", spelling: protocol}
    [answer] = target.exchange(target.request("POST", message("ping", id=1), headers=headers))
    assert answer.messages == [{"jsonrpc": "2.0", "id": 1, "result": {}}]
    target.check([answer])
