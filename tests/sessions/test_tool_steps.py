"""Steps of tools in two processes, one after the other on one file: the first is stopped, and the second goes on.

Both run in the test's own process, so a test sees what the tool got in each run. What SIGKILL leaves behind is in
`end_to_end/test_steps_killed.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime
import itertools
import json
import math
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio.from_thread
import anyio.to_thread
import pytest
from fastmcp import FastMCP
from mcp import Client, MCPError
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import Tool as MCPTool
from pydantic import BaseModel

import perdure
from perdure._core.ids import SessionId, parse_position
from perdure._core.states import ToolStepState
from perdure._core.tool_steps import MOST_NAME, MOST_SLEEP, MOST_STEPS, MOST_VALUE, MOST_VALUES, StepHistory
from perdure.errors import Misuse, StepLimit
from perdure.store import open_store
from perdure.store.interface import Store
from perdure.store.records import ToolStepRecord
from tests.support.clients.task_client import CAN_BE_ASKED, OUTCOME_UNKNOWN, Balancer, TaskClient, said
from tests.support.clients.wire_client import Peer, text_of
from tests.support.servers.in_process import serve, until
from tests.support.servers.tool_server import Guests
from tests.support.stores.faulty_store import Fault, FaultyStore
from tests.support.stores.lost_tail import LOST, Losing
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio


class Answer(BaseModel):
    answer: str


Body = Callable[[], Awaitable[Any]]


class Price(BaseModel):
    amount: int
    since: datetime.date


class Ratio(BaseModel):
    of: float


class Sender(BaseModel):
    async def __call__(self) -> str:
        return f"by {type(self).__name__}"


class NoStock(Exception):
    """It cannot be made again of its arguments."""

    def __init__(self, item: str, left: int) -> None:
        super().__init__(f"{left} of {item}")


class Tool:
    """A tool `do` that does what a test says, and in its first run waits behind that until its process is stopped."""

    def __init__(self, body: Body, *, runs: int = 2, kind: type[MCPServer] = MCPServer) -> None:
        self.got: list[Any] = []
        self.server = kind("steps", version="1", log_level="CRITICAL")

        @self.server.tool(meta=perdure.RESUMABLE)
        async def do(ctx: Context) -> str:
            self.got.append(await body())
            if len(self.got) < runs:
                await asyncio.Event().wait()
            return "done"

    def has_run(self, times: int) -> bool:
        return len(self.got) == times


async def in_each_run(body: Body, path: Path, *, runs: int = 2) -> list[Any]:
    """What a tool got in each of its runs."""
    tool, balancer = Tool(body, runs=runs), Balancer(ports=[])
    client = TaskClient(balancer=balancer)
    task = ""
    for number in range(1, runs + 1):
        async with serve(tool.server, store=SharedStore(path), task_after=0.0, drain_timeout=0.0) as site:
            balancer.ports[:] = [site.port]
            task = task or await client.task("do")
            await until(partial(tool.has_run, number))
            if number == runs:
                assert said(await client.outcome(task)) == "done"
    return tool.got


async def outcome_of(step: Awaitable[Any]) -> tuple[type, Any]:
    """The type and the value that a tool gets, or the error."""
    try:
        value = await step
    except Exception as failure:
        return type(failure), (str(failure), *failure.args)
    return type(value), value


def untyped() -> Any:
    return {"when": datetime.date(2026, 1, 1), "pair": (1, 2)}


def typed() -> tuple[Price, datetime.datetime]:
    return Price(amount=3, since=datetime.date(2026, 1, 1)), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


async def not_a_number() -> float:
    return math.nan


def no_ratios() -> list[Ratio]:
    return [Ratio(of=math.nan)]


def hidden_argument(price: HiddenPrice = None) -> datetime.date:  # type: ignore[name-defined]  # noqa: F821
    return datetime.date(2026, 1, 1)


def nothing() -> None:
    return None


def largest() -> str:
    return "x" * (MOST_VALUE - 2)


async def test_values_are_the_same_in_both_runs(tmp_path: Path) -> None:
    """They come in their recorded form, and as the annotation says."""

    async def body() -> list[Any]:
        return [
            await outcome_of(perdure.step(fn.__name__, fn))
            for fn in (untyped, typed, nothing, not_a_number, largest, no_ratios, hidden_argument)
        ]

    first, second = await in_each_run(body, tmp_path / "log.db")
    assert repr(first) == repr(second)
    assert first[0] == (dict, {"when": "2026-01-01", "pair": [1, 2]})
    assert first[1] == (tuple, typed())
    assert first[2] == (type(None), None)
    assert math.isnan(first[3][1])
    assert len(first[4][1]) == MOST_VALUE - 2
    assert math.isnan(first[5][1][0].of)
    assert first[6] == (datetime.date, hidden_argument())  # only what it returns matters


async def test_a_class_makes_an_object_also_if_calling_that_is_async(tmp_path: Path) -> None:
    async def body() -> list[Any]:
        made = await perdure.step("make", Sender)
        return [type(made), await perdure.step("send", made)]

    assert await in_each_run(body, tmp_path / "log.db") == [[Sender, "by Sender"]] * 2


def tool_error() -> str:
    raise ToolError("no stock")


def mcp_error() -> str:
    raise MCPError(-32000, "no stock", {"left": 0})


def no_stock() -> str:
    raise NoStock("pens", 0)


def no_file() -> str:
    raise FileNotFoundError("no \udcff")  # as Python reads a name that is no UTF-8


class Unspeakable(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def unspeakable() -> str:
    raise Unspeakable("a")


def no_json() -> Any:
    return object()


def no_text() -> bytes:
    return b"\xff"


def wrong_type() -> int:
    return "three"  # type: ignore[return-value]


def too_large() -> str:
    return "x" * (MOST_VALUE - 1)


async def test_errors_are_the_same_in_both_runs(tmp_path: Path) -> None:
    """Those that cannot be made again are `StepFailed`, and what cannot be written, or is too large, fails its step."""
    fns = (tool_error, mcp_error, no_stock, no_file, no_json, no_text, wrong_type, too_large)

    async def body() -> list[Any]:
        return [await outcome_of(perdure.step(fn.__name__, fn)) for fn in fns]

    first, second = await in_each_run(body, tmp_path / "log.db")
    assert repr(first) == repr(second)
    kinds = [kind.__name__ for kind, _ in first]
    assert kinds == ["ToolError", "MCPError", *["StepFailed"] * 5, "StepLimit"]
    assert first[1][1][1:] == (-32000, "no stock", {"left": 0})
    assert first[0][1] == ("no stock", "no stock")
    assert first[2][1][0] == "step 'no_stock' failed: NoStock: 0 of pens"
    assert first[3][1][0] == "step 'no_file' failed: FileNotFoundError: no \\udcff"
    assert all("cannot be kept as JSON" in sentence for _, (sentence, *_) in first[4:7])
    assert "1,048,576" in first[7][1][0]


async def test_an_error_without_a_text_is_the_end_of_its_step_as_well(tmp_path: Path) -> None:
    async def body() -> str:
        with pytest.raises(Unspeakable):
            await perdure.step("a", unspeakable)
        return await perdure.step("a", str, "next")

    assert await in_each_run(body, tmp_path / "log.db") == ["next", "next"]


async def test_the_error_of_a_check_is_that_of_its_step(tmp_path: Path) -> None:
    """It is recorded: the step is not checked a second time."""
    begun, checks = asyncio.Event(), list[str]()

    async def endless() -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    def check() -> str:
        checks.append("check")
        raise ToolError("declined")

    async def body() -> Any:
        charge = perdure.step("charge", endless, check=check)
        return await (outcome_of(charge) if begun.is_set() else cut_short(charge, begun.is_set))

    declined = ToolError, ("declined", "declined")
    assert await in_each_run(body, tmp_path / "log.db", runs=3) == [None, declined, declined]
    assert checks == ["check"]


async def test_the_step_beyond_the_limit_does_not_run_and_those_before_it_return(tmp_path: Path) -> None:
    ran: list[int] = []

    async def body() -> str:
        for number in range(MOST_STEPS):
            await perdure.step("x" * MOST_NAME, ran.append, number, again=True)
        with pytest.raises(StepLimit) as failure:
            await perdure.step("one more", ran.append, MOST_STEPS)
        return str(failure.value)

    assert await in_each_run(body, tmp_path / "log.db") == ["a call may do 1,000 steps, questions included"] * 2
    assert ran == [*range(MOST_STEPS)]


async def test_values_that_are_too_large_together_fail_the_step_that_is_too_much(tmp_path: Path) -> None:
    async def body() -> list[str]:
        kinds = [(await outcome_of(perdure.step("a", largest, again=True)))[0].__name__ for _ in range(16)]
        return [*kinds, *(await outcome_of(perdure.step("b", nothing)))[1]]

    assert MOST_VALUES == 16 * MOST_VALUE
    kind, sentence = "StepLimit", f"the values of a call's steps may have {MOST_VALUES:,} bytes as JSON"
    for *kinds, whole, _, failed, _ in await in_each_run(body, tmp_path / "log.db"):
        assert (kinds, failed) == (["str"] * 16, kind)
        assert whole == f"step 'b' failed: {kind}: {sentence}; this would be the next 4"


async def test_values_that_end_at_the_same_time_have_room_together_or_fail(tmp_path: Path) -> None:
    """Sixteen of the largest have, and of seventeen one has not, whichever it is."""

    async def body() -> list[int]:
        each = (outcome_of(perdure.step(f"{number}", largest, again=True)) for number in range(17))
        kinds = [kind.__name__ for kind, _ in await asyncio.gather(*each)]
        return [kinds.count("str"), kinds.count("StepFailed") + kinds.count("StepLimit")]

    assert await in_each_run(body, tmp_path / "log.db") == [[16, 1]] * 2


async def test_a_sleep_ends_when_it_would_have_ended(tmp_path: Path) -> None:
    """Also in the third process, and under the name that it has."""
    ends: list[float] = []

    async def body() -> None:
        begun = asyncio.get_running_loop().time()
        await perdure.sleep(0.2, name="nap")
        ends.append(asyncio.get_running_loop().time() - begun)

    await in_each_run(body, tmp_path / "log.db", runs=3)
    assert ends[0] >= 0.2
    assert len(ends) == 3


async def test_a_step_in_a_step_is_part_of_it(tmp_path: Path) -> None:
    inner: list[uuid.UUID] = []

    async def outer() -> str:
        async def part() -> str:
            inner.append(perdure.step_key())
            return "inner"

        return await perdure.step("inner", part)

    async def body() -> str:
        return await perdure.step("outer", outer)

    assert await in_each_run(body, tmp_path / "log.db") == ["inner", "inner"]
    assert len(inner) == 1


def key() -> str:
    return str(perdure.step_key())


async def test_each_step_has_its_own_key(tmp_path: Path) -> None:
    """Also one whose name looks like that of a second one."""

    async def body() -> list[str]:
        return [await perdure.step(name, key) for name in ("mail", "mail #2", "mail")]

    first, second = await in_each_run(body, tmp_path / "log.db")
    assert first == second
    assert len({*first}) == 3


async def test_threads_have_the_steps_if_they_have_the_context(tmp_path: Path) -> None:
    effects: list[str] = []

    def in_thread(name: str) -> None:
        perdure.step_sync(name, lambda: effects.append(name))

    def in_threads() -> None:
        with_context = threading.Thread(target=contextvars.copy_context().run, args=(in_thread, "with"))
        without = threading.Thread(target=in_thread, args=("without",))
        for thread in (with_context, without):
            thread.start()
            thread.join()

    async def body() -> None:
        await asyncio.to_thread(in_threads)

    await in_each_run(body, tmp_path / "log.db")
    assert effects == ["with", "without", "without"]


async def test_threads_that_a_tool_begins_at_once_may_come_in_any_order(tmp_path: Path) -> None:
    """The first to begin in the second run has recorded nothing in the first one."""
    runs, first = itertools.count(1), asyncio.Event()

    async def body() -> list[str]:
        run, loop = next(runs), asyncio.get_running_loop()
        first.clear()

        def do(name: str) -> str:
            value = perdure.step_sync(name, str, name)
            loop.call_soon_threadsafe(first.set)
            return value

        async def second() -> list[str]:
            await first.wait()
            return [] if run == 1 else [await anyio.to_thread.run_sync(do, "a")]

        values, more = await asyncio.gather(anyio.to_thread.run_sync(do, "a" if run == 1 else "b"), second())
        return [values, *more]

    assert await in_each_run(body, tmp_path / "log.db") == [["a"], ["b", "a"]]


@pytest.mark.parametrize("host", [MCPServer, FastMCP])
async def test_a_synchronous_tool_that_takes_another_way_is_told(host: Callable[..., Any], tmp_path: Path) -> None:
    """Its thread is the tool's own, so the order counts."""
    server, runs, effects = host("sync", version="1"), itertools.count(1), list[str]()
    standing = asyncio.Event()

    @server.tool(meta=perdure.RESUMABLE)  # type: ignore[untyped-decorator]
    def do() -> str:
        run = next(runs)
        perdure.step_sync("a" if run == 1 else "c", effects.append, "effect")
        if run == 1:
            anyio.from_thread.run_sync(standing.set)
            anyio.from_thread.run(asyncio.Event().wait)
        return "done"

    balancer = Balancer(ports=[])
    client = TaskClient(balancer=balancer)
    async with serve(server, store=SharedStore(tmp_path / "log.db"), task_after=0.0, drain_timeout=0.0) as site:
        balancer.ports[:] = [site.port]
        task = await client.task("do")
        await standing.wait()
    async with serve(server, store=SharedStore(tmp_path / "log.db"), complaint="this call had done 'a'") as site:
        balancer.ports[:] = [site.port]
        view = await client.outcome(task)
        assert site.app.counters.snapshot()["tool_step_mismatches"] == 1
    assert "had done 'a' as its step 1, and now begins 'c'" in view["error"]["data"]["reason"]
    assert effects == ["effect"]


