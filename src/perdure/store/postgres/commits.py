"""Commits steps, each commit in one statement: the function `commit_1` gets them as a few arrays."""

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final

import asyncpg

from perdure._core import retention, sticky
from perdure._core.ids import NodeId, SessionId
from perdure._core.states import UNENDED
from perdure.store import rows, steps
from perdure.store.postgres.connections import AGAIN, Connection, Connections, Connector, is_unknown
from perdure.store.postgres.nodes import Holding
from perdure.store.records import MAX_FORWARDED, MAX_FORWARDED_BYTES, MAX_MAIL
from perdure.store.steps import Refusals, Step, StepRejected, Why, refusal
from perdure.store.time_limit import TimeLimit

TRIES = 20
"""Times that a commit is tried which other commits undo: each time another one has got through."""

MAX_SEQ: Final = 2**31 - 1
"""The highest sequence number that a row can hold."""

LONGEST_KEY = 200
"""Bytes of a request's id that are compared as they are. PostgreSQL indexes 2,700 bytes; of a longer id the hash is."""


def stored(text: str) -> bytes:
    """Return a text of a peer as the database holds it."""
    return text.encode("utf-8", "surrogatepass")


def id_key(request_id: int | str) -> bytes:
    """Return the form in which ids of requests are compared."""
    key = rows.id_key(request_id)
    key = key if isinstance(key, bytes) else stored(key)
    # No text begins with this byte.
    return key if len(key) <= LONGEST_KEY else b"\xff" + hashlib.sha256(key).digest()


def caller_key(owner: str, address: str) -> bytes:
    """Return the form in which callers are compared: their names may be long."""
    return hashlib.sha256(stored(owner) + b"\0" + stored(address)).digest()[:16]


# --- Order ----------------------------------------------------------------------------------------------------------


_LOCKS: Mapping[type[Step], tuple[int, Callable[[Any], str]]] = {
    steps.PutSession: (0, attrgetter("record.id")),
    **dict.fromkeys((steps.OpenStream, steps.OpenAsk), (1, attrgetter("record.session"))),
    **dict.fromkeys((steps.ChangeSession, steps.CloseAsk), (1, attrgetter("session"))),
    **dict.fromkeys((steps.Append, steps.Trim, steps.PutCall, steps.Release), (2, attrgetter("stream"))),
    **dict.fromkeys((steps.PutToolStep, steps.Reached, steps.LeaveReader, steps.Forward), (2, attrgetter("stream"))),
    steps.PutReader: (2, attrgetter("record.stream")),
    **dict.fromkeys((steps.SendMail, steps.MailReceived), (3, attrgetter("node"))),
}
"""The table whose row a step locks first, as a number, and the key of the row. A step that is not here locks many."""


def lock_order(group: Sequence[Step]) -> list[int]:
    """Return the places of the steps in an order in which two commits seldom wait for each other.

    Rows are locked in the order of the steps, until the commit. Steps about different sessions or streams may change
    places, so they are sorted between those that may not. A stream is opened, and a session put, after all steps
    that came before it, because an id may have become free.
    """
    if len(group) < 2:
        return list(range(len(group)))
    order: list[int] = []
    run: list[tuple[int, str, int]] = []

    def end_run() -> None:
        order.extend(place for _, _, place in sorted(run))
        run.clear()

    highest = 0
    for place, step in enumerate(group):
        rank, name_of = _LOCKS.get(type(step), (-1, str))
        if rank < 0 or (isinstance(step, steps.OpenStream | steps.PutSession) and highest > rank):
            end_run()
            highest = 0
        if rank < 0:
            order.append(place)
        else:
            run.append((rank, name_of(step), place))
            highest = max(highest, rank)
    end_run()
    return order


# --- Arguments ------------------------------------------------------------------------------------------------------


