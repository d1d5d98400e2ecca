"""An MCP server over HTTP, without an SDK, that follows the orders of a test: for all that upstreams do to a gateway.

**In a test**::

    async with scripted_http(sessions=True, event_ids=True) as server:
        ... server.url ...
        server.lose_sessions(by=400)            # forgets them, and says so with 404, 400, 200 or 503
        server.refuse("tools/call", 502)        # the next such request gets it; `runs=True`: after its tool ran
        server.open("gate")                     # a tool that waits for the gate continues
        server.notify("notifications/tools/list_changed")       # on the standalone streams

**As a process** (to be killed): `python -m tests.support.servers.scripted_http --port 0 --runs FILE --config JSON`
prints its port. POST `/control` with `{"call": NAME, "arguments": {…}}` calls a method of the server
(`refuse`, `open`, `lose_sessions`, `notify`, `set`) and answers with `{"runs", "heard", "sessions", "replies"}`.

**Tools** take `{"steps": [...]}` and run the steps in order. `plain` has no hint, `idempotent` and `read_only` have
theirs. Without a step that ends it a tool answers `done`. The steps:

| step | effect |
|---|---|
| `["progress", 3]` | progress 3, if the request has a token |
| `["log", "text"]` | a log message of level info |
| `["notify", method, params]` | any notification |
| `["ask", method, params]` | asks, and waits for the reply; the tool's result has it |
| `["ask_id", id, method, params]` | the same under that id, without waiting |
| `["withdraw", id]` | cancels an ask |
| `["wait", "gate"]` | waits for `open("gate")` |
| `["sleep", 0.1]` | waits for so many seconds |
| `["diary", path, key]` | adds the line `<key> <pid>` to a file |
| `["begin"]` | sends the headers of the event stream, before any event |
| `["cut"]` | breaks the connections that read this call; the tool continues |
| `["close"]` | ends them in good order; the tool continues |
| `["event", data, id]` | an event as it is given; without `id` it has none |
| `["answer", text]` | ends the call with this text, in which `$ID` is its id as JSON |
| `["answer_of", id]` | an answer under another request's id |
| `["tools", [names]]` | changes the list of tools, and notifies |
| `["fail", code, message]` | answers with an error |
| `["never"]` | never answers |

`config` (arguments of `ScriptedHttp`, and of `set` at any time) says what kind of server it is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HINTS = {"plain": {}, "idempotent": {"idempotentHint": True}, "read_only": {"readOnlyHint": True}}
PHRASES = {200: "OK", 202: "Accepted"}


@dataclass
class Stream:
    """The events of one call, or of a session's standalone stream, and the connections that read them."""

    name: str
    events: list[bytes] = field(default_factory=list)
    readers: set[asyncio.StreamWriter] = field(default_factory=set)
    is_over: bool = False


@dataclass
class Session:
    id: str
    standalone: Stream
    is_initialized: bool = False


@dataclass
class Call:
    """One `tools/call` that runs."""

    id: object
    token: object
    session: Session
    stream: Stream
    writer: asyncio.StreamWriter
    """Of the connection that its POST came on."""
    has_begun: bool = False
    """The response of the POST has its headers."""
    task: asyncio.Task[None] | None = None


