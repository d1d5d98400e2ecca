"""A child process dies, hangs or never starts, and no client loses an answer."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from perdure._core.backoff import Pauses
from perdure.gateway.children import Children, program_of, shared_reaper
from perdure.gateway.host import host_upstream
from perdure.settings import Settings
from tests.gateway.gateways import (
    CANCELLED,
    OUTCOME_UNKNOWN,
    UNAVAILABLE,
    Names,
    begin,
    error_of,
    gateway,
    has_process,
    lines,
    refused_handshake,
    scripted,
    text_of_call,
)
from tests.support.clients.modern_peer import CallPeer, message_of
from tests.support.clients.wire_client import gaps_of, progress_of, text_of
from tests.support.servers.in_process import info_of, serve, until

pytestmark = pytest.mark.anyio

FORM = {"type": "object", "properties": {}}


async def test_a_child_that_dies_in_a_plain_call(tmp_path: Path) -> None:
    """G1."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await begin(peer, "plain", {"progress": 2}, {"hang": True})
        assert progress_of(await wire.messages(2)) == [1, 2]
        (tmp_path / "more").write_text(f"wait={tmp_path / 'go'}")  # the next child is not ready before that
        await served.kill()
        error = error_of((await wire.rest())[-1])
        assert len(served.pids) == 1  # it is not even started for that answer
        assert error["code"] == OUTCOME_UNKNOWN
        assert error["data"]["reason"] == "the server's process ended (SIGKILL)"
        assert served.runs == ["plain"]
        (tmp_path / "go").touch()
        assert await text_of_call(peer, {"say": "next"}) == "next"
        assert len(served.pids) == 2


async def test_a_child_that_dies_in_an_idempotent_call(tmp_path: Path) -> None:
    """G2."""
    go = tmp_path / "go"
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await begin(peer, "idempotent", {"progress": 5}, {"wait": str(go)}, {"progress": 8}, {"say": "whole"})
        first = await wire.messages(5)
        await served.kill()
        await served.has_run(2)
        go.touch()
        rest = await wire.rest()
        assert progress_of([*first, *rest]) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert text_of(rest[-1]) == "whole"
        assert served.runs == ["idempotent", "idempotent"]


async def test_a_call_that_gets_answers_between_the_deaths_of_its_children(tmp_path: Path) -> None:
    """It gets on: its second death is not one too many, and neither question is asked again."""
    acts: list[Any] = []
    for number in (1, 2):
        acts.append({"ask": "elicitation/create", "params": {"message": f"{number}?", "requestedSchema": FORM}})
        acts += [{"note": str(tmp_path / f"told {number}")}, {"wait": str(tmp_path / f"go {number}")}]
    asked: list[str] = []
    async with gateway(tmp_path) as served:
        peer = await served.join(capabilities={"elicitation": {}})
        wire = await begin(peer, "idempotent", *acts, {"say": "whole"})
        for number in (1, 2):
            while (ask := await wire.message()).get("method") != "elicitation/create":
                pass
            asked.append(ask["params"]["message"])
            await peer.answer(ask, {"action": "decline"})
            await until((tmp_path / f"told {number}").exists)
            await served.kill()
            await served.has_run(number + 1)
            (tmp_path / f"go {number}").touch()
        rest = await wire.rest()
    assert text_of(rest[-1]) == "whole"
    assert [message for message in rest if message.get("method") == "elicitation/create"] == []
    assert asked == ["1?", "2?"]


