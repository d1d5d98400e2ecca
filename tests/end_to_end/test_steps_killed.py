"""A tool does its effects in steps, its process is killed, and the call goes on in the middle of the tool.

Real processes, killed with SIGKILL by themselves at named points of the tool. Each effect adds a line to a file, so a
test counts effects over all processes.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

import perdure
from perdure._core.envelope import CALLS
from tests.support.clients.modern_peer import CallPeer, result_of
from tests.support.clients.recording_client import assert_answered_once, assert_sound, looking
from tests.support.clients.task_client import CAN_BE_ASKED, OUTCOME_UNKNOWN, Balancer, Broken, Message, TaskClient, said
from tests.support.clients.wire_client import Web, answer_of, text_of
from tests.support.processes.cluster import cluster
from tests.support.processes.crash_points import POSTGRES_WRITER, STEPS, Point, at
from tests.support.processes.serving import Served, die_at, serving
from tests.support.servers.in_process import until
from tests.support.servers.step_tools import Script, effects
from tests.support.stores.postgres import store_url
from tests.support.stores.shared_store import ON_POSTGRES, shared_address

pytestmark = pytest.mark.anyio

STEP_TOOLS = "tests.support.servers.step_tools:server"


@dataclass(kw_only=True)
class Story:
    """A store, the servers that start one after another on it, and a client whose call has become a task."""

    folder: Path
    address: str
    stack: AsyncExitStack
    balancer: Balancer = field(default_factory=lambda: Balancer(ports=[]))
    asked: list[str] = field(default_factory=list)
    seen: dict[str, set[Any]] = field(default_factory=dict)

    async def start(self, *options: str, point: Point | None = None) -> Served:
        given = ("--store", self.address, "--task-after", "0s", *options)
        server = await self.stack.enter_async_context(serving(STEP_TOOLS, *given, point=point))
        self.balancer.ports[:] = [server.port]
        return server

    async def begin(self, tool: str = "play", *, opens: bool = True, **arguments: Any) -> str:
        """Call a tool, which begins when its caller has the task."""
        self.client = TaskClient(balancer=self.balancer, capabilities=CAN_BE_ASKED)
        task = await self.client.task(tool, folder=str(self.folder), **arguments)
        if opens:
            self.open("begin")
        return task

    def gate(self, name: str) -> str:
        return str(self.folder / name)

    def open(self, name: str) -> None:
        Path(self.gate(name)).touch()

    async def outcome(self, task: str) -> Message:
        """Poll until the task has ended, and answer what it asks."""
        while True:
            view = await self.client.get(task)
            if view["status"] == "input_required":
                for name, ask in view["inputRequests"].items():
                    self.asked.append(ask["params"]["message"])
                    content = {"action": "accept", "content": {"answer": f"answer-{len(self.asked)}"}}
                    await self.client.insist("tasks/update", {"taskId": task, "inputResponses": {name: content}})
            elif view["status"] != "working":
                return view

    async def next_of(self, query: str) -> None:
        """Wait until a query has a row that it did not have at the last time."""
        before = self.seen.setdefault(query, set())
        await until(lambda: bool(set(self.rows(query)) - before))
        before.update(self.rows(query))

    async def play(self, script: Script, *die: str, tool: str = "play") -> Message:
        """Play a script, and start another server each time that one has died."""
        server = await self.start()
        task = await self.begin(tool, script=script, die=list(die))
        polling = asyncio.create_task(self.outcome(task))
        for _ in range(sum(int(point.partition(" *")[2] or 1) for point in die)):
            dying = asyncio.create_task(server.has_died())
            await asyncio.wait((dying, polling), return_when=asyncio.FIRST_COMPLETED)
            if not dying.done():
                dying.cancel()  # the task ended before the next point
                break
            assert dying.result()
            server = await self.start()
        return await polling

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with looking(self.address) as rows:
            return rows(query)

    @property
    def effects(self) -> Counter[str]:
        return Counter(name for name, _, _ in effects(self.folder))

    def judge(self) -> None:
        assert_answered_once(self.address)
        assert_sound(self.address)


@pytest.fixture
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    is_postgres = getattr(request, "param", "") == "postgres"
    return store_url() if is_postgres else shared_address(tmp_path / "log.db")


on_both = pytest.mark.parametrize("address", [""] if ON_POSTGRES else ["", "postgres"], indirect=True)


@pytest.fixture
async def story(tmp_path: Path, address: str) -> AsyncIterator[Story]:
    async with AsyncExitStack() as stack:
        yield Story(folder=tmp_path, address=address, stack=stack)


SHOP: Script = [{"step": "price", "again": True}, {"step": "charge"}, {"step": "mail", "again": True}]


@on_both
async def test_a_finished_step_is_not_run_again(story: Story) -> None:
    """And the tool gets the value that the first process has recorded."""
    view = await story.play(SHOP, "after charge")
    price, charge, mail = str(said(view)).split(" ")[1::2]
    assert price == charge != mail
    assert story.effects == {"price": 1, "charge": 1, "mail": 1}
    story.judge()


@on_both
async def test_an_unmarked_step_that_was_interrupted_ends_the_call(story: Story) -> None:
    view = await story.play(SHOP, "behind charge")
    assert said(view) == OUTCOME_UNKNOWN
    assert view["error"]["data"]["steps"] == {"finished": ["price"], "open": ["charge"]}
    assert "Finished: price. Begun, but not known to have finished: charge." in view["error"]["message"]
    assert story.effects == {"price": 1, "charge": 1}
    story.judge()


async def test_an_unmarked_step_that_died_before_its_effect_ends_the_call(story: Story) -> None:
    """No process can know that."""
    view = await story.play(SHOP, "in charge")
    assert (said(view), view["error"]["data"]["steps"]["open"]) == (OUTCOME_UNKNOWN, ["charge"])
    assert story.effects == {"price": 1}


async def test_steps_last_in_a_session_with_a_key_and_in_a_task_of_a_session(story: Story) -> None:
    """One process runs all three, and dies between their steps."""
    ways = ("session", "key", "task")
    server = await story.start("--task", "play=optional")
    story.stack.push_async_callback((web := Web(server.url)).aclose)
    peer = await web.join("2025-11-25")
    given: dict[str, dict[str, Any]] = {}
    for way in ways:
        folder = story.folder / way
        folder.mkdir()
        (folder / "begin").touch()
        script: Script = [{"step": "one"}, {"gate": story.gate("go")}, {"step": "two", "again": True}]
        given[way] = {"script": script, "folder": str(folder)}
    position = (await (await peer.call("play", **given["session"])).event()).id
    begun = peer.tool("play", **given["task"])
    begun["params"]["task"] = {}
    task = answer_of(await peer.send(begun))["result"]["task"]["taskId"]
    client = TaskClient(balancer=story.balancer, capabilities={"extensions": {CALLS: {}}})
    keyed = asyncio.create_task(client.call("play", under="key", **given["key"]))
    await until(lambda: len(story.rows("SELECT 1 FROM tool_step WHERE state = 'ended'")) == 3)
    await server.kill()
    with pytest.raises(Broken):
        await keyed
    last = await story.start("--task", "play=optional")
    story.stack.push_async_callback((web := Web(last.url)).aclose)
    peer = peer.through(web)
    reading = await peer.get(position)
    asking = asyncio.create_task(peer.send(peer.request("tasks/result", {"taskId": task})))
    again = asyncio.create_task(client.call("play", under="key", **given["key"]))
    story.open("go")
    told = text_of((await reading.rest())[-1]), text_of(answer_of(await asking)), said(await again)
    assert told == (f"one {server.pid} two {last.pid}",) * 3
    assert [[name for name, _, _ in effects(story.folder / way)] for way in ways] == [["one", "two"]] * 3
    story.judge()


@pytest.mark.parametrize("point", ["in mail", "behind mail"])
async def test_a_step_that_may_run_again_does_under_the_same_key(story: Story, point: str) -> None:
    view = await story.play(SHOP, point)
    assert [word for word in str(said(view)).split(" ") if not word.isdigit()] == ["price", "charge", "mail"]
    keys = {key for name, key, _ in effects(story.folder) if name == "mail"}
    assert (len(keys), story.effects["mail"]) == (1, 1 if point == "in mail" else 2)
    assert (story.effects["price"], story.effects["charge"]) == (1, 1)


CHECKED: Script = [{"step": "charge", "check": True}, {"step": "mail", "again": True}]


async def test_a_check_that_finds_the_step_done_gives_its_result(story: Story) -> None:
    assert "charge was done mail" in str(said(await story.play(CHECKED, "behind charge")))
    assert story.effects == {"charge": 1, "mail": 1}


async def test_a_check_that_does_not_find_it_lets_it_run(story: Story) -> None:
    assert "was done" not in str(said(await story.play(CHECKED, "in charge")))
    assert story.effects == {"charge": 1, "mail": 1}


@on_both
async def test_a_call_that_gets_on_may_die_often(story: Story) -> None:
    """Once behind each step, and at the start; each process but the last is killed."""
    script: Script = [{"step": name} for name in ("one", "two", "three", "four")]
    view = await story.play(script, "before one", *(f"after {act['step']}" for act in script))
    assert str(said(view)).split(" ")[::2] == ["one", "two", "three", "four"]
    assert set(story.effects.values()) == {1}
    story.judge()


async def test_a_call_ends_that_dies_in_two_runs_without_getting_on(story: Story) -> None:
    view = await story.play(SHOP, "before charge *3")
    assert said(view) == OUTCOME_UNKNOWN
    assert view["error"]["data"]["steps"] == {"finished": ["price"], "open": []}
    assert story.effects == {"price": 1}


async def test_a_tool_that_ends_its_process_does_so_once(story: Story) -> None:
    """A process that ends in good order is no death, and the next ones would end in the same step."""
    server = await story.start()
    task = await story.begin(script=[{"step": "one"}, {"exit": "two"}])
    await server.wait()
    await story.start()
    view = await story.outcome(task)
    assert (said(view), view["error"]["data"]["reason"]) == (OUTCOME_UNKNOWN, "its tool ended the process")
    assert view["error"]["data"]["steps"] == {"finished": ["one"], "open": ["two"]}
    assert story.effects == {"one": 1, "two": 1}
    story.judge()


async def test_a_death_in_a_sleep_does_not_count(story: Story) -> None:
    """Three processes die in one sleep, and it ends when it would have ended."""
    script: Script = [{"step": "one"}, {"sleep": 15}, {"step": "two"}]
    server = await story.start()
    task = await story.begin(script=script)
    await story.next_of("SELECT 1 FROM tool_step WHERE kind = 'sleep'")
    for _ in range(3):
        await story.next_of("SELECT node FROM stream WHERE kind = 'c'")  # of a process that sleeps on
        await server.kill()
        server = await story.start()
    assert str(said(await story.outcome(task))).split(" ")[::2] == ["one", "two"]
    assert story.effects == {"one": 1, "two": 1}
    [(begun, ends)] = story.rows("SELECT began, ended FROM tool_step WHERE kind = 'sleep'")
    [(woken,)] = story.rows("SELECT began FROM tool_step WHERE name = 'two'")
    assert ends - begun == pytest.approx(15)
    assert woken >= ends


async def test_a_hinted_tool_runs_an_open_step_again(story: Story) -> None:
    """Its second run may also take another way: another text is asked."""
    script: Script = [{"first": [{"ask": "Why?"}], "then": [{"ask": "Where?"}]}, *SHOP]
    view = await story.play(script, "behind charge", tool="play_again")
    assert str(said(view)).split(" ")[0] == "answer-2"
    assert story.asked == ["Why?", "Where?"]
    assert story.effects == {"price": 1, "charge": 2, "mail": 1}


async def test_a_tool_that_says_nothing_is_told_with_its_steps(story: Story) -> None:
    view = await story.play(SHOP, "after charge", tool="play_once")
    assert said(view) == OUTCOME_UNKNOWN
    assert view["error"]["data"]["steps"] == {"finished": ["price", "charge"], "open": []}
    assert story.effects == {"price": 1, "charge": 1}


async def test_a_synchronous_tool_goes_on(story: Story) -> None:
    server = await story.start()
    task = await story.begin("play_sync", names=["price", "charge", "charge"], die=["after price"])
    assert await server.has_died()
    await story.start()
    assert str(said(await story.outcome(task))).split(" ")[::2] == ["price", "charge", "charge"]
    assert story.effects == {"price": 1, "charge": 2}


# Questions


@on_both
async def test_an_answered_question_is_not_asked_again(story: Story) -> None:
    """Two equal questions have their own answers, and another text is asked."""
    script: Script = [{"ask": "Why?"}, {"ask": "Why?"}, {"step": "one"}, {"ask": "Where?"}]
    words = str(said(await story.play(script, "after one"))).split(" ")
    assert story.asked == ["Why?", "Why?", "Where?"]
    assert [*words[:3], words[4]] == ["answer-1", "answer-2", "one", "answer-3"]


@pytest.mark.parametrize("tool", ["play", "play_again"])
async def test_the_answer_is_there_before_the_tool_has_it(story: Story, tool: str) -> None:
    """Also of a tool that knows nothing of steps."""
    assert said(await story.play([{"ask": "Why?"}], "after Why?", tool=tool)) == "answer-1"
    assert story.asked == ["Why?"]


async def test_an_open_question_is_asked_again_and_its_death_does_not_count(story: Story) -> None:
    server = await story.start()
    task = await story.begin(script=[{"step": "one"}, {"ask": "Why?"}])
    for _ in range(3):
        await story.next_of("SELECT id FROM ask")
        await server.kill()
        server = await story.start()
    await story.next_of("SELECT id FROM ask")
    assert "answer-1" in str(said(await story.outcome(task)))
    assert (story.asked, story.effects) == (["Why?"], {"one": 1})


# The order


async def test_another_step_than_the_recorded_one_is_a_mismatch_and_nothing_runs(story: Story) -> None:
    """Whatever the tool makes of it."""
    for tool in ("play", "play_catching"):
        story.folder = story.folder / tool
        story.folder.mkdir()
        script: Script = [{"first": [{"step": "a"}, {"step": "b"}], "then": [{"step": "c"}, {"step": "a"}]}]
        view = await story.play(script, "after a", tool=tool)
        assert said(view) == OUTCOME_UNKNOWN
        assert view["error"]["data"]["reason"] == (
            "this call had done 'a' as its step 1, and now begins 'c': the tool has changed, or is not deterministic "
            "outside its steps"
        )
        assert story.effects == {"a": 1}


async def test_steps_behind_the_recorded_ones_may_be_added(story: Story) -> None:
    script: Script = [{"first": [{"step": "a"}], "then": [{"step": "a"}, {"step": "b"}]}]
    assert str(said(await story.play(script, "after a"))).split(" ")[::2] == ["a", "b"]
    assert story.effects == {"a": 1, "b": 1}


TEN: Script = [
    {"step": "begin"},
    {"each": [[{"step": f"{n}", "again": True}, {"step": f"{n}-next"}] for n in range(10)]},
]


@on_both
async def test_ten_tasks_at_once_go_on_where_each_was(story: Story) -> None:
    """In whatever order they begin; an unmarked step that was open would end the call."""
    view = await story.play(TEN, "before 3-next", "before 7-next")
    names = [f"{n}{more}" for n in range(10) for more in ("", "-next")]
    if said(view) == OUTCOME_UNKNOWN:
        assert set(view["error"]["data"]["steps"]["open"]) <= set(names)
    else:
        assert str(said(view)).split(" ")[::2] == ["begin", *names]
        assert {name: count for name, count in story.effects.items() if name.endswith("next")} == {
            name: 1 for name in names if name.endswith("next")
        }
    assert all(count == 1 for name, count in story.effects.items() if name.endswith(("next", "begin")))


@pytest.mark.long
@on_both
async def test_ten_tasks_at_once_are_killed_at_random_fifty_times(story: Story) -> None:
    """No unmarked step runs twice, and each call has all its values or names what is unknown."""
    chance, above = random.Random(25), story.folder
    steps = [f"{n}{more}" for n in range(10) for more in ("", "-next")]
    server, unknown = await story.start(), 0
    for number in range(50):
        story.folder = above / str(number)
        story.folder.mkdir()
        point = f"{chance.choice(('before', 'in', 'behind', 'after'))} {chance.choice(steps)}"
        task = await story.begin(script=TEN, die=[point])
        assert await server.has_died()
        server = await story.start()
        view = await story.outcome(task)
        if said(view) == OUTCOME_UNKNOWN:
            unknown += 1
            told = view["error"]["data"]["steps"]
            assert told["open"]
            assert set(story.effects) <= {*told["finished"], *told["open"], *steps[::2]}
        else:
            assert str(said(view)).split(" ")[::2] == ["begin", *steps]
        assert all(count == 1 for name, count in story.effects.items() if name.endswith(("next", "begin")))
    assert 0 < unknown < 50
    story.judge()


# Every moment of a step. A step that may run again is written once, any other twice: price, charge, charge, mail.

TOOL_STEPS = "perdure.sessions.tool_steps"
WRITES = ("the end of price", "the begin of charge", "the end of charge", "the end of mail")
BEFORE = at(TOOL_STEPS, "ToolSteps._step", "enter")
WITHIN = at(STEPS, "StreamSteps.put_tool_step", "leave")
WITHIN_POSTGRES = at(POSTGRES_WRITER, "_refusals", "enter")  # it is made, and the process does not know
BEHIND = at(TOOL_STEPS, "ToolSteps._put", "enter")
MOMENTS = {
    "": {"before the commit of": BEFORE, "in the commit of": WITHIN, "behind the commit of": BEHIND},
    "postgres": {"before the commit of": BEFORE, "in the commit of": WITHIN_POSTGRES, "behind the commit of": BEHIND},
}


def moments() -> Iterator[Any]:
    """The two commits of an unmarked step are in every run."""
    for number, write in enumerate(WRITES, 1):
        for store, found in MOMENTS.items():
            if ON_POSTGRES and not store:
                continue  # those are points of a SQLite file
            for moment, point in found.items():
                marks = () if "charge" in write else (pytest.mark.long,)
                yield pytest.param(store, replace(point, nth=number), id=f"{moment} {write} {store}", marks=marks)


@pytest.mark.parametrize(("address", "point"), [*moments()], indirect=["address"])
async def test_a_process_dies_at_a_moment_of_a_step(story: Story, point: Point) -> None:
    """No unmarked effect is done twice, and the call ends in its value or names what is unknown."""
    server = await story.start(point=point)
    task = await story.begin(script=SHOP, opens=False)
    await server.arm()
    story.open("begin")
    assert await server.has_died()
    await story.start()
    view = await story.outcome(task)
    if said(view) == OUTCOME_UNKNOWN:
        assert view["error"]["data"]["steps"] == {"finished": ["price"], "open": ["charge"]}
        assert story.effects["mail"] == 0
    else:
        assert str(said(view)).split(" ")[::2] == ["price", "charge", "mail"]
        assert min(story.effects.values()) == 1
    assert story.effects["charge"] <= 1
    story.judge()


ASKING: Script = [{"ask": "Why?"}, {"sleep": 0}, {"step": "one"}]
"""The answer is its first row, the sleep its second one."""

LINK, SETTLER = "perdure.sessions.runtime_link", "perdure.cluster.settler"
ASKED_AGAIN = {
    "before the commit of an answer": at(TOOL_STEPS, "ToolSteps.answered", "enter"),
    "in the commit of an answer": WITHIN,
}
ASKED_ONCE = {
    "between an answer and the tool": at(LINK, "Asks._hand_over", "enter"),
    "before the commit of a sleep": replace(BEFORE, nth=2),
    "in the commit of a sleep": replace(WITHIN, nth=2),
    "behind the commit of a sleep": replace(BEHIND, nth=2),
    "before the commit of the call's answer": at("perdure.sessions.ledger", "Calls.answer", "enter"),
    "in the commit of the call's answer": at(STEPS, "StreamSteps.append", "within"),
}
IN_POSTGRES = {
    "in the commit of an answer": replace(WITHIN_POSTGRES, nth=2),
    "in the commit of a sleep": replace(WITHIN_POSTGRES, nth=3),
    "in the commit of the call's answer": replace(WITHIN_POSTGRES, nth=6),
}
"""The commits are of the question, its answer, the sleep, the begin and the end of the step, and the call's answer."""


