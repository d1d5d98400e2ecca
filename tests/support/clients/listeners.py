"""Listeners of 2026-07-28 on a socket: the notifications of each, and its further connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.support.clients.modern_requests import modern
from tests.support.clients.raw_http import Answer, Exchange, Peer

SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"
UPDATED = "notifications/resources/updated"
LISTS = {"tools", "prompts", "resources"}


def wanted(*items: str) -> dict[str, Any]:
    """The filter for some lists (`tools`, `prompts`, `resources`) and resources."""
    uris = [item for item in items if item not in LISTS]
    lists: dict[str, Any] = {f"{item}ListChanged": True for item in items if item in LISTS}
    return lists | ({"resourceSubscriptions": uris} if uris else {})


def item_of(message: Mapping[str, Any]) -> str:
    """Return the item that a notification is about, by the names of `wanted`; else its method."""
    method: str = message["method"]
    if method == UPDATED:
        uri: str = message["params"]["uri"]
        return uri
    return method.split("/")[1] if method.endswith("/list_changed") else method


class Listener:
    """One listener, over all its connections."""

    def __init__(self, *items: str, headers: Mapping[str, str] | None = None) -> None:
        self.items = items
        self.told: list[str] = []
        """The items of all notifications, in order."""
        self.exchange: Exchange | None = None
        self._headers = dict(headers or {})
        self._seen = 0

    async def listen(self, port: int, *, address: str = "127.0.0.1") -> dict[str, Any]:
        """Listen at a port; returns the acknowledgement."""
        await self.cut()
        body, headers = modern("subscriptions/listen", {"notifications": wanted(*self.items)}, id="mine")
        peer = Peer(port=port, headers=self._headers, address=address)
        self.exchange = await peer.begin("POST", body, headers=headers)
        self._seen = 0
        messages = await self.exchange.until_messages(1)
        assert messages, self.exchange.parser.status
        assert messages[0].get("method") == ACKNOWLEDGED, messages
        self._take()
        return messages[0]

    def _take(self) -> None:
        assert self.exchange is not None
        for message in self.exchange.messages[self._seen :]:
            self._seen += 1
            if "method" not in message:
                continue
            assert message["params"]["_meta"] == {SUBSCRIPTION: "mine"}
            if message["method"] != ACKNOWLEDGED:
                self.told.append(item_of(message))

    async def read(self) -> bool:
        """Read what comes next; returns whether the response continues."""
        assert self.exchange is not None
        goes_on = await self.exchange.read()
        self._take()
        return goes_on

    async def until_told(self, *items: str) -> None:
        """Read until each of these items was notified of since the last `forget`."""
        while set(items) - set(self.told):
            assert await self.read(), f"the response ended; told {self.told}, waited for {items}"

    def forget(self) -> None:
        self.told.clear()

    async def cut(self) -> None:
        """Break the connection off, if there is one."""
        if self.exchange is not None:
            self.exchange.cut()
            await self.exchange.aclose()
            self.exchange = None


async def publish(port: int, what: str, *, times: int = 1, headers: Mapping[str, str] | None = None) -> int:
    """Change something at a server; returns the process that did it."""
    body, own = modern("tools/call", {"name": "change", "arguments": {"what": what, "times": times}})
    answer = await Peer(port=port, headers=dict(headers or {})).ask("POST", body, headers=own)
    result = result_of(answer)
    return int(result["content"][0]["text"])


def result_of(answer: Answer) -> dict[str, Any]:
    message = answer.messages[-1] if answer.header("content-type") == "text/event-stream" else answer.json
    result: dict[str, Any] = message["result"]
    return result


@asynccontextmanager
async def listening(
    port: int, *items: str, address: str = "127.0.0.1", headers: Mapping[str, str] | None = None
) -> AsyncIterator[Listener]:
    """A listener that is acknowledged, and has had the cue for each item with which it begins."""
    listener = Listener(*items, headers=headers)
    try:
        await listener.listen(port, address=address)
        await listener.until_told(*items)
        listener.forget()
        yield listener
    finally:
        await listener.cut()
