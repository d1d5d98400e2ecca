"""Children of the gateway start, are slowed, limited and ended, and no process of theirs is left."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.gateway.child import STDERR_BYTES, Child, ChildProgram, format_status
from perdure.gateway.children import Children, Reaper
from perdure.gateway.lane import Reason, UpstreamUnavailable
from tests.gateway.pipe_lanes import CLIENT, Lane, child_program, children_of, lane_to, scripted
from tests.support.servers.in_process import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_process_left")]


def refusal(children: Children) -> UpstreamUnavailable:
    with pytest.raises(UpstreamUnavailable) as caught:
        children.start()
    return caught.value


# Environment


def environment(program: ChildProgram, **inherited: str) -> dict[str, str]:
    return program.environment(inherited)


GATEWAY = {
    "PATH": "/bin",
    "HOME": "/home/x",
    "LC_ALL": "C.UTF-8",
    "TMPDIR": "/tmp",
    "NODE_EXTRA_CA_CERTS": "/etc/ca.pem",
    "DATABASE_URL": "postgres://u:secret@db",
    "PERDURE_TOKENS": "secret",
    "https_proxy": "http://proxy:3128",
    "HTTP_PROXY": "http://user:secret@proxy:3128",
    "No_Proxy": "x",
    "NO_PROXY": "localhost",
}


def test_a_child_finds_the_short_list_certificates_proxies_without_passwords_and_what_is_configured() -> None:
    program = child_program("x", argv=("x",), env={"TOKEN": "t", "LC_ALL": "C"})
    assert environment(program, **GATEWAY) == {
        "PATH": "/bin",
        "HOME": "/home/x",
        "LC_ALL": "C",
        "TMPDIR": "/tmp",
        "NODE_EXTRA_CA_CERTS": "/etc/ca.pem",
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "localhost",
        "TOKEN": "t",
    }


def test_a_child_that_inherits_finds_everything_but_the_gateways_own_variables() -> None:
    program = child_program("x", argv=("x",), inherit_env=True)
    assert environment(program, **GATEWAY) == {k: v for k, v in GATEWAY.items() if k != "PERDURE_TOKENS"}


async def test_environment_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_SECRET", "hidden")
    monkeypatch.setenv("PERDURE_TOKENS", "hidden")
    async with lane_to(scripted(env={"TOKEN": "given"})) as lane:
        found = json.loads(await lane.call({"environment": True}))
    assert found["TOKEN"] == "given"
    assert found["PATH"] == os.environ["PATH"]
    assert not [name for name, value in found.items() if value == "hidden"]


def test_a_program_shows_no_secret() -> None:
    assert "s3cret" not in repr(child_program("x", argv=("x", "--token", "s3cret"), env={"T": "s3cret"}))


# Starting


async def test_a_program_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Answered at once, logged once, and looked for again."""
    command = tmp_path / "server"
    async with children_of(scripted(argv=(str(command),))) as children:
        for _ in range(2):
            began = time.monotonic()
            refused = refusal(children)
            assert time.monotonic() - began < 0.5
            assert (refused.reason, refused.retry_after) == (Reason.NO_PROGRAM, None)
            assert str(command) in str(refused)
        command.write_text("#!/bin/sh\nexec cat\n")
        assert refusal(children).reason is Reason.NO_PROGRAM  # not executable
        command.chmod(0o700)
        children.start()
        assert children.count == 1
    assert [record.levelno for record in caplog.records if vars(record).get("action") == "upstream.no_program"] == [40]


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with children_of(scripted(cwd=tmp_path / "gone")) as children:
        refused = refusal(children)
        assert refused.reason is Reason.NO_PROGRAM
        assert str(tmp_path / "gone") in str(refused)


async def test_a_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("no program\n")
    (tmp_path / "notes").chmod(0o700)
    async with children_of(scripted(argv=(str(tmp_path / "notes"),))) as children:
        assert refusal(children).reason is Reason.NO_PROGRAM


async def test_arguments_never_meet_a_shell(tmp_path: Path) -> None:
    async with lane_to(scripted(f"name=$(touch {tmp_path}/x); `id` && *")) as lane:
        assert await lane.call({"say": "fine"}) == "fine"
    assert os.listdir(tmp_path) == []


