"""The interface of a store: a few small protocols, and the promises behind them.

Everything that must not be lost goes in as *steps*: frozen values, committed in groups. A step says what is so, not
how to get there, so a step that arrives twice (the first answer was lost, or came too late) changes nothing. That
makes it safe to hold steps while the store fails and to write them afterwards, in order.

The promises; the contract suite in `perdure.testing` carries the same numbers.

1. **Atomic.** `commit` applies all its steps or none. What one `Append` carries (events, ends of calls, the seal) is
   seen together or not at all.
2. **Fenced.** An `Append`, a `PutCall` and a `Release` show a fence. Such a step is refused (`StaleFence` at its place
   in the result), and the others are not touched, if another writer has claimed the stream since, or if it is sealed or
   let go of: then this writer may write nothing more. An `Append` is refused as `Behind` if the stream is still this
   writer's and its events would leave a hole, or if there is no such stream: then the store has lost what it had
   (below).
3. **Durable.** What `commit` returned without error survives the death of this process; the backend's own page says
   what else it survives.
4. **Ordered.** `read` gives each retained event after a sequence number once, in order. Numbers of one stream rise by
   one. What is missing between two of them was trimmed or lost: the reader sees the gap in the numbers. No number ever
   names another event than before.
5. **Repeatable.** Committing again what was committed last, in the same order, changes nothing: events are known by
   their numbers, an ended call keeps its first end. (A revision may rise by it.)
6. **Generations.** `claim` durably raises a stream's generation before its new writer appends, and records where the
   previous generation ended, so that an old position never names a new event. Of several claims at once, one succeeds.
   A generation that the claimer knows of does not come again, although the store may have lost it.
   No fence is given twice, by `join` or by `claim`, not even by a store that has lost what it gave out last (a replica
   that lagged): a counter does not do, 40 random bits do (`_core.ids.new_fence`). Fences are compared for equality and
   fit 63 bits; nothing orders them, because the generation tells which claim is later.
7. **Answers last.** `Trim` never removes a final answer; only `DropStream`, `EndSession` and `sweep` do.
8. **Only a hint.** A wake-up may be lost, late or needless; `read` tells the truth.
9. **Failure is named.** A backend's own exceptions leave as `StoreError`, with their cause kept.
10. **Once each.** Mail stays until a `MailReceived` step takes it away, in one commit with what came of it; mail of a
    dead node goes to the node that buries it. So whatever a message causes in the store happens once. A node's messages
    become visible in the order of their keys, however many nodes post to it at once: behind a message that was read no
    other one appears in front of it, which `MailReceived` would take away unread. No key comes again, not even after
    the store has lost some: it is at least the time in microseconds (`next_key`).
11. **Dead is dead.** `Liveness.dead` names only nodes that write nothing more under any claim that they held, or whose
    claims the fences take away before another node acts on them. A node that has beaten since it was found dead is not
    buried. A node whose claim ran out goes on with its next beat, unless it is buried; if it is, it knows by then.
12. **One of each.** No two calls of a session's incarnation run under one id: the second `OpenStream` is refused
    (`IdTaken`), in whatever process it is made. A stream of a session that has ended, or is not there, is not opened
    (`SessionEnded`). Of several writers that open a `unique` stream of one id, one succeeds; none, once it is sealed.
13. **Notes.** Of several changes of a note that begin from the same state, one succeeds, in whatever process; what it
    wrote is durable (3). A note of a session is deleted when the session ends, and none is written afterwards.
14. **Exact limits.** A `PutSession` or `OpenStream` that carries a limit is refused (`TooManySessions`, `TooManyCalls`)
    where it would go beyond, however many processes commit at once. Of sessions that have ended the store keeps a
    bounded number of small records: `_core.retention` has the numbers, and the oldest go first.
15. **Holders are known.** A living node that has said that it holds steps is named by every other node's
    `Liveness.holders`, from the moment that `hold` returns until it says that it holds nothing more. That needs no
    write: what it says is that writing fails. A dead node is named until it is buried, at the longest.
16. **Forwarded in order.** Messages that a node forwards to a stream belong to the stream, whichever node writes it.
    They wait in the order of their commits; those of one sender are numbered, each number is taken once, and none
    before the one in front of it. An `Append` takes them away in one step with their events, so each is appended once.
17. **In use, it stays.** No time that has passed ends a session that a node which is not buried uses: as its home, as
    the writer of a call that has not ended, or as the node of a reader. `sweep`, `longest_dormant` and an `EndSession`
    with `unused_since` leave it alone.
18. **One clock.** `clock` tells all nodes that live at the same time the same time, nearly, and does not jump, whatever
    their wall clocks do. A node that finds no other one has nothing but its wall clock to begin with.
19. **Read this far.** How far a stream's readers have got only moves forward, and never beyond what was appended in the
    generation in which they read it: an event that took the number of a lost one counts as unread.
20. **Within its time.** A call answers, or raises `StoreUnavailable`, before the store has been stuck in it for its
    limit. Time in which the store works on other calls, or in which this process is late, does not count
    (`store.time_limit`).
21. **As it was seen.** An `OpenStream` that carries a revision is refused (`StaleRecord`) if the session's record has
    another one. Whatever changes a record raises its revision; a change of `active` alone does not. A store whose stamp
    never says that nothing was written refuses it also while messages wait for the session's standalone stream and the
    opener is that stream's writer: it appends them first.
22. **A call is not a session.** Records have a kind. Those of one kind are counted, limited and given up apart from
    those of the others, and a record that is no session's leaves nothing when it ends. The limit of a caller's single
    calls is kept nearly: those that are committed at the same moment may not count each other.

**A store that has lost its tail.** A server that crashed without waiting for its disk, a replica that lagged when it
was promoted, or a file that was put back from a copy comes back with an earlier state of everything, whatever promise 3
says. What was written last is gone, and no call may wait for it: the writer of a stream learns from `Behind` how far
the store is, and repeats the append with `lost`. The store then takes it with the hole, so that numbers go on and
readers are told of the gap. Where the whole stream is gone its writer opens it again first, with its calls. So a store
need not know of its loss. It only must not give out again what it gave out in the part that it has lost: fences (6),
and the keys of mail and of forwarded messages (10). Generations are known to the processes that live. Where none does,
a backup is marked, or the operator says that the store was put back (`store.maintenance`), and some generations are
skipped.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from perdure._core.ids import Fence, Generation, NodeId, RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.leases import Claim
from perdure._core.retention import Cutoffs
from perdure._core.states import CallState, SessionState
from perdure.store.records import (
    AskRecord,
    CallRecord,
    CallSnapshot,
    Event,
    Extent,
    Followed,
    Forwarded,
    Loaded,
    Mail,
    Measures,
    NodeRecord,
    OpenCall,
    Outline,
    Overview,
    ReaderRecord,
    SessionRecord,
    StreamRecord,
    Survey,
    Usage,
    UsageRecord,
)
from perdure.store.steps import Refusals, Step

T = TypeVar("T", bound=tuple[Any, ...])


HintListener = Callable[[Sequence[StreamId]], None]
"""Called in the event loop with the streams to read again; with none, read all that you follow and your mail."""


class Liveness(Protocol):
    """One node's view of which nodes are alive, itself included.

    `_core.leases` decides what follows from beats and locks; a store has to bring the facts. A store that finds dead
    processes by locks sooner than by their leases commits nothing for a node that it does not know, because the lock of
    a process that lives may be lost: the claim is BURIED then, and the commit raises `StoreUnavailable`.
    """

    @property
    def node_claim(self) -> Claim:
        """This node's own claim, one object for as long as the view lives. Read with each commit and each event,
        without asking the store. FROZEN: the node writes and shows nothing. BURIED: it never will again."""

    async def beat(self, facts: bytes) -> None:
        """Show that this node is alive, and what it has to tell of itself. Its claim is HOLDING behind that if the
        store knows the node, whatever it was before, and BURIED if it does not (11). A store in which the claim of a
        process that lives never runs out need not write what it was told before."""

    async def overview(self, *, mail_after: int) -> Overview:
        """All that a node looks at in each of its rounds. A store that answers over a network reads it in one go."""

    def hold(self, holding: bool) -> None:
        """Say that this node shows what is not in the store, or that all of it is written (15). Never waits or fails.

        A store that machines share says it by its own means, as long as this node's claims hold: a word to its
        neighbours, or a flag in a service beside the log.
        """

    async def holders(self) -> Sequence[NodeId]:
        """The other nodes that have said so and live (15). Asked before something is denied that the store lacks."""

    def ages(self) -> dict[NodeId, float]:
        """Seconds since each node was last known to be alive, as far as this one has seen; itself included."""


class Store(Protocol):
    """A store. Open it with `async with`, or call `open` and `aclose`. A class that derives from `Store` writes the
    methods of the first parts. Those of the last part follow from them; a store overrides what it can do better."""

    shared: bool
    """Several processes may open it at once."""
    lapses: bool
    """The claim of a process that lives may run out, so that other nodes settle its calls."""

    async def open(self) -> None: ...

    async def aclose(self) -> None: ...

    # The log: streams and what is in them

    async def commit(self, steps: Sequence[Step]) -> Refusals:
        """Apply the steps, all or none (1, 2, 3, 5)."""

    async def read(self, stream: StreamId, *, after: int, limit: int) -> Sequence[Event]:
        """The retained events after a sequence number (4), `limit` at the most.

        An answer ends with the event that brings it to `READ_BYTES`. So a short one is not the end of the stream; an
        empty one is."""

    async def streams(self, session: SessionId, *, only_unread: bool = False) -> Sequence[StreamRecord]:
        """A session's streams, the oldest first; or those that count as unread (`Reached`)."""

    async def streams_by_id(self, streams: Sequence[StreamId]) -> Mapping[StreamId, StreamRecord]:
        """Those of the streams that are there, however many are asked for."""

    async def written_by(self, node: NodeId) -> Sequence[StreamRecord]:
        """The streams that a node writes, sealed ones excepted, the oldest first."""

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[Forwarded]:
        """The messages that wait for a stream, after a key, the oldest first, `FORWARDED_AT_ONCE` at most (16)."""

    async def forwarded_to(self, node: NodeId) -> Sequence[StreamRecord]:
        """The streams for which forwarded messages wait, and which a node writes, or none that has joined."""

    async def kept(self, session: SessionId) -> Sequence[UsageRecord]:
        """What is retained of a session's sealed streams, the oldest first."""

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        """Become the stream's writer: a new fence and a new generation (6), the next one and above `known`: a node may
        have seen one that the store has lost.

        `None` if there is no such stream, it is sealed, or its fence is no longer the one that the caller has seen.
        """

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        """The ended generations of a stream, the oldest first (6)."""

    async def sweep(self, cutoffs: Cutoffs) -> int:
        """Forget what has expired; gives the number of rows. Never long at a time in the way of `commit`."""

    # Sessions, their calls, asks and readers

    async def session(self, session: SessionId) -> SessionRecord | None: ...

    async def sessions(self, *, after: SessionId | None, limit: int) -> Sequence[SessionRecord]:
        """Sessions by id, a page at a time."""

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        """Begin an incarnation: the record with the next number. `None` if it is not there or has ended."""

    async def count_states(self, kind: RecordKind = RecordKind.SESSION) -> Mapping[SessionState, int]:
        """How many records of a kind are in each state; those without any may be missing."""

    async def longest_dormant(
        self,
        owner: str | None = None,
        address: str = "",
        *,
        kind: RecordKind = RecordKind.SESSION,
        delivered: bool = False,
    ) -> SessionRecord | None:
        """The one without activity for longest, of one caller or of all: of those of a kind that are dormant and in no
        use (17). `delivered`: of one caller's, only those without a stream that counts as unread (`Reached`)."""

    async def count_of(self, owner: str, address: str, *, kind: RecordKind) -> int:
        """How many records of a kind one caller has that have not ended."""

    async def bytes_of(self, owner: str, address: str) -> int:
        """Bytes of what is kept of one caller's durable calls that have ended, nearly: answers, and what their clients
        said of themselves."""

    async def calls(
        self, session: SessionId, *, stream: StreamId | None = None, only_open: bool = False
    ) -> Sequence[CallRecord]:
        """A session's rows that are retained, the oldest first; of one stream, or of those that have not ended."""

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        """A session's open asks, the oldest first."""

    async def reader(self, stream: StreamId) -> ReaderRecord | None: ...

    # Notes (13)

    async def notes(self, prefix: str) -> Mapping[str, bytes]:
        """The notes whose names begin so."""

    async def change_note(self, name: str, *, seen: bytes | None, value: bytes | None, session: str = "") -> bool:
        """Write a note, or delete it (`None`), if its value is still the one that was seen (`None`: there is none).

        `session`: the session that a new note belongs to, and ends with. `False` if it has ended, or the note is not as
        it was seen."""

    # Nodes

    async def join(self, node: NodeId) -> Fence:
        """Enter as a node: gives the fence under which it opens streams. No two nodes ever get the same."""

    async def leave(self, node: NodeId) -> None:
        """The node stops: dead from now on, to be buried by another (at once, if it left nothing behind)."""

    def clock(self) -> float:
        """The store's time (18), for a node that has joined: seconds since 1970, by the wall clock of the node that
        joined when no other one was there."""

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> Liveness:
        """The view of a node that has joined: by locks for stores of one machine, else by leases."""

    async def nodes(self) -> Sequence[NodeRecord]: ...

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        """Forget a dead node: its mail goes to the heir, its readers go. Gives the streams that they read; none for a
        node that is not there any more.

        Whatever it wrote (`written_by`) has been claimed, or let go of, before. `beat` is the node's, read before it
        was found dead: `None` is given, and nothing was done, if it has another one by now (11).
        """

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[Mail]:
        """A node's messages that it has not dealt with yet, after a key, the oldest first, `MAIL_AT_ONCE` at most."""

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        """Call `listener` when other nodes hint at something for this one, and now and then when something was written
        (8). Gives the way to stop."""

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        """Tell a node to look at streams again: they have grown, or another reader is there. Never waits or fails."""

    # Follows from the others

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        """`commit`, if it can be done at once, without waiting; else `None`, and nothing was done."""
        return None

    def stamp(self) -> object:
        """Equal values mean that no other process has written anything between the two moments.

        So what was read then is still so. A store that cannot tell without waiting gives a new value each time: then
        what only looks at a session reads its record again, and a new call shows the revision that it has seen (21).
        """
        return object()

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        """Those of some streams that are there, each with its retained events after a number, `limit` of each at the
        most. A store that answers over a network reads it in one go."""
        return {stream: Followed(record) for stream, record in (await self.streams_by_id(list(after))).items()}

    async def load(self, session: SessionId) -> Loaded | None:
        """A session, and what a node needs of its streams to serve it. A store that answers over a network reads it in
        one go."""
        record = await self.session(session)
        return None if record is None else Loaded(record, await stream_by_id(self, record.standalone))

    async def single_call(self, session: SessionId, *, recent: int) -> CallSnapshot | None:
        """A record and its one call, with its asks and so many of its newest events; once it has ended, with its answer
        alone. Events of more than `READ_BYTES` may be left out. Of a session, the record alone. A store that answers
        over a network reads it in one go."""
        record = await self.session(session)
        calls = await self.calls(session) if record is not None and record.kind is RecordKind.CALL else []
        if record is None or not calls:
            return None if record is None else CallSnapshot(record, None)
        call = calls[0]
        stream = await stream_by_id(self, call.stream)
        last = 0 if stream is None else stream.last
        over = call.state not in (CallState.RUNNING, CallState.WAITING)
        newest = await self.read(call.stream, after=max(0, last - (1 if over else recent)), limit=recent)
        if over and not newest and not await self.calls(session):
            return CallSnapshot(record, None)  # it was given up between two of these reads
        return CallSnapshot(record, call, newest, () if over else await self.asks(session))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Inspect(Store, Protocol):
    """A store that operators can look at while servers use it."""

    async def usage(self, sessions: Sequence[SessionId]) -> Mapping[SessionId, Usage]:
        """How sessions that have streams are used."""

    async def newest(self, *, limit: int, prefix: str = "") -> Sequence[Outline]:
        """The sessions and calls that were active last, in short, the last one first; at most `limit` of those whose
        ids begin with a prefix."""

    async def open_calls(self, *, limit: int) -> Sequence[OpenCall]:
        """The calls of all sessions that have not ended, by the id of the session, `limit` at the most."""

    async def extent(self) -> Extent:
        """How much there is, by a look that takes a fraction of a second however much that is."""