@pytest.mark.parametrize(
    ("address", "point", "times"),
    [
        pytest.param(
            store,
            IN_POSTGRES.get(name, point) if store else point,
            times,
            id=f"{name} {store}",
            marks=() if "between" in name else pytest.mark.long,
        )
        for points, times in ((ASKED_AGAIN, 2), (ASKED_ONCE, 1))
        for name, point in points.items()
        for store in ("", "postgres")
        if store or not (ON_POSTGRES and name.startswith("in "))  # those are points of a SQLite file
    ],
    indirect=["address"],
)
async def test_a_process_dies_at_a_moment_of_a_question_of_a_sleep_or_of_the_answer(
    story: Story, point: Point, times: int
) -> None:
    """A question is asked again only if its answer was not accepted: by this process, or by the next one, to which the
    client sends it again."""
    server = await story.start(point=point)
    task = await story.begin(script=ASKING, opens=False)
    await server.arm()
    story.open("begin")
    polling = asyncio.create_task(story.outcome(task))
    assert await server.has_died()
    await story.start()
    words = str(said(await polling)).split(" ")
    assert words[:2] == [f"answer-{len(story.asked)}", "one"]
    assert 1 <= len(story.asked) <= times
    assert story.effects == {"one": 1}
    story.judge()


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(at(SETTLER, "Settler._abandoned", "enter", armed=True), id="claimed", marks=pytest.mark.long),
        pytest.param(at(SETTLER, "Settler._run", "enter", armed=True), id="read"),
        pytest.param(at(LINK, "RuntimeLink.start_again", "enter", armed=True), id="counted", marks=pytest.mark.long),
    ],
)
@on_both
async def test_a_process_dies_as_it_takes_a_call_over(story: Story, point: Point) -> None:
    """It has claimed the stream, read the steps, or counted the run; the third process goes on all the same."""
    server = await story.start()
    task = await story.begin(script=SHOP, die=["after charge"])
    assert await server.has_died()
    assert await die_at(point, STEP_TOOLS, "--store", story.address, "--task-after", "0s")
    await story.start()
    assert str(said(await story.outcome(task))).split(" ")[::2] == ["price", "charge", "mail"]
    assert story.effects == {"price": 1, "charge": 1, "mail": 1}
    story.judge()


