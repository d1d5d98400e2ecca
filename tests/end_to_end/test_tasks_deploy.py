"""A rolling deploy under load, both eras at once: each request that was accepted is answered, or its handle resolves.

Processes of two releases come and go on one store, and the key that seals the state of multi-round calls changes in
between. Clients go round all of them, also those that are gone, and judge each answer: no page of an HTTP server, no
status but those of the protocol, and no tool that ran twice or for a refused request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from perdure.runtime.request_state import KEYS
from tests.support.clients.raw_http import VERSION, Exchange, Peer, message
from tests.support.clients.recording_client import assert_answered_once, assert_sound, settled
from tests.support.clients.task_client import (
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
from tests.support.processes.cluster import cluster
from tests.support.processes.serving import SERVE, Served
from tests.support.servers.gate_file_tools import diary
from tests.support.servers.in_process import until
from tests.support.stores.next_release import build
from tests.support.stores.request_state_keys import pass_life_of_a_key, sealed_with
from tests.support.stores.shared_store import shared_address

pytestmark = pytest.mark.anyio

DEPLOYS = int(os.environ.get("PERDURE_TEST_DEPLOYS", "2"))
CLIENTS = 1
"""Of each kind."""
LENGTHS = (1, 3, 16)
"""Reports of a call, 20 ms each: some end before a handle goes out, some behind the time of a stop."""
INTERVAL = 0.02
ASIDE = 3
"""Rounds that a client leaves unanswered while it begins others, so that most are answered at another process."""
CAN_ELICIT: Message = {"elicitation": {"form": {}}}
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
        """Wait until the clients have met some answers more. (Rounds are quick, and do not stand for the others.)"""

        def met() -> int:
            return sum(times for what, times in self.met.items() if not what.startswith("round"))

        enough = met() + 4 * CLIENTS
        await until(lambda: met() >= enough)

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

    async def rounds(self) -> None:
        """A client that is asked by rounds, and answers each at whichever process is next, after others have begun."""
        client = TaskClient(balancer=self.balancer, capabilities=CAN_ELICIT)
        begun: deque[Round] = deque()
        while not self.over or begun:
            await asyncio.sleep(INTERVAL)  # rounds take no time, and would leave none to the others
            if not self.over:
                begun.append(await begin_round(client, f"round-{next(self._numbers)}"))
            if self.over or len(begun) > ASIDE:
                one = begun.popleft()
                told = said(await client.insist("tools/call", one.answered()))
                self.met[f"round: {told if isinstance(told, int) else 'result'}"] += 1
                assert told in (one.outcome, OUTCOME_UNKNOWN), told

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


@dataclass(frozen=True, kw_only=True)
class Round:
    """A call that has asked its client, and has not been answered yet."""

    arguments: Message
    asks: Message
    state: str

    @property
    def outcome(self) -> str:
        return f"{self.arguments['key']}: yes"

    def answered(self) -> Message:
        """The call again, with the answers and what the server gave to keep."""
        yes = {"action": "accept", "content": {"answer": "yes"}}
        responses = dict.fromkeys(self.asks, yes)
        return {**call_params("decide", **self.arguments), "requestState": self.state, "inputResponses": responses}


async def begin_round(client: TaskClient, key: str) -> Round:
    arguments = {"key": key}
    result = (await client.insist("tools/call", call_params("decide", **arguments)))["result"]
    assert result["resultType"] == "input_required", result
    return Round(arguments=arguments, asks=result["inputRequests"], state=result["requestState"])


def at(served: Served) -> TaskClient:
    """A client of one process alone, which can be asked by rounds."""
    return TaskClient(balancer=Balancer(ports=[served.port]), capabilities=CAN_ELICIT)


async def finish(one: Round, there: Served) -> str | int:
    """Answer a round at a process; gives what came of the call."""
    return said(await at(there).ask("tools/call", one.answered()))


async def assert_refused_by_name(one: Round, there: Served) -> None:
    refusal = await at(there).ask("tools/call", one.answered())
    assert refusal["error"] == REFUSED_STATE, refusal
    await until(lambda: any("requestState rejected on tools/call: unknown key" in line for line in there.output))


REFUSED_STATE = {
    "code": -32602,
    "message": "Invalid or expired requestState",
    "data": {"reason": "invalid_request_state"},
}


@pytest.mark.long
async def test_a_rolling_deploy_under_load_of_both_eras(tmp_path: Path) -> None:
    """Two releases at once, and a change of the key of request state between their processes."""
    address, log = shared_address(tmp_path / "log.db"), tmp_path / "diary"
    release = (*build(tmp_path / "next", migrates_files=False), "serve")
    async with cluster(address, *OPTIONS, processes=2) as nodes:
        load = Load(balancer=Balancer(ports=[served.port for served in nodes.servers]), log=log)
        early = [await begin_round(at(served), f"early-{served.port}") for served in nodes.servers]
        async with asyncio.TaskGroup() as group:
            for client in (load.bare, load.tasks, load.keys, load.rounds, load.sessions):
                for _ in range(CLIENTS):
                    group.create_task(client())
            for number in range(DEPLOYS):
                if number == 1:
                    pass_life_of_a_key(address)
                previous, new = nodes.server, await nodes.start(argv=release if number == 1 else SERVE)
                load.balancer.ports.append(new.port)
                if number == 1:
                    assert [await finish(one, new) for one in early] == [one.outcome for one in early]
                    late = await begin_round(at(new), "late")
                    assert sealed_with(late.state) not in {sealed_with(one.state) for one in early}
                    # One that has not looked since the key changed knows the next key.
                    assert await finish(late, previous) == late.outcome
                await load.gets_on()
                nodes.servers[number].send(signal.SIGTERM)
                assert await nodes.servers[number].wait() == 0
            load.over = True
        print(dict(load.met))
        pass_life_of_a_key(address)
        last = await nodes.start()
        assert await finish(late, last) == late.outcome
        for one in early:
            await assert_refused_by_name(one, last)
        await settled(address)
    noted = Counter(name for name, _ in diary(log))
    assert {name for name in load.refused if noted[name]} == set()
    assert {name for name, runs in noted.items() if name.startswith("pay") and runs > 1} == set()
    assert_answered_once(address)
    assert_sound(address)


async def test_a_deploy_changes_keys_of_the_operator_in_three_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First all processes read the new key, then it seals, then the old one goes: rounds go on over each step, between
    processes of both sides."""
    address, old, new = shared_address(tmp_path / "log.db"), "o" * 32, "n" * 32
    async with cluster(address, *OPTIONS, processes=0) as nodes:
        began: list[Round] = []
        for keys in (old, f"{old},{new}", f"{new},{old}", new):
            monkeypatch.setenv(KEYS, keys)
            served = await nodes.start()
            began.append(await begin_round(at(served), f"under {keys}"))
            for here, there in itertools.pairwise(nodes.servers[-2:]):
                assert await finish(await begin_round(at(here), "on"), there) == "on: yes"
                assert await finish(await begin_round(at(there), "back"), here) == "back: yes"
        assert len({sealed_with(one.state) for one in began}) == 2
        assert [await finish(one, served) for one in began[2:]] == [one.outcome for one in began[2:]]
        for one in began[:2]:
            await assert_refused_by_name(one, served)