async def test_recorded_steps_that_do_not_come_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the call ends well."""
    runs = itertools.count(1)

    async def body() -> list[str]:
        return [await perdure.step(name, str, name) for name in (("a", "b", "b") if next(runs) == 1 else ("a",))]

    assert await in_each_run(body, tmp_path / "log.db") == [["a", "b", "b"], ["a"]]
    [unused] = [record.getMessage() for record in caplog.records if getattr(record, "action", "") == "step.unused"]
    assert unused.endswith("did not come to 2 of its recorded steps: b, b #2")


async def test_what_is_wrong_is_said_and_nothing_runs(tmp_path: Path) -> None:
    ran: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0.01)

    async def body() -> list[str]:
        failures: list[str] = []
        for wrong in (
            lambda: perdure.step("", ran.append, "empty"),
            lambda: perdure.step("x" * 201, ran.append, "long"),
            lambda: perdure.step("both", ran.append, "both", again=True, check=lambda: None),
            lambda: perdure.step("made", started),  # type: ignore[call-overload]
            lambda: perdure.step("told", ran.append, "told", check="done"),  # type: ignore[call-overload]
            lambda: asyncio.to_thread(perdure.step_sync, "async", slow),
            lambda: asyncio.to_thread(partial(perdure.step_sync, "async", ran.append, "async", check=slow)),
            lambda: asyncio.to_thread(perdure.step_key),
            lambda: asyncio.gather(perdure.step("twin", slow), perdure.step("twin", slow)),
            lambda: asyncio.to_thread(asyncio.run, perdure.step("elsewhere", ran.append, "elsewhere")),
            lambda: asyncio.to_thread(asyncio.run, perdure.sleep(0)),
            lambda: perdure.sleep(-1),
            lambda: perdure.sleep(math.nan),
            lambda: perdure.sleep(MOST_SLEEP + 1),
        ):
            with pytest.raises(Misuse) as failure:
                await wrong()
            failures.append(str(failure.value))
        with pytest.raises(Misuse) as failure:
            perdure.step_sync("blocks", ran.append, "blocks")
        return [*failures, str(failure.value)]

    started = slow()  # a coroutine in place of its function
    [said_of] = await in_each_run(body, tmp_path / "log.db", runs=1)
    started.close()
    assert ran == []
    parts = (
        *("1 to 200 characters, not ''", "1 to 200 characters", "`again=True` or `check=`"),
        *(
            "takes a function, not <coroutine",
            "takes a function, not 'done'",
            "takes synchronous functions",
            "takes synchronous functions",
        ),
        "outside a step",
        *("two steps with the name 'twin' run at the same time", "another event loop", "another event loop"),
        *("not for -1", "not for nan", "0 to 31,622,400 seconds, not for 31622401", "await perdure.step"),
    )
    assert [part for part, sentence in zip(parts, said_of, strict=True) if part not in sentence] == []


# Where nothing is recorded


def effect(name: str) -> str:
    return f"{name} {perdure.step_key().version}"


async def test_outside_perdure_a_step_is_a_plain_call() -> None:
    """Also in a server that somebody tests without Perdure."""
    assert await perdure.step("a", effect, "a") == "a 4"
    assert perdure.step_sync("a", effect, "a") == "a 4"
    assert await perdure.step("a", untyped) == untyped()  # not its recorded form
    assert perdure.step_key() != perdure.step_key()
    await perdure.sleep(0)
    tool = Tool(lambda: perdure.step("a", effect, "a"), runs=1)
    async with Client(tool.server) as client:
        await client.call_tool("do", {})
    assert tool.got == ["a 4"]


async def test_an_annotation_that_cannot_be_read_is_told_everywhere(tmp_path: Path) -> None:
    """A test outside Perdure finds what would fail on the log."""

    def hidden() -> HiddenPrice:  # type: ignore[name-defined]  # noqa: F821
        return None

    class Order(BaseModel):
        price: HiddenPrice  # type: ignore[name-defined]  # noqa: F821

    def of_hidden() -> list[Order]:
        return []

    def lock() -> threading.Lock:
        return threading.Lock()

    of_hidden.__annotations__["return"] = list[Order]  # it is a local name

    async def body() -> list[str]:
        failures: list[str] = []
        for fn in (hidden, of_hidden, lock):
            with pytest.raises(Misuse) as failure:
                await perdure.step("a", fn)
            failures.append(str(failure.value))
        return failures

    on_the_log, again = await in_each_run(body, tmp_path / "log.db")
    assert await body() == on_the_log == again
    assert "the return annotation of" in on_the_log[0]
    assert "import its names at run time" in on_the_log[0]
    assert "which cannot be kept as JSON: name 'HiddenPrice' is not defined" in on_the_log[1]
    assert "which cannot be kept as JSON: Unable to generate" in on_the_log[2]
    with pytest.raises(Misuse, match="import its names at run time"):
        perdure.step_sync("a", hidden)


async def test_a_call_that_is_not_on_the_log_records_nothing(tmp_path: Path) -> None:
    tool = Tool(lambda: perdure.step("a", effect, "a"), runs=1)
    async with serve(tool.server, store=SharedStore(tmp_path / "log.db"), task_after=0.0) as site:
        client = TaskClient(balancer=Balancer(ports=[site.port]), capabilities={})
        assert said(await client.call("do")) == "done"
        assert site.app.counters.snapshot()["tool_steps_ended"] == 0
    assert tool.got == ["a 4"]


# The store


async def test_a_step_waits_while_the_store_fails_and_the_call_ends_well(tmp_path: Path) -> None:
    """A step that is only in memory is no step: the tool gets nothing."""
    store = FaultyStore(SharedStore(tmp_path / "log.db"))
    got: list[str] = []

    async def body() -> None:
        got.append(await perdure.step("a", effect, "a"))
        store.writes = Fault.RAISES
        got.append(await perdure.step("b", effect, "b", again=True))

    tool = Tool(body, runs=1)
    async with serve(tool.server, store=store, task_after=0.0, store_timeout=0.5, complaint="the store fails") as site:
        client = TaskClient(balancer=Balancer(ports=[site.port]))
        task = await client.task("do")
        await until(lambda: store.writes is Fault.RAISES)
        asked = store.asked
        await until(lambda: store.asked > asked + 3)
        assert got == ["a 5"]
        store.works()
        assert said(await client.outcome(task)) == "done"
    assert got == ["a 5", "b 5"]


async def cut_short(step: Awaitable[Any], ready: Callable[[], bool]) -> None:
    """What a timeout does to a step, in the tool's own task, once something is so."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:

            async def end() -> None:
                await until(ready)
                limit.reschedule(0)

            ending = asyncio.create_task(end())
            await step
            assert ending