async def test_a_call_that_kills_its_child_twice(tmp_path: Path) -> None:
    """G3."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        error = error_of((await (await begin(peer, "idempotent", {"kill": True})).rest())[-1])
        assert error["code"] == OUTCOME_UNKNOWN
        assert served.runs == ["idempotent", "idempotent"]
        assert await text_of_call(peer, {"say": "alive"}) == "alive"


async def test_calls_beside_a_dead_child(tmp_path: Path) -> None:
    """Each by its own row: no hint, a hint, a read of the specification, and one that its client has cancelled. G4."""
    go = tmp_path / "go"
    async with gateway(tmp_path, f"hold=resources/read,{go}") as served:
        peer = await served.join()
        plain = await begin(peer, "plain", {"wait": str(go)}, token=None)
        marked = await begin(peer, "read_only", {"wait": str(go)}, {"say": "again"}, token=None)
        read = await peer.post(peer.request("resources/read", {"uri": "note://a"}))
        cancelled = await begin(peer, "idempotent", {"stubborn": True}, {"wait": str(go)}, id="c", token=None)
        await served.has_run(3)
        await until(lambda: (tmp_path / "go.held").exists())  # the read has arrived as well
        await peer.cancel("c")
        await served.kill()
        await served.has_run(4)
        go.touch()
        assert error_of((await plain.rest())[-1])["code"] == OUTCOME_UNKNOWN
        assert text_of((await marked.rest())[-1]) == "again"
        assert (await read.rest())[-1]["result"]["contents"][0]["text"] == "this is note://a"
        assert error_of((await cancelled.rest())[-1])["code"] == CANCELLED
        assert sorted(served.runs) == ["idempotent", "plain", "read_only", "read_only"]


async def test_a_rerun_uses_the_credentials_of_its_call(tmp_path: Path) -> None:
    """The principal is away, and its token is not good any more, when the child dies. G5."""
    go, names = tmp_path / "go", Names()
    async with gateway(tmp_path, serving={"auth": names}) as served:
        peer = await served.join(token="ada")
        wire = await begin(peer, "idempotent", {"progress": 1}, {"wait": str(go)}, {"say": "hers"})
        await wire.messages(1)
        await wire.drop()
        names.good.clear()
        await served.kill()
        await served.has_run(2)
        go.touch()
        await until(lambda: served.site.app.counters.calls_answered >= 2)
        names.good.add("ada")
        assert text_of((await (await peer.get(wire.last_id)).rest())[-1]) == "hers"


async def test_a_child_whose_last_bytes_hold_the_answer(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        peer = await served.join()
        assert await text_of_call(peer, {"answer": "last words"}, {"kill": True}) == "last words"
        assert await text_of_call(peer, {"answer": "once more"}, {"exit": 3}, tool="idempotent") == "once more"
        assert served.runs == ["plain", "idempotent"]


async def test_a_call_that_was_not_read_waits_for_the_next_child(tmp_path: Path) -> None:
    """The child does one thing at a time. What lies in the pipe, in whole or in part, has certainly not run."""
    async with gateway(tmp_path, "one=1") as served:
        peer = await served.join()
        first = await begin(peer, "plain", {"hang": True})
        await served.has_run()
        small = await begin(peer, "plain", {"say": "in the next child"})
        large = await begin(peer, "plain", {"say": "x" * 300_000})
        await served.kill()
        assert error_of((await first.rest())[-1])["code"] == OUTCOME_UNKNOWN
        assert text_of((await small.rest())[-1]) == "in the next child"
        assert text_of((await large.rest())[-1]) == "x" * 300_000
        assert served.runs == ["plain"] * 3


async def test_calls_at_a_server_that_ends_after_every_handshake(tmp_path: Path) -> None:
    """It takes no call, however often it is started, and each call gets its answer."""
    upstream = scripted(tmp_path, f"more={tmp_path / 'more'}", patience=0.5)
    async with shared_reaper() as reaper:
        children = Children(program_of(upstream), reaper=reaper, pauses=Pauses(first=0.01, longest=0.05))
        async with serve(host_upstream(upstream, Settings(), children=children), eras="both") as site:
            peer = await site.join()
            (tmp_path / "more").write_text("leaves=1")
            [first] = map(int, lines(tmp_path / "starts"))
            os.kill(first, signal.SIGKILL)
            await until(lambda: not has_process(first))
            calls = [CallPeer(port=site.port).call("plain", key=key) for key in (None, "k")]
            answers = [(await (await begin(peer, "plain")).rest())[-1], *map(message_of, await asyncio.gather(*calls))]
        await children.aclose()
    assert [answer["error"]["code"] for answer in answers] == [UNAVAILABLE] * 3
    assert {answer["error"]["data"]["reason"] for answer in answers} <= {"died", "backing_off"}


def failing_first(folder: Path, status: int) -> tuple[str, ...]:
    """A program that ends at its first start, and is the scripted server afterwards."""
    program = scripted(folder).program
    assert program is not None
    script = f'if mkdir {folder}/first 2>/dev/null; then echo out of order >&2; exit {status}; fi; exec "$@"'
    return ("sh", "-c", script, "sh", *program.argv)


async def test_initialize_is_tried_once_more_on_a_new_child(tmp_path: Path) -> None:
    async with gateway(tmp_path, argv=failing_first(tmp_path, 3)) as served:
        peer = await served.join()
        assert await text_of_call(peer, {"say": "second child"}) == "second child"
        assert len(served.pids) == 1


async def test_a_child_that_dies_in_every_handshake(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No session opens. The answer says how the program ended, and the log its last words, which are not for clients:
    a program may write anything to stderr."""
    async with gateway(tmp_path, "stderr=no database", "die=1") as served:
        _, error = await refused_handshake(served)
        assert (error["code"], error["data"]) == (
            UNAVAILABLE,
            {"upstream": "scripted", "reason": "died", "ran": False},
        )
        assert "the server's process ended (SIGKILL)." in error["message"]
        assert "no database" not in f"{error} {served.site.app.upstream!r}"
        assert "its last words: no database" in caplog.text
        assert len(served.pids) == 2


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    """It is answered at once, and works with the next request once it is there. G25."""
    late = tmp_path / "late"
    async with gateway(tmp_path, argv=(str(late),), serving={"complaint": "cannot be started"}) as served:
        begun = time.monotonic()
        _, error = await refused_handshake(served)
        assert time.monotonic() - begun < 0.5
        assert (error["code"], error["data"]["reason"], error["data"]["ran"]) == (UNAVAILABLE, "no_program", False)
        program = scripted(tmp_path).program
        assert program is not None
        late.write_text("#!/bin/sh\nexec " + " ".join(program.argv))
        late.chmod(0o700)
        assert await text_of_call(await served.join(), {"say": "there"}) == "there"