# Two nodes


@pytest.mark.parametrize("through", ["http", "stdio"])
async def test_another_node_goes_on_in_a_session(through: str, tmp_path: Path) -> None:
    """Era of sessions: the client's own call is answered, and its progress goes on. Also that of a host of programs,
    through `perdure stdio`."""
    async with cluster(shared_address(tmp_path / "log.db"), processes=2, target=STEP_TOOLS) as two:
        url = f"http://127.0.0.1:{two.proxy.port}/mcp"
        (tmp_path / "begin").touch()
        bridge = StdioServerParameters(command=sys.executable, args=["-m", "perdure", "stdio", url, "--no-resume"])
        async with (
            perdure.connect(url, mode="legacy")
            if through == "http"
            else Client(stdio_client(bridge), mode="legacy") as client
        ):
            arguments = {"script": SHOP, "folder": str(tmp_path), "die": ["after charge"]}
            result = await client.call_tool("play", arguments)
    words = str(result.content[0].text).split(" ")  # type: ignore[union-attr]
    assert words[::2] == ["price", "charge", "mail"]
    assert words[1] == words[3] != words[5]
    assert Counter(name for name, _, _ in effects(tmp_path)) == {"price": 1, "charge": 1, "mail": 1}


@on_both
async def test_an_answer_in_the_mail_of_a_dead_node_counts(story: Story) -> None:
    """The node that has asked stands still; its client answers at the other one, and is told that this is accepted."""
    first = await story.start("--lease", "60s")
    task = await story.begin(script=[{"ask": "Why?"}, {"step": "one"}])
    while not (asked := (await story.client.get(task)).get("inputRequests")):
        pass
    await story.start("--lease", "60s")
    first.send(signal.SIGSTOP)
    answers = {name: {"action": "accept", "content": {"answer": "so"}} for name in asked}
    response = await story.client.ask("tasks/update", {"taskId": task, "inputResponses": answers})
    assert "result" in response
    await first.kill()
    assert str(said(await story.outcome(task))).split(" ")[:2] == ["so", "one"]  # and not what it says a second time