class ScriptedHttp:
    """`runs` counts the runs of each tool; with `runs_file` each is a line there as well. `heard` has every message:
    session and method, `reply`, `GET`, `GET <position>` or `DELETE`. `headers` has the headers of each request."""

    def __init__(self, *, runs_file: str = "", **config: Any) -> None:
        self.sessions = True
        """Names a session; without it the server is stateless."""
        self.event_ids = True
        """Events have ids, and what was missed is replayed."""
        self.primes = False
        """A stream begins with an event that has only an id."""
        self.json = False
        """Answers with JSON instead of an event stream; earlier messages are sent on the standalone stream."""
        self.standalone = True
        """Has a standalone stream; without it GET gets 405."""
        self.falls_silent = False
        """A resumed stream is replayed, and then says nothing more."""
        self.refuses_positions = False
        self.comments = 0.0
        """Seconds between two comments on every stream; 0: none."""
        self.versions = ["2025-11-25", "2025-06-18", "2025-03-26"]
        """The revisions, the newest first."""
        self.token = ""
        """The bearer token that is wanted."""
        self.holds: list[str] = []
        """Requests of these methods wait for the gate of that name before they are handled."""
        self.tools = list(HINTS)
        self.hints: dict[str, dict[str, bool]] = HINTS
        self.url = ""
        self.runs: Counter[str] = Counter()
        self.heard: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.replies: list[dict[str, Any]] = []
        self.cancelled: list[object] = []
        self.subscribed: list[str] = []
        self.most_subscribed = 0
        self.level = ""
        self.connections = 0
        self.listening: asyncio.Server | None = None
        self.handshakes = 0
        self._runs_file = runs_file
        self._sessions: dict[str, Session] = {}
        self._lost_by = 404
        self._calls: dict[object, Call] = {}
        self._streams: dict[str, Stream] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._asks: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._refusals: list[dict[str, Any]] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._stateless = Session("", Stream("none"))
        self.set(**config)

    # Orders of a test

    def set(self, **config: Any) -> None:
        for name, value in config.items():
            assert not name.startswith("_"), name
            assert hasattr(self, name), f"there is no {name}"
            setattr(self, name, value)

    def refuse(self, method: str, status: int, *, times: int = 1, runs: bool = False, **how: Any) -> None:
        """Answer the next requests of that method (`GET` and `DELETE` too) with that status. `how`: `headers`, `body`,
        or `error`, which becomes a JSON-RPC error under the request's id. `status` 0 breaks the connection."""
        self._refusals += [{"method": method, "status": status, "runs": runs, **how} for _ in range(times)]

    def open(self, gate: str) -> None:
        self._gate(gate).set()

    def lose_sessions(self, by: int = 404, *, cuts: bool = True) -> None:
        """Forget every session, as a restart does. `cuts`: their calls and streams end, too."""
        self._lost_by = by
        self._sessions.clear()
        for call in list(self._calls.values()) if cuts else ():
            call.writer.transport.abort()
            if call.task is not None:
                call.task.cancel()
        for stream in list(self._streams.values()) if cuts else ():
            self._cut(stream)

    def notify(self, method: str, params: dict[str, Any] | None = None) -> None:
        """Send a notification on every standalone stream."""
        for session in list(self._sessions.values()) or [self._stateless]:
            self._emit(session.standalone, {"method": method, **({} if params is None else {"params": params})})

    def ask(self, ask_id: object, method: str, params: dict[str, Any]) -> None:
        """Ask on every standalone stream."""
        for session in self._sessions.values():
            self._emit(session.standalone, {"id": ask_id, "method": method, "params": params})

    def cut(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    @property
    def methods(self) -> list[str]:
        return [method for _, method in self.heard]

    def _gate(self, name: str) -> asyncio.Event:
        return self._gates.setdefault(name, asyncio.Event())

    # Connections

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {
                    name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                await self._answer(method, path, headers, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            for stream in self._streams.values():
                stream.readers.discard(writer)
            writer.transport.abort()

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/control":
            told = json.loads(body)
            if told.get("call"):
                getattr(self, told["call"])(**told.get("arguments", {}))
            counted = {"runs": self.runs, "heard": self.heard, "sessions": list(self._sessions)}
            _respond(writer, 200, json.dumps({**counted, "replies": self.replies}).encode())
            return
        named = headers.get("mcp-session-id", "")
        message = json.loads(body) if method == "POST" else {}
        what = message.get("method", "reply") if method == "POST" else method
        if position := headers.get("last-event-id", ""):
            what += f" {position}"
        self.heard.append((named, what))
        self.headers.append(headers)
        if self.token and headers.get("authorization") != f"Bearer {self.token}":
            _respond(writer, 401, b"")
            return
        refusal = next((one for one in self._refusals if what.startswith(one["method"])), None)
        if refusal is not None:
            self._refusals.remove(refusal)
            if refusal["runs"]:
                self._count(message)
            self._refuse(writer, refusal, message.get("id"))
            return
        if what in self.holds:
            await self._gate(what).wait()
        session = self._sessions.get(named) if self.sessions else self._stateless
        if what == "initialize":
            self._welcome(message, writer)
        elif session is None:
            self._refuse(writer, {"status": self._lost_by, "error": [-32600, "Session not found"]}, message.get("id"))
        elif method == "DELETE":
            del self._sessions[named]
            _respond(writer, 200, b"")
        elif method == "GET":
            await self._read(session, position, writer)
        else:
            await self._take(message, session, writer)

    def _welcome(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked = message["params"].get("protocolVersion")
        self.handshakes += 1
        named = {}
        if self.sessions:
            session = Session(secrets.token_hex(8), self._new_stream("all"))
            self._sessions[session.id] = session
            named["Mcp-Session-Id"] = session.id
        abilities = {"tools": {"listChanged": True}, "logging": {}, "resources": {"subscribe": True}}
        result = {
            "protocolVersion": asked if asked in self.versions else self.versions[0],
            "capabilities": abilities,
            "serverInfo": {"name": "scripted", "version": "1"},
        }
        self._result(writer, message["id"], result, named)

    def _refuse(self, writer: asyncio.StreamWriter, refusal: dict[str, Any], request_id: object) -> None:
        if not refusal["status"]:
            writer.transport.abort()
            return
        body = refusal.get("body", "").encode()
        if "error" in refusal:
            code, sentence = refusal["error"]
            body = _encoded({"id": request_id, "error": {"code": code, "message": sentence}})
        _respond(writer, refusal["status"], body, **refusal.get("headers", {}))

    # Streams

    def _new_stream(self, kind: str) -> Stream:
        stream = Stream(f"{kind}{len(self._streams)}")
        self._streams[stream.name] = stream
        return stream

    def _emit(self, stream: Stream, message: dict[str, Any], *, raw: str | None = None, event_id: str = "") -> None:
        data = _encoded(message) if raw is None else raw.encode()
        event_id = event_id or (f"{stream.name}-{len(stream.events) + 1}" if self.event_ids and raw is None else "")
        name = f"id: {event_id}\n".encode() if event_id else b""
        stream.events.append(name + b"event: message\ndata: " + data + b"\n\n")
        for writer in list(stream.readers):
            _chunk(writer, stream.events[-1])

    def _attach(self, stream: Stream, writer: asyncio.StreamWriter) -> None:
        stream.readers.add(writer)
        _begin(writer)
        if self.primes:
            _chunk(writer, f"id: {stream.name}-{len(stream.events)}\nretry: 20\ndata:\n\n".encode())
        if self.comments:
            asyncio.get_running_loop().create_task(self._comment(stream, writer))

    async def _comment(self, stream: Stream, writer: asyncio.StreamWriter) -> None:
        while writer in stream.readers or self.falls_silent:
            if writer.is_closing():
                return
            _chunk(writer, b": here\n\n")
            await asyncio.sleep(self.comments)

    def _cut(self, stream: Stream) -> None:
        for writer in list(stream.readers):
            writer.transport.abort()
        stream.readers.clear()

    def _end(self, stream: Stream) -> None:
        for writer in list(stream.readers):
            _chunk(writer, b"")
        stream.readers.clear()

    async def _read(self, session: Session, position: str, writer: asyncio.StreamWriter) -> None:
        if not position:
            if not self.standalone:
                _respond(writer, 405, b"")
                return
            self._attach(session.standalone, writer)
        else:
            name, _, number = position.rpartition("-")
            stream = self._streams.get(name)
            if stream is None or self.refuses_positions or not number.isdigit():
                _respond(writer, 400, b"no such position")
                return
            missed = stream.events[int(number) :]
            if self.falls_silent:
                _begin(writer)
                if self.comments:
                    asyncio.get_running_loop().create_task(self._comment(stream, writer))
            else:
                self._attach(stream, writer)
            for event in missed:
                _chunk(writer, event)
            if stream.is_over:
                _chunk(writer, b"")
                stream.readers.discard(writer)
                return
        await writer.drain()

    # Messages

    async def _take(self, message: dict[str, Any], session: Session, writer: asyncio.StreamWriter) -> None:
        method, params = message.get("method", ""), message.get("params") or {}
        if "id" not in message or not method:
            _respond(writer, 202, b"")
            if method == "notifications/initialized":
                session.is_initialized = True
            elif method == "notifications/cancelled":
                self.cancelled.append(params["requestId"])
                if (cancelled := self._calls.get(params["requestId"])) is not None and cancelled.task is not None:
                    cancelled.task.cancel()
            elif not method:
                self.replies.append(message)
                if (waiting := self._asks.get(json.dumps(message["id"]))) is not None and not waiting.done():
                    waiting.set_result(message)
            return
        match method:
            case "tools/call":
                await self._call(message, session, writer)
                return
            case "tools/list":
                known = [{"name": one, "inputSchema": {}, "annotations": self.hints.get(one, {})} for one in self.tools]
                result: dict[str, Any] = {"tools": known}
            case "resources/subscribe":
                self.subscribed.append(params["uri"])
                self.most_subscribed = max(self.most_subscribed, len(self.subscribed))
                result = {}
            case "resources/unsubscribe":
                self.subscribed.remove(params["uri"])
                result = {}
            case "logging/setLevel":
                self.level, result = params["level"], {}
            case "resources/read":
                self._count(message)
                result = {"contents": [{"uri": params["uri"], "text": "read"}]}
            case _:
                result = {}
        self._result(writer, message["id"], result)

    def _result(
        self,
        writer: asyncio.StreamWriter,
        request_id: object,
        result: dict[str, Any],
        named: dict[str, str] | None = None,
    ) -> None:
        data = _encoded({"id": request_id, "result": result})
        if self.json:
            _respond(writer, 200, data, **(named or {}))
        else:
            _begin(writer, **(named or {}))
            _chunk(writer, b"event: message\ndata: " + data + b"\n\n")
            _chunk(writer, b"")

    def _count(self, message: dict[str, Any]) -> None:
        name = (message.get("params") or {}).get("name", message["method"])
        self.runs[name] += 1
        if self._runs_file:
            with Path(self._runs_file).open("a") as opened:
                opened.write(f"{name}\n")

    async def _call(self, message: dict[str, Any], session: Session, writer: asyncio.StreamWriter) -> None:
        self._count(message)
        params = message["params"]
        token = (params.get("_meta") or {}).get("progressToken")
        call = Call(message["id"], token, session, self._new_stream("call"), writer)
        self._calls[call.id] = call
        steps = (params.get("arguments") or {}).get("steps", [])
        if self.primes:
            self._begun(call)
        call.task = asyncio.get_running_loop().create_task(self._run(call, steps))

    async def _run(self, call: Call, steps: list[list[Any]]) -> None:
        answered: list[Any] = []
        answer: dict[str, Any] = {"error": {"code": -32800, "message": "cancelled"}}
        try:
            answer = await self._play(call, steps, answered)
        except asyncio.CancelledError:
            pass
        finally:
            self._calls.pop(call.id, None)
            if self.json:
                _respond(call.writer, 200, _encoded({"id": call.id, **answer}))
            else:
                self._begun(call)
                self._emit(call.stream, {"id": call.id, **answer})
                self._end(call.stream)
            call.stream.is_over = True

    async def _play(self, call: Call, steps: list[list[Any]], answered: list[Any]) -> dict[str, Any]:
        for kind, *given in steps:
            match kind:
                case "progress":
                    if call.token is not None:
                        params = {"progressToken": call.token, "progress": given[0], "total": 100}
                        self._say(call, {"method": "notifications/progress", "params": params})
                case "log":
                    params = {"level": "info", "data": given[0]}
                    self._say(call, {"method": "notifications/message", "params": params})
                case "notify":
                    self._say(call, {"method": given[0], "params": given[1]})
                case "ask":
                    ask_id = len(self._asks) + 1
                    waiting = self._asks[str(ask_id)] = asyncio.get_running_loop().create_future()
                    self._say(call, {"id": ask_id, "method": given[0], "params": given[1]})
                    answered.append({name: value for name, value in (await waiting).items() if name != "jsonrpc"})
                case "ask_id":
                    self._say(call, {"id": given[0], "method": given[1], "params": given[2]})
                case "withdraw":
                    params = {"requestId": given[0], "reason": "no longer"}
                    self._say(call, {"method": "notifications/cancelled", "params": params})
                case "wait":
                    await self._gate(given[0]).wait()
                case "sleep":
                    await asyncio.sleep(given[0])
                case "diary":
                    _add_line(given[0], f"{given[1]} {os.getpid()}")
                case "begin":
                    self._begun(call)
                case "cut":
                    self._cut(call.stream)
                    if not call.has_begun:
                        call.writer.transport.abort()
                case "close":
                    self._begun(call)
                    self._end(call.stream)
                case "event":
                    self._begun(call)
                    self._emit(call.stream, {}, raw=given[0], event_id=given[1] if len(given) > 1 else "")
                case "answer":
                    self._begun(call)
                    self._emit(call.stream, {}, raw=given[0].replace("$ID", json.dumps(call.id)))
                    await asyncio.Event().wait()
                case "answer_of":
                    self._say(call, {"id": given[0], "result": {}})
                case "tools":
                    self.tools = given[0]
                    self.notify("notifications/tools/list_changed")
                case "fail":
                    return {"error": {"code": given[0], "message": given[1]}}
                case "never":
                    await asyncio.Event().wait()
                case _:
                    raise ValueError(f"there is no step {kind}")
        result: dict[str, Any] = {"content": [{"type": "text", "text": "done"}]}
        return {"result": {**result, "structuredContent": {"replies": answered}} if answered else result}

    def _begun(self, call: Call) -> None:
        """Begin the response of a call's POST, if that has not been done."""
        if not self.json and not call.has_begun and call.writer in self._writers:
            call.has_begun = True
            self._attach(call.stream, call.writer)

    def _say(self, call: Call, message: dict[str, Any]) -> None:
        if self.json:
            self._emit(call.session.standalone, message)
        else:
            self._begun(call)
            self._emit(call.stream, message)


def _add_line(path: str, line: str) -> None:
    with Path(path).open("a") as opened:
        opened.write(f"{line}\n")


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode()


def _respond(writer: asyncio.StreamWriter, status: int, body: bytes, **headers: str) -> None:
    media = {"Content-Type": "application/json"} if body.startswith(b"{") else {"Content-Type": "text/plain"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**media, **headers}.items())
    head = f"HTTP/1.1 {status} {PHRASES.get(status, 'No')}\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    if not writer.is_closing():
        writer.write(head.encode() + body)


def _begin(writer: asyncio.StreamWriter, **headers: str) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{lines}Transfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@asynccontextmanager
async def scripted_http(*, port: int = 0, **config: Any) -> AsyncIterator[ScriptedHttp]:
    """A server in the test's own event loop."""
    server = ScriptedHttp(**config)
    listening = server.listening = await asyncio.start_server(server.serve, "127.0.0.1", port)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/mcp"
    try:
        yield server
    finally:
        listening.close()
        server.lose_sessions()
        server.cut()
        await listening.wait_closed()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--runs", default="")
    parser.add_argument("--config", type=json.loads, default={})
    given = parser.parse_args()
    async with scripted_http(port=given.port, runs_file=given.runs, **given.config) as server:
        print(server.url.split(":")[-1].split("/")[0], flush=True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
