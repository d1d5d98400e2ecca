"""Random tools, made of steps, sleeps, questions, loops and tasks at once, die at random commits. Each ends with the
values that its runs have seen, or names what is unknown.

The steps, their log and the store are real. A death is simulated: from a chosen commit on, which is done or is not,
a run writes nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perdure
from perdure._core.ids import Fence, SessionId, StreamId
from perdure._core.jsonrpc import Request
from perdure._core.states import CALL, CallStep, ToolStepState, advance
from perdure._core.tool_steps import MOST_STEPS, MOST_VALUE, StepHistory, ToolStepKind
from perdure.errors import Misuse
from perdure.sessions.ledger import Call
from perdure.sessions.tool_steps import ToolSteps, course_of
from perdure.steps import call_steps, handler_task, is_own_task
from perdure.store import open_store
from perdure.store.interface import Store
from perdure.store.steps import OpenStream, PutSession, Step
from perdure.telemetry.counters import Counters
from perdure.testing._values import NODE, OTHER, a_call, a_put_tool_step, a_session, a_stream
from tests.conftest import EXAMPLES
from tests.support.servers.in_process import until
from tests.support.stores.postgres import store_url

pytestmark = pytest.mark.anyio

numbers = itertools.count()


class Act(NamedTuple):
    """What a tool does next: `again`, `check`, `once` and `fails` are steps, `loop` does its part twice."""

    how: str
    name: str = ""
    parts: tuple[tuple[Act, ...], ...] = ()


Tool = tuple[Act, ...]


class Death(NamedTuple):
    commit: int
    """The number of the commit at which a run dies."""
    done: bool
    """Whether the store has that commit."""


class Killed(BaseException):
    """The process is dead: the run goes no further, and writes nothing."""


@dataclass
class Process:
    """One run of the call: the part of a server that its steps need. It dies once."""

    store: Store
    fence: Fence
    death: Death | None
    doubts: int = 0
    commits: int = 0
    is_dead: bool = False
    counters: Counters = field(default_factory=Counters)

    @property
    def journal(self) -> Process:
        return self

    @property
    def clock(self) -> Any:
        return self.store.clock

    def put(self, *steps: Step) -> None:
        """Only steps that were cut short are put without waiting: by a run that dies."""
        assert self.is_dead

    async def write(self, *steps: Step, may_be_held: bool) -> None:
        assert not may_be_held
        self.commits += 1
        dies = self.death is not None and self.commits == self.death.commit
        self.is_dead = self.is_dead or dies
        if self.is_dead and not (dies and self.death is not None and self.death.done):
            raise Killed
        for refusal in await self.store.commit(steps):
            if refusal is not None:
                raise refusal
        if self.is_dead:
            raise Killed


@dataclass
class History:
    """A call over all its runs: what it did to the world, and what its tool has seen."""

    store: Store
    stream: StreamId
    fence: Fence
    effects: Counter[str] = field(default_factory=Counter)
    keys: dict[str, set[object]] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    attempt: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """How often each name has come in this run."""
    call: Call | None = None

    @classmethod
    async def begin(cls, store: Store, fence: Fence) -> History:
        name = f"h{next(numbers)}"
        record, call = a_stream(fence, name, session=name), a_call(stream=name, session=name)
        assert not any(
            await store.commit([PutSession(record=a_session(name)), OpenStream(record=record, calls=(call,))])
        )
        return cls(store, StreamId(name), fence)

    async def claim(self) -> None:
        """Another process takes the call over, before it reads what is recorded: what the dead one had under way may
        still reach the store."""
        claimed = await self.store.claim(self.stream, node=OTHER, held=self.fence)
        assert claimed is not None
        self.fence = claimed.fence

    async def course(self) -> StepHistory:
        return course_of(await self.store.tool_steps(self.stream), 1, 1)

    async def run(self, process: Process, tool: Tool) -> list[str]:
        """Run the tool, in a task of its own as a handler runs."""
        log = await self.log(process)

        async def handler() -> list[str]:
            call_steps.set(lambda: log)
            handler_task.set(asyncio.current_task())
            return await self.play(log, tool)

        return await asyncio.create_task(handler())

    async def log(self, process: Process) -> ToolSteps:
        """Begin a run."""
        self.attempt += 1
        self.counts = Counter()
        stream: Any = SimpleNamespace(id=self.stream, fence=process.fence, session=SessionId(self.stream))
        request = Request(id=1, method="tools/call", params={}, raw={})
        call = Call(number=1, request=request, key=(1, 1), sent_in=1, token=None, stream=stream, attempt=self.attempt)
        context: Any = process
        self.call = call
        return ToolSteps(context, call, await self.course())

    def know(self, name: str, value: str) -> str:
        """The tool gets a value: each run gets the same one."""
        assert self.seen.setdefault(name, value) == value
        return value

    def labelled(self, act: Act) -> Act:
        """The second of a name is another one."""
        self.counts[act.name] += 1
        return act._replace(name=label(act.name, self.counts[act.name]))

    async def effect(self, act: Act) -> str:
        self.effects[act.name] += 1
        self.keys.setdefault(act.name, set()).add(perdure.step_key())
        await asyncio.sleep(0)
        if act.how == "fails":
            raise ValueError(f"no {act.name}")
        return f"{act.name} {self.attempt}"

    async def play(self, log: ToolSteps, tool: Tool) -> list[str]:
        values: list[str] = []
        for act in tool:
            match act.how:
                case "sleep":
                    await perdure.sleep(0, name=act.name)
                case "ask":
                    name = self.labelled(act).name
                    values.append(self.know(name, await self.ask(log, act.name, name)))
                case "loop":
                    for _ in range(LOOPS):
                        values += await self.play(log, act.parts[0])
                case "gather":
                    parts = [asyncio.create_task(self.play(log, part)) for part in act.parts]
                    try:
                        values += itertools.chain(*await asyncio.gather(*parts))
                    finally:
                        for part in parts:
                            part.cancel()
                        await asyncio.gather(*parts, return_exceptions=True)
                case _:
                    one = self.labelled(act)
                    values.append(self.know(one.name, await self.step(act.name, one)))
        return values

    async def step(self, name: str, act: Act) -> str:
        async def check() -> str | Any:
            return f"{act.name} was done" if self.effects[act.name] else perdure.NOT_DONE

        try:
            return await perdure.step(
                name, self.effect, act, again=act.how == "again", check=check if act.how == "check" else None
            )
        except ValueError as failure:
            return str(failure)

    async def ask(self, log: ToolSteps, question: str, name: str) -> str:
        """As the runtime's link asks a client, which answers at once."""
        place = log.ask("elicitation/create", {"message": question}, own=is_own_task())
        assert place is not None
        if place.recorded is not None and place.recorded.state is not ToolStepState.OPEN:
            return place.recorded.value.decode()
        self.effects[name] += 1
        await log.answered(place, {"result": self.effects[name]})
        return f'{{"result":{self.effects[name]}}}'


