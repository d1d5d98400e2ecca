"""A call, its task, its key and its state belong to the principal that began it; to any other they do not exist.

Two real processes on one SQLite file, with tokens; what is refused is compared byte by byte.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure._core.envelope import CANCEL
from tests.support.clients.modern_peer import ALL_ASKS, TAKES_TASKS, CallPeer, accept, result_of, said
from tests.support.clients.raw_http import Answer
from tests.support.clients.recording_client import looking
from tests.support.processes.serving import Served, serving
from tests.support.servers.asking_tools import server as asking_tools
from tests.support.servers.gate_file_tools import diary
from tests.support.servers.gated_server import live
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

ALICE, ALICE_LATER, BOB = "alice-0123456789", "alice-9876543210", "bob-0123456789ab"


@dataclass(kw_only=True)
class ProxiedNodes:
    """Two nodes on which alice and bob have accounts."""

    served: list[Served]
    folder: Path

    def peer(self, token: str, *, at: int = 0, tasks: bool = True) -> CallPeer:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        capabilities = {**ALL_ASKS, **(TAKES_TASKS if tasks else {})}
        return CallPeer(port=self.served[at].port, headers=headers, capabilities=capabilities)

    def states(self) -> list[tuple[object, ...]]:
        with looking(f"sqlite:{self.folder / 'log.db'}") as rows:
            return rows("SELECT state FROM call")


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[ProxiedNodes]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{ALICE}\nalice:{ALICE_LATER}\nbob:{BOB}\n")
    tokens.chmod(0o600)
    options = ("--store", f"sqlite:{tmp_path / 'log.db'}", "--tokens", str(tokens), "--task-after", "100ms")
    async with AsyncExitStack() as stack:
        served = [
            await stack.enter_async_context(serving(target, *options))
            for target in ("tests.support.servers.asking_tools:server", "tests.support.servers.asking_tools:server")
        ]
        yield ProxiedNodes(served=served, folder=tmp_path)


def shown(answer: Answer) -> tuple[int, bytes]:
    return answer.status, answer.body


async def test_what_is_not_the_callers_own_is_refused_in_the_same_bytes_as_what_is_not_there(
    town: ProxiedNodes,
) -> None:
    """A task, a state and a key of alice's; bob's and an anonymous caller's ways to them, at both nodes."""
    alice = town.peer(ALICE)
    asking = {"question": "Well?"}
    task = result_of(await alice.call("ask", asking))["taskId"]
    state = result_of(await town.peer(ALICE, tasks=False).call("ask", asking))["requestState"]
    keyed = result_of(await alice.call("ask", asking, key="order-7"))["taskId"]
    unknown = secrets.token_urlsafe(32)
    for at in (0, 1):
        bob, nobody = town.peer(BOB, at=at), town.peer("", at=at)
        for method, params in requests_for(task):
            foreign, none = [shown(await bob.rpc(method, {**params, "taskId": name}, id=1)) for name in (task, unknown)]
            assert foreign == none
            assert (foreign[0], b'"code":-32602' in foreign[1]) == (400, True), foreign
            assert (await nobody.rpc(method, params)).status == 401
        keys = [shown(await bob.rpc(CANCEL, {"key": key}, id=1)) for key in ("order-7", "order-8")]
        assert keys[0] == keys[1]
        assert (keys[0][0], b'"code":-32602' in keys[0][1]) == (400, True), keys
        assert await heard(bob, task, keyed) == await heard(bob, unknown, "x") == [{"taskIds": []}, "complete"]
        rounds = town.peer(BOB, at=at, tasks=False)
        answers = [
            shown(await rounds.call("ask", asking, params={"requestState": name, "inputResponses": {}}, id=1))
            for name in (state, f"perdure.{unknown}")
        ]
        assert answers[0] == answers[1]
        assert (answers[0][0], b'"code":-32602' in answers[0][1]) == (400, True), answers
        assert (await town.peer("", at=at, tasks=False).call("ask", asking)).status == 401
    for one in (task, keyed):
        asked = await alice.until_asked(one)
        await alice.update(one, {name: accept(answer="mine") for name in asked})
        assert said((await alice.until_over(one))["result"]) == "mine"


async def heard(peer: CallPeer, *tasks: str) -> list[object]:
    """All that a listener is told of tasks, where it is told of none: the filter that is served, and how it ended."""
    answer = await peer.rpc("subscriptions/listen", {"notifications": {"taskIds": list(tasks)}})
    acknowledged, result = answer.messages
    return [acknowledged["params"]["notifications"], result["result"]["resultType"]]


def requests_for(task: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("tasks/get", {"taskId": task}),
        ("tasks/update", {"taskId": task, "inputResponses": {"ask-1": accept(answer="bob's")}}),
        ("tasks/cancel", {"taskId": task}),
    ]