async def paged(read: Callable[[int], Awaitable[Sequence[T]]]) -> AsyncIterator[T]:
    """Return all that a store gives page by page; `read` gives the page behind a number, which each item has first."""
    after = 0
    while page := await read(after):
        for item in page:
            yield item
        after = page[-1][0]


def measures_of(store: object) -> Measures | None:
    """Return what a store has counted, or `None` if it has no method `measures`, which never waits."""
    measures: Callable[[], Measures] | None = getattr(store, "measures", None)
    return None if measures is None else measures()


async def survey_of(store: object) -> Survey | None:
    """Return what a store knows of its size, or `None` if it has no method `survey`. Called with each scrape; what is
    costly to find out may be some time old."""
    survey: Callable[[], Awaitable[Survey]] | None = getattr(store, "survey", None)
    return None if survey is None else await survey()


async def stream_by_id(store: Store, stream: StreamId) -> StreamRecord | None:
    """Return one stream, or `None` if it is not there."""
    return (await store.streams_by_id((stream,))).get(stream)


async def open_call(store: Store, session: SessionId, *, incarnation: int, request_id: int | str) -> CallRecord | None:
    """Return the call that has not ended under an id, as `coerce_id` compares ids."""
    key = incarnation, coerce_id(request_id)
    calls = await store.calls(session, only_open=True)
    return next((call for call in calls if (call.incarnation, coerce_id(call.request_id)) == key), None)