async def test_a_call_that_is_cancelled_at_another_node_tells_its_steps(story: Story) -> None:
    """Its own node stands still in a step, and dies before it has read that."""
    first = await story.start("--lease", "60s")
    story.stack.push_async_callback((web := Web(first.url)).aclose)
    peer = await web.join("2025-11-25")
    story.open("begin")
    script: Script = [{"step": "one"}, {"step": "two", "at": story.gate("go")}]
    wire = await peer.call("play", id=7, script=script, folder=str(story.folder))
    position = (await wire.event()).id
    await until(lambda: story.effects == {"one": 1, "two": 1})
    second = await story.start("--lease", "60s")
    story.stack.push_async_callback((web := Web(second.url)).aclose)
    first.send(signal.SIGSTOP)
    peer = peer.through(web)
    await peer.cancel(7)
    await first.kill()
    [*_, answer] = await (await peer.get(position)).rest()
    assert answer["error"]["code"] == -32800
    assert answer["error"]["data"] == {"steps": {"finished": ["one"], "open": ["two"]}}
    story.judge()


@pytest.mark.parametrize(
    "address", [""] if ON_POSTGRES else ["", pytest.param("postgres", marks=pytest.mark.long)], indirect=True
)
async def test_a_principal_may_take_as_long_as_its_task_is_kept(story: Story) -> None:
    """A call that only has to go on waits on after `session_grace`, in which another one is given up. The request of
    another principal does not run it."""
    tokens, gate = story.folder / "tokens", story.gate("go")
    tokens.write_text("alice:alice-0123456789\nbob:bob-0123456789ab\n")
    tokens.chmod(0o600)
    options = ("--tokens", str(tokens), "--session-grace", "1s")
    server = await story.start(*options)

    def peer(token: str) -> CallPeer:
        return CallPeer(port=server.port, headers={"authorization": f"Bearer {token}"}, capabilities=CAN_BE_ASKED)

    def states() -> list[str]:
        return [state for (state,) in story.rows("SELECT state FROM call ORDER BY name, request_id")]

    story.open("begin")
    tasks = []
    scripts: list[tuple[str, Script]] = [
        ("play", [{"step": "one"}, {"gate": gate}]),
        ("play", [{"gate": gate}, {"step": "two"}]),
        ("play_again", [{"gate": gate}]),
    ]
    alice = peer("alice-0123456789")
    for tool, script in scripts:
        arguments = {"script": script, "folder": str(story.folder)}
        tasks.append(result_of(await alice.call(tool, arguments))["taskId"])
    await story.next_of("SELECT 1 FROM tool_step WHERE state = 'ended'")
    await server.kill()
    server = await story.start(*options)
    await until(lambda: states() == ["waiting", "waiting", "settled"])
    assert (await peer("bob-0123456789ab").rpc("tasks/get", {"taskId": tasks[0]})).status == 400
    assert states() == ["waiting", "waiting", "settled"]
    story.open("go")
    alice = peer("alice-0123456789")
    done = [str(said(await alice.until_over(task))).split(" ")[0] for task in tasks]
    assert done == ["one", "two", str(OUTCOME_UNKNOWN)]
    assert story.effects == {"one": 1, "two": 1}
    story.judge()