async def test_a_crash_loop_is_slowed(tmp_path: Path) -> None:
    """Each of many clients of both eras gets its answer, and together they start a few processes. G26."""
    limits = {"patience": 1.0, "max_caller_processes": 64, "era": "auto"}
    async with gateway(tmp_path, "exit=1", serving={"eras": "both"}, **limits) as served:

        async def knock() -> str:
            reason: str = (await refused_handshake(served))[1]["data"]["reason"]
            return reason

        async def call() -> str:
            answer = message_of(await CallPeer(port=served.site.port).call("plain"))
            reason: str = answer["error"]["data"]["reason"]
            return reason

        assert await knock() == "died"
        begun = time.monotonic()
        reasons = await asyncio.gather(*(each() for each in (knock, call) * 25))
        assert set(reasons) <= {"died", "backing_off"}
        # Pauses of 0.1, 0.2, 0.4 s and so on, and a probe of the other era before each start at most.
        assert len(served.pids) <= 2 * (2 + math.log2((time.monotonic() - begun) / 0.1 + 1))
        [health] = [served.site.app.upstream]
        assert health is not None
        assert health.state in ("backing off", "down")


async def test_a_slow_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ten seconds that a server in this process has for its answers are 0.1 s here, and a start takes longer. What
    no client waits for (the settling after a crash) has the time of a start as well. G27."""
    monkeypatch.setattr("perdure.gateway.host._ANSWER_SECONDS", 0.1)
    async with host_upstream(scripted(tmp_path, start_timeout=45.0), Settings()).start() as started:
        assert started.runtimes.answers_within == 45.1
    go = tmp_path / "go"
    async with gateway(tmp_path, f"wait={go}") as served:
        joining = asyncio.create_task(served.join())
        await until(lambda: served.pids)
        await asyncio.sleep(0.3)
        assert not joining.done()
        go.touch()
        peer = await joining
        go.unlink()
        await served.kill()
        waiting = asyncio.create_task(text_of_call(peer, {"say": "slow"}))
        await until(lambda: len(served.pids) == 2)
        await asyncio.sleep(0.3)
        assert not waiting.done()
        go.touch()
        assert await waiting == "slow"


async def test_a_start_that_takes_too_long(tmp_path: Path) -> None:
    async with gateway(tmp_path, f"wait={tmp_path / 'never'}", start_timeout=0.3) as served:
        _, error = await refused_handshake(served)
        assert error["data"]["reason"] == "no_handshake"
        assert "did not answer initialize in 0.3 s" in error["message"]


async def test_a_hung_child_is_replaced(tmp_path: Path) -> None:
    """Only once all its requests are cancelled: it may be busy with another one. G33."""
    async with gateway(tmp_path, ping_timeout=0.2) as served:
        peer = await served.join()
        first = await begin(peer, "plain", {"progress": 1}, {"freeze": True}, id="a")
        await first.messages(1)
        second = await begin(peer, "plain", {"hang": True}, id="b")
        await served.has_run(2)
        await peer.cancel("a")
        await asyncio.sleep(0.5)
        assert len(served.pids) == 1
        await peer.cancel("b")
        assert error_of((await second.rest())[-1])["code"] == CANCELLED
        await until(lambda: not has_process(served.pids[0]))
        assert await text_of_call(peer, {"say": "replaced"}) == "replaced"


@pytest.mark.parametrize("process", ["session", "shared"])
async def test_a_child_that_hangs_in_a_request_of_the_gateways_own_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    """No client can cancel that request."""
    monkeypatch.setattr("perdure.gateway.session_runtime.OWN_SECONDS", 0.2)
    listed = tmp_path / "listed"
    async with gateway(tmp_path, "one=1", f"hold=tools/list,{listed}", ping_timeout=0.2, process=process) as served:
        peer = await served.join()
        await until(lambda: not has_process(served.pids[0]))
        listed.touch()
        assert await text_of_call(peer, {"say": "replaced"}) == "replaced"
        assert len(served.pids) == 2


async def test_a_call_that_takes_too_long(tmp_path: Path) -> None:
    """Its outcome is unknown, and it does not run again: it has had its time."""
    async with gateway(tmp_path, call_timeout=0.4) as served:
        peer = await served.join()
        error = error_of((await (await begin(peer, "idempotent", {"sleep": 30})).rest())[-1])
        assert (error["code"], error["data"]["reason"]) == (
            OUTCOME_UNKNOWN,
            "the server did not answer within 0.4 s (call_timeout)",
        )
        assert await text_of_call(peer, {"say": "quick"}) == "quick"
        assert served.runs == ["idempotent", "plain"]
        assert len(served.pids) == 1


async def test_a_late_answer_is_dropped(tmp_path: Path) -> None:
    """G34."""
    go = tmp_path / "go"
    async with gateway(tmp_path) as served:
        peer = await served.join()
        wire = await begin(peer, "plain", {"stubborn": True}, {"progress": 1}, {"wait": str(go)}, id="c")
        await wire.messages(1)
        await peer.cancel("c")
        [answer] = await wire.rest()
        assert error_of(answer)["code"] == CANCELLED
        go.touch()
        assert await text_of_call(peer, {"say": "later"}) == "later"  # the late answer has arrived before
        assert info_of(served.site.app, peer.session).running_calls == ()
        again = await peer.try_get(wire.last_id)
        assert again.status_code == 405  # nothing follows


async def test_an_ask_of_a_cancelled_call(tmp_path: Path) -> None:
    """The upstream is answered at once, and the client is not asked. G19."""
    go = tmp_path / "go"
    async with gateway(tmp_path) as served:
        peer = await served.join()
        standalone = await peer.get()
        ask = ({"ask": "elicitation/create", "params": {"message": "?"}}, {"note": str(tmp_path / "asked")})
        wire = await begin(peer, "plain", {"stubborn": True}, {"progress": 1}, {"wait": str(go)}, *ask, id="c")
        await wire.messages(1)
        await peer.cancel("c")
        await wire.rest()
        go.touch()
        await until((tmp_path / "asked").exists)
        assert str(CANCELLED) in (tmp_path / "asked").read_text()
        await text_of_call(peer, {"notify": "notifications/prompts/list_changed"})
        assert (await standalone.message())["method"] == "notifications/prompts/list_changed"


async def test_noise_on_stdout(tmp_path: Path) -> None:
    """G28."""
    async with gateway(tmp_path, "banner=Server listening on nothing\n[1,2]") as served:
        peer = await served.join()
        noise = ({"print": "debug: here"}, {"print": '{"half":'}, {"half": "half a "}, {"print": "line"}, {"print": ""})
        assert await text_of_call(peer, *noise, {"say": "heard"}) == "heard"
        assert await text_of_call(peer, {"say": "again"}) == "again"
        giant = error_of((await (await begin(peer, "plain", {"giant": 70 << 20})).rest())[-1])
        assert (giant["code"], giant["data"]["reason"]) == (OUTCOME_UNKNOWN, "its answer is larger than 64 MiB")
        assert await text_of_call(peer, {"say": "still"}) == "still"
        assert len(served.pids) == 1


async def test_stderr_is_drained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However much it is; of the log it takes a part. G29."""
    async with gateway(tmp_path) as served:
        peer = await served.join()
        with caplog.at_level("INFO", "perdure"):
            line = "e" * 99
            assert await text_of_call(peer, {"stderr": line, "times": 100_000}, {"say": "done"}) == "done"
        logged = sum(len(record.message) for record in caplog.records if line in record.message)
        assert 1_000 < logged < 1_000_000


