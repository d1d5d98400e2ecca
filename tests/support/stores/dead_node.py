"""A node that exists in the store only: it accepts calls, as a serving process does, and dies when a test says so.

So a test decides exactly what a dead process leaves, and need not start a process.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context
from mcp_types import LoggingMessageNotification, LoggingMessageNotificationParams, ToolAnnotations

from perdure._core.ids import Fence, Kind, NodeId, Position, SessionId, StreamId, new_node_id, new_stream_id
from perdure._core.settling import NOTHING_KEPT, UpstreamCall
from perdure._core.states import CallState
from perdure.assembly import ServerProcess
from perdure.log.remote_readers import RemoteReaders
from perdure.store.interface import Store
from perdure.store.records import AskRecord, CallRecord, Event, StreamRecord
from perdure.store.steps import Append, OpenAsk, OpenStream, Step
from tests.support.servers.in_process import Site
from tests.support.servers.tool_server import ToolServer
from tests.support.stores.shared_store import SharedStore

Message = dict[str, Any]


class DeadNode:
    def __init__(self, store: Store, node: NodeId, fence: Fence) -> None:
        self.store = store
        self.node = node
        self.fence = fence

    @classmethod
    async def on(cls, path: Path) -> DeadNode:
        """A node of its own on a SQLite file."""
        store = SharedStore(path)
        await store.open()
        return await cls.joining(store)

    @classmethod
    async def joining(cls, store: Store) -> DeadNode:
        node = new_node_id(secrets.token_bytes)
        return cls(store, node, await store.join(node))

    async def die(self) -> None:
        """Die as a killed process does: its locks are free, and no other node was notified."""
        await self.store.aclose()

    async def take(
        self,
        session: str,
        *requests: Message,
        said: Sequence[Message] = (),
        asked: Sequence[str] = (),
        attempt: int = 1,
        state: CallState = CallState.RUNNING,
        upstream: UpstreamCall = NOTHING_KEPT,
        answered: bool = False,
    ) -> Left:
        """Accept the requests of one POST. `said`: the messages on their stream; `asked`: the asks that wait.
        `answered`: the last message was an early answer."""
        owner = await self.store.session(SessionId(session))
        assert owner is not None
        record = StreamRecord(
            id=new_stream_id(secrets.token_bytes),
            session=owner.id,
            kind=Kind.CALL,
            node=self.node,
            fence=self.fence,
            opened=owner.created,
        )
        calls = tuple(
            CallRecord(
                session=owner.id,
                incarnation=owner.incarnation,
                request_id=request["id"],
                stream=record.id,
                method=request["method"],
                request=json.dumps(request).encode(),
                principal=owner.owner,
                attempt=attempt,
                state=state,
                upstream=upstream.encode(),
            )
            for request in requests
        )
        asks = [
            AskRecord(
                session=owner.id,
                id=ask,
                stream=record.id,
                request=b'{"method":"roots/list"}',
                node=self.node,
                call=record.id,
                incarnation=owner.incarnation,
                request_id=requests[0]["id"],
            )
            for ask in asked
        ]
        payloads = [*said, *({"jsonrpc": "2.0", "id": ask, "method": "roots/list"} for ask in asked)]
        events = tuple(
            Event(number, owner.created, json.dumps(payload).encode()) for number, payload in enumerate(payloads, 1)
        )
        steps: list[Step] = [OpenStream(record=record, calls=calls)]
        if events:
            if answered:
                events = (*events[:-1], events[-1]._replace(final=True))
            last = events[-1].seq if answered else 0
            steps.append(Append(stream=record.id, fence=self.fence, events=events, answered=last))
        steps += [OpenAsk(record=ask) for ask in asks]
        assert not any(await self.store.commit(steps))
        return Left(record.id, last=len(events))


class Left:
    """A stream that a dead node has opened."""

    def __init__(self, stream: StreamId, *, last: int) -> None:
        self.stream = stream
        self.last = last

    def position(self, seq: int | None = None) -> str:
        """Return the event id that its reader saw last."""
        seq = self.last if seq is None else seq
        return str(Position(kind=Kind.CALL, stream=self.stream, generation=1, seq=seq))


def life_of(site: Site) -> ServerProcess:
    """The parts of a running application, for what no client can bring about."""
    life = site.app._process
    assert life is not None
    return life


def remote_readers_of(site: Site) -> RemoteReaders:
    return life_of(site).context.hub.registry


def progress_of_call(token: int | str, number: float) -> Message:
    params = {"progressToken": token, "progress": number}
    return {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}


def logged_by_call(line: str) -> Message:
    return {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": line}}


class Library(ToolServer):
    """A tool server with tools that declare that they may run again."""

    def __init__(self) -> None:
        super().__init__()
        read_only = ToolAnnotations(read_only_hint=True)
        self.server.add_tool(self.look_up, annotations=read_only)
        self.server.add_tool(self.who, annotations=read_only)
        self.server.add_tool(self.recite, annotations=read_only)
        idempotent = ToolAnnotations(read_only_hint=False, idempotent_hint=True)
        self.server.add_tool(self.put, annotations=idempotent)

    async def look_up(self, n: int, ctx: Context, gate: str = "") -> str:
        """Report progress 1 … n, wait at the gate, answer."""
        self.seen.append("looking up")
        for number in range(1, n + 1):
            await ctx.report_progress(number)
        if gate:
            await self.wait(gate)
        return f"looked up {n}"

    async def recite(self, lines: list[str], ctx: Context) -> str:
        """Send each line as a log message, answer."""
        for line in lines:
            params = LoggingMessageNotificationParams(level="info", data=line)
            await ctx.session.send_notification(LoggingMessageNotification(params=params), ctx.request_id)
        return "recited"

    async def put(self, key: str) -> str:
        self.seen.append(f"put {key}")
        return f"put {key}"

    async def who(self, ctx: Context) -> str:
        """The token that the call came with."""
        self.seen.append("who")
        return str((ctx.headers or {}).get("authorization"))