async def test_a_crash_loop_is_slowed(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with children_of(scripted("exit=3", f"starts={starts}")) as children:
        answers: list[UpstreamUnavailable] = []

        async def keep_trying() -> None:
            for _ in range(20):
                with pytest.raises(UpstreamUnavailable) as caught:
                    await Lane(children).open(CLIENT)
                answers.append(caught.value)
                await asyncio.sleep(0.02)

        async with asyncio.timeout(60):
            await asyncio.gather(*(keep_trying() for _ in range(5)))
        assert {answer.reason for answer in answers} == {Reason.DIED, Reason.BACKING_OFF}
        assert all(answer.retry_after for answer in answers if answer.reason is Reason.BACKING_OFF)
        assert len(answers) == 100
        assert re.fullmatch(
            r"The server scripted ended soon after its start \d+ times in a row\. The last time, the server's process"
            r" ended \(exit status 3\)\. It is started again in \d+\.\d s\.",
            str(next(answer for answer in answers if answer.reason is Reason.BACKING_OFF)),
        )
    # The first five at once, then one after each pause.
    assert len(starts.read_text().splitlines()) <= 5 + 8


async def test_a_process_that_works_again_ends_the_pauses(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    starts.write_text("one\n" * 8)
    async with children_of(scripted("exit=1", "after=10", f"starts={starts}")) as children:
        first = Lane(children)
        await first.open(CLIENT)
        with pytest.raises(UpstreamUnavailable):
            await Lane(children).open(CLIENT)
        assert 0 < children.pause <= 0.1
        starts.write_text("")
        await until(lambda: not children.pause)
        await Lane(children).open(CLIENT)
        assert not children.pause
        await Lane(children).open(CLIENT)  # without a pause between


async def test_limits_of_processes() -> None:
    async with children_of(scripted(max_processes=2)) as children:
        first, second = Lane(children), Lane(children)
        await first.open(CLIENT)
        await second.open(CLIENT)
        refused = refusal(children)
        assert refused.reason is Reason.LIMIT
        assert "max_processes" in str(refused)
        await first.aclose(ended=True)
        await Lane(children).open(CLIENT)


async def test_a_process_that_died_makes_room_for_the_next() -> None:
    async with children_of(scripted("tree=600", max_processes=1, grace=0.3)) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        lane.begin("call", {"kill": True})
        await lane.heard.until(lambda: lane.heard.of("closed"))
        assert refusal(children).reason is Reason.BACKING_OFF  # and not LIMIT
        await asyncio.sleep(children.pause)
        await Lane(children).open(CLIENT)


async def test_spares_are_started_before_they_are_needed_and_replaced(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with children_of(scripted(f"starts={starts}", warm=1)) as children:
        children.warm_up()
        await until(lambda: starts.exists() and len(starts.read_text().split()) == 1)
        lane = Lane(children)
        await lane.open(CLIENT)
        assert await lane.call({"pid": True}) == starts.read_text().split()[0]
        await until(lambda: len(starts.read_text().split()) == 2)
        assert children.count == 2
        # One that dies is replaced as well.
        os.kill(int(starts.read_text().split()[1]), signal.SIGKILL)
        await until(lambda: len(starts.read_text().split()) == 3)
        second = Lane(children)
        await second.open(CLIENT)
        assert await second.call({"pid": True}) == starts.read_text().split()[2]


async def test_after_the_end_nothing_is_started() -> None:
    reaper = Reaper()
    children = Children(scripted(warm=2), reaper=reaper)
    children.warm_up()
    assert children.count == 2
    await children.aclose()
    await reaper.aclose()
    assert children.count == 0
    assert refusal(children).reason is Reason.LIMIT


# Ending


async def running(children: Children) -> Child:
    """A child that has answered its first request."""
    child, lines = children.start(), list[object]()
    child.read(lines.append, lambda: None)
    child.input.write(b'{"jsonrpc":"2.0","id":1,"method":"ping"}')
    await until(lambda: lines)
    return child


@pytest.mark.parametrize(
    ("settings", "at_least", "status"),
    [
        ((), 0.0, 0),
        (("eof=ignore",), 0.3, -signal.SIGTERM),
        (("eof=ignore", "term=ignore"), 0.6, -signal.SIGKILL),
    ],
)
async def test_a_child_is_ended_by_the_end_of_its_input_by_sigterm_or_by_sigkill(
    settings: tuple[str, ...], at_least: float, status: int
) -> None:
    async with children_of(scripted(*settings, grace=0.3)) as children:
        child = await running(children)
        began = time.monotonic()
        await child.end()
        assert time.monotonic() - began >= at_least
        assert child.status == status
        assert children.count == 0


async def test_a_launcher_is_ended_with_its_tree() -> None:
    """A shell that runs the server and waits for it, as npx does, with another process below it."""
    server = scripted("tree=600", "eof=ignore")
    argv = ("/bin/sh", "-c", '"$@"; exit 0', "sh", *server.settings.argv)
    async with lane_to(scripted(argv=argv, grace=0.2)) as lane:
        assert await lane.call({"say": "fine"}) == "fine"


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_a_child_that_dies_leaves_nothing_of_its_group(has_pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")  # as on macOS
    async with children_of(scripted("tree=600", grace=0.2)) as children:
        child = await running(children)
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: children.count == 0)
        assert child.how == "the server's process ended (SIGKILL)"


async def test_no_process_is_left_of_many_that_end_in_every_way() -> None:
    async with children_of(scripted("tree=600", grace=0.2)) as children:
        lanes = [Lane(children) for _ in range(12)]
        await asyncio.gather(*(lane.open(CLIENT) for lane in lanes))
        ends: list[dict[str, Any]] = [{"kill": True}, {"exit": 1}, {"freeze": True}, {"close": "stdout"}]
        for lane, step in zip(lanes, ends * 3, strict=True):
            lane.begin("call", step)
        closing = [asyncio.create_task(lane.aclose(ended=True)) for lane in lanes[::5]]
        await until(lambda: children.count < 9)
        await children.aclose()
        assert children.count == 0
        await asyncio.gather(*closing)


async def test_a_server_that_closes_its_output_is_ended() -> None:
    async with children_of(scripted()) as children:
        lane = Lane(children)
        await lane.open(CLIENT)
        lane.begin("call", {"close": "stdout"}, {"hang": True})
        lost = await lane.heard.end_of("call")
        assert (lost.ran, lost.why) == (True, "the server closed its output")
        await until(lambda: children.count == 0)


def test_ends_of_processes_in_words() -> None:
    assert [format_status(status) for status in (0, 3, -9, -250)] == [
        "exit status 0",
        "exit status 3",
        "SIGKILL",
        "signal 250",
    ]


# Errors


async def test_stderr_is_drained(caplog: pytest.LogCaptureFixture) -> None:
    """Ten MiB do not stop a call, and the log holds little of them."""
    caplog.set_level(logging.INFO, logger="perdure")
    async with lane_to(scripted()) as lane:
        assert await lane.call({"stderr": "x" * 1023, "times": 10 * 1024}, {"say": "through"}) == "through"
    lines = [record.message for record in caplog.records if vars(record)["action"] == "upstream.stderr"]
    assert lines[0].startswith("scripted: xxx")
    assert any("more lines on stderr were not logged" in line for line in lines)
    assert sum(map(len, lines)) < 10 * STDERR_BYTES


async def test_secrets_are_masked_in_all_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="perdure")
    settings = ("stderr=cannot use s3cret", "banner=hello s3cret", "exit=3")
    async with children_of(scripted(*settings, secrets=["s3cret"]), shows_errors=True) as children:
        with pytest.raises(UpstreamUnavailable) as caught:
            await Lane(children).open(CLIENT)
        with pytest.raises(UpstreamUnavailable) as again:
            await Lane(children).open(CLIENT)
    assert "ended (exit status 3). It wrote: cannot use ***." in str(caught.value)
    assert "ended (exit status 3). It wrote: cannot use ***. It is started again in" in str(again.value)
    assert "s3cret" not in str([vars(record) for record in caplog.records])
    assert {"upstream.stderr", "upstream.noise", "upstream.died"} <= {
        vars(record)["action"] for record in caplog.records
    }


async def test_the_last_lines_of_stderr_are_told_with_a_death(caplog: pytest.LogCaptureFixture) -> None:
    async with lane_to(scripted()) as lane:
        steps = [{"stderr": f"line {number}"} for number in range(30)]
        await lane.call(*steps, {"exit": 7})
    [died] = [vars(record) for record in caplog.records if vars(record).get("action") == "upstream.died"]
    assert died["stderr"].count("line") == 20
    assert "exit status 7" in died["message"]
    assert died["message"].endswith("line 29")


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
async def test_no_file_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for settings in ((), ("exit=1",), ("tree=60",)):
        async with children_of(scripted(*settings, grace=0.2)) as children:
            lane = Lane(children)
            try:
                await lane.open(CLIENT)
            except UpstreamUnavailable:
                continue
            await lane.call({"kill": True})
    assert len(os.listdir("/proc/self/fd")) == before