async def test_environment_of_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G31."""
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    monkeypatch.setenv("PERDURE_STORE", "postgresql://u:p@h/db")
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.setenv("HTTPS_PROXY", "http://u:p@proxy:1")
    async with gateway(tmp_path, env={"OWN": "mine"}) as served:
        text = await text_of_call(await served.join(), {"environment": True})
    assert '"OWN": "mine"' in text
    assert '"LC_TIME": "C"' in text
    assert '"PATH"' in text
    assert not any(word in text for word in ("s3cret", "PERDURE", "proxy"))


async def test_a_reader_that_does_not_read_stops_no_other_call(tmp_path: Path) -> None:
    """Its stream is trimmed, and the gap is told; the pipe is read on."""
    most = 200
    serving = {"small_buffers": True, "max_stream_events": most}
    async with gateway(tmp_path, serving=serving) as served:
        peer = await served.join()
        unread = await begin(peer, "plain", {"progress": 3000, "size": 2000}, {"say": "flooded"})
        assert await text_of_call(peer, {"say": "beside"}) == "beside"
        await until(lambda: served.site.app.counters.calls_answered >= 3)
        messages = await unread.rest()
        assert text_of(messages[-1]) == "flooded"
        seen = progress_of(messages)
        assert seen == sorted(set(seen))
        gone = [last - first + 1 for first, last in gaps_of(messages)]
        assert seen[-1] == 3000
        assert gone
        assert len(seen) + sum(gone) == 3000
