"""Histories of cuts, resumes, standalone GETs and reattaches through two nodes, while a call counts.

The invariant: each number is in the log exactly once, on one stream, in order; and a client that follows the rules (it
resumes what it has a position of, and begins again where it has none) sees each exactly once, and the answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import ClassVar

import pytest

from perdure._core.ids import Kind, NodeId, SessionId, StreamId
from perdure.store.interface import HintListener
from tests.cluster.conftest import Pair, Start
from tests.support.clients.wire_client import Message, Peer, Wire, progress_of, text_of
from tests.support.stores.shared_store import SharedStore

pytestmark = pytest.mark.anyio

NUMBERS = 40
DEEDS = ("cut the call", "cut the standalone", "resume the call", "read the standalone", "reattach", "go on", "go on")


class Client:
    """A client that follows the rules; it reads all the time, and notes what it saw on each stream."""

    def __init__(self, pair: Pair, peer: Peer, dice: random.Random) -> None:
        self.pair = pair
        self.peer = peer
        self.dice = dice
        self.seen: list[Message] = []
        self.history: list[str] = []
        self._wires: dict[Kind, Wire] = {}
        self._reading: dict[Kind, asyncio.Task[None]] = {}
        self._positions: dict[Kind, str] = {}

    def somewhere(self) -> Peer:
        return self.peer.through(self.dice.choice((self.pair.a, self.pair.b)).site)

    async def follow(self, kind: Kind, wire: Wire) -> None:
        await self.cut(kind)
        self._wires[kind] = wire
        self._reading[kind] = asyncio.create_task(self._read(kind, wire))

    async def _read(self, kind: Kind, wire: Wire) -> None:
        async for message in wire:
            self.seen.append(message)
            self._positions[kind] = wire.last_id

    async def cut(self, kind: Kind) -> None:
        if (task := self._reading.pop(kind, None)) is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            wire = self._wires.pop(kind)
            if wire.seen:
                self._positions[kind] = wire.last_id
            await wire.drop()

    async def resume(self, kind: Kind) -> None:
        await self.cut(kind)
        response = await self.somewhere().begin_get(self._positions.get(kind))
        if response.status_code == 405:
            return  # nothing more will come
        await self.follow(kind, Wire(response))

    async def do(self, deed: str) -> None:
        self.history.append(deed)
        match deed:
            case "cut the call":
                await self.cut(Kind.CALL)
            case "cut the standalone":
                await self.cut(Kind.STANDALONE)
            case "resume the call":
                await self.resume(Kind.CALL)
            case "read the standalone":
                await self.resume(Kind.STANDALONE)
            case "reattach":
                self.peer = await self.peer.reattach(self.somewhere().site)
                for kind in Kind:
                    await self.cut(kind)

    @property
    def answer(self) -> Message | None:
        return next((message for message in self.seen if "result" in message), None)


class Hearsay(SharedStore):
    """Hints come late, twice, not at all, in another order, or long after."""

    dice = random.Random()
    listeners: ClassVar[dict[NodeId, HintListener]] = {}
    said: ClassVar[list[tuple[NodeId, Sequence[StreamId]]]] = []
    heard = 0

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        self.listeners[node] = listener
        stop = super().subscribe(node, listener)

        def stop_all() -> None:
            self.listeners.pop(node, None)
            stop()

        return stop_all

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        self.said.append((node, streams))
        for _ in range(self.dice.choice((0, 1, 1, 1, 1, 2))):
            self._tell(*self.said[-1])
        if self.dice.random() < 0.3:
            self._tell(*self.dice.choice(self.said[-5:]))

    def _tell(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        def tell() -> None:
            if (listener := self.listeners.get(node)) is not None:
                Hearsay.heard += 1
                listener(streams)

        asyncio.get_running_loop().call_later(self.dice.choice((0, 0, 0.001, 0.01)), tell)


@pytest.mark.parametrize("seed", [0, 5, 23])
async def test_every_number_arrives_once_however_hints_come(tmp_path: Path, seed: int) -> None:
    Hearsay.dice, Hearsay.listeners, Hearsay.said, Hearsay.heard = random.Random(seed), {}, [], 0
    async with AsyncExitStack() as stack:
        await tell_a_history(Start(stack, tmp_path, Hearsay), seed)
    assert Hearsay.heard


@pytest.mark.parametrize("seed", range(12))
async def test_every_number_arrives_once(start: Start, seed: int) -> None:
    """Promises 1 to 3, R5, R10"""
    await tell_a_history(start, seed)


async def tell_a_history(start: Start, seed: int) -> None:
    dice = random.Random(seed)
    pair = await start()
    at_a, _ = await pair.join()
    client = Client(pair, at_a, dice)
    call = await at_a.call("count", n=NUMBERS, gate="g", pauses=list(range(1, NUMBERS)), token=1)
    await call.event()
    await client.follow(Kind.CALL, call)
    for number in range(1, NUMBERS):
        await client.do(dice.choice(DEEDS))
        pair.a.shop.open(f"g/{number}")
        await asyncio.sleep(dice.choice((0, 0, 0.005)))  # sooner or later than what was just done
    while client.answer is None or len(progress_of(client.seen)) < NUMBERS:
        for kind in Kind:
            await client.resume(kind)
        await asyncio.sleep(0.01)
    for kind in Kind:
        await client.cut(kind)
    assert text_of(client.answer) == f"counted to {NUMBERS}"
    logged = await _logged(pair, at_a)
    assert sorted(progress_of(client.seen)) == list(range(1, NUMBERS + 1)), client.history
    assert sorted(number for numbers in logged for number in numbers) == list(range(1, NUMBERS + 1)), client.history
    assert [numbers for numbers in logged if numbers != sorted(numbers)] == []


async def _logged(pair: Pair, peer: Peer) -> list[list[int]]:
    """The numbers on each stream of the session, as the store has them."""
    store = pair.b.site.store
    streams = await store.streams(SessionId(peer.session))
    events = [await store.read(stream.id, after=0, limit=1000) for stream in streams]
    return [progress_of(json.loads(event.payload) for event in some) for some in events]