@pytest.mark.parametrize(
    ("address", "again"),
    [("postgres", False), pytest.param("postgres", True, marks=pytest.mark.long)],
    indirect=["address"],
)
async def test_a_node_that_stood_still_in_a_step_begins_no_other(story: Story, again: bool) -> None:
    """It is stopped past its lease, and another node takes the call over. What it still does counts for nothing."""
    first = await story.start("--lease", "2s")
    script: Script = [{"step": "charge", "at": story.gate("go"), "again": again}, {"step": "mail"}]
    task = await story.begin(script=script)
    await until(lambda: story.effects["charge"])
    second = await story.start("--lease", "2s")
    first.send(signal.SIGSTOP)
    try:
        if again:
            await until(lambda: story.effects["charge"] == 2)
        else:
            view = await story.outcome(task)
            assert view["error"]["data"]["steps"] == {"finished": [], "open": ["charge"]}
        await until(lambda: len(story.rows("SELECT id FROM node")) == 1)  # one that beats before that is not buried
    finally:
        first.send(signal.SIGCONT)
    story.open("go")
    await until(lambda: any("took this node for dead" in line or "buried" in line for line in first.output))
    if again:
        assert str(said(await story.outcome(task))) == f"charge {second.pid} mail {second.pid}"
    await first.stop()
    assert story.effects == ({"charge": 2, "mail": 1} if again else {"charge": 1})
    story.judge()