@pytest.mark.parametrize("moment", ["begin", "end", "end again", "sleep"])
async def test_a_step_whose_record_is_cut_short_keeps_its_place(moment: str, tmp_path: Path) -> None:
    """The store fails while a step begins or ends, and a timeout of the tool does not wait for it. The tool goes on
    with another step, which is recorded behind that one."""
    store, goes = FaultyStore(SharedStore(tmp_path / "log.db")), asyncio.Event()
    got, effects = list[str](), list[str]()

    def first() -> str:
        effects.append("a")
        if moment != "begin":
            store.writes = Fault.RAISES
        return "a"

    async def body() -> None:
        await goes.wait()
        if effects or got:  # the second run
            if moment == "sleep":
                await perdure.sleep(0)
            else:
                got.append(await perdure.step("a", first, again=moment == "end again"))
            store.works()
        else:
            if moment in ("begin", "sleep"):
                store.writes = Fault.RAISES
            asked = store.asked
            step = perdure.step("a", first, again=moment == "end again")
            if moment == "sleep":
                step.close()
                await cut_short(perdure.sleep(0), lambda: store.asked > asked + 2)
            else:
                await cut_short(step, lambda: store.writes is Fault.RAISES and store.asked > asked + 2)
            store.works()
        got.append(await perdure.step("b", effect, "b"))

    tool, balancer = Tool(body), Balancer(ports=[])
    settings: dict[str, Any] = {"task_after": 0.0, "drain_timeout": 0.0, "store_timeout": 0.5}
    client = TaskClient(balancer=balancer)
    async with serve(tool.server, store=store, complaint="the store fails", **settings) as site:
        balancer.ports[:] = [site.port]
        task = await client.task("do")
        goes.set()
        await until(lambda: tool.has_run(1))
        if moment.startswith("end"):
            await until_ended(store, task)
    async with serve(tool.server, store=SharedStore(tmp_path / "log.db"), **settings) as site:
        balancer.ports[:] = [site.port]
        assert said(await client.outcome(task)) == "done"
    assert got == (["b 5", "b 5"] if moment == "sleep" else ["b 5", "a", "b 5"])
    assert effects == ([] if moment == "sleep" else ["a"])


