"""Promises 8, 10, 11 and 15: hints, mail, which nodes are dead, and which hold what is not written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from perdure._core.ids import NodeId, StreamId
from perdure.errors import MailFull, NodeGone
from perdure.store import base
from perdure.testing._case import Case, accepted, refused, same
from perdure.testing._values import (
    NODE,
    OTHER,
    SESSION,
    STREAM,
    a_reader,
    a_session,
    a_stream,
    an_append,
    messages,
    numbers,
    put,
    some_events,
)

THIRD = NodeId("third")
LEASE = 15.0


class Clock:
    """A monotonic clock that stands still until a check sets it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def promise_8_reading_tells_the_truth_with_and_without_a_listener(case: Case) -> None:
    await case.open_stream()
    stop = case.store.subscribe(NODE, lambda streams: None)
    await case.put(an_append(case.fence, some_events(1, 1)))
    same("events while listening", await numbers(case.store), [1])
    stop()
    stop()
    await case.put(an_append(case.fence, some_events(2, 2)))
    same("events without", await numbers(case.store), [1, 2])


async def promise_8_a_hint_reaches_the_node_that_it_is_for(case: Case) -> None:
    """By name, or as the word that something was written: then all is looked at."""
    async with case.elsewhere() as elsewhere:
        await elsewhere.join(OTHER)
        told: asyncio.Queue[Sequence[StreamId]] = asyncio.Queue()
        stop = elsewhere.subscribe(OTHER, told.put_nowait)
        case.store.hint(OTHER, [StreamId("grown"), STREAM])
        await _told(told, case.patience, "grown")
        await case.accept(base.SendMail(node=OTHER, message=b"look"))
        await _told(told, case.patience)
        stop()
        case.store.hint(OTHER, [STREAM])
        case.store.hint(NodeId("unknown"), [STREAM])
        same("mail", await messages(elsewhere, OTHER), [b"look"])


async def _told(queue: asyncio.Queue[Sequence[StreamId]], patience: float, name: str | None = None) -> None:
    """Wait for a hint at a stream, or at everything."""
    try:
        async with asyncio.timeout(patience):
            while (streams := await queue.get()) and name not in streams:
                pass
    except TimeoutError:
        raise AssertionError(f"no hint at {name or 'the mail'} came within {patience} seconds") from None


async def equal_stamps_mean_that_no_other_process_has_written(case: Case) -> None:
    await case.put(base.PutSession(record=a_session()))
    async with case.elsewhere() as elsewhere:
        for number in range(3):
            before = case.store.stamp()
            accepted(await put(elsewhere, base.ChangeSession(session=SESSION, active=float(number))))
            if case.store.stamp() == before:
                raise AssertionError(f"the stamp {before!r} stayed, though another process has written")
            before = case.store.stamp()
            await elsewhere.reattach(SESSION)
            if case.store.stamp() == before:
                raise AssertionError(f"the stamp {before!r} stayed, though another process has begun an incarnation")


async def promise_10_mail_stays_until_it_was_received(case: Case) -> None:
    await case.store.join(OTHER)
    await case.put(*(base.SendMail(node=NODE, message=b"%d" % number) for number in range(5)))
    await case.put(base.SendMail(node=OTHER, message=b"theirs"))
    await case.reopen()
    mail = list(await case.store.mail(NODE))
    same("mail", [message for _, message in mail], [b"0", b"1", b"2", b"3", b"4"])
    same("keys in order", [key for key, _ in mail], sorted({key for key, _ in mail}))
    same("mail read before", list(await case.store.mail(NODE)), mail)
    for _ in range(2):
        await case.put(base.MailReceived(node=NODE, through=mail[2].key))
        same("mail that was not received", list(await case.store.mail(NODE)), mail[3:])
    await case.put(base.SendMail(node=NODE, message=b"late"), base.MailReceived(node=NODE, through=mail[4].key))
    same("mail that came meanwhile", await messages(case.store), [b"late"])
    same("the other's mail", await messages(case.store, OTHER), [b"theirs"])
    same("mail of an unknown node", list(await case.store.mail(NodeId("unknown"))), [])