LOOPS = 2


def label(name: str, nth: int) -> str:
    return name if nth == 1 else f"{name} #{nth}"


def flat(tool: Tool) -> list[Act]:
    """All that a tool does, each under its own label."""

    def acts(tool: Tool) -> list[Act]:
        found: list[Act] = []
        for act in tool:
            within = acts(tuple(itertools.chain(*act.parts))) if act.parts else [act]
            found += within * (LOOPS if act.how == "loop" else 1)
        return found

    counts = Counter[str]()
    done = acts(tool)
    for at, act in enumerate(done):
        counts[act.name] += 1
        done[at] = act._replace(name=label(act.name, counts[act.name]))
    return done


def named(tool: Tool, names: Any) -> Tool:
    """Give each act its own name."""
    return tuple(
        act._replace(name=f"{act.how}{next(names)}", parts=tuple(named(part, names) for part in act.parts))
        for act in tool
    )


acts = st.sampled_from(["again", "check", "once", "fails", "sleep", "ask"]).map(Act)
parts = st.lists(st.lists(acts, min_size=1, max_size=3).map(tuple), min_size=2, max_size=4).map(tuple)
tools = (
    st.lists(
        acts
        | parts.map(lambda each: Act("gather", parts=each))
        | parts.map(lambda each: Act("loop", parts=(*each[:1],))),
        min_size=1,
        max_size=6,
    )
    .map(tuple)
    .map(lambda tool: named(tool, itertools.count()))
)
deaths = st.lists(st.builds(Death, st.integers(1, 12), st.booleans()), max_size=4)