async def until_ended(store: Store, task: str) -> None:
    """Wait until no step of a call is open."""
    while any(step.state is ToolStepState.OPEN for step in await steps_in(store, task)):  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.005)


async def test_a_sleep_that_was_cut_short_excuses_no_death(tmp_path: Path) -> None:
    """The next run sleeps the rest of it."""
    store, tasks = SharedStore(tmp_path / "log.db"), list[str]()

    async def body() -> float | None:
        rows: Sequence[ToolStepRecord] = ()

        async def look() -> None:
            nonlocal rows
            while not tasks or not (rows := await steps_in(store, tasks[0])):  # noqa: ASYNC110 - a store has no event
                await asyncio.sleep(0.005)

        looking = asyncio.create_task(look())
        await cut_short(perdure.sleep(MOST_SLEEP), looking.done)
        assert StepHistory(rows).sleeps(store.clock())
        return rows[0].ended

    tool = Tool(body)
    async with serve(tool.server, store=store, task_after=0.0, drain_timeout=0.0) as site:
        client = TaskClient(balancer=Balancer(ports=[site.port]))
        tasks.append(await client.task("do"))
        await until(lambda: tool.has_run(1))
        await until_ended(store, tasks[0])
        [row] = await steps_in(store, tasks[0])
        assert (row.ended, StepHistory([row]).sleeps(store.clock())) == (tool.got[0], False)