class CommitArguments:
    """The arguments of one commit. `schema_1.sql` explains the letters, and the values of each in the pools."""

    def __init__(self, sticky_requests: Mapping[SessionId, tuple[bytes, ...]]) -> None:
        self._sticky = dict(sticky_requests)
        self._kinds: list[str] = []
        self._begins: list[int] = []
        self._texts: list[str] = []
        self._numbers: list[int] = []
        self._times: list[float] = []
        self._blobs: list[bytes] = []
        self._appends = 0
        self._events: tuple[list[int], list[int], list[float], list[bool], list[bytes]] = ([], [], [], [], [])
        self._mail: tuple[list[int], list[str], list[bytes]] = ([], [], [])

    def values(self, writer: int, members: Sequence[NodeId]) -> tuple[Any, ...]:
        pools = ("".join(self._kinds), self._begins, self._texts, self._numbers, self._times, self._blobs)
        return (writer, members, *pools, *self._events, *self._mail, MAX_MAIL)

    def _put(
        self,
        kind: str,
        texts: Iterable[str] = (),
        numbers: Iterable[int] = (),
        times: Iterable[float] = (),
        blobs: Iterable[bytes] = (),
    ) -> None:
        self._kinds.append(kind)
        self._begins += [len(pool) + 1 for pool in (self._texts, self._numbers, self._times, self._blobs)]
        self._texts.extend(texts)
        self._numbers.extend(numbers)
        self._times.extend(times)
        self._blobs.extend(blobs)

    def add(self, step: Step) -> None:
        match step:
            case steps.Append():
                self._append(step)
            case steps.OpenStream():
                self._open_stream(step)
            case steps.PutCall():
                texts = (step.stream, rows.request_id_text(step.request_id), step.state.value)
                attempt = (step.incarnation, step.attempt, int(step.progress is not None))
                flags = (*attempt, int(step.upstream is not None))
                self._put("p", texts, (step.fence, *flags), (step.progress or 0.0,), (step.upstream or b"",))
            case steps.PutToolStep(record=done):
                names = (done.stream, rows.request_id_text(done.request_id), done.state.value, done.kind.value)
                place = (step.fence, done.incarnation, done.attempt, done.number)
                how = (int(done.again), int(done.own), int(done.ended is not None), step.after, int(step.after_ended))
                times = (done.began, done.ended or 0.0)
                self._put("S", names, (*place, *how), times, (stored(done.name), done.value))
            case steps.Release():
                self._put("r", (step.stream,), (step.fence,))
            case steps.PutSession():
                self._put_session(step)
            case steps.ChangeSession():
                self._change_session(step)
            case steps.EndSession():
                keeps = retention.keeps_params(step.reason, retention.MAX_ENDED_PARAMS)
                limits = (
                    retention.MAX_ENDED_PARAMS if keeps else -1,
                    retention.MAX_ENDED_OF_CALLER,
                    retention.MAX_ENDED,
                )
                times = (step.time, step.unused_since or 0.0)
                self._put("e", (step.session, step.reason), (int(step.unused_since is not None), *limits), times)
            case steps.Trim():
                self._put("t", (step.stream,), (step.through,))
            case steps.DropStream():
                self._put("d", (step.stream,))
            case steps.OpenAsk(record=ask):
                asks = (ask.session, ask.id, ask.stream, ask.node, ask.call, rows.request_id_text(ask.request_id))
                self._put("q", asks, (ask.incarnation,), blobs=(ask.request,))
            case steps.CloseAsk():
                self._put("Q", (step.session, step.id))
            case steps.PutReader(record=reader):
                texts = (reader.stream, reader.reader, reader.node)
                self._put("h", texts, (reader.seq, int(step.attaches)))
            case steps.LeaveReader():
                self._put("l", (step.stream, step.reader))
            case steps.Reached():
                self._put("R", (step.stream,), (step.generation, step.through, int(step.unread)))
            case steps.Forward():
                numbers = (step.first, len(step.payloads), MAX_FORWARDED, MAX_FORWARDED_BYTES)
                self._put("f", (step.stream, step.node, step.sender), numbers, blobs=step.payloads)
            case steps.SendMail():
                places, nodes, messages = self._mail
                places.append(len(self._kinds))
                nodes.append(step.node)
                messages.append(step.message)
                self._put("-")
            case steps.MailReceived():
                self._put("T", (step.node,), (step.through,))
            case _:
                raise TypeError(f"{type(step).__name__} is not a step of a commit")

    def _append(self, step: steps.Append) -> None:
        events = step.events
        if events and not step.lost:
            # If the events have a hole, those after it decide: they follow the stream's end, or the step is refused.
            tail = len(events)
            while tail > 1 and events[tail - 2].seq == events[tail - 1].seq - 1:
                tail -= 1
            events = events[tail - 1 :] if tail > 1 else events
        first, last = (events[0].seq, events[-1].seq) if events else (0, 0)
        numbers = (step.fence, first, last, int(step.lost), int(step.seal), step.taken)
        self._put("a", (step.stream,), (*numbers, len(step.ends), step.answered))
        for end in step.ends:
            self._texts += (rows.request_id_text(end.request_id), end.state.value)
            self._numbers += (end.incarnation, int(end.stepped))
        self._appends += 1
        of, seqs, times, finals, payloads = self._events
        for event in events:
            of.append(self._appends)
            seqs.append(event.seq)
            times.append(event.time)
            finals.append(event.final)
            payloads.append(event.payload)

    def _open_stream(self, step: steps.OpenStream) -> None:
        record = step.record
        listed = not any(call.state in UNENDED for call in step.calls)
        most = -1 if step.most_calls is None else step.most_calls
        numbers = (record.fence, record.generation, record.last)
        seen = -1 if step.seen is None else step.seen
        flags = (int(record.sealed), int(listed), most, len(step.calls), seen, int(step.unique), record.answered)
        texts = (record.id, record.session, record.kind.value, record.node)
        self._put("o", texts, (*numbers, *flags), (record.opened,))
        for call in step.calls:
            self._texts += (rows.request_id_text(call.request_id), call.state.value)
            self._numbers += (call.incarnation, call.attempt, int(call.progress is not None))
            self._times.append(call.progress or 0.0)
            said = (stored(call.method), call.request, stored(call.principal))
            self._blobs += (id_key(call.request_id), *said, call.digest, stored(call.name), call.upstream)

    def _change_session(self, step: steps.ChangeSession) -> None:
        initialized, is_task = (-1 if said is None else int(said) for said in (step.initialized, step.is_task))
        flags = (int(step.version is not None), int(step.result is not None), initialized)
        seen = after = self._sticky.get(step.session, ())  # none, if the session does not exist or has ended
        if step.stick is not None:
            after = self._sticky[step.session] = sticky.after(seen, step.stick)
        counts = (int(step.stick is not None), len(seen), len(after), is_task, int(step.upstream is not None))
        texts = (step.session, "" if step.state is None else step.state.value, step.version or "")
        active = float("-inf") if step.active is None else step.active
        self._put("c", texts, (*flags, *counts), (active,), (step.result or b"", step.upstream or b"", *seen, *after))

    def _put_session(self, step: steps.PutSession) -> None:
        record, limits = step.record, step.limits
        self._sticky.setdefault(record.id, record.sticky)
        most: tuple[int, ...] = (0, 0, 0, 0)
        if limits is not None:
            has_caller = int(bool(record.owner or record.address))
            most = (1, has_caller, limits.caller, -1 if limits.total is None else limits.total)
        texts = (record.id, record.state.value, record.version, record.standalone, record.ended, record.kind.value)
        numbers = (int(record.initialized), record.incarnation, *most)
        caller = (stored(record.owner), stored(record.address), caller_key(record.owner, record.address))
        self._put(
            "s",
            texts,
            (*numbers, len(record.sticky), record.revision, int(record.is_task)),
            (record.created, record.active),
            (*caller, record.client_params, record.result, record.digest, record.upstream, *record.sticky),
        )


