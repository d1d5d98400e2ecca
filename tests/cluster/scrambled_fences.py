"""A SQLite store whose fences have no order: a later claim has a smaller fence as often as a larger one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from perdure._core.ids import Fence, NodeId, SessionId, StreamId
from perdure.store import SqliteStore
from perdure.store.records import AnsweredPage, Followed, StreamRecord
from perdure.store.steps import Append, OpenStream, PutCall, PutToolStep, Refusals, Release, Step

BITS = 62


def scrambled(fence: Fence) -> Fence:
    """The bits in reverse: what decided the order decides it last. Scrambling again gives the fence back."""
    return Fence(int(f"{fence:0{BITS}b}"[::-1], 2))


def _step(step: Step) -> Step:
    if isinstance(step, Append | PutCall | PutToolStep | Release):
        return replace(step, fence=scrambled(step.fence))
    return replace(step, record=_record(step.record)) if isinstance(step, OpenStream) else step


def _record(record: StreamRecord) -> StreamRecord:
    return replace(record, fence=scrambled(record.fence))


class ScrambledFences(SqliteStore):
    """Shows every fence scrambled, and takes it so."""

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        return await super().commit([_step(step) for step in steps])

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        return super().commit_now([_step(step) for step in steps])

    async def join(self, node: NodeId) -> Fence:
        return scrambled(await super().join(node))

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        record = await super().claim(stream, node=node, held=scrambled(held), known=known)
        return record and _record(record)

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        read = await super().bury(node, heir=heir, beat=beat)
        return None if read is None else [_record(record) for record in read]

    async def streams(self, whose: SessionId | AnsweredPage, *, only_unread: bool = False) -> Sequence[StreamRecord]:
        return [_record(record) for record in await super().streams(whose, only_unread=only_unread)]

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        found = await super().follow(after, limit=limit)
        return {name: followed._replace(record=_record(followed.record)) for name, followed in found.items()}

    async def written_by(self, node: NodeId, *, forwarded: bool = False) -> Sequence[StreamRecord]:
        return [_record(record) for record in await super().written_by(node, forwarded=forwarded)]