async def tell(store: Store, fence: Fence, tool: Tool, dying: Sequence[Death]) -> None:
    """Run a tool until it ends, or until it must not go on, and judge its effects."""
    history, done = await History.begin(store, fence), flat(tool)
    for death in (*dying, None):
        with contextlib.suppress(Killed):
            values = await history.run(Process(store, history.fence, death), tool)
            assert values == [history.seen[act.name] for act in done if act.how != "sleep"]
            break
        await history.claim()
        course = await history.course()
        if course.is_unknown:
            rows = await store.tool_steps(history.stream)
            counts, outline = Counter[str](), course.outline(store.clock())
            told: dict[str, list[str]] = {"finished": [], "open": []}
            for row in rows:
                counts[row.name] += 1
                is_over = row.state is not ToolStepState.OPEN or row.kind is ToolStepKind.SLEEP
                if row.kind is not ToolStepKind.ASK:
                    told["finished" if is_over else "open"].append(label(row.name, counts[row.name]))
            assert outline == told
            begun = {act.name for act in done if act.how in ("once", "fails") and history.effects[act.name]}
            assert begun <= {*outline["finished"], *outline["open"]}
            assert {name for name in history.seen if not name.startswith("ask")} <= set(outline["finished"])
            may_run_again = {act.name for act in done if act.how == "check"}
            assert set(outline["open"]) <= {act.name for act in done if act.how in ("once", "fails")} | may_run_again
            break
    else:
        raise AssertionError("the last run did not end")
    assert all(history.effects[act.name] <= 1 for act in done if act.how in ("once", "fails", "check"))
    assert all(len(keys) == 1 for keys in history.keys.values())


async def opened(address: str) -> tuple[Store, Fence]:
    store = open_store(address, busy_timeout=20.0)
    await store.open()
    return store, await store.join(NODE)


STORES = ["memory", "sqlite", "postgres"]


def address_of(kind: str, folder: Path) -> str:
    return store_url() if kind == "postgres" else f"sqlite:{folder}/log.db" if kind == "sqlite" else "memory:"


