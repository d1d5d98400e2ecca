"""An MCP client that shows the wire: every status, header, id and byte. It repairs nothing and reads only when told."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import Any, Self

import httpx2

from perdure._core.sse import Decoder, ServerSentEvent

LATEST = "2025-11-25"
SESSION_VERSIONS = ("2025-03-26", "2025-06-18", "2025-11-25")

JSON = "application/json"
EVENTS = "text/event-stream"

#: Everything that a server may ask a client for.
CAPABILITIES: dict[str, Any] = {"sampling": {}, "elicitation": {}, "roots": {"listChanged": True}}

Message = dict[str, Any]


class Ended(Exception):
    """The stream ended, and the test wanted another event."""


class Wire:
    """One open event stream."""

    def __init__(self, response: httpx2.Response) -> None:
        assert response.status_code == 200, (response.status_code, response.headers)
        assert response.headers["content-type"] == EVENTS
        self.headers = response.headers
        self.raw = b""
        #: Events in the order of arrival, priming events included.
        self.seen: list[ServerSentEvent] = []
        self._response = response
        self._bytes = response.aiter_raw()
        self._decoder = Decoder()
        self._ready: list[ServerSentEvent] = []

    @property
    def last_id(self) -> str:
        return self.seen[-1].id

    async def event(self) -> ServerSentEvent:
        """The next event, whatever it carries. Raises `Ended` at the end."""
        while not self._ready:
            try:
                chunk = await anext(self._bytes)
            except StopAsyncIteration:
                raise Ended from None
            self.raw += chunk
            self._ready += self._decoder.feed(chunk)
        event = self._ready.pop(0)
        self.seen.append(event)
        return event

    async def message(self) -> Message:
        """The next JSON-RPC message."""
        while not (event := await self.event()).data:
            pass
        message: Message = json.loads(event.data)
        return message

    async def messages(self, count: int) -> list[Message]:
        """The next messages, without the 0 with which the server begins a call of an older revision."""
        found: list[Message] = []
        while len(found) < count:
            message = await self.message()
            if message.get("method") != "notifications/progress" or message["params"]["progress"] != 0:
                found.append(message)
        return found

    async def rest(self) -> list[Message]:
        """All messages until the server ends the stream."""
        return [message async for message in self]

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            try:
                message = await self.message()
            except Ended:
                return
            yield message

    async def comment(self, text: str) -> None:
        """Wait until a comment has arrived."""
        while f": {text}".encode() not in self.raw:
            chunk = await anext(self._bytes)
            self.raw += chunk
            self._ready += self._decoder.feed(chunk)

    async def drop(self) -> None:
        """Close the connection, as a client that leaves."""
        await self._response.aclose()


class Web:
    """A server, as clients see it."""

    def __init__(self, url: str) -> None:
        self.url = url
        # A connection for each request, so that what happens to one of them happens to no other.
        self.http = httpx2.AsyncClient(limits=httpx2.Limits(max_keepalive_connections=0), timeout=None, verify=False)
        self._stack = AsyncExitStack()

    async def aclose(self) -> None:
        await self._stack.aclose()
        await self.http.aclose()

    async def request(self, method: str, *, headers: Iterable[tuple[str, str]] = (), body: Any = None) -> Any:
        """A whole response. `body` is sent as it is if it is bytes, else as JSON."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        return await self.http.request(method, self.url, headers=list(headers), content=content)

    async def open(self, method: str, *, headers: Iterable[tuple[str, str]] = (), body: Any = None) -> httpx2.Response:
        """A response whose body is read later; closed at the end at the latest."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        return await self._stack.enter_async_context(
            self.http.stream(method, self.url, headers=list(headers), content=content)
        )

    async def modern(
        self, method: str, params: Message, *, version: str = "2026-07-28", **headers: str
    ) -> httpx2.Response:
        """A request of the era without sessions: everything it needs is in it."""
        meta = {
            "io.modelcontextprotocol/protocolVersion": version,
            "io.modelcontextprotocol/clientInfo": {"name": "wire", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
            **params.get("_meta", {}),
        }
        names = {
            "accept": f"{JSON}, {EVENTS}",
            "content-type": JSON,
            "mcp-protocol-version": version,
            "mcp-method": method,
            "mcp-name": params.get("name", ""),
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
        response: httpx2.Response = await self.request(
            "POST", headers=[(name, value) for name, value in names.items() if value], body=body
        )
        return response

    async def join(self, version: str = LATEST, **options: Any) -> Peer:
        """A client with an initialized session."""
        peer = Peer(self, version, **options)
        await peer.initialize()
        return peer


class HandshakeFailed(AssertionError):
    """The server opened no session."""


class Peer:
    """A client of one session."""

    def __init__(
        self, site: Web, version: str = LATEST, *, capabilities: Message | None = None, token: str | None = None
    ) -> None:
        self.site = site
        self.version = version
        self.capabilities = CAPABILITIES if capabilities is None else capabilities
        self.token = token
        self.session = ""
        self.welcome: Message = {}
        self._ids = itertools.count(100)

    def through(self, site: Web) -> Peer:
        """The same client, as it reaches another process."""
        twin = Peer(site, self.version, capabilities=self.capabilities, token=self.token)
        twin.session, twin.welcome, twin._ids = self.session, self.welcome, self._ids
        return twin

    def headers(self, accept: str = f"{JSON}, {EVENTS}", **more: str) -> list[tuple[str, str]]:
        """The headers of a request within the session; `more` by their names, with `_` for `-`."""
        headers = {"accept": accept, "content-type": JSON, "mcp-session-id": self.session}
        headers["mcp-protocol-version"] = self.version
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        return [(name, value) for name, value in headers.items() if value]

    async def initialize(self) -> Self:
        body = self.handshake()
        headers = [(name, value) for name, value in self.headers() if name != "mcp-protocol-version"]
        response = await self.site.request("POST", headers=headers, body=body)
        if response.status_code != 200 or "mcp-session-id" not in response.headers:
            raise HandshakeFailed(f"{response.status_code}: {response.text}")
        self.session = response.headers["mcp-session-id"]
        self.welcome = answer_of(response)
        self.version = self.welcome["result"]["protocolVersion"]
        response = await self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        if response.status_code != 202:
            raise HandshakeFailed(f"{response.status_code}: {response.text}")
        return self

    async def reattach(self, site: Web | None = None) -> Peer:
        """The client after a reload: all it knows is its session, and its ids begin at 0 again."""
        twin = self.through(site or self.site)
        twin._ids = itertools.count(0)
        return await twin.initialize()

    def handshake(self) -> Message:
        params = {
            "protocolVersion": self.version,
            "capabilities": self.capabilities,
            "clientInfo": {"name": "wire", "version": "1"},
        }
        return {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}

    async def send(self, body: Any, **headers: str) -> httpx2.Response:
        """POST something; the whole response."""
        response: httpx2.Response = await self.site.request("POST", headers=self.headers(**headers), body=body)
        return response

    async def post(self, body: Any, **headers: str) -> Wire:
        """POST something; the event stream that answers."""
        return Wire(await self.site.open("POST", headers=self.headers(**headers), body=body))

    async def get(self, last_event_id: str | None = None) -> Wire:
        """Read the standalone stream, or resume where an event id says."""
        return Wire(await self.begin_get(last_event_id))

    async def begin_get(self, last_event_id: str | None = None) -> httpx2.Response:
        """The same, whatever the status; a stream is read later."""
        return await self.site.open("GET", headers=self._get_headers(last_event_id))

    async def try_get(self, last_event_id: str | None = None) -> httpx2.Response:
        """The same where a refusal is expected."""
        response: httpx2.Response = await self.site.request("GET", headers=self._get_headers(last_event_id))
        return response

    def _get_headers(self, last_event_id: str | None) -> list[tuple[str, str]]:
        return self.headers(accept=EVENTS, last_event_id=last_event_id or "")

    async def delete(self) -> httpx2.Response:
        response: httpx2.Response = await self.site.request("DELETE", headers=self.headers())
        return response

    def tool(self, name: str, /, *, id: Any = None, token: Any = None, **arguments: Any) -> Message:  # noqa: A002
        """A `tools/call` request. With a token it asks for progress."""
        params: Message = {"name": name, "arguments": arguments}
        if token is not None:
            params["_meta"] = {"progressToken": token}
        return self.request("tools/call", params, id=id)

    def request(self, method: str, params: Message | None = None, *, id: Any = None) -> Message:  # noqa: A002
        message = {"jsonrpc": "2.0", "id": next(self._ids) if id is None else id, "method": method}
        return message if params is None else {**message, "params": params}

    async def call(self, name: str, /, *, id: Any = None, token: Any = None, **arguments: Any) -> Wire:  # noqa: A002
        """Begin a tool call; its event stream."""
        return await self.post(self.tool(name, id=id, token=token, **arguments))

    async def result(self, name: str, /, **arguments: Any) -> str:
        """Call a tool to the end; the text of its result."""
        return text_of((await (await self.call(name, **arguments)).rest())[-1])

    async def cancel(self, request_id: Any) -> httpx2.Response:
        params = {"requestId": request_id, "reason": "changed my mind"}
        return await self.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})

    async def answer(self, ask: Message, result: Message) -> httpx2.Response:
        return await self.send({"jsonrpc": "2.0", "id": ask["id"], "result": result})


def answer_of(response: httpx2.Response) -> Message:
    """The last message of a whole response, JSON or events."""
    if response.headers["content-type"].startswith(JSON):
        body = response.text
    else:
        body = [event.data for event in Decoder().feed(response.content) if event.data][-1]
    message: Message = json.loads(body)
    return message


def text_of(answer: Message) -> str:
    """The text of a tool's result."""
    text: str = answer["result"]["content"][0]["text"]
    return text


def progress_of(messages: Iterable[Message]) -> list[int]:
    """What the tools said, which count from 1: older revisions begin with a 0 of the server's own."""
    said = [int(m["params"]["progress"]) for m in messages if m.get("method") == "notifications/progress"]
    return said[1:] if said[:1] == [0] else said


def notices_of(messages: Iterable[Message]) -> list[int]:
    """The numbers of `announce`d notices."""
    updates = [m for m in messages if m.get("method") == "notifications/resources/updated"]
    return [int(m["params"]["uri"].removeprefix("notice://")) for m in updates]


def gaps_of(messages: Iterable[Message]) -> list[tuple[int, int]]:
    gaps = [m["params"] for m in messages if m.get("method") == "notifications/perdure/gap"]
    return [(gap["from"], gap["to"]) for gap in gaps]