# --- Commits --------------------------------------------------------------------------------------------------------


class Committer:
    """Commits in the order in which commits are asked for, on a connection of its own."""

    def __init__(self, connector: Connector, limit: TimeLimit, *, queries: Mapping[str, str], holding: Holding) -> None:
        self.connections = Connections(connector, limit, size=1, prepare=self._prepare)
        self._connector = connector
        self._queries = queries
        self._holding = holding
        self._call: Callable[..., Awaitable[Any]]
        """Calls the function on the connection."""
        self.name = secrets.randbits(63)
        """Differs from all other writers. A commit waits on the server for an earlier one of the same name that was
        given up and still runs, so that commits happen in their order. The burial of a node of this process waits,
        too."""

    async def _prepare(self, connection: Connection) -> None:
        """Prepare the statement of every commit, so that the driver need not look for it each time. A pooler keeps no
        statement."""
        query = self._queries["commit"]
        is_pooled = self._connector.is_pooled
        self._call = partial(connection.fetchval, query) if is_pooled else (await connection.prepare(query)).fetchval

    async def commit(self, group: Sequence[Step]) -> Refusals:
        return await self.connections.run("written", lambda connection: self._commit(connection, group))

    async def _commit(self, connection: Connection, group: Sequence[Step]) -> Refusals:
        order = lock_order(group)
        sticks = list({step.session for step in group if type(step) is steps.ChangeSession and step.stick is not None})
        for attempt in range(1, TRIES + 1):
            members = self._holding.members()
            # `_core.sticky` decides what a sticky request replaces. The server takes the result if the requests are
            # still those that were read.
            found = await connection.fetch(self._queries["sticky_of_sessions"], sticks) if sticks else []
            arguments = CommitArguments({session: tuple(requests) for session, requests in found})
            for place in order:
                arguments.add(group[place])
            try:
                refused = await self._call(*arguments.values(self.name, members))
                break
            except asyncpg.PostgresError as error:
                self._holding.refused(error)
                if attempt == TRIES or not (isinstance(error, AGAIN) or is_unknown(error)):
                    raise
                if is_unknown(error):
                    await self._holding.join_again()
        return _refusals(group, order, refused)


def _refusals(group: Sequence[Step], order: Sequence[int], refused: Sequence[str]) -> Refusals:
    """What the server refused of a commit, by the places of its steps. (Tests end a process where this begins.)"""
    refusals: list[StepRejected | None] = [None] * len(group)
    for start in range(0, len(refused), 3):
        number, why, what = refused[start : start + 3]
        place = order[int(number)]
        refusals[place] = refusal(group[place], Why(why), what)
    return refusals
