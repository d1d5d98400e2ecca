"""A client of 2026-07-28 that takes tasks, behind a balancer that sends each of its requests to another node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure._core.envelope import CALLS, KEY
from tests.support.clients.modern_requests import TASKS, modern
from tests.support.clients.raw_http import Answer, Exchange, Peer

Message = dict[str, Any]

TAKES_TASKS: Mapping[str, Any] = {"extensions": {TASKS: {}, CALLS: {}}}
CAN_BE_ASKED: Mapping[str, Any] = {**TAKES_TASKS, "elicitation": {}}

OVER = ("completed", "failed", "cancelled")
OUTCOME_UNKNOWN = -31001
STOPPING = -31006

#: Seconds before a client tries again: what it waits for has no event that it could hear.
PAUSE = 0.02


class Broken(Exception):
    """The connection broke before the response was whole."""


@dataclass(kw_only=True)
class Balancer:
    """Sends each request to the next node. One that is gone refuses the connection, and the one after it is taken."""

    ports: list[int]
    turn: int = 0
    path: str = "/mcp"

    def next_port(self) -> int:
        self.turn += 1
        return self.ports[(self.turn - 1) % len(self.ports)]

    async def begin(self, data: Sequence[Any]) -> Exchange:
        body, headers = data
        while True:
            try:
                return await Peer(port=self.next_port(), path=self.path).begin("POST", body, headers=headers)
            except ConnectionError:
                await asyncio.sleep(0.001)  # or it would go round in a tight loop until a process comes


@dataclass(kw_only=True)
class TaskClient:
    """Keeps nothing but the ids of its tasks and its keys."""

    balancer: Balancer
    capabilities: Mapping[str, Any] = field(default_factory=lambda: TAKES_TASKS)
    headers: Mapping[str, str] = field(default_factory=dict)

    async def begin(self, method: str, params: Message, *, id: int | str = 1) -> Exchange:  # noqa: A002
        body, headers = modern(method, params, id=id, capabilities=self.capabilities)
        if method.startswith("tasks/"):
            headers["mcp-name"] = params["taskId"]
        headers |= self.headers
        return await self.balancer.begin((body, headers))

    async def ask(self, method: str, params: Message, *, id: int | str = 1) -> Message:  # noqa: A002
        """Send one request; returns the response. Raises `Broken`."""
        async with await self.begin(method, params, id=id) as exchange:
            return response_in(exchange, await exchange.answer())

    async def insist(self, method: str, params: Message) -> Message:
        """Send a request until a node answers it. One that stops says so by its status or, where it had begun to
        answer, by its last word."""
        while True:
            try:
                response = await self.ask(method, params)
            except Broken:
                pass
            else:
                if response["status"] != 503 and response.get("error", {}).get("code") != STOPPING:
                    return response
            await asyncio.sleep(PAUSE)

    async def call(self, tool: str, *, under: str | None = None, **arguments: Any) -> Message:
        """Call a tool with one request, under a key if there is one."""
        return await self.ask("tools/call", call_params(tool, under, **arguments))

    async def task(self, tool: str, *, under: str | None = None, **arguments: Any) -> str:
        """Call a tool; returns the id of the task that the call has become."""
        response = await self.call(tool, under=under, **arguments)
        assert response.get("result", {}).get("resultType") == "task", response
        task_id: str = response["result"]["taskId"]
        return task_id

    async def get(self, task_id: str) -> Message:
        """How a task is, seen from the next node."""
        response = await self.insist("tasks/get", {"taskId": task_id})
        view: Message = response["result"]
        assert view["taskId"] == task_id
        return view

    async def resolved(self, response: Message) -> Message:
        """What came of a call: the response itself, or the end of the task whose handle it is."""
        if "result" in response and response["result"]["resultType"] == "task":
            return await self.outcome(response["result"]["taskId"])
        return response

    async def outcome(self, task_id: str) -> Message:
        """Poll until a task has ended."""
        while (view := await self.get(task_id))["status"] not in OVER:
            pass
        return view


def call_params(tool: str, under: str | None = None, **arguments: Any) -> Message:
    return {"name": tool, "arguments": arguments, **({} if under is None else {"_meta": {KEY: under}})}


def response_in(exchange: Exchange, answer: Answer) -> Message:
    """The response of JSON-RPC in a whole one of HTTP, and its status. Raises `Broken`."""
    if not exchange.parser.complete:
        raise Broken
    kind = answer.header("content-type") or ""
    assert kind.startswith(("application/json", "text/event-stream")), (answer.status, kind, answer.body)
    response = answer.messages[-1] if kind.startswith("text/event-stream") else answer.json
    assert "result" in response or "error" in response, response
    return {"status": answer.status, **response}


def said(view: Message) -> str | int:
    """What came of a task, or of a call: the tool's text, or the code of the error."""
    if (error := view.get("error")) is not None:
        return int(error["code"])
    text: str = view["result"]["content"][0]["text"]
    return text
