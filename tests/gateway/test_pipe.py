"""A lane over a pipe brings each message of a server once, in its order, and says of each request what became of it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure._core.jsonrpc import JsonObject
from perdure._core.lines import MAX_LINE_BYTES
from perdure.gateway.child import MAX_UNWRITTEN
from perdure.gateway.lane import Lost, Reason, UpstreamUnavailable
from perdure.gateway.pipe import MAX_ASKS
from tests.gateway.pipe_lanes import CLIENT, Lane, children_of, lane_to, scripted
from tests.support.servers.in_process import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_process_left")]

FOR_EVER = {"hang": True}


class Store:
    """A store that has no room until it is released."""

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.waits = 0

    async def wait_for_room(self) -> None:
        self.waits += 1
        await self.room.wait()


async def heard_upstream(lane: Lane, method: str) -> list[Any]:
    """The params of all messages of that method that the server has received."""
    messages = json.loads(await lane.call({"heard": True}))
    return [message.get("params") for message in messages if message.get("method") == method]


# The handshake


async def test_a_lane_is_opened_with_the_clients_own_params() -> None:
    async with children_of(scripted()) as children:
        lane = Lane(children)
        opened = await lane.open({**CLIENT, "protocolVersion": "2025-06-18", "x": {"extra": [1]}})
        assert opened.version == "2025-06-18"
        assert opened.result["serverInfo"] == {"name": "scripted", "version": "1"}
        assert await heard_upstream(lane, "notifications/initialized") == []
        lane.notify("notifications/initialized", None)
        assert await heard_upstream(lane, "notifications/initialized") == [None]
        [params] = await heard_upstream(lane, "initialize")
        assert params == {**CLIENT, "protocolVersion": "2025-06-18", "x": {"extra": [1]}}


FAILURES = {
    "exits": (("stderr=no database", "exit=3"), Reason.DIED, r"\(exit status 3\)\.$"),
    "is killed": (("kill=1",), Reason.DIED, r"\(SIGKILL\)"),
    "is killed by the handshake": (("die=1",), Reason.DIED, r"\(SIGKILL\)"),
    "is silent": (("silent=1",), Reason.NO_HANDSHAKE, "did not answer initialize in 0.5 s"),
    "prints noise": (("silent=1", "banner=hello"), Reason.NO_HANDSHAKE, "no messages of MCP"),
    "is of the future": (("version=2099-01-01",), Reason.VERSION, "2099-01-01.*2025-11-25"),
    "knows only the revision without sessions": (("version=2026-07-28",), Reason.VERSION, "2026-07-28"),
    "refuses the version": (("refuse=-32022",), Reason.VERSION, "refused, as it was told"),
    "has no initialize": (("refuse=-32601",), Reason.VERSION, "refused"),
    "refuses": (("refuse=-32000",), Reason.NO_HANDSHAKE, "refused, as it was told"),
    "has no version": (('raw={"jsonrpc":"2.0","id":$ID,"result":{}}',), Reason.NOT_MCP, "no protocol version"),
    "has an odd version": (
        ('raw={"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":3}}',),
        Reason.NOT_MCP,
        "no protocol version",
    ),
    "has no result": (('raw={"jsonrpc":"2.0","id":$ID,"result":[]}',), Reason.NOT_MCP, "no protocol version"),
    "is not JSON": (('raw={"jsonrpc":"2.0","id":$ID,"result":{NaN}}',), Reason.NOT_MCP, "no protocol version"),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_server_that_cannot_be_opened_is_answered_by_name(case: str) -> None:
    words, reason, sentence = FAILURES[case]
    limit = 0.5 if "silent=1" in words else 30.0
    async with children_of(scripted(*words, start_timeout=limit, grace=0.2)) as children:
        lane = Lane(children)
        with pytest.raises(UpstreamUnavailable, match=sentence) as caught:
            await lane.open(CLIENT)
        assert caught.value.reason is reason
        assert lane.heard.of("lost", "closed") == []
        # Only a death by itself slows the next start.
        assert bool(children.pause) == (reason is Reason.DIED)
        await until(lambda: children.count == 0)


async def test_a_program_that_prints_what_it_reads_is_no_server() -> None:
    async with children_of(scripted(argv=("cat",))) as children:
        with pytest.raises(UpstreamUnavailable) as caught:
            await Lane(children).open(CLIENT)
        assert caught.value.reason is Reason.NOT_MCP


async def test_a_slow_start(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with children_of(scripted(f"wait={gate}")) as children:
        lane = Lane(children)
        opening = asyncio.create_task(lane.open(CLIENT))
        await asyncio.sleep(0.2)
        assert not opening.done()
        gate.touch()
        assert (await opening).version == "2025-11-25"


async def test_an_opening_that_is_given_up_leaves_no_child() -> None:
    async with children_of(scripted("silent=1")) as children:
        opening = asyncio.create_task(Lane(children).open(CLIENT))
        await until(lambda: children.count)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await until(lambda: children.count == 0)
        assert not children.pause


async def test_what_follows_the_handshake_at_once_is_reported_after_it() -> None:
    early, late = (json.dumps({"jsonrpc": "2.0", "method": f"x/{name}"}) for name in ("early", "late"))
    answer = '{"jsonrpc":"2.0","id":$ID,"result":{"protocolVersion":"2025-11-25"}}'
    async with children_of(scripted(f"raw={early}\n{answer}\n{late}")) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        assert [report[2] for report in lane.heard.reports] == ["x/early"]
        await lane.heard.until(lambda: len(lane.heard.reports) == 2)
        assert [report[2] for report in lane.heard.reports] == ["x/early", "x/late"]


async def test_a_banner_before_the_handshake_is_noise() -> None:
    async with lane_to(scripted("banner=Server running on stdio")) as lane:
        assert await lane.call({"say": "fine"}) == "fine"


# Answers


RAW = {
    "Python's form": '{"jsonrpc":"2.0","id":$ID,"result":BODY}',
    "Python's form with spaces": '{"jsonrpc": "2.0", "id": $ID, "result": BODY}',
    "TypeScript's form": '{"result":BODY,"jsonrpc":"2.0","id":$ID}',
    "another order": '{"id":$ID,"result":BODY,"jsonrpc":"2.0"}',
    "other members": '{"jsonrpc":"2.0","id":$ID,"result":BODY,"x":{"result":{}}}',
    "a member twice": '{"jsonrpc":"2.0","id":$ID,"result":{"old":1},"result":BODY}',
    "an id as a string": '{"jsonrpc":"2.0","id":"$ID","result":BODY}',
    "an id as a double": '{"jsonrpc":"2.0","id":$ID.0,"result":BODY}',
    "an error that is null": '{"jsonrpc":"2.0","id":$ID,"error":null,"result":BODY}',
    "in an array": '[{"jsonrpc":"2.0","id":$ID,"result":BODY}]',
    "with a carriage return": '{"jsonrpc":"2.0","id":$ID,"result":BODY}\r',
    "with a byte order mark": '\ufeff{"jsonrpc":"2.0","id":$ID,"result":BODY}',
}
BODIES = [
    '{"content":[{"type":"text","text":"é😀"}], "n": 1e400, "m":1.10, "d":{"a":1,"a":2}}',
    '{"half":"\\ud83d"}',
    '{"digits":' + "7" * 5000 + "}",
    '{"deep":' + "[" * 300 + "]" * 300 + "}",
    "{}",
]


async def test_a_result_is_the_upstreams_own_text_in_whatever_form_it_comes() -> None:
    wanted = [(form, body) for form in RAW for body in BODIES]
    async with lane_to(scripted()) as lane:
        for form, body in wanted:
            lane.begin((form, body), {"print": RAW[form].replace("BODY", body)}, FOR_EVER)
        await lane.heard.until(lambda: len(lane.heard.of("answer", "failed", "lost")) == len(wanted))
        found = {report[1]: (report[0], report[2]) for report in lane.heard.of("answer", "failed", "lost")}
        assert found == {(form, body): ("answer", body.encode()) for form, body in wanted}


async def test_an_error_is_the_upstreams_own() -> None:
    async with lane_to(scripted("form=ts")) as lane:
        assert await lane.call({"error": {"code": -5, "message": "no", "data": [1]}}) == {
            "code": -5,
            "message": "no",
            "data": [1],
        }
        lane.request("unknown", "x/y", None)
        assert (await lane.heard.end_of("unknown"))["code"] == -32601


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"jsonrpc":"2.0","id":$ID,"result":{"n":NaN}}', "its answer is not JSON"),
        ('{"result":{"n":Infinity},"jsonrpc":"2.0","id":$ID}', "its answer is not JSON"),
        ('{"jsonrpc":"2.0","id":$ID,"result":{}} and a word', "its answer is not JSON"),
        ('{"jsonrpc":"2.0","id":$ID,"result":"text"}', "its answer has neither a result nor an error"),
        ('{"jsonrpc":"2.0","id":$ID,"result":null}', "its answer has neither a result nor an error"),
        ('{"jsonrpc":"2.0","id":$ID}', "its answer has neither a result nor an error"),
        ('{"jsonrpc":"2.0","id":$ID,"error":{"message":"x"}}', "its answer has neither a result nor an error"),
        ('{"jsonrpc":"2.0","id":$ID,"error":"x"}', "its answer has neither a result nor an error"),
    ],
)
async def test_an_answer_that_no_client_can_read_is_lost(line: str, why: str) -> None:
    async with lane_to(scripted()) as lane:
        assert await lane.call({"print": line}, FOR_EVER) == Lost(ran=True, why=why)
        assert await lane.call({"say": "fine"}) == "fine"


@pytest.mark.parametrize("form", ["python", "ts"])
async def test_an_answer_larger_than_a_line_may_be_is_lost_and_the_lane_goes_on(form: str) -> None:
    """G28."""
    async with lane_to(scripted(f"form={form}")) as lane:
        lost = await lane.call({"giant": MAX_LINE_BYTES})
        assert lost == Lost(ran=True, why="its answer is larger than 64 MiB")
        assert await lane.call({"say": "fine"}) == "fine"


async def test_noise_on_stdout(caplog: pytest.LogCaptureFixture) -> None:
    """Counted, told a few times, and no trouble for calls: also half a line, and JSON that is no message."""
    caplog.set_level(logging.INFO, logger="perdure")
    noise = [
        "loading…",
        '{"level":"info","id":$ID,"msg":"x"}',
        '{"method":"GET","path":"/"}',
        '{"id":$ID,"result":{}}',
        '{"jsonrpc":"2.0","method":7}',
        '{"jsonrpc":"2.0","method":"x","params":[1]}',
        '{"jsonrpc":"2.0","id":null,"method":"x"}',
        '{"jsonrpc":"2.0","id":true,"method":"x"}',
        '{"jsonrpc":"2.0","id":1.5,"method":"x"}',
        '"id":$ID}',
        "7",
        "null",
        '{"jsonrpc":"2.0","id":$ID,"resu',
    ]
    async with children_of(scripted()) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        steps = [*({"print": line} for line in noise), {"half": "half a line"}, {"print": ""}]
        assert await lane.call(*steps, {"say": "ok"}) == "ok"
        assert children.noise == len(noise) + 1
        assert len(lane.heard.reports) == 1
    records = [record for record in caplog.records if vars(record)["action"] == "upstream.noise"]
    assert [record.levelno for record in records] == [logging.WARNING] + [logging.INFO] * 4
    assert "loading…" in records[0].message


async def test_answers_under_foreign_ids_are_dropped() -> None:
    async with lane_to(scripted()) as lane:
        answers: list[JsonObject] = [
            {"jsonrpc": "2.0", "id": given, "result": {}} for given in (99, "x", None, True, [1], -1)
        ]
        assert await lane.call(*({"print": json.dumps(one)} for one in answers), {"say": "mine"}) == "mine"
        assert len(lane.heard.reports) == 1


# Notifications and asks


async def test_progress_belongs_to_its_call_and_has_its_senders_token() -> None:
    async with lane_to(scripted()) as lane:
        lane.begin(
            "a",
            {"progress": 3},
            {
                "print": '{"jsonrpc":"2.0","method":"notifications/progress",'
                '"params":{"progressToken":"$TOKEN","progress":4}}'
            },
            token="t",
        )
        lane.begin("b", {"progress": 2}, token=0)
        lane.begin("c", {"progress": 2})
        for key in "abc":
            assert await lane.heard.end_of(key) == "done"
        notifications = lane.heard.of("notification")
        progress = [(key, params["progressToken"], params["progress"]) for _, key, _, params in notifications]
        assert [one for one in progress if one[0] == "a"] == [("a", "t", number) for number in (1, 2, 3, 4)]
        assert [one for one in progress if one[0] == "b"] == [("b", 0, 1), ("b", 0, 2)]
        assert len(progress) == 6


async def test_progress_of_no_running_call_is_dropped() -> None:
    def progress(token: object) -> dict[str, object]:
        return {"notify": "notifications/progress", "params": {"progressToken": token, "progress": 1}}

    async with lane_to(scripted()) as lane:
        await lane.call({"answer": "early"}, {"progress": 2}, token="t")
        await lane.call(*map(progress, (1, 999, "x", None, True, [1], {})), {"say": "ok"}, token="u")
        assert lane.heard.of("notification") == []


async def test_other_notifications_pass_as_they_are() -> None:
    given = {"x": [1, 2.5, None, "é", {"_meta": {"y": True}}]}
    async with lane_to(scripted()) as lane:
        steps: list[JsonObject] = [
            {"log": "word", "level": "error"},
            {"notify": "x/custom", "params": given},
            {"notify": "x/bare"},
        ]
        await lane.call(*steps, {"notify": "notifications/progress"})
        assert lane.heard.of("notification") == [
            ("notification", None, "notifications/message", {"level": "error", "data": "word"}),
            ("notification", None, "x/custom", given),
            ("notification", None, "x/bare", None),
            ("notification", None, "notifications/progress", None),
        ]


async def test_half_an_emoji_in_a_notification_becomes_a_character_that_can_be_stored() -> None:
    async with lane_to(scripted()) as lane:
        params = '{"s":"a\\ud83d","n":1.5,"digits":' + "7" * 5000 + "}"
        await lane.call({"print": '{"jsonrpc":"2.0","method":"x","params":' + params + "}"})
        assert lane.heard.of("notification") == [("notification", None, "x", {"s": "a?", "n": 1.5, "digits": None})]


async def test_arrays_are_taken_apart() -> None:
    batch = [{"jsonrpc": "2.0", "method": f"x/{number}"} for number in range(3)]
    async with lane_to(scripted()) as lane:
        await lane.call({"print": json.dumps(batch)})
        assert [report[2] for report in lane.heard.of("notification")] == ["x/0", "x/1", "x/2"]


async def test_asks_are_answered_under_the_upstreams_ids() -> None:
    async with lane_to(scripted()) as lane:
        lane.begin("first", {"ask": "elicitation/create", "params": {"message": "?"}})
        await lane.heard.until(lambda: lane.heard.of("ask"))
        lane.begin("second", {"ask": "roots/list"})
        await lane.heard.until(lambda: len(lane.heard.of("ask")) == 2)
        (_, first, method, params), (_, second, other, nothing) = lane.heard.of("ask")
        assert (method, params, other, nothing) == ("elicitation/create", {"message": "?"}, "roots/list", None)
        lane.reply("unknown", {"result": {}})
        lane.reply(second, {"error": {"code": -1, "message": "no"}})
        lane.reply(first, {"result": {"action": "accept"}})
        lane.reply(first, {"result": {"action": "again"}})
        assert json.loads(await lane.heard.end_of("first")) == {"action": "accept"}
        assert json.loads(await lane.heard.end_of("second")) == {"code": -1, "message": "no"}
        heard = json.loads(await lane.call({"heard": True}))
        assert len([message for message in heard if "method" not in message]) == 2


async def test_an_ask_that_is_withdrawn_is_not_answered() -> None:
    async with lane_to(scripted()) as lane:
        await lane.call({"begin_ask": "sampling/createMessage"}, {"withdraw": True}, {"withdraw": True})
        [(_, ask, _, _)] = lane.heard.of("ask")
        assert lane.heard.of("withdrawn") == [("withdrawn", ask, "not needed any more")]
        lane.reply(ask, {"result": {}})
        heard = json.loads(await lane.call({"heard": True}))
        assert [message for message in heard if "method" not in message] == []


async def test_the_upstreams_ping_is_answered_here() -> None:
    async with lane_to(scripted()) as lane:
        assert await lane.call({"ask": "ping"}) == "{}"
        assert lane.heard.of("ask") == []


async def test_a_server_that_asks_in_a_loop_is_refused() -> None:
    async with lane_to(scripted()) as lane:
        await lane.call(*[{"begin_ask": "x"}] * MAX_ASKS)
        assert json.loads(await lane.call({"ask": "x"}))["code"] == -31004
        assert len(lane.heard.of("ask")) == MAX_ASKS


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=3)
@given(values=st.lists(st.dictionaries(st.text(), ANY_JSON, max_size=5), min_size=20, max_size=60))
def test_unknown_methods_and_params_pass_as_equal_values(values: list[dict[str, Any]]) -> None:
    """G36."""

    async def echo() -> None:
        async with lane_to(scripted()) as lane:
            for number, value in enumerate(values):
                lane.request(number, "scripted/echo", value)
            await lane.heard.until(lambda: len(lane.heard.of("answer")) == len(values))
            found = {report[1]: json.loads(report[2]) for report in lane.heard.of("answer")}
            assert found == {number: {"params": value} for number, value in enumerate(values)}

    asyncio.run(echo())


# Cancelling


async def test_a_late_answer_is_dropped() -> None:
    async with lane_to(scripted()) as lane:
        lane.begin("call", {"stubborn": True}, {"progress": 1}, {"ask": "x"}, {"progress": 1}, token="t")
        await lane.heard.until(lambda: lane.heard.of("ask"))
        lane.cancel("call", {"reason": "enough", "requestId": "the client's"})
        lane.cancel("call", None)
        [(_, ask, _, _)] = lane.heard.of("ask")
        lane.reply(ask, {"result": {}})
        assert await lane.call({"sleep": 0.05}, {"say": "next"}) == "next"
        [cancelled] = await heard_upstream(lane, "notifications/cancelled")
        assert cancelled == {"reason": "enough", "requestId": 2}
        assert [report[0] for report in lane.heard.reports if report[1] == "call"] == ["notification"]
        # The key may be used again.
        lane.begin("call", {"say": "second"})
        assert await lane.heard.end_of("call") == "second"


async def frozen(lane: Lane) -> None:
    while await lane.probe():
        pass


async def test_hung_child_is_replaced() -> None:
    async with children_of(scripted(grace=0.2, ping_timeout=0.2)) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        lane.begin("call", {"freeze": True})
        await frozen(lane)
        assert lane.heard.of("closed") == []
        lane.cancel("call", None)
        await lane.heard.until(lambda: lane.heard.of("closed"))
        assert lane.heard.of("closed", "lost") == [("closed", "it did not answer a ping in 0.2 s, and was ended")]
        await until(lambda: children.count == 0)
        assert children.numbers.upstream_restarts == 1


async def test_a_hung_child_is_left_while_another_call_runs() -> None:
    """G33."""
    async with lane_to(scripted(grace=0.2, ping_timeout=0.1)) as lane:
        lane.begin("other", FOR_EVER)
        lane.begin("call", {"freeze": True})
        await frozen(lane)
        lane.cancel("call", None)
        await frozen(lane)
        assert lane.heard.of("closed") == []
        lane.cancel("other", None)
        await lane.heard.until(lambda: lane.heard.of("closed"))


async def test_a_child_that_answers_is_kept_after_its_calls_are_cancelled() -> None:
    async with lane_to(scripted(ping_timeout=5.0)) as lane:
        lane.begin("call", FOR_EVER)
        lane.cancel("call", None)
        assert await lane.probe() is True
        assert await lane.call({"say": "alive"}) == "alive"
        assert len(await heard_upstream(lane, "ping")) == 2


# The end of a child


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({"kill": True}, "the server's process ended (SIGKILL)"),
        ({"exit": 3}, "the server's process ended (exit status 3)"),
        ({"exit": 0}, "the server's process ended (exit status 0)"),
    ],
)
async def test_a_child_that_ends_loses_its_calls_which_may_have_run(step: dict[str, object], why: str) -> None:
    async with children_of(scripted()) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        lane.begin("other", FOR_EVER)
        lane.begin("call", step)
        await lane.heard.until(lambda: lane.heard.of("closed"))
        lost = Lost(ran=True, why=why)
        assert lane.heard.reports == [("lost", "other", lost), ("lost", "call", lost), ("closed", why)]
        assert children.pause
        # What comes now was not sent.
        lane.begin("late")
        lane.notify("x", None)
        lane.begin("given up")
        lane.cancel("given up", None)
        late = await lane.heard.end_of("late")
        assert (late.ran, late.unavailable.reason) == (False, Reason.DIED)
        assert await lane.probe() is False
        assert lane.heard.reports[3:] == [("lost", "late", late)]


async def test_calls_are_lost_soon_after_a_child_was_killed() -> None:
    async with lane_to(scripted()) as lane:
        lane.begin("call", FOR_EVER)
        os.kill(int(await lane.call({"pid": True})), signal.SIGKILL)
        began = time.monotonic()
        assert (await lane.heard.end_of("call")).why == "the server's process ended (SIGKILL)"
        assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("step", ["print", "half"])
async def test_the_last_bytes_of_a_child_may_hold_the_answer(step: str) -> None:
    """With and without a line end, after many others."""
    answer = '{"jsonrpc":"2.0","id":$ID,"result":{"content":[{"text":"just so"}]}}'
    async with lane_to(scripted()) as lane:
        lane.begin("call", {"progress": 500, "size": 200}, {step: answer}, {"kill": True}, token="t")
        assert await lane.heard.end_of("call") == "just so"
        await lane.heard.until(lambda: lane.heard.of("closed"))
        assert len(lane.heard.of("notification")) == 500


async def test_half_an_answer_is_none() -> None:
    async with lane_to(scripted()) as lane:
        half = '{"jsonrpc":"2.0","id":$ID,"result":{"content":[{"te'
        assert (await lane.call({"half": half}, {"kill": True})).ran


async def test_a_process_below_that_holds_the_pipe_keeps_no_call_waiting() -> None:
    async with children_of(scripted(grace=0.3)) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        began = time.monotonic()
        lost = await lane.call({"spawn": 600}, {"kill": True})
        assert lost.why == "the server's process ended (SIGKILL)"
        assert time.monotonic() - began < 10.0
        await until(lambda: children.count == 0)


async def test_a_call_that_was_not_read_did_not_run(tmp_path: Path) -> None:
    """A server that does not read its input: what the pipe took in part did not run, and what is too much is
    refused."""
    async with children_of(scripted("one=1", grace=0.2)) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        lane.begin("hangs", FOR_EVER)
        large = {"x": "y" * (MAX_UNWRITTEN // 4)}
        for number in range(5):
            lane.request(number, "scripted/echo", large)
        refused = await lane.heard.end_of(4)
        assert (refused.ran, refused.unavailable.reason) == (False, Reason.LIMIT)
        lane.notify("small", None)  # there is room for it
        await lane.aclose(ended=False)
        assert len(lane.heard.reports) == 1

        lane = Lane(children)
        await lane.open(CLIENT)
        lane.begin("hangs", {"wait": str(tmp_path / "gate")}, {"kill": True})
        for number in range(2):
            lane.request(number, "scripted/echo", large)
        (tmp_path / "gate").touch()
        await lane.heard.until(lambda: lane.heard.of("closed"))
        assert [(key, lost.ran) for _, key, lost in lane.heard.of("lost")] == [("hangs", True), (0, False), (1, False)]
        assert lane.heard.of("lost")[-1][2].unavailable.reason is Reason.DIED


@pytest.mark.parametrize("steps", [(), ({"spawn": 600},)], ids=["", "a process below holds the pipe"])
async def test_a_call_that_lies_in_the_pipe_did_not_run(tmp_path: Path, steps: tuple[JsonObject, ...]) -> None:
    """Unless another process could still read it."""
    async with children_of(scripted("one=1", f"runs={tmp_path / 'runs'}", grace=0.2)) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        lane.begin("first", *steps, {"wait": str(tmp_path / "gate")}, {"kill": True})
        await until((tmp_path / "runs").exists)
        for number in range(3):
            lane.begin(number, {"say": "never"})
        (tmp_path / "gate").touch()
        await lane.heard.until(lambda: lane.heard.of("closed"))
        may_run = bool(steps)
        assert [(key, lost.ran) for _, key, lost in lane.heard.of("lost")] == [
            ("first", True),
            *((number, may_run) for number in range(3)),
        ]


async def test_a_server_that_reads_late_gets_everything_in_order() -> None:
    async with lane_to(scripted("one=1")) as lane:
        lane.begin("first", {"sleep": 0.1})
        for number in range(200):
            lane.request(number, "scripted/echo", {"n": number, "x": "y" * 5000})
        await lane.heard.until(lambda: len(lane.heard.of("answer")) == 201)
        assert [report[1] for report in lane.heard.of("answer")] == ["first", *range(200)]


async def test_a_server_that_closes_its_input_is_replaced() -> None:
    async with children_of(scripted(grace=0.2)) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        # The reading thread still holds the pipe until it has read once more.
        await lane.call({"close": "stdin"})
        lane.notify("x", None)
        lane.begin("hangs", FOR_EVER)
        while not lane.heard.of("closed"):
            lane.notify("x", None)
            await asyncio.sleep(0.01)
        await until(lambda: children.count == 0)


async def test_calls_of_an_earlier_process_are_lost() -> None:
    async with lane_to(scripted()) as lane:
        lane.follow("before", "tools/call", None, {})
        assert (await lane.heard.end_of("before")).ran


async def test_a_lane_that_is_closed_reports_nothing() -> None:
    async with children_of(scripted()) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        lane.begin("call", {"progress": 100_000}, token="t")
        await lane.heard.until(lambda: lane.heard.of("notification"))
        probing = asyncio.create_task(lane.probe())
        await asyncio.sleep(0)
        await lane.aclose(ended=True)
        count = len(lane.heard.reports)
        assert await probing is False
        lane.begin("late")
        assert children.count == 0
        await lane.aclose(ended=True)
        assert lane.heard.of("lost", "closed", "answer") == []
        assert len(lane.heard.reports) == count


async def test_a_lane_that_was_never_opened_can_be_closed() -> None:
    async with children_of(scripted()) as children:
        await Lane(children).aclose(ended=True)


# Who waits


async def test_the_pipe_waits_for_the_store_and_goes_on_in_order() -> None:
    async with lane_to(scripted()) as lane:
        lane.heard.flow = store = Store()
        lane.begin("call", {"progress": 50}, token="t")
        await until(lambda: store.waits)
        await asyncio.sleep(0.05)
        assert len(lane.heard.reports) == 1
        store.room.set()
        assert await lane.heard.end_of("call") == "done"
        assert [params["progress"] for *_, params in lane.heard.of("notification")] == list(range(1, 51))
        assert store.waits == 50


async def test_a_child_that_dies_while_the_store_is_full_is_read_to_its_end() -> None:
    async with children_of(scripted()) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        lane.heard.flow = store = Store()
        lane.begin("call", {"progress": 400}, {"answer": "in time"}, {"exit": 1}, token="t")
        await until(lambda: store.waits and children.count == 0)
        assert len(lane.heard.reports) == 1
        store.room.set()
        assert await lane.heard.end_of("call") == "in time"
        await lane.heard.until(lambda: lane.heard.of("closed"))
        assert len(lane.heard.of("notification")) == 400


async def test_a_lane_can_be_closed_while_the_store_is_full() -> None:
    async with lane_to(scripted()) as lane:
        lane.heard.flow = store = Store()
        lane.begin("call", {"progress": 5000}, token="t")
        await until(lambda: store.waits)


def test_a_lane_works_on_uvloop() -> None:
    async def story() -> None:
        async with lane_to(scripted("tree=60", grace=0.2)) as lane:
            lane.begin("call", {"progress": 1000}, {"ask": "roots/list"}, token="t")
            await lane.heard.until(lambda: lane.heard.of("ask"))
            [(_, ask, _, _)] = lane.heard.of("ask")
            lane.reply(ask, {"result": {"roots": []}})
            assert json.loads(await lane.heard.end_of("call")) == {"roots": []}
            assert len(lane.heard.of("notification")) == 1000
            assert (await lane.call({"kill": True})).why == "the server's process ended (SIGKILL)"

    uvloop.run(story())