async def promise_10_mail_is_read_a_page_at_a_time_and_has_a_limit(case: Case) -> None:
    await case.store.join(OTHER)
    posts = [base.SendMail(node=NODE, message=b"%d" % number) for number in range(base.MAX_MAIL + 100)]
    # Many commits: one of so many steps may take a store longer than one operation may.
    refusals: list[base.StepRefusal | None] = []
    for start in range(0, len(posts), 500):
        refusals += await case.put(*posts[start : start + 500])
    same("messages that were taken", [refusal is None for refusal in refusals], [True] * base.MAX_MAIL + [False] * 100)
    same("why the others were not", {type(refusal) for refusal in refusals[base.MAX_MAIL :]}, {MailFull})
    await case.accept(base.SendMail(node=OTHER, message=b"theirs"))
    page = list(await case.store.mail(NODE))
    same("the first page", [message for _, message in page], [b"%d" % number for number in range(base.MAIL_AT_ONCE)])
    (after, _), *_ = await case.store.mail(NODE, after=page[-1].key)
    same("the next page begins later", after > page[-1].key, True)
    await case.put(base.MailReceived(node=NODE, through=page[-1].key + base.MAX_MAIL * 2))
    await case.accept(*posts[:64])


async def promise_10_mail_is_received_together_with_what_came_of_it_or_not_at_all(case: Case) -> None:
    await case.open_stream()
    await case.put(base.SendMail(node=NODE, message=b"say it"))
    (mail,) = await case.store.mail(NODE)
    done = (an_append(case.fence, some_events(1, 1)), base.MailReceived(node=NODE, through=mail.key))
    for _ in range(2):
        await case.accept(*done)
        same("mail", await messages(case.store), [])
        same("events", await numbers(case.store), [1])


async def promise_10_a_message_for_an_unknown_node_is_refused_and_its_neighbours_are_not(case: Case) -> None:
    await case.open_stream()
    refusals = await case.put(
        an_append(case.fence, some_events(1, 1)),
        base.SendMail(node=NodeId("unknown"), message=b"lost"),
        base.SendMail(node=NODE, message=b"found"),
    )
    refused(refusals, 1, why=NodeGone)
    same("events", await numbers(case.store), [1])
    same("mail", await messages(case.store), [b"found"])


async def promise_10_the_heir_gets_the_mail_of_the_node_it_buries(case: Case) -> None:
    await case.store.join(OTHER)
    for number in range(3):
        await case.put(base.SendMail(node=OTHER, message=b"theirs %d" % number))
        await case.put(base.SendMail(node=NODE, message=b"ours %d" % number))
    ours = list(await case.store.mail(NODE))
    await case.store.leave(OTHER)
    await case.store.bury(OTHER, heir=NODE)
    inherited = [message for message in await messages(case.store) if message.startswith(b"theirs")]
    same("mail of the node that was buried", inherited, [b"theirs 0", b"theirs 1", b"theirs 2"])
    await case.put(base.MailReceived(node=NODE, through=ours[-1].key))
    same("mail that the heir had not seen", await messages(case.store), inherited)
    refused(await case.put(base.SendMail(node=OTHER, message=b"late")), 0, why=NodeGone)
    same("nodes", [node.id for node in await case.store.nodes()], [NODE])
    await case.store.bury(OTHER, heir=NODE)
    same("mail, after another burial", await messages(case.store), inherited)


async def promise_11_a_node_that_lives_is_never_dead(case: Case) -> None:
    clock = Clock()
    async with case.elsewhere() as elsewhere:
        await elsewhere.join(OTHER)
        views = [_view(case.store, NODE, clock), _view(elsewhere, OTHER, clock)]
        for number in range(12):
            for view in views:
                await view.beat(b'{"beat":%d}' % number)
                same("dead nodes", list(await view.dead()), [])
                same("whether the claims hold", view.holds, True)
            clock.now += LEASE / 5
        facts = {node.id: node.facts for node in await case.store.nodes()}
        same("what they told of themselves", facts, dict.fromkeys((NODE, OTHER), b'{"beat":11}'))
        same("nodes of known age", set(views[0].ages()) >= {NODE}, True)
        await elsewhere.leave(OTHER)