@pytest.mark.parametrize("is_task", [True, False])
async def test_an_answer_is_taken_when_it_is_in_the_store(is_task: bool, tmp_path: Path) -> None:
    """Before that neither the client is told that it is (202 in a session), nor has the tool got it."""
    store, got = FaultyStore(SharedStore(tmp_path / "log.db")), list[str]()
    server = MCPServer("asks", version="1", log_level="CRITICAL")

    @server.tool()
    async def ask(ctx: Context) -> str:
        got.append(str((await ctx.elicit("Why?", Answer)).data))  # type: ignore[union-attr]
        return got[0]

    async with serve(server, store=store, task_after=0.0, store_timeout=0.5, complaint="the store fails") as site:
        answer = {"action": "accept", "content": {"answer": "so"}}
        telling: asyncio.Task[Any]
        if is_task:
            client = TaskClient(balancer=Balancer(ports=[site.port]), capabilities=CAN_BE_ASKED)
            task = await client.task("ask")
            while not (asked := (await client.get(task)).get("inputRequests")):
                pass
            responses = dict.fromkeys(asked, answer)
            store.writes = Fault.RAISES
            telling = asyncio.create_task(client.ask("tasks/update", {"taskId": task, "inputResponses": responses}))
        else:
            peer = Peer(site, capabilities={"elicitation": {}})
            await peer.initialize()
            wire = await peer.call("ask")
            while "elicitation/create" not in (event := await wire.event()).data:
                pass
            response = {"jsonrpc": "2.0", "id": json.loads(event.data)["id"], "result": answer}
            store.writes = Fault.RAISES
            telling = asyncio.create_task(peer.send(response))
        begun = store.asked
        await until(lambda: store.asked > begun + 3)
        assert (telling.done(), got) == (False, [])
        store.works()
        told = await telling
        if is_task:
            assert "result" in told
            assert said(await client.outcome(task)) == "answer='so'"
        else:
            assert told.status_code == 202
            assert text_of((await wire.rest())[-1]) == "answer='so'"


