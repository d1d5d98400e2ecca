"""The interface of a store: a few small protocols and their promises.

Everything that must not be lost is written as *steps*: frozen values, committed in groups. A step states a fact, so a
step that arrives twice (the first answer was lost or late) changes nothing. A writer may hold steps while the store
fails, and write them afterwards, in order.

The promises; the contract suite in `perdure.testing` carries the same numbers.

1. **Atomic.** `commit` applies all its steps or none. Events, ends of calls, the number of an early
   answer and the seal of one `Append` become visible together.
2. **Fenced.** An `Append`, a `PutCall`, a `PutToolStep` and a `Release` show a fence. Such a step is refused
   (`StaleFence` at its place in the result; the other steps are applied) if another writer has claimed the stream
   since, or if the stream is sealed or released: then this writer may write nothing more. An `Append` is refused as
   `Behind` if the stream is still this writer's and the events would leave a hole, or if the stream does not exist:
   then the store has lost what it had (below).
3. **Durable.** What `commit` returned without error survives the death of this process; the backend's own page says
   what else it survives.
4. **Ordered.** `read` returns each retained event after a sequence number once, in order. Numbers of one stream rise by
   one. A missing number was trimmed or lost, and the reader sees the gap. No number ever names another event than
   before.
5. **Repeatable.** Committing the last commit again, in the same order, changes nothing: events are known by their
   numbers, an ended call keeps its first end. (A revision may rise.)
6. **Generations.** `claim` durably raises a stream's generation before its new writer appends, and records where the
   previous generation ended, so that an old position never names a new event. Of several claims at once, one succeeds.
   A generation that the claimer knows is not used again, although the store may have lost it.
   `join` and `claim` return no fence twice, not even if the store has lost the last ones (a replica that lagged): so
   a fence has 40 random bits and is not counted (`_core.ids.new_fence`). Fences are compared for equality and fit 63
   bits. The generation decides which claim is later.
7. **Answers last.** `Trim` never removes a final answer; only `DropStream`, `EndSession` and `sweep` do.
8. **Only a hint.** A wake-up may be lost, late or needless; `read` decides.
9. **Failure is named.** A backend's own exceptions leave as `StoreError`, with their cause kept.
10. **Once each.** Mail stays until a `MailReceived` step removes it, in one commit with its effects; mail of a dead
    node goes to the node that buries it. So a message has its effects in the store once. A node's messages become
    visible in the order of their keys, however many nodes send at once: no message appears before one that was read,
    because `MailReceived` would remove it unread. No key is used again, not even after the store has lost some: a key
    is at least the time in microseconds (`next_key`).
11. **Dead is dead.** `Overview.dead` names only nodes that write nothing more under any claim that they held, or whose
    claims the fences take away before another node acts on them. A node that has beaten since it was found dead is not
    buried. A node whose claim ran out goes on with its next beat, unless it was buried; then that beat shows it.
12. **One of each.** No two calls of a session's incarnation run under one id: the second `OpenStream` is refused
    (`IdTaken`), in whatever process it is made. A stream of a session that has ended, or does not exist, is not opened
    (`SessionEnded`). Of several writers that open a `unique` stream of one id, one succeeds; none, once it is sealed.
13. **Notes.** Of several changes of a note that begin from the same state, one succeeds, in whatever process; its value
    is durable (3). A note of a session is deleted when the session ends, and none is written afterwards.
14. **Exact limits.** A `PutSession` or `OpenStream` beyond the limit that it carries is refused (`TooManySessions`,
    `TooManyCalls`), however many processes commit at once. The store keeps a bounded number of small records of ended
    sessions (`_core.retention`), and deletes the oldest first.
15. **Holders are known.** `Liveness.holders` of every other node names a living node that holds steps, from the moment
    that `hold(True)` returns until `hold(False)`. This needs no write, because a node holds steps when writing fails. A
    dead node is named until it is buried, at the longest.
16. **Forwarded in order.** Messages that a node forwards to a stream belong to the stream, whichever node writes it.
    They wait in the order of their commits. The messages of one sender are numbered; each number is taken once, and
    after the number before it. An `Append` removes them in one step with their events, so each is appended once.
17. **In use, it stays.** No passing of time ends a session that a node which is not buried uses: as its home, as the
    writer of a call that has not ended, or as the node of a reader. `sweep`, `longest_dormant` and an `EndSession` with
    `unused_since` leave it alone.
18. **One clock.** `clock` returns nearly the same time on all nodes that live at the same time, and does not jump,
    whatever their wall clocks do. A node that finds no other one starts with its wall clock.
19. **Read this far.** The number that a stream's readers have reached only rises, and never beyond what was appended in
    the generation in which they read: an event that took the number of a lost one counts as unread.
20. **Within its time.** A call answers, or raises `StoreUnavailable`, before the store has been stuck in it for its
    limit. Time in which the store works on other calls, or in which this process is late, does not count
    (`store.time_limit`).
21. **As it was seen.** An `OpenStream` that carries a revision is refused (`StaleRecord`) if the session's record has
    another one. Every change of a record raises its revision, except a change of `active` alone. A store whose stamp is
    always new refuses it also while messages wait for the session's standalone stream and the opener is that stream's
    writer: it appends them first.
22. **A call is not a session.** Records have a kind. Each kind is counted, limited and given up apart from the others,
    and a record that is no session's leaves nothing when it ends. The limit of a caller's durable calls is kept nearly:
    calls that are committed at the same moment may not count each other.
23. **Steps stay with their call.** A `PutToolStep` shows a fence, and is refused as a `PutCall` is (2), and as
    `Behind` if it names a step of the call that the store has not, or not its end. A tool step that has ended keeps its
    first end. Tool steps are deleted with their stream. A `CallEnd` with `stepped` empties
    their values, and none is put afterwards.

**A store that has lost its tail.** A server that crashed without waiting for its disk, a replica that lagged when it
was promoted, or a file that was restored from a copy comes back with an earlier state, whatever promise 3 says. No call
may wait for what is gone. The writer of a stream learns from `Behind` how far the store is, and repeats the append with
`lost`. The store then accepts the hole, so that numbers go on and readers see the gap. If the whole stream is gone, its
writer first opens it again, with its calls. So a store need not know of its loss. It only must not use again what was
lost: fences (6), and the keys of mail and of forwarded messages (10). The living processes know the generations. If
none lives, a backup is marked, or the operator declares that the store was restored (`store.maintenance`), and some
generations are skipped.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from perdure._core.ids import Fence, Generation, NodeId, RecordKind, SessionId, StreamId
from perdure._core.jsonrpc import coerce_id
from perdure._core.leases import Claim
from perdure._core.limits import Caller
from perdure._core.retention import Cutoffs
from perdure._core.states import UNENDED, SessionState
from perdure.store.records import (
    AnsweredPage,
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
    ToolStepRecord,
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
        """Show that this node is alive, with facts about it. Afterwards its claim is HOLDING if the store knows the
        node, whatever it was before, and BURIED if it does not (11). A store without `lapses` need not write equal
        facts twice."""

    async def overview(self, *, mail_after: int) -> Overview:
        """Return all that a node reads in each of its rounds. A store on a network reads it in one go."""

    def hold(self, holding: bool) -> None:
        """Declare that this node shows events that are not in the store, or that all of them are written (15). Never
        waits or fails. A store that machines share answers its neighbours' questions, for example."""

    async def holders(self) -> Sequence[NodeId]:
        """Return the other living nodes that hold steps (15), before this node denies events that the store lacks."""

    def ages(self) -> dict[NodeId, float]:
        """Seconds since each node was last known to be alive, as far as this one has seen; itself included."""