@pytest.mark.parametrize("kind", STORES)
def test_a_tool_that_dies_at_any_commit_ends_in_its_values_or_names_what_is_unknown(kind: str, tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        store, fence = runner.run(opened(address_of(kind, tmp_path)))

        @settings(max_examples=EXAMPLES if kind == "postgres" else 5 * EXAMPLES)
        @given(tools, deaths)
        def holds(tool: Tool, dying: list[Death]) -> None:
            runner.run(tell(store, fence, tool, dying))

        try:
            holds()
        finally:
            runner.run(store.aclose())


LINE = named(tuple(Act(how) for how in ("again", "once", "ask", "check", "sleep", "fails", "once")), itertools.count())
COMMITS = 1 + 2 + 1 + 2 + 1 + 2 + 2


@pytest.mark.parametrize("kind", STORES)
async def test_a_tool_may_die_at_each_of_its_commits_in_turn(kind: str, tmp_path: Path) -> None:
    """The call ends as unknown exactly if the begin of an unmarked step is in the store and its end is not."""
    store, fence = await opened(address_of(kind, tmp_path))
    ends = list[bool]()
    for commit, done in itertools.product(range(1, COMMITS + 1), (False, True)):
        await tell(store, fence, LINE, [Death(commit, done)])
        history = await History.begin(store, fence)
        with pytest.raises(Killed):
            await history.run(Process(store, fence, Death(commit, done)), LINE)
        ends.append((await history.course()).is_unknown)
    await store.aclose()
    once = [False, True, True, False]  # in the begin, behind it; in the end, behind it
    assert ends == [*[False] * 2, *once, *[False] * 2, *[False] * 4, *[False] * 2, *once, *once]


@pytest.mark.parametrize("kind", STORES)
async def test_an_owner_that_lost_its_claim_in_a_step_writes_no_end_and_begins_no_other(
    kind: str, tmp_path: Path
) -> None:
    """Another node has claimed the call meanwhile, and ends it: its values count."""
    store, fence = await opened(address_of(kind, tmp_path))
    history = await History.begin(store, fence)
    tool = named((Act("again"), Act("once")), itertools.count())
    standing, released = asyncio.Event(), asyncio.Event()

    class Standing(History):
        async def effect(self, act: Act) -> str:
            value = await super().effect(act)
            standing.set()
            await released.wait()
            return value

    first = Standing(store, history.stream, fence, effects=history.effects)
    owner = Process(store, fence, None)
    losing = asyncio.create_task(first.run(owner, tool))
    await standing.wait()
    await history.claim()
    history.attempt = first.attempt
    assert await history.run(Process(store, history.fence, None), tool) == ["again0 2", "once1 2"]
    before = await store.tool_steps(history.stream)
    released.set()
    await until(lambda: owner.commits >= 3 or losing.done())  # it writes in vain, until it learns of the claim
    assert not losing.done()
    assert first.call is not None
    first.call.state = advance(CALL, first.call.state, CallStep.LOSE_NODE)
    losing.cancel()
    assert await store.tool_steps(history.stream) == before
    assert history.effects == {"again0": 2, "once1": 1}
    await store.aclose()


@pytest.mark.parametrize("more", [0, 1])
async def test_an_answer_that_is_too_large_is_asked_for_again_by_the_next_run(more: int) -> None:
    """The tool gets it all the same."""
    store, fence = await opened("memory:")
    history, process = await History.begin(store, fence), Process(store, fence, None)
    answer = {"result": "x" * (MOST_VALUE - len('{"result":""}') + more)}
    for state in (None, ToolStepState.OPEN if more else ToolStepState.ENDED):
        log = await history.log(process)
        place = log.ask("elicitation/create", {"message": "Why?"}, own=True)
        assert place is not None
        assert (None if place.recorded is None else place.recorded.state) is state
        await log.answered(place, answer)
    await store.aclose()


@pytest.mark.parametrize("steps", [MOST_STEPS - 1, MOST_STEPS])
async def test_a_question_after_the_last_step_of_a_call_is_asked_and_not_recorded(steps: int) -> None:
    store, fence = await opened("memory:")
    history = await History.begin(store, fence)
    stream = history.stream
    assert not any(
        await store.commit([a_put_tool_step(fence, n + 1, stream=stream, value=b"1", own=False) for n in range(steps)])
    )
    log = await history.log(Process(store, fence, None))
    assert (log.ask("elicitation/create", None, own=True) is not None) is (steps < MOST_STEPS)
    await store.aclose()


async def test_a_node_without_its_claim_begins_no_unmarked_step() -> None:
    """Its function never runs: the step waits in vain for the store, until the node learns of the claim."""
    store, fence = await opened("memory:")
    history, owner = await History.begin(store, fence), Process(store, fence, None)
    await history.claim()
    losing = asyncio.create_task(history.run(owner, named((Act("once"),), itertools.count())))
    await until(lambda: owner.commits >= 2 or losing.done())
    assert not losing.done()
    assert history.call is not None
    history.call.state = advance(CALL, history.call.state, CallStep.LOSE_NODE)
    with pytest.raises(Misuse, match="the call of this step has ended"):
        await losing
    assert (history.effects, await store.tool_steps(history.stream)) == ({}, [])
    await store.aclose()
