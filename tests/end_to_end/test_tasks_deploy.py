"""A rolling deploy under load, both eras at once: each request that was accepted is answered, or its handle resolves.

Processes come and go on one store. Clients go round all of them, also those that are gone, and judge each answer: no
page of an HTTP server, no status but those of the protocol, and no tool that ran twice or for a refused request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.cluster import cluster
from tests.support.crashbox import diary
from tests.support.raw import VERSION, Exchange, Peer, message
from tests.support.site import until
from tests.support.stores import shared_address
from tests.support.task_client import (
    OUTCOME_UNKNOWN,
    STOPPING,
    TAKES_TASKS,
    Balancer,
    Broken,
    Message,
    TaskClient,
    call_params,
    said,
)
from tests.support.witness import assert_answered_once, assert_sound, settled

pytestmark = pytest.mark.anyio

DEPLOYS = int(os.environ.get("PERDURE_TEST_DEPLOYS", "3"))
CLIENTS = 2
"""Of each kind."""
LENGTHS = (1, 3, 16)
"""Reports of a call, 20 ms each: some end before a handle goes out, some behind the time of a stop."""
INTERVAL = 0.02
OPTIONS = ("--task-after", "100ms", "--drain-timeout", "50ms", "--retry", "100ms")


@dataclass
class Load:
    """The clients, and what they met."""

    balancer: Balancer
    log: Path
    over: bool = False
    met: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    """Names of calls that did not begin, as their clients were told."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def next_call(self, tool: str) -> tuple[str, Message]:
        number = next(self._numbers)
        name = f"{tool}-{number}"
        length = LENGTHS[number % len(LENGTHS)]
        return name, {"n": length, "interval": INTERVAL, "log": str(self.log), "key": name}

    def judge(self, kind: str, response: Message, arguments: Message, *, may_fail: bool = True) -> None:
        told = said(response)
        self.met[f"{kind}: {told if isinstance(told, int) else 'result'}"] += 1
        assert told == f"counted to {arguments['n']}" or (may_fail and told == OUTCOME_UNKNOWN), response

    def is_refused(self, kind: str, name: str, response: Message | None) -> bool:
        """Whether a process that stops has not taken a call."""
        if response is not None and response["status"] != 503:
            assert response["status"] == 200, response
            return False
        assert response is None or said(response) == STOPPING, response
        self.met[f"{kind}: {'cut' if response is None else 'refused'}"] += 1
        self.refused.append(name)
        return True

    async def gets_on(self) -> None:
        """Wait until the clients have met some answers more."""
        enough = self.met.total() + 4 * CLIENTS
        await until(lambda: self.met.total() >= enough)

    # The clients

    async def bare(self) -> None:
        """A client without tasks and keys, whose call the SDK's own handler runs."""
        client = TaskClient(balancer=self.balancer, capabilities={})
        while not self.over:
            name, arguments = self.next_call("pay")
            response = await once(client, call_params("pay", **arguments))
            if not self.is_refused("bare", name, response) and response is not None:
                self.judge("bare", response, arguments)

    async def tasks(self) -> None:
        client = TaskClient(balancer=self.balancer, capabilities=TAKES_TASKS)
        for tool in itertools.cycle(("pay", "put")):
            if self.over:
                return
            name, arguments = self.next_call(tool)
            response = await once(client, call_params(tool, **arguments))
            if not self.is_refused("task", name, response) and response is not None:
                self.met[f"task: {response.get('result', {}).get('resultType', 'error')}"] += 1
                self.judge("task", await client.resolved(response), arguments)

    async def keys(self) -> None:
        client = TaskClient(balancer=self.balancer, capabilities={})
        for tool in itertools.cycle(("pay", "count")):
            if self.over:
                return
            name, arguments = self.next_call(tool)
            self.judge("key", await client.insist("tools/call", call_params(tool, name, **arguments)), arguments)

    async def sessions(self) -> None:
        """A client of 2025-11-25: one session, which any process serves."""
        headers = await self._open_session()
        while not self.over:
            name, arguments = self.next_call("count")
            params = {"name": "count", "arguments": arguments, "_meta": {"progressToken": name}}
            body, position = message("tools/call", params, id=name), ""
            answers: list[Message] = []
            while not answers:
                more = {"last-event-id": position} if position else {}
                async with await self._send(
                    "GET" if position else "POST", None if position else body, headers | more
                ) as got:
                    if got.parser.status == 200:
                        while await got.read():
                            pass
                        position = got.position or position
                        answers = [one for one in got.messages if "method" not in one]
                    else:
                        refusal = await got.answer()
                        assert (got.parser.status, refusal.error["code"]) == (503, STOPPING), refusal
            self.judge("session", answers[-1], arguments, may_fail=False)

    async def _open_session(self) -> dict[str, str]:
        client = {"name": "peer", "version": "1"}
        params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client}
        async with await self._send("POST", message("initialize", params, id=0), {}) as opened:
            await opened.answer()
            headers = {"mcp-session-id": opened.header("mcp-session-id"), "mcp-protocol-version": VERSION}
        async with await self._send("POST", message("notifications/initialized"), headers) as done:
            assert done.parser.status == 202
        return headers

    async def _send(self, method: str, body: bytes | None, headers: dict[str, str]) -> Exchange:
        """A response that has begun, from whichever process gives one."""
        while True:
            port = self.balancer.next_port()
            with contextlib.suppress(ConnectionError):
                exchange = await Peer(port=port).begin(method, body, headers=headers)
                if await exchange.head():
                    return exchange
                exchange.cut()
            await asyncio.sleep(0)


async def once(client: TaskClient, params: Message) -> Message | None:
    try:
        return await client.ask("tools/call", params)
    except Broken:
        return None


async def test_a_rolling_deploy_under_load_of_both_eras(tmp_path: Path) -> None:
    address, log = shared_address(tmp_path / "log.db"), tmp_path / "diary"
    async with cluster(address, *OPTIONS, processes=2) as nodes:
        load = Load(balancer=Balancer(ports=[served.port for served in nodes.servers]), log=log)
        async with asyncio.TaskGroup() as group:
            for client in (load.bare, load.tasks, load.keys, load.sessions):
                for _ in range(CLIENTS):
                    group.create_task(client())
            for old in range(DEPLOYS):
                load.balancer.ports.append((await nodes.start()).port)
                await load.gets_on()
                nodes.servers[old].send(signal.SIGTERM)
                assert await nodes.servers[old].wait() == 0
            load.over = True
        print(dict(load.met))
        await settled(address)
    noted = Counter(name for name, _ in diary(log))
    assert {name for name in load.refused if noted[name]} == set()
    assert {name for name, runs in noted.items() if runs > (1 if name.startswith("pay") else 2)} == set()
    assert_answered_once(address)
    assert_sound(address)
