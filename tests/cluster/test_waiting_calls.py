"""A call that waits for its principal, whose client comes back at one node and then at another (promises 2 to 4)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from perdure import Settings
from perdure._core.ids import SessionId
from perdure.cluster.settler import PrincipalCalls
from tests.support.clients.wire_client import Message, Web, Wire, gaps_of, progress_of, text_of
from tests.support.processes.cluster import Cluster, cluster
from tests.support.servers.in_process import until

pytestmark = pytest.mark.anyio

ANN = "ann-0123456789abcdef"


class Story:
    """Two processes with tokens on one file; a read-only tool runs at the first, which is killed and comes again."""

    def __init__(self, servers: Cluster, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self.servers = servers
        self.folder = folder
        self.seen: list[Message] = []
        self.position = ""
        self._stack = stack

    def web(self, number: int) -> Web:
        web = Web(self.servers.servers[number].url)
        self._stack.push_async_callback(web.aclose)
        return web

    async def begin(self, *, count: int) -> None:
        self.b, a = self.web(1), self.web(0)
        self.peer = await a.join(token=ANN)
        pauses = list(range(1, count))
        arguments = {"n": count, "gate": str(self.folder / "gate"), "pauses": pauses}
        wire = await self.peer.call("count", token="t", **arguments)
        self.seen += await wire.messages(1)
        self.position = wire.last_id
        await self.servers.servers[0].kill()
        await self.servers.start()
        self.a = self.web(-1)
        await until(self.is_waiting)

    def is_waiting(self) -> bool:
        return self.servers.rows("SELECT state FROM call WHERE method = 'tools/call'") == [("waiting",)]

    def open(self, number: int) -> None:
        (self.folder / f"gate.{number}").touch()

    async def resume(self, at: Web, messages: int) -> None:
        """Come back at a node, see so much, and go again."""
        wire = await self._get(at)
        self.seen += await wire.messages(messages)
        self.position = wire.last_id
        await wire.drop()

    async def rest(self, at: Web) -> None:
        """Read to the end; whoever is sent away comes again."""
        while not any("result" in message for message in self.seen):
            wire = await self._get(at)
            self.seen += await wire.rest()
            self.position = wire.last_id if wire.seen else self.position

    async def _get(self, at: Web) -> Wire:
        return await self.peer.through(at).get(self.position)

    def assert_whole(self, count: int) -> None:
        assert gaps_of(self.seen) == []
        assert progress_of(self.seen) == list(range(1, count + 1))
        assert text_of(self.seen[-1]) == f"counted to {count}"


@pytest.fixture
async def story(tmp_path: Path) -> AsyncIterator[Story]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ann:{ANN}\n")
    tokens.chmod(0o600)
    async with (
        cluster(tmp_path / "log.db", "--tokens", str(tokens), "--retry", "50ms", processes=2) as servers,
        contextlib.AsyncExitStack() as stack,
    ):
        yield Story(servers, tmp_path, stack)


@pytest.mark.parametrize("path", ["abab", *(pytest.param(path, marks=pytest.mark.long) for path in ("ba", "bab"))])
async def test_a_client_that_moves_while_its_call_runs_again_sees_all_of_it(story: Story, path: str) -> None:
    """Whichever node had the call wait, the others learn that they do not write it any more."""
    count = len(path) + 1
    await story.begin(count=count)
    story.open(1)
    for number, place in enumerate(path[:-1], 2):
        await story.resume(story.a if place == "a" else story.b, 1)
        story.open(number)
    await story.rest(story.a if path[-1] == "a" else story.b)
    story.assert_whole(count)


async def test_a_client_that_comes_to_the_other_node_when_the_call_is_over_gets_its_answer(story: Story) -> None:
    await story.begin(count=3)
    story.open(1)
    await story.resume(story.a, 1)
    story.open(2)
    await until(lambda: story.servers.rows("SELECT state FROM call WHERE method = 'tools/call'") == [("answered",)])
    await story.rest(story.b)
    story.assert_whole(3)


def test_a_session_that_is_loaded_while_its_call_begins_to_wait_sends_its_client_back() -> None:
    """The record was read before the call waited, and the session was not in memory yet when it was said so."""
    held: dict[SessionId, Any] = {}
    context: Any = SimpleNamespace(hub=Mock(monotonic=lambda: 0.0), settings=Settings())
    waiting = PrincipalCalls(context, Mock(held=held.get), Mock())
    waiting.expect(SessionId("s"))
    stream = Mock(is_over=False)
    session = Mock(waits=False, streams={"one": stream})
    session.link.calls.all_running.return_value = []
    held[SessionId("s")] = session
    waiting.send_back()
    assert session.waits
    stream.readers.reader.close_with_retry.assert_called_once()