# Stops


@on_both
async def test_a_rolling_deploy_of_three_processes_runs_each_step_once(story: Story) -> None:
    """A process that stops waits for the step that it is in, and not for the call."""
    names = ("a", "b", "c")
    server = await story.start("--drain-timeout", "5m")
    task = await story.begin(script=[{"step": name, "at": story.gate(name)} for name in names])
    pids = []
    for name in names:
        await until(lambda name=name: story.effects[name])  # type: ignore[misc]
        pids.append(server.pid)
        before, server = server, await story.start("--drain-timeout", "5m")
        before.send(signal.SIGTERM)
        await until(lambda before=before: any("stop" in line for line in before.output))  # type: ignore[misc]
        story.open(name)
        assert await before.wait() == 0
    assert said(await story.outcome(task)) == " ".join(f"{name} {pid}" for name, pid in zip(names, pids, strict=True))
    assert set(story.effects.values()) == {1}


async def test_a_sleeping_call_does_not_hold_up_a_stop(story: Story) -> None:
    server = await story.start("--drain-timeout", "5m")
    task = await story.begin(script=[{"step": "one"}, {"sleep": 4}, {"step": "two"}])
    await story.next_of("SELECT 1 FROM tool_step WHERE kind = 'sleep'")
    assert await server.stop() == 0
    server = await story.start()
    assert str(said(await story.outcome(task))).split(" ")[2:] == ["two", str(server.pid)]


