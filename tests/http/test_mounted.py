"""Plain uvicorn runs the app, gets a SIGTERM, and the next process goes on where it stopped (promise 3)."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.clients.raw_http import Exchange, Peer, SessionPeer, text_of
from tests.support.processes.starting import Program, start

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STUBBORN_FOLDER", str(tmp_path))
    monkeypatch.setenv("MOUNTED_STORE", f"sqlite:{tmp_path}/log.db")
    return tmp_path


@asynccontextmanager
async def mounted(how: str) -> AsyncIterator[tuple[Program, Peer]]:
    """A process of plain uvicorn that answers. It is killed at the end of the block."""
    process = await start("tests.http.mounted_app", how, errors=None)
    assert process.stdout is not None
    try:
        peer = Peer(port=int(await process.stdout.readline()))
        assert await peer.health() == "ok"
        yield process, peer
    finally:
        process.kill()
        await process.wait()


async def running(session: SessionPeer, tool: str) -> Exchange:
    call = await session.begin_call(tool, name="bread")
    await call.until_messages(1)
    return call


@pytest.mark.parametrize("how", ["limited", "told"])
async def test_a_graceful_stop_leaves_a_call_that_may_run_again_to_the_next_process(folder: Path, how: str) -> None:
    async with mounted(how) as (process, peer):
        session = await peer.session()
        async with await running(session, "look_for") as call:
            process.send_signal(signal.SIGTERM)
            told = (await call.answer()).messages
            assert [message for message in told if "id" in message] == []
        await process.wait()
    (folder / "bread").touch()
    async with mounted(how) as (_, peer):
        next_life = SessionPeer(port=peer.port, headers=session.headers, id=session.id)
        async with await next_life.resume(call.position) as resumed:
            [*_, answer] = (await resumed.answer()).messages
    assert text_of(answer) == "bread is there"


async def test_a_graceful_stop_answers_a_call_that_may_not_run_again(folder: Path) -> None:
    async with mounted("told") as (process, peer), await running(await peer.session(), "until_there") as call:
        process.send_signal(signal.SIGTERM)
        assert (await call.answer()).messages[-1]["error"]["code"] == -31001
        await process.wait()