class Store(Protocol):
    """A store. Open it with `async with`, or call `open` and `aclose`. The methods of the last part follow from the
    others; a store overrides those that it can do better."""

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
        """Return the retained events after a sequence number (4), `limit` at most. An answer ends with the event that
        brings it to `READ_BYTES`, so only an empty answer is the end of the stream."""

    async def streams(self, whose: SessionId | AnsweredPage, *, only_unread: bool = False) -> Sequence[StreamRecord]:
        """Return a session's streams, the oldest first, or those that count as unread (`Reached`); or a page of the
        calls of one caller that were answered before their end."""

    async def follow(self, after: Mapping[StreamId, int], *, limit: int) -> Mapping[StreamId, Followed]:
        """Return those of some streams that exist, however many are asked for, each with its reader and its retained
        events after a number, `limit` of each at most. A store that cannot read them in one go leaves the events
        out."""

    async def written_by(self, node: NodeId, *, forwarded: bool = False) -> Sequence[StreamRecord]:
        """Return the streams that a node writes, sealed ones excepted, the oldest first. `forwarded`: those for which
        messages wait, and among them also those that no node writes that has joined."""

    async def forwarded(self, stream: StreamId, *, after: int = 0) -> Sequence[Forwarded]:
        """The messages that wait for a stream, after a key, the oldest first, `FORWARDED_AT_ONCE` at most (16)."""

    async def kept(self, session: SessionId) -> Sequence[UsageRecord]:
        """What is retained of a session's sealed streams, the oldest first."""

    async def claim(self, stream: StreamId, *, node: NodeId, held: Fence, known: int = 0) -> StreamRecord | None:
        """Become the stream's writer, with a new fence and a new generation (6), above `known`: a node may have seen
        one that the store has lost. Returns `None` if the stream does not exist, is sealed, or has another fence than
        `held`."""

    async def generations(self, stream: StreamId) -> Sequence[Generation]:
        """The ended generations of a stream, the oldest first (6)."""

    async def sweep(self, cutoffs: Cutoffs) -> int:
        """Delete what has expired; returns the number of rows. Never keeps `commit` waiting for long."""

    # Sessions, their calls, asks and readers

    async def session(self, session: SessionId) -> SessionRecord | None: ...

    async def reattach(self, session: SessionId) -> SessionRecord | None:
        """Begin an incarnation: returns the record with the next number, or `None` if the session does not exist or has
        ended."""

    async def count_states(
        self, kind: RecordKind = RecordKind.SESSION, caller: Caller | None = None
    ) -> Mapping[SessionState, int]:
        """Return how many records of a kind are in each state; of one caller only those that have not ended. A state
        without any may be missing."""

    async def longest_dormant(
        self, caller: Caller | None = None, *, kind: RecordKind = RecordKind.SESSION, delivered: bool = False
    ) -> SessionRecord | None:
        """Return the dormant record of a kind, in no use (17), that was inactive for longest, of one caller or of all.
        `delivered`: of one caller's, only those without a stream that counts as unread (`Reached`)."""

    async def newest_of(self, caller: Caller, *, kind: RecordKind, limit: int) -> Sequence[SessionRecord]:
        """Return the records of a kind of one caller that were active last and have not ended, the last one first; of
        durable calls only those that their client can ask for."""

    async def bytes_of(self, caller: Caller) -> int:
        """Return the bytes kept of one caller's ended durable calls, nearly: answers and `client_params`."""

    async def calls(
        self, session: SessionId, *, stream: StreamId | None = None, only_open: bool = False
    ) -> Sequence[CallRecord]:
        """Return a session's retained rows, the oldest first; those of one stream, or those that have not ended."""

    async def tool_steps(self, stream: StreamId, *, values: bool = True) -> Sequence[ToolStepRecord]:
        """The tool steps of a stream's calls, by their numbers (23). Not `values`: they are left out, because they may
        be large."""

    async def asks(self, session: SessionId) -> Sequence[AskRecord]:
        """A session's open asks, the oldest first."""

    # Notes (13)

    async def notes(self, prefix: str) -> Mapping[str, bytes]:
        """The notes whose names begin so."""

    async def change_note(self, name: str, *, seen: bytes | None, value: bytes | None, session: str = "") -> bool:
        """Write a note, or delete it (`None`), if its value is still `seen` (`None`: it does not exist). `session`: the
        session of a new note, which ends with it. Returns `False` if the session has ended or the value is another."""

    # Nodes

    async def join(self, node: NodeId) -> Fence:
        """Enter as a node; returns the fence under which it opens streams, which no other node ever gets."""

    async def leave(self, node: NodeId) -> None:
        """The node stops: it is dead from now on, and another node buries it (at once, if it left nothing)."""

    def clock(self) -> float:
        """Return the store's time (18), for a node that has joined, in seconds since 1970."""

    def liveness(self, node: NodeId, *, lease: float, monotonic: Callable[[], float]) -> Liveness:
        """The view of a node that has joined: by locks for stores of one machine, else by leases."""

    async def nodes(self) -> Sequence[NodeRecord]: ...

    async def bury(self, node: NodeId, *, heir: NodeId, beat: int | None = None) -> Sequence[StreamRecord] | None:
        """Delete a dead node and its readers; its mail goes to the heir. Returns the streams that they read; none for a
        node that does not exist. Its streams (`written_by`) were claimed or released before. `beat` is the node's, read
        before it was found dead: if it has another one by now, nothing is done, and `None` is returned (11)."""

    async def mail(self, node: NodeId, *, after: int = 0) -> Sequence[Mail]:
        """Return the messages that wait for a node, after a key, the oldest first, `MAIL_AT_ONCE` at most."""

    def subscribe(self, node: NodeId, listener: HintListener) -> Callable[[], None]:
        """Call `listener` when other nodes hint to this one, and now and then when something was written (8). Returns
        the function that stops it."""

    def hint(self, node: NodeId, streams: Sequence[StreamId]) -> None:
        """Notify a node to read streams again: they have grown, or have another reader. Never waits or fails."""

    # Follows from the others

    def commit_now(self, steps: Sequence[Step]) -> Refusals | None:
        """Commit without waiting, if that is possible; else nothing is done, and `None` is returned."""
        return None

    def stamp(self) -> object:
        """Return a value; two equal values mean that no other process has written anything between the two moments. A
        store that cannot know without waiting returns a new value each time: then a session's record is read again, and
        a new call shows the revision that it has seen (21)."""
        return object()

    async def load(self, session: SessionId) -> Loaded | None:
        """Return a session with its standalone stream. A store on a network reads it in one go."""
        record = await self.session(session)
        return None if record is None else Loaded(record, await stream_by_id(self, record.standalone))

    async def durable_call(self, session: SessionId, *, recent: int) -> CallSnapshot | None:
        """Return a record and its one call, with its asks and `recent` newest events; an ended one with its answer
        alone. Events beyond `READ_BYTES` may be left out. Of a session, the record alone. A store on a network reads it
        in one go."""
        record = await self.session(session)
        calls = await self.calls(session) if record is not None and record.kind is RecordKind.CALL else []
        if record is None or not calls:
            return None if record is None else CallSnapshot(record, None)
        call = calls[0]
        stream = await stream_by_id(self, call.stream)
        last = 0 if stream is None else stream.last
        over = call.state not in UNENDED
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

    async def usage(self, sessions: Sequence[SessionId]) -> Mapping[SessionId, tuple[SessionRecord, Usage]]:
        """Return those of the sessions that exist, and how each is used."""

    async def newest(self, *, limit: int, prefix: str = "") -> Sequence[Outline]:
        """Return the sessions and calls that were active last, the last one first; at most `limit` of those whose ids
        begin with a prefix."""

    async def open_calls(self, *, limit: int) -> Sequence[OpenCall]:
        """The calls of all sessions that have not ended, by the id of the session, `limit` at the most."""

    async def extent(self) -> Extent:
        """Return how much the store holds, within a fraction of a second however much that is."""


async def paged(read: Callable[[int], Awaitable[Sequence[T]]]) -> AsyncIterator[T]:
    """Yield all that a store returns page by page; `read` returns the page after a number, the first of each item."""
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


async def streams_by_id(store: Store, streams: Iterable[StreamId]) -> dict[StreamId, StreamRecord]:
    """Return the records of those streams that exist."""
    found = await store.follow(dict.fromkeys(streams, 0), limit=0)
    return {stream: followed.record for stream, followed in found.items()}


async def stream_by_id(store: Store, stream: StreamId) -> StreamRecord | None:
    return (await streams_by_id(store, (stream,))).get(stream)


async def reader_of(store: Store, stream: StreamId) -> ReaderRecord | None:
    followed = (await store.follow({stream: 0}, limit=0)).get(stream)
    return None if followed is None else followed.reader


async def open_call(store: Store, session: SessionId, *, incarnation: int, request_id: int | str) -> CallRecord | None:
    """Return the call that has not ended under an id, as `coerce_id` compares ids."""
    key = incarnation, coerce_id(request_id)
    calls = await store.calls(session, only_open=True)
    return next((call for call in calls if (call.incarnation, coerce_id(call.request_id)) == key), None)