@pytest.mark.parametrize("how", ["cancelled", "deleted"])
async def test_a_cancelled_call_tells_what_was_finished(how: str, tmp_path: Path) -> None:
    """Its open step stays open, and no value is left of those that have ended. So does one whose session is deleted."""
    begun = asyncio.Event()

    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def body() -> None:
        await perdure.step("a", effect, "a")
        await perdure.step("b", endless)

    store = SharedStore(tmp_path / "log.db")
    async with serve(Tool(body, runs=1).server, store=store) as site:
        peer = await site.join()
        wire = await peer.call("do", id=7)
        await begun.wait()
        await (peer.cancel(7) if how == "cancelled" else peer.delete())
        [answer] = await wire.rest()
        assert answer["error"]["data"] == {"steps": {"finished": ["a"], "open": ["b"]}}
        assert answer["error"]["code"] == -32800
        position = parse_position(wire.seen[0].id)
        assert position is not None
        if how == "deleted":
            return  # and its steps with it
        steps = await store.tool_steps(position.stream)
        assert [(step.name, step.state.value, step.value) for step in steps] == [
            ("a", "ended", b""),
            ("b", "open", b""),
        ]


async def test_no_value_stays_of_a_step_that_ends_with_its_call(tmp_path: Path) -> None:
    """The store has its end, and the tool returns before this process knows."""
    store, tasks = FaultyStore(SharedStore(tmp_path / "log.db")), list[str]()
    values = list[bytes]()

    async def body() -> None:
        await until(lambda: bool(tasks))
        store.writes = Fault.LATE

        async def aside() -> None:
            with pytest.raises(Misuse, match="has ended"):
                await perdure.step("a", effect, "a", again=True)

        others.append(asyncio.create_task(aside()))
        while not values:
            values.extend([step.value for step in await steps_in(store, tasks[0])])
        store.works()

    others = list[asyncio.Task[None]]()
    async with serve(Tool(body, runs=1).server, store=store, task_after=0.0, complaint="the store fails") as site:
        client = TaskClient(balancer=Balancer(ports=[site.port]))
        tasks.append(await client.task("do"))
        assert said(await client.outcome(tasks[0])) == "done"
        await asyncio.gather(*others)
        assert values == [b'"a 5"']
        assert [step.value for step in await steps_in(store, tasks[0])] == [b""]