@on_both
async def test_a_call_that_stands_still_goes_on_while_its_process_waits_for_others(story: Story) -> None:
    """The next node goes on with it at once, and not when the process ends."""
    first = await story.start("--drain-timeout", "5m")
    other = await story.begin(script=[{"step": "other", "at": story.gate("other")}])
    task = await story.begin(script=[{"step": "one", "at": story.gate("one")}, {"step": "two"}])
    await until(lambda: story.effects == {"one": 1, "other": 1})
    second = await story.start()
    first.send(signal.SIGTERM)
    await until(lambda: any("stop" in line for line in first.output))
    story.open("one")
    assert said(await story.outcome(task)) == f"one {first.pid} two {second.pid}"
    assert first.process.returncode is None
    story.open("other")
    assert await first.wait() == 0
    assert said(await story.outcome(other)) == f"other {first.pid}"
    assert story.effects == {"one": 1, "two": 1, "other": 1}
    story.judge()


async def test_a_worker_that_is_replaced_leaves_its_calls_at_their_next_step(story: Story) -> None:
    """It waits for the step that it is in, and for no sleep."""
    server = await story.start("--drain-timeout", "5m", "--workers", "2")
    task = await story.begin(script=[{"step": "one", "at": story.gate("one")}, {"step": "two"}])
    await until(lambda: story.effects["one"] == 1)
    [(_, _, old)] = effects(story.folder)
    sleepers: list[str] = []
    while len(effects(story.folder)) == 1 or effects(story.folder)[-1][2] != old:  # one that sleeps in the same worker
        sleepers.append(await story.begin(script=[{"step": "a"}, {"sleep": 3600}]))
        await story.next_of("SELECT stream FROM tool_step WHERE kind = 'sleep'")
    server.send(signal.SIGHUP)
    left = f"SELECT 1 FROM stream WHERE session = '{sleepers[-1]}' AND generation > 1"
    await until(lambda: bool(story.rows(left)))
    story.open("one")
    one, pid, two, new = str(said(await story.outcome(task))).split(" ")
    assert (one, int(pid), two) == ("one", old, "two")
    assert int(new) != old
    await until(lambda: not psutil.pid_exists(old))
    assert {(await story.client.get(sleeper))["status"] for sleeper in sleepers} == {"working"}
    assert story.effects == {"a": len(sleepers), "one": 1, "two": 1}