async def promise_11_a_node_that_left_is_dead_until_it_is_buried(case: Case) -> None:
    clock = Clock()
    mine = _view(case.store, NODE, clock)
    await case.open_stream("read")
    async with case.elsewhere() as elsewhere:
        fence = await elsewhere.join(OTHER)
        await case.store.join(THIRD)
        theirs, third = _view(elsewhere, OTHER, clock), _view(case.store, THIRD, clock)
        left = a_stream(fence, "left behind", node=OTHER)
        reader = a_reader(stream="read", node=OTHER)
        accepted(await put(elsewhere, base.OpenStream(record=left), base.PutReader(record=reader)))
        for view in (mine, theirs, third):
            await view.beat(b"{}")
        same("dead nodes", list(await mine.dead()), [])
        await elsewhere.leave(OTHER)
        same("dead nodes", list(await mine.dead()), [OTHER])
        same("whether the claims of a node that left hold", theirs.holds, False)
    same("what it wrote", list(await case.store.written_by(OTHER)), [left])
    claimed = await case.store.claim(left.id, node=NODE, held=left.fence)
    same("the stream that was claimed", claimed and replace(claimed, fence=fence, node=OTHER, generation=1), left)
    read = await case.store.bury(OTHER, heir=NODE)
    same("streams that it read", [stream.id for stream in read], ["read"])
    same("their reader", await case.store.reader(StreamId("read")), None)
    same("dead nodes", list(await mine.dead()), [])
    same("nodes", {node.id for node in await case.store.nodes()}, {NODE, THIRD})
    await case.store.leave(THIRD)


async def promise_11_a_node_that_leaves_nothing_behind_is_gone(case: Case) -> None:
    await case.store.join(OTHER)
    await case.store.leave(OTHER)
    same("nodes", [node.id for node in await case.store.nodes()], [NODE])
    same("dead nodes", list(await _view(case.store, NODE, Clock()).dead()), [])
    await case.store.leave(OTHER)


async def promise_15_a_node_that_holds_is_named_until_it_holds_nothing_more(case: Case) -> None:
    clock = Clock()
    mine = _view(case.store, NODE, clock)
    async with case.elsewhere() as elsewhere:
        await elsewhere.join(OTHER)
        theirs = _view(elsewhere, OTHER, clock)
        same("holders, before any node is one", [list(await view.holders()) for view in (mine, theirs)], [[], []])
        for _ in range(2):
            theirs.hold(True)
            same("holders, as another node sees them", list(await mine.holders()), [OTHER])
            same("other holders, as the holder sees them", list(await theirs.holders()), [])
        mine.hold(True)
        same("two holders", [list(await mine.holders()), list(await theirs.holders())], [[OTHER], [NODE]])
        for view in (mine, theirs):
            view.hold(False)
            view.hold(False)
        await _wait_until_none_holds(mine, theirs, patience=case.patience)
        same("dead nodes", list(await mine.dead()), [])
        await elsewhere.leave(OTHER)


async def promise_15_a_node_that_is_gone_holds_nothing(case: Case) -> None:
    clock = Clock()
    mine = _view(case.store, NODE, clock)
    async with case.elsewhere() as elsewhere:
        await elsewhere.join(OTHER)
        theirs = _view(elsewhere, OTHER, clock)
        theirs.hold(True)
        same("holders", list(await mine.holders()), [OTHER])
        await elsewhere.leave(OTHER)
        same("holders, when it has left", list(await mine.holders()), [])
        theirs.hold(True)
        same("holders, whatever a node says that has left", list(await mine.holders()), [])


async def _wait_until_none_holds(*views: base.Liveness, patience: float) -> None:
    """Wait until no node holds anything: a look of another process may be in the way for a moment."""
    try:
        async with asyncio.timeout(patience):
            while any([await view.holders() for view in views]):
                for view in views:
                    await view.dead()  # a round, as each node makes them
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError("a node that holds nothing is still named") from None


def _view(store: base.Store, node: NodeId, clock: Clock) -> base.Liveness:
    return store.liveness(node, lease=LEASE, monotonic=clock)