async def test_a_principal_goes_on_with_another_token_at_another_node(town: ProxiedNodes) -> None:
    first, later = town.peer(ALICE), town.peer(ALICE_LATER, at=1)
    task = result_of(await first.call("ask", {"question": "Well?"}, key="order-7"))["taskId"]
    assert result_of(await later.call("ask", {"question": "Well?"}, key="order-7"))["taskId"] == task
    asked = await later.until_asked(task)
    await later.update(task, {name: accept(answer="mine") for name in asked})
    assert said((await later.until_over(task))["result"]) == "mine"
    by_rounds = result_of(await town.peer(ALICE, tasks=False).call("ask", {"question": "Well?"}))
    responses = {name: accept(answer="round") for name in by_rounds["inputRequests"]}
    there = town.peer(ALICE_LATER, at=1, tasks=False)
    done = await there.round("ask", by_rounds, responses, arguments={"question": "Well?"})
    assert said(result_of(done)) == "round"


async def test_a_task_of_a_dead_node_waits_for_its_principal_and_goes_on_with_the_next_poll(town: ProxiedNodes) -> None:
    log, arguments = town.folder / "log", {"question": "Well?", "log": str(town.folder / "log")}
    task = result_of(await town.peer(ALICE).call("ask_again", arguments))["taskId"]
    before = await town.peer(ALICE, at=1).until_asked(task)
    await town.served[0].kill()
    await until(lambda: town.states() == [("waiting",)])
    bob, alice = town.peer(BOB, at=1), town.peer(ALICE_LATER, at=1)
    assert (await bob.rpc("tasks/get", {"taskId": task})).status == 400
    assert town.states() == [("waiting",)]
    await alice.get(task)
    assert town.states() == [("running",)]
    asked = await alice.until_asked(task, other_than=before)
    await alice.update(task, {name: accept(answer="again") for name in asked})
    assert said((await alice.until_over(task))["result"]) == "again"
    assert [answer for answer, _ in diary(log)] == ["again"]


# States that are not right


async def test_a_state_that_was_changed_or_has_other_arguments_or_has_expired_is_refused() -> None:
    """All alike: a caller that makes states up learns nothing."""
    asking = {"question": "Well?"}
    async with live(server=asking_tools, replay_window=1.5, cleanup_interval=0.05) as served:
        peer = CallPeer(port=served.port, capabilities=ALL_ASKS)
        begun = result_of(await peer.call("ask", asking))
        state: str = begun["requestState"]
        last = "A" if state[-2] != "A" else "B"
        refusals = []
        for changed in (state[:-2] + last + state[-1], state[:-1], state + "A", "perdure.", "perdure.x"):
            refusals.append(await peer.round("ask", {"requestState": changed}, {}, arguments=asking))
        refusals.append(await peer.round("ask", begun, {}, arguments={"question": "Other?"}))
        refusals.append(await peer.round("ask_again", begun, {}, arguments=asking))
        responses = {name: accept(answer="mine") for name in begun["inputRequests"]}
        assert said(result_of(await peer.round("ask", begun, responses, arguments=asking))) == "mine"
        assert said(result_of(await peer.round("ask", begun, responses, arguments=asking))) == "mine"
        refusals += [await expired(peer, begun, asking)]
        assert {(answer.status, answer.error["code"], answer.error["message"]) for answer in refusals} == {
            (400, -32602, "Invalid or expired requestState")
        }


async def expired(peer: CallPeer, begun: dict[str, Any], asking: dict[str, Any]) -> Answer:
    while (answer := await peer.round("ask", begun, {}, arguments=asking)).status == 200:
        pass
    return answer


@pytest.mark.parametrize(
    ("responses", "seen"),
    [
        (7, "7"),
        (None, "nothing"),
        ([], "[]"),
        ("x", "'x'"),
        ({"ask-1": 7}, "{'ask-1': 7}"),
        ({"ask-1": None}, "{'ask-1': None}"),
    ],
)
async def test_responses_that_are_no_objects_are_refused(responses: object, seen: str) -> None:
    async with live(server=asking_tools) as served:
        peer = CallPeer(port=served.port, capabilities={**ALL_ASKS, **TAKES_TASKS})
        task = result_of(await peer.call("ask", {"question": "Well?"}))["taskId"]
        answer = await peer.rpc("tasks/update", {"taskId": task, "inputResponses": responses})
        assert (answer.status, answer.error["code"]) == (400, -32602)
        sentence = f"inputResponses must be an object with an object for each key, not {seen}"
        assert answer.error["message"] == sentence
        assert len(await peer.until_asked(task)) == 1
