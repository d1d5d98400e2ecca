"""Several workers on one port: real processes, real signals.

Which worker a request reaches is the system's choice, so whatever needs one session stays on one connection or asks
no session at all.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sqlite3
import sys
import time
from asyncio.subprocess import STDOUT
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from perdure.errors import Misuse
from perdure.serve.listener import listen
from perdure.serve.worker_pool import PAUSES, TRIES, VARIABLE
from tests.serve.tiny_pool import REASON
from tests.support.clients.raw_http import VERSION, Exchange, Peer, SessionPeer, message
from tests.support.processes.forked_workers import is_template
from tests.support.processes.serving import ROOT, START_SECONDS, Line, Served, log_lines, serving
from tests.support.processes.starting import can_fork, start
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

STUBBORN = "tests.support.servers.stubborn_tools:server"
PROMPT_SECONDS = 8
#: A busy machine is not a failing store, whose refusals a test of refusals must not see.
PATIENT = ("--store-timeout", "20s")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STUBBORN_FOLDER", str(tmp_path))
    return tmp_path


@asynccontextmanager
async def started(
    folder: Path, *options: str, workers: int = 2, forks: bool = True
) -> AsyncIterator[tuple[Served, Peer]]:
    """A pool whose workers are forks, or each an interpreter of its own as in the product."""
    store = f"sqlite:{folder}/log.db"
    async with serving(STUBBORN, "--store", store, "--workers", str(workers), *options, forks=forks) as served:
        yield served, Peer(port=served.port)


async def pid_of(peer: Peer) -> int:
    """The process that takes the next connection."""
    return int((await peer.ask("GET", path="/pid")).body)


@asynccontextmanager
async def calling(peer: Peer, tool: str, **arguments: Any) -> AsyncIterator[Exchange]:
    """A call on one connection, and so on one worker, from the handshake on."""
    client = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "peer", "version": "1"}}
    async with await peer.begin("POST", message("initialize", client, id=0)) as talk:
        assert (await talk.answer()).status == 200
        known = talk.header("mcp-session-id")
        session = SessionPeer(port=peer.port, headers={"mcp-session-id": known}, id=known)
        await talk.again(session.request("POST", message("notifications/initialized")))
        assert (await talk.answer()).status == 202
        await talk.again(session.request("POST", session.call_body(tool, **arguments)))
        yield talk


def workers_of(served: Served) -> set[int]:
    listed = Path(f"/proc/{served.pid}/task/{served.pid}/children")
    if not listed.exists():  # psutil looks at all processes there are
        return {child.pid for child in psutil.Process(served.pid).children()}
    return {pid for pid in map(int, listed.read_text().split()) if not is_template(pid)}


async def answering(peer: Peer, count: int) -> set[int]:
    """The processes that take connections, once there are so many."""
    seen: set[int] = set()
    while len(seen) < count:
        seen.add(await pid_of(peer))
        await asyncio.sleep(0.005)  # a worker that starts needs the processor
    return seen


async def no_longer_accepts(peer: Peer, pid: int) -> None:
    """Wait until a worker has left the port to the others: it is missing among many that answered."""
    while pid in [await pid_of(peer) for _ in range(40)]:
        pass


def failed_starts(served: Served) -> list[str]:
    return [line for line in served.output if "a worker did not start" in line]


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def is_listening(port: int) -> bool:
    try:
        listen("127.0.0.1", port).close()
    except Misuse:
        return True
    return False


async def refused(*options: str) -> tuple[int | None, str]:
    """Status and words of a command that does not come to serve."""
    module = "tests.support.processes.forked_workers" if can_fork() else "perdure"
    process = await start(module, "serve", STUBBORN, "--port", "0", *options, cwd=ROOT, errors=STDOUT)
    said, _ = await asyncio.wait_for(process.communicate(), START_SECONDS)
    return process.returncode, said.decode()


# Serving


async def test_workers_are_interpreters_of_their_own_and_one_that_dies_is_started_again(folder: Path) -> None:
    """One line tells that all are ready, connections spread over them, programs that they start are no workers, and a
    tool that kills its process takes no other worker down."""
    async with started(folder, forks=False) as (served, peer):
        before = workers_of(served)
        assert await answering(peer, 2) == before
        assert served.pid not in before
        assert [line for line in served.output if "worker.slow" not in line] == [f"perdure: serving on {served.url}"]
        names = (await peer.ask("GET", path="/environment")).body.decode().split("\n")
        assert "STUBBORN_FOLDER" in names
        assert VARIABLE not in names
        async with calling(peer, "die") as call:
            await call.answer()
        await until(lambda: len(workers_of(served) & before) == 1 and len(workers_of(served)) == 2)
        [victim] = before - workers_of(served)
        assert await answering(peer, 2) == workers_of(served)
        assert await served.stop() == 0
        assert all(map(is_gone, before))
    sentence = f"worker {victim} ended with SIGKILL; another one takes its place"
    assert Line("WARNING", "worker.ended", sentence) in log_lines(served.output)


# Dying


async def test_pauses_grow_and_are_bounded() -> None:
    pauses = [PAUSES.after(deaths) for deaths in range(12)]
    assert pauses[:5] == [0, 0, 0.25, 0.5, 1]
    assert pauses == sorted(pauses)
    assert pauses[-1] == PAUSES.longest


async def test_a_store_that_fails_while_workers_are_killed_costs_those_workers_only(folder: Path) -> None:
    """It is waited for, also when no worker is left."""
    async with started(folder, "--store-timeout", "100ms") as (served, peer):
        before = workers_of(served)
        victim = await pid_of(peer)
        with closing(sqlite3.connect(folder / "log.db", isolation_level=None)) as lock:
            lock.execute("BEGIN IMMEDIATE")  # as a backup does, or a process that was stopped in a transaction
            os.kill(victim, signal.SIGKILL)
            await until(lambda: len(failed_starts(served)) > 1)
            [other] = before - {victim}
            assert await pid_of(peer) == other
            os.kill(other, signal.SIGKILL)
            await until(lambda: is_gone(other) and len(failed_starts(served)) > 3)
        assert await answering(peer, 2) == workers_of(served)
        assert await served.stop() == 0
    first = log_lines(failed_starts(served))[0]
    assert (first.level, first.action) == ("WARNING", "worker.failed")
    assert first.sentence.startswith("a worker did not start, the next try is in 0 s: ")
    assert "log.db" in first.sentence


# Failed starts, many of them: small workers that start at once


@asynccontextmanager
async def tiny_pool(folder: Path, *, workers: int = 2) -> AsyncIterator[Served]:
    process = await start("tests.serve.tiny_pool", str(folder), str(workers), cwd=ROOT, errors=STDOUT)
    served = Served(process=process, url="", port=0)

    async def read() -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            served.output.append(line.decode().rstrip())

    reading = asyncio.create_task(read())
    try:
        yield served
    finally:
        await served.end()
        await reading


async def test_a_store_that_fails_is_waited_for_however_often_if_no_worker_is_left(folder: Path) -> None:
    async with tiny_pool(folder) as served:
        await until(lambda: "ready" in served.output)
        (folder / "waits").touch()
        for victim in workers_of(served):
            os.kill(victim, signal.SIGKILL)
        # Each of two places has tried more often than it may where the reason does not pass by itself.
        await until(lambda: len(failed_starts(served)) > 2 * TRIES)
        assert served.process.returncode is None
        (folder / "waits").unlink()
        await until(lambda: len(workers_of(served)) == 2)
        assert await served.stop() == 0
    assert REASON in failed_starts(served)[0]


async def test_starts_may_fail_however_often_while_another_worker_serves(folder: Path) -> None:
    async with tiny_pool(folder) as served:
        await until(lambda: "ready" in served.output)
        (folder / "dies").touch()
        victim, healthy = workers_of(served)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(failed_starts(served)) > TRIES)
        assert healthy in workers_of(served)
        (folder / "dies").unlink()
        await until(lambda: len(workers_of(served)) == 2)
        assert healthy in workers_of(served)
        assert await served.stop() == 0


async def test_workers_that_never_start_again_are_given_up_once_no_worker_is_left(folder: Path) -> None:
    async with tiny_pool(folder) as served:
        await until(lambda: "ready" in served.output)
        before = workers_of(served)
        (folder / "dies").touch()
        for victim in before:
            os.kill(victim, signal.SIGKILL)
        assert await asyncio.wait_for(served.process.wait(), START_SECONDS) == 1
        assert all(map(is_gone, before))
    assert served.output[-1] == f"{TRIES} workers in a row did not start; the last one: it ended with SIGKILL"


# Starts that hang


async def hung(folder: Path) -> int:
    """A worker that hangs, once there is one."""
    await until(lambda: (folder / "hanging").exists() and (folder / "hanging").read_text() != "")
    return int((folder / "hanging").read_text())


async def test_a_worker_that_hangs_as_it_starts_is_ended_and_its_place_is_filled(folder: Path) -> None:
    (folder / "limit").write_text("5")
    async with tiny_pool(folder) as served:
        await until(lambda: "ready" in served.output)
        victim, healthy = workers_of(served)
        (folder / "hangs").touch()
        os.kill(victim, signal.SIGKILL)
        stuck = await hung(folder)
        (folder / "hangs").unlink()
        await until(lambda: is_gone(stuck) and len(workers_of(served)) == 2)
        assert healthy in workers_of(served)
        assert await served.stop() == 0
    told = "\n".join(served.output)
    assert f"worker {stuck} is still starting after 0.1 s; it is ended after 5 s" in told
    assert "a worker did not start, the next try is in 0 s: it was not ready after 5 s" in told


async def test_a_hangup_whose_workers_hang_keeps_the_old_ones_and_a_later_one_replaces_them(folder: Path) -> None:
    (folder / "limit").write_text("5")
    async with tiny_pool(folder) as served:

        def times_kept() -> int:
            return sum("were not replaced" in line for line in served.output)

        await until(lambda: "ready" in served.output)
        before = workers_of(served)
        (folder / "hangs").touch()
        served.send(signal.SIGHUP)
        await until(lambda: times_kept() == 1)
        assert before <= workers_of(served)
        (folder / "hangs").unlink()
        while workers_of(served) & before:  # on a busy machine a worker may not start in time
            kept = times_kept()
            served.send(signal.SIGHUP)
            await until(lambda kept=kept: not workers_of(served) & before or times_kept() > kept)  # type: ignore[misc]
        await until(lambda: len(workers_of(served)) == 2)
        assert await served.stop() == 0


async def test_a_worker_that_dies_while_its_replacement_hangs_is_started_again(folder: Path) -> None:
    async with tiny_pool(folder, workers=1) as served:
        await until(lambda: "ready" in served.output)
        [victim] = workers_of(served)
        (folder / "hangs").touch()
        served.send(signal.SIGHUP)
        stuck = await hung(folder)
        (folder / "hangs").unlink()
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(workers_of(served) - {victim, stuck}) == 1)
        assert stuck in workers_of(served)
        assert await served.stop() == 0  # what hangs keeps no server from its end
    assert is_gone(stuck)


async def test_a_worker_that_dies_while_the_one_that_it_replaced_finishes_is_started_again(folder: Path) -> None:
    (folder / "stays").touch()
    async with tiny_pool(folder, workers=1) as served:
        await until(lambda: "ready" in served.output)
        [old] = workers_of(served)
        served.send(signal.SIGHUP)
        await until(lambda: (folder / "told").exists())
        [fresh] = workers_of(served) - {old}
        os.kill(fresh, signal.SIGKILL)
        await until(lambda: len(workers_of(served) - {old, fresh}) == 1)
        assert old in workers_of(served)


async def test_a_worker_whose_start_ends_after_the_stop_has_begun_is_told_to_end(folder: Path) -> None:
    (folder / "late").touch()
    async with tiny_pool(folder) as served:
        assert await asyncio.wait_for(served.process.wait(), START_SECONDS) == 0


# When the parent dies


async def test_workers_free_the_port_and_end_when_their_parent_is_killed(folder: Path) -> None:
    async with started(folder) as (served, peer), calling(peer, "until_there", name="bread") as call:
        await call.until_messages(1)
        workers = workers_of(served)
        await served.kill()
        await until(lambda: any(map(is_gone, workers)) and not is_listening(served.port))
        assert not all(map(is_gone, workers))
        (folder / "bread").touch()
        assert (await call.answer()).messages[-1]["result"]["content"][0]["text"] == "bread is there"
        await call.aclose()  # an idle connection would be waited for
        await until(lambda: all(map(is_gone, workers)))


# Being replaced


async def test_hangup_replaces_all_workers_and_nobody_is_refused(folder: Path) -> None:
    """Nor is anything amiss: a worker that leaves has not died, whatever it leaves to the others."""
    async with started(folder, "--log-level", "info", "--drain-timeout", "0") as (served, peer):
        before = workers_of(served)
        sessions = [await peer.session() for _ in range(4)]  # each at home on one of the workers
        calls = [await session.begin_call("look_for", name="bread") for session in sessions]
        served.send(signal.SIGHUP)
        for call in calls:
            await call.answer()
            await call.aclose()
        while workers_of(served) & before:
            answer = await peer.ask("GET", path="/healthz")
            assert (answer.status, answer.json) == (200, {"status": "ok"})
        assert await answering(peer, 2) == workers_of(served)
        expected = {"node.departed", "node.settled", "call.rerun", "workers.replaced"}
        await until(lambda: {line.action for line in log_lines(served.output)} >= expected)
        assert await served.stop() == 0
    told = log_lines(served.output)
    [line] = [line for line in told if line.level != "INFO"]
    assert re.fullmatch(r"2 workers were replaced, after .* s; code and tokens were read again", line.sentence)


async def test_a_call_finishes_on_the_worker_that_was_replaced(folder: Path) -> None:
    async with started(folder) as (served, peer):
        before = workers_of(served)
        async with calling(peer, "until_there", name="bread") as call:
            await call.until_messages(1)
            served.send(signal.SIGHUP)
            await until(lambda: len(workers_of(served) & before) == 1 and len(workers_of(served)) == 3)
            (folder / "bread").touch()
            assert (await call.answer()).messages[-1]["result"]["content"][0]["text"] == "bread is there"
        await until(lambda: not workers_of(served) & before)
        assert await served.stop() == 0


async def test_a_call_that_comes_over_an_idle_connection_of_a_worker_that_leaves_is_served(folder: Path) -> None:
    """Its client may be sending in the very moment in which it would be closed."""
    (folder / "bread").touch()
    async with started(folder, *PATIENT) as (served, peer):
        before = workers_of(served)
        async with calling(peer, "until_there", name="bread") as call:
            await call.answer()
            known = call.header("mcp-session-id")
            session = SessionPeer(port=peer.port, headers={"mcp-session-id": known}, id=known, calls=1)
            served.send(signal.SIGHUP)
            for old in before:
                await no_longer_accepts(peer, old)
            last = False
            while not last:
                await call.again(session.request("POST", session.call_body("until_there", name="bread")))
                answer = await call.answer()
                assert answer.messages[-1]["result"]["content"][0]["text"] == "bread is there"
                last = answer.header("connection") == "close"
        await until(lambda: not workers_of(served) & before)


async def test_no_request_over_kept_connections_is_reset_or_refused_while_workers_are_replaced(folder: Path) -> None:
    """Each client reuses its connection for as long as the answers allow it, as pools do."""
    (folder / "bread").touch()
    over = asyncio.Event()
    seen: Counter[str] = Counter()

    async def client(peer: Peer) -> None:
        session = await peer.session()
        while not over.is_set():
            async with await session.begin_call("until_there", name="bread") as talk:
                while True:
                    answer = await talk.answer()
                    ended = answer.messages[-1].get("result") if answer.status == 200 else None
                    seen["answered" if ended else f"status {answer.status}"] += 1
                    if not ended or over.is_set() or answer.header("connection") == "close":
                        break
                    await talk.again(session.request("POST", session.call_body("until_there", name="bread")))

    async with started(folder, *PATIENT) as (served, peer), asyncio.TaskGroup() as clients:
        for _ in range(8):
            clients.create_task(client(peer))
        for _ in range(2):
            before = workers_of(served)
            served.send(signal.SIGHUP)
            await until(lambda before=before: not workers_of(served) & before)  # type: ignore[misc]
        over.set()
    assert seen.keys() == {"answered"}, seen
    assert seen["answered"] > 100


async def test_workers_that_cannot_be_replaced_stay(folder: Path) -> None:
    async with started(folder) as (served, peer):
        before = workers_of(served)
        (folder / "broken").touch()
        served.send(signal.SIGHUP)
        await until(lambda: any("were not replaced" in line for line in served.output))
        assert await answering(peer, 2) == before
        assert await served.stop() == 0
    [line] = [line for line in served.output if "were not replaced" in line]
    assert "tests.support.servers.stubborn_tools cannot be imported: RuntimeError: broken on purpose" in line


# Ending


async def test_a_second_signal_reaches_workers_that_are_stuck(folder: Path) -> None:
    async with started(folder) as (served, peer), calling(peer, "until_there", name="bread") as call:
        await call.until_messages(1)
        served.send(signal.SIGTERM)
        await until(lambda: len(workers_of(served)) == 1)  # the one that has nothing to do
        told = time.monotonic()
        served.send(signal.SIGINT)
        assert (await call.answer()).messages[-1]["error"]["code"] == -31001
        assert await served.wait() == 1
        assert time.monotonic() - told < PROMPT_SECONDS


async def test_a_signal_that_goes_to_every_process_is_one_signal(folder: Path) -> None:
    """systemd sends it to the whole control group. SIGHUP concerns the parent alone, and a worker that heard of a stop
    twice would not drain."""
    async with started(folder) as (served, peer), calling(peer, "until_there", name="bread") as call:
        await call.until_messages(1)
        before = workers_of(served)
        for pid in before:
            os.kill(pid, signal.SIGHUP)
        assert await answering(peer, 2) == before
        for pid in before:
            os.kill(pid, signal.SIGTERM)
        served.send(signal.SIGTERM)
        await until(lambda: len(workers_of(served)) == 1)
        (folder / "bread").touch()
        assert (await call.answer()).messages[-1]["result"]["content"][0]["text"] == "bread is there"
        assert await served.wait() == 0


async def test_a_worker_whose_event_loop_is_blocked_is_ended_by_the_second_signal(folder: Path) -> None:
    async with started(folder) as (served, peer), calling(peer, "block") as call:
        await call.head()
        served.send(signal.SIGTERM)
        await until(lambda: len(workers_of(served)) == 1)
        told = time.monotonic()
        served.send(signal.SIGTERM)
        assert await served.wait() == 1
        assert time.monotonic() - told < PROMPT_SECONDS


@pytest.mark.long
async def test_control_c_is_heard_once_by_each_worker(folder: Path) -> None:
    """A terminal sends it to the whole group; a worker that heard it twice would not drain."""
    setsid = (sys.executable, "-c", "import os, sys; os.setpgid(0, 0); os.execv(sys.argv[1], sys.argv[1:])")
    argv = (*setsid, sys.executable, "-m", "perdure", "serve")
    options = ("--store", f"sqlite:{folder}/log.db", "--workers", "2")
    async with serving(STUBBORN, *options, argv=argv) as served:
        peer = Peer(port=served.port)
        async with calling(peer, "until_there", name="bread") as call:
            await call.until_messages(1)
            os.killpg(served.pid, signal.SIGINT)
            await until(lambda: len(workers_of(served)) == 1)
            (folder / "bread").touch()
            assert (await call.answer()).messages[-1]["result"]["content"][0]["text"] == "bread is there"
        assert await served.wait() == 0


# What cannot be served


async def test_what_cannot_be_served_is_told_once(folder: Path) -> None:
    status, said = await refused("--workers", "2", "--store", "memory:")
    assert status == 2
    assert said == (
        "perdure: --workers 2 needs a store that processes share, and memory: is not one; use sqlite:PATH;"
        " see https://perdure.example/docs/errors.html#several-processes-need-a-shared-store\n"
    )
    (folder / "letter.db").write_text("Dear reader, this is a letter and no database. " * 100)
    status, said = await refused("--workers", "4", "--store", f"sqlite:{folder}/letter.db")
    assert status == 2
    assert "letter.db" in said
    assert said.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        status, said = await refused("--workers", "2", "--port", port)
    assert status == 2
    assert said.startswith(f"perdure: port {port} on 127.0.0.1 is in use")


async def test_a_target_that_is_broken_is_told_once(folder: Path) -> None:
    (folder / "broken").touch()
    status, said = await refused("--workers", "4", "--store", f"sqlite:{folder}/log.db")
    assert status == 2
    *frames, line = said.splitlines()
    assert line.startswith(
        "perdure: tests.support.servers.stubborn_tools cannot be imported: RuntimeError: broken on purpose"
    )
    assert (frames[0], frames[-1]) == ("Traceback (most recent call last):", "RuntimeError: broken on purpose")
    assert said.count("broken on purpose") == 3  # the line of the source, the error, and the line that tells it


async def test_workers_that_never_start_are_given_up(folder: Path) -> None:
    (folder / "dies").touch()
    status, said = await refused("--workers", "2", "--store", f"sqlite:{folder}/log.db", "--log-level", "error")
    assert status == 1
    sentence = "5 workers in a row did not start; the last one: it ended with SIGKILL"
    assert log_lines(said.splitlines()) == [Line("ERROR", "workers.gave_up", sentence)]