@pytest.mark.parametrize(
    ("kind", "outage", "stops"),
    [
        *((kind, True, stops) for kind in ("memory", "sqlite") for stops in (False, True)),
        *((kind, False, True) for kind in ("memory", "sqlite", "postgres")),
    ],
)
async def test_a_store_that_lost_a_finished_step_does_not_let_it_run_again_silently(
    kind: str, outage: bool, stops: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The call goes on where it runs. After the end of that process it is answered that something was lost. That is
    noticed also where a file is put back in its place, and no request to it fails."""
    losing, got = Losing(kind, tmp_path), list[str]()
    store, begun, goes, lost = FaultyStore(losing.store), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def of_two(name: str) -> None:
        got.append(await perdure.step(name, effect, name, again=name == "c"))

    async def body() -> None:
        begun.set()
        await goes.wait()
        await asyncio.gather(of_two("a"))
        if outage:
            store.writes = Fault.RAISES
        else:
            await lost.wait()
        await asyncio.gather(of_two("b"), of_two("c"))

    async def aside(work: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(work) if kind == "postgres" else work()

    tool = Tool(body, runs=2 if stops else 1)
    settings: dict[str, Any] = {"task_after": 0.0, "store_timeout": 0.5, "complaint": LOST}
    async with serve(tool.server, store=store, drain_timeout=0.0, **settings) as site:
        client = TaskClient(balancer=Balancer(ports=[site.port]))
        task = await client.task("do")
        await begun.wait()
        lose = await aside(losing.remember)
        goes.set()
        await until(lambda: len(got) == 1)
        asked = store.asked
        await until(lambda: not outage or store.asked > asked + 2)  # it is known here that the store fails
        await aside(lose)
        store.works()
        lost.set()
        await until(lambda: tool.has_run(1))
        [step] = [step for step in await steps_in(store, task) if step.name == "lost"]
        assert (step.state.value, step.again) == ("open", False)
        if not stops:
            assert said(await client.outcome(task)) == "done"
    assert [record for record in caplog.records if getattr(record, "action", "") == "step.lost"]
    if stops and kind != "memory":
        async with serve(tool.server, store=open_store(losing.url, busy_timeout=20.0)) as site:
            client = TaskClient(balancer=Balancer(ports=[site.port]))
            view = await client.outcome(task)
            assert said(view) == OUTCOME_UNKNOWN
            assert view["error"]["data"]["steps"]["open"] == ["lost"]
    assert sorted(got) == ["a 5", "b 5", "c 5"]


async def steps_in(store: Store, task: str) -> Sequence[ToolStepRecord]:
    [stream] = await store.streams(SessionId(task))
    return await store.tool_steps(stream.id)


class HidesTools(MCPServer):
    async def list_tools(self) -> list[MCPTool]:
        return await super().list_tools() if get_access_token() else []


async def test_a_stop_leaves_a_call_of_a_tool_that_only_its_owner_sees(tmp_path: Path) -> None:
    """The next process goes on with it when its owner is back."""
    begun, runs = asyncio.Event(), list[str]()

    async def body() -> None:
        runs.append(await perdure.step("a", effect, "a"))
        begun.set()
        if len(runs) == 1:
            await perdure.sleep(3600)

    server = Tool(body, runs=1, kind=HidesTools).server
    balancer, store = Balancer(ports=[]), partial(SharedStore, tmp_path / "log.db")
    ann = TaskClient(balancer=balancer, headers={"authorization": "Bearer ann-1"})
    async with serve(server, store=store(), auth=Guests(), task_after=0.0, drain_timeout=0.0) as site:
        balancer.ports[:] = [site.port]
        task = await ann.task("do")
        await begun.wait()
    async with serve(server, store=store(), auth=Guests()) as site:
        balancer.ports[:] = [site.port]
        assert said(await ann.outcome(task)) == "done"
    assert runs == ["a 5", "a 5"]


async def test_a_step_may_have_any_name(tmp_path: Path) -> None:
    """Also one that no encoding has, or that a terminal would act on."""
    names = ("\ud800", "\x00", "\u202e", "' \" \\", "é")

    async def body() -> list[str]:
        return [await perdure.step(name, effect, "x") for name in names]

    assert await in_each_run(body, tmp_path / "log.db") == [["x 5"] * 5] * 2
